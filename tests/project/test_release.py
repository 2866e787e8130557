"""Releases: what is in wheel and source distribution, where the version stands, and that an installed wheel works."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import pytest

from localattn.release.installed import Environment

from .test_architecture import ALLOWED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PROJECT["project"]["version"]
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")


def package_files(root: Path) -> set[str]:
    """What belongs into a wheel: the files of the package's folders, and the modules at the root."""
    files = {
        path.relative_to(root).as_posix() for name in ALLOWED for path in (root / name).rglob("*") if path.is_file()
    }
    return {name for name in files if "__pycache__" not in name} | {"__init__.py", "__main__.py", "cli.py", "py.typed"}


def test_every_package_is_listed() -> None:
    found = {PurePosixPath(name).parent for name in package_files(ROOT) if name.endswith("/__init__.py")}
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == {"localattn"} | {f"localattn.{'.'.join(folder.parts)}" for folder in found}


def test_every_other_file_is_package_data() -> None:
    """A file that no pattern takes would be missing from the wheel; a pattern that takes none is a leftover."""
    data = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = ["/".join([*package.split(".")[1:], pattern]) for package, globs in data.items() for pattern in globs]
    others = [name for name in package_files(ROOT) if not name.endswith(".py")]
    assert [name for name in others if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in others)] == []


def test_the_version_stands_in_one_place() -> None:
    """In pyproject.toml; the changelog has a section for it."""
    sources = [path for name in package_files(ROOT) if (path := ROOT / name).suffix == ".py"]
    assert not [path for path in sources if f'"{VERSION}"' in path.read_text(encoding="utf-8")]
    assert re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[1] == VERSION  # type: ignore[index]


class Built:
    """Both distributions, the wheel made from the source distribution."""

    def __init__(self, folder: Path) -> None:
        """Copy the tree, so that building leaves nothing behind, and build."""
        self.tree = folder / "tree"
        shutil.copytree(ROOT, self.tree, ignore=IGNORED)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(self.tree)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        self.log = ended.stdout + ended.stderr
        (self.wheel,) = (folder / "dist").glob("*.whl")
        (self.source,) = (folder / "dist").glob("*.tar.gz")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built with the setuptools that is installed: nothing is downloaded."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("build is not installed")
    if importlib.util.find_spec("setuptools") is None or _release("setuptools") < 77:
        pytest.skip("setuptools 77 or later is not installed")
    return Built(tmp_path_factory.mktemp("release"))


def _release(package: str) -> int:
    return int(importlib.metadata.version(package).split(".")[0])


def test_the_wheel_is_the_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
    information = {name for name in names if name.startswith(f"localattn-{VERSION}.dist-info/")}
    assert {name.removeprefix("localattn/") for name in names - information} == package_files(built.tree)
    assert any(name.endswith("LICENSE") for name in information)


def test_the_source_distribution_builds_the_wheel_and_has_no_tests(built: Built) -> None:
    with tarfile.open(built.source) as archive:
        names = {PurePosixPath(name).relative_to(f"localattn-{VERSION}").as_posix() for name in archive.getnames()}
    assert names >= package_files(built.tree) | {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}
    assert not [name for name in names if name.split("/")[0] in ("tests", "benchmarks", "examples", "docs")]


def test_building_warns_of_nothing_that_is_left_out(built: Built) -> None:
    assert "would be ignored" not in built.log


@pytest.mark.slow
def test_an_installed_wheel_runs_the_demo(built: Built, tmp_path: Path) -> None:
    """In a new environment with this one's other packages on its path, but not this source tree."""
    environment = Environment.create(tmp_path / "venv")
    environment.install("--no-deps", "--no-index", str(built.wheel))
    others = {importlib.util.find_spec(name).origin for name in ("numpy", "torch")}  # type: ignore[union-attr]
    environment.lend(sorted({Path(str(origin)).parents[1] for origin in others}))

    path, version = environment.run("python", "-c", "import localattn as l; print(l.__file__, l.__version__)").split()
    assert Path(path).is_relative_to(tmp_path) and version == VERSION

    result = environment.document("demo", "--rows", 2, "--max-tokens", 8)
    assert all(check["status"] == "passed" for check in result["checks"]) and len(result["checks"]) == 6
    assert list(tmp_path.rglob("localattn-demo/pybytes.onnx"))
