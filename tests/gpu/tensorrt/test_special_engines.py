"""Engines with several profiles, with the plugin inside, and of kinds that only a GPU can open: what is built, and
what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localattn.core.documents.engine_sidecar import BuildOptions, read_engine_sidecar
from localattn.core.errors import UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import VARIANTS, NodeAttributes
from localattn.core.storage.files import sha256
from localattn.runtime.backends.engines import EngineLayer
from localattn.runtime.backends.tensorrt.builder.checks import judge_plugins
from localattn.runtime.backends.tensorrt.device import Device, find_device_or_none
from localattn.runtime.backends.tensorrt.open import check_device, open_engine, why_never_opened
from localattn.runtime.backends.tensorrt.session import check_place

from ...conftest import Finished
from ...support.models import node_model
from ...support.models.engine_models import needs_plugin_tools, needs_rtx, open_node, small_model
from ...support.native.plugin_build import small_library
from .test_engine_sidecar import written

RTX = ("--backend", "tensorrt-rtx", "--target", "rtx40")


def shapes(low: str, opt: str, high: str) -> list[str]:
    sizes = {"--min-shapes": low, "--opt-shapes": opt, "--max-shapes": high}
    inputs = ("query", "key", "value")
    return [
        word for option, size in sizes.items() for word in (option, ",".join(f"{name}:{size}x2x8" for name in inputs))
    ]


@needs_rtx
def test_several_profiles_are_built(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    model = open_node(tmp_path)
    one, two = shapes("1x1", "1x16", "1x16"), shapes("1x17", "2x64", "4x64")
    sizes = {}
    for name, options in {"one": one, "two": [*one, *two]}.items():
        output = tmp_path / f"{name}.engine"
        finished = localattn("build", model, "-o", output, *RTX, "--plugin", "none", *options)
        assert finished.code == 0, finished.err
        sizes[name] = output.stat().st_size
    found = read_engine_sidecar(tmp_path / "two.engine").options.profiles
    assert [(profile.profile, profile.input, profile.max[:2]) for profile in found] == [
        *((0, name, (1, 16)) for name in ("query", "key", "value")),
        *((1, name, (4, 64)) for name in ("query", "key", "value")),
    ]
    assert sizes["two"] > 1.5 * sizes["one"], "kernels for both profiles"
    shown = localattn("inspect", tmp_path / "two.engine").out
    assert "profile 1: query from [1, 17, 2, 8] to [4, 64, 2, 8]" in shown


@needs_rtx
def test_profiles_that_do_not_belong_together(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    model = open_node(tmp_path)
    options = [*shapes("1x1", "1x16", "1x16"), "--max-shapes", "query:1x20x2x8"]
    finished = localattn("build", model, *RTX, "--plugin", "none", *options)
    assert finished.code == 2
    assert "same number of profiles" in finished.err


@needs_plugin_tools
@needs_rtx
def test_the_plugin_library_is_put_into_the_engine(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    output = tmp_path / "whole.engine"
    chosen = ("--plugin-library", small_library(), "--embed-plugin")
    finished = localattn("build", small_model(), "-o", output, *RTX, *chosen)
    assert finished.code == 0, finished.err
    sidecar = read_engine_sidecar(output)
    assert small_library().read_bytes() in output.read_bytes()
    checks = {check.name: check for check in sidecar.checks}
    assert checks["plugin inside engine"].status == "passed"
    assert "would run in this process" in checks["parity"].detail
    assert sidecar.plugin is not None and sidecar.plugin.sha256 == sha256(small_library())
    assert [(kernel.dtype, kernel.head_dim) for kernel in sidecar.plugin.kernels] == [("fp32", 16)]
    with pytest.raises(UsageError, match="is not opened by localattn"):
        open_engine(output, str(small_library()))


@needs_plugin_tools
@needs_rtx
def test_layers_that_do_not_fit_keep_their_function(
    localattn: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer has heads of 16, the other of 300: the first is a plugin all the same."""
    window = NodeAttributes(WindowGeometry(16, 1, 0, causal=True), 0.25, query_block=16)
    parts = []
    for width in (16, 300):
        monkeypatch.setattr(node_model, "HEAD_DIM", width)
        part = node_model.one_node(VARIANTS[0], window, 64)
        for value in (*part.graph.input, *part.graph.output):
            value.name += f"_{width}"
        (node,) = part.graph.node
        node.name = f"of_{width}"
        for names in (node.input, node.output):
            names[:] = [f"{name}_{width}" for name in names]
        parts.append(part)
    whole, other = parts
    whole.graph.node.extend(other.graph.node)
    whole.graph.input.extend(other.graph.input)
    whole.graph.output.extend(other.graph.output)
    path, before = tmp_path / "two.onnx", whole.SerializeToString()
    path.write_bytes(before)
    finished = localattn("build", path, *RTX, "--plugin-library", small_library())
    assert finished.code == 0, finished.err
    assert "of_300 is built from its ONNX function: its head size is 300" in finished.err
    sidecar = read_engine_sidecar(path.with_suffix(".engine"))
    assert sidecar.plugin is not None and sidecar.plugin.layers == ["of_16"]
    assert {check.name: check.status for check in sidecar.checks}["plugin in network"] == "passed"
    assert path.read_bytes() == before


