"""Memory of an export: weights are written one by one, and what a step no longer needs goes back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from localattn.core.machine.resident_memory import release_memory, release_memory_around
from localattn.exporter.artifact import serialize
from localattn.exporter.artifact.serialize import message, write_model
from localattn.exporter.export import ExportRequest, export, open_request
from localattn.exporter.lowering import functions, trace
from localattn.exporter.models.parts import float64
from localattn.onnx_graph import without_weights
from localattn.onnx_graph.without_weights import read_message
from localattn.runtime.backends.onnxruntime.session import open_file

from ...conftest import TINY, save_upstream

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux' /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ir.Model:
    """A traced model of two layers."""
    folder = tmp_path_factory.mktemp("traced")
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", TINY)
    _, source = open_request(ExportRequest(checkpoint, folder / "m.onnx"))
    model = trace.trace(source, "fp32", 20)
    functions.attach_functions(model)
    return model


@pytest.fixture(autouse=True)
def even_small_weights_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialize, "LARGE", 64)
    monkeypatch.setattr(without_weights, "LARGE", 64)


def test_streamed_file_is_the_message_of_onnx_ir(model: ir.Model, tmp_path: Path) -> None:
    path = tmp_path / "streamed.onnx"
    write_model(model, path)
    written, expected = onnx.load(path), ir.serde.serialize_model(model)
    by_name = {tensor.name: tensor for tensor in written.graph.initializer}
    assert len(by_name) == len(expected.graph.initializer)
    for tensor in expected.graph.initializer:
        assert by_name[tensor.name] == tensor
    again = tmp_path / "again.onnx"
    write_model(model, again)
    assert again.read_bytes() == path.read_bytes()
    del written.graph.initializer[:], expected.graph.initializer[:]
    assert written == expected


def test_message_without_weights_tells_their_shapes(model: ir.Model) -> None:
    whole, bare = ir.serde.serialize_model(model), message(model)
    assert {t.name: list(t.dims) for t in bare.graph.initializer} == {
        t.name: list(t.dims) for t in whole.graph.initializer
    }
    weights = sum(len(t.raw_data) for t in whole.graph.initializer if len(t.raw_data) >= 64)
    assert weights > 10_000
    assert bare.ByteSize() < whole.ByteSize() - weights / 2
    assert ir.serde.serialize_model(model) == whole  # the model got its weights back


def test_a_weight_of_the_wrong_length_is_refused(model: ir.Model, tmp_path: Path) -> None:

    class Short(ir.Tensor):  # type: ignore[type-arg]
        def tobytes(self) -> bytes:
            return super().tobytes()[:-1]

    value = max(model.graph.initializers.values(), key=lambda x: x.const_value.nbytes)  # type: ignore[union-attr]
    assert value.const_value is not None
    whole = value.const_value
    value.const_value = Short(whole.numpy(), name=value.name)
    with pytest.raises(ValueError, match="bytes, not"):
        write_model(model, tmp_path / "short.onnx")
    value.const_value = whole


def _resident_of(path: Path) -> int:
    """Bytes of this file that are in the process's memory."""
    total, mine = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if not line.split()[0].endswith(":"):
            mine = line.endswith(str(path))
        elif mine and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@linux
def test_pages_of_the_checkpoint_go_back(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    weights = torch.arange(1 << 20, dtype=torch.float32)
    torch.save({"w": weights}, path)
    mapped = torch.load(path, mmap=True)["w"]
    assert torch.equal(mapped, weights)
    assert _resident_of(path) >= weights.nbytes
    release_memory(path)
    assert _resident_of(path) == 0
    assert torch.equal(mapped, weights)


@linux
def test_weights_that_were_changed_in_memory_stay_changed(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"w": torch.zeros(1 << 16)}, path)
    mapped = torch.load(path, mmap=True)["w"]
    mapped[100] = 7.0
    release_memory(path)
    assert mapped[100] == 7.0


