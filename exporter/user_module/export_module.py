"""`export_module`: write any nn.Module as a checked ONNX file in which upstream's layers are windowed attention.

Every upstream layer gets its export-friendly forward; the rest is exported unchanged. The file is compared with the
user's own unchanged module in eager mode; each replaced layer's window and memory are checked in the written file. The
file appears whole and checked, or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...core.documents.sidecar import CheckRecord, LayerFacts
from ...core.error_texts import argument
from ...core.errors import ExportFailed, UsageError
from ...core.progress import timed_steps
from ...core.storage.file_kinds import ONNX
from ...core.storage.outputs import Output, check_outputs, writing
from ...core.tensors import BATCH, POSITION_IDS, SEQUENCE, TensorSpec
from ...runtime.inputs.arrays import check_drawable
from ...runtime.inputs.size_sweep import sweep_sizes
from ...runtime.parity.golden import Golden
from ...runtime.parity.inputs import InputSet
from ...runtime.parity.runner import SessionRunner
from ..artifact.form import WrittenForm, written_form
from ..artifact.publish import Part, finish_export
from ..artifact.serialize import message
from ..checkpoint.open_checkpoint import OpenedCheckpoint, open_live
from ..checkpoint.tensors import check_finite
from ..checks.checked_file import SequenceFile
from ..checks.golden import check_golden, open_golden
from ..checks.growth import Growth
from ..checks.judged import Judged
from ..checks.layers import check_growth, check_layer_memory, check_layer_windows
from ..checks.parity import check_input_sets
from ..checks.quadratic_memory import Shape, Taken, freest, graph_shapes
from ..checks.sweep import check_joined_rows
from ..checks.wide_integers import check_wide_integers, dynamic_sizes
from ..export import ExportReport, Progress, export, open_request
from ..lowering import functions, trace
from ..options import ExportRequest, FileOptions, ModuleOptions, ShapeRequest, common, recorded
from ..source.dynamic_axes import LARGEST_BATCH
from .adapters import refuse_adapters
from .dynamic_axes import check_dynamic_axes
from .inputs import (
    Arrays,
    ModuleInput,
    axis_sizes,
    bind,
    call,
    draw_all,
    from_arrays,
    name_axes,
    other_lengths,
    parse_input,
    with_token_limits,
)
from .module_runner import Entry, ModuleRunner
from .observe import AutocastSeen, refuse_autocast, working_copy
from .replace import ReplacedLayer, ReplacementReport, replace_local_attention

_log = logging.getLogger(__name__)

Inputs = Sequence[ModuleInput | str] | Mapping[str, NDArray[Any] | Tensor]
_SEEDS = (0, 1)


@dataclass(frozen=True)
class Origin:
    """Where a module came from, for the sidecar.

    Args:
        name: "package.module:function", or the class.
        kwargs: the function's arguments.
        weights: name of the checkpoint, "" without one.
        weights_sha256: SHA-256 of the checkpoint.
        notes: what was chosen while building the module.
        warnings: choices between several sets of weights that nobody made.
        entry: the entry of the checkpoint that was asked for; None where none was.
    """

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""
    weights_sha256: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    entry: str | None = None


@dataclass(frozen=True)
class ModuleExportReport(ExportReport):
    """The result of exporting a module.

    Args:
        replacement: which upstream layers were replaced, and the module that was traced.
    """

    replacement: ReplacementReport = field(kw_only=True)


@timed_steps(_log)
def export_module(
    module: nn.Module,
    inputs: Inputs,
    output: Path | str,
    options: ModuleOptions | None = None,
    *,
    origin: Origin | None = None,
    progress: Progress = lambda _: None,
) -> ExportReport:
    """Replace upstream's layers in a module, export it, check the file and move it to its place.

    A Hugging Face model is exported as its folder would be.

    Args:
        module: the user's module; it is not changed.
        inputs: arrays or tensors by argument name, or `name:dtype:[shape]` for each.
        output: the ONNX file to write.
        options: how to export; by default with the static shapes of the inputs.
        origin: where the module came from, for the sidecar.
        progress: called with the name of each step as it begins.

    Raises:
        UsageError: the module or the inputs cannot be used.
        ExportFailed: PyTorch's exporter could not export it.
        CheckFailed: a check found a fault; nothing was written.
    """
    options, output = options or ModuleOptions(), Path(output)
    if torch.is_autocast_enabled("cpu"):
        raise refuse_autocast("export_module was called", torch.get_autocast_dtype("cpu"))
    refuse_adapters(module)
    live = open_live(module)
    if live is not None:
        return export(_live_request(live, _listed(inputs), output, options), progress, live)
    read = [] if options.golden is None else [Path(options.golden)]
    with writing(Output(output, ONNX), inputs=read, overwrite=options.overwrite) as folder:
        progress("Running the module")
        job = ModuleJob(module, inputs, output, options, origin)
        progress("Tracing the module")
        golden = open_golden(options.golden, job.specs(), job.output_names, None, job.limits)
        model = job.trace(job.replacement.module)
        functions.attach_functions(model)
        form = written_form(model, trace.attention_nodes(model), options)
        part = Part(
            output,
            form,
            checked=lambda staged: _ModuleFile(staged, job, form, golden, progress),
            describe=lambda _: job.model_facts(),
        )
        (sidecar,) = finish_export([part], folder, options, progress)
    return ModuleExportReport(output, sidecar, job.notes, doubts=job.origin.warnings, replacement=job.replacement)


def _live_request(
    checkpoint: OpenedCheckpoint, inputs: Sequence[ModuleInput], output: Path, options: ModuleOptions
) -> ExportRequest:
    """Return the request to export a live model of a family that is read from folders, at the sizes of the inputs.

    Raises:
        UsageError: the model has no such inputs.
    """
    name = checkpoint.loaded.path.name
    positions = any(x.name == POSITION_IDS for x in inputs)
    known = [spec.name for spec in checkpoint.source(ShapeRequest(position_ids=positions)).inputs("fp32")]
    if not inputs or any(x.name not in known or len(x.shape) != 2 or x.shape != inputs[0].shape for x in inputs):
        raise UsageError(
            f"The inputs {', '.join(x.name for x in inputs)} do not fit.",
            why=f"The file of a {name} takes {', '.join(known)}, each of the same two axes.",
        )
    batch, length = inputs[0].shape
    return ExportRequest(
        checkpoint=checkpoint.loaded.path,
        output=output,
        shapes=ShapeRequest(options.max_seq_len or length, batch, position_ids=positions),
        **common(FileOptions, options),
    )


def plan_module(
    module: nn.Module, inputs: Inputs, output: Path, options: ModuleOptions, origin: Origin | None = None
) -> ReplacementReport:
    """Return which layers of a module would have a window in its file, after all that is refused before work begins.

    Raises:
        UsageError: the module or the inputs cannot be used.
    """
    refuse_adapters(module)
    live = open_live(module)
    if live is None:
        return ModuleJob(module, inputs, output, options, origin).replacement
    _, source = open_request(_live_request(live, _listed(inputs), output, options), live)
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return ReplacementReport(
        module,
        [ReplacedLayer(layer, kind, view.geometry, ()) for view in source.window_views() for layer in view.layers],
    )


def _listed(inputs: Inputs) -> list[ModuleInput]:
    """Return the inputs, in whatever form they are given."""
    parsed = from_arrays(inputs) if isinstance(inputs, Mapping) else list(inputs)
    return [parse_input(x) if isinstance(x, str) else x for x in parsed]


def _check_request(module: nn.Module, inputs: Sequence[ModuleInput], output: Path, options: ModuleOptions) -> None:
    """Refuse an export that cannot succeed, whatever the module computes.

    Raises:
        UsageError: the opset, the output, the module or the inputs cannot be used.
        MissingDependency: the inputs do not fit into memory.
    """
    trace.check_opset(options.opset)
    check_outputs([Output(output, ONNX)], overwrite=options.overwrite)
    if not isinstance(module, nn.Module):
        raise UsageError(f"A {type(module).__name__} cannot be exported.", why="It is no torch.nn.Module.")
    if not inputs:
        raise UsageError(
            "The module's inputs are not given.", fix="Give arrays by name, or name:dtype:[shape] for each."
        )
    check_drawable([x.spec() for x in inputs])


class ModuleJob:
    """One export of a module, from its inputs to the facts about its file.

    It replaces the layers, and refuses an export that cannot succeed, before work begins.

    Args:
        module: the user's module.
        inputs: its inputs, as `export_module` takes them.
        output: the ONNX file to write.
        options: how to export.
        origin: where the module came from.

    Raises:
        UsageError: the module or the inputs cannot be used.
    """

    def __init__(
        self, module: nn.Module, inputs: Inputs, output: Path, options: ModuleOptions, origin: Origin | None = None
    ) -> None:
        written = _listed(inputs)
        _check_request(module, written, output, options)
        listed = name_axes(written, options.dynamic)
        self.module, self.options = module, options
        self.origin = origin or Origin(f"{type(module).__module__}.{type(module).__qualname__}")
        self.names = [x.name for x in listed]
        self.by_name = bind(module, self.names)
        untouched = working_copy(module)
        self.inputs, notes = with_token_limits(listed, untouched, self.by_name)
        named = any(axis for x in written for axis in x.axes)
        check_dynamic_axes(untouched, self.inputs, self.by_name, options.dynamic, guessed=not named)
        self.sizes, self.notes = self._sizes(), [*self.origin.notes, *notes]
        example = self.draw(0, self.sizes)
        self.reference = ModuleRunner(module, untouched, self.by_name, example)
        self.replacement = replace_local_attention(
            module, lambda m: call(m, example, self.by_name), dynamic_length=bool(options.dynamic)
        )
        self.notes += [*self.reference.notes, *(x.describe() for x in self.replacement.left)]
        if not self.replacement.replaced:
            self.notes.append("no upstream local-attention layer was replaced; the module exports as it is")
        with AutocastSeen() as seen:
            outputs = self.reference.check_repeats(example)
        if seen.dtype is not None and options.atol is None and options.rtol is None:
            raise refuse_autocast(f"The {type(module).__name__} computes", seen.dtype)
        if not all(np.isfinite(array).all() for array in outputs.values()):
            check_finite(module.named_parameters())  # else NaN comes from the computation on these inputs
        self.output_names = list(outputs)

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of named axes for the trace: the example's, the longest sequence, no dynamic size of 1."""
        sizes, longest = axis_sizes(self.inputs), self.options.max_seq_len
        if longest is not None:
            if SEQUENCE not in self.options.dynamic:
                raise UsageError(
                    f"{argument('max_seq_len')} needs {argument('dynamic', ('seq',))}.",
                    why="The length of the file is fixed.",
                )
            if longest < 2:
                raise UsageError(f"{argument('max_seq_len')} is {longest}.", why="A dynamic length needs 2 or more.")
            sizes[SEQUENCE] = longest
        for name in self.options.dynamic:
            sizes[name] = max(sizes[name], 2)
        return sizes

    def draw(self, seed: int, sizes: Mapping[str, int]) -> Arrays:
        """Draw inputs of these sizes."""
        return draw_all(self.inputs, seed, sizes)

    def trace(self, module: nn.Module, arrays: Arrays | None = None) -> ir.Model:
        """Trace the module to ONNX without its ONNX functions, at the sizes of the file or of the given inputs.

        Raises:
            ExportFailed: PyTorch's exporter could not export it.
        """
        arrays = self.draw(0, self.sizes) if arrays is None else arrays
        dimensions = None
        if self.options.dynamic:
            dims = {name: torch.export.Dim(name, min=1, max=self._largest(name)) for name in self.options.dynamic}
            dimensions = [{i: dims[axis] for i, axis in enumerate(x.axes) if axis in dims} for x in self.inputs]
        examples = tuple(torch.from_numpy(array) for array in arrays.values())
        entry = Entry(module, self.names, self.by_name)
        return trace.trace_module(entry, examples, self.names, self.output_names, self.options.opset, dimensions)

    def _largest(self, axis: str) -> int:
        return self.sizes[axis] if axis == SEQUENCE else LARGEST_BATCH

    def input_sets(self) -> Iterator[InputSet]:
        """Yield inputs to compare on: random ones, the user's own, and the sweep of dynamic sizes."""
        for seed in self.options.seeds or _SEEDS:
            yield InputSet(f"seed {seed}", self.draw(seed, self.sizes))
        own = {x.name: x.example for x in self.inputs if x.example is not None}
        if len(own) == len(self.inputs) and all(self._has_own_sizes(x) for x in self.inputs):
            yield InputSet("the inputs given", own)
        if self.options.dynamic:
            windows = self.replacement.windows
            for sizes in sweep_sizes(self.options.dynamic, self.sizes, SEQUENCE, windows):
                named = " ".join(f"{axis}={sizes[axis]}" for axis in self.options.dynamic)
                yield InputSet(named, self.draw(sum(sizes.values()), sizes))

    def _has_own_sizes(self, x: ModuleInput) -> bool:
        """Return whether the user's own numbers fit the file."""
        named = zip(x.shape, x.axes, strict=True)
        return all(axis in self.options.dynamic or self.sizes.get(axis, size) == size for size, axis in named)

    def absent(self, form: WrittenForm) -> list[str]:
        """List replaced layers without a node in the graph, except AFT-local, which never has one."""
        present = {window.name.rpartition("/")[0] for window in form.windows}
        return [
            layer.path
            for layer in self.replacement.replaced
            if layer.geometry is not None and layer.path and not present & {layer.path, *layer.other_paths}
        ]

    def retrace(self, taken: Taken) -> tuple[set[int], dict[str, Shape]] | None:
        """Trace the module so that every layer sees other lengths.

        Returns:
            Those lengths and the shapes of the graph by name; None if no such lengths are found.
        """
        for lengths, module, example in freest(self._elsewhere(), lambda found: found[0], taken):
            try:
                return lengths, graph_shapes(message(self.trace(module, example)))
            except (UsageError, ExportFailed):  # the module works at one length only
                continue
        return None

    def _elsewhere(self) -> Iterator[tuple[set[int], nn.Module, Arrays]]:
        """Yield other lengths that all layers see, the module replaced for them, and inputs of those lengths."""
        known = {layer.path: set(layer.lengths) for layer in self.replacement.replaced}
        lengths = {n for seen in known.values() for n in seen}
        step = max((geometry.window_size for geometry in self.replacement.windows), default=1)
        for example in other_lengths(self.inputs_as_traced(), lengths, step):
            try:
                other = replace_local_attention(self.module, lambda m, x=example: call(m, x, self.by_name))  # type: ignore[misc]
            except (UsageError, ExportFailed):
                continue
            seen = {layer.path: set(layer.lengths) for layer in other.replaced}
            # If not, that axis is not the sequence.
            if known and seen.keys() == known.keys() and not any(seen[path] & lengths for path in seen):
                yield {n for found in seen.values() for n in found}, other.module, example

    def growths(self) -> Iterator[Growth | str]:
        """Trace the module at another size of each axis of its inputs; yield the name of an axis with one size only.

        Axes that have the same name change together, and so do unnamed ones of one size at the same place.
        """
        given = self.inputs_as_traced()
        groups: dict[tuple[object, int], list[set[int]]] = {}
        for place, x in enumerate(given):
            for axis, (size, name) in enumerate(zip(x.shape, x.axes, strict=True)):
                if size > 1:  # an axis of one number is no sequence
                    groups.setdefault((name or axis, size), [set() for _ in given])[place].add(axis)
        for (_, size), chosen in groups.items():
            first = next(place for place, axes in enumerate(chosen) if axes)
            named = f"axis {min(chosen[first])} of {given[first].name}"
            yield self._grown(named, size, chosen) or named

    def _grown(self, axis: str, size: int, chosen: Sequence[set[int]]) -> Growth | None:
        """Trace the module with these axes at another size; None if it takes no other that is tried."""
        step = max((geometry.window_size for geometry in self.replacement.windows), default=1)
        halves = dict.fromkeys((size // 2 // step * step, size - step, 2 * size, size + step))
        for other in (n for n in halves if n > 0 and n != size):
            resized = [
                replace(
                    x,
                    shape=tuple(other if axis in axes else n for axis, n in enumerate(x.shape)),
                    axes=("",) * len(x.shape),
                )
                for x, axes in zip(self.inputs_as_traced(), chosen, strict=True)
            ]
            example = draw_all(resized, 0, {})
            try:
                module = replace_local_attention(self.module, lambda m, x=example: call(m, x, self.by_name)).module  # type: ignore[misc]
                return Growth(axis, size, other, message(self.trace(module, example)))
            except (UsageError, ExportFailed):
                continue
        return None

    def model_facts(self) -> dict[str, Any]:
        """Return what the sidecar records about the module."""
        replaced, left = self.replacement.replaced, self.replacement.left
        lengths = [n for layer in replaced for n in layer.lengths]
        layers = [LayerFacts(path=x.path, class_name=x.class_name, replaced=True, detail=x.window()) for x in replaced]
        layers += [LayerFacts(path=x.path, class_name=x.class_name, replaced=False, detail=x.why) for x in left]
        return {
            "class_name": self.origin.name,
            "kwargs": dict(self.origin.kwargs),
            "inputs": self.specs(),
            "seq_len": self.sizes.get(SEQUENCE, max(lengths, default=1)),
            "batch": self.sizes.get(BATCH, 1),
            "dynamic": list(self.options.dynamic),
            "dtype": "fp32",
            "layers": layers,
            "options": recorded(self.options) | ({} if self.origin.entry is None else {"entry": self.origin.entry}),
            "checkpoint_sha256": self.origin.weights_sha256,
            "checkpoint_name": self.origin.weights,
        }

    def specs(self) -> list[TensorSpec]:
        """List the inputs of the file, with dynamic axes by name."""
        return [x.spec(self.options.dynamic) for x in self.inputs_as_traced()]

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """Return the smallest and the largest size of an input's dynamic axis."""
        given = next(x for x in self.inputs if x.name == name)
        return 1, self._largest(given.axes[axis])

    def inputs_as_traced(self) -> list[ModuleInput]:
        """Return the inputs at the sizes of the file."""
        return [
            replace(x, shape=tuple(self.sizes.get(axis, size) for size, axis in zip(x.shape, x.axes, strict=True)))
            for x in self.inputs
        ]


class _ModuleFile(SequenceFile):
    """The written file of a user's own module."""

    kind = "module"

    def __init__(
        self, path: Path, job: ModuleJob, form: WrittenForm, golden: Golden | None, progress: Progress
    ) -> None:
        super().__init__(path, job.options, progress, form.nodes)
        self._job, self._form, self.golden = job, form, golden

    def golden_outputs(self, golden: Golden) -> CheckRecord:
        return check_golden(SessionRunner(self.session), golden, self.options.tolerance, "fp32")

    def parity(self) -> CheckRecord:
        sets = islice(self._job.input_sets(), 1 if self.options.quick else None)
        return check_input_sets(
            Judged(self.session, self.path, "fp32"), self._job.reference, sets, self.options.tolerance("fp32")
        )

    def rows(self) -> CheckRecord:
        job, dynamic = self._job, self._job.options.dynamic
        lengths = [length := job.sizes.get(SEQUENCE, 1)]
        if SEQUENCE in dynamic and not self.options.quick:
            window = max((geometry.window_size for geometry in job.replacement.windows), default=1)
            lengths += [n for n in [max(1, length // 2 // window) * window] if n < length]
        return check_joined_rows(self.session, self.model, "fp32", job.draw, job.sizes, lengths)

    def window(self) -> CheckRecord:
        return check_layer_windows(self.nodes, self._job.absent(self._form))

    def memory(self) -> CheckRecord:
        job = self._job
        lengths = {n for layer in job.replacement.replaced for n in layer.lengths}
        sequences = [axis for axis in job.options.dynamic if axis != BATCH]
        found = check_layer_memory(self.nodes, lengths, sequences, job.retrace)
        if found.status == "failed" or sequences:
            return found
        return check_growth(self.nodes, lengths, found, job.growths())

    def integers(self) -> CheckRecord:
        job = self._job
        limits = {x.name: x.limit for x in job.inputs}
        sizes = dynamic_sizes(job.options.dynamic, job.sizes.get(SEQUENCE, 1))
        return check_wide_integers(self.model, self.path.parent, limits, sizes)
