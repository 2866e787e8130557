"""Shell completion, through the protocol that shells speak, and in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CALL = [sys.executable, "-c", "import sys; sys.argv[0] = 'localattn'; from localattn.cli import main; main()"]


def completed(words: str, shell: str = "bash") -> list[str]:
    """What a shell would offer after these words; the last is the one being typed."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "_TYPER_COMPLETE_ARGS": words}
    environment = {**os.environ, **asked, "_LOCALATTN_COMPLETE": f"complete_{shell}"}
    return subprocess.run(CALL, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("localattn ex", {"export"}),
        ("localattn b", {"build", "bench", "bisect", "bundle"}),
        ("localattn export --dt", {"--dtype"}),
        ("localattn export --dtype ", {"fp32", "fp16"}),
        ("localattn build --backend tensorrt-", {"tensorrt-rtx"}),
        ("localattn plugin ", {"build", "path", "list", "check", "rewrite"}),
        ("localattn bundle verify --files", {"--files-only"}),
        ("localattn inspect mod", set()),  # the shell itself offers files then
    ],
)
def test_bash_is_told(words: str, offered: set[str]) -> None:
    assert set(completed(words)) == offered


def test_every_command_is_offered() -> None:
    import typer

    from localattn.cli import app

    assert set(completed("localattn ")) == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_completion_imports_nothing_heavy() -> None:
    heavy = ("torch", "onnxruntime", "onnx", "numpy", "triton", "jinja2")
    code = (
        "import os, sys; sys.argv = ['localattn']\n"
        "from localattn.cli import main\n"
        "try: main()\n"
        f"finally: print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    environment = {**os.environ, "COMP_WORDS": "localattn ", "COMP_CWORD": "1", "_LOCALATTN_COMPLETE": "complete_bash"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "export" in ended.stdout and ended.stderr.strip() == "[]"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_real_bash_completes(tmp_path: Path) -> None:
    """The script that `--show-completion` prints, loaded: commands come from localattn, file names from bash."""
    program = tmp_path / "localattn"
    program.write_text(f"#!{sys.executable}\nfrom localattn.cli import main\n\nmain()\n")
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    source = {**environment, "_LOCALATTN_COMPLETE": "source_bash"}
    script = subprocess.run(CALL, env=source, capture_output=True, text=True, check=True).stdout
    asked = (
        f"{script}\ncomplete -p localattn\n"
        'COMP_WORDS=(localattn pari) COMP_CWORD=1; _localattn_completion localattn; echo "${COMPREPLY[@]}"'
    )
    ended = subprocess.run(["bash", "-c", asked], env=environment, capture_output=True, text=True, check=True)
    specification, offered = ended.stdout.splitlines()
    assert "-o default" in specification and "-F _localattn_completion" in specification
    assert offered == "parity"
