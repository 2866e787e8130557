"""The ahead-of-time plugin: when it is available, what it registers, and what it hands to TensorRT.

`tensorrt.plugin` is not to be had without NVIDIA's libraries. Its part that matters here stands in for it: the
decorators, which check signatures as NVIDIA documents them, and expressions of sizes, which here are numbers.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from localattn.core.errors import MissingDependency, UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.node import HEADS_FIRST, SEQUENCE_FIRST, VARIANTS, NodeAttributes, NodeVariant
from localattn.plugins.kernel.compile import compile_kernel
from localattn.plugins.kernel.spec import KernelSpec, grid, pack_scalars
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.quick import register
from localattn.plugins.quick.availability import why_not, why_not_release


class Size:
    """An expression of a size; `constant` says whether TensorRT knows it while it builds."""

    def __init__(self, value: int | Size, constant: bool = True) -> None:
        self.value: int = value.value if isinstance(value, Size) else value
        self.is_constant = constant

    def __mul__(self, other: Size) -> Size:
        return Size(self.value * other.value)

    def constant_value(self) -> int:
        return self.value


class TensorDesc:
    def __init__(self, shape: tuple[int, ...], dtype: str, open_head_dim: bool = False) -> None:
        self.shape_expr = [Size(size, not (open_head_dim and axis == 3)) for axis, size in enumerate(shape)]
        self.dtype = types.SimpleNamespace(name=dtype)

    def like(self) -> TensorDesc:
        return self


class KernelLaunchParams:
    grid_x = grid_y = grid_z = block_x = block_y = block_z = 1
    shared_mem = 0


class SymIntExprs(list[Size]):
    @classmethod
    def from_tuple(cls, values: list[Size]) -> SymIntExprs:
        assert all(isinstance(value, Size) for value in values)
        return cls(values)


class Registry(types.ModuleType):
    """`tensorrt.plugin`."""

    def __init__(self) -> None:
        super().__init__("tensorrt.plugin")
        self.described: dict[str, Callable[..., Any]] = {}
        self.implemented: dict[str, Callable[..., Any]] = {}
        self.TensorDesc, self.KernelLaunchParams = TensorDesc, KernelLaunchParams
        self.SymIntExprs, self.SymInt32 = SymIntExprs, Size
        self.cdiv = lambda a, b: Size(-(-a.value // b))

    def register(self, name: str) -> Callable[..., Any]:
        def keep(function: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(function)
            assert typing.get_origin(signature.return_annotation) is tuple
            assert all(p.annotation is not p.empty and p.default is p.empty for p in signature.parameters.values())
            self.described[name] = function
            return function

        return keep

    def aot_impl(self, name: str) -> Callable[..., Any]:
        def keep(function: Callable[..., Any]) -> Callable[..., Any]:
            described = list(inspect.signature(self.described[name]).parameters)
            signature = inspect.signature(function)
            assert list(signature.parameters) == [*described, "outputs", "tactic"]
            assert len(typing.get_args(signature.return_annotation)) == 4
            self.implemented[name] = function
            return function

        return keep


@pytest.fixture
def trtp(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A TensorRT of a release that can, as far as registering goes."""
    pytest.importorskip("triton", reason="triton compiles the kernels")
    plugin, tensorrt = Registry(), types.ModuleType("tensorrt")
    tensorrt.__version__ = "10.13.3.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", plugin)
    monkeypatch.setattr(register, "_registered", [])
    return plugin


def arrays(attributes: NodeAttributes) -> list[np.ndarray[Any, Any]]:
    """The node's attributes as the ONNX parser hands them over."""
    values = attributes.as_onnx()
    dtypes = {name: np.float32 if name == "scale" else np.int32 for name in register.ATTRIBUTES}
    return [np.atleast_1d(np.array(values[name], dtype=dtypes[name])) for name in register.ATTRIBUTES]


@pytest.mark.parametrize("perm", [SEQUENCE_FIRST, HEADS_FIRST])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.has_xpos], ids=lambda variant: variant.op_type)
def test_hands_over_the_kernel_of_the_contract(variant: NodeVariant, perm: tuple[int, ...], trtp: Registry) -> None:
    register.register_plugins(TARGETS["sm_86"])
    attributes = NodeAttributes(WindowGeometry(32, 1, 0, causal=True), -0.125, perm=perm)
    batch, length, heads = 2, 100, 3
    shape = (batch, length, heads, 64) if perm == SEQUENCE_FIRST else (batch, heads, length, 64)
    inputs = [TensorDesc(shape, "HALF") for _ in variant.input_names]
    name = f"localattn::{variant.op_type}"
    values = arrays(attributes)
    assert trtp.described[name](*inputs, *values) is inputs[0]
    entry, ptx, launch, scalars = trtp.implemented[name](*inputs, *values, (inputs[0],), None)
    spec = KernelSpec("fp16", 64, variant.has_mask, variant.has_bias)
    compiled = compile_kernel(spec, TARGETS["sm_86"])
    assert (entry, ptx) == (compiled.entry, compiled.ptx)
    assert (launch.grid_x.value, launch.grid_y.value, 1) == grid(compiled.tile, length, batch * heads)
    assert (launch.block_x, launch.shared_mem) == (compiled.threads, compiled.shared_bytes)
    assert tuple(size.value for size in scalars) == pack_scalars(attributes, length, heads)


def test_registers_once_and_for_one_gpu(trtp: Registry) -> None:
    register.register_plugins(TARGETS["sm_86"])
    first = dict(trtp.implemented)
    assert sorted(first) == sorted(f"localattn::{v.op_type}" for v in VARIANTS if not v.has_xpos)
    register.register_plugins(TARGETS["sm_86"])
    assert trtp.implemented == first
    with pytest.raises(UsageError, match="sm_90 cannot be registered"):
        register.register_plugins(TARGETS["sm_90"])


def test_open_head_size_is_refused(trtp: Registry) -> None:
    register.register_plugins(TARGETS["sm_86"])
    query = TensorDesc((1, 8, 1, 64), "HALF", open_head_dim=True)
    values = arrays(NodeAttributes(WindowGeometry(4), 1.0))
    with pytest.raises(UsageError, match="head size of an attention node is open"):
        trtp.implemented["localattn::WindowedAttention"](query, query, query, *values, (query,), None)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("10.3.0", "came with 10.9"),
        ("10.8.0.43", "came with 10.9"),
        ("10.9.0.34", ""),
        ("10.13.3.9", ""),
        ("10.14.1.48", "does not find them"),
        ("10.16.1", ""),
        ("11.1.0", ""),
    ],
)
def test_releases(version: str, why: str) -> None:
    assert why in why_not_release(version) and bool(why) == bool(why_not_release(version))


def test_reason_is_told(trtp: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not() == ""
    monkeypatch.setattr(sys.modules["tensorrt"], "__version__", "10.14.1")
    with pytest.raises(MissingDependency, match=r"TensorRT 10\.14\.1 does not find them") as raised:
        register.register_plugins(TARGETS["sm_86"])
    assert "--plugin library" in raised.value.fix
    monkeypatch.setattr(sys.modules["tensorrt"], "__version__", "11.0.0")
    monkeypatch.setattr(Registry, "aot_impl", property())
    assert "no aot_impl" in why_not()
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", None)
    assert "tensorrt.plugin does not import" in why_not()
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert "pip install 'localattn[tensorrt]'" in why_not()
