"""The form a traced model is written in: with functions, or without."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import onnx
import onnx_ir as ir

from ...core.documents.sidecar import WindowRecord
from ...core.nodes.attention import geometry_of
from ...onnx_graph.standard_ops import rewrite
from ..options import FileOptions
from .serialize import message


@dataclass(frozen=True)
class WrittenForm:
    """A model in the form in which it is written, with the description of its attention nodes.

    Args:
        model: the model to write.
        windows: the windows of its attention nodes.
        nodes: the model before its attention nodes were rewritten in standard operators, without its large weights;
            None where the written model still has them.
    """

    model: ir.Model
    windows: list[WindowRecord]
    nodes: onnx.ModelProto | None = None


def written_form(model: ir.Model, nodes: Iterable[ir.Node], options: FileOptions) -> WrittenForm:
    """Build the form of a model that the options require.

    Args:
        model: the traced model with its functions; it must not be used afterwards.
        nodes: its attention nodes.
        options: options of the file.
    """
    windows = [_window_record(node) for node in nodes]
    if not options.standard_ops:
        return WrittenForm(model, windows)
    before = message(model)
    return WrittenForm(rewrite.apply(model), windows, before)


def _window_record(node: ir.Node) -> WindowRecord:
    """Return the sidecar's entry for one attention node."""
    geometry = geometry_of({name: attribute.value for name, attribute in node.attributes.items()})
    return WindowRecord(name=node.name or "", op_type=node.op_type, **asdict(geometry))
