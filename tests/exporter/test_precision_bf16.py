"""`--dtype bf16`: what is bf16 in the file, that it is proven, run, compared, looked into and built."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

from localattn.core.documents.sidecar import read_sidecar, sidecar_path
from localattn.core.errors import CheckFailed
from localattn.core.nodes.attention import DOMAIN
from localattn.core.tolerance import TOLERANCES
from localattn.exporter.checkpoint.open_checkpoint import open_checkpoint
from localattn.exporter.export import ExportRequest, export, open_request
from localattn.exporter.options import ShapeRequest
from localattn.runtime import load
from localattn.runtime.backends.onnxruntime.session import EMULATED

from ..conftest import TINY, Finished, save_upstream

WIDE = TINY | {"dim": 32, "dim_head": 16, "num_tokens": 50, "local_attn_window_size": 8}
TRANSFORMER, MHA, ATTENTION = (f"local_attention.{name}" for name in ("LocalTransformer", "LocalMHA", "LocalAttention"))
Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and, beside it, its file in bf16."""
    checkpoint = save_upstream(tmp_path_factory.mktemp("made"), TRANSFORMER, WIDE)
    return export(ExportRequest(checkpoint, checkpoint.with_name("m.onnx"), dtype="bf16")).path.parent


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.fixture
def wide(folder: Path) -> Path:
    return folder / "model.pt"


@pytest.fixture
def written(folder: Path) -> Path:
    """That model in bf16."""
    return folder / "m.onnx"


def test_matrices_are_bf16_and_what_is_sensitive_is_not(wide: Path, written: Path) -> None:
    model = onnx.load(written)
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm") and "linear" in node.name]
    assert len(products) >= 5 * WIDE["depth"] + 1
    assert all(kinds[node.input[1]] == TensorProto.BFLOAT16 for node in products)
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    assert norms and all(kinds[node.input[1]] == TensorProto.FLOAT for node in norms)
    types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.output)}
    assert all(types[node.output[0]] == TensorProto.FLOAT for node in norms)
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    assert len(nodes) == WIDE["depth"] and all(types[node.output[0]] == TensorProto.BFLOAT16 for node in nodes)
    assert types["logits"] == TensorProto.FLOAT
    half = export(ExportRequest(wide, wide.with_name("half.onnx"), dtype="fp16")).path
    as_fp16 = {tensor.name: tensor.data_type for tensor in onnx.load(half).graph.initializer}
    swapped = {name: 16 if kind == TensorProto.FLOAT16 else kind for name, kind in as_fp16.items()}
    assert kinds == swapped  # the same policy
    state = torch.load(wide, weights_only=True)
    stored = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("token_emb.weight"))
    exact = state["token_emb.weight"].bfloat16().float().numpy()
    np.testing.assert_array_equal(numpy_helper.to_array(stored).astype(np.float32), exact)


def test_every_check_is_made_and_the_sidecar_says_how(written: Path) -> None:
    sidecar = read_sidecar(written)
    assert sidecar is not None and sidecar.dtype == "bf16"
    checks = {check.name: check for check in sidecar.checks}
    assert {check.status for check in checks.values()} == {"passed"}
    assert EMULATED in checks["onnxruntime loads"].detail
    assert checks["parity"].figures["atol"] == TOLERANCES["bf16"].atol
    assert 1e-3 < checks["parity"].figures["max_abs"] < 0.1  # it is rounded, and not by much
    assert [spec.dtype for spec in (*sidecar.inputs, *sidecar.outputs)] == ["int64", "float32"]


def test_the_numbers_are_those_of_pytorchs_own_bf16(wide: Path, written: Path) -> None:
    """The same module in PyTorch's bf16 has the same error; bit for bit they sum in another order."""
    _, source = open_request(ExportRequest(wide, wide.with_name("x.onnx")))
    tokens = np.random.default_rng(0).integers(0, WIDE["num_tokens"], (1, WIDE["max_seq_len"]))
    with torch.no_grad():
        in_torch = source.module("bf16")(torch.from_numpy(tokens)).double().numpy()
    in_file = load(written).run({"tokens": tokens})["logits"].astype(np.float64)
    exact = source.reference({"tokens": tokens})["logits"]
    off, torchs_off, apart = (
        float(np.sqrt(np.mean(x**2))) for x in (in_file - exact, in_torch - exact, in_file - in_torch)
    )
    assert 0.8 < off / torchs_off < 1.25
    assert apart < off
    np.testing.assert_array_equal(torch.from_numpy(in_file).bfloat16().double().numpy(), in_file)


