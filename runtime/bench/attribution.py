"""Find the module that each node of an optimised graph came from.

onnxruntime inlines functions, fuses nodes, adds some, and keeps no metadata. It does keep the names of the values that
flow between the file's own nodes. So a node belongs to the module whose node in the file makes the same result. A
node inside an inlined function, or an added one, belongs to the module that uses its result; if no node uses it, to
the module of its inputs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...onnx_graph.graph_values import reads

# Shown for an unknown module.
UNKNOWN = "(not known)"


@dataclass(frozen=True)
class Origin:
    """Where a node of the optimised graph came from: its operator there, and its module."""

    operator: str
    module: str


def origins(model: Path, optimised: Path) -> dict[str, Origin]:
    """Return the origin of each named node of the optimised graph.

    Args:
        model: the file as exported.
        optimised: the graph onnxruntime made of it.

    Raises:
        UsageError: a file is not an ONNX model.
    """
    from ...onnx_graph.onnx_file import OnnxFile

    by_value, by_name = _modules_of(OnnxFile.read(model).parse().graph.node)
    nodes = list(OnnxFile.read(optimised).parse().graph.node)
    users: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in reads(node):
            users.setdefault(name, []).append(index)
    found: list[str] = [""] * len(nodes)
    # The nodes are in topological order, so every user of a result comes after it.
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        own = (by_value.get(name) for name in node.output)
        later = (found[user] for name in node.output for user in users.get(name, ()))
        found[index] = next((module for module in (*own, by_name.get(node.name), *later) if module), "")
    maker: dict[str, str] = {}
    for index, node in enumerate(nodes):
        found[index] = found[index] or next((maker[name] for name in reads(node) if maker.get(name)), "")
        maker |= dict.fromkeys(node.output, found[index])
    return {
        node.name: Origin(node.op_type, module or UNKNOWN)
        for node, module in zip(nodes, found, strict=True)
        if node.name
    }


def _modules_of(nodes: Iterable[Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the module that makes each value, and the module of each node by name."""
    by_value, by_name = {}, {}
    for node in nodes:
        module = module_of(node.name, {entry.key: entry.value for entry in node.metadata_props})
        if not module:
            continue
        by_name[node.name] = module
        for name in node.output:
            if name:
                by_value[name] = module
    return by_value, by_name


def module_of(name: str, metadata: Mapping[str, str]) -> str:
    """Return the module path of a node of an exported file, "" if it has none.

    Args:
        name: the node's.
        metadata: its metadata.
    """
    for key, read in _SOURCES.items():
        if metadata.get(key):
            return read(metadata[key])
    # torch.onnx's older exporter names nodes by their module: /layers.0/norm/Mul.
    return ".".join(name.split("/")[1:-1]) if name.startswith("/") else ""


def _last_scope(text: str) -> str:
    """Return the last module of PyTorch's list of scopes, whose last entry is the node itself."""
    try:
        scopes = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return ""
    named = [scope for scope in scopes[:-1] if isinstance(scope, str) and scope] if isinstance(scopes, list) else []
    return named[-1] if named else ""


# The metadata that exporters write into a node, and how the module is read from it; the first one found counts.
_SOURCES: dict[str, Callable[[str], str]] = {"module": str, "pkg.torch.onnx.name_scopes": _last_scope}


def pattern(module: str) -> str:
    """Replace the layer in a module path by a star: `layers.3.mlp.0` → `layers.*.mlp.0`.

    The layer is the first number of the path.
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module, count=1)
