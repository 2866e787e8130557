"""Which names of TensorRT's Python API this package uses, read from its source.

A name is told by what stands before it: `network.num_layers` is of an `INetworkDefinition`, `opened.trt.Builder` of the
module. So the few variables that hold objects of TensorRT's are listed here, with their classes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).parents[4]
MODULE = ""
# Variables, and functions that are called, in each file → class; `trt` is the module everywhere.
OBJECTS = {
    "runtime/backends/tensorrt/layers.py": {"engine": "ICudaEngine", "create_engine_inspector": "EngineInspector"},
    "runtime/backends/tensorrt/gpu/executor.py": {
        "engine": "ICudaEngine",
        "kinds": "ExecutionContextAllocationStrategy",
        "native": "IExecutionContext",
        "_native": "IExecutionContext",
    },
    "runtime/backends/tensorrt/library.py": {},
    "runtime/backends/tensorrt/plugins.py": {"registry": "IPluginRegistry", "get_plugin_registry": "IPluginRegistry"},
    "runtime/backends/tensorrt/builder/checks.py": {
        "network": "INetworkDefinition",
        "kinds": "NetworkDefinitionCreationFlag",
        "layer": "ILayer",
        "get_output": "ITensor",
        "tensor": "ITensor",
    },
    "runtime/backends/tensorrt/builder/network.py": {
        "builder": "Builder",
        "parser": "OnnxParser",
        "error": "ParserError",
        "kinds": "NetworkDefinitionCreationFlag",
        "config": "IBuilderConfig",
    },
    "runtime/backends/tensorrt/builder/special.py": {},
    "runtime/backends/tensorrt/builder/timing_cache.py": {
        "builder": "Builder",
        "config": "IBuilderConfig",
        "create_builder_config": "IBuilderConfig",
        "caches": "ITimingCache",
    },
    "runtime/backends/tensorrt_rtx/package.py": {"config": "IBuilderConfig"},
    "runtime/bundle/device/run_engine.py": {
        "registry": "IPluginRegistry",
        "Runtime": "Runtime",
        "engine": "ICudaEngine",
        "context": "IExecutionContext",
    },
    "doctor/probe_process.py": {},
    "plugins/library/registry.py": {
        "module": MODULE,
        "registry": "IPluginRegistry",
        "creator": "IPluginCreatorV3One",
        "field": "PluginField",
    },
}
# Of a class of ours whose objects go by the same name: `EngineLayer`.
OURS = {"ILayer": {"computes", "is_plugin", "types"}}


def used() -> dict[str, set[str]]:
    """Class → names of it that the package uses; "" is the module itself."""
    found: dict[str, set[str]] = {}
    for file, objects in OBJECTS.items():
        for kind, name in _names(file, objects | {"trt": MODULE}):
            found.setdefault(kind, set()).add(name)
    return {kind: names - OURS.get(kind, set()) for kind, names in found.items()}


def _names(file: str, objects: dict[str, str]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse((TREE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            kind = _kind(node.value, objects)
            if kind is not None:
                yield kind, node.attr


def _kind(value: ast.expr, objects: dict[str, str]) -> str | None:
    """The class of what stands before a name; None if it is nothing of TensorRT's."""
    while isinstance(value, ast.Call):
        value = value.func
    last = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    if last in objects:
        return objects[last]
    # An enumeration or a class of the module: trt.LayerType.PLUGIN_V3.
    inside = isinstance(value, ast.Attribute) and _kind(value.value, objects) == MODULE
    return last if inside else None
