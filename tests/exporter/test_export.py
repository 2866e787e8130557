"""The export pipeline: what it writes, what it checks, and that a fault leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed, MissingDependency, UsageError
from localattn.core.tolerance import Tolerance
from localattn.exporter.artifact import publish
from localattn.exporter.checks.judged import Judged
from localattn.exporter.checks.parity import check_parity
from localattn.exporter.checks.quadratic_memory import SizesInUse, check_quadratic_memory
from localattn.exporter.checks.sweep import check_dynamic_memory
from localattn.exporter.checks.window import check_window
from localattn.exporter.export import ExportRequest, export, open_request
from localattn.exporter.lowering import attention_function, functions, trace
from localattn.exporter.options import ShapeRequest
from localattn.runtime import load
from localattn.runtime.backends.onnxruntime.session import open_bytes
from localattn.runtime.text_inputs.tokens import open_tokens

from ..conftest import TINY, save_upstream
from ..support.models.opsets import when_run

REAL = Path(__file__).resolve().parents[3] / "shared" / "checkpoints" / "pystdlib_w128.pt"
needs_real = pytest.mark.skipif(not REAL.exists(), reason=f"{REAL.name} is not beside this checkout")

MHA = {"dim": 16, "window_size": 4, "dim_head": 8, "heads": 2, "causal": True, "prenorm": True}
ATTENTION = {"window_size": 4, "dim": 8, "causal": False, "autopad": True}


def statuses(checks: list[Any]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("class_name", "kwargs", "shapes", "names"),
    [
        ("local_attention.LocalTransformer", TINY, ShapeRequest(mask=True), ["tokens", "mask"]),
        ("local_attention.LocalTransformer", TINY | {"num_tokens": None}, ShapeRequest(seq_len=19), ["x"]),
        ("local_attention.LocalMHA", MHA, ShapeRequest(21, batch=3, attn_bias=True), ["x", "attn_bias"]),
        (
            "local_attention.LocalAttention",
            ATTENTION,
            ShapeRequest(18, batch=2, heads=3, mask=True, attn_bias=True),
            ["q", "k", "v", "mask", "attn_bias"],
        ),
    ],
)
def test_every_class_passes_its_checks(
    tmp_path: Path, class_name: str, kwargs: dict[str, Any], shapes: ShapeRequest, names: list[str], dtype: str
) -> None:
    checkpoint = save_upstream(tmp_path, class_name, kwargs)
    report = export(ExportRequest(checkpoint, tmp_path / "model.onnx", shapes=shapes, dtype=dtype))
    assert set(statuses(report.sidecar.checks).values()) == {"passed"}
    assert [spec.name for spec in report.sidecar.inputs] == names
    session = load(report.path)
    assert session.inputs == report.sidecar.inputs
    assert session.outputs == report.sidecar.outputs
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "model.json", "model.onnx", "model.onnx.json"}


@pytest.mark.parametrize("class_name", ["zeta.LocalMHA", "zeta.LocalAttention"])
def test_zeta_classes(tmp_path: Path, class_name: str) -> None:
    kwargs = MHA if class_name == "zeta.LocalMHA" else ATTENTION
    checkpoint = save_upstream(tmp_path, class_name.replace("zeta", "local_attention"), kwargs)
    checkpoint.with_suffix(".json").write_text(json.dumps({"class": class_name, "kwargs": kwargs}))
    shapes = ShapeRequest(17, heads=2) if class_name == "zeta.LocalAttention" else ShapeRequest(17)
    report = export(ExportRequest(checkpoint, tmp_path / "model.onnx", shapes=shapes))
    assert report.sidecar.class_name == class_name
    assert set(statuses(report.sidecar.checks).values()) == {"passed"}


def test_sidecar_tells_where_the_file_comes_from(tiny: Path) -> None:
    report = export(ExportRequest(tiny, tiny.with_name("m.onnx"), opset=21))
    sidecar = read_sidecar(report.path)
    assert sidecar is not None
    assert sidecar == report.sidecar
    assert (sidecar.opset, sidecar.seq_len, sidecar.batch, sidecar.dtype) == (21, 64, 1, "fp32")
    assert {window.window_size for window in sidecar.windows} == {4}
    assert [window.name for window in sidecar.windows] == [
        f"layers.{layer}.0.branch.attn_fn/WindowedAttention" for layer in (0, 1)
    ]
    assert {"torch", "onnx", "onnxruntime", "localattn"} <= set(sidecar.versions)
    model = onnx.load(report.path)
    assert {entry.domain: entry.version for entry in model.opset_import} == {
        "": 21,
        "localattn": 1,
        "localattn.fused": 1,
    }


def test_no_path_of_this_machine_is_in_the_file(tiny: Path) -> None:
    report = export(ExportRequest(tiny, tiny.with_name("m.onnx")))
    content = report.path.read_bytes()
    assert str(Path(__file__).resolve().parents[2]).encode() not in content
    assert b"site-packages" not in content


@pytest.mark.parametrize("opset", [when_run(number) for number in (18, 20, 23, 24)])
def test_every_opset(tiny: Path, opset: int) -> None:
    report = export(ExportRequest(tiny, tiny.with_name("m.onnx"), opset=opset, seeds=(0,)))
    assert set(statuses(report.sidecar.checks).values()) == {"passed"}


def test_external_data(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = export(ExportRequest(tiny, tmp_path / "whole.onnx"))
    report = export(ExportRequest(tiny, tmp_path / "m.onnx", external_data_from=1))
    data = report.sidecar.external_data
    assert data is not None
    assert (tmp_path / data).stat().st_size > 10_000
    assert report.path.stat().st_size < whole.path.stat().st_size
    tokens = np.arange(64, dtype=np.int64)[None] % 23
    expected = load(whole.path).run({"tokens": tokens})["logits"]
    monkeypatch.chdir("/")  # found beside the model, wherever the program runs
    np.testing.assert_array_equal(load(report.path).run({"tokens": tokens})["logits"], expected)


def test_without_function_body(tiny: Path) -> None:
    report = export(ExportRequest(tiny, tiny.with_name("m.onnx"), function_body=False))
    model = onnx.load(report.path)
    assert {body.domain for body in model.functions} == {"localattn.fused"}, "nothing else computes those"
    assert [node.op_type for node in model.graph.node if node.domain == "localattn"] == ["WindowedAttention"] * 2
    assert not report.sidecar.function_body
    with pytest.raises(MissingDependency, match=r"m\.onnx.*compiled attention kernel"):
        load(report.path)


def test_a_query_with_nothing_to_see_before_itself_is_no_fault(tmp_path: Path) -> None:
    """Without windows before its own, the first query of a window sees no earlier token."""
    kwargs = MHA | {"look_backward": 0, "exact_windowsize": False}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", kwargs)
    report = export(ExportRequest(checkpoint, tmp_path / "model.onnx", shapes=ShapeRequest(16)))
    assert statuses(report.sidecar.checks)["window"] == "passed"


def test_a_length_within_one_window_proves_nothing_and_says_so(tiny: Path) -> None:
    report = export(ExportRequest(tiny, tiny.with_name("m.onnx"), shapes=ShapeRequest(seq_len=4)))
    found = statuses(report.sidecar.checks)
    assert found["parity"] == "passed"
    assert found["window"] == "not proven"
    assert "fits in one window" in next(c.detail for c in report.sidecar.checks if c.name == "window")


def test_a_model_as_wide_as_the_sequence_is_no_fault(tmp_path: Path) -> None:
    kwargs = TINY | {"dim": 32, "num_tokens": 32, "max_seq_len": 32}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", kwargs)
    report = export(ExportRequest(checkpoint, tmp_path / "m.onnx"))
    assert statuses(report.sidecar.checks)["linear memory"] == "passed"


def test_a_failed_check_leaves_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_function, "HIDDEN_SCORE", 0.0)  # the window is lost
    with pytest.raises(CheckFailed, match="parity"):
        export(ExportRequest(tiny, tiny.with_name("m.onnx")))
    assert {path.name for path in tiny.parent.iterdir()} == {"model.pt", "model.json"}


def test_an_existing_file_is_kept(tiny: Path) -> None:
    target = tiny.with_name("m.onnx")
    target.write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        export(ExportRequest(tiny, target))
    assert target.read_text() == "precious"
    with pytest.raises(UsageError, match="It is a text, and the output is an ONNX file"):
        export(ExportRequest(tiny, target, overwrite=True))
    assert target.read_text() == "precious"
    target.unlink()
    first = export(ExportRequest(tiny, target)).sidecar
    assert export(ExportRequest(tiny, target, dtype="fp16", overwrite=True)).sidecar.model_sha256 != first.model_sha256
    assert onnx.load(target).producer_name == "localattn"


class Written:
    """A traced model whose parts can be spoiled before it is checked."""

    def __init__(self, checkpoint: Path, **shapes: Any) -> None:
        request = ExportRequest(checkpoint, checkpoint.with_name("m.onnx"), shapes=ShapeRequest(**shapes))
        self.source = open_request(request)[1]
        model = trace.trace(self.source, "fp32", 20)
        functions.attach_functions(model)
        self.proto = ir.serde.serialize_model(model)

    def window(self) -> Any:
        return check_window(self.proto, open_bytes(self.proto.SerializeToString()), self.source, "fp32")

    def parity(self) -> Any:
        session = open_bytes(self.proto.SerializeToString())
        judged = Judged(session, Path("m.onnx"), "fp32", open_tokens([], self.source.token_limit))
        return check_parity(judged, self.source, "fp32", Tolerance(1e-4, 1e-4), (0,))


@pytest.mark.parametrize("outside", [0.0, -3.0])
def test_the_window_check_finds_a_lost_window(tiny: Path, monkeypatch: pytest.MonkeyPatch, outside: float) -> None:
    assert Written(tiny).window().status == "passed"
    monkeypatch.setattr(attention_function, "HIDDEN_SCORE", outside)
    spoiled = Written(tiny).window()
    assert spoiled.status == "failed"
    assert "sees outside" in spoiled.detail


@pytest.mark.parametrize(
    ("attribute", "value"), [("window_size", 8), ("look_backward", 2), ("look_backward", 0), ("exact_windowsize", 0)]
)
def test_the_checks_find_a_wrong_window(tiny: Path, attribute: str, value: int) -> None:
    written = Written(tiny)
    for node in written.proto.graph.node:
        for entry in node.attribute:
            if entry.name == attribute:
                entry.i = value
    assert written.parity().status == "failed"


def test_the_checks_find_a_wrong_weight(tiny: Path) -> None:
    written = Written(tiny)
    assert written.parity().status == "passed"
    kernel = next(t for t in written.proto.graph.initializer if t.dims == [16, 16])
    values = onnx.numpy_helper.to_array(kernel).copy()
    values[0, 0] += 0.5
    kernel.CopyFrom(onnx.numpy_helper.from_array(values, kernel.name))
    assert written.parity().status == "failed"


def test_the_memory_check_finds_a_square_tensor(tiny: Path) -> None:
    written = Written(tiny)

    shapes: dict[str, tuple[int, ...]] = {"logits": (1, 53, 256)}

    def retrace(taken: SizesInUse) -> tuple[set[int], dict[str, tuple[int, ...]]]:
        assert 64 in taken[1] <= taken[0] and 53 not in taken[0]
        return {53, 56}, shapes

    assert check_quadratic_memory(written.proto, written.source, retrace).status == "passed"
    written.proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((64, 64), np.float32), "mask"))
    assert check_quadratic_memory(written.proto, written.source, retrace).status == "failed", "it is not there"
    shapes["other"] = (64, 53)
    assert check_quadratic_memory(written.proto, written.source, retrace).status == "passed", "it grows in one place"
    shapes["mask"] = (56, 53)
    found = check_quadratic_memory(written.proto, written.source, retrace)
    assert found.status == "failed"
    assert "mask" in found.detail


def test_a_square_tensor_of_dynamic_sizes_is_found(tiny: Path) -> None:
    written = Written(tiny)
    square = onnx.helper.make_tensor_value_info("square", onnx.TensorProto.FLOAT, ["seq", "seq"])
    written.proto.graph.value_info.append(square)
    assert check_dynamic_memory(written.proto, written.source, ("seq",)).status == "failed"


@pytest.mark.slow
def test_a_square_tensor_can_be_allowed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = functions.attach_functions

    def with_square(model: ir.Model) -> None:
        original(model)
        square = ir.Value(name="square", const_value=ir.tensor(np.zeros((64, 64), np.float32), name="square"))
        model.graph.initializers.add(square)

    monkeypatch.setattr(functions, "attach_functions", with_square)
    request = ExportRequest(tiny, tiny.with_name("m.onnx"))
    with pytest.raises(CheckFailed, match="linear memory"):
        export(request)
    report = export(dataclasses.replace(request, allow_quadratic=True))
    assert statuses(report.sidecar.checks)["linear memory"] == "skipped"


def test_the_memory_checks_other_length_is_no_other_size(tmp_path: Path) -> None:
    """Four tokens of four channels in a batch of three: at three tokens the batch would look like the length."""
    kwargs = {"num_tokens": 11, "max_seq_len": 4, "dim": 16, "depth": 1, "dim_head": 4, "heads": 1, "causal": True}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", {**kwargs, "local_attn_window_size": 2})
    report = export(ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=ShapeRequest(batch=3)))
    assert statuses(report.sidecar.checks)["linear memory"] == "passed"


def test_no_size_of_the_probe_is_the_length(tmp_path: Path) -> None:
    """Eight tokens, which windows of three pad to nine: the memory check's own head size must be neither."""
    kwargs = {"num_tokens": 11, "max_seq_len": 8, "dim": 16, "depth": 1, "dim_head": 24, "heads": 3, "causal": False}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", {**kwargs, "local_attn_window_size": 3})
    report = export(ExportRequest(checkpoint, tmp_path / "m.onnx"))
    assert statuses(report.sidecar.checks)["linear memory"] == "passed"


