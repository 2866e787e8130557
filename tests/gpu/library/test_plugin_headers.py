"""Finding TensorRT's and CUDA's headers, and a compiler."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from localattn.core.errors import MissingDependency, UsageError
from localattn.core.extras import as_installed
from localattn.plugins import compilers
from localattn.plugins.library import headers
from localattn.plugins.library.sidecar import ARCHITECTURES, Arch

from ...support.native.plugin_build import without_zig

# As of 10.3 and as of 10.13 on, where the numbers stand behind another macro.
OLD = "#define NV_TENSORRT_MAJOR {0} //!< major\n#define NV_TENSORRT_MINOR {1}\n#define NV_TENSORRT_PATCH {2}\n"
NEW = (
    "#define TRT_MAJOR_ENTERPRISE {0}\n#define TRT_MINOR_ENTERPRISE {1}\n#define TRT_PATCH_ENTERPRISE {2}\n"
    "#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE //!< major\n#define NV_TENSORRT_MINOR TRT_MINOR_ENTERPRISE\n"
    "#define NV_TENSORRT_PATCH TRT_PATCH_ENTERPRISE\n"
)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENSORRT_ROOT", "CUDA_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def put_tensorrt(folder: Path, version: tuple[int, int, int], text: str = NEW) -> Path:
    folder.mkdir(parents=True)
    (folder / "NvInferRuntime.h").touch()
    (folder / "NvInferVersion.h").write_text(text.format(*version))
    return folder


@pytest.mark.parametrize("text", [OLD, NEW])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_system_folder_of_the_processor_comes_first(text: str, arch: Arch, tmp_path: Path) -> None:
    put_tensorrt(tmp_path / "usr/include", (11, 1, 0))
    mine = put_tensorrt(tmp_path / f"usr/include/{arch}-linux-gnu", (10, 3, 0), text)
    found = headers.find_tensorrt_headers(arch, tmp_path)
    assert (found.folder, found.version, found.origin) == (mine, "10.3.0", "system")
    assert str(mine) in found.describe()


@pytest.mark.parametrize("inside", ["include", ".", "include/x86_64-linux-gnu"])
def test_tensorrt_root_decides_alone(inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_tensorrt(tmp_path / "usr/include", (11, 1, 0))
    mine = put_tensorrt(tmp_path / "mine" / inside, (10, 9, 1))
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path / "mine"))
    found = headers.find_tensorrt_headers("x86_64", tmp_path)
    assert found.folder.resolve() == mine.resolve() and found.origin == "TENSORRT_ROOT"
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path / "empty"))
    with pytest.raises(MissingDependency, match="headers are missing") as raised:
        headers.find_tensorrt_headers("x86_64", tmp_path)
    assert "TENSORRT_ROOT is" in raised.value.why


@pytest.mark.parametrize("version", [(8, 6, 1), (10, 1, 0)])
def test_too_old_headers_are_named(version: tuple[int, int, int], no_wheels: None, tmp_path: Path) -> None:
    put_tensorrt(tmp_path / "usr/include", version)
    with pytest.raises(MissingDependency) as raised:
        headers.find_tensorrt_headers("x86_64", tmp_path)
    assert ".".join(map(str, version)) in raised.value.why and "10.3 is the oldest" in raised.value.why


def test_headers_that_tell_no_release_are_passed_over(no_wheels: None, tmp_path: Path) -> None:
    put_tensorrt(tmp_path / "usr/include", (10, 9, 0), "#define SOMETHING 1\n")
    with pytest.raises(MissingDependency, match="headers are missing") as raised:
        headers.find_tensorrt_headers("x86_64", tmp_path)
    assert "unknown release" in raised.value.why


def test_nothing_found_says_how_to_get_them(no_wheels: None, tmp_path: Path) -> None:
    for find in (headers.find_tensorrt_headers, headers.find_cuda_headers):
        with pytest.raises(MissingDependency) as raised:
            find("aarch64", tmp_path)
        assert as_installed("pip install 'localattn[plugin]'") in raised.value.fix


def test_wheels_have_copies(tmp_path: Path) -> None:
    for package, find in (("kernel_lens", headers.find_tensorrt_headers), ("triton", headers.find_cuda_headers)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        found = find("aarch64", tmp_path)
        assert found.origin == f"wheel {package}"
        assert found.version[:2].isdigit()


def test_cuda_home_decides_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, version in (("usr/local/cuda/include", 13000), ("mine/include", 12060)):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    assert headers.find_cuda_headers("aarch64", tmp_path).version == "13.0"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "mine"))
    assert headers.find_cuda_headers("aarch64", tmp_path).version == "12.6"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(MissingDependency, match=r"cuda_runtime_api\.h is missing"):
        headers.find_cuda_headers("aarch64", tmp_path)


def put_compiler(folder: Path, name: str, machine: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\ncase $1 in -dumpmachine) echo {machine};; *) echo {name} 1.2;; esac\n")
    path.chmod(0o755)
    return path


def test_compiler_for_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_compiler(tmp_path, "g++", "x86_64-linux-gnu")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compilers.find_compiler("x86_64") == compilers.Compiler(("g++",), "g++ 1.2")
    without_zig(monkeypatch)
    with pytest.raises(MissingDependency) as raised:
        compilers.find_compiler("aarch64")
    assert "g++ is for x86_64-linux-gnu" in raised.value.why
    assert "apt-get install g++-aarch64-linux-gnu" in raised.value.fix
    put_compiler(tmp_path, "aarch64-linux-gnu-g++", "aarch64-linux-gnu")
    assert compilers.find_compiler("aarch64").command == ("aarch64-linux-gnu-g++",)


def test_a_compiler_that_hangs_or_writes_no_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_zig(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    latin = put_compiler(tmp_path, "g++", "x86_64-linux-gnu")
    latin.write_bytes(latin.read_bytes().replace(b"1.2", b"1.2 \xa9"))
    assert compilers.find_compiler("x86_64").version == "g++ 1.2 \N{REPLACEMENT CHARACTER}"

    def hang(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(MissingDependency) as raised:
        compilers.find_compiler("x86_64")
    assert "g++ is for an unknown machine" in raised.value.why


def test_zigs_compiler_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ziglang", reason="the package with Zig's compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = compilers.find_compiler("aarch64")
    assert found == compilers.zig_compiler("aarch64")
    assert found.command[1:] == ("-m", "ziglang", "c++", "-target", "aarch64-linux-gnu.2.17")
    put_compiler(tmp_path, "g++", "aarch64-linux-gnu")
    assert compilers.find_compiler("aarch64").command == ("g++",)
    assert compilers.find_compiler("x86_64") == compilers.zig_compiler("x86_64")
    without_zig(monkeypatch)
    with pytest.raises(MissingDependency) as raised:
        compilers.zig_compiler("x86_64", "windows")
    assert as_installed("pip install 'localattn[compiler]'") in raised.value.fix


def test_cxx_is_honoured_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_compiler(tmp_path, "g++", "x86_64-linux-gnu")
    mine = put_compiler(tmp_path, "mine", "aarch64-unknown-linux-gnu")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", f"{mine} -dumpmachine-is-first")
    assert compilers.find_compiler("x86_64").command == ("g++",), "CXX makes code for another processor"
    monkeypatch.setenv("CXX", str(mine))
    assert compilers.find_compiler("aarch64") == compilers.Compiler((str(mine),), "mine 1.2")
    monkeypatch.setenv("CXX", "nowhere-to-be-found")
    with pytest.raises(UsageError, match="cannot be found"):
        compilers.find_compiler("aarch64")
