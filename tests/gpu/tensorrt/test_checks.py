"""What is demanded of an engine: of its layers as the inspector tells them, and of the network before."""

from __future__ import annotations

import json

import pytest

from localattn.runtime.backends.engines import EngineLayer
from localattn.runtime.backends.tensorrt.builder.checks import check_network, judge_plugins, judge_precision
from localattn.runtime.backends.tensorrt.builder.source import Source, read_source, stripped
from localattn.runtime.backends.tensorrt.layers import parse_layers
from localattn.runtime.backends.tensorrt.library import open_library

from ...support.models.engine_models import needs_rtx, small_model

# As TensorRT 10 and 11 write it, and 8 to 10.3 in sentences; without details, a layer is its name alone.
INSPECTED = {
    "Layers": [
        {
            "Name": "layers.0/WindowedAttention",
            "LayerType": "PluginV3",
            "Inputs": [{"Name": "q", "Format/Datatype": "Half"}],
            "Outputs": [{"Name": "o", "Format/Datatype": "Row major linear FP16 format"}],
            "Metadata": "[ONNX Layer: layers.0/WindowedAttention]",
        },
        {
            "Name": "__myl_MulAdd",
            "LayerType": "kgen",
            "Inputs": [{"Name": "x", "Format/Datatype": "Float"}],
            "Outputs": [{"Name": "y", "Format/Datatype": "Int64"}],
            "Metadata": "[ONNX Layer: a]\x1f[ONNX Layer: layers.1/WindowedAttention]",
        },
        "a layer without details",
    ],
    "Bindings": ["tokens", "logits"],
}


def test_layers_of_the_inspector_are_read() -> None:
    plugin, fused, bare = parse_layers(json.dumps(INSPECTED))
    assert plugin.is_plugin and plugin.computes("layers.0/WindowedAttention")
    assert plugin.types == ("float16", "float16")
    assert not fused.is_plugin and fused.computes("layers.1/WindowedAttention")
    assert not fused.computes("layers.1/Windowed")
    assert fused.types == ("float32", "int64")
    assert (bare.name, bare.kind, bare.types) == ("a layer without details", "unknown", ())


@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        (["layers.0/WindowedAttention"], "passed"),
        # It is in the engine, but no plugin computes it.
        (["layers.0/WindowedAttention", "layers.1/WindowedAttention"], "failed"),
        ([], "passed"),
    ],
)
def test_every_wanted_plugin_must_be_in_the_engine(wanted: list[str], status: str) -> None:
    assert judge_plugins(parse_layers(json.dumps(INSPECTED)), wanted).status == status


@pytest.mark.parametrize(
    ("types", "dtype", "status"),
    [
        (("float16", "float32"), "fp16", "passed"),
        (("float32", "int64"), "fp32", "passed"),
        (("float32", "int64"), "fp16", "failed"),  # fp16 was asked for, fp32 was built
        (("float16", "float32"), "fp32", "failed"),
        (("bfloat16",), "fp16", "failed"),
        ((), "fp16", "not proven"),
    ],
)
def test_the_engine_must_have_the_precision_of_the_file(types: tuple[str, ...], dtype: str, status: str) -> None:
    assert judge_precision([EngineLayer("a", "kgen", types=types)], dtype).status == status


@pytest.fixture(scope="module")
def small() -> dict[str, Source]:
    """The same model in two precisions."""
    return {dtype: read_source(small_model(dtype)) for dtype in ("fp32", "fp16")}


def statuses(parsed: Source, judged_as: Source, plugin_nodes: list[str]) -> dict[str, str]:
    from localattn.runtime.backends.tensorrt.builder.network import parse

    opened = open_library("tensorrt-rtx")
    network = parse(opened, parsed, "none", [])
    return {c.name: c.status for c in check_network(opened, network.definition, judged_as, plugin_nodes)}


@needs_rtx
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_network_of_its_own_file_passes(small: dict[str, Source], dtype: str) -> None:
    assert set(statuses(small[dtype], small[dtype], []).values()) == {"passed"}


@needs_rtx
def test_a_missing_plugin_fails(small: dict[str, Source]) -> None:
    nodes = small["fp32"].nodes(["WindowedAttention"])
    assert len(nodes) == 2
    assert statuses(small["fp32"], small["fp32"], nodes)["plugin in network"] == "failed"


@needs_rtx
@pytest.mark.parametrize(("parsed", "judged"), [("fp32", "fp16"), ("fp16", "fp32")])
def test_another_precision_fails(small: dict[str, Source], parsed: str, judged: str) -> None:
    found = statuses(small[parsed], small[judged], [])
    assert found["precision of network"] == "failed"
    assert found["products of network"] == "failed"


def test_a_source_knows_its_products(small: dict[str, Source]) -> None:
    """q, k and v in one product, the output, two of the feed-forward; two layers; and the logits."""
    assert set(small["fp32"].weighted_products.values()) == {"float32"}
    assert list(small["fp16"].weighted_products.values()).count("float16") >= 9
    assert (small["fp32"].dtype, small["fp16"].dtype) == ("fp32", "fp16")


def test_a_stripped_model_keeps_its_nodes(small: dict[str, Source]) -> None:
    import onnx

    model = onnx.load_model_from_string(stripped(small["fp32"].file.parse(), ["WindowedAttention"]))
    assert {body.domain for body in model.functions} == {"localattn.fused"}
    assert sum(node.op_type == "WindowedAttention" for node in model.graph.node) == 2
    other = onnx.load_model_from_string(stripped(small["fp32"].file.parse(), ["WindowedAttentionMask"]))
    assert [body.name for body in other.functions if body.domain == "localattn"] == ["WindowedAttention"]
