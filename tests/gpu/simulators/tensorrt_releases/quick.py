"""Child program: the ahead-of-time plugin in NVIDIA's own `tensorrt.plugin`; prints what it saw as JSON.

`python -m tests.gpu.simulators.tensorrt_releases.quick` reads, as JSON, {"parts": …, "target": GPU, "other": another
GPU, "models": name → ONNX file of one node}.

TensorRT-RTX's parser takes no quick plugins (as `tensorrt.plugin` calls its own), only those of the older kind. So each
is put behind one of that kind, which is parsed and built in earnest, and passes every question on to NVIDIA's quick
plugin as TensorRT would: with the attributes as the parser read them, and with the expressions of sizes that the
builder works with. What our implementation answers becomes the sizes of the node's second output, `LAUNCH`, which the
builder evaluates.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import typing
from types import SimpleNamespace
from typing import Any

import numpy as np

from localattn.core.errors import UsageError
from localattn.core.nodes.attention import PLUGIN_NAMESPACE, PLUGIN_VERSION
from localattn.core.nodes.gpu import SERVED
from localattn.plugins.aot.availability import why_not
from localattn.plugins.aot.register import attributes_of, register_plugins
from localattn.plugins.kernel.targets import TARGETS

from .bind import Parts, bind

SIZES = (("batch", (1, 2, 4)), ("length", (64, 256, 512)))  # of dynamic axes: smallest, best and largest
LAUNCH = "launch"


def main(asked: dict[str, Any]) -> dict[str, Any]:
    trt = bind(Parts(**asked["parts"]))
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))  # with this logger, before anything else makes one
    shown: dict[str, Any] = {"version": trt.__version__, "why_not": why_not()}
    if shown["why_not"]:
        return shown
    register_plugins(TARGETS[asked["target"]])
    namespace = getattr(importlib.import_module("tensorrt.plugin").op, PLUGIN_NAMESPACE)
    registry = trt.get_plugin_registry()
    creators = {v.op_type: registry.get_creator(v.op_type, PLUGIN_VERSION, PLUGIN_NAMESPACE) for v in SERVED}
    shown["creators"] = {op: creator is not None and hasattr(namespace, op) for op, creator in creators.items()}
    shown["fields"] = {
        op: [[field.name, field.type.name] for field in creator.field_names] for op, creator in creators.items()
    }
    shown["types"] = {variant.op_type: types(trt, creators[variant.op_type], variant) for variant in SERVED}
    shown["again"] = [refused(asked[which]) for which in ("target", "other")]
    bridges = [bridge(trt, creator) for creator in creators.values() if asked["models"]]
    shown["models"] = {name: built(trt, builder, path) for name, path in asked["models"].items()}
    assert all(registry.deregister_creator(one) for one in bridges)
    return shown


def refused(target: str) -> str:
    """Why the plugins cannot be registered once more, for this GPU; empty if they can."""
    try:
        register_plugins(TARGETS[target])
    except UsageError as error:
        return error.what
    return ""


def types(trt: Any, creator: Any, variant: Any) -> list[str]:
    """The type of the output for fp16 inputs, asked as TensorRT asks a plugin that it just made."""
    declared = attributes_of(variant)
    values = {
        name: np.ones(4 if name == "perm" else 1, typing.get_args(typing.get_args(kind)[1])[0])
        for name, kind in declared.items()
    }
    fields = [trt.PluginField(name, values[name], field_type(trt, values[name])) for name in declared]
    plugin = creator.create_plugin(
        variant.op_type,
        PLUGIN_NAMESPACE,
        trt.PluginFieldCollection(fields),
        trt.TensorRTPhase.BUILD,
        trt.QuickPluginCreationRequest.PREFER_AOT,
    )
    kinds = [trt.bool if name == "key_mask" else trt.float16 for name in variant.input_names]
    ranks = [{"key_mask": 2, "attn_bias": 3, "sinks": 1}.get(name, 4) for name in variant.input_names]
    return [kind.name for kind in plugin.get_output_data_types(kinds, ranks)]


def field_type(trt: Any, value: Any) -> Any:
    return getattr(trt.PluginFieldType, value.dtype.name.upper())


seen: dict[str, Any] = {}  # of the model that is being built


def bridge(trt: Any, quick: Any) -> Any:
    """Takes the place of a quick plugin's creator in the registry, with its name and fields."""
    trt.get_plugin_registry().deregister_creator(quick)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.field_names = quick.name, quick.field_names
            self.plugin_namespace, self.plugin_version = PLUGIN_NAMESPACE, PLUGIN_VERSION

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            seen["parsed"] = {field.name: np.asarray(field.data).tolist() for field in fields}
            request = trt.QuickPluginCreationRequest.PREFER_AOT
            return behind(trt, quick.create_plugin(self.name, PLUGIN_NAMESPACE, fields, phase, request))

    creator = Creator()
    trt.get_plugin_registry().register_creator(creator, PLUGIN_NAMESPACE)
    return creator


