"""onnxruntime-gpu's own providers on a machine without a GPU: what they make of exported files when a session opens.

The wheel, of the release that is installed for the CPU, is fetched from the package index (256 MB): slow.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
from local_attention import LocalMHA

from localattn.core.errors import MissingDependency
from localattn.core.versions import parse
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.jobs.module import export_module
from localattn.exporter.options import ShapeRequest
from localattn.plugins.library.sidecar import host_arch
from localattn.plugins.library.tensorrt_provider import rewrite_for_provider
from localattn.runtime.backends.tensorrt.device import find_device_or_none

from ...support.models.engine_models import NODES, needs_plugin_tools, small_checkpoint, small_model
from ...support.native.plugin_build import folder, program, small_library
from ...support.steps import export_steps
from ..simulators.cuda_stand_in import onnxruntime_gpu, release_of_gpu, stand_ins
from ..simulators.tensorrt_releases.releases import Release, child, installed, parts_of, run

pytestmark = [
    pytest.mark.slow,
    needs_plugin_tools,
    pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="the wheel is Linux', x86-64"),
]

DEFAULT = ShapeRequest()

# The bindings with which a user loads the plugin; the provider is built with a TensorRT 10.
TENSORRT_10 = Release("10.15.1.29", "tensorrt-cu12-bindings")


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Path:
    assert request.config.cache is not None
    return request.config.cache.mkdir("tensorrt")


@cache
def models() -> dict[str, Path]:
    """Exported files of many kinds, by name."""
    path = folder() / "providers"
    path.mkdir()

    def exported(name: str, dtype: str = "fp32", shapes: ShapeRequest = DEFAULT, **options: Any) -> Path:
        export(ExportRequest(small_checkpoint(dtype), path / f"{name}.onnx", shapes=shapes, dtype=dtype, **options))
        return path / f"{name}.onnx"

    export_steps(ExportRequest(small_checkpoint("fp16"), path / "step.onnx", dtype="fp16"), "step", 8)
    attention = {"dim": 32, "window_size": 8, "dim_head": 16, "heads": 2, "causal": True}
    export_module(LocalMHA(**attention, use_xpos=True), ["x:float32:[1,60,32]"], path / "xpos.onnx")
    # Long enough for a body in parts.
    export_module(
        LocalMHA(**{**attention, "heads": 32, "window_size": 128}), ["x:float32:[1,1024,32]"], path / "long.onnx"
    )
    return {
        "fp32": small_model(),
        "fp16": small_model("fp16"),
        "bf16": small_model("bf16"),
        "mask": exported("mask", shapes=ShapeRequest(batch=2, seq_len=61, mask=True)),
        "beside": exported("beside", external_data_from=0),
        "open": exported("open", "fp16", dynamic=("batch", "seq")),
        "int8": exported("int8", weight_dtype="int8"),
        **{name: path / f"{name}.onnx" for name in ("step", "step.prefill", "xpos", "long")},
    }


def at_the_door(model: Path, store: Path, scratch: Path, with_plugin: Path | None = None) -> tuple[Path, Path]:
    """What the provider asks TensorRT's parser about, and what it wants an engine of."""
    onnxruntime = onnxruntime_gpu(store)
    door = program(host_arch(), "door.cpp", "-shared", "-fPIC", "-Wl,-soname=libnvonnxparser.so.10")
    for name in ("kept", "child"):
        (scratch / name).mkdir()
    shown = child(
        "tests.gpu.simulators.tensorrt_releases.provider",
        scratch / "child",
        parts=asdict(parts_of(TENSORRT_10, store, scratch / "child")),
        stand_ins=[str(path) for path in stand_ins(onnxruntime)],
        door=str(door),
        kept=str(scratch / "kept"),
        onnxruntime=str(onnxruntime),
        library=None if with_plugin is None else str(with_plugin),
        model=str(model),
    )
    assert shown["file"].startswith(str(onnxruntime))
    return scratch / "kept" / "asked.onnx", scratch / "kept" / "wanted.onnx"


def nodes(path: Path) -> list[onnx.NodeProto]:
    model = onnx.load(path, load_external_data=False)
    assert not model.functions
    return list(model.graph.node)


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "mask", "beside", "xpos", "long", "open", "step"])
def test_tensorrt_gets_the_whole_graph(name: str, store: Path, tmp_path: Path) -> None:
    """In one engine, of standard operators alone, which the real parser and builder take."""
    asked, wanted = at_the_door(models()[name], store, tmp_path)
    given = nodes(wanted)
    assert len(given) > 10 and {node.domain for node in given} == {""}
    assert len(given) == len(nodes(asked))
    shown = run("accepted", installed(), library=None, asked=str(asked), wanted=str(wanted))
    assert shown["errors"] == []
    assert (shown["supported"], shown["subgraphs"], shown["parsed"], shown["plugins"]) == (True, 1, True, 0)
    assert shown["engine"] > 10_000


