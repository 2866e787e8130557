"""Long sequences: the reference at some positions, and the window check of a whole model in two runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from localattn.exporter.checks import window
from localattn.exporter.export import ExportRequest, open_request
from localattn.exporter.lowering import attention_function, functions, trace
from localattn.exporter.options import ShapeRequest
from localattn.exporter.source import reference_runner
from localattn.exporter.source.source_model import SourceModel
from localattn.runtime.backends.onnxruntime.session import open_bytes
from localattn.runtime.inputs.arrays import random_inputs

from ...conftest import TINY, save_upstream

VARIANTS = {
    "causal": {},
    "block_local": {"exact_windowsize": False},
    "non_causal": {"causal": False},
    "xpos": {"use_xpos": True, "num_residual_streams": 1},
    "bias": {"use_dynamic_pos_bias": True},
}


def source_of(folder: Path, length: int, mask: bool = False, **kwargs: object) -> SourceModel:
    made = TINY | {"depth": 3, "max_seq_len": length} | kwargs
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", made)
    return open_request(ExportRequest(checkpoint, folder / "m.onnx", shapes=ShapeRequest(mask=mask)))[1]


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kwargs", VARIANTS.values(), ids=VARIANTS)
def test_the_reference_at_some_positions_equals_the_whole(
    tmp_path: Path, kwargs: dict[str, object], mask: bool
) -> None:
    for length in (61, 64):
        source = source_of(tmp_path, length, mask, **kwargs)
        inputs = random_inputs(source.inputs("fp32"), 1, token_limit=source.token_limit)
        whole = source.reference(inputs)["logits"]
        positions = np.array([0, 1, 2, 9, length // 2, length // 2 + 1, length - 3, length - 1])
        some = source.reference(inputs, positions)["logits"]
        # The published class keeps xpos' scales in fp32; the formula, which computes some positions, does not.
        atol = 1e-7 if kwargs.get("use_xpos") else 1e-12
        np.testing.assert_allclose(some, whole[:, positions], rtol=0, atol=atol)


def test_long_sequences_are_judged_at_edges_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference_runner.sampled_positions(source_of(tmp_path, 2048)) is None
    positions = reference_runner.sampled_positions(source_of(tmp_path, 2050))
    assert positions is not None
    assert {0, 3, 4, 5, 2047, 2048, 2049} <= set(positions.tolist())
    # A model that sees everything from its last position is not cheaper at some positions: all are judged.
    monkeypatch.setattr(reference_runner, "WHOLE_UP_TO", 16)
    assert reference_runner.sampled_positions(source_of(tmp_path, 20)) is None


@pytest.mark.parametrize(("depth", "kwargs"), [(3, {}), (2, {"causal": False}), (3, {"exact_windowsize": False})])
def test_two_runs_find_a_lost_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, kwargs: dict[str, object]
) -> None:
    monkeypatch.setattr(window, "LONG", 32)

    def found() -> object:
        source = source_of(tmp_path, 64, depth=depth, **kwargs)
        model = trace.trace(source, "fp32", 20)
        functions.attach_functions(model)
        session = open_bytes(ir.serde.serialize_model(model).SerializeToString())
        findings = window.Findings()
        sentence = window.check_model_window(session, source, findings, {})
        return findings, sentence

    findings, sentence = found()
    assert findings.boundaries == 3 and not findings.faults
    assert "changed queries" in sentence
    monkeypatch.setattr(attention_function, "HIDDEN_SCORE", 0.0)  # the window is lost
    findings, _ = found()
    assert any("must not" in fault for fault in findings.faults)


@pytest.mark.parametrize("length", [33, 48, 49, 63])
def test_a_long_sequence_need_not_have_two_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(window, "LONG", 32)
    source = source_of(tmp_path, length, local_attn_window_size=40)
    model = trace.trace(source, "fp32", 20)
    functions.attach_functions(model)
    message = ir.serde.serialize_model(model)
    record = window.check_window(message, open_bytes(message.SerializeToString()), source, "fp32")
    assert record.status == ("passed" if length > 41 else "not proven"), record.detail


def test_a_known_run_is_not_repeated(tmp_path: Path) -> None:
    source = source_of(tmp_path, 64)
    session = type("Inputs", (), {"inputs": source.inputs("fp32")})()
    inputs = window._window_inputs(session, source.token_limit)
    known = {"inputs": inputs, "outputs": {"logits": np.zeros(3)}}
    assert window._WholeModel(session, source, known).output is known["outputs"]["logits"]
    with pytest.raises(AttributeError):  # other inputs are run
        window._WholeModel(session, source, {**known, "inputs": {"tokens": inputs["tokens"] + 1}})
