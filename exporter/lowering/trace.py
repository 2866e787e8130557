"""Trace a source model to an ONNX graph with PyTorch's exporter, then apply this project's own changes."""

from __future__ import annotations

import sys
import sysconfig
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TextIO

import onnx_ir as ir
import torch
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    RemoveUnusedNodesPass,
)

from ...core.dtypes import IO_NAME
from ...core.error_texts import argument
from ...core.errors import ExportFailed, LocalAttnError, UsageError
from ...core.machine.process import quiet_loggers
from ...core.nodes.attention import DOMAIN, VARIANT_BY_OP_TYPE
from ...core.nodes.grouped import GROUPED_BY_OP_TYPE
from ...core.nodes.step import STEP_VARIANT_BY_OP_TYPE
from ...core.tensors import TensorSpec
from ...core.versions import DEFAULT_OPSET, OPSETS, ir_of_opset, package_version
from ...onnx_graph.fusing import fuse, streams
from ...onnx_graph.standard_ops.names import MODULE
from ..models.family import TORCH_DTYPE
from ..source.source_model import SourceModel
from ..source.step_source import StepSource
from .functions import attach_functions
from .rewriting import first_nodes_tried_first
from .translations import translations_made_once

# Loggers with messages about packages the user did not ask for, and about attributes that do not matter here.
_CHATTY = (
    "torch.onnx._internal.exporter._registration",
    "torch.fx.experimental.symbolic_shapes",
    "onnx_ir._convenience",
)
_NAME_SCOPES = "pkg.torch.onnx.name_scopes"


def check_opset(opset: int) -> None:
    """Refuse an opset that is not tested.

    Raises:
        UsageError: the opset is outside `OPSETS`.
    """
    if opset not in OPSETS:
        raise UsageError(
            f"Opset {opset} cannot be exported.",
            why=f"Opsets {OPSETS[0]} to {OPSETS[-1]} are supported.",
            fix=f"Use {DEFAULT_OPSET}, the default and the newest that TensorRT 10.3 reads.",
        )


def trace(
    source: SourceModel, dtype: str, opset: int, dynamic_axes: Sequence[Mapping[int, object]] | None = None
) -> ir.Model:
    """Trace the model to ONNX, with windowed attention nodes but without their ONNX functions.

    Args:
        source: the model and its shapes.
        dtype: "fp32", "fp16" or "bf16".
        opset: ONNX opset of the file.
        dynamic_axes: the dynamic axes, see `trace_module`.

    Raises:
        UsageError: an opset out of range.
        ExportFailed: PyTorch's exporter could not export it.
    """
    model = _traced(entry_of(source, dtype), source.inputs(dtype), source.outputs, opset, dynamic_axes)
    if source.family.fuses:
        fuse.apply(model)
    return model


def trace_step(source: StepSource, dtype: str, opset: int) -> ir.Model:
    """Trace the model to ONNX, with step nodes and their ONNX functions.

    Raises:
        UsageError: an opset out of range.
        ExportFailed: PyTorch's exporter could not export it.
    """
    model = _traced(_StepEntry(source, dtype), source.inputs(dtype), source.output_names(), opset)
    CommonSubexpressionEliminationPass()(model)
    if source.source.family.fuses:
        fuse.apply(model)
    attach_functions(model)
    return model


def entry_of(source: SourceModel, dtype: str) -> torch.nn.Module:
    """Return the module that is traced: it takes the inputs of `source.inputs(dtype)` by position."""
    return _Entry(source.module(dtype), source, dtype)


def _traced(
    entry: torch.nn.Module,
    specs: Sequence[TensorSpec],
    outputs: Sequence[str],
    opset: int,
    dynamic_axes: Sequence[Mapping[int, object]] | None = None,
) -> ir.Model:
    """Trace a module on example inputs of these shapes; the rest as `trace_module`."""
    names = [spec.name for spec in specs]
    return trace_module(entry, tuple(map(_example, specs)), names, outputs, opset, dynamic_axes)


def _example(spec: TensorSpec) -> torch.Tensor:
    """Make an input of zeros; for a mask, one that keeps everything."""
    shape = [int(size) for size in spec.shape]
    return torch.full(shape, int(spec.dtype == "bool"), dtype=getattr(torch, spec.dtype))


