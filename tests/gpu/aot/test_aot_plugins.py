"""The ahead-of-time plugin: when it is available, what it registers, and what it hands to TensorRT.

NVIDIA's own `tensorrt.plugin` registers and asks it, with attributes that a parser read and expressions of sizes that a
builder works with: see `tensorrt_releases`. By default that of the release that the extra `dev` brings; marked slow,
those of the other releases.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from localattn.core.errors import MissingDependency
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST, VARIANTS, NodeAttributes, NodeVariant
from localattn.core.nodes.gpu import SERVED
from localattn.core.tensorrt_versions import has
from localattn.plugins.aot import register
from localattn.plugins.aot.availability import why_not, why_not_release
from localattn.plugins.kernel.compile import compile_kernel
from localattn.plugins.kernel.spec import grid, pack_scalars, spec_for
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.kernel.tiles import tile_for

from ...support.models import node_model
from ...support.models.engine_models import needs_plugin_tools
from ...support.native.plugin_build import folder
from ..simulators.tensorrt_releases.quick import LAUNCH, SIZES
from ..simulators.tensorrt_releases.releases import OTHERS, Release, installed, run

TARGET, OTHER = "sm_86", "sm_90"
HERE = Release("")  # what is installed

# Releases that serve, each with its own bindings, and each one's `tensorrt.plugin` in the bindings that are installed.
SERVING = [release for release in OTHERS if has("aot_plugins", "tensorrt", release.version)]
NEW = [release for release in SERVING if release.libraries == "1.7.1"]
EXCHANGED = [Release("", quick=release.version) for release in SERVING if release not in NEW]


@dataclass(frozen=True)
class Case:
    """A file of one node: its attributes, its sizes ("b" and "n" for open ones), its element type and head size."""

    variant: NodeVariant
    attributes: NodeAttributes
    batch: int | str = 2
    length: int | str = 100
    dtype: str = "fp16"
    head_dim: int = 64

    def sizes(self) -> list[tuple[int, int]]:
        """Batch and length, smallest, best and largest."""
        if isinstance(self.batch, int) and isinstance(self.length, int):
            return [(self.batch, self.length)] * 3
        return list(zip(*(values for _, values in SIZES), strict=True))

    def write(self, path: Path) -> Path:
        """The file, whose node has a second output for what the launch is asked for."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node_model, "HEAD_DIM", self.head_dim)
            written = "fp16" if self.dtype == "bf16" else self.dtype
            model = node_model.one_node(self.variant, self.attributes, self.length, self.batch, dtype=written)
        del model.functions[:]
        for value in [*model.graph.input, *model.graph.output]:
            if self.dtype == "bf16":
                value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
        model.graph.node[0].output.append(LAUNCH)
        sizes = ["grid_x", "grid_y", "length", "heads"]
        model.graph.output.append(onnx.helper.make_tensor_value_info(LAUNCH, onnx.TensorProto.FLOAT, sizes))
        onnx.save(model, path)
        return path


def attributes(perm: tuple[int, ...], xpos: bool = False) -> NodeAttributes:
    geometry = WindowGeometry(32, 1, 0, causal=True)
    return NodeAttributes(geometry, -0.125, perm=perm, query_block=32, xpos_scale_base=16.0 * xpos)


PLAIN, ALL = VARIANTS[0], VARIANTS[3]
CASES = {
    **{v.op_type: Case(v, attributes((SEQUENCE_FIRST, HEADS_FIRST)[v.has_mask], v.has_xpos)) for v in VARIANTS[:6]},
    "exact": Case(PLAIN, NodeAttributes(WindowGeometry(48, 2, 3, exact_windowsize=True), 1.5, shared_qk=True)),
    "wide fp32": Case(PLAIN, attributes(HEADS_FIRST), length=7, dtype="fp32", head_dim=80),
    "bf16": Case(PLAIN, attributes(SEQUENCE_FIRST), dtype="bf16", head_dim=16),
    "open": Case(PLAIN, attributes(SEQUENCE_FIRST), "b", "n"),
    "open, heads first": Case(ALL, attributes(HEADS_FIRST), "b", "n"),
}


