"""The form in which a traced model is written: with its functions, or in standard operators alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from ...core.documents.sidecar import CheckRecord, WindowFacts
from ...onnx_graph.standard_ops import rewrite
from .options import FileOptions
from .publish import window_facts
from .serialize import message

_BEFORE = "seen before the functions were inlined"


@dataclass(frozen=True)
class WrittenForm:
    """A model in the form in which it is written, with the facts about its attention nodes.

    Args:
        model: the model to write.
        windows: the windows of its attention nodes.
        nodes: the model before its attention nodes were rewritten in standard operators, without its large weights;
            None where the written model still has them.
    """

    model: ir.Model
    windows: list[WindowFacts]
    nodes: onnx.ModelProto | None = None

    def seen(self, record: CheckRecord) -> CheckRecord:
        """Return the record of a check of the attention nodes.

        If the file has no such nodes, the detail says that the check looked at the model before they were rewritten.
        """
        if self.nodes is None or record.status == "skipped":
            return record
        return record.model_copy(update={"detail": f"{record.detail}; {_BEFORE}"})


def written_form(model: ir.Model, nodes: Iterable[ir.Node], options: FileOptions) -> WrittenForm:
    """Build the form of a model that the options ask for.

    Args:
        model: the traced model with its functions; it must not be used afterwards.
        nodes: its attention nodes.
        options: options of the file.
    """
    windows = [window_facts(node) for node in nodes]
    if not options.standard_ops:
        return WrittenForm(model, windows)
    before = message(model)
    return WrittenForm(rewrite.apply(model), windows, before)
