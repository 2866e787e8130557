"""The registry of the nodes' ONNX functions: every node of this package has its builder there."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from localattn.core.nodes.attention import DOMAIN, VARIANTS
from localattn.core.nodes.fused import FUSED_DOMAIN, FUSED_NODES
from localattn.core.nodes.grouped import GROUPED_VARIANTS
from localattn.core.nodes.step import STEP_VARIANTS
from localattn.exporter.lowering.functions import BUILDERS, attach_functions

from ...support.models.engine_models import small_model

CONSTANT = [(DOMAIN, variant.op_type) for variant in STEP_VARIANTS]
CONSTANT += [(FUSED_DOMAIN, node.op_type) for node in FUSED_NODES]


def test_every_node_has_a_builder() -> None:
    assert set(BUILDERS) == {*CONSTANT, *((DOMAIN, variant.op_type) for variant in (*VARIANTS, *GROUPED_VARIANTS))}


@pytest.mark.parametrize(("domain", "op_type"), CONSTANT)
def test_a_function_has_the_name_of_its_node(domain: str, op_type: str) -> None:
    function = BUILDERS[domain, op_type](op_type, 20, [])
    assert function.identifier() == (domain, op_type, "")
    assert {node.domain for node in function} == {""} and len(list(function)) > 1


def test_a_model_gets_the_functions_of_its_nodes_and_no_others() -> None:
    written = onnx.load(small_model())
    model = ir.serde.deserialize_model(written)
    model.functions.clear()
    attach_functions(model)
    again = ir.serde.serialize_model(model)
    assert [f.name for f in again.functions] == [f.name for f in written.functions]
    for ours, theirs in zip(again.functions, written.functions, strict=True):
        assert [node.op_type for node in ours.node] == [node.op_type for node in theirs.node]
