"""`pip install -e` of a checkout: it builds the CPU kernels where a compiler is there, and never fails without."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from localattn.core.machine.processor import host_arch
from localattn.core.storage.library_store import CPU_KERNELS
from localattn.release.installed import Environment

from .test_release import IGNORED, ROOT
from .test_wheels import lend_packages


def checkout(folder: Path) -> Path:
    """A copy of the tree, in which the install may write."""
    shutil.copytree(ROOT, folder / "tree", ignore=IGNORED)
    return folder / "tree"


def install(tree: Path, folder: Path, *programs: Path) -> tuple[Environment, str]:
    """Install a checkout as pip does, with this environment's setuptools; return pip's log too."""
    found = importlib.util.find_spec("setuptools")
    if found is None or found.origin is None:
        pytest.skip("setuptools builds the package")
    environment = Environment.create(folder / "venv", programs)
    # Python 3.11's own is too old, and comes before what is lent. Nothing but setuptools is lent: the package ziglang
    # would be a compiler.
    environment.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")
    lent = folder / "lent"
    lent.mkdir()
    site = Path(found.origin).parents[1]
    for name in (site / "setuptools", site / "_distutils_hack", *site.glob("setuptools-*.dist-info")):
        (lent / name.name).symlink_to(name)
    environment.lend([lent])
    log = folder / "log"
    environment.install("--no-index", "--no-deps", "--no-build-isolation", "--log", str(log), "-e", str(tree))
    return environment, log.read_text()


def kernels_in_cache(environment: Environment) -> list[Path]:
    cache = environment.folder / "scratch/.cache/localattn/plugins"
    return sorted(cache.rglob(CPU_KERNELS.file_name))


def test_without_a_compiler_it_installs_and_says_what_is_missing(tmp_path: Path) -> None:
    environment, said = install(checkout(tmp_path), tmp_path)
    assert "no compiled CPU kernels: There is no C++ compiler" in said
    assert kernels_in_cache(environment) == []
    asked = "from importlib.util import find_spec; print(find_spec('localattn').origin)"
    assert environment.run("python", "-c", asked).strip() == str(tmp_path / "tree/__init__.py")


@pytest.mark.slow
def test_with_a_compiler_it_builds_kernels_that_the_demo_uses(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs GCC or Clang")
    programs = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep) if Path(folder, "as").exists()]
    tree = checkout(tmp_path)
    environment, said = install(tree, tmp_path, Path(compiler).parent, *programs)
    assert "no compiled CPU kernels" not in said
    (library,) = kernels_in_cache(environment)
    assert library.parent.name == host_arch()
    lend_packages(environment)
    checked = environment.document("plugin", "check", "--backend", "onnxruntime")
    demo = environment.document("demo", "--rows", 2, "--max-tokens", 8)
    assert checked["path"] == demo["plugin"] == str(library)
    timed = environment.document(
        *("bench", "localattn-demo/pybytes.onnx", "--plugin", "none,auto", "--threads", 1),
        *("--iterations", 5, "--rounds", 3, "--duration", 0),
    )
    assert [row["plugin"] for row in timed["rows"]] == [None, CPU_KERNELS.file_name]


@pytest.mark.slow
def test_a_compiler_that_fails_does_not_fail_the_install(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    real = shutil.which("g++")
    if real is None:
        pytest.skip("needs GCC")
    (programs / "g++").symlink_to(real)  # without assembler and linker
    environment, said = install(checkout(tmp_path), tmp_path, programs)
    assert "no compiled CPU kernels: g++ could not compile" in said
    assert kernels_in_cache(environment) == []