def trace_module(
    entry: torch.nn.Module,
    examples: tuple[torch.Tensor, ...],
    input_names: Sequence[str],
    output_names: Sequence[str],
    opset: int,
    dynamic_axes: Sequence[Mapping[int, object]] | None = None,
) -> ir.Model:
    """Trace a module to ONNX, with windowed attention nodes but without their ONNX functions.

    Args:
        entry: takes the inputs by position; the model is its attribute `model`.
        examples: one for each input.
        input_names: names of the inputs.
        output_names: names of the outputs.
        opset: ONNX opset of the file.
        dynamic_axes: for each input the `torch.export.Dim` of its dynamic axes; by default none is dynamic.

    Raises:
        UsageError: an opset out of range.
        ExportFailed: PyTorch's exporter could not export it.
    """
    check_opset(opset)
    with quiet(), translations_made_once(), first_nodes_tried_first(), torch.no_grad():
        try:
            program = torch.onnx.export(
                entry,
                examples,
                dynamo=True,
                opset_version=opset,
                input_names=list(input_names),
                output_names=list(output_names),
                dynamic_shapes=None if dynamic_axes is None else (tuple(dict(axes) for axes in dynamic_axes),),
                verbose=False,
            )
        except Exception as error:
            raise export_failed(error) from error
    if program is None:
        raise ExportFailed("PyTorch could not export the model.", why="It returned no program.")
    model = _finish(program.model)
    streams.apply(model)
    if dynamic_axes is not None:
        _check_dynamic(model, dynamic_axes)
    return model


def _check_dynamic(model: ir.Model, dynamic_axes: Sequence[Mapping[int, object]]) -> None:
    """Check that dynamic axes stayed dynamic.

    The exporter makes an axis static without an error if the module's own code fixes its size.

    Raises:
        ExportFailed: an axis that should be dynamic is static.
    """
    for value, axes in zip(model.graph.inputs, dynamic_axes, strict=True):
        for axis in axes:
            if value.shape is not None and isinstance(value.shape[axis], int):
                raise ExportFailed(
                    f"Axis {axis} of input {value.name!r} cannot be dynamic: it is always {value.shape[axis]}.",
                    why="The module's code fixes this size, for example by a mask of one length.",
                    fix=f"Export it without {argument('dynamic')}, at the length you need.",
                )


# What PyTorch's exporter names, and what to do about it.
_WAYS_OUT = {
    "grouped_mm": "transformers computes experts so by default. Call model.set_experts_implementation('batched_mm') "
    "before, which computes the same.",
}


def export_failed(error: Exception) -> ExportFailed:
    """Make the error for a failed trace from this package's own error, or else PyTorch's innermost cause."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and len(causes) < 10:
        causes.append(cause)  # type: ignore[arg-type]
    inner = next((c for c in causes if isinstance(c, LocalAttnError)), None)
    if inner is not None:
        why = " ".join(filter(None, (inner.what, inner.why)))
    else:
        last = next((cause for cause in reversed(causes) if str(cause).strip()), error)
        line = next((found for cause in reversed(causes) if (found := _users_line(cause))), "")
        if line and any(type(cause).__name__.startswith("GuardOnDataDependent") for cause in causes):
            return ExportFailed(
                "The module's code depends on the numbers in its inputs.",
                why=f"{line}: a file has one way of computing, whatever the numbers are.",
                fix="Choose between values with torch.where; for what always holds, say torch._check(condition).",
            )
        why = ": ".join((type(last).__name__, *str(last).strip().splitlines()[:1]))
        why = f"{line}: {why}" if line else why
    fix = next((fix for name, fix in _WAYS_OUT.items() if name in why), "Run again with -v for the whole message.")
    return ExportFailed("PyTorch could not export the model.", why=why, fix=fix)


def _users_line(error: BaseException) -> str:
    """Return the last line of the user's own code that an error went through: file, number and text; "" if none did."""
    apart = [Path(torch.__file__).parent, Path(__file__).parents[2], *map(Path, (sysconfig.get_path("stdlib"),))]
    apart += [Path(path) for path in map(sysconfig.get_path, ("purelib", "platlib")) if path]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        own = path.is_absolute() and not any(folder in path.parents for folder in apart)
        if own and "site-packages" not in path.parts:
            return f"{path.name}:{frame.lineno}, `{(frame.line or '').strip()[:100]}`"
    return ""


