"""Shell completion, through the protocol that shells speak, and in real shells where they are installed."""

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
        ("localattn export --dtype ", {"fp32", "fp16", "bf16"}),
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

    from localattn.cli import command_line

    assert set(completed("localattn ")) == set(typer.main.get_command(command_line()).commands)  # type: ignore[attr-defined]


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


def with_program(folder: Path) -> dict[str, str]:
    """An environment with `localattn` on its path, and `folder` as home."""
    program = folder / "localattn"
    program.write_text(f"#!{sys.executable}\nfrom localattn.cli import main\n\nmain()\n")
    program.chmod(0o755)
    return {**os.environ, "HOME": str(folder), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def of_shell(option: str, shell: str, environment: dict[str, str]) -> str:
    """What `--show-completion` or `--install-completion` says in this shell; the shell is told, not detected."""
    shown = {**environment, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    return subprocess.run([*CALL, option, shell], env=shown, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o default -F _localattn_completion localattn"),
        ("zsh", "compdef _localattn_completion localattn"),
        ("fish", "complete --command localattn"),
    ],
)
def test_each_shell_gets_a_script(shell: str, registers: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path)}
    script = of_shell("--show-completion", shell, environment)
    assert registers in script and f"_LOCALATTN_COMPLETE=complete_{shell}" in script
    shown = of_shell("--install-completion", shell, environment)
    assert f"{shell} completion installed" in shown
    written = [path.read_text() for path in tmp_path.rglob("*localattn*") if path.is_file()]
    assert [text.strip() for text in written] == [script.strip()]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_a_real_fish_completes(tmp_path: Path) -> None:
    environment = {**with_program(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / ".config")}
    of_shell("--install-completion", "fish", environment)
    for typed, offered in (("localattn exp", ["export"]), ("localattn export --dtype fp", ["fp16", "fp32"])):
        asked = ["fish", "-c", f"complete -C '{typed}'"]
        ended = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
        assert sorted(line.split("\t")[0] for line in ended.stdout.splitlines()) == offered


# Types each word with a TAB after it, and reads what the line then is, until it is as wanted.
_TYPE_IN_ZSH = r"""
zmodload zsh/zpty
zpty -b shell "TERM=dumb zsh -i"
for pair in "$@"; do
  wanted="${pair#*|}" seen="" waited=0
  zpty -w -n shell "${pair%%|*}"$'\t'
  while [[ "$seen" != *"$wanted"* ]] && (( waited++ < 300 )); do
    if zpty -r -t shell part; then seen+="$part"; else sleep 0.1; fi
  done
  [[ "$seen" == *"$wanted"* ]] && print -r -- "$wanted" || print -r -- "instead: ${(V)seen}"
  zpty -w -n shell $'\x15'
done
zpty -d shell
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_a_real_zsh_completes_from_the_first_tab_on(tmp_path: Path) -> None:
    environment = {**with_program(tmp_path), "ZDOTDIR": str(tmp_path)}
    of_shell("--install-completion", "zsh", environment)
    wanted = ["localattn export ", "localattn export --dtype ", "localattn parity "]
    typed = ["localattn exp", "localattn export --dty", "localattn pari"]
    pairs = [f"{short}|{whole}" for short, whole in zip(typed, wanted, strict=True)]
    asked = ["zsh", "-f", "-c", _TYPE_IN_ZSH, "zsh", *pairs]
    ended = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.splitlines() == wanted


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_a_real_bash_completes(tmp_path: Path) -> None:
    """The script that `--show-completion` prints, loaded: commands come from localattn, file names from bash."""
    environment = with_program(tmp_path)
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
