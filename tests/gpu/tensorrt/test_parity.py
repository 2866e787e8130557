"""`parity` of engines against the ONNX file they were built from, on stand-ins that compute with onnxruntime.

What TensorRT itself computes needs a GPU; here is shown that what an engine gives is judged, and how it is told.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from localattn.core.documents.engine_sidecar import BuildOptions, ProfileRecord, read_engine_sidecar
from localattn.core.documents.sidecar import sidecar_path
from localattn.core.storage.files import sha256
from localattn.core.tolerance import tolerance_for
from localattn.exporter.export import ExportRequest, export, open_request
from localattn.exporter.options import ShapeRequest
from localattn.exporter.source.reference_runner import ReferenceRunner
from localattn.runtime.backends.tensorrt.library import open_library
from localattn.runtime.inputs.arrays import random_inputs
from localattn.runtime.parity.compare import compare
from localattn.runtime.parity.runner import open_runner

from ...conftest import TINY, Finished, save_upstream
from ...support.models import step_model
from ...support.models.engine_models import needs_rtx
from ..simulators.engine_stand_in import CHUNK, Bench, as_engine

pytestmark = needs_rtx
Command = Callable[..., Finished]
LENGTH = 37


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    open_library("tensorrt-rtx")
    yield Bench(tmp_path, monkeypatch)
    gc.collect()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", TINY)
    export(ExportRequest(checkpoint, folder / "model.onnx", shapes=ShapeRequest(LENGTH), seeds=(0,)))
    export(ExportRequest(checkpoint, folder / "open.onnx", dynamic=("batch", "seq"), seeds=(0,)))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "files"))


def change_sidecar(engine: Path, **entries: Any) -> None:
    changed = read_engine_sidecar(engine).model_copy(update=entries)
    sidecar_path(engine).write_text(changed.to_json())


def spoil(engine: Path, name: str | None = None) -> None:
    """One number of a weight of this name, or of the largest; as if the builder had made it wrong."""
    proto = onnx.load(engine)
    held = {x.name: x for x in proto.graph.initializer}
    tensor = held[name] if name else max(held.values(), key=lambda x: len(x.raw_data))
    values = numpy_helper.to_array(tensor).copy()
    values.reshape(-1)[0] += 1
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(proto, engine)
    change_sidecar(engine, engine_sha256=sha256(engine), engine_bytes=engine.stat().st_size)


def shown(finished: Finished, code: int = 0) -> dict[str, Any]:
    assert finished.code == code, finished.err + finished.out
    found: dict[str, Any] = json.loads(finished.out)
    return found


def test_an_engine_is_judged_by_its_onnx_file(folder: Path, bench: Bench, localattn: Command) -> None:
    engine = as_engine(folder / "model.onnx")
    other = "model.engine was built from model.onnx, which is not open.onnx"
    for judge, notes in (("model.onnx", []), ("open.onnx", [other])):
        report = shown(localattn("parity", engine, "--against", folder / judge, "--format", "json"))
        assert (report["provider"], report["reference"]["provider"], report["dtype"]) == ("cuda", "cpu", "fp32")
        assert report["reference"]["checked"].startswith(f"{judge} was checked when it was exported: max error")
        assert report["notes"] == notes
        assert report["windows"][0]["length"] == LENGTH and report["sidecar"]["class"].endswith("LocalTransformer")
    spoil(engine)
    finished = localattn("parity", engine, folder / "model.onnx", "--against", folder / "open.onnx", "--seeds", 1)
    flat = " ".join(finished.out.split())
    assert finished.code == 1 and "model.engine and " in flat and "are NOT equal" in flat and "are equal" in flat


def test_an_engine_as_judge_is_not_taken_for_proven(folder: Path, bench: Bench, localattn: Command) -> None:
    engine = as_engine(folder / "model.onnx")
    report = shown(localattn("parity", folder / "open.onnx", "--against", engine, "--seeds", 1, "--format", "json"))
    assert report["reference"] == {
        "kind": "file", "dtype": "fp32", "backend": "tensorrt-rtx", "provider": "cuda", "checked": None
    }  # fmt: skip
    assert any("has no record of a comparison" in line for line in report["notes"])


def test_an_engine_with_fixed_sizes_beside_an_open_file(folder: Path, bench: Bench, localattn: Command) -> None:
    engine = as_engine(folder / "model.onnx")
    report = shown(localattn("parity", engine, "--against", folder / "open.onnx", "--seeds", 1, "--format", "json"))
    assert [row["inputs"] for row in report["comparisons"]] == ["seed 0"]
    assert report["errors"]["logits"]["positions"] == list(range(LENGTH))


def test_sizes_stay_in_the_engines_profile(folder: Path, bench: Bench, localattn: Command) -> None:
    engine = as_engine(folder / "open.onnx")
    profile = ProfileRecord(input="tokens", min=(1, 5), opt=(1, 16), max=(2, 20))
    change_sidecar(engine, options=BuildOptions(plugin="none", profiles=[profile]))
    report = shown(localattn("parity", engine, "--against", folder / "open.onnx", "--seeds", 1, "--format", "json"))
    sizes = [
        tuple(int(part.split("=")[1]) for part in row["inputs"].split(", ")[1].split()) for row in report["comparisons"]
    ]
    assert {length for _, length in sizes} == {5, 6, 7, 8, 9, 11, 12, 13, 19, 20}
    assert {batch for batch, _ in sizes} == {1, 2}
    beyond = localattn("parity", engine, "--against", folder / "open.onnx", "--seq-len", 21)
    assert beyond.code == 2 and "5 to 20" in beyond.err


def test_an_engine_that_was_replaced_is_told(folder: Path, bench: Bench, localattn: Command) -> None:
    engine = as_engine(folder / "model.onnx")
    change_sidecar(engine, engine_sha256="0" * 64)
    finished = localattn("parity", engine, "--against", folder / "model.onnx", "--seeds", 1)
    assert finished.code == 0 and "was changed or replaced without the other" in finished.err
    sidecar_path(engine).unlink()
    assert localattn("parity", engine, "--against", folder / "model.onnx").code == 2


def test_step_engines_are_fed_beside_their_onnx_files(bench: Bench, localattn: Command) -> None:
    engine = bench.write()
    judge = engine.with_suffix(".onnx")
    report = shown(localattn("parity", engine, "--against", judge, "--seeds", 2, "--format", "json"))
    fed = int(next(line for line in report["notes"] if "tokens were fed" in line).split()[0])
    called = [row["inputs"] for row in report["comparisons"]]
    assert called == [f"seed {n}, seq={fed}{how}" for n in (0, 1) for how in ("", f", first {CHUNK} per call")]
    assert report["provider"] == "cuda" and fed > 4 * step_model.WINDOW
    # The step engine alone, then the prefill engine with single tokens after it; twice.
    chunks, singles = fed // CHUNK, fed % CHUNK
    assert len(bench.gpu.calls) == 2 * (fed + chunks + singles) and singles
    prefill = engine.with_name("model_step.prefill.engine")
    assert localattn("parity", prefill, "--against", judge, "--seeds", 1).code == 0


@pytest.mark.parametrize("wrong", ["model_step.engine", "model_step.prefill.engine"])
def test_a_wrong_step_engine_is_found(bench: Bench, wrong: str, localattn: Command) -> None:
    engine = bench.write()
    spoil(engine.with_name(wrong), "W")
    judge = engine.with_suffix(".onnx")
    report = shown(localattn("parity", engine, "--against", judge, "--seeds", 1, "--format", "json"), code=1)
    assert [row["passed"] for row in report["comparisons"]] == [wrong != engine.name, False]


def test_a_step_engine_ends_with_its_positions(bench: Bench, localattn: Command) -> None:
    engine = bench.write(max_positions=10)
    report = shown(localattn("parity", engine, "--against", engine.with_suffix(".onnx"), "--format", "json"))
    assert {row["inputs"].split(", ")[1] for row in report["comparisons"]} == {"seq=10"}
    np.savez(engine.parent / "in.npz", tokens=np.zeros((1, 11), np.int64))
    given = ("--load-inputs", engine.parent / "in.npz")
    finished = localattn("parity", engine, "--against", engine.with_suffix(".onnx"), *given)
    assert finished.code == 2 and "does not accept 11 positions" in finished.err


def test_an_engine_equals_the_float64_reference_around_the_window(folder: Path, bench: Bench) -> None:
    engine = as_engine(folder / "open.onnx")
    source = open_request(ExportRequest(folder / "model.pt", folder / "unused.onnx", dynamic=("batch", "seq")))[1]
    runner, reference = open_runner(engine), ReferenceRunner(source, axes=("batch", "seq"))
    for length in (1, 3, 4, 5, 7, 8, 9, 11, 12, 13, 63, 64):
        inputs = random_inputs(runner.inputs, 0, TINY["num_tokens"], {"batch": 2, "seq": length})
        (comparison,) = compare(runner, reference, inputs, tolerance_for("fp32")).comparisons
        assert comparison.passed and comparison.count == 2 * length * TINY["num_tokens"]
    assert (runner.provider, runner.precision) == ("cuda", "fp32")


def test_an_engine_beside_its_checkpoint(folder: Path, bench: Bench, localattn: Command) -> None:
    engine = as_engine(folder / "model.onnx")
    pair = (engine, folder / "model.onnx", "--against", folder / "model.pt", "--seeds", 1)
    report = shown(localattn("parity", *pair, "--format", "json"))
    assert [file["provider"] for file in report["files"]] == ["cuda", "cpu"]
    spoil(engine)
    assert localattn("parity", *pair).code == 1


@pytest.mark.parametrize("reference", ["model.onnx", "model.pt"])
def test_where_an_engine_does_not_run_is_refused(
    folder: Path, bench: Bench, reference: str, localattn: Command
) -> None:
    pair = (as_engine(folder / "model.onnx"), "--against", folder / reference, "--seeds", 1)
    cpu = localattn("parity", *pair, "--provider", "cpu")
    assert cpu.code == 2 and "cannot run on 'cpu'" in cpu.err
    library = localattn("parity", *pair, "--plugin-library", folder / "kernels.so")
    assert library.code == 2 and "takes no plugin library" in library.err
    for option in (("--provider", "cuda"), ("--plugin", "none")):
        assert localattn("parity", *pair, *option).code == 0


def test_where_a_step_engine_does_not_run_is_refused(bench: Bench, localattn: Command) -> None:
    engine = bench.write()
    pair = (engine, "--against", engine.with_suffix(".onnx"), "--seeds", 1)
    cpu = localattn("parity", *pair, "--provider", "cpu")
    assert cpu.code == 2 and "cannot run on 'cpu'" in cpu.err
    library = localattn("parity", *pair, "--plugin-library", engine.with_name("kernels.so"))
    assert library.code == 2 and "takes no plugin library" in library.err
