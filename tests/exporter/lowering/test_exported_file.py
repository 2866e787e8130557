"""Whole files, traced and run in onnxruntime, against the published packages."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from localattn.core.nodes.attention import DOMAIN, VARIANTS, NodeVariant
from localattn.core.tolerance import TOLERANCES
from localattn.exporter.lowering.functions import attach_functions
from localattn.exporter.lowering.trace import trace
from localattn.exporter.source.source_model import SourceModel
from localattn.runtime.backends.onnxruntime.session import open_bytes

from ...support.models.opsets import OPSETS
from ...support.reference import rows_without_keys
from ...support.upstream import Case, Pair, draw

FP32_ERROR = 1e-5
# Numbers of cases, fp32 and fp16; each is a trace of about a second.
COUNTS = {
    "local_attention.LocalAttention": (9, 2),
    "local_attention.LocalMHA": (6, 2),
    "local_attention.LocalTransformer": (7, 4),
    "zeta.LocalAttention": (3, 1),
    "zeta.LocalMHA": (4, 1),
}
FP32_CASES = [draw(name, 1000 + i) for name, (count, _) in COUNTS.items() for i in range(count)]
FP16_CASES = [draw(name, 2000 + i) for name, (_, count) in COUNTS.items() for i in range(count)]


def op_type(case: Case) -> str:
    """The node a case is exported to."""
    kwargs = case.kwargs
    rotary = kwargs.get("use_rotary_pos_emb", not kwargs.get("use_dynamic_pos_bias"))
    if case.kind == "LocalAttention":
        rotary = rotary and "dim" in kwargs
    return NodeVariant(
        has_mask=bool(case.mask),
        has_bias=case.attn_bias or kwargs.get("use_dynamic_pos_bias", False),
        has_xpos=bool(kwargs["use_xpos"] and rotary),
    ).op_type


def exported(source: SourceModel, dtype: str, opset: int) -> onnx.ModelProto:
    """The model's file."""
    model = trace(source, dtype, opset)
    attach_functions(model)
    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto, full_check=True)
    return proto


def output_of(pair: Pair, dtype: str, opset: int) -> np.ndarray:
    """What the file answers; the file's nodes and bodies are looked at on the way."""
    proto = exported(pair.source, dtype, opset)
    nodes = [node for node in proto.graph.node if node.domain == DOMAIN]
    assert [node.op_type for node in nodes] == [op_type(pair.case)] * pair.source.depth
    assert {f.name for f in proto.functions if f.domain == DOMAIN} == {op_type(pair.case)}
    assert {x.version for x in proto.opset_import if not x.domain} == {opset}
    session = open_bytes(proto.SerializeToString(), "cpu", threads=1)
    output = session.run(pair.inputs)[pair.source.outputs[0]]
    assert np.isfinite(output).all()
    if pair.case.mask and pair.source.depth == 1:
        assert not pair.rows(output)[rows_without_keys(pair.case.geometry, pair.inputs["mask"])].any()
    return output


@pytest.mark.parametrize("index", range(len(FP32_CASES)), ids=[case.name for case in FP32_CASES])
def test_fp32_file_equals_upstream(index: int) -> None:
    pair = Pair(FP32_CASES[index])
    output = output_of(pair, "fp32", OPSETS[index % len(OPSETS)])
    assert output.dtype == np.float32
    assert pair.error(output, pair.expected()) < FP32_ERROR


@pytest.mark.parametrize("index", range(len(FP16_CASES)), ids=[case.name for case in FP16_CASES])
def test_fp16_file_is_close_to_upstream(index: int) -> None:
    pair = Pair(FP16_CASES[index], "fp16")
    output = output_of(pair, "fp16", OPSETS[index % len(OPSETS)])
    assert output.dtype == np.float16
    good = pair.comparable()
    actual, expected = (pair.rows(x)[good].astype(np.float64) for x in (output, pair.expected()))
    tolerance = TOLERANCES["fp16"]
    assert (np.abs(actual - expected) <= tolerance.atol + tolerance.rtol * np.abs(expected)).all()
    assert tolerance.cosine is not None
    cosine = (actual * expected).sum() / np.sqrt((actual**2).sum() * (expected**2).sum())
    assert cosine >= tolerance.cosine


def test_the_files_cover_every_op_type() -> None:
    assert {op_type(case) for case in FP32_CASES} == {variant.op_type for variant in VARIANTS}
    assert len(FP32_CASES) >= 24 and len(FP16_CASES) >= 8
    unaligned = [c for c in FP32_CASES if c.length % c.geometry.window_size]
    assert any(not c.mask and not c.geometry.causal for c in unaligned)  # padding that is attended
    transformers = [case for case in FP32_CASES if case.kind == "LocalTransformer"]
    assert {case.mixes_residuals for case in transformers} == {True, False}
    assert {case.kwargs["num_residual_streams"] for case in transformers} == {1, 2, 4}
    assert {case.kwargs["num_tokens"] is None for case in transformers} == {True, False}
