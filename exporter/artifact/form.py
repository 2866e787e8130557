"""Define the options of a file, and bring a traced model into the form to write: with or without functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from ...core.documents.sidecar import WindowFacts
from ...core.errors import UsageError
from ...core.nodes.attention import geometry_of
from ...core.versions import DEFAULT_OPSET
from ...onnx_graph.standard_ops import rewrite
from ..checks.options import CheckOptions
from .serialize import message

# A protobuf message is limited to 2 GiB; some room is left for the graph itself.
EXTERNAL_DATA_FROM = 1_900_000_000


@dataclass(frozen=True, kw_only=True)
class FileOptions(CheckOptions):
    """The options of a file to write, in addition to those of its checks.

    Args:
        opset: ONNX opset.
        function_body: store the attention node's ONNX function in the file; without it only a runtime with a
            plugin or a kernel for the node can run the file (TensorRT 10.3 needs a file without it).
        standard_ops: write standard operators only, without functions (`onnx_graph.standard_ops`).
        overwrite: replace an existing file.
        external_data_from: size of the weights in bytes from which they go into a file of their own.
        golden: an .npz of inputs and of the outputs that the user's own model computed from them.
    """

    opset: int = DEFAULT_OPSET
    function_body: bool = True
    standard_ops: bool = False
    overwrite: bool = False
    external_data_from: int = EXTERNAL_DATA_FROM
    golden: Path | None = None

    def __post_init__(self) -> None:
        if self.standard_ops and not self.function_body:
            raise UsageError(
                "standard_ops=True and function_body=False exclude each other.",
                why="A file in standard operators needs the function body, from which its attention is made.",
                fix="Leave one of them out.",
            )


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
    windows: list[WindowFacts]
    nodes: onnx.ModelProto | None = None


def written_form(model: ir.Model, nodes: Iterable[ir.Node], options: FileOptions) -> WrittenForm:
    """Build the form of a model that the options require.

    Args:
        model: the traced model with its functions; it must not be used afterwards.
        nodes: its attention nodes.
        options: options of the file.
    """
    windows = [_window_facts(node) for node in nodes]
    if not options.standard_ops:
        return WrittenForm(model, windows)
    before = message(model)
    return WrittenForm(rewrite.apply(model), windows, before)


def _window_facts(node: ir.Node) -> WindowFacts:
    """Return the sidecar's entry for one attention node."""
    geometry = geometry_of({name: attribute.value for name, attribute in node.attributes.items()})
    return WindowFacts(name=node.name or "", op_type=node.op_type, **asdict(geometry))