@pytest.mark.parametrize(
    ("class_name", "kwargs", "options"),
    [
        pytest.param(TRANSFORMER, WIDE, ["--mask"], marks=pytest.mark.slow),
        (TRANSFORMER, WIDE | {"causal": False}, ["--mask", "--dynamic", "batch,seq", "--seq-len", "24"]),
        pytest.param(TRANSFORMER, WIDE | {"use_dynamic_pos_bias": True}, [], marks=pytest.mark.slow),
        (TRANSFORMER, WIDE | {"num_tokens": None}, ["--seq-len", "64", "--batch", "2"]),
        pytest.param(
            TRANSFORMER,
            WIDE | {"use_xpos": True, "qk_rmsnorm": True, "gate_values_per_head": True},
            [],
            marks=pytest.mark.slow,
        ),
        (MHA, {"dim": 32, "window_size": 8, "heads": 2, "dim_head": 16}, ["--seq-len", "40", "--attn-bias"]),
        (ATTENTION, {"dim": 16, "window_size": 8, "shared_qk": True}, ["--seq-len", "64", "--heads", "2", "--mask"]),
        pytest.param(TRANSFORMER, WIDE, ["--mode", "step"], marks=pytest.mark.slow),
        (ATTENTION, {"dim": 16, "window_size": 8, "causal": True}, ["--heads", "2", "--mode", "step"]),
    ],
    ids=["mask", "dynamic", "position bias", "embeddings", "xpos", "mha", "attention", "step", "step attention"],
)
def test_every_sort_of_model(
    localattn: Run, tmp_path: Path, class_name: str, kwargs: dict[str, object], options: list[str]
) -> None:
    checkpoint, target = save_upstream(tmp_path, class_name, kwargs), tmp_path / "m.onnx"
    done = localattn("export", checkpoint, "-o", target, "--dtype", "bf16", *options, "--format", "json")
    assert done.code == 0, done.err
    model = onnx.load(target)
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.input)}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert {types[name] for node in nodes for name in node.input[:1]} == {TensorProto.BFLOAT16}
    if "step" not in options:  # a plugin takes inputs of one type, and the mask
        assert {types[name] for node in nodes for name in node.input} <= {TensorProto.BFLOAT16, TensorProto.BOOL}
        assert localattn("run", target, "--format", "json").code == 0