def test_equal_constants_are_stored_once(tiny: Path) -> None:
    report = export(ExportRequest(tiny, tiny.with_name("m.onnx")))
    tables = [t for t in onnx.load(report.path).graph.initializer if list(t.dims) == [64, 1, 2, 4]]
    assert len(tables) == 2  # cosines and sines, for both layers and for query and key alike


def test_weights_are_in_the_dtype_asked_for(tiny: Path) -> None:
    report = export(ExportRequest(tiny, tiny.with_name("m.onnx"), dtype="fp16"))
    tensors = onnx.load(report.path).graph.initializer
    matrices = [t for t in tensors if len(t.dims) == 2 and max(t.dims) > 16 and "positions" not in t.name]
    assert matrices
    assert {t.data_type for t in matrices} == {onnx.TensorProto.FLOAT16}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (ShapeRequest(seq_len=0), "seq_len"),
        (ShapeRequest(seq_len=-5), "seq_len"),
        (ShapeRequest(seq_len=65), "max_seq_len"),
        (ShapeRequest(batch=0), "batch"),
        (ShapeRequest(attn_bias=True), "attn_bias"),
    ],
)
def test_impossible_shapes(tiny: Path, shapes: ShapeRequest, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        export(ExportRequest(tiny, tiny.with_name("m.onnx"), shapes=shapes))


def test_what_attention_weights_cannot_tell_is_asked_for(tmp_path: Path) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalAttention", ATTENTION | {"dim": None})
    for shapes, option in (
        (ShapeRequest(16), "dim_head"),
        (ShapeRequest(16, dim_head=8), "heads"),
        (ShapeRequest(heads=1, dim_head=8), "seq_len"),
    ):
        with pytest.raises(UsageError, match=option):
            export(ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=shapes))


def test_a_length_upstream_refuses_is_refused(tmp_path: Path) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalAttention", ATTENTION | {"autopad": False})
    with pytest.raises(UsageError, match="multiple of the window"):
        export(ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=ShapeRequest(18, heads=2)))


@needs_real
@pytest.mark.parametrize("length", [1, 129, 1024, *(pytest.param(n, marks=pytest.mark.slow) for n in (127, 128, 640))])
def test_the_real_checkpoint_equals_upstream(tmp_path: Path, length: int) -> None:
    from local_attention import LocalTransformer

    config = json.loads(REAL.with_suffix(".json").read_text())
    upstream = LocalTransformer(**config["kwargs"]).eval()
    upstream.load_state_dict(torch.load(REAL, map_location="cpu", weights_only=True))
    tokens = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        expected = upstream(tokens).numpy()
    report = export(ExportRequest(REAL, tmp_path / "m.onnx", shapes=ShapeRequest(seq_len=length), seeds=(0,)))
    actual = load(report.path).run({"tokens": tokens.numpy()})["logits"]
    np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)


def test_versions_survive_a_package_of_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_PACKAGES", ("torch", "no-such-package"))
    assert set(publish.package_versions()) == {"python", "torch"}
