"""Check an engine before it is published: it must contain the plugin, and have the file's precision.

Both are checked twice: in the network, before it is serialised, which needs no GPU; and in the finished engine, with
TensorRT's engine inspector, if there is a GPU to open it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from .....core.documents.sidecar import CheckRecord
from .....core.dtypes import NUMPY_NAME, SHORT_NAME
from ...engines import EngineLayer
from ..layers import ELEMENTS, read_layers
from ..library import TensorRTLibrary
from .source import Source


def check_network(
    opened: TensorRTLibrary, network: Any, source: Source, plugin_nodes: Sequence[str]
) -> list[CheckRecord]:
    """Check the network before it is serialised.

    Args:
        opened: the library.
        network: its `INetworkDefinition`.
        source: the file it was parsed from.
        plugin_nodes: names of the nodes that must have become plugins; no other layer may be one.
    """
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    return [
        _network_plugins(opened, layers, plugin_nodes),
        _network_types(opened, network, layers, source),
        _network_products(opened, layers, source),
    ]


def check_engine(
    engine: Any, opened: TensorRTLibrary, source: Source, plugin_nodes: Sequence[str], *, ahead_of_time: bool = False
) -> list[CheckRecord]:
    """Check the finished engine with TensorRT's inspector.

    Args:
        engine: an `ICudaEngine`.
        opened: the library.
        source: the file it was built from.
        plugin_nodes: names of the nodes that must be plugins in it.
        ahead_of_time: their kernels lie in the engine.
    """
    layers = read_layers(opened, engine)
    return [judge_plugins(layers, plugin_nodes, ahead_of_time=ahead_of_time), judge_precision(layers, source.dtype)]


def _network_plugins(opened: TensorRTLibrary, layers: Sequence[Any], wanted: Sequence[str]) -> CheckRecord:
    name = "plugin in network"
    kind = opened.trt.LayerType.PLUGIN_V3
    found = {layer.name for layer in layers if layer.type == kind}
    missing = sorted(set(wanted) - found)
    if missing:
        return _failed(name, f"{len(missing)} of {len(wanted)} attention nodes are no plugin: {', '.join(missing[:3])}")
    if not wanted:
        if found:
            return _failed(name, f"no plugin was asked for, but {sorted(found)[0]} is one")
        return _passed(name, "none asked for, none in it", plugins=0)
    return _passed(name, f"all {len(wanted)} attention nodes are plugin layers", plugins=len(wanted))


def _network_types(opened: TensorRTLibrary, network: Any, layers: Sequence[Any], source: Source) -> CheckRecord:
    """Check that the network is strongly typed, and that its inputs and outputs have the file's element types."""
    name = "precision of network"
    kinds = opened.trt.NetworkDefinitionCreationFlag
    if not opened.has("always_strongly_typed") and not network.get_flag(kinds.STRONGLY_TYPED):
        return _failed(name, "it is not strongly typed: the builder could choose other precisions")
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    tensors += [network.get_output(i) for i in range(network.num_outputs)]
    found = {tensor.name: element(tensor.dtype) for tensor in tensors}
    for spec in [*source.summary.inputs, *source.summary.outputs]:
        if found.get(spec.name) != spec.dtype:
            return _failed(
                name, f"{spec.name} is {found.get(spec.name, 'not there')} in it, {spec.dtype} in the ONNX file"
            )
    types = Counter(element(layer.get_output(0).dtype) for layer in layers if layer.get_output(0) is not None)
    foreign = sorted(kind for kind in types if kind in SHORT_NAME and kind not in _allowed(source))
    if foreign:
        return _failed(
            name, f"{types[foreign[0]]} layers compute in {foreign[0]}, which the {source.dtype} file has not"
        )
    counts = ", ".join(f"{count} {kind}" for kind, count in types.most_common() if kind in SHORT_NAME)
    return _passed(name, f"strongly typed; layers: {counts}", **types)


