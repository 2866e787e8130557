"""Export any nn.Module; upstream's layers in it become windowed attention, the rest is exported unchanged.

The file is compared with the user's own unchanged module in eager mode; each replaced layer's window and memory are
checked in the written file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.documents.sidecar import CheckRecord, Sidecar
from ...core.errors import UsageError
from ...core.storage.file_kinds import ONNX
from ...core.storage.outputs import Output, check_outputs
from ...core.tensors import BATCH, POSITION_IDS, SEQUENCE
from ...onnx_graph.precision.half_to_fp32 import has_fp16
from ...runtime.parity.golden import Golden
from ...runtime.parity.runner import SessionRunner
from ..checkpoint.open_checkpoint import OpenedCheckpoint, open_live
from ..checks.checked_file import SequenceFile
from ..checks.golden import check_golden, open_golden
from ..checks.judged import Judged
from ..checks.layers import check_growth, check_layer_memory, check_layer_windows
from ..checks.parity import check_input_sets
from ..checks.sweep import check_joined_rows
from ..checks.wide_integers import check_wide_integers, dynamic_sizes
from ..export_report import ExportReport
from ..lowering import trace
from ..options import ExportRequest, FileOptions, ModuleOptions, PrecisionOptions, ShapeRequest, common
from ..pipeline import Job, Part, Progress, run
from ..user_module.adapters import refuse_adapters
from ..user_module.golden_causes import causes_in
from ..user_module.inputs import ModuleInput
from ..user_module.observe import refuse_autocast
from ..user_module.opened_module import Inputs, OpenedModule, listed_inputs
from ..user_module.origin import Origin, remember_origin
from ..user_module.replace import ReplacedLayer, ReplacementReport
from .checkpoint import CheckpointJob, open_request
from .module_steps import ModuleStepsJob, open_stepped


@dataclass(frozen=True, repr=False)
class ModuleExportReport(ExportReport):
    """The result of exporting a module.

    Args:
        replacement: which upstream layers were replaced, and the module that was traced.
    """

    replacement: ReplacementReport = field(kw_only=True)


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
        return run(CheckpointJob(_live_request(live, listed_inputs(inputs, options), output, options), live), progress)
    options.check_chunk()
    if options.mode != "full":
        return run(ModuleStepsJob(module, inputs, output, options, origin), progress)
    return run(ModuleJob(module, inputs, output, options, origin), progress)


class ModuleJob(Job[ModuleExportReport]):
    """The export of a module of the user's own; its arguments are those of `export_module`."""

    opened: OpenedModule
    golden: Golden | None

    def __init__(
        self, module: nn.Module, inputs: Inputs, output: Path, options: ModuleOptions, origin: Origin | None
    ) -> None:
        self.options = options
        self._given, self._output = (module, inputs, options, origin), output

    @property
    def precision(self) -> str:
        return self._given[2].precision

    def outputs(self) -> list[Output]:
        return [Output(self._output, ONNX)]

    def inputs(self) -> list[Path]:
        return [] if self.options.golden is None else [Path(self.options.golden)]

    def open(self, progress: Progress) -> None:
        progress("Running the module")
        self.opened = opened = OpenedModule(*self._given)
        self.golden = open_golden(self.options.golden, opened.specs(), opened.output_names, None, opened.limits)

    def trace(self, progress: Progress) -> list[Part]:
        progress("Tracing the module")
        model = self.opened.trace(self.opened.replacement.module)
        return [Part(self._output, model, list(trace.attention_nodes(model)))]

    def checked(self, part: Part, progress: Progress) -> ModuleFile:
        return ModuleFile(part, self.opened, self.golden, progress)

    def sidecar_entries(self, part: Part) -> dict[str, Any]:
        return self.opened.model_entries()

    def published(self, folder: Path) -> None:
        remember_origin(self.opened.origin)

    def report(self, parts: Sequence[tuple[Part, Sidecar | None]]) -> ModuleExportReport:
        ((part, sidecar),) = parts
        assert sidecar is not None
        opened = self.opened
        return ModuleExportReport(
            part.path, sidecar, opened.notes, doubts=tuple(opened.warnings), replacement=opened.replacement
        )


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
        shapes=ShapeRequest(options.seq_len or length, batch, position_ids=positions),
        **common(FileOptions, options),
        **common(PrecisionOptions, options),
    )


