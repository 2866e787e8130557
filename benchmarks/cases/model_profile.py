"""Where one call of an exported model spends its time: products, attention nodes, and everything else by operator.

From onnxruntime's profiler, the fastest of some calls for each node. The residual streams' own products are products
too: where a compiled kernel computes them together with everything else it does to the streams, their time is part of
that kernel's.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localattn.core.nodes.attention import VARIANT_BY_OP_TYPE
from localattn.core.nodes.fused import FUSED_BY_OP_TYPE

from ..candidates import open_session

PRODUCTS = ("MatMul", "FusedMatMul", "Gemm")
_CALLS = 20


@dataclass
class Parts:
    """Milliseconds of one call.

    Args:
        linear: in products with the model's matrices.
        streams: in the residual streams' products, where they are operators of their own.
        attention: in attention nodes, or in what their function definitions became.
        others: in the rest, by operator.
    """

    linear: float = 0.0
    streams: float = 0.0
    attention: float = 0.0
    others: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> float:
        """All of it."""
        return self.linear + self.streams + self.attention + self.others.total()

    def to_dict(self) -> dict[str, Any]:
        """As it is stored."""
        parts = {name: round(getattr(self, name), 3) for name in ("linear", "streams", "attention", "total")}
        return parts | {"others": {name: round(value, 3) for name, value in self.others.most_common()}}


def profile(path: Path, feed: dict[str, Any], folder: Path, library: Path | None) -> Parts:
    """One file's parts.

    Args:
        path: the file.
        feed: its inputs.
        folder: for the profiler's own file.
        library: of compiled kernels; None for function definitions.
    """
    session = open_session(str(path), library, folder / "profile")
    for _ in range(_CALLS):
        session.run(None, feed)
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            durations[event["name"], event["args"]["op_name"]].append(event["dur"] / 1e3)
    parts = Parts()
    for (name, operator), times in durations.items():
        if _of_attention(name, operator):
            parts.attention += min(times)
        elif operator not in PRODUCTS:
            parts.others[operator] += min(times)
        elif _inlined(name, FUSED_BY_OP_TYPE):
            parts.streams += min(times)
        else:
            parts.linear += min(times)
    return parts


def _of_attention(name: str, operator: str) -> bool:
    """A layout change that is left of an inlined node lost its name; no other part of these models has one."""
    moved = operator == "Transpose" and name.startswith("Transpose")
    return moved or operator in VARIANT_BY_OP_TYPE or _inlined(name, VARIANT_BY_OP_TYPE)


def _inlined(name: str, op_types: dict[str, Any]) -> bool:
    """Whether a node came out of one of these function nodes: it carries the function's name."""
    return any(f"_inlfunc_{op_type}_" in name for op_type in op_types)
