"""Describe an ONNX file, without running it and without its external data."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import UsageError
from ..core.nodes.aft import AFT_VARIANT_BY_OP_TYPE
from ..core.nodes.attention import DOMAIN
from ..core.storage.files import is_file
from ..core.tensors import UNNAMED_DIMENSION, TensorSpec
from .graph_values import all_nodes, all_weights
from .judgement import Refused, check_tensor, claimed_bytes, lies_inside
from .onnx_file import NotAModel, OnnxFile

if TYPE_CHECKING:
    from ..core.documents.sidecar import Sidecar


@dataclass(frozen=True)
class WindowedNode:
    """One windowed attention node: its name, op type and attributes as Python values."""

    name: str
    op_type: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class FunctionSummary:
    """One ONNX function of the file: its domain, name and number of nodes."""

    domain: str
    name: str
    nodes: int


@dataclass(frozen=True)
class OnnxSummary:
    """What an ONNX file says about itself.

    Args:
        path: the file.
        file_bytes: its size, without external data.
        ir_version: version of the file format.
        producer: name and version of the program that wrote it.
        opsets: operator set versions by domain; the standard one is "ai.onnx".
        inputs: inputs of the graph, without initializers.
        outputs: outputs of the graph.
        nodes: how often each op type occurs in the graph and its subgraphs; other domains than the
            standard one are prefixed ("localattn::WindowedAttention"). Nodes in functions are not counted.
        functions: the ONNX functions in the file.
        windowed: the windowed attention nodes.
        weight_bytes: bytes of the initializers by numpy dtype name, external data included; of one that claims more
            than is there, the bytes that are there.
        external_data: files in the model's folder that hold weights.
        missing_external_data: such files that are missing, or are outside the model's folder.
        refused: why no engine may open the file; "" for a sound one.
        sidecar: the model's sidecar; None if there is none.
        sidecar_matches: whether the sidecar was written for exactly this file; None without one.
    """

    path: str
    file_bytes: int
    ir_version: int
    producer: str
    opsets: dict[str, int]
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    nodes: dict[str, int]
    functions: list[FunctionSummary]
    windowed: list[WindowedNode]
    weight_bytes: dict[str, int]
    external_data: list[str]
    missing_external_data: list[str]
    refused: str
    sidecar: Sidecar | None
    sidecar_matches: bool | None

    @property
    def initializer_bytes(self) -> int:
        """Bytes of all initializers."""
        return sum(self.weight_bytes.values())

    @property
    def weight_dtype(self) -> str | None:
        """The floating-point type of most of the weights, by bytes; None without weights."""
        floats = {name: size for name, size in self.weight_bytes.items() if "float" in name}
        return max(floats, key=lambda name: floats[name], default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the description as JSON types."""
        own = asdict(replace(self, sidecar=None))  # the sidecar converts itself, and comes last
        del own["sidecar"]
        return {
            **own,
            "initializer_bytes": self.initializer_bytes,
            "weight_dtype": self.weight_dtype,
            "sidecar": None if self.sidecar is None else self.sidecar.to_dict(),
        }


