"""`export_module`: from any nn.Module to a checked ONNX file in which upstream's layers are windowed attention.

Every upstream layer gets its export-friendly forward, the rest exports as it is. The file is compared with the user's
own module, untouched, in eager mode; each replaced layer's window and memory are checked in the written file. The
file appears whole and checked, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...core.documents.sidecar import CheckRecord, LayerFacts, Sidecar
from ...core.errors import ExportFailed, UsageError
from ...core.storage.file_kinds import ONNX
from ...core.storage.files import sha256
from ...core.storage.outputs import Output, check_outputs, writing
from ...runtime.inputs.arrays import check_drawable
from ...runtime.inputs.size_sweep import sweep_sizes
from ...runtime.parity.inputs import InputSet
from ..artifact.options import FileOptions
from ..artifact.publish import finish_export, output_specs, package_versions, window_facts
from ..checks.layers import check_layer_memory, check_layer_windows
from ..checks.loads import check_loads, check_model
from ..checks.parity import check_input_sets
from ..checks.quadratic_memory import Shape, Taken, allowed, freest, graph_shapes
from ..lowering import functions, trace
from .inputs import (
    BATCH,
    SEQUENCE,
    Arrays,
    ModuleInput,
    axis_sizes,
    bind,
    call,
    from_arrays,
    name_axes,
    other_lengths,
    parse_input,
    with_token_limits,
)
from .module_runner import ModuleRunner
from .observe import working_copy
from .outputs import Entry
from .replace import ReplacementReport, replace_local_attention

Inputs = Sequence[ModuleInput | str] | Mapping[str, NDArray[Any] | Tensor]
Progress = Callable[[str], None]
# No sequence is longer: only a bound for PyTorch's exporter where an axis is open.
_LARGEST_BATCH = 1 << 16
_SEEDS = (0, 1)


class _Elsewhere(NamedTuple):
    """Other lengths that all layers see, the module replaced for them, and inputs of those."""

    lengths: set[int]
    module: nn.Module
    example: Arrays


@dataclass(frozen=True)
class Origin:
    """Where a module came from, for the sidecar.

    Args:
        name: "package.module:function", or the class.
        kwargs: the function's arguments.
        weights: name of the checkpoint, "" without one.
        weights_sha256: of the checkpoint.
        notes: what was chosen on the way to the module.
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""
    weights_sha256: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModuleOptions(FileOptions):
    """How a module is exported, the options of every file besides; `module_inputs` says which axes have names.

    Args:
        max_seq_len: longest sequence where that axis is open; by default the example's.
    """

    max_seq_len: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class ModuleExportReport:
    """What was written.

    Args:
        path: the ONNX file.
        sidecar: the facts beside it, checks included.
        replacement: what became of every upstream layer, and the module that was traced.
        notes: what was assumed on the way.
    """

    path: Path
    sidecar: Sidecar
    replacement: ReplacementReport
    notes: list[str]


def export_module(
    module: nn.Module,
    inputs: Inputs,
    output: Path | str,
    options: ModuleOptions | None = None,
    *,
    origin: Origin | None = None,
    progress: Progress = lambda _: None,
) -> ModuleExportReport:
    """Replace, trace, check, publish.

    Args:
        module: the user's; it is not changed.
        inputs: arrays or tensors by argument name, or `name:dtype:[shape]` for each.
        output: the ONNX file to write.
        options: how; by default static shapes, those of the inputs.
        origin: where the module came from, for the sidecar.
        progress: told each step as it begins.

    Raises:
        UsageError: the module or the inputs cannot be used.
        ExportFailed: PyTorch's exporter gave up.
        CheckFailed: a check found a fault; nothing was written.
    """
    options, output = options or ModuleOptions(), Path(output)
    with writing(Output(output, ONNX), overwrite=options.overwrite) as folder:
        progress("Running the module")
        job = open_module(module, inputs, output, options, origin)
        progress("Tracing the module")
        model = job.trace(job.replacement.module)
        functions.attach_functions(model)
        sidecar = finish_export(
            model,
            folder,
            output,
            function_body=options.function_body,
            external_data_from=options.external_data_from,
            check=lambda staged: job.checks(staged, model, progress),
            describe=lambda *written: job.sidecar(model, *written),
            progress=progress,
        )
    return ModuleExportReport(output, sidecar, job.replacement, job.notes)