def behind(trt: Any, quick: Any) -> Any:
    """A plugin of the older kind that asks a quick plugin."""
    kinds = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime)

    class Plugin(*kinds):  # type: ignore[misc]
        def __init__(self) -> None:
            for kind in kinds:
                kind.__init__(self)
            self.plugin_name, self.plugin_version = quick.plugin_name, PLUGIN_VERSION
            self.plugin_namespace, self.num_outputs = PLUGIN_NAMESPACE, 2

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def get_output_data_types(self, types: Any) -> Any:
            return [*quick.get_output_data_types(types, [4] * len(types)), trt.float32]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> Any:
            outputs = quick.get_output_shapes(inputs, shape_inputs, builder)
            try:
                answer = launch(trt, quick, inputs, outputs, builder)
            except UsageError as error:
                seen["refused"] = error.what
                raise
            values = trt.DimsExprs(4)
            for index, value in enumerate((answer.grid_x, answer.grid_y, *answer.scalars[:2])):
                values[index] = value._expr
            return [*outputs, values]

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            quick.configure_plugin(inputs, outputs[:1])
            seen["evaluated"] = [list(getattr(outputs[1], which)) for which in ("min", "opt", "max")]
            seen["shapes"] = [list(getattr(outputs[0], which)) for which in ("min", "opt", "max")]

        def supports_format_combination(self, position: int, tensors: Any, inputs: int) -> bool:
            if position <= inputs:
                wanted = quick.get_supported_format_combinations(tensors[: inputs + 1], inputs)[position]
                seen.setdefault("formats", {})[position] = [wanted.type.name, wanted.format.name]
                return tensors[position].desc.type == wanted.type and tensors[position].desc.format == wanted.format
            return tensors[position].desc.format == trt.TensorFormat.LINEAR

        def on_shape_change(self, inputs: Any, outputs: Any) -> None:
            pass

        def get_fields_to_serialize(self) -> Any:
            return trt.PluginFieldCollection([])

        def get_valid_tactics(self) -> list[int]:
            return []

        def clone(self) -> Any:
            return behind(trt, quick.clone())

    return Plugin()


def launch(trt: Any, quick: Any, inputs: Any, outputs: Any, builder: Any) -> Any:
    """What our implementation answers, after NVIDIA's code took it for good; sizes known while building are noted."""
    answered: list[Any] = []
    implementation = quick.aot_impl_function
    quick.aot_impl_function = lambda *arguments: answered.append(implementation(*arguments)) or answered[-1]
    tensors = [described(trt, *pair) for pair in zip(quick.input_types, inputs, strict=True)]
    tensors += [described(trt, *pair) for pair in zip(quick.output_types, outputs, strict=True)]
    quick.set_tactic(0)
    parameters, extra = SimpleNamespace(), Extra()
    try:
        quick.get_launch_params(inputs, tensors, len(inputs), parameters, extra, builder)
    finally:
        quick.aot_impl_function = implementation
    descriptions = [tensor.desc for tensor in tensors]
    entry, ptx = quick.get_kernel(descriptions[: len(inputs)], descriptions[len(inputs) :])
    (_, _, asked, scalars), *_ = answered
    assert extra.nbSymExprs == len(scalars) == len(extra.given)
    seen["kernel"] = [entry, hashlib.sha256(ptx).hexdigest(), len(ptx)]
    seen["launch"] = {name: known(getattr(asked, name)) for name in sorted(vars(parameters))}
    seen["scalars"] = [known(value) for value in scalars]
    return SimpleNamespace(grid_x=asked.grid_x, grid_y=asked.grid_y, scalars=list(scalars))


class Extra:
    """Takes the place of TensorRT's list of arguments, which Python cannot make."""

    def __init__(self) -> None:
        self.nbSymExprs = 0
        self.given: dict[int, Any] = {}

    def __setitem__(self, index: int, value: Any) -> None:
        self.given[index] = value


def described(trt: Any, kind: Any, sizes: Any) -> Any:
    """A tensor as TensorRT describes it to a plugin."""
    tensor, inside = trt.DynamicPluginTensorDesc(), trt.PluginTensorDesc()
    inside.type, inside.format = kind, trt.TensorFormat.LINEAR
    inside.dims = trt.Dims([size.get_constant_value() if size.is_constant() else -1 for size in sizes])
    tensor.desc = inside
    return tensor


def known(value: Any) -> int | None:
    return value._expr.get_constant_value() if value._expr.is_constant() else None


def built(trt: Any, builder: Any, path: str) -> dict[str, Any]:
    """A model parsed and built, and what its one plugin was asked and answered."""
    seen.clear()
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    understood = parser.parse_from_file(path)
    shown: dict[str, Any] = {"errors": [parser.get_error(index).desc() for index in range(parser.num_errors)]}
    if not understood:
        return shown | seen
    layer = network.get_layer(0)
    size = engine_bytes(builder, network)
    shown |= {"layers": [network.get_layer(index).type.name for index in range(network.num_layers)], **seen}
    return shown | {"engine": size, "output": list(layer.get_output(0).shape)}


def engine_bytes(builder: Any, network: Any) -> int:
    """How large an engine of a network is, of dynamic axes for `SIZES`; 0 if none is built."""
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        profile.set_shape(tensor.name, *(sized(tensor.shape, which) for which in range(3)))
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    return 0 if engine is None else engine.nbytes


def sized(shape: Any, which: int) -> list[int]:
    """A shape whose dynamic axes have sizes: the first is the batch, any other the length."""
    sizes = [values[which] for _, values in SIZES]
    return [size if size >= 0 else sizes[min(axis, 1)] for axis, size in enumerate(shape)]


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