class _Entry(torch.nn.Module):
    """A module that calls the model by input names, so that an attn_bias can be given without a mask.

    Args:
        model: the module.
        source: the source model.
        dtype: of the file: floating point inputs are cast to what the model computes in, outputs to the file's type.
    """

    def __init__(self, model: torch.nn.Module, source: SourceModel, dtype: str) -> None:
        super().__init__()
        self.model, self.names = model, [source.family.parameters.get(x.name, x.name) for x in source.inputs(dtype)]
        self.computes_in = TORCH_DTYPE[dtype] if source.family.casts_inputs else None
        self.gives: torch.dtype = getattr(torch, IO_NAME[dtype])

    def cast(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return inputs in the element type that the model computes in."""
        return [x if self.computes_in is None or not x.is_floating_point() else x.to(self.computes_in) for x in inputs]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the outputs, in their order."""
        found = self.model(**dict(zip(self.names, self.cast(inputs), strict=True)))
        outputs: tuple[torch.Tensor, ...] = found if isinstance(found, tuple) else (found,)
        return tuple(x.to(self.gives) if x.is_floating_point() else x for x in outputs)


class _StepEntry(_Entry):
    """A module that calls the model with its inputs grouped as data, position and caches."""

    def __init__(self, source: StepSource, dtype: str) -> None:
        super().__init__(source.module(dtype), source.source, dtype)
        self.call, self.data = source.call, len(source.data(dtype))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        data, position, caches = inputs[: self.data], inputs[self.data], inputs[self.data + 1 :]
        output, *caches_after = self.call(self.model, self.cast(data), position, caches)
        return output.to(self.gives), *caches_after


class _Dropped(StringIO):
    """A stream whose text is dropped, except what shows progress: `rich` looks for the terminal behind a stream."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.rich_proxied_file = getattr(stream, "rich_proxied_file", stream)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the exporter's own messages from the user's terminal."""
    # PyTorch prints the graph so far where tracing fails: hundreds of lines.
    dropped = redirect_stdout(StringIO()), redirect_stderr(_Dropped(sys.stderr))
    with quiet_loggers(_CHATTY), warnings.catch_warnings(), dropped[0], dropped[1]:
        warnings.simplefilter("ignore")
        yield


def _finish(model: ir.Model) -> ir.Model:
    """Share equal constants, name attention nodes by their module, and drop data that only the exporter needs."""
    traced = list(model.graph.initializers.values())
    DeduplicateInitializersPass(size_limit=1 << 62)(model)
    for value in traced:
        if value.name not in model.graph.initializers:
            value.const_value = None  # onnxscript's rewrite rules keep a reference to the last graph
    # Weights are inputs at first, and onnx_ir remembers each that was removed, with its numbers.
    for value, count in getattr(model.graph.inputs, "_ref_counter", {}).items():
        if not count and not value.is_initializer():
            value.const_value = None
    RemoveUnusedNodesPass()(model)
    calls: Counter[str] = Counter()

    for node in model.graph.all_nodes():  # including those inside Scan
        scopes = node.metadata_props.get(_NAME_SCOPES, "")
        node.metadata_props.clear()  # stack traces contain paths of this machine
        path = _module_path(scopes)
        if path:
            node.metadata_props[MODULE] = path
        if node.domain == DOMAIN:
            calls[path] += 1  # one module may be called more than once
            node.name = f"{path or 'attention'}/{node.op_type}" + (f"_{calls[path]}" if calls[path] > 1 else "")
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()
    model.ir_version = ir_of_opset(model.opset_imports[""])
    model.producer_name, model.producer_version = "localattn", package_version()
    model.metadata_props.clear()
    return model


def _module_path(scopes: str) -> str:
    """Return the path of the innermost named module in PyTorch's list of scopes."""
    names = [part.strip("[]' ") for part in scopes.split(",")]
    paths = [name for name in names if name.startswith("model.")]
    return paths[-1].removeprefix("model.") if paths else ""


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    """List the attention nodes, in order."""
    known = VARIANT_BY_OP_TYPE.keys() | GROUPED_BY_OP_TYPE.keys()
    return [node for node in model.graph if node.domain == DOMAIN and node.op_type in known]


def step_nodes(model: ir.Model) -> list[ir.Node]:
    """List the step nodes, in order."""
    return [node for node in model.graph if node.domain == DOMAIN and node.op_type in STEP_VARIANT_BY_OP_TYPE]