def test_the_commands_know_it(localattn: Run, wide: Path, written: Path) -> None:
    compared = localattn("parity", written, "--against", wide, "--format", "json")
    assert compared.code == 0, compared.err
    document = json.loads(compared.out)
    assert document["dtype"] == "bf16" and EMULATED in document["notes"]
    ran = localattn("run", written, "--save-outputs", wide.with_name("o.npz"), "--format", "json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["notes"] == [EMULATED]
    assert np.load(wide.with_name("o.npz"))["logits"].dtype == np.float32
    shown = json.loads(localattn("inspect", written, "--format", "json").out)
    assert shown["weight_dtype"] == "bfloat16"
    measured = localattn("bench", written, "--duration", "0.05", "--iterations", "2", "--warmup", "0", "--profile")
    assert measured.code == 0, measured.err
    assert EMULATED in " ".join((measured.out + measured.err).split())
    assert re.search(r"layers\.\d\.\d\.branch\.\w+ +\d", measured.out)
    # The sidecar gone, the weights tell.
    sidecar_path(written).unlink()
    alone = localattn("parity", written, "--against", wide, "--config", wide.with_suffix(".json"), "--format", "json")
    assert alone.code == 0 and json.loads(alone.out)["dtype"] == "bf16", alone.err


def test_generated_text_comes_out_of_it(localattn: Run, wide: Path) -> None:
    target = wide.with_name("s.onnx")
    assert localattn("export", wide, "-o", target, "--dtype", "bf16", "--mode", "step").code == 0
    done = localattn("generate", target, "--prompt-ids", "1,2,3", "--max-tokens", "5", "--format", "json")
    assert done.code == 0, done.err
    assert "emulated" in done.err and len(json.loads(done.out)["tokens"][0]) == 5


def spoil_weight(model: onnx.ModelProto) -> None:
    tensor = max((t for t in model.graph.initializer if t.data_type == 16), key=lambda t: len(t.raw_data))
    tensor.raw_data = tensor.raw_data[2:] + tensor.raw_data[:2]


def spoil_sum(model: onnx.ModelProto) -> None:
    """One bf16 operator computes something else."""
    body = next(body for body in model.functions if body.name == "GatedGelu")
    node = next(node for node in body.node if node.op_type == "Gelu")
    node.op_type = "Sigmoid"
    del node.attribute[:]


@pytest.mark.parametrize("spoil", [spoil_weight, spoil_sum])
def test_a_planted_error_fails_parity(
    localattn: Run, wide: Path, written: Path, spoil: Callable[[onnx.ModelProto], None]
) -> None:
    model = onnx.load(written)
    spoil(model)
    onnx.save(model, written)
    done = localattn("parity", written, "--against", wide)
    assert done.code == 1, (done.out, done.err)


def test_a_lost_window_is_not_published(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localattn.exporter.lowering import attention_function

    monkeypatch.setattr(attention_function, "HIDDEN_SCORE", 0.0)
    with pytest.raises(CheckFailed):
        export(ExportRequest(wide, wide.with_name("lost.onnx"), dtype="bf16"))
    assert not wide.with_name("lost.onnx").exists()


def test_bisect_finds_the_module(localattn: Run, wide: Path, written: Path) -> None:
    model = onnx.load(written)
    spoil_sum(model)
    onnx.save(model, written)
    done = localattn("bisect", written, "--against", wide, "--format", "json")
    assert done.code == 1, done.err
    assert "layers.0.1" in done.out


def test_external_data_stays_bf16(wide: Path) -> None:
    target = wide.with_name("large.onnx")
    report = export(ExportRequest(wide, target, dtype="bf16", external_data_from=0))
    assert report.sidecar.external_data is not None
    data = target.with_name(report.sidecar.external_data)
    model = onnx.load(target, load_external_data=False)
    outside = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert {t.data_type for t in outside} >= {TensorProto.BFLOAT16}
    numbers = sum(int(np.prod(t.dims)) for t in outside if t.data_type == TensorProto.BFLOAT16)
    assert 2 * numbers <= data.stat().st_size < 4 * numbers + 4096 * len(outside)
    tokens = np.zeros((1, WIDE["max_seq_len"]), dtype=np.int64)
    assert np.isfinite(load(target).run({"tokens": tokens})["logits"]).all()


def test_the_reference_is_asked_for_what_the_file_was_fed(tmp_path: Path) -> None:
    """Real inputs are float32, rounded inside; the reference sees them unrounded."""
    checkpoint = save_upstream(tmp_path, ATTENTION, {"dim": 16, "window_size": 8, "causal": True})
    shapes = ShapeRequest(seq_len=32, heads=2)
    report = export(ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=shapes, dtype="bf16"))
    assert {spec.dtype for spec in report.sidecar.inputs} == {"float32"}
    source = open_checkpoint(checkpoint).source(shapes)
    generator = np.random.default_rng(0)
    inputs = {name: generator.standard_normal((1, 2, 32, 16)).astype(np.float32) for name in "qkv"}
    out = load(report.path).run(inputs)["out"]
    assert out.dtype == np.float32
    error = np.abs(out - source.reference(inputs)["out"])
    assert 1e-4 < error.max() < 0.1


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None or importlib.util.find_spec("polygraphy") is None,
    reason="tensorrt_rtx and polygraphy are not installed",
)
def test_tensorrt_builds_it_from_the_body(localattn: Run, wide: Path, written: Path) -> None:
    done = localattn(
        "build", written, "--backend", "tensorrt-rtx", "--target", "rtx40", "--plugin", "none", "--format", "json"
    )
    assert done.code == 0, done.err
    checks = {check["name"]: check for check in json.loads(done.out)["checks"]}
    assert checks["precision of network"]["status"] == "passed"
    assert checks["products of network"]["figures"]["bfloat16"] >= 5 * WIDE["depth"] + 1
