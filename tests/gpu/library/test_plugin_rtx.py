"""The plugin library in a real TensorRT: TensorRT-RTX, which reads ONNX files and builds engines without a GPU.

One child process does the work: a fault of native code then fails these tests and no others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import DOMAIN, VARIANTS, NodeAttributes

from ...support.models import aft_node, node_model
from ...support.native.plugin_build import HEAD_DIM, folder, host_arch, library
from ...support.native.plugin_drive import (
    AFT_OP_TYPES,
    GROUP,
    GROUPED,
    OP_TYPES,
    RING_OP_TYPES,
    WINDOWED,
    attributes_for,
)
from ...support.native.ring_node import Case

# Loads the library, and for each model: parses it, lists the layers, builds an engine for compute capability 8.6.
PROGRAM = """
import json, sys
import numpy as np
from pathlib import Path
from localattn.core.storage.library_store import TENSORRT_PLUGIN, read_named
from localattn.runtime.backends.tensorrt_rtx.preload import preload
from localattn.plugins.library.registry import load_into_registry
preload()
import tensorrt_rtx as trt

class Logger(trt.ILogger):
    def __init__(self):
        super().__init__()
        self.lines = []
    def log(self, severity, text):
        self.lines.append((str(severity).rpartition(".")[2], text))

library, *models = sys.argv[1:]
logger = Logger()
builder = trt.Builder(logger)
summary = load_into_registry(read_named(TENSORRT_PLUGIN, Path(library)), ["tensorrt-rtx"])
registry = trt.get_plugin_registry()
left = [c for c in registry.all_creators if c.plugin_namespace == "localattn"]
shown = {"version": summary.version, "left": len(left)}
shown["creators"] = [
    [c.name, c.version, c.namespace, {a.name: [a.type, a.length] for a in c.attributes}] for c in summary.creators
]
registry.load_library(library)
shown["models"] = {}
for path in models:
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    shown["models"][Path(path).stem] = model = {"parsed": parser.parse(Path(path).read_bytes())}
    model["layers"] = [str(network.get_layer(i).type).rpartition(".")[2] for i in range(network.num_layers)]
    model["output"] = list(network.get_output(0).shape)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM86, 0)
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        if -1 in tensor.shape:
            sizes = [[{0: b}.get(axis, n) if d == -1 else d for axis, d in enumerate(tensor.shape)]
                     for b, n in ((1, 64), (2, 256), (4, 512))]
            profile.set_shape(tensor.name, *sizes)
            model["open"] = True
    if "open" in model:
        config.add_optimization_profile(profile)
    before = len(logger.lines)
    engine = builder.build_serialized_network(network, config)
    model["engine"] = 0 if engine is None else engine.nbytes
    model["named"] = engine is not None and b"localattn" in bytes(engine)
    model["said"] = [text for _, text in logger.lines[before:] if text.startswith("localattn: ")]
creator = registry.get_creator("WindowedAttention", "1", "localattn")
bad = trt.PluginField("window_size", np.array([0], dtype=np.int32), trt.PluginFieldType.INT32)
shown["refused"] = creator.create_plugin("bad", trt.PluginFieldCollection([bad]), trt.TensorRTPhase.BUILD) is None
shown["message"] = [line for line in logger.lines if "of node bad" in line[1]]
print(json.dumps(shown))
"""

WINDOW = NodeAttributes(WindowGeometry(32, 1, 0, causal=True, exact_windowsize=True), 0.125, query_block=32)


SIZES: dict[str, tuple[int | str, int | str]] = {"static": (256, 2), "open": ("n", "b")}
GROUPED_HEADS = 6
KV_HEADS = GROUPED_HEADS // GROUP


def grouped_node(op_type: str, length: int | str, batch: int | str) -> onnx.ModelProto:
    """A grouped node without its function: TensorRT-RTX reads it as the plugin or not at all."""
    data, half = [batch, length], onnx.TensorProto.FLOAT16
    inputs = [
        onnx.helper.make_tensor_value_info(name, half, [*data, heads, HEAD_DIM])
        for name, heads in (("query", GROUPED_HEADS), ("key", KV_HEADS), ("value", KV_HEADS))
    ]
    if "Mask" in op_type:
        inputs.append(onnx.helper.make_tensor_value_info("key_mask", onnx.TensorProto.BOOL, data))
    if "Sinks" in op_type:
        inputs.append(onnx.helper.make_tensor_value_info("sinks", half, [GROUPED_HEADS]))
    output = onnx.helper.make_tensor_value_info("out", half, [*data, GROUPED_HEADS, HEAD_DIM])
    names = [value.name for value in inputs]
    attributes = attributes_for(op_type, WINDOW).as_onnx()
    node = onnx.helper.make_node(op_type, names, ["out"], domain=DOMAIN, **attributes)
    graph = onnx.helper.make_graph([node], "one_node", inputs, [output])
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid(DOMAIN, 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


RING_CASES = {
    "step": Case(1, 30, dtype="float16", dim=HEAD_DIM),
    "step of shared heads": Case(1, 30, dtype="float16", dim=HEAD_DIM, heads=6, batch=2, bias="padding"),
    "chunk with sinks": Case(20, 300, dtype="float16", dim=HEAD_DIM, heads=6, sinks=True, window=1100),
}


def aft_case(op_type: str) -> aft_node.Case:
    return aft_node.Case(75, 6, "Causal" in op_type, "Mask" in op_type, batch=2, dim=37)


@cache
def shown() -> dict[str, Any]:
    """What the child process found."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is the TensorRT of these tests")
    sidecar = library(host_arch())
    models = []
    with pytest.MonkeyPatch.context() as patch:
        for variant in VARIANTS:
            for name, sizes in SIZES.items():
                patch.setattr(node_model, "HEAD_DIM", HEAD_DIM)
                model = node_model.one_node(variant, attributes_for(variant.op_type, WINDOW), *sizes, dtype="fp16")
                models.append(folder() / f"{variant.op_type}-{name}.onnx")
                models[-1].write_bytes(model.SerializeToString())
        for op_type in GROUPED:
            for name, sizes in SIZES.items():
                models.append(folder() / f"{op_type}-{name}.onnx")
                models[-1].write_bytes(grouped_node(op_type, *sizes).SerializeToString())
        for op_type in AFT_OP_TYPES:
            models.append(folder() / f"{op_type}.onnx")
            models[-1].write_bytes(aft_case(op_type).model(aft_case(op_type).inputs()))
        for name, case in RING_CASES.items():
            models.append(folder() / f"{name}.onnx")
            models[-1].write_bytes(case.model(case.inputs(), function=True))
        patch.setattr(node_model, "HEAD_DIM", 48)
        models.append(folder() / "no_kernel.onnx")
        models[-1].write_bytes(node_model.one_node(VARIANTS[0], WINDOW, 256, dtype="fp16").SerializeToString())
    # The package as this process has it, installed or as a source tree.
    import localattn

    tree = folder() / "import"
    tree.mkdir(exist_ok=True)
    (tree / "localattn").symlink_to(Path(localattn.__file__).parent)
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, [sidecar.path, *models])],
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


