"""The releases, where their wheels come from, and running a program of this folder with one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from localattn.plugins.library.sidecar import host_arch

from ....support.native.plugin_build import program
from .bind import Parts

TREE = Path(__file__).parents[4]

# The bindings of the extra `dev`; every default test uses them.
PACKAGE = "tensorrt-cu13-bindings"

# TensorRT-RTX's libraries that are built like TensorRT 10; the installed ones are built like TensorRT 11.
OLD_LIBRARIES = "tensorrt-rtx-cu13-libs==1.4.0.76"


@dataclass(frozen=True)
class Release:
    """One release of the bindings.

    Args:
        version: of the wheel.
        package: the wheel's; "" for what is installed.
        quick: release whose `tensorrt.plugin`, which is plain Python, takes the place of its own; "" for its own.
    """

    version: str
    package: str = ""
    quick: str = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Major and minor."""
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)

    @property
    def libraries(self) -> str:
        """TensorRT-RTX that stands below, for reports."""
        return "1.4.0" if self.numbers < (11,) else "1.7.1"

    def __str__(self) -> str:
        return f"{self.version}-quick-{self.quick}" if self.quick else self.version


def installed() -> Release:
    """The release of the environment, or the test is skipped."""
    for module in ("tensorrt_rtx_libs", "polygraphy"):
        pytest.importorskip(module, reason=f"{module} is not installed (the extra rtx)")
    try:
        return Release(version(PACKAGE))
    except PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed (the extra dev)")


_OTHERS = (
    ("10.3.0", "12"), ("10.7.0", "12"), ("10.9.0.34", "12"), ("10.13.3.9", "12"), ("10.14.1.48.post1", "12"),
    ("10.15.1.29", "12"), ("10.16.1.11", "12"), ("11.0.0.114", "13"), ("11.1.0.106", "13"), ("11.2.1.2", "13"),
    ("11.3.0.99", "13"),
)  # fmt: skip
OTHERS = tuple(Release(number, f"tensorrt-cu{cuda}-bindings") for number, cuda in _OTHERS)


def run(name: str, release: Release, store: Path | None = None, **asked: Any) -> dict[str, Any]:
    """What a program of this folder prints, in a process of its own.

    Args:
        name: of the program.
        release: whose bindings it imports.
        store: folder where downloaded wheels are kept; for what is installed None will do.
        asked: the rest of its question, as JSON.
    """
    with tempfile.TemporaryDirectory(prefix="localattn-tensorrt-") as folder:
        parts = parts_of(release, store, Path(folder))
        return child(f"tests.gpu.simulators.tensorrt_releases.{name}", Path(folder), parts=asdict(parts), **asked)


def child(module: str, scratch: Path, **asked: Any) -> dict[str, Any]:
    """What a program of the tests prints, in a process of its own.

    Args:
        module: of the program.
        scratch: a folder for its caches.
        asked: its question, as JSON.
    """
    # The package as this process has it, installed or as a source tree.
    import localattn

    (scratch / "import").mkdir()
    (scratch / "import" / "localattn").symlink_to(Path(localattn.__file__).parent)
    finished = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", module],
        input=json.dumps(asked),
        env=os.environ | {"PYTHONPATH": str(scratch / "import"), "XDG_CACHE_HOME": str(scratch / "cache")},
        cwd=TREE,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


def parts_of(release: Release, store: Path | None, scratch: Path) -> Parts:
    major = release.numbers[0]
    library = f"libnvinfer_plugin.so.{major}"
    plugins = program(host_arch(), "no_plugins.cpp", "-shared", "-fPIC", f"-Wl,-soname={library}")
    if release.package:
        assert store is not None
        bindings = unpacked(f"{release.package}=={release.version}", store)
    else:
        bindings = _folder_of("tensorrt_bindings").parent
    if release.quick:
        assert store is not None
        bindings = _with_other_quick(bindings, release, store, scratch / "bindings")
    if major < 11:
        assert store is not None
        libraries = unpacked(OLD_LIBRARIES, store) / "tensorrt_rtx_libs"
    else:
        libraries = _folder_of("tensorrt_rtx_libs")
    (scratch / "bound").mkdir()
    return Parts(release.version, str(bindings), str(libraries), str(plugins), str(scratch / "bound"))


def _folder_of(module: str) -> Path:
    spec = find_spec(module)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def _with_other_quick(bindings: Path, release: Release, store: Path, folder: Path) -> Path:
    """A folder with the bindings, and `tensorrt.plugin` of another release."""
    (package,) = {other.package for other in OTHERS if other.version == release.quick}
    other = unpacked(f"{package}=={release.quick}", store) / "tensorrt_bindings" / "plugin"
    (folder / "tensorrt_bindings").mkdir(parents=True)
    for part in (bindings / "tensorrt_bindings").iterdir():
        if part.name not in ("plugin", "__pycache__"):
            (folder / "tensorrt_bindings" / part.name).symlink_to(part)
    (folder / "tensorrt_bindings" / "plugin").symlink_to(other)
    return folder


@cache
def unpacked(requirement: str, store: Path) -> Path:
    """A wheel for this Python, unpacked; fetched once, or the test is skipped."""
    folder = store / f"{requirement}-cp{sys.version_info.major}{sys.version_info.minor}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=store) as scratch:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
        fetched = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, "--dest", scratch, requirement],
            capture_output=True,
            text=True,
        )
        if fetched.returncode:
            why = [line for line in fetched.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            pytest.skip(f"{requirement} cannot be fetched: {why[-1]}")
        (wheel,) = Path(scratch).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(Path(scratch) / "wheel")
        try:
            (Path(scratch) / "wheel").rename(folder)
        except OSError:  # another process was faster
            assert folder.is_dir()
    return folder
