"""Models of one step or chunk node, inputs as a file makes them, and the definition in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import DOMAIN, DOMAIN_VERSION, OUTSIDE_SCORE
from localattn.core.nodes.step import StepAttributes, StepVariant, ring_slots
from localattn.core.versions import DEFAULT_OPSET, IR_VERSION
from localattn.exporter.lowering.functions import attach_functions

Arrays = dict[str, NDArray[Any]]
OUTPUTS = ("output", "next_key_cache", "next_value_cache")
_ELEMENTS = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16, "int64": ir.DataType.INT64}


@dataclass(frozen=True)
class Case:
    """A node and its sizes.

    Args:
        rows: tokens a call; one is a step.
        position: tokens before.
        bias: "" for the window alone, "heads" for a bias of each head's own, "padding" for keys that each sequence
            hides.
    """

    rows: int
    position: int
    window: int = 8
    exact: bool = True
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    dim: int = 16
    bias: str = ""
    xpos: bool = False
    softcap: float = 0.0
    sinks: bool = False
    dtype: str = "float32"

    @property
    def variant(self) -> StepVariant:
        """The op type."""
        return StepVariant(
            chunked=self.rows > 1,
            has_xpos=self.xpos,
            grouped=self.heads != self.kv_heads or self.bias == "padding" or bool(self.softcap) or self.sinks,
            has_softcap=bool(self.softcap),
            has_sinks=self.sinks,
        )

    @property
    def attributes(self) -> StepAttributes:
        """The node's."""
        geometry = WindowGeometry(self.window, 1, 0, causal=True, exact_windowsize=self.exact)
        base = 32.0 if self.xpos else 0.0
        return StepAttributes(geometry, self.dim**-0.5, xpos_scale_base=base, softcap=self.softcap)

    def inputs(self, seed: int = 0) -> Arrays:
        """Random tensors and the tables that follow from the position."""
        random = np.random.default_rng(seed)
        slots, rows, element = ring_slots(self.attributes.geometry), self.rows, np.dtype(self.dtype)

        def normal(*shape: int) -> NDArray[Any]:
            return random.standard_normal(shape)

        # The position of each key that is attended to; before the first token a slot holds anything.
        ring = self.position - 1 - (self.position - 1 - np.arange(slots)) % slots
        new = self.position + np.arange(rows)
        keys = np.concatenate((ring, new)) if rows > 1 else np.where(np.arange(slots) == new % slots, new, ring)
        place = self.position + np.arange(rows)[:, None]
        first = place - self.window if self.exact else place // self.window * self.window - self.window
        hidden = (keys < 0) | (keys < first) | (keys > place)
        score_bias = np.where(hidden, OUTSIDE_SCORE, 0.0)
        if self.bias == "heads":
            score_bias = np.where(hidden, OUTSIDE_SCORE, normal(self.heads, *hidden.shape))
        if self.bias == "padding":
            padded = keys < self.position - 3 * np.arange(self.batch)[:, None]
            score_bias = np.where(hidden | padded[:, None, None], OUTSIDE_SCORE, 0.0)
        index = np.empty((self.batch, self.kv_heads, 1, 3))
        index[..., 0] = np.arange(self.batch)[:, None, None]
        index[..., 1] = np.arange(self.kv_heads)[None, :, None]
        index[..., 2] = self.position % slots
        if rows > 1:
            latest = new[-1] - (new[-1] - np.arange(slots)) % slots
            index = np.where(latest >= self.position, slots + latest - self.position, np.arange(slots))
        given = (self.batch, self.kv_heads, rows, self.dim)
        cache = (self.batch, self.kv_heads, slots, self.dim)
        found = {
            "query": normal(self.batch, self.heads, rows, self.dim),
            "key": normal(*given),
            "value": normal(*given),
            "key_cache": normal(*cache),
            "value_cache": normal(*cache),
        }
        arrays: Arrays = {name: x.astype(element) for name, x in found.items()}
        arrays |= {"score_bias": score_bias.astype(np.float32), "write_index": index.astype(np.int64)}
        scales = {"query_scale": (rows, self.dim), "key_scale": (len(keys), self.dim)}
        for name in set(scales) & set(self.variant.input_names):
            arrays[name] = np.exp2(0.5 * normal(*scales[name])).astype(np.float32)
        if self.sinks:
            arrays["sinks"] = normal(self.heads).astype(element)
        return {name: arrays[name] for name in self.variant.input_names}

    def expected(self, arrays: Arrays) -> tuple[NDArray[Any], ...]:
        """The outputs, by the definition."""
        wide = {name: x.astype(np.float64) for name, x in arrays.items()}
        index = arrays["write_index"]
        caches = []
        attended = []
        for name in ("key", "value"):
            ring, new = wide[f"{name}_cache"], wide[name]
            if self.rows == 1:
                after = ring.copy()
                after[tuple(index.reshape(-1, 3).T)] = new.reshape(-1, self.dim)
                attended.append(after)
            else:
                attended.append(np.concatenate((ring, new), axis=2))
                after = attended[-1][:, :, index]
            caches.append(after.astype(self.dtype))
        keys, values = (np.repeat(x, self.heads // self.kv_heads, axis=1) for x in attended)
        query = wide["query"] * wide.get("query_scale", 1.0)
        scores = query @ (keys * wide.get("key_scale", 1.0)).swapaxes(-1, -2) * self.attributes.scale
        if self.softcap:
            scores = np.tanh(scores / self.softcap) * self.softcap
        scores = scores + wide["score_bias"]
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if self.sinks:
            total = total + np.exp(wide["sinks"][:, None, None] - top)
        return (weights / total @ values, *caches)

    def model(self, arrays: Arrays, *, function: bool) -> bytes:
        """A serialized model of the node, with its ONNX function or without."""
        shapes = (arrays["query"].shape, arrays["key_cache"].shape, arrays["value_cache"].shape)
        inputs = [_value(name, array.shape, str(array.dtype)) for name, array in arrays.items()]
        outputs = [_value(name, shape, self.dtype) for name, shape in zip(OUTPUTS, shapes, strict=True)]
        attributes = self.attributes.as_onnx(self.variant)
        node = ir.node(self.variant.op_type, inputs, attributes, outputs=outputs, domain=DOMAIN, name="node")
        opsets = {"": DEFAULT_OPSET, DOMAIN: DOMAIN_VERSION}
        model = ir.Model(
            ir.Graph(inputs, outputs, nodes=[node], opset_imports=opsets, name="ring"), ir_version=IR_VERSION
        )
        if function:
            attach_functions(model)
        serialized: bytes = ir.serde.serialize_model(model).SerializeToString()
        return serialized


def _value(name: str, shape: tuple[int, ...], dtype: str) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(_ELEMENTS[dtype]))
