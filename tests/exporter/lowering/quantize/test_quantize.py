"""`--weight-dtype int8-dynamic`: what is quantized, what is not, and that the file is judged by its own tolerance."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed, UsageError
from localattn.core.tolerance import TOLERANCES
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.lowering.quantize import dynamic_int8
from localattn.exporter.lowering.quantize.linear_layers import NARROWEST
from localattn.exporter.lowering.trace import trace_module
from localattn.runtime.backends.onnxruntime.session import open_bytes

from ....conftest import TINY, Finished, save_upstream

WIDE = TINY | {"dim": 64, "dim_head": 32, "num_tokens": 64}


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model whose matrices are wide enough to be quantized."""
    return save_upstream(tmp_path, "local_attention.LocalTransformer", WIDE)


def test_linear_layers_become_int8_and_nothing_else(wide: Path) -> None:
    target = wide.with_name("m.onnx")
    full = export(ExportRequest(wide, wide.with_name("full.onnx")))
    report = export(ExportRequest(wide, target, weight_dtype="int8-dynamic"))
    model = onnx.load(target)
    counts = Counter(node.op_type for node in model.graph.node)
    depth = WIDE["depth"]
    assert counts["MatMulInteger"] == 7 * depth + 1  # q, k, v, out, two and one of the feed-forward; logits
    assert counts["WindowedAttention"] == depth
    kinds = {
        tensor.data_type
        for tensor in model.graph.initializer
        if len(tensor.dims) == 2 and min(tensor.dims) >= NARROWEST
    }
    assert onnx.TensorProto.INT8 in kinds
    matrices = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 2]
    assert len(matrices) == counts["MatMulInteger"]
    assert [f.name for f in model.functions if f.domain == "localattn"] == ["WindowedAttention"]
    assert target.stat().st_size < 0.55 * full.path.stat().st_size
    modules = {p.value for n in model.graph.node if n.op_type == "MatMulInteger" for p in n.metadata_props}
    assert any("branch" in module for module in modules)
    statuses = {check.name: check for check in report.sidecar.checks}
    assert {check.status for check in statuses.values()} <= {"passed", "not proven"}
    assert f"(tolerance {TOLERANCES['int8-dynamic'].describe()})" in statuses["parity"].detail
    assert {"divergence", "agreement"} <= set(statuses["parity"].figures)
    assert "was not tested" in statuses["window"].detail
    sidecar = read_sidecar(target)
    assert sidecar is not None and sidecar.options == {"weight_dtype": "int8-dynamic"} and sidecar.dtype == "fp32"


def test_the_command_states_its_parity(localattn: Callable[..., Finished], wide: Path) -> None:
    target = wide.with_name("m.onnx")
    done = localattn("export", wide, "-o", target, "--weight-dtype", "int8-dynamic", "--format", "json")
    assert done.code == 0, done.err
    parity = next(check for check in json.loads(done.out)["checks"] if check["name"] == "parity")
    assert parity["figures"]["max_abs"] > 1e-4 and parity["figures"]["agreement"] > 0.9
    assert 0 < parity["figures"]["divergence"] < 1e-2
    again = localattn("parity", target, "--against", wide, "--format", "json")
    assert again.code == 0, again.err
    shown = json.loads(again.out)
    assert shown["dtype"] == "int8-dynamic" and shown["overall"][0]["agreement"] > 0.9
    assert "largest logit at 70% of positions" in localattn("parity", target, "--against", wide).out


