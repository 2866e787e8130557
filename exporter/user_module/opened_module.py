"""A module of the user's own, ready for export: its layers replaced, its inputs bound, its reference at hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...core.documents.sidecar import LayerRecord
from ...core.dtypes import IO_NAME
from ...core.error_texts import argument
from ...core.errors import ExportFailed, UsageError
from ...core.tensors import BATCH, SEQUENCE, TensorSpec
from ...core.text.read import Part
from ...core.tolerance import Tolerance
from ...onnx_graph.block_weights import BITS
from ...onnx_graph.precision import fp32_to_half
from ...runtime.inputs.arrays import check_drawable
from ...runtime.inputs.size_sweep import sweep_sizes
from ...runtime.parity.baseline import BaselineMeter, UntouchedModule
from ...runtime.parity.inputs import InputSet
from ...runtime.text_inputs.rows import fill, token_names
from ...runtime.text_inputs.tokens import Tokens, open_tokens
from ..artifact.form import WrittenForm
from ..artifact.serialize import message
from ..checkpoint.tensors import check_finite
from ..checks.growth import Growth
from ..checks.judged import Judged
from ..checks.quadratic_memory import Shape, SizesInUse, graph_shapes, unused_first
from ..lowering import functions, trace
from ..lowering.quantize.blocked import Rounding
from ..lowering.quantize.calibration import Calibration
from ..lowering.quantize.weights import WEIGHT_KINDS, check_precision, quantize_weights
from ..options import ModuleOptions, recorded
from ..source.dynamic_axes import LARGEST_BATCH
from .dynamic_axes import as_option, check_dynamic_axes
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
from .module_runner import AutocastRunner, Entry, ModuleRunner
from .observe import AutocastSeen, refuse_autocast, working_copy
from .origin import Origin
from .replace import replace_local_attention

Inputs = Sequence[ModuleInput | str] | Mapping[str, NDArray[Any] | Tensor]
_SEEDS = (0, 1)
# Tokens for the moments of linear layers, and for measuring what rounding changes.
_CALIBRATED, _MEASURED = 4096, 512


_NONE_REPLACED = (
    "no layer of the module is local attention that is known here: it is exported as it is, without a window"
)


def listed_inputs(inputs: Inputs) -> list[ModuleInput]:
    """Return the inputs, in whatever form they are given.

    Raises:
        UsageError: they have none of these forms.
    """
    if isinstance(inputs, Mapping):
        inputs = [parse_input(f"{name}:{x}") for name, x in inputs.items()] if _are_texts(inputs) else inputs
    elif isinstance(inputs, str | Tensor | np.ndarray) or not isinstance(inputs, Sequence):
        raise UsageError(
            f"{argument('inputs')} is a {type(inputs).__name__}.",
            why="A file's inputs have names, those of the arguments of forward.",
            fix='Give a dict of arrays by name, or ["name:dtype:[sizes]"].',
        )
    parsed = from_arrays(inputs) if isinstance(inputs, Mapping) else list(inputs)
    return [parse_input(x) if isinstance(x, str) else x for x in parsed]


def _are_texts(inputs: Mapping[str, Any]) -> bool:
    """Return whether inputs are described as `dtype:[sizes]`."""
    return bool(inputs) and all(isinstance(x, str) for x in inputs.values())


def _check_request(module: nn.Module, inputs: Sequence[ModuleInput], options: ModuleOptions) -> None:
    """Refuse an export that cannot succeed, whatever the module computes.

    Raises:
        UsageError: the opset, the output, the module or the inputs cannot be used.
        MissingDependency: the inputs do not fit into memory.
    """
    trace.check_opset(options.opset)
    check_precision(options)
    if not isinstance(module, nn.Module):
        raise UsageError(f"A {type(module).__name__} cannot be exported.", why="It is no torch.nn.Module.")
    if not inputs:
        raise UsageError(
            "The module's inputs are not given.", fix="Give arrays by name, or name:dtype:[shape] for each."
        )
    check_drawable([x.spec() for x in inputs])


class OpenedModule:
    """One export of a module, from its inputs to the entries of its sidecar.

    It replaces the layers, and refuses an export that cannot succeed, before work begins.

    Args:
        module: the user's module.
        inputs: its inputs, as `export_module` takes them.
        options: how to export.
        origin: where the module came from.

    Raises:
        UsageError: the module or the inputs cannot be used.
    """

    def __init__(self, module: nn.Module, inputs: Inputs, options: ModuleOptions, origin: Origin | None = None) -> None:
        written = listed_inputs(inputs)
        _check_request(module, written, options)
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
        self.warnings = list(self.origin.warnings)
        example = self.draw(0, self.sizes)
        self._untouched = untouched
        self.reference = ModuleRunner(module, untouched, self.by_name, example)
        self.replacement = replace_local_attention(
            module, lambda m: call(m, example, self.by_name), dynamic_length=bool(options.dynamic)
        )
        self.notes += [*self.reference.notes, *(x.describe() for x in self.replacement.left)]
        if not self.replacement.replaced:
            self.warnings.append(_NONE_REPLACED)
        with AutocastSeen() as seen:
            outputs = self.reference.check_repeats(example)
        if seen.dtype is not None and options.atol is None and options.rtol is None:
            raise refuse_autocast(f"The {type(module).__name__} computes", seen.dtype)
        if not all(np.isfinite(array).all() for array in outputs.values()):
            check_finite(module.named_parameters())  # else NaN comes from the computation on these inputs
        self.output_names = list(outputs)

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of named axes for the trace: the example's, the longest sequence, no dynamic size of 1."""
        sizes, longest, length = axis_sizes(self.inputs), self.options.max_seq_len, self.options.seq_len
        if length is not None:
            if SEQUENCE not in sizes:
                raise UsageError(
                    f"{argument('seq_len')} needs an axis named {SEQUENCE}.",
                    why=f"Named axes: {', '.join(sizes) or 'none'}.",
                    fix=f"Name it where it is: {as_option(self.inputs[0], SEQUENCE)}.",
                )
            sizes[SEQUENCE] = length
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
        """Draw inputs of these sizes for the module, fp32."""
        return draw_all(self.inputs, seed, sizes)

    def draw_typed(self, seed: int, sizes: Mapping[str, int]) -> Arrays:
        """Draw inputs of these sizes in the types of the file."""
        return self._typed(self.draw(seed, sizes))

    def _typed(self, arrays: Mapping[str, NDArray[Any]]) -> Arrays:
        element = np.dtype(IO_NAME[self.options.dtype])
        return {name: x.astype(element) if x.dtype.kind == "f" else x for name, x in arrays.items()}

    @cached_property
    def tokens(self) -> Tokens | None:
        """Where realistic tokens come from; None where the inputs have none, or their vocabulary is not known."""
        return self._tokens("judgement")

    def _tokens(self, part: Part) -> Tokens | None:
        names = token_names([x.spec() for x in self.inputs])
        limits = [x.limit for x in self.inputs if x.name in names]
        known = [limit for limit in limits if limit is not None]
        if not known or len(known) < len(limits):
            return None
        return open_tokens(self.origin.folders, min(known), None, part)

    @cached_property
    def _rounding(self) -> Rounding | None:
        """How the weights are rounded: calibrated on text where the inputs are tokens; one for all graphs."""
        kind = self.options.weight_dtype
        bits = 0 if kind is None else WEIGHT_KINDS[kind].bits
        if not bits:
            return None
        tokens = self._tokens("calibration")
        if tokens is None:
            if bits == BITS:
                note = "weights rounded without calibration: the module has no input of tokens with a known vocabulary"
                self.notes.append(note)
            return Rounding(bits=bits, notes=self.notes)
        specs, size = self.specs(), math.prod(self.inputs_as_traced()[0].shape[:2])
        count, judged = (max(1, most // size) if bits == BITS else 0 for most in (_CALIBRATED, _MEASURED))
        openings = [None, *tokens.openings][: max(1, _MEASURED // size)]
        kinds = [*((seed, None) for seed in range(count + judged)), *enumerate(openings)]
        drawn = (fill(self.draw(seed, self.sizes), specs, tokens, seed, opening) for seed, opening in kinds)
        rows = [tuple(torch.from_numpy(arrays[name]) for name in self.names) for arrays in drawn]
        entry = Entry(self.replacement.module, self.names, self.by_name)
        words = tokens.describe(count, count * size)
        return Rounding(
            Calibration(entry, rows[:count], rows[count : count + judged], words, rows[count + judged :]),
            logits=self.output_names[0] == "logits",
            bits=bits,
            notes=self.notes,
        )

    def baseline_meter(self, tolerance: Tolerance) -> BaselineMeter | None:
        """Return the meter of the module's own error in the file's precision; None if the tolerance does not use it."""
        if not tolerance.takes_baseline:
            return None
        dtype, named = self.options.dtype, type(self.module).__name__

        def module() -> UntouchedModule:
            exact = rounded = AutocastRunner(self._untouched, self.by_name, "fp32")
            if dtype == "fp32":
                return UntouchedModule(exact, rounded, f"{named} itself in fp32 (PyTorch)")
            rounded = AutocastRunner(self._untouched, self.by_name, dtype)
            return UntouchedModule(exact, rounded, f"{named} itself in {dtype} (torch.autocast)")

        return BaselineMeter(module, dtype)

    def trace(self, module: nn.Module, arrays: Arrays | None = None) -> ir.Model:
        """Trace the module to ONNX in the file's precision, at the sizes of the file or of the given inputs.

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
        model = trace.trace_module(entry, examples, self.names, self.output_names, self.options.opset, dimensions)
        functions.attach_functions(model)
        if self.options.dtype != "fp32":
            model = fp32_to_half.apply(model, self.options.dtype)
        if self.options.weight_dtype is not None:
            model = quantize_weights(model, self.options.weight_dtype, self._rounding)
        return model

    def _largest(self, axis: str) -> int:
        return self.sizes[axis] if axis == SEQUENCE else LARGEST_BATCH

    def input_sets(self, judged: Judged) -> Iterator[InputSet]:
        """Yield inputs to compare on: drawn ones, the user's own, and the sweep of dynamic sizes.

        Tokens are those of text, or drawn by rank; random ones too where they count.
        """
        specs = self.specs()

        def drawn(name: str, seed: int, sizes: Mapping[str, int], place: int) -> InputSet:
            arrays = self.draw_typed(seed, sizes)
            random = judged.tokens is None or (judged.takes_random and place % 2 == 0)
            arrays = arrays if random else judged.filled(arrays, specs, seed)
            return InputSet(name, arrays, alone=judged.judges_alone, random=random and judged.tokens is not None)

        for place, seed in enumerate(self.options.seeds or _SEEDS):
            yield drawn(f"seed {seed}", seed, self.sizes, place)
        own = {x.name: x.example for x in self.inputs if x.example is not None}
        if len(own) == len(self.inputs) and all(self._has_own_sizes(x) for x in self.inputs):
            yield InputSet("the inputs given", self._typed(own))
        if self.options.dynamic:
            windows = self.replacement.windows
            for place, sizes in enumerate(sweep_sizes(self.options.dynamic, self.sizes, SEQUENCE, windows)):
                named = " ".join(f"{axis}={sizes[axis]}" for axis in self.options.dynamic)
                yield drawn(named, sum(sizes.values()), sizes, place)

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

    def retrace(self, in_use: SizesInUse) -> tuple[set[int], dict[str, Shape]] | None:
        """Trace the module so that every layer sees other lengths.

        Returns:
            Those lengths and the shapes of the graph by name; None if no such lengths are found.
        """
        for lengths, module, example in unused_first(self._elsewhere(), lambda found: found[0], in_use):
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

    def model_entries(self) -> dict[str, Any]:
        """Return what the sidecar records about the module."""
        replaced, left = self.replacement.replaced, self.replacement.left
        lengths = [n for layer in replaced for n in layer.lengths]
        layers = [LayerRecord(path=x.path, class_name=x.class_name, replaced=True, detail=x.window()) for x in replaced]
        layers += [LayerRecord(path=x.path, class_name=x.class_name, replaced=False, detail=x.why) for x in left]
        return {
            "class_name": self.origin.name,
            "kwargs": dict(self.origin.kwargs),
            "inputs": self.specs(),
            "seq_len": self.sizes.get(SEQUENCE, max(lengths, default=1)),
            "batch": self.sizes.get(BATCH, 1),
            "dynamic": list(self.options.dynamic),
            "dtype": self.options.dtype,
            "layers": layers,
            "options": recorded(self.options) | ({} if self.origin.entry is None else {"entry": self.origin.entry}),
            "checkpoint_sha256": self.origin.weights_sha256,
            "checkpoint_name": self.origin.weights,
            "factory_sha256": self.origin.code_sha256,
        }

    def specs(self) -> list[TensorSpec]:
        """List the inputs of the file, with dynamic axes by name."""
        element = IO_NAME[self.options.dtype]
        specs = [x.spec(self.options.dynamic) for x in self.inputs_as_traced()]
        return [replace(x, dtype=element) if x.dtype == "float32" else x for x in specs]

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