TOO_MANY = Case(PLAIN, attributes(SEQUENCE_FIRST), batch=40_000, length=1)  # of two heads: above what a grid holds


def open_head_size(path: Path) -> Path:
    """A file that does not say how wide its heads are."""
    model = onnx.load(CASES["WindowedAttention"].write(path))
    for value in [*model.graph.input, model.graph.output[0]]:
        value.type.tensor_type.shape.dim[3].dim_param = "d"
    onnx.save(model, path)
    return path


_told: dict[Release, dict[str, Any]] = {}


def told_by(release: Release, store: Path | None) -> dict[str, Any]:
    """What the child process saw with this release."""
    pytest.importorskip("triton", reason="triton compiles the kernels")
    bound = Release(installed().version, quick=release.quick) if not release.version else release
    if release not in _told:
        files = {}
        if bound.libraries == "1.7.1":
            files = {name: str(case.write(folder() / f"{name}.quick.onnx")) for name, case in CASES.items()}
            files["open head size"] = str(open_head_size(folder() / "open_head_size.quick.onnx"))
            files["too many"] = str(TOO_MANY.write(folder() / "too_many.quick.onnx"))
        _told[release] = run("quick", bound, store, target=TARGET, other=OTHER, models=files)
    return _told[release]


def each(*releases: Release) -> pytest.MarkDecorator:
    """The test runs with what is installed, and slowly with these."""
    params = [
        pytest.param(one, marks=[pytest.mark.slow] if one != HERE else [], id=str(one) or "installed")
        for one in releases
    ]
    return pytest.mark.parametrize("release", params)


@pytest.fixture
def shown(release: Release, request: pytest.FixtureRequest) -> dict[str, Any]:
    cache = request.config.cache
    assert cache is not None
    return told_by(release, None if release == HERE else cache.mkdir("tensorrt"))


@needs_plugin_tools
@each(HERE, *SERVING, *EXCHANGED)
def test_tensorrt_registers_it(shown: dict[str, Any]) -> None:
    assert shown["why_not"] == ""
    assert shown["creators"] == {variant.op_type: True for variant in SERVED}
    floats = ("scale", "softcap", "xpos_scale_base")
    expected = {
        variant.op_type: [[name, "FLOAT32" if name in floats else "INT32"] for name in register.attributes_of(variant)]
        for variant in SERVED
    }
    assert shown["fields"] == expected
    assert shown["types"] == {variant.op_type: ["HALF"] for variant in SERVED}


@needs_plugin_tools
@each(HERE, *SERVING)
def test_registers_once_and_for_one_gpu(shown: dict[str, Any]) -> None:
    assert shown["again"] == ["", "Ahead-of-time plugins for sm_90 cannot be registered."]


@needs_plugin_tools
@each(HERE, *NEW, *EXCHANGED)
@pytest.mark.parametrize("name", CASES)
def test_hands_over_the_kernel_of_the_contract(name: str, shown: dict[str, Any]) -> None:
    case, model = CASES[name], shown["models"][name]
    assert (model["errors"], model["layers"]) == ([], ["PLUGIN_V3"])
    written = case.attributes.as_onnx()
    declared = register.attributes_of(case.variant)
    assert model["parsed"] == {field: np.atleast_1d(written[field]).tolist() for field in declared}
    assert list(model["parsed"]) == list(declared)
    shared_qk = getattr(case.attributes, "shared_qk", False)
    spec = spec_for(case.variant, case.dtype, case.head_dim, shared_qk=shared_qk)
    kernel = compile_kernel(spec, TARGETS[TARGET], tile_for(spec, TARGETS[TARGET], opt_in=False))
    ptx = kernel.ptx.encode()
    assert model["kernel"] == [kernel.entry, hashlib.sha256(ptx).hexdigest(), len(ptx)]
    # What TensorRT's builder makes of the expressions, at every size.
    heads = node_model.HEADS
    expected = [[*grid(kernel.tile, length, batch * heads)[:2], length, heads] for batch, length in case.sizes()]
    assert model["evaluated"] == expected
    is_open = isinstance(case.batch, str)
    x, y, *_ = expected[0]
    assert model["launch"] == {
        "grid_x": None if is_open else x, "grid_y": None if is_open else y, "grid_z": 1, "block_x": kernel.threads,
        "block_y": 1, "block_z": 1, "shared_mem": kernel.shared_bytes,
    }  # fmt: skip
    length = None if is_open else case.length
    assert model["scalars"] == [length, *pack_scalars(case.attributes, 0, heads)[1:]]