def test_a_spoiled_int8_file_fails(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localattn.exporter.lowering import attention_function

    monkeypatch.setattr(attention_function, "HIDDEN_SCORE", 0.0)  # the window is lost
    with pytest.raises(CheckFailed):
        export(ExportRequest(wide, wide.with_name("m.onnx"), weight_dtype="int8-dynamic"))
    assert not wide.with_name("m.onnx").exists()


def test_quantizing_leaves_no_trace_in_pythons_logging(wide: Path) -> None:
    """The quantizer recommends what a traced model has behind it, and gives the root logger a handler by that."""
    code = f"""
import logging
from pathlib import Path
from localattn.exporter.export import ExportRequest, export
checkpoint, target = Path({str(wide)!r}), Path({str(wide.with_name("m.onnx"))!r})
report = export(ExportRequest(checkpoint, target, weight_dtype="int8-dynamic"))
print(logging.root.handlers, logging.root.manager.disable)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 0" and "pre-processing" not in done.stderr
    written = onnx.load(wide.with_name("m.onnx"), load_external_data=False)
    assert "onnx.quant.pre_process" not in {entry.key for entry in written.metadata_props}


def test_what_does_not_go_with_int8_is_refused(localattn: Callable[..., Finished], wide: Path) -> None:
    with pytest.raises(UsageError, match="int3"):
        export(ExportRequest(wide, wide.with_name("m.onnx"), weight_dtype="int3"))
    for dtype, mode in (("fp16", "full"), ("bf16", "full"), ("fp16", "step")):
        options = ["--dtype", dtype, "--mode", mode]
        done = localattn("export", wide, "-o", wide.with_name("m.onnx"), "--weight-dtype", "int8-dynamic", *options)
        assert done.code == 2, (options, done.err)
    assert not wide.with_name("m.onnx").exists()


def test_step_files_share_int8_matrices(localattn: Callable[..., Finished], wide: Path) -> None:
    step = wide.with_name("s.onnx")
    done = localattn("export", wide, "-o", step, "--weight-dtype", "int8-dynamic", "--mode", "step", "--chunk", "8")
    assert done.code == 0, done.err
    sidecar = read_sidecar(step)
    assert sidecar is not None and sidecar.options == {"weight_dtype": "int8-dynamic"}
    parity = next(check for check in sidecar.checks if check.name == "parity")
    assert parity.status == "passed" and parity.figures["agreement"] > 0.9
    assert parity.figures["max_abs"] > 1e-4
    names = set()
    for path in (step, step.with_name("s.prefill.onnx")):
        model = onnx.load(path, load_external_data=False)
        counts = Counter(node.op_type for node in model.graph.node)
        assert counts["MatMulInteger"] >= 5 * WIDE["depth"] + 1
        matrices = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT8 and len(t.dims) == 2]
        places = {tuple(entry.value for entry in t.external_data[:2]) for t in matrices}
        assert len(places) == len(matrices)
        names |= places
    assert len(names) == len(matrices)  # each matrix lies once in the file that both refer to
    made = localattn("generate", step, "--prompt-ids", "1,2,3", "--max-tokens", "4", "--format", "json")
    assert made.code == 0 and len(json.loads(made.out)["tokens"][0]) == 4, made.err


def test_without_a_wide_matrix_there_is_nothing_to_do(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    small = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY | {"dim": 8, "num_tokens": 9})
    done = localattn("export", small, "-o", small.with_name("m.onnx"), "--weight-dtype", "int8-dynamic")
    assert done.code == 4
    assert "no layer to quantize" in done.err


class _TiedTable(torch.nn.Module):
    """A head that multiplies one vector a sequence by the table of embeddings: a Gemm, not a MatMul."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Embedding(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.model(tokens).mean(1), self.model.weight)


def test_a_table_that_a_head_shares_stays_as_it_is() -> None:
    """The quantizer takes the transposed table, embeddings the table itself."""
    torch.manual_seed(0)
    module, tokens = _TiedTable().eval(), torch.arange(8)[None]
    model = dynamic_int8.quantize(trace_module(module, (tokens,), ["tokens"], ["y"], 20))
    made = open_bytes(ir.serde.serialize_model(model).SerializeToString(), "cpu").run({"tokens": tokens.numpy()})["y"]
    with torch.no_grad():
        expected = module(tokens).numpy()
    assert np.corrcoef(made.ravel(), expected.ravel())[0, 1] > 0.999
