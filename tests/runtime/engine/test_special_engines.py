"""Engines with several profiles, with the plugin inside, and of kinds that only a GPU can open: what is built, what is
refused, and which profile a session takes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from localattn.core.documents.engine_facts import BuildOptions, ProfileFacts, read_engine_facts
from localattn.core.errors import UsageError
from localattn.core.storage.files import sha256
from localattn.runtime.engine.builder.checks import judge_plugins
from localattn.runtime.engine.device import Device, find_device_or_none
from localattn.runtime.engine.layers import EngineLayer
from localattn.runtime.engine.library import Messages, open_library
from localattn.runtime.engine.open import OpenEngine, check_device, open_engine, why_never_opened
from localattn.runtime.engine.session import EngineSession, check_place

from ...conftest import Finished
from ...support.models.engine_models import needs_plugin_tools, needs_rtx, open_node, small_model
from ...support.native.plugin_build import folder
from .test_facts import ORIN, written

RTX = ("--backend", "tensorrt-rtx", "--target", "rtx40")


@cache
def library() -> Path:
    """A plugin library with the kernel of the small model."""
    from localattn.plugins.kernel.spec import KernelSpec
    from localattn.plugins.kernel.targets import TARGETS
    from localattn.plugins.library.build import build_library
    from localattn.plugins.library.facts import host_arch

    path = folder() / "special.so"
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder() / "cache")}):
        build_library(path, specs=[KernelSpec("fp32", 16)], targets=[TARGETS["sm_80"]], arch=host_arch())
    return path


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
    found = read_engine_facts(tmp_path / "two.engine").options.profiles
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
    assert "same profiles" in finished.err


@needs_plugin_tools
@needs_rtx
def test_the_plugin_library_is_put_into_the_engine(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    output = tmp_path / "whole.engine"
    chosen = ("--plugin-library", library(), "--embed-plugin")
    finished = localattn("build", small_model(), "-o", output, *RTX, *chosen)
    assert finished.code == 0, finished.err
    facts = read_engine_facts(output)
    assert library().read_bytes() in output.read_bytes()
    checks = {check.name: check for check in facts.checks}
    assert checks["plugin inside engine"].status == "passed"
    assert "would run in this process" in checks["parity"].detail
    assert facts.plugin is not None and facts.plugin.sha256 == sha256(library())
    assert [(kernel.dtype, kernel.head_dim) for kernel in facts.plugin.kernels] == [("fp32", 16)]
    with pytest.raises(UsageError, match="is not opened by localattn"):
        open_engine(output, str(library()))


@needs_rtx
@pytest.mark.skipif(find_device_or_none() is not None, reason="this machine has a GPU, which such a build needs")
def test_weights_to_be_replaced_need_a_gpu(localattn: Callable[..., Finished], tmp_path: Path) -> None:
    """The builder was told: it looks for engines that can be refitted, and fails there without a driver."""
    output = tmp_path / "x.engine"
    finished = localattn("build", small_model(), "-o", output, *RTX, "--plugin", "none", "--refit")
    assert finished.code == 5 and not output.exists()
    assert f"could not build {small_model()}" in finished.err


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
    path, facts = written(tmp_path)
    device = Device("a GPU", capability, "12.6")
    facts.options.hardware_compatible = "ampere-plus"
    if fits:
        check_device(path, facts, device)
    else:
        with pytest.raises(UsageError, match="was built for"):
            check_device(path, facts, device)


class Runner:
    """As Polygraphy's TrtRunner, as far as profiles go."""

    def __init__(self, engine: Any) -> None:
        self.is_active = False
        self.profiles: list[int] = []

    def activate(self) -> None:
        self.is_active = True

    def deactivate(self) -> None:
        self.is_active = False

    def set_profile(self, index: int) -> None:
        self.profiles.append(index)

    def infer(self, feed_dict: dict[str, Any], check_inputs: bool) -> dict[str, Any]:
        return {"logits": np.zeros((1, 64, 23), np.float32)}


@needs_rtx
def test_a_session_takes_the_profile_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_library("tensorrt-rtx")
    monkeypatch.setattr("polygraphy.backend.trt.TrtRunner", Runner)
    _, facts = written(tmp_path)
    facts.inputs[0] = replace(facts.inputs[0], shape=(1, "n"))
    ranges = [(1, 8, 64), (1, 4, 8), (65, 128, 256)]
    facts.options.profiles = [
        ProfileFacts(profile=number, input="tokens", min=(1, low), opt=(1, opt), max=(1, high))
        for number, (low, opt, high) in enumerate(ranges)
    ]
    library: Any = SimpleNamespace(messages=Messages())
    session = EngineSession(OpenEngine(facts, library, ORIN, engine=None), "model.engine")
    for length in (16, 3, 5, 100, 9):
        session.run({"tokens": np.zeros((1, length), np.int64)})
    assert session._runner.profiles == [1, 2, 0], "the narrowest that fits; nothing where it is set already"
    with pytest.raises(UsageError, match="none of its 3 profiles"):
        session.run({"tokens": np.zeros((1, 300), np.int64)})


@needs_rtx
def test_a_session_on_another_gpu_sets_it_in_every_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_library("tensorrt-rtx")
    monkeypatch.setattr("polygraphy.backend.trt.TrtRunner", Runner)
    chosen: list[tuple[int, int]] = []

    def set_device(index: int) -> int:
        chosen.append((threading.get_ident(), index))
        return 0

    runtime = SimpleNamespace(handle=SimpleNamespace(cudaSetDevice=set_device))
    monkeypatch.setattr("polygraphy.cuda.wrapper", lambda: runtime)
    _, facts = written(tmp_path)
    library: Any = SimpleNamespace(messages=Messages())
    session = EngineSession(OpenEngine(facts, library, replace(ORIN, index=1), engine=None), "model.engine")
    assert session.provider == "cuda:1"
    thread = threading.Thread(target=session.run, args=({"tokens": np.zeros((1, 64), np.int64)},))
    thread.start()
    thread.join()
    assert chosen == [(thread.ident, 1)]


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