def plan_module(
    module: nn.Module, inputs: Inputs, output: Path, options: ModuleOptions, origin: Origin | None = None
) -> ReplacementReport:
    """Return which layers of a module would have a window in its file, after all that is refused before work begins.

    Raises:
        UsageError: the module or the inputs cannot be used.
    """
    refuse_adapters(module)
    check_outputs([Output(output, ONNX)], overwrite=options.overwrite)
    live = open_live(module)
    if live is None and options.mode != "full":
        opened, _ = open_stepped(module, inputs, origin, options)
        return opened.replacement
    if live is None:
        return OpenedModule(module, inputs, options, origin).replacement
    _, source = open_request(_live_request(live, listed_inputs(inputs, options), output, options), live)
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return ReplacementReport(
        module,
        [ReplacedLayer(layer, kind, view.geometry, ()) for view in source.window_views() for layer in view.layers],
    )


class ModuleFile(SequenceFile):
    """The written file of a user's own module."""

    kind = "module"

    def __init__(self, part: Part, opened: OpenedModule, golden: Golden | None, progress: Progress) -> None:
        super().__init__(part.staged, opened.options, progress, part.lowered.nodes)
        self._opened, self._form, self.golden = opened, part.lowered, golden
        self._range: CheckRecord | None = None

    def golden_outputs(self, golden: Golden) -> CheckRecord:
        options = self._opened.options
        causes = causes_in(self._opened.reference)
        return check_golden(SessionRunner(self.session), golden, options.tolerance, options.precision, causes=causes)

    def parity(self) -> CheckRecord:
        opened, options = self._opened, self._opened.options
        # A module may compute in fp16 in parts, or have weights in it.
        dtype = "fp16" if has_fp16(self.model) else options.dtype
        judged = Judged.open(self.path, self.session, dtype, options.precision, opened.tokens)
        tolerance = options.tolerance(options.precision)
        sets = islice(opened.input_sets(judged), 1 if options.quick else None)
        record = check_input_sets(judged, opened.reference, sets, tolerance, opened.baseline_meter(tolerance))
        self._range = judged.range_record()
        self.session.wake()
        return record

    def halves(self) -> CheckRecord | None:
        return self._range

    def rows(self) -> CheckRecord:
        opened, options = self._opened, self._opened.options
        lengths = [length := opened.sizes.get(SEQUENCE, 1)]
        if SEQUENCE in options.dynamic and not options.quick:
            window = max((geometry.window_size for geometry in opened.replacement.windows), default=1)
            lengths += [n for n in [max(1, length // 2 // window) * window] if n < length]
        return check_joined_rows(self.session, self.model, options.dtype, opened.draw_typed, opened.sizes, lengths)

    def window(self) -> CheckRecord:
        return check_layer_windows(self.nodes, self._opened.absent(self._form))

    def memory(self) -> CheckRecord:
        opened = self._opened
        lengths = {n for layer in opened.replacement.replaced for n in layer.lengths}
        sequences = [axis for axis in opened.options.dynamic if axis != BATCH]
        found = check_layer_memory(self.nodes, lengths, sequences, opened.retrace)
        if found.status == "failed" or sequences:
            return found
        return check_growth(self.nodes, lengths, found, opened.growths())

    def integers(self) -> CheckRecord:
        opened = self._opened
        limits = {x.name: x.limit for x in opened.inputs}
        sizes = dynamic_sizes(opened.options.dynamic, opened.sizes.get(SEQUENCE, 1))
        return check_wide_integers(self.model, self.path.parent, limits, sizes)