def _allowed(source: Source) -> set[str]:
    """Return the element types a file of this precision may compute in: its own, and fp32 inside norms and softmax."""
    return {"float32"} | {NUMPY_NAME.get(source.dtype, source.dtype)}


def _network_products(opened: TensorRTLibrary, layers: Sequence[Any], source: Source) -> CheckRecord:
    """Check that every product with weights computes in the element type it has in the file."""
    name = "products of network"
    wanted = source.weighted_products
    kinds = {getattr(opened.trt.LayerType, kind) for kind in ("MATRIX_MULTIPLY", "CONVOLUTION")}
    found = {
        layer.name: element(layer.get_output(0).dtype)
        for layer in layers
        if layer.type in kinds and layer.name in wanted
    }
    changed = sorted(node for node, kind in found.items() if kind != wanted[node])
    if changed:
        node = changed[0]
        return _failed(
            name, f"{len(changed)} of {len(wanted)} changed: {node} is {found[node]}, {wanted[node]} in the ONNX file"
        )
    if len(found) < len(wanted):
        detail = f"{len(wanted) - len(found)} of {len(wanted)} products with weights go by other names in it"
        return CheckRecord(name=name, status="not proven", detail=detail)
    counts = Counter(found.values())
    text = ", ".join(f"{count} in {kind}" for kind, count in counts.most_common()) or "none with weights"
    return _passed(name, f"{text}, as in the ONNX file", **counts)


def judge_plugins(layers: Sequence[EngineLayer], wanted: Sequence[str], *, ahead_of_time: bool = False) -> CheckRecord:
    """Check that every wanted node is computed by a plugin layer of the engine.

    How the inspector names the layers of ahead-of-time plugins has not been seen, so there a miss proves nothing.
    """
    name = "plugin in engine"
    plugins = [layer for layer in layers if layer.is_plugin]
    missing = [node for node in wanted if not any(layer.computes(node) for layer in plugins)]
    if missing and ahead_of_time:
        kinds = ", ".join(sorted({other.kind for other in layers}))
        detail = f"the inspector names no plugin layer for {', '.join(missing[:3])}; its kinds of layers: {kinds}"
        return CheckRecord(name=name, status="not proven", detail=detail)
    if missing:
        return _failed(name, f"{len(missing)} of {len(wanted)} attention nodes are no plugin: {', '.join(missing[:3])}")
    return _passed(name, f"{len(wanted)} attention nodes are plugin layers, of {len(layers)} layers")


def judge_precision(layers: Sequence[EngineLayer], dtype: str) -> CheckRecord:
    """Check that tensors between the engine's layers have the file's precision.

    An fp16 engine without any fp16 tensor was built in fp32; an fp32 engine with fp16 or bf16 tensors was not.
    """
    name = "precision of engine"
    types = Counter(kind for layer in layers for kind in layer.types)
    if not types:
        return CheckRecord(name=name, status="not proven", detail="the inspector tells no element types")
    own = NUMPY_NAME[dtype]
    foreign = [kind for kind in types if kind in SHORT_NAME and kind not in (own, "float32")]
    if foreign:
        return _failed(name, f"{types[foreign[0]]} tensors are {foreign[0]}, the ONNX file is {dtype}")
    if not types[own]:
        return _failed(name, f"no tensor is {own}, the ONNX file is {dtype}")
    return _passed(name, f"{types[own]} tensors between layers are {own}, {types.total()} in all")


def element(dtype: Any) -> str:
    """Return numpy's name of a TensorRT element type."""
    name = str(dtype).split(".")[-1].lower()
    return ELEMENTS.get(name, name)


def _passed(name: str, detail: str, **figures: int) -> CheckRecord:
    return CheckRecord(name=name, status="passed", detail=detail, figures=dict(figures))


def _failed(name: str, detail: str) -> CheckRecord:
    return CheckRecord(name=name, status="failed", detail=detail)
