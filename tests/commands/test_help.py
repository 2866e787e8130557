"""The help of every command: panels, types, examples; and the errors that name what was probably meant."""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
import subprocess
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from localattn.cli import command_line
from localattn.commands.parts.terminal.examples import EXAMPLES
from localattn.commands.parts.terminal.help import FORMER
from localattn.commands.parts.terminal.panels import OPTIONS

from ..conftest import Finished

Command = Callable[..., Finished]
ROOT: Any = typer.Context(typer.main.get_command(command_line()), info_name="localattn")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its words."""
    root: Any = typer.main.get_command(command_line())
    for name, node in root.commands.items():
        for inner, command in getattr(node, "commands", {"": node}).items():
            yield f"{name} {inner}".strip(), command


def panels(text: str) -> dict[str, str]:
    """The titles of the panels of a help, with what stands in them."""
    parts = re.split(r"^╭─ (.+?) ─+╮$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_export_has_panels_and_three_examples(localattn: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    found = panels(localattn("export", "--help").out)
    wanted = ["Input", "Output", "Shapes", "Precision", "Your own module", "Step files", "Checks"]
    assert [title for title in found if title in wanted] == wanted and "Options" not in found
    for title, option in (("Your own module", "--load-inputs"), ("Step files", "--chunk"), ("Checks", "--atol")):
        assert option in found[title]
    end = found["Messages"].partition("Examples:")[2]
    assert [line.strip() for line in end.splitlines() if line.strip()] == list(EXAMPLES["export"])
    assert len(EXAMPLES["export"]) == 3


@pytest.mark.parametrize("words", [words for words, _ in commands()])
def test_every_option_has_a_panel_and_flags_have_no_type(
    words: str, localattn: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    shown = localattn(*words.split(), "--help").out
    found = panels(shown)
    assert "Options" not in found and "--help" in found["Messages"]
    options = "".join(text for title, text in found.items() if title != "Arguments")
    assert not re.search(r"<bool>|range>|list\[|2147483647|9223372036854775807", options)
    assert EXAMPLES[words][0] in shown


@pytest.mark.parametrize("words", [words for words, _ in commands()])
def test_choices_and_whole_names_are_shown_at_80_columns(
    words: str, localattn: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = localattn(*words.split(), "--help").out
    told = " ".join(re.sub("[│\n]", " ", shown).split())
    command = dict(commands())[words]
    hints = typing.get_type_hints(inspect.unwrap(command.callback))
    for option in (x for x in command.params if x.param_type_name == "option" and not x.hidden):
        assert all(name in shown for name in (*option.opts, *option.secondary_opts)), option.opts
        kinds = [hints.get(option.name), *typing.get_args(hints.get(option.name))]
        choices = [choice for kind in kinds if typing.get_origin(kind) is typing.Literal for choice in kind.__args__]
        assert all(re.search(rf"\b{re.escape(choice)}\b", told) for choice in choices), (option.name, choices)
        for former in FORMER.get(words, {}):
            assert former not in shown


@pytest.mark.parametrize(("words", "former"), [(words, name) for words, names in FORMER.items() for name in names])
def test_names_of_older_releases_still_work(words: str, former: str) -> None:
    node: Any = dict(commands())[words]
    today = FORMER[words][former]
    values = [] if words == "demo" else ["m.onnx"]
    for line in ([former, "5"], [f"{former}=5"]):
        context = node.make_context(words, [*values, *line], parent=ROOT)
        assert context.params[today.removeprefix("--").replace("-", "_")] == 5


def test_the_tables_name_nothing_that_is_gone() -> None:
    known = dict(commands())
    assert set(EXAMPLES) == set(known)
    every = [parameter for command in known.values() for parameter in command.params]
    assert {x.name for x in every if x.param_type_name == "option" and x.rich_help_panel not in OPTIONS} == set()
    assert {name for names in OPTIONS.values() for name in names} <= {x.name for x in every} | {"help"}


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_examples_are_understood(line: str) -> None:
    """By the command line; and bash and zsh hand it the same words."""
    words = shlex.split(line)
    node: Any = typer.main.get_command(command_line())
    rest = words[1:]
    while hasattr(node, "commands"):
        rest = rest if rest[0] in node.commands else ["create", *rest]
        node = node.commands[rest.pop(0)]
    node.make_context(node.name, rest)
    for shell in filter(shutil.which, ("bash", "zsh")):
        answer = subprocess.run([shell, "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True)
        assert answer.stdout.splitlines() == words


def test_bundle_shows_the_options_of_create(localattn: Command) -> None:
    shown = localattn("bundle", "--help").out
    assert all(option in shown for option in ("--samples", "--triton", "--load-inputs", "--force", "verify"))
    assert localattn("bundle", "create", "--help").out in shown


def test_flags_that_typer_adds_have_no_type_either(localattn: Command) -> None:
    shown = localattn("--help").out
    assert "--install-completion" in shown and "<bool>" not in shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("export m.pt --dtype float16", "Did you mean fp16?"),
        ("export m.pt --dtype bfloat16", "Did you mean bf16?"),
        ("export m.pt --mode steps", "Did you mean step?"),
        ("export m.pt --format jsn", "Did you mean json?"),
        ("parity m.onnx --against m.pt --format markdown", "'html'."),
        ("build m.onnx --backend tensorrt_rtx", "Did you mean tensorrt-rtx?"),
        ("plugin build --backend onnx", "Did you mean onnxruntime?"),
        ("export m.pt --dtype int8", "For weights in int8: --weight-dtype int8"),
        ("export m.pt --weights int8", "--weight-dtype int8"),
        ("run m.onnx --plugin ./x.so", "Name a library with --plugin-library ./x.so"),
        ("bench m.onnx --plugin none,x.so", "Name a library with --plugin-library x.so"),
        ("run m.onnx --plugin none --plugin-library x.so", "--plugin none and --plugin-library exclude each other"),
    ],
)
def test_near_misses_are_named(line: str, said: str, localattn: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ended = localattn(*line.split())
    assert ended.code == 2 and said in ended.err and "Value error" not in ended.err, ended.err


def test_the_demo_names_no_option_that_it_lacks(localattn: Command) -> None:
    ended = localattn("demo", "--dtype", "int8")
    assert ended.code == 2 and "'bf16'" in ended.err and "--weight-dtype" not in ended.err


def test_weights_are_a_file_whatever_it_is_called(tmp_path: Path, localattn: Command) -> None:
    ended = localattn("export", "--factory", "f.py:make", "--weights", tmp_path / "int8", "--input", "x:float32:[1,4]")
    assert ended.code == 2 and "--weight-dtype" not in ended.err
