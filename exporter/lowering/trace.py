"""A source model as an ONNX graph: PyTorch's exporter, then the project's own finishing touches."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import onnx_ir as ir
import torch
from onnx_ir.passes.common import (
    DeduplicateInitializersPass,
    RemoveUnusedNodesPass,
)

from ... import __version__
from ...core.errors import ExportFailed, LocalAttnError, UsageError
from ...core.nodes.attention import DOMAIN, VARIANT_BY_OP_TYPE
from ...core.tensors import TensorSpec
from ..models.family import NUMPY_DTYPE, TORCH_DTYPE
from ..source.source_model import SourceModel

# PyTorch's exporter starts at 18; 24 is the newest that it, ONNX and onnxruntime were seen to agree on.
OPSETS = range(18, 25)
# The newest IR that TensorRT 10.3 and onnxruntime 1.18 still read; it has all that is used here.
IR_VERSION = 10

# Loggers that tell users of packages they did not ask for, and of attributes without meaning here.
_CHATTY = ("torch.onnx._internal.exporter._registration", "onnx_ir._convenience")
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


def trace(
    source: SourceModel, dtype: str, opset: int, open_axes: Sequence[Mapping[int, object]] | None = None
) -> ir.Model:
    """The model as ONNX, windowed attention nodes without a function body.

    Args:
        source: the model and its shapes.
        dtype: "fp32", "fp16" or "bf16".
        opset: ONNX opset of the file.
        open_axes: as of `trace_module`.

    Raises:
        UsageError: an opset out of range.
        ExportFailed: PyTorch's exporter gave up.
    """
    specs = source.inputs(dtype)
    return trace_module(
        _Entry(
            source.module(dtype),
            [spec.name for spec in specs],
            computes_in=TORCH_DTYPE[dtype] if source.kind.casts_inputs else None,
            gives=_DTYPE[NUMPY_DTYPE[dtype]],
        ),
        tuple(_example(spec) for spec in specs),
        [spec.name for spec in specs],
        [source.output_name],
        opset,
        open_axes,
    )


def trace_module(
    entry: torch.nn.Module,
    examples: tuple[torch.Tensor, ...],
    input_names: Sequence[str],
    output_names: Sequence[str],
    opset: int,
    open_axes: Sequence[Mapping[int, object]] | None = None,
) -> ir.Model:
    """A module as ONNX, windowed attention nodes without a function body.

    Args:
        entry: takes the inputs by position; the model is its attribute `model`.
        examples: one for each input.
        input_names: names of the inputs.
        output_names: names of the outputs.
        opset: ONNX opset of the file.
        open_axes: for each input the `torch.export.Dim` of its open axes; by default none is open.

    Raises:
        UsageError: an opset out of range.
        ExportFailed: PyTorch's exporter gave up.
    """
    check_opset(opset)
    with _quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                entry,
                examples,
                dynamo=True,
                opset_version=opset,
                input_names=list(input_names),
                output_names=list(output_names),
                dynamic_shapes=None if open_axes is None else (tuple(dict(axes) for axes in open_axes),),
                verbose=False,
            )
        except Exception as error:
            raise _export_failed(error) from error
    if program is None:
        raise ExportFailed("PyTorch could not export the model.", why="It returned no program.")
    model = _finish(program.model)
    if open_axes is not None:
        _check_open(model, open_axes)
    return model


def _check_open(model: ir.Model, open_axes: Sequence[Mapping[int, object]]) -> None:
    """The exporter closes an axis without a word where the module's own code fixes its size.

    Raises:
        ExportFailed: an axis that was to stay open is closed.
    """
    for value, axes in zip(model.graph.inputs, open_axes, strict=True):
        for axis in axes:
            if value.shape is not None and isinstance(value.shape[axis], int):
                raise ExportFailed(
                    f"Axis {axis} of input {value.name!r} cannot stay open: it is always {value.shape[axis]}.",
                    why="The module's own code builds something of that size, a mask for one length perhaps.",
                    fix="Export it without --dynamic, at the length you need.",
                )


def _export_failed(error: Exception) -> ExportFailed:
    """The first line of what our own code said, else of the cause that PyTorch's error has at the bottom."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and len(causes) < 10:
        causes.append(cause)  # type: ignore[arg-type]
    inner = next((c for c in causes if isinstance(c, LocalAttnError)), None)
    if inner is not None:
        why = " ".join(filter(None, (inner.what, inner.why)))
    else:
        last = next((cause for cause in reversed(causes) if str(cause).strip()), error)
        why = ": ".join((type(last).__name__, *str(last).strip().splitlines()[:1]))
    return ExportFailed("PyTorch could not export the model.", why=why, fix="Run again with -v for the whole message.")


class _Entry(torch.nn.Module):
    """Calls the module by input names, so that an attn_bias can be given without a mask.

    Args:
        model: the module.
        names: of its inputs.
        computes_in: what real inputs are cast to; None leaves it to the module.
        gives: element type of the output.
    """

    def __init__(
        self, model: torch.nn.Module, names: Sequence[str], *, computes_in: torch.dtype | None, gives: torch.dtype
    ) -> None:
        super().__init__()
        self.model, self.computes_in, self.gives = model, computes_in, gives
        # The module's first argument is `x` whether tokens or embeddings go in.
        self.names = ["x" if name == "tokens" else name for name in names]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        cast = [x if self.computes_in is None or not x.is_floating_point() else x.to(self.computes_in) for x in inputs]
        output: torch.Tensor = self.model(**dict(zip(self.names, cast, strict=True)))
        return output.to(self.gives)


def _example(spec: TensorSpec) -> torch.Tensor:
    shape = [int(size) for size in spec.shape]
    if spec.dtype == "bool":
        return torch.ones(shape, dtype=torch.bool)
    return torch.zeros(shape, dtype=_DTYPE[spec.dtype])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's notes about itself away from the user's terminal."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _finish(model: ir.Model) -> ir.Model:
    """Share equal constants, name attention nodes by their module, drop what only the exporter needs."""
    traced = list(model.graph.initializers.values())
    DeduplicateInitializersPass(size_limit=1 << 62)(model)
    for value in traced:
        if value.name not in model.graph.initializers:
            value.const_value = None  # onnxscript's rewrite rules hold on to the graph they last saw
    RemoveUnusedNodesPass()(model)
    calls: Counter[str] = Counter()

    for node in model.graph.all_nodes():  # those in the bodies of Scan too
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
