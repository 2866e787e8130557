"""`localattn build` with TensorRT-RTX, which builds without a GPU: engines, their sidecars, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from localattn.commands.api.building import _profiles
from localattn.commands.build import parse_shapes
from localattn.core import tensorrt_versions
from localattn.core.documents.engine_sidecar import ProfileRecord, read_engine_sidecar
from localattn.core.documents.sidecar import read_sidecar, sidecar_path
from localattn.core.errors import UsageError
from localattn.core.machine.processor import host_arch
from localattn.core.storage.files import sha256
from localattn.core.storage.library_store import TENSORRT_PLUGIN, read_named
from localattn.runtime.backends.engines import BuildRequest, PluginChoice
from localattn.runtime.backends.tensorrt.builder import source as source_module
from localattn.runtime.backends.tensorrt.builder.build import build_engine
from localattn.runtime.backends.tensorrt.builder.source import profiles_for, read_source
from localattn.runtime.backends.tensorrt.device import find_device_or_none

from ...conftest import Finished
from ...support.models.engine_models import NODES, needs_plugin_tools, needs_rtx, open_node, small_model
from ...support.native.plugin_build import small_library

pytestmark = needs_rtx
no_gpu = pytest.mark.skipif(find_device_or_none() is not None, reason="this machine has a GPU")

RTX = ("--backend", "tensorrt-rtx")


@pytest.fixture
def library() -> Path:
    """A plugin library with the kernels of the small model in both precisions."""
    return small_library()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No test sees the plugin libraries of the machine, or leaves one there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def request(output: Path, model: Path, **options: Any) -> BuildRequest:
    return BuildRequest(model, output, "tensorrt-rtx", **{"targets": ("rtx40",), **options})


def shapes(sizes: str) -> list[str]:
    """The three options for the open node's inputs: sizes from 1x1 on."""
    inputs = ("query", "key", "value")
    text = {size: ",".join(f"{name}:{size}x2x8" for name in inputs) for size in ("1x1", sizes)}
    return ["--min-shapes", text["1x1"], "--opt-shapes", text[sizes], "--max-shapes", text[sizes]]


