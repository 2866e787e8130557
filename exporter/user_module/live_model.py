"""Export a live model of a family that is read from folders as its folder would be exported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from torch import nn

from ...core.errors import UsageError
from ...core.tensors import POSITION_IDS
from ..artifact.form import FileOptions
from ..checkpoint.open_checkpoint import OpenedCheckpoint, open_live
from ..export import ExportReport, ExportRequest, export
from ..models.family import ShapeRequest
from .inputs import ModuleInput
from .replace import ReplacedLayer, ReplacementReport


def planned(module: nn.Module) -> ReplacementReport | None:
    """Return which layers of a live model have a window; None if it is exported as any other module.

    Raises:
        UsageError: the model cannot be exported.
    """
    checkpoint = open_live(module)
    if checkpoint is None:
        return None
    views = checkpoint.source(ShapeRequest()).window_views()
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return ReplacementReport(
        module, [ReplacedLayer(layer, kind, view.geometry, ()) for view in views for layer in view.layers]
    )


def export_live(
    checkpoint: OpenedCheckpoint,
    inputs: Sequence[ModuleInput],
    output: Path,
    options: FileOptions,
    dynamic: tuple[str, ...],
    longest: int | None,
    progress: Callable[[str], None],
) -> ExportReport:
    """Export a live model that `open_live` opened.

    Args:
        checkpoint: the model.
        inputs: example inputs, whose sizes the file has where it has no dynamic axes.
        output: the ONNX file to write.
        options: how to export.
        dynamic: names of the dynamic axes.
        longest: longest sequence if that axis is dynamic; by default the example's.
        progress: called with the name of each step as it begins.

    Raises:
        UsageError: an input does not fit the model.
        ExportFailed: PyTorch's exporter could not export it.
        CheckFailed: a check found a fault; nothing was written.
    """
    name = checkpoint.loaded.path.name
    positions = any(x.name == POSITION_IDS for x in inputs)
    known = [spec.name for spec in checkpoint.source(ShapeRequest(position_ids=positions)).inputs("fp32")]
    if not inputs or any(x.name not in known or len(x.shape) != 2 for x in inputs):
        raise UsageError(
            f"The inputs {', '.join(x.name for x in inputs)} do not fit.",
            why=f"The file of a {name} takes {', '.join(known)}, each of two axes.",
        )
    batch, length = inputs[0].shape
    request = ExportRequest(
        checkpoint=checkpoint.loaded.path,
        output=output,
        shapes=ShapeRequest(longest or length, batch, position_ids=positions),
        dynamic=dynamic,
        **{x.name: getattr(options, x.name) for x in fields(FileOptions)},
    )
    return export(request, progress, checkpoint)
