"""The command that messages give for an extra is true wherever the package came from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from localattn.core.errors import MissingDependency
from localattn.core.extras import as_installed, command_of

TREE, HERE = Path("/src/localattn"), Path("/home/somebody")
WHEEL = "file:///downloads/localattn-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("origin", "here", "command"),
    [
        (
            {"url": "file:///src/localattn", "dir_info": {"editable": True}},
            HERE,
            'pip install -e "/src/localattn[cpu]"',
        ),
        ({"url": "file:///src/localattn", "dir_info": {"editable": True}}, TREE, 'pip install -e ".[cpu]"'),
        ({"url": "file:///src/a%20b", "dir_info": {}}, HERE, 'pip install "/src/a b[cpu]"'),
        ({"url": WHEEL, "archive_info": {}}, HERE, f'pip install "localattn[cpu] @ {WHEEL}"'),
        (None, HERE, 'pip install -e "/src/localattn[cpu]"'),  # a tree that is not installed
        ({"url": 3}, HERE, "pip install 'localattn[cpu]'"),
        ([], HERE, "pip install 'localattn[cpu]'"),
        ({"url": "file:///{0}", "dir_info": {}}, HERE, "pip install 'localattn[cpu]'"),
    ],
)
def test_each_origin_has_its_command(origin: object, here: Path, command: str) -> None:
    text = "" if origin is None else json.dumps(origin)
    assert command_of(text, TREE, here).format("cpu") == command


def test_errors_give_it() -> None:
    error = MissingDependency("x", why="see pip install 'localattn[cpu]'", fix="Or: pip install 'localattn[rtx]'.")
    assert error.fix == as_installed("Or: pip install 'localattn[rtx]'.")
    assert "cpu]" in error.why
    assert as_installed("pip install onnxruntime") == "pip install onnxruntime"


def test_a_wheel_from_an_index_names_the_package(tmp_path: Path) -> None:
    """Metadata without direct_url.json, as pip leaves it of a package of an index."""
    info = tmp_path / "localattn-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: localattn\nVersion: 9\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from localattn.core.extras import as_installed\n"
        "print(as_installed(\"pip install 'localattn[cpu]'\"))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "pip install 'localattn[cpu]'\n"