@linux
def test_pages_of_a_file_go_back_by_what_lies_in_them(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.pt" for name in ("first", "second")]
    for path in paths:
        torch.save({"w": torch.arange(1 << 20, dtype=torch.float32)}, path)
    first, second = (torch.load(path, mmap=True)["w"] for path in paths)
    assert first.sum() == second.sum()
    release_memory_around([first.data_ptr()])
    assert _resident_of(paths[0]) == 0
    assert _resident_of(paths[1]) >= second.nbytes
    assert first[-1] == (1 << 20) - 1


@linux
def test_the_reference_leaves_no_page_of_the_weights_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}, path)
    monkeypatch.setattr(float64, "_READ", 6 << 20)
    state = float64.Float64State(torch.load(path, mmap=True))
    assert state["a"].sum() == 1 << 20
    assert _resident_of(path) >= 4 << 20
    assert state["b"].sum() == 1 << 20  # the sixth MiB
    assert _resident_of(path) == 0


def test_weights_that_are_written_are_forgotten(model: ir.Model, tmp_path: Path) -> None:
    copy, whole = model.clone(), message(model)
    serialize.forget_weights(copy)
    bare = message(copy)
    shapes = {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in whole.graph.initializer}
    assert {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in bare.graph.initializer} == shapes
    assert all(not isinstance(v.const_value, ir.ExternalTensor) for v in model.graph.initializers.values())
    assert (
        max(v.const_value.nbytes for v in copy.graph.initializers.values() if isinstance(v.const_value, ir.Tensor)) < 64
    )


@linux
def test_a_lean_session_rests_and_runs_again(tmp_path: Path) -> None:
    """The same bits, from outputs that outlive the session that made them."""
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY)
    request = ExportRequest(checkpoint, tmp_path / "m.onnx")
    report = export(request)
    tokens = {"tokens": np.arange(report.sidecar.seq_len, dtype=np.int64)[None] % TINY["num_tokens"]}
    plain, lean = open_file(report.path, "cpu", plugin="none"), open_file(report.path, "cpu", plugin="none", lean=True)
    first = lean.run(tokens)["logits"]
    lean.rest()
    plain.rest()  # does nothing
    assert first.base is None
    second = lean.run(tokens)["logits"]
    lean.rest()
    lean.wake()
    for other in (second, lean.run(tokens)["logits"], plain.run(tokens)["logits"]):
        np.testing.assert_array_equal(first, other)


_MEASURED = """
import json, sys
from pathlib import Path
from localattn.exporter.export import ExportRequest, export

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

before = status("VmRSS")
export(ExportRequest(Path(sys.argv[1]), Path(sys.argv[2])))
print(json.dumps({"imports": before, "peak": status("VmHWM")}))
"""


@linux
def test_peak_memory_of_an_export_is_few_times_its_weights(tmp_path: Path) -> None:
    """Measured 3.2 times, libraries it loads included; 4.3 before sessions rested and references gave pages back."""
    local_attention = pytest.importorskip("local_attention", reason="needs local-attention")
    sizes = {"num_tokens": 256, "max_seq_len": 128, "dim": 1280, "depth": 3, "local_attn_window_size": 32}
    sizes |= {"causal": True, "heads": 8, "dim_head": 64}
    state = local_attention.LocalTransformer(**sizes).state_dict()
    checkpoint = tmp_path / "model.pt"
    torch.save(state, checkpoint)
    config = {"class": "local_attention.LocalTransformer", "kwargs": sizes, "hyper_connections": "0.4.11"}
    checkpoint.with_suffix(".json").write_text(json.dumps(config), encoding="utf-8")
    weights = sum(tensor.nbytes for tensor in state.values())
    command = [sys.executable, "-c", _MEASURED, str(checkpoint), str(tmp_path / "model.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    multiple = (found["peak"] - found["imports"]) / weights
    assert multiple < 3.7, f"{multiple:.2f} times {weights / 2**20:.0f} MiB"


def test_written_file_without_weights(model: ir.Model, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write_model(model, path)
    assert read_message(path).graph.node == onnx.load(path).graph.node
    assert read_message(path).functions == onnx.load(path).functions
    assert {t.name: list(t.dims) for t in read_message(path).graph.initializer} == {
        t.name: list(t.dims) for t in onnx.load(path).graph.initializer
    }
    assert max(len(t.raw_data) for t in read_message(path).graph.initializer) < 64
