"""Rings of a prefill file that compiled kernels overwrite: one buffer each, and the same logits."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import onnx.parser
import pytest

from localattn.core.documents.step_record import CacheRecord
from localattn.core.errors import UsageError
from localattn.exporter.export import ExportRequest
from localattn.runtime.backends.onnxruntime.prefill_file import overwritten
from localattn.runtime.generation.generator import Generator

from ....support.models.hugging_face import STEPS, build
from ....support.native.cpu_build import library
from ....support.steps import export_steps

GRAPH = """
<ir_version: 9, opset_import: ["" : 17, "localattn" : 1]>
model (float[1] own, float[1] shared, float[1] looked_at, float[1] mask)
    => (float[1] next_own, float[1] next_shared, float[1] next_looked_at, float[1] next_mask, float[1] seen) {
    a, next_own = localattn.GroupedWindowedAttentionChunk(own)
    b, next_shared = localattn.GroupedWindowedAttentionChunk(shared)
    c, unused = localattn.GroupedWindowedAttentionChunk(shared)
    d, next_looked_at = localattn.WindowedAttentionChunk(looked_at)
    seen = Neg(looked_at)
    next_mask = Neg(mask)
}
"""


def test_what_another_node_reads_is_kept() -> None:
    model = onnx.parser.parse_model(GRAPH)
    names = ("own", "shared", "looked_at", "mask")
    caches = [CacheRecord(input=name, output=f"next_{name}", dtype="float32", shape=[1]) for name in names]
    assert overwritten(model, caches) == {"own"}


@pytest.fixture(scope="module")
def step_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 for two sequences, whose prompts may be padded: rings of both kinds, and masks."""
    pytest.importorskip("transformers")
    from localattn.exporter.options import ShapeRequest

    folder = tmp_path_factory.mktemp("rings")
    case = next(case for case in STEPS if case.name == "gemma3_text")
    build(case, max_position_embeddings=256).save_pretrained(folder / "saved")
    path = folder / "model_step.onnx"
    export_steps(ExportRequest(folder / "saved", path, shapes=ShapeRequest(batch=2)), chunk=24)
    return path


def test_rings_are_one_buffer_and_masks_are_two(step_file: Path) -> None:
    ids = np.random.default_rng(0).integers(5, 60, (2, 150))
    mask = np.ones_like(ids)
    mask[1, :40] = 0
    plain, kernels = (Generator.open(step_file, "cpu", 2, plugin=plugin) for plugin in ("none", library()))
    for _ in range(2):  # the second prompt begins with rings that hold the first
        for generator in (plain, kernels):
            generator.reset()
        expected = plain.prefill(ids, mask).copy()
        np.testing.assert_allclose(kernels.prefill(ids, mask), expected, atol=2e-5)
        for token in range(7, 30):  # token by token, after an odd number of chunks
            expected = plain.step([token, token]).copy()
            np.testing.assert_allclose(kernels.step([token, token]), expected, atol=2e-5)
    for generator, common in ((plain, ()), (kernels, ("key", "value"))):
        banks = generator.session._banks  # type: ignore[attr-defined]
        kinds = [cache.input.split("_")[0] for cache in generator.session.record.caches]
        assert set(kinds) == {"key", "value", "mask"}
        for kind, first, second in zip(kinds, banks[0], banks[1], strict=True):
            assert (first is second) == (kind in common)


def test_a_file_that_is_opened_ahead_is_opened_once(step_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localattn.runtime.backends.onnxruntime import step_session

    opened, own = [], step_session.open_file

    def counted(*arguments: Any, **options: Any) -> Any:
        opened.append(arguments)
        return own(*arguments, **options)

    monkeypatch.setattr(step_session, "open_file", counted)
    generator = Generator.open(step_file, "cpu", 1)
    thread = Thread(target=generator.session.prepare)
    thread.start()
    generator.prefill(np.full((2, 100), 7))
    thread.join()
    assert len(opened) == 2, "the step file and the prefill file"


def test_a_prefill_file_that_does_not_open_is_named_by_the_prompt(
    step_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localattn.runtime.backends.onnxruntime import step_session

    generator = Generator.open(step_file, "cpu", 1)

    def refuse(*_: object, **__: object) -> None:
        raise UsageError("The prefill file is broken.")

    monkeypatch.setattr(step_session, "open_file", refuse)
    for use in (generator.session.prepare, lambda: generator.prefill(np.full((2, 100), 7))):
        with pytest.raises(UsageError, match="is broken"):
            use()