@pytest.mark.parametrize("name", ["fp16", "open"])
def test_tensorrt_gets_the_plugin(name: str, store: Path, tmp_path: Path) -> None:
    """Of a rewritten file, with the plugin library loaded as the documentation says."""
    rewritten = tmp_path / "rewritten.onnx"
    moved = rewrite_for_provider(models()[name], rewritten)
    assert len(moved.nodes) == NODES
    asked, wanted = at_the_door(rewritten, store, tmp_path, small_library())
    plugins = [node for node in nodes(wanted) if node.domain]
    assert [(node.domain, node.op_type) for node in plugins] == [("trt.plugins", "WindowedAttention")] * NODES
    shown = run("accepted", installed(), library=str(small_library()), asked=str(asked), wanted=str(wanted))
    assert shown["errors"] == []
    assert (shown["supported"], shown["subgraphs"], shown["plugins"]) == (True, 1, NODES)
    assert shown["engine"] > 10_000


def release() -> tuple[int, ...]:
    return parse(release_of_gpu())


@cache
def on_cuda(store: Path) -> dict[str, Any]:
    """What CUDA's provider makes of every model."""
    onnxruntime, scratch = onnxruntime_gpu(store), folder() / "cuda sessions"
    scratch.mkdir(exist_ok=True)
    graphs = {f"{name}, graph": [str(models()[name]), True] for name in ("fp16", "step", "open")}
    return child(
        "tests.gpu.simulators.cuda_session",
        scratch,
        stand_ins=[str(path) for path in stand_ins(onnxruntime)],
        onnxruntime=str(onnxruntime),
        folder=str(scratch),
        models={name: [str(path), False] for name, path in models().items()} | graphs,
        step=str(models()["step"]),
    )


COPIES = ("MemcpyFromHost", "MemcpyToHost")
LP_NORMALIZATION = (1, 27)  # the release that computes it on the GPU


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "mask", "beside", "xpos", "long", "step", "step.prefill"])
def test_cuda_computes_everything(name: str, store: Path) -> None:
    """No node of a file of fixed sizes runs on the CPU, none of the types is emulated, nothing is copied in between."""
    if "step" in name and release() < LP_NORMALIZATION:
        pytest.skip("LpNormalization runs on the CPU")
    seen = on_cuda(store)[name]
    assert "error" not in seen, seen
    assert (seen["provider"], seen["notes"]) == ("cuda", [])
    assert not set(COPIES) & seen["operators"].keys()
    assert seen["bound"] and len(seen["outputs"]) == (5 if "step" in name else 1)


def test_cuda_keeps_the_caches_of_step_files(store: Path) -> None:
    """A prompt in chunks and tokens one by one, caches bound on the GPU."""
    assert on_cuda(store)["steps"] == [[1, 1, 23]] * 3


def test_what_old_releases_leave_to_the_cpu_is_told(store: Path) -> None:
    seen = on_cuda(store)["step"]
    (note,) = seen["notes"] if release() < LP_NORMALIZATION else [""]
    assert note in ("", "LpNormalization runs on the CPU: cuda has no kernel for it before onnxruntime 1.27")
    assert bool(note) == ("MemcpyToHost" in seen["operators"])


def test_open_sizes_cost_two_small_copies_a_layer(store: Path) -> None:
    """Numbers computed from the sizes, which onnxruntime keeps on the CPU: the window's and the sequence's ends."""
    operators = on_cuda(store)["open"]["operators"]
    assert (operators.get("MemcpyFromHost"), operators.get("MemcpyToHost", 0)) == (2 * NODES, 0)


def test_cuda_graphs_are_recorded_of_fixed_sizes(store: Path) -> None:
    seen = on_cuda(store)
    assert seen["fp16, graph"]["provider"] == "cuda"
    assert (seen["step, graph"].get("provider") == "cuda") == (release() >= LP_NORMALIZATION)
    assert "cannot use the graph capture feature" in seen["open, graph"]["error"]


def test_cuda_has_no_int8_products_and_says_so(store: Path) -> None:
    seen = on_cuda(store)["int8"]
    assert [note.partition(" ")[0] for note in seen["notes"]] == ["DynamicQuantizeLinear", "MatMulInteger"]
    assert seen["operators"]["MemcpyFromHost"] > seen["operators"]["MatMulInteger"] > 0


@pytest.mark.skipif(find_device_or_none() is not None, reason="this machine has a GPU")
def test_what_a_provider_lacks_is_told_in_one_error(store: Path) -> None:
    """Of a machine with onnxruntime-gpu and no CUDA; on whatever starts, nothing is said of it."""
    environment = os.environ | {"PYTHONPATH": str(onnxruntime_gpu(store)), "LD_LIBRARY_PATH": ""}
    command = [sys.executable, "-m", "localattn.cli", "run", str(small_model())]
    chosen = {name: subprocess.run([*command, "--provider", name], env=environment, capture_output=True, text=True)
              for name in ("cuda", "tensorrt", "auto")}  # fmt: skip
    for name in ("cuda", "tensorrt"):
        assert (chosen[name].returncode, chosen[name].stdout) == (MissingDependency.exit_code, "")
        assert chosen[name].stderr.startswith(f"Error: The provider '{name}' does not run here.")
    assert "libcublasLt.so" in chosen["cuda"].stderr and "CUDA and cuDNN" in chosen["cuda"].stderr
    assert "pip install 'tensorrt<11'" in chosen["tensorrt"].stderr
    assert (chosen["auto"].returncode, chosen["auto"].stderr) == (0, "")
    assert "ran on cpu" in chosen["auto"].stdout
