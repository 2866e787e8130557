"""onnxruntime writes no telemetry: nothing appears in an empty home and an empty temporary folder."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from localattn.runtime.bundle.create import BundleRequest, create_bundle

from ....support.models.engine_models import small_model

# Whether this release writes anything at all is asked of it first.
_PLAIN = "import onnxruntime"
_LIBRARY = "import sys, localattn; localattn.load(sys.argv[1], provider='cpu')"
_LINE = [sys.executable, "-m", "localattn.cli"]


def left_by(command: list[str], folder: Path) -> list[str]:
    """The files that a command leaves in its home and its temporary folder."""
    places = [folder / name for name in ("home", "temporary")]
    for place in places:
        place.mkdir()
    home, temporary = map(str, places)
    unset = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"HOME": home, "TMPDIR": temporary}
    subprocess.run(command, env=environment, check=True, capture_output=True, cwd=folder)
    return sorted(path.relative_to(folder).as_posix() for place in places for path in place.rglob("*"))


@pytest.fixture(scope="module", autouse=True)
def writes_telemetry(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not left_by([sys.executable, "-c", _PLAIN], tmp_path_factory.mktemp("plain")):
        pytest.skip("this onnxruntime writes no telemetry")


_MORE = ("parity MODEL --against MODEL --seeds 1", "bench MODEL QUICK", "doctor")


@pytest.mark.parametrize("words", ["run MODEL", *(pytest.param(words, marks=pytest.mark.slow) for words in _MORE)])
def test_commands(words: str, tmp_path: Path) -> None:
    quick = "--duration 0 --iterations 1 --rounds 1 --warmup 0"
    line = words.replace("MODEL", shlex.quote(str(small_model()))).replace("QUICK", quick)
    assert left_by([*_LINE, *shlex.split(line)], tmp_path) == []


def test_openvino(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install 'localattn[openvino]'")
    line = [*_LINE, "run", str(small_model()), "--runtime", "openvino"]
    assert left_by(line, tmp_path) == []


def test_a_program_that_loads_a_model(tmp_path: Path) -> None:
    assert left_by([sys.executable, "-c", _LIBRARY, str(small_model())], tmp_path) == []


def test_the_script_of_a_bundle(tmp_path: Path) -> None:
    create_bundle(BundleRequest(small_model(), tmp_path / "bundle", samples=1))
    assert left_by([sys.executable, str(tmp_path / "bundle" / "verify.py")], tmp_path) == []


def test_what_the_environment_says_holds(tmp_path: Path) -> None:
    code = "import os; from localattn.runtime.backends.registry import named; named('onnxruntime').require(); "
    code += "print(os.environ['ORT_DISABLE_TELEMETRY'])"
    shown = {**os.environ, "ORT_DISABLE_TELEMETRY": "0", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=shown, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "0"