@needs_plugin_tools
@each(HERE, *NEW, *EXCHANGED)
@pytest.mark.parametrize("name", CASES)
def test_output_is_like_the_query(name: str, shown: dict[str, Any]) -> None:
    case, model = CASES[name], shown["models"][name]
    axes = (0, 1, 2, 3) if case.attributes.perm == SEQUENCE_FIRST else (0, 2, 1, 3)
    expected = [(batch, length, node_model.HEADS, case.head_dim) for batch, length in case.sizes()]
    assert model["shapes"] == [[sizes[axis] for axis in axes] for sizes in expected]
    dtype = {"fp16": "HALF", "bf16": "BF16", "fp32": "FLOAT"}[case.dtype]
    inputs = [("BOOL" if which == "key_mask" else dtype) for which in case.variant.input_names]
    assert model["formats"] == {str(place): [kind, "LINEAR"] for place, kind in enumerate([*inputs, dtype])}
    assert model["engine"] > 0


@needs_plugin_tools
@each(HERE, *NEW, *EXCHANGED)
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("open head size", "The head size of an attention node is dynamic."),
        ("too many", "The kernel does not compute an attention node of this size."),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(name: str, what: str, shown: dict[str, Any]) -> None:
    model = shown["models"][name]
    assert model["refused"] == what
    assert model["errors"] and "layers" not in model


@needs_plugin_tools
@each(*(release for release in OTHERS if release not in SERVING))
def test_releases_that_cannot_say_so(release: Release, shown: dict[str, Any]) -> None:
    assert shown["why_not"] == why_not_release(release.version) != ""


def test_attributes_are_arrays_to_every_release() -> None:
    """NDArray of numpy 2.5 is an alias without bases, which `tensorrt.plugin` before 11.3 does not know."""
    for annotation in {name: kind for node in SERVED for name, kind in register.attributes_of(node).items()}.values():
        assert typing.get_origin(annotation) is np.ndarray
        assert not issubclass(annotation, inspect.Signature)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("10.3.0", "10.9 or later"),
        ("10.8.0.43", "10.9 or later"),
        ("10.9.0.34", ""),
        ("10.13.3.9", ""),
        ("10.14.1.48", "not 10.14"),
        ("10.16.1", ""),
        ("11.1.0", ""),
    ],
)
def test_releases(version: str, why: str) -> None:
    assert why in why_not_release(version) and bool(why) == bool(why_not_release(version))


def test_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of these names and no content stand in for releases that have less, and for none."""
    pytest.importorskip("triton", reason="triton compiles the kernels")
    tensorrt, plugin = types.ModuleType("tensorrt"), types.ModuleType("tensorrt.plugin")
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", plugin)
    monkeypatch.setattr(register, "_registered", [])
    tensorrt.__version__ = "10.14.1"  # type: ignore[attr-defined]
    with pytest.raises(MissingDependency, match=r"TensorRT 10\.14\.1 does not find ahead-of-time plugins") as raised:
        register.register_plugins(TARGETS[TARGET])
    assert "`plugin='library'`" in raised.value.fix
    tensorrt.__version__ = "11.0.0"  # type: ignore[attr-defined]
    assert "no aot_impl" in why_not()
    plugin.aot_impl = None  # type: ignore[attr-defined]
    assert why_not() == ""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton, which compiles the kernel, cannot be imported" in why_not()
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", None)
    assert "tensorrt.plugin cannot be imported" in why_not()
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert "pip install 'localattn[tensorrt]'" in why_not()
