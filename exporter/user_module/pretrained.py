"""Export a live Hugging Face model as its folder would be exported: with windows read off its masks, and proven."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ...core.errors import UsageError
from ..checkpoint.infer_config import Resolved
from ..checkpoint.load import LoadedCheckpoint
from ..checkpoint.open_checkpoint import OpenedCheckpoint
from ..export import ExportReport, ExportRequest, export
from ..models.family import ShapeRequest
from ..models.hugging_face.arguments import Layer
from .inputs import ModuleInput
from .replace import ReplacedLayer, ReplacementReport

if TYPE_CHECKING:
    from .export_module import ModuleOptions

_BASE = "transformers.modeling_utils"


def is_pretrained(module: object) -> bool:
    """Return whether a module is a Hugging Face model; transformers is not imported for it."""
    return any((owner.__module__, owner.__name__) == (_BASE, "PreTrainedModel") for owner in type(module).__mro__)


def opened(model: Any) -> OpenedCheckpoint:
    """Return a live model as the checkpoint that its folder would be.

    Raises:
        UsageError: a layer of it cannot be exported.
    """
    from ..models.hugging_face.family import CLASS, describe
    from ..models.hugging_face.weights import whole_state

    kind = type(model)
    args = describe(kind, json.loads(model.config.to_json_string()), kind.__name__)
    notes = [f"{kind.__name__}: {args.describe()}, read off its own masks"]
    state = {name: tensor.cpu() for name, tensor in whole_state(model).items()}
    loaded = LoadedCheckpoint(state, "", Path(kind.__name__), notes)
    return OpenedCheckpoint(loaded, Resolved(CLASS, args, None, state), None)


def planned(model: nn.Module) -> ReplacementReport:
    """Return which layers of a live model become nodes.

    Raises:
        UsageError: one of them cannot.
    """
    layers = opened(model).resolved.args.model_dump()["layers"]
    kind = f"transformers.{type(model).__name__}"
    return ReplacementReport(
        model, [ReplacedLayer(x["path"], kind, Layer.model_validate(x).geometry, ()) for x in layers]
    )


def export_pretrained(
    model: nn.Module,
    inputs: Sequence[ModuleInput],
    output: Path,
    options: ModuleOptions,
    progress: Callable[[str], None],
) -> ExportReport:
    """Export a live model.

    Args:
        model: the model; it is not changed.
        inputs: example inputs, whose sizes the file has where it has no dynamic axes.
        output: the ONNX file to write.
        options: how to export.
        progress: called with the name of each step as it begins.

    Raises:
        UsageError: the model or an input cannot be used.
        ExportFailed: PyTorch's exporter could not export it.
        CheckFailed: a check found a fault; nothing was written.
    """
    progress("Reading the model's windows")
    checkpoint = opened(model)
    known = checkpoint.resolved.args.model_dump()["inputs"]
    strange = [x.name for x in inputs if x.name not in known]
    if strange or not inputs or any(len(x.shape) != 2 for x in inputs):
        raise UsageError(
            f"The inputs {', '.join(x.name for x in inputs)} do not fit.",
            why=f"The file of a {type(model).__name__} takes {', '.join(known)}, each of two axes.",
        )
    batch, length = inputs[0].shape
    request = ExportRequest(
        checkpoint=checkpoint.loaded.path,
        output=output,
        shapes=ShapeRequest(options.max_seq_len or length, batch),
        dynamic=options.dynamic,
        opset=options.opset,
        function_body=options.function_body,
        standard_ops=options.standard_ops,
        overwrite=options.overwrite,
        seeds=options.seeds,
        atol=options.atol,
        rtol=options.rtol,
        quick=options.quick,
        allow_quadratic=options.allow_quadratic,
        allow_wide_integers=options.allow_wide_integers,
        external_data_from=options.external_data_from,
        golden=options.golden,
    )
    return export(request, progress, checkpoint)