def test_the_engine_and_its_sidecar(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    output = tmp_path / "small.engine"
    finished = localattn("build", small_model(), "-o", output, *RTX, "--target", "rtx30,sm_89,12.0", "--plugin", "none")
    assert (finished.code, finished.err) == (0, "")
    sidecar = read_engine_sidecar(output)
    assert sidecar.targets == ["sm_86", "sm_89", "sm_120"]
    assert sidecar.engine_sha256 == sha256(output)
    assert sidecar.onnx_sha256 == sha256(small_model())
    assert sidecar.model is not None and sidecar.model.model_sha256 == sidecar.onnx_sha256
    assert sidecar.plugin is None
    assert [spec.describe() for spec in sidecar.inputs] == ["tokens int64 [1, 64]"]
    statuses = {check.name: check.status for check in sidecar.checks}
    assert statuses["plugin in network"] == statuses["precision of network"] == "passed"
    assert statuses["products of network"] == "passed"
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["small.engine", "small.engine.json"]


@no_gpu
def test_json_holds_the_entries_and_nothing_else(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    output, cache = tmp_path / "small.engine", tmp_path / "times"
    options = ("--timing-cache", cache, "--workspace", 64, "--builder-optimization-level", 1, "--format", "json")
    finished = localattn("build", small_model("fp16"), "-o", output, *RTX, "--plugin", "none", *options)
    report = json.loads(finished.out)
    assert report["targets"] == ["sm_86", "sm_89", "sm_120"]
    assert report["dtype"] == "fp16"
    assert report["options"]["workspace"] == 64 << 20
    assert report["options"]["builder_optimization_level"] == 1
    assert "timing cache is not used" in report["notes"][0]
    inspected, compared = report["checks"][-2:]
    assert inspected == {
        "name": "engine inspector",
        "status": "skipped",
        "detail": "no GPU here; the network above is what was serialised",
        "figures": {},
        "baseline": None,
    }
    assert (compared["name"], compared["status"]) == ("parity", "skipped")
    assert compared["detail"] == (
        "no GPU here: the engine did not run; on the device: localattn parity small.engine --against small.onnx"
    )


@pytest.mark.skipif(find_device_or_none() is None, reason="no GPU to run an engine on")
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_an_engine_that_runs_is_compared_with_its_file(
    localattn: Callable[..., Finished], tmp_path: Path, dtype: str
) -> None:
    output = tmp_path / "small.engine"
    finished = localattn("build", small_model(dtype), "-o", output, *RTX, "--plugin", "none")
    assert finished.code == 0, finished.err
    record = read_engine_sidecar(output).checks[-1]
    assert (record.name, record.status) == ("parity", "passed")


@needs_plugin_tools
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_nodes_become_plugins(
    localattn: Callable[..., Finished], tmp_path: Path, library: Path, dtype: str
) -> None:
    output = tmp_path / "small.engine"
    chosen = ("--plugin-library", library, "--target", "rtx30,rtx40,rtx50")
    finished = localattn("build", small_model(dtype), "-o", output, *RTX, *chosen)
    assert finished.code == 0, finished.err
    sidecar = read_engine_sidecar(output)
    assert sidecar.plugin is not None
    assert (sidecar.plugin.kind, sidecar.plugin.sha256) == ("library", sha256(library))
    assert len(sidecar.plugin.layers) == NODES
    assert sidecar.checks[0].figures == {"plugins": NODES}


@needs_plugin_tools
def test_a_library_serves_one_build_and_not_the_next(tmp_path: Path, library: Path) -> None:
    """Plugins are found by name in a registry of the process: what was loaded for one build is gone for the next."""
    named = PluginChoice("library", read_named(TENSORRT_PLUGIN, library), asked="library")
    asked = {"library": named, "none": PluginChoice()}
    for number, kind in enumerate(("library", "none", "library", "none")):
        report = build_engine(request(tmp_path / f"{number}.engine", small_model(), plugin=asked[kind]))
        assert report.sidecar.checks[0].figures["plugins"] == (NODES if kind == "library" else 0)


@needs_plugin_tools
def test_auto_builds_a_library_once(localattn: Callable[..., Finished], tmp_path: Path, own_cache: Path) -> None:
    paths = []
    for name in ("first.engine", "second.engine"):
        finished = localattn("build", small_model(), "-o", tmp_path / name, *RTX, "--target", "rtx40")
        assert finished.code == 0, finished.err
        plugin = read_engine_sidecar(tmp_path / name).plugin
        assert plugin is not None
        paths.append((plugin.path, Path(plugin.path).stat().st_mtime_ns))
    assert paths[0] == paths[1]
    assert own_cache in Path(paths[0][0]).parents


def test_auto_without_a_kernel_says_why(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    model = open_node(tmp_path)
    options = (*RTX, "--target", "rtx40", *shapes("2x16"), "--force")
    finished = localattn("build", model, *options)
    assert finished.code == 0, finished.err
    assert "is built from its ONNX function: its head size is 8" in finished.err
    finished = localattn("build", model, *options, "--plugin", "library")
    assert finished.code == 2
    assert "head size is 8" in finished.err


@needs_plugin_tools
def test_a_library_without_the_kernel_is_refused(
    localattn: Callable[..., Finished], tmp_path: Path, library: Path
) -> None:
    sidecar = sidecar_path(library)
    kernels = json.loads(sidecar.read_text())
    other = tmp_path / library.name
    other.write_bytes(library.read_bytes())
    kernels["kernels"] = [kernel for kernel in kernels["kernels"] if kernel["dtype"] == "fp32"]
    sidecar_path(other).write_text(json.dumps(kernels))
    output = tmp_path / "small.engine"
    finished = localattn("build", small_model("fp16"), "-o", output, *RTX, "--plugin-library", other)
    assert finished.code == 2
    assert "localattn_fp16_d16" in finished.err
    assert not output.exists()


@needs_plugin_tools
def test_a_file_that_is_no_library_is_refused(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    broken = tmp_path / "plugin.so"
    broken.write_bytes(b"no library")
    finished = localattn("build", small_model(), "-o", tmp_path / "x.engine", *RTX, "--plugin-library", broken)
    assert finished.code == 2 and "is not a shared library" in finished.err
    machine = {"x86_64": 62, "aarch64": 183}[host_arch()]
    broken.write_bytes(b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little"))
    finished = localattn("build", small_model(), "-o", tmp_path / "x.engine", *RTX, "--plugin-library", broken)
    assert finished.code == 3
    assert f"cannot load {broken}" in finished.err and "/proc/" not in finished.err
    assert not (tmp_path / "x.engine").exists()


@needs_plugin_tools
def test_a_library_of_something_else_is_refused(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    """It opens, registers no plugin, and TensorRT logs nothing about it."""
    other = next(
        (p for folder in ("/usr/lib", "/lib") for p in sorted(Path(folder).glob("*-linux-gnu/libz.so.1"))), None
    )
    if other is None:
        pytest.skip("there is no libz.so.1 on this machine")
    finished = localattn("build", small_model(), "-o", tmp_path / "x.engine", *RTX, "--plugin-library", other)
    assert finished.code in (2, 3) and "libz.so.1" in finished.err, finished.err
    assert not (tmp_path / "x.engine").exists()


@needs_plugin_tools
def test_an_engine_without_the_plugin_is_not_written(
    localattn: Callable[..., Finished], tmp_path: Path, library: Path
) -> None:
    """With another `plugin_namespace` TensorRT takes the function although the plugin is there, and says nothing."""
    model = onnx.load(small_model())
    for node in model.graph.node:
        if node.domain == "localattn":
            for attribute in node.attribute:
                if attribute.name == "plugin_namespace":
                    attribute.s = b"elsewhere"
    path, output = tmp_path / "lost.onnx", tmp_path / "lost.engine"
    onnx.save(model, path)
    finished = localattn("build", path, *RTX, "--plugin-library", library)
    assert finished.code == 5
    assert "2 of 2 attention nodes are no plugin" in finished.err
    assert not output.exists() and not sidecar_path(output).exists()


@needs_plugin_tools
def test_releases_that_prefer_the_function_get_a_file_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: Path
) -> None:
    """As TensorRT 10.3: the model is parsed from memory, its weights from the file they lie in."""
    monkeypatch.setitem(tensorrt_versions.FEATURES, "plugin_before_function", {})
    model = onnx.load(small_model())
    path = tmp_path / "external.onnx"
    onnx.save(model, path, save_as_external_data=True, location="external.data", size_threshold=0)
    parsed: list[bytes] = []
    original = source_module.stripped

    def spy(model: Any, op_types: Any) -> bytes:
        parsed.append(original(model, op_types))
        return parsed[-1]

    monkeypatch.setattr(source_module, "stripped", spy)
    choice = PluginChoice("library", read_named(TENSORRT_PLUGIN, library), asked="library")
    report = build_engine(request(tmp_path / "x.engine", path, plugin=choice))
    assert report.sidecar.checks[0].figures == {"plugins": NODES}
    kept = {body.domain for body in onnx.load_model_from_string(parsed[0]).functions}
    assert kept == {"localattn.fused"}
    assert report.sidecar.engine_bytes > (tmp_path / "external.data").stat().st_size


def test_missing_external_data_is_named(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    path = tmp_path / "external.onnx"
    onnx.save(onnx.load(small_model()), path, save_as_external_data=True, location="external.data", size_threshold=0)
    (tmp_path / "external.data").unlink()
    finished = localattn("build", path, *RTX, "--plugin", "none")
    assert finished.code == 2
    assert "external.data is missing" in finished.err


def test_a_file_the_parser_refuses(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    model = onnx.load(small_model())
    node = next(node for node in model.graph.node if node.op_type == "MatMul")
    node.op_type, node.domain = "NoSuchOperator", "nowhere"
    model.opset_import.append(onnx.helper.make_opsetid("nowhere", 1))
    path = tmp_path / "unknown.onnx"
    onnx.save(model, path)
    finished = localattn("build", path, *RTX, "--plugin", "none")
    assert finished.code == 5
    assert "NoSuchOperator" in finished.err
    assert list(tmp_path.glob("*.*")) == [path]


def test_nothing_is_replaced_unasked(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    output = tmp_path / "small.engine"
    output.write_bytes(b"mine")
    finished = localattn("build", small_model(), "-o", output, *RTX)
    assert finished.code == 2
    assert output.read_bytes() == b"mine"


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not called an engine"):
        build_engine(request(tmp_path / "small.plan", small_model()))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Cannot write"):
        build_engine(request(tmp_path / "x.engine", small_model(), timing_cache=tmp_path / "file" / "cache"))


@pytest.mark.parametrize("target", ["sm_87", "rtx60", "sm_"])
def test_targets_it_cannot_build_for(localattn: Callable[..., Finished], tmp_path: Path, target: str) -> None:
    finished = localattn("build", small_model(), "-o", tmp_path / "x.engine", *RTX, "--target", target)
    assert finished.code == 2
    assert target in finished.err


def test_ahead_of_time_plugins_are_tensorrts(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    finished = localattn("build", small_model(), "-o", tmp_path / "x.engine", *RTX, "--plugin", "aot")
    assert finished.code == 2
    assert "Only tensorrt" in finished.err


def test_progress_is_told(tmp_path: Path) -> None:
    lines: list[str] = []
    build_engine(request(tmp_path / "x.engine", small_model()), lines.append)
    assert lines[0] == "Opening tensorrt-rtx"
    assert any(line.startswith("Building: ") and "/" in line for line in lines)


def test_an_interrupt_stops_the_build(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("Building: "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(request(tmp_path / "x.engine", small_model()), interrupt)
    assert list(tmp_path.glob("*.*")) == []


def test_open_sizes_need_a_profile(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    model = open_node(tmp_path)
    finished = localattn("build", model, *RTX, "--plugin", "none")
    assert finished.code == 2
    assert "nothing says how large it becomes" in finished.err
    assert localattn("build", model, *RTX, "--plugin", "none", *shapes("2x40")).code == 0
    profiles = {profile.input: profile for profile in read_engine_sidecar(tmp_path / "node.engine").options.profiles}
    assert profiles.keys() == {"query", "key", "value"}
    assert profiles["key"].min == (1, 1, 2, 8)
    assert profiles["key"].max == (2, 40, 2, 8)


def test_open_sizes_are_those_of_the_export(tmp_path: Path) -> None:
    source = read_source(open_node(tmp_path))
    sidecar = read_sidecar(small_model())
    assert sidecar is not None
    known = replace(source.summary, sidecar=sidecar.model_copy(update={"batch": 3}), sidecar_matches=True)
    source = replace(source, summary=known)
    assert {p.max for p in profiles_for(source, [])} == {(3, 64, 2, 8)}
    good = ProfileRecord(input="query", min=(1, 1, 2, 8), opt=(1, 8, 2, 8), max=(4, 64, 2, 8))
    assert profiles_for(source, [good])[0] == good
    for change, reason in (
        ({"max": (4, 65, 2, 8)}, "too long"),
        ({"max": (4, 4, 2, 8)}, "not in order"),
        ({"max": (4, 64, 2, 9)}, "does not fit"),
        ({"input": "other"}, "no input"),
    ):
        with pytest.raises(UsageError, match=reason):
            profiles_for(source, [good.model_copy(update=change)])


@pytest.mark.parametrize(
    ("low", "high", "reason"),
    [
        ("tokens:1x8", None, "given together"),
        ("tokens:1x8", "x:1x8", "given together"),
        ("tokens", "tokens", "not a shape"),
    ],
)
def test_shapes_that_do_not_parse(low: str, high: str | None, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        _profiles(*(parse_shapes("--min-shapes", text) for text in (low, low, high)))


def test_a_profile_of_another_input_names_those_that_there_are(
    localattn: Callable[..., Finished], tmp_path: Path
) -> None:
    sizes = [part for option in ("min", "opt", "max") for part in (f"--{option}-shapes", "input_ids:1x8")]
    refused = localattn("build", small_model(), "-o", tmp_path / "m.engine", *RTX, "--plugin", "none", *sizes)
    assert refused.code == 2
    assert "There is no input 'input_ids'." in refused.err and "Known: tokens." in refused.err


def test_fixed_sizes_take_no_profile(tmp_path: Path) -> None:
    profile = ProfileRecord(input="tokens", min=(1, 64), opt=(1, 64), max=(1, 64))
    with pytest.raises(UsageError, match="fixed"):
        build_engine(request(tmp_path / "x.engine", small_model(), profiles=(profile,)))


def test_a_plugin_that_serves_no_node_is_refused(tmp_path: Path) -> None:
    choice = PluginChoice("aot", register=lambda: None, op_types=("WindowedAttentionBias",), asked="aot")
    with pytest.raises(UsageError, match="No plugin serves"):
        build_engine(request(tmp_path / "x.engine", small_model(), plugin=choice))


def test_a_failed_build_says_what_the_library_logged(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    """TensorRT-RTX has no fused kernel for fp32 attention, and says so when it builds."""
    inputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2, 16, 64]) for name in "qkv"]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 2, 16, 64])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Attention", list("qkv"), ["y"])], "g", inputs, [output])
    path = tmp_path / "attention.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10), path)
    finished = localattn("build", path, *RTX, "--plugin", "none")
    assert finished.code == 5
    assert "Attention operation was not supported" in finished.err
    assert list(tmp_path.glob("*.*")) == [path]