@needs_rtx
@pytest.mark.skipif(find_device_or_none() is not None, reason="this machine has a GPU, which such a build needs")
@pytest.mark.parametrize("option", ["--refit", "--strip-weights"])
def test_engines_without_fixed_weights_need_a_gpu(
    option: str, localattn: Callable[..., Finished], tmp_path: Path
) -> None:
    """TensorRT-RTX fails on them without a driver, with a message about Myelin: it is said before building."""
    output = tmp_path / "x.engine"
    finished = localattn("build", small_model(), "-o", output, *RTX, "--plugin", "none", option)
    assert finished.code == 3 and not output.exists()
    assert f"{option} needs a GPU, and there is none here." in finished.err
    assert "Building" not in finished.stages


@needs_rtx
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_turing_says_what_runs_there(dtype: str, localattn: Callable[..., Finished], tmp_path: Path) -> None:
    """TensorRT-RTX has no fp32 products for it, and attention is summed in fp32 whatever the file's type."""
    rtx20 = ("--backend", "tensorrt-rtx", "--target", "rtx20")
    finished = localattn("build", small_model(dtype), "-o", tmp_path / "x.engine", *rtx20, "--plugin", "none")
    assert finished.code == 5
    assert "Leave rtx20 (sm_75) out of the targets" in finished.err
    assert "--provider cuda" in finished.err and "--backend tensorrt builds" in finished.err


@needs_rtx
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--version-compatible",), "tensorrt-rtx takes no --version-compatible"),
        (("--hardware-compatible", "ampere-plus"), "tensorrt-rtx takes no --hardware-compatible"),
        (("--embed-plugin",), "no plugin library to put into the engine"),
    ],
)
def test_kinds_that_are_refused(
    options: tuple[str, ...], message: str, localattn: Callable[..., Finished], tmp_path: Path
) -> None:
    output = tmp_path / "x.engine"
    finished = localattn("build", small_model(), "-o", output, *RTX, "--plugin", "none", *options)
    assert finished.code == 2
    assert message in " ".join(finished.err.split())
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"version_compatible": True}, "holds code"),
        ({"embed_plugin": True}, "holds code"),
        ({"strip_weights": True}, "no weights"),
        ({"refit": True}, ""),
        ({"hardware_compatible": "ampere-plus"}, ""),
    ],
)
def test_what_is_never_opened(options: dict[str, Any], reason: str) -> None:
    said = why_never_opened(BuildOptions(plugin="none", **options))
    assert (reason in said) and bool(said) == bool(reason)


@pytest.mark.parametrize(("capability", "fits"), [(75, False), (87, True), (90, True)])
def test_hardware_compatible_engines_run_on_later_gpus(capability: int, fits: bool, tmp_path: Path) -> None:
    path, sidecar = written(tmp_path)
    device = Device("a GPU", capability, "12.6")
    sidecar.options.hardware_compatible = "ampere-plus"
    if fits:
        check_device(path, sidecar, device)
    else:
        with pytest.raises(UsageError, match="was built for"):
            check_device(path, sidecar, device)


@pytest.mark.parametrize(("provider", "gpu"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_gpus_by_number(provider: str, gpu: int) -> None:
    assert check_place(Path("model.engine"), provider, None) == gpu


def test_no_other_place() -> None:
    for provider in ("cpu", "cuda:", "cuda:x", "cuda:-1"):
        with pytest.raises(UsageError, match="cannot run on"):
            check_place(Path("model.engine"), provider, None)


def test_layers_of_ahead_of_time_plugins_are_not_proven() -> None:
    """Nobody has seen how the inspector names them: a miss is no failure."""
    layers = [EngineLayer("attend", "kgen")]
    assert judge_plugins(layers, ["attend"], ahead_of_time=True).status == "not proven"
    assert judge_plugins(layers, ["attend"]).status == "failed"


@needs_rtx
def test_another_gpu_to_build_on(
    localattn: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a third kind of GPU, because opening the engine would need a real one."""
    started: list[Device] = []
    monkeypatch.setattr("localattn.runtime.backends.tensorrt.builder.build.start_device", started.append)
    monkeypatch.setattr(
        "localattn.runtime.backends.tensorrt.builder.build.find_device",
        lambda index: Device("second", 89, "13.0", index),
    )
    options = ("--backend", "tensorrt-rtx", "--target", "rtx30", "--plugin", "none", "--device", 1)
    finished = localattn("build", small_model(), "-o", tmp_path / "x.engine", *options)
    assert finished.code == 0, finished.err
    assert {device.index for device in started} == {1}
    assert read_engine_sidecar(tmp_path / "x.engine").device == "second"


@pytest.mark.skipif(find_device_or_none() is not None, reason="this machine has a GPU")
@needs_rtx
def test_a_gpu_that_is_not_there_is_not_built_on(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    finished = localattn("build", small_model(), "-o", tmp_path / "x.engine", *RTX, "--device", 1)
    assert finished.code == 3 and "builds on a GPU only" not in finished.err
    assert "No NVIDIA" in finished.err
