"""Every way of loading the plugin library, each in a process that does as that host does.

The host opens a part of its own that is linked to TensorRT, out of sight of other libraries, as servers do; TensorRT is
TensorRT-RTX with its own registry. The layout of TensorRT 10 is that of NVIDIA's headers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from localattn.core.nodes.gpu import SERVED_OP_TYPES
from localattn.plugins.library.sidecar import ARCHITECTURES, Arch, companion_path, host_arch

from ...support.native.plugin_build import emulator, library, program

OP_TYPES = len(SERVED_OP_TYPES)


def plugin(arch: Arch) -> Path:
    path = library(arch).path
    assert path is not None
    return path


@cache
def rtx() -> Path:
    """The folder of TensorRT-RTX's libraries."""
    spec = find_spec("tensorrt_rtx_libs")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("tensorrt-rtx-cu13 is the TensorRT of these tests")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def backend(tensorrt: Path, arch: Arch) -> Path:
    """A host's part that is linked to this TensorRT."""
    output = f"libbackend_{tensorrt.name.partition('.')[0]}.so"
    linked = [f"-Wl,-soname={output}", "-Wl,--no-as-needed", str(tensorrt), f"-Wl,-rpath,{tensorrt.parent}"]
    return program(arch, "backend.cpp", "-shared", "-fPIC", *linked)


@cache
def tensorrt_10(arch: Arch, version: int) -> Path:
    name = f"libfake_registry_{version}.so"
    flags = ["-Wno-deprecated-declarations", f"-DVERSION={version}", f"-Wl,-soname={name}"]
    return program(arch, "fake_registry.cpp", "-shared", "-fPIC", *flags)


@cache
def built_in(tensorrt: Path, arch: Arch) -> int:
    """The number of creators that TensorRT brings."""
    (count,) = counts_of(tensorrt, "start", arch=arch)[0]
    return count


def host(tensorrt: Path, *steps: str, arch: Arch | None = None, preload: Path | None = None) -> tuple[list[int], str]:
    """Numbers of creators that were added until after each step, and what was said."""
    counts, said = counts_of(tensorrt, *steps, arch=arch or host_arch(), preload=preload)
    return [count - built_in(tensorrt, arch or host_arch()) for count in counts], said


def counts_of(tensorrt: Path, *steps: str, arch: Arch, preload: Path | None = None) -> tuple[list[int], str]:
    """Numbers of creators after each step, and what was said."""
    command = [*emulator(arch), str(program(arch, "host.cpp")), str(backend(tensorrt, arch)), *steps]
    environment = {**os.environ, **({} if preload is None else {"LD_PRELOAD": str(preload)})}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return [int(line) for line in finished.stdout.split()], finished.stderr


def test_opening_the_plugin_library_alone_registers_nothing() -> None:
    """Which is why the companion exists."""
    counts, _ = host(rtx() / "libtensorrt_rtx.so.1", "start", f"open:{plugin(host_arch())}")
    assert counts == [0, 0]


def test_registry_loads_it() -> None:
    """A C++ program, Python, and trtexec's --dynamicPlugins."""
    counts, said = host(rtx() / "libtensorrt_rtx.so.1", "start", f"load:{plugin(host_arch())}")
    assert (counts, said) == ([0, OP_TYPES], "")


@pytest.mark.parametrize("first", [True, False])
def test_host_that_opens_the_companion(first: bool) -> None:
    """Triton Server's `plugins=`, onnxruntime's trt_extra_plugin_lib_paths, DeepStream's custom-lib-path, trtexec's
    --staticPlugins: before TensorRT has a logger, or after."""
    steps = [f"open:{companion_path(plugin(host_arch()))}", "start"]
    counts, said = host(rtx() / "libtensorrt_rtx.so.1", *(steps if first else reversed(steps)))
    assert counts == ([OP_TYPES, OP_TYPES] if first else [0, OP_TYPES])
    assert said == ""


def test_host_in_which_the_companion_is_preloaded() -> None:
    """Triton Server's LD_PRELOAD: the library is there long before TensorRT."""
    counts, said = host(rtx() / "libtensorrt_rtx.so.1", "start", preload=companion_path(plugin(host_arch())))
    assert (counts, said) == ([OP_TYPES], "")


def test_program_linked_to_tensorrt_in_which_it_is_preloaded(tmp_path: Path) -> None:
    tensorrt = rtx() / "libtensorrt_rtx.so.1"
    main = tmp_path / "main.cpp"
    main.write_text(
        '#include <cstdio>\nextern "C" int creators(); int main() { std::printf("%d\\n", creators()); return 0; }\n'
    )
    linked = backend(tensorrt, host_arch())
    output = tmp_path / "main"
    subprocess.run(["g++", str(main), str(linked), f"-Wl,-rpath,{linked.parent}", "-o", str(output)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(companion_path(plugin(host_arch())))}
    finished = subprocess.run([output], env=environment, capture_output=True, text=True, check=True)
    assert (int(finished.stdout), finished.stderr) == (built_in(tensorrt, host_arch()) + OP_TYPES, "")


def test_python_in_which_it_is_preloaded() -> None:
    rtx()
    program_text = (
        "import tensorrt_rtx as trt\n"
        "logger = trt.Logger(trt.Logger.WARNING); builder = trt.Builder(logger)\n"
        "print(sorted(c.name for c in trt.get_plugin_registry().all_creators if c.plugin_namespace == 'localattn'))"
    )
    environment = {**os.environ, "LD_PRELOAD": str(companion_path(plugin(host_arch())))}
    finished = subprocess.run([sys.executable, "-c", program_text], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == str(sorted(SERVED_OP_TYPES))


@pytest.mark.parametrize("order", ["load open", "open load"])
def test_both_ways_do_no_harm(order: str) -> None:
    """A host that is told both: the creators are there once, or TensorRT refuses the second registration."""
    steps = {"load": f"load:{plugin(host_arch())}", "open": f"open:{companion_path(plugin(host_arch()))}"}
    counts, _ = host(rtx() / "libtensorrt_rtx.so.1", "start", *(steps[word] for word in order.split()))
    assert counts == [0, OP_TYPES, OP_TYPES]


def test_process_without_tensorrt_hears_nothing() -> None:
    environment = {**os.environ, "LD_PRELOAD": str(companion_path(plugin(host_arch())))}
    finished = subprocess.run(["true"], env=environment, capture_output=True, text=True)
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("version", [100300, 101601])
def test_registry_of_tensorrt_10(version: int, arch: Arch) -> None:
    counts, said = host(tensorrt_10(arch, version), "start", f"open:{companion_path(plugin(arch))}", arch=arch)
    assert (counts, said) == ([0, OP_TYPES], "")


def test_release_of_which_nothing_is_known_is_left_alone() -> None:
    _, said = host(tensorrt_10(host_arch(), 10400), f"open:{companion_path(plugin(host_arch()))}")
    assert "is release 10400, which is unknown: no plugin is registered" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [("libother_register.so", "does not take"), ("renamed.so", "does not end in _register.so")],
)
def test_companion_without_its_library(name: str, message: str, tmp_path: Path) -> None:
    lonely = tmp_path / name
    shutil.copy(companion_path(plugin(host_arch())), lonely)
    counts, said = host(rtx() / "libtensorrt_rtx.so.1", "start", f"open:{lonely}")
    assert counts == [0, 0]
    assert message in said


def test_companion_is_in_the_sidecar() -> None:
    sidecar = library(host_arch())
    assert sidecar.has_companion()
    assert sidecar.path is not None and sidecar.companion is not None
    assert sidecar.companion.name == f"{sidecar.path.stem}_register.so"
