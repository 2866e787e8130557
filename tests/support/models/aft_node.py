"""Models of one AFT-local node, inputs that are hard for it, and its definition in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from localattn.core.nodes.aft import LOWEST_KEY, AftVariant
from localattn.core.nodes.attention import DOMAIN, DOMAIN_VERSION, PLUGIN_ATTRIBUTES
from localattn.core.versions import DEFAULT_OPSET, IR_VERSION
from localattn.exporter.lowering.functions import attach_functions

Arrays = dict[str, NDArray[Any]]
Change = Callable[[NDArray[Any], NDArray[Any]], None]


@dataclass(frozen=True)
class Case:
    """A node and its sizes; `reach` is how far the biases reach."""

    length: int
    reach: int
    causal: bool = False
    masked: bool = False
    batch: int = 1
    dim: int = 3

    @property
    def columns(self) -> int:
        """Biases of a position."""
        return self.reach + 1 if self.causal else 2 * self.reach + 1

    def inputs(self, seed: int = 0, change: str = "") -> Arrays:
        """Random inputs, with keys and biases changed as `HARD` says."""
        random = np.random.default_rng(seed)
        shape = (self.length, self.batch, self.dim)
        gate, key, value = (random.standard_normal(shape) for _ in range(3))
        bias = random.standard_normal((self.length, self.columns))
        if change:
            HARD[change](key, bias)
        found = {"gate": gate, "key": key, "value": value, "position_bias": bias}
        arrays: Arrays = {name: x.astype(np.float32) for name, x in found.items()}
        if self.masked:
            arrays["key_mask"] = random.random((self.batch, self.length)) < 0.6
        return arrays

    def model(self, arrays: Arrays, *, function: bool = True, bias_given: bool = False) -> bytes:
        """A serialized model whose biases are a constant; `bias_given` makes them an input."""
        op_type = AftVariant(causal=self.causal, has_mask=self.masked).op_type
        values = {name: _value(name, array) for name, array in arrays.items()}
        bias = values["position_bias"]
        if not bias_given:
            bias.const_value = ir.tensor(arrays["position_bias"], name=bias.name)
        output = _value("output", arrays["gate"])
        node = ir.node(op_type, list(values.values()), PLUGIN_ATTRIBUTES, outputs=[output], domain=DOMAIN, name="node")
        graph = ir.Graph(
            [value for value in values.values() if value.const_value is None],
            [output],
            nodes=[node],
            initializers=[value for value in values.values() if value.const_value is not None],
            opset_imports={"": DEFAULT_OPSET, DOMAIN: DOMAIN_VERSION},
            name="aft",
        )
        model = ir.Model(graph, ir_version=IR_VERSION)
        if function:
            attach_functions(model)
        serialized: bytes = ir.serde.serialize_model(model).SerializeToString()
        return serialized


def _value(name: str, array: NDArray[Any]) -> ir.Value:
    element = ir.DataType.BOOL if array.dtype == bool else ir.DataType.FLOAT
    return ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(element))


def feed(arrays: Mapping[str, NDArray[Any]]) -> Arrays:
    """What a session with constant biases is given."""
    return {name: array for name, array in arrays.items() if name != "position_bias"}


def expected(case: Case, arrays: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """The definition, dense and in float64; zeros where a query sees nothing."""
    gate, key, value, table = (arrays[name].astype(np.float64) for name in ("gate", "key", "value", "position_bias"))
    rows, columns = np.arange(case.length)[:, None], np.arange(case.length)[None]
    at = columns - rows + case.reach
    inside = (at >= 0) & (at <= 2 * case.reach)
    bias = np.where(inside, table[rows, np.clip(at, 0, case.columns - 1)], 0.0)
    key = np.maximum(key, LOWEST_KEY)
    seen = (columns <= rows) if case.causal else np.ones_like(inside)
    output = np.zeros_like(gate)
    for b in range(case.batch):
        visible = seen & arrays["key_mask"][b] if case.masked else seen
        for row in range(case.length):
            keys = np.flatnonzero(visible[row])
            if len(keys):
                # The largest key first: a sum with one of 1e29 would lose the bias.
                logits = bias[row, keys][:, None] + (key[keys, b] - key[keys, b].max(axis=0))
                weights = np.exp(logits - logits.max(axis=0))
                output[row, b] = (weights * value[keys, b]).sum(axis=0) / weights.sum(axis=0)
    return output / (1 + np.exp(-gate))


def _rising(key: NDArray[Any], bias: NDArray[Any]) -> None:
    key += np.linspace(0, 300, len(key))[:, None, None]


def _falling(key: NDArray[Any], bias: NDArray[Any]) -> None:
    key -= np.linspace(0, 300, len(key))[:, None, None]


def _steep(key: NDArray[Any], bias: NDArray[Any]) -> None:
    """More than e^88, all that fp32 has, from one key to the next."""
    key += 150.0 * np.arange(len(key))[:, None, None]


def _spike(key: NDArray[Any], bias: NDArray[Any]) -> None:
    """A spike in each channel elsewhere."""
    for channel in range(key.shape[2]):
        key[(5 + 7 * channel) % len(key), :, channel] += 200


def _low(key: NDArray[Any], bias: NDArray[Any]) -> None:
    """A spike under negative biases."""
    key[len(key) // 2] += 60
    bias -= 40


def _high(key: NDArray[Any], bias: NDArray[Any]) -> None:
    key -= 1000
    bias += 50


def _suppressed(key: NDArray[Any], bias: NDArray[Any]) -> None:
    """Nothing that a row near the spike sees is above e^-120."""
    key -= 120
    key[len(key) // 2] += 120
    bias -= 120


def _lowest(key: NDArray[Any], bias: NDArray[Any]) -> None:
    """Most rows of a causal node, and sequences with such a mask, see no other keys."""
    key[: 2 * len(key) // 3] = -np.inf


def _below(key: NDArray[Any], bias: NDArray[Any]) -> None:
    key[:] = -1e30
    key[::3] = -3e38


def _uneven(key: NDArray[Any], bias: NDArray[Any]) -> None:
    bias[:, ::3] += 100


# Changes of keys and biases; the last two have biases wider than the ONNX function takes.
HARD: dict[str, Change] = {
    "rising": _rising,
    "falling": _falling,
    "steep": _steep,
    "spike": _spike,
    "low": _low,
    "high": _high,
    "lowest": _lowest,
    "below": _below,
    "suppressed": _suppressed,
    "uneven": _uneven,
}
WIDE = ("suppressed", "uneven")


def finest(arrays: Mapping[str, NDArray[Any]]) -> float:
    """How near results can be: at logits of a few hundred fp32 itself is only that fine."""
    keys = arrays["key"]
    plain = np.abs(keys, where=keys > LOWEST_KEY, out=np.zeros_like(keys))  # the lowest keys are all alike
    largest = np.float32(plain.max() + np.abs(arrays["position_bias"]).max())
    return max(1e-5, 4 * float(np.spacing(largest)))
