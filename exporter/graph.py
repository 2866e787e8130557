"""A source model as an ONNX graph: PyTorch's exporter, then the project's own finishing touches."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import onnx_ir as ir
import torch
from onnx_ir.passes.common import (
    DeduplicateInitializersPass,
    RemoveUnusedNodesPass,
)

from .. import __version__
from ..core.errors import ExportFailed, UsageError
from ..core.node import DOMAIN, VARIANT_BY_OP_TYPE
from ..core.tensors import TensorSpec
from .function_body import function_body
from .source import SourceModel

# PyTorch's exporter starts at 18; 24 is the newest that it, ONNX and onnxruntime were seen to agree on.
OPSETS = range(18, 25)
# The newest IR that TensorRT 10.3 and onnxruntime 1.17 still read; it has all that is used here.
IR_VERSION = 10

_NAME_SCOPES = "pkg.torch.onnx.name_scopes"
_DTYPE = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int64": torch.int64,
    "bool": torch.bool,
}


def check_opset(opset: int) -> None:
    """Refuse an opset nobody tested.

    Raises:
        UsageError: outside `OPSETS`.
    """
    if opset not in OPSETS:
        raise UsageError(
            f"Opset {opset} cannot be exported.",
            why=f"Opsets {OPSETS[0]} to {OPSETS[-1]} are supported.",
            fix="20 is the default, and the newest that TensorRT 10.3 reads.",
        )


def trace(source: SourceModel, dtype: str, opset: int) -> ir.Model:
    """The model as ONNX, windowed attention nodes without a function body.

    Args:
        source: the model and its shapes.
        dtype: "fp32" or "fp16".
        opset: ONNX opset of the file.

    Raises:
        UsageError: an opset out of range.
        ExportFailed: PyTorch's exporter gave up.
    """
    check_opset(opset)
    module = _Entry(source.module(dtype), [spec.name for spec in source.inputs(dtype)])
    examples = tuple(_example(spec) for spec in source.inputs(dtype))
    with _quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                module,
                examples,
                dynamo=True,
                opset_version=opset,
                input_names=[spec.name for spec in source.inputs(dtype)],
                output_names=[source.output_name],
                verbose=False,
            )
        except Exception as error:
            raise ExportFailed(
                "PyTorch could not export the model.",
                why=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
                fix="Run again with -v for the whole message.",
            ) from error
    if program is None:
        raise ExportFailed("PyTorch could not export the model.", why="It returned no program.")
    return _finish(program.model)


class _Entry(torch.nn.Module):
    """Calls the module by input names, so that an attn_bias can be given without a mask."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        # The module's first argument is `x` whether tokens or embeddings go in.
        self.names = ["x" if name == "tokens" else name for name in names]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True)))
        return output


def _example(spec: TensorSpec) -> torch.Tensor:
    shape = [int(size) for size in spec.shape]
    if spec.dtype == "bool":
        return torch.ones(shape, dtype=torch.bool)
    return torch.zeros(shape, dtype=_DTYPE[spec.dtype])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's notes about itself away from the user's terminal."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            registration.setLevel(level)


def _finish(model: ir.Model) -> ir.Model:
    """Share equal constants, name attention nodes by their module, drop what only the exporter needs."""
    DeduplicateInitializersPass(size_limit=1 << 62)(model)
    RemoveUnusedNodesPass()(model)
    calls: Counter[str] = Counter()

    for node in model.graph:
        scopes = node.metadata_props.get(_NAME_SCOPES, "")
        node.metadata_props.clear()  # stack traces hold the paths of this machine
        path = _module_path(scopes)
        if path:
            node.metadata_props["module"] = path
        if node.domain == DOMAIN:
            calls[path] += 1  # one module may be called more than once
            node.name = f"{path or 'attention'}/{node.op_type}" + (f"_{calls[path]}" if calls[path] > 1 else "")
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "localattn", __version__
    model.metadata_props.clear()
    return model


def _module_path(scopes: str) -> str:
    """The innermost named module of PyTorch's list of scopes, by its path in the user's model."""
    names = [part.strip("[]' ") for part in scopes.split(",")]
    paths = [name for name in names if name.startswith("model.")]
    return paths[-1].removeprefix("model.") if paths else ""


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    """The windowed attention nodes, in order."""
    return [node for node in model.graph if node.domain == DOMAIN and node.op_type in VARIANT_BY_OP_TYPE]


def attach_bodies(model: ir.Model) -> None:
    """Add the function body of every op type the graph uses, in place."""
    opset = model.graph.opset_imports[""]
    aligned: dict[str, bool] = {}
    for node in attention_nodes(model):
        length = node_length(node)
        fits = length is not None and length % _integer(node, "query_block") == 0
        aligned[node.op_type] = aligned.get(node.op_type, True) and fits
    for op_type, fits in aligned.items():
        body = function_body(VARIANT_BY_OP_TYPE[op_type], opset, aligned=fits)
        model.functions[body.identifier()] = body


def node_length(node: ir.Node) -> int | None:
    """The sequence length a node was traced at; None if it is open."""
    query = node.inputs[0]
    assert query is not None and query.shape is not None
    perm = list(node.attributes["perm"].as_ints())
    length = query.shape[perm[2]]
    return length if isinstance(length, int) else None


def _integer(node: ir.Node, name: str) -> int:
    return int(node.attributes[name].as_int())