def open_module(
    module: nn.Module, inputs: Inputs, output: Path, options: ModuleOptions, origin: Origin | None = None
) -> ModuleJob:
    """Everything that can be refused before work begins; the layers are replaced.

    Raises:
        UsageError: the module or the inputs cannot be used.
    """
    trace.check_opset(options.opset)
    check_outputs([Output(output, ONNX)], overwrite=options.overwrite)
    if not isinstance(module, nn.Module):
        raise UsageError(f"A {type(module).__name__} cannot be exported.", why="It is no torch.nn.Module.")
    parsed = from_arrays(inputs) if isinstance(inputs, Mapping) else list(inputs)
    listed = name_axes([parse_input(x) if isinstance(x, str) else x for x in parsed], options.dynamic)
    if not listed:
        raise UsageError("The module's inputs are not given.", fix="Add --input name:dtype:[shape], or --load-inputs.")
    check_drawable([x.spec() for x in listed])
    by_name = bind(module, [x.name for x in listed])
    untouched = working_copy(module)
    limited, notes = with_token_limits(listed, untouched, by_name)
    return ModuleJob(module, untouched, limited, by_name, options, origin, notes)


class ModuleJob:
    """One export of a module, from its inputs to the facts about its file.

    Args:
        module: the user's.
        untouched: a copy of it to run.
        inputs: what goes in.
        by_name: whether they go in by name.
        options: how to export.
        origin: where the module came from.
        notes: what was assumed of the inputs.
    """

    def __init__(
        self,
        module: nn.Module,
        untouched: nn.Module,
        inputs: Sequence[ModuleInput],
        by_name: bool,
        options: ModuleOptions,
        origin: Origin | None,
        notes: Sequence[str] = (),
    ) -> None:
        self.module, self.inputs, self.by_name, self.options = module, list(inputs), by_name, options
        self.origin = origin or Origin(f"{type(module).__module__}.{type(module).__qualname__}")
        self.names = [x.name for x in inputs]
        self.sizes, self.notes = self._sizes(), [*self.origin.notes, *notes]
        example = self._draw(0, self.sizes)
        self.reference = ModuleRunner(module, untouched, by_name, example)
        self.replacement = replace_local_attention(
            module, lambda m: call(m, example, by_name), dynamic_length=bool(options.dynamic)
        )
        self.notes += [*self.reference.notes, *(x.describe() for x in self.replacement.left)]
        if not self.replacement.replaced:
            self.notes.append("no upstream local-attention layer was replaced; the module exports as it is")
        self.output_names = list(self.reference.check_repeats(example))

    def _sizes(self) -> dict[str, int]:
        """Sizes of the named axes to trace at: the example's, the longest sequence, and no open axis of size 1."""
        sizes, longest = axis_sizes(self.inputs), self.options.max_seq_len
        if longest is not None:
            if SEQUENCE not in self.options.dynamic:
                raise UsageError("--max-seq-len needs --dynamic seq.", why="The length of the file is fixed.")
            if longest < 2:
                raise UsageError(f"--max-seq-len is {longest}.", why="An open length needs 2 or more.")
            sizes[SEQUENCE] = longest
        for name in self.options.dynamic:
            sizes[name] = max(sizes[name], 2)
        return sizes

    def _draw(self, seed: int, sizes: Mapping[str, int]) -> Arrays:
        return {x.name: x.draw(seed + place, sizes) for place, x in enumerate(self.inputs)}

    def trace(self, module: nn.Module, arrays: Arrays | None = None) -> ir.Model:
        """The module as ONNX, without function bodies; at the sizes of the file, or of these inputs.

        Raises:
            ExportFailed: PyTorch's exporter gave up.
        """
        arrays = self._draw(0, self.sizes) if arrays is None else arrays
        open_axes = None
        if self.options.dynamic:
            dims = {name: torch.export.Dim(name, min=1, max=self._largest(name)) for name in self.options.dynamic}
            open_axes = [{i: dims[axis] for i, axis in enumerate(x.axes) if axis in dims} for x in self.inputs]
        examples = tuple(torch.from_numpy(array) for array in arrays.values())
        entry = Entry(module, self.names, self.by_name)
        return trace.trace_module(entry, examples, self.names, self.output_names, self.options.opset, open_axes)

    def _largest(self, axis: str) -> int:
        return self.sizes[axis] if axis == SEQUENCE else _LARGEST_BATCH

    def checks(self, path: Path, model: ir.Model, progress: Progress) -> Iterator[CheckRecord]:
        """Each check of a written file, cheapest first."""
        progress("Checking: ONNX")
        yield check_model(path)
        progress("Checking: onnxruntime")
        record, session = check_loads(path)
        yield record
        progress("Checking: parity with the untouched module")
        tolerance = self.options.tolerance("fp32")
        yield check_input_sets(session, self.reference, self._input_sets(), tolerance)
        written = onnx.load(path, load_external_data=False)
        progress("Checking: window witness")
        yield check_layer_windows(written, self._absent(model))
        progress("Checking: memory audit")
        lengths = {n for layer in self.replacement.replaced for n in layer.lengths}
        open_axis = SEQUENCE if SEQUENCE in self.options.dynamic else ""
        audit = check_layer_memory(written, lengths, open_axis, self._retrace)
        yield allowed(audit) if self.options.allow_quadratic else audit

    def _input_sets(self) -> Iterator[InputSet]:
        """Inputs to compare on: random ones, the user's own, and the sweep of open sizes."""
        for seed in self.options.seeds or _SEEDS:
            yield InputSet(f"seed {seed}", self._draw(seed, self.sizes))
        own = {x.name: x.example for x in self.inputs if x.example is not None}
        if len(own) == len(self.inputs) and all(self._has_own_sizes(x) for x in self.inputs):
            yield InputSet("the inputs given", own)
        if self.options.dynamic:
            windows = self.replacement.windows
            for sizes in sweep_sizes(self.options.dynamic, self.sizes, SEQUENCE, windows):
                named = " ".join(f"{axis}={sizes[axis]}" for axis in self.options.dynamic)
                yield InputSet(named, self._draw(sum(sizes.values()), sizes))

    def _has_own_sizes(self, x: ModuleInput) -> bool:
        """Whether the user's own numbers fit the file."""
        named = zip(x.shape, x.axes, strict=True)
        return all(axis in self.options.dynamic or self.sizes.get(axis, size) == size for size, axis in named)

    def _absent(self, model: ir.Model) -> list[str]:
        """Replaced layers that left no node in the graph; AFT-local has none."""
        present = {(node.name or "").rpartition("/")[0] for node in trace.attention_nodes(model)}
        return [
            layer.path
            for layer in self.replacement.replaced
            if layer.geometry is not None and layer.path and not present & {layer.path, *layer.other_paths}
        ]

    def _retrace(self, taken: Taken) -> tuple[set[int], dict[str, Shape]] | None:
        """Shapes of the same module's graph where every layer sees other lengths, and those; None if none is found."""
        for lengths, module, example in freest(self._elsewhere(), lambda found: found.lengths, taken):
            try:
                return lengths, graph_shapes(ir.serde.serialize_model(self.trace(module, example)))
            except (UsageError, ExportFailed):  # a module made for one length
                continue
        return None

    def _elsewhere(self) -> Iterator[_Elsewhere]:
        known = {layer.path: set(layer.lengths) for layer in self.replacement.replaced}
        lengths = {n for seen in known.values() for n in seen}
        step = max((geometry.window_size for geometry in self.replacement.windows), default=1)
        for example in other_lengths(self.inputs_as_traced(), lengths, step):
            try:
                other = replace_local_attention(self.module, lambda m, x=example: call(m, x, self.by_name))  # type: ignore[misc]
            except (UsageError, ExportFailed):
                continue
            seen = {layer.path: set(layer.lengths) for layer in other.replaced}
            # Else that axis is not the sequence.
            if known and seen.keys() == known.keys() and not any(seen[path] & lengths for path in seen):
                yield _Elsewhere({n for found in seen.values() for n in found}, other.module, example)

    def sidecar(self, model: ir.Model, staged: Path, data: str | None, checks: list[CheckRecord]) -> Sidecar:
        """What is known about the file, for those who find it later."""
        replaced, left = self.replacement.replaced, self.replacement.left
        lengths = [n for layer in replaced for n in layer.lengths]
        layers = [LayerFacts(path=x.path, class_name=x.class_name, replaced=True, detail=x.window()) for x in replaced]
        layers += [LayerFacts(path=x.path, class_name=x.class_name, replaced=False, detail=x.why) for x in left]
        return Sidecar(
            class_name=self.origin.name,
            kwargs=dict(self.origin.kwargs),
            inputs=[x.spec(self.options.dynamic) for x in self.inputs_as_traced()],
            outputs=output_specs(model),
            seq_len=self.sizes.get(SEQUENCE, max(lengths, default=1)),
            batch=self.sizes.get(BATCH, 1),
            dynamic=list(self.options.dynamic),
            dtype="fp32",
            opset=self.options.opset,
            windows=[window_facts(node) for node in trace.attention_nodes(model)],
            layers=layers,
            function_body=self.options.function_body,
            external_data=data,
            versions=package_versions(),
            checkpoint_sha256=self.origin.weights_sha256,
            checkpoint_name=self.origin.weights,
            model_sha256=sha256(staged),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            checks=checks,
        )

    def inputs_as_traced(self) -> list[ModuleInput]:
        """The inputs with the sizes of the file."""
        return [
            replace(x, shape=tuple(self.sizes.get(axis, size) for size, axis in zip(x.shape, x.axes, strict=True)))
            for x in self.inputs
        ]