def test_registry_lists_the_creators() -> None:
    names = [name for name, *_ in shown()["creators"]]
    assert names == sorted([*OP_TYPES, *AFT_OP_TYPES, *RING_OP_TYPES])
    for name, version, namespace, attributes in shown()["creators"]:
        assert (version, namespace) == ("1", "localattn")
        if name in AFT_OP_TYPES:
            assert attributes == {}
            continue
        if name in RING_OP_TYPES:
            softcap = {"softcap": ["FLOAT32", 1]} if "Softcap" in name else {}
            assert attributes == {"scale": ["FLOAT32", 1]} | softcap
            continue
        written = attributes_for(name, WINDOW).as_onnx()
        omitted = {"query_block", "plugin_namespace", "plugin_version"}
        omitted |= {"xpos_scale_base"} if name in WINDOWED and "Xpos" not in name else set()
        assert set(written) - set(attributes) == omitted
        for field, (kind, length) in attributes.items():
            assert kind == ("FLOAT32" if field in ("scale", "softcap", "xpos_scale_base") else "INT32")
            assert length == (4 if field == "perm" else 1)


def test_registry_is_left_as_it_was() -> None:
    assert shown()["left"] == 0


@pytest.mark.parametrize("sizes", ["static", "open"])
@pytest.mark.parametrize("op_type", OP_TYPES)
def test_node_becomes_the_plugin_and_an_engine(op_type: str, sizes: str) -> None:
    model = shown()["models"][f"{op_type}-{sizes}"]
    assert model["parsed"]
    assert model["layers"] == ["PLUGIN_V3"], "the plugin, not the function definition"
    expected = [2, 256] if sizes == "static" else [-1, -1]
    assert model["output"] == [*expected, GROUPED_HEADS if op_type in GROUPED else node_model.HEADS, HEAD_DIM]
    assert model["engine"] > 0 and model["named"]
    assert model["said"] == []


@pytest.mark.parametrize("op_type", AFT_OP_TYPES)
def test_aft_local_becomes_the_plugin_and_an_engine(op_type: str) -> None:
    """The file has the function too."""
    model = shown()["models"][op_type]
    assert model["parsed"] and "PLUGIN_V3" in model["layers"] and "LOOP" not in "".join(model["layers"])
    assert model["output"] == [75, 2, 37] and model["engine"] > 0 and model["named"] and model["said"] == []


@pytest.mark.parametrize("name", RING_CASES)
def test_steps_and_chunks_become_the_plugin_and_an_engine(name: str) -> None:
    """The file has the function too."""
    model, case = shown()["models"][name], RING_CASES[name]
    assert model["parsed"] and model["layers"] == ["PLUGIN_V3"]
    assert model["output"] == [case.batch, case.heads, case.rows, HEAD_DIM]
    assert model["engine"] > 0 and model["named"] and model["said"] == []


def test_engine_without_a_kernel_is_not_built_and_says_why() -> None:
    model = shown()["models"]["no_kernel"]
    assert model["engine"] == 0
    assert model["said"] == [
        "localattn: WindowedAttention: no kernel for fp16, head size 48 in this plugin library; "
        "build one that has it with: localattn plugin build --dtype fp16 --head-dim 48"
    ]


def test_messages_go_through_the_logger_of_tensorrt() -> None:
    assert shown()["refused"]
    [[severity, text]] = shown()["message"]
    assert severity == "ERROR"
    assert text.startswith("localattn: WindowedAttention of node bad: attribute window_size is 0")