def inspect_onnx(path: Path | OnnxFile) -> OnnxSummary:
    """Describe an ONNX file, and read its sidecar.

    Raises:
        UsageError: no such file, no ONNX model in it, a node of this project whose attributes are not what its
            contract says, or a sidecar that is broken.
    """
    from ..core.documents.sidecar import read_sidecar

    file = OnnxFile.read(path)
    model = file.model
    graph = model.graph
    sidecar = None if file.path is None else read_sidecar(file.path)
    initial = {tensor.name for tensor in graph.initializer}
    nodes = list(all_nodes(graph))
    check_nodes(file.name, model)
    external = sorted(file.locations)
    return OnnxSummary(
        path=file.name,
        file_bytes=file.size,
        ir_version=model.ir_version,
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        opsets={entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        inputs=[_spec(value) for value in graph.input if value.name not in initial],
        outputs=[_spec(value) for value in graph.output],
        nodes=dict(Counter(_qualified(node) for node in nodes).most_common()),
        functions=[FunctionSummary(f.domain, f.name, len(f.node)) for f in model.functions],
        windowed=[WindowedNode(node.name, node.op_type, _attributes(node)) for node in nodes if _is_windowed(node)],
        weight_bytes=_weight_bytes(file, graph),
        external_data=external,
        missing_external_data=[name for name in external if not _is_in_folder(file, name)],
        refused=_refused(file),
        sidecar=sidecar,
        sidecar_matches=None if sidecar is None else sidecar.model_sha256 == file.sha256,
    )


def _is_windowed(node: Any) -> bool:
    """Return whether a node is an attention node; AFT-local nodes see the whole sequence."""
    return node.domain == DOMAIN and node.op_type not in AFT_VARIANT_BY_OP_TYPE


def _qualified(node: Any) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"


def check_nodes(name: str, model: Any) -> None:
    """Refuse a model with invalid nodes of this project's domains.

    Args:
        name: name of the file, for the error.
        model: its `onnx.ModelProto`.

    Raises:
        UsageError: an attribute is wrong; the text names the node and the attribute.
    """
    from ..core.nodes.check import check_attributes

    shapes = {value.name: _spec(value).shape for value in (*model.graph.input, *model.graph.value_info)}
    for node in all_nodes(model.graph):
        width = (shapes.get(node.input[0]) or (None,))[-1] if node.input else None
        attributes = {attribute.name: _value(attribute) for attribute in node.attribute}
        try:
            check_attributes(node.domain, node.op_type, attributes, width if isinstance(width, int) else None)
        except UsageError as error:
            raise UsageError(
                f"{name} has an invalid node: {_shown_name(node)}.",
                why=error.what,
                fix="Export the model again; localattn does not write such nodes.",
            ) from error


def _shown_name(node: Any) -> str:
    return f"{node.name!r}, a {node.op_type}" if node.name else f"a {node.op_type} without a name"


def _attributes(node: Any) -> dict[str, Any]:
    """Return a node's attributes for display; for values that are neither number nor text, the type's name."""
    import onnx

    kinds = onnx.AttributeProto.AttributeType
    named = {number: name.lower() for name, number in kinds.items()}
    values = {attribute.name: _value(attribute) for attribute in node.attribute}
    unknown = {a.name: f"<{named.get(a.type, f'type {a.type}')}>" for a in node.attribute if values[a.name] is None}
    return values | unknown


def _value(attribute: Any) -> Any:
    """Return a node attribute as a Python value; None for values that are neither number nor text."""
    import onnx

    kinds = onnx.AttributeProto
    if attribute.type == kinds.STRING:
        return attribute.s.decode("utf-8", "replace")
    if attribute.type in (kinds.INT, kinds.FLOAT):
        return onnx.helper.get_attribute_value(attribute)
    if attribute.type in (kinds.INTS, kinds.FLOATS):
        return list(onnx.helper.get_attribute_value(attribute))
    return None


def _dtype_name(element_type: int) -> str:
    import onnx

    try:
        return str(onnx.helper.tensor_dtype_to_np_dtype(element_type).name)
    except KeyError:
        return f"type {element_type}"


def _spec(value: Any) -> TensorSpec:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return TensorSpec(value.name, (kind or "unknown").removesuffix("_type"), ())
    tensor = value.type.tensor_type
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or UNNAMED_DIMENSION) for dim in tensor.shape.dim
    )
    return TensorSpec(value.name, _dtype_name(tensor.elem_type), shape)


def _weight_bytes(file: OnnxFile, graph: Any) -> dict[str, int]:
    """Sum the bytes of the initializers by dtype, including external data."""
    total: Counter[str] = Counter()
    for tensor in all_weights(graph):
        try:
            check_tensor(tensor, file.data_size)
            held = claimed_bytes(tensor)
        except Refused:
            held = len(tensor.raw_data)
        total[_dtype_name(tensor.data_type)] += held or 0
    return dict(total.most_common())


def _refused(file: OnnxFile) -> str:
    """Return why no engine may open the file."""
    try:
        file.check()
    except NotAModel:
        raise
    except UsageError as error:
        return error.why
    return ""


def _is_in_folder(file: OnnxFile, name: str) -> bool:
    """Check that external data exists in the model's folder or below it: ONNX allows no other place."""
    return file.path is not None and lies_inside(name) and is_file(file.path.parent / name)
