"""Every option that is a number, found by reading the command line: no number ends in a fault, a hang or a flood."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import pytest
import typer
from typer.models import OptionInfo

from localattn import cli
from localattn.core.limits import LARGEST_SIZE, check_threads, is_size, most_threads

from ..conftest import TINY, Finished, save_upstream

Command = Callable[..., Finished]
NUMBERS = ("0", "-1", str(2**31), str(2**63), str(2**64), "1" + "0" * 30, "9" * 5000, "nan", "inf", "-inf", "1e400")
# Lists of numbers, which the command line takes as text.
LISTS = {"bench": ("--seq-len", "--threads", "--percentile"), "parity": ("--seq-len",)}
SHAPES = ("--min-shapes", "--opt-shapes", "--max-shapes")


class Option(NamedTuple):
    """A numeric option: the words of its command, its flag, its Python type, and what Typer knows of it."""

    path: tuple[str, ...]
    flag: str
    kind: type
    info: OptionInfo


def numbers_of(app: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[Option]:
    """Every option that is a number."""
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from numbers_of(group.typer_instance, (*path, str(group.typer_instance.info.name)))
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        for parameter, hint in get_type_hints(command.callback, include_extras=True).items():
            # Python 3.10 makes Optional[Annotated[…]] of what is None by default.
            annotated = next((part for part in (hint, *get_args(hint)) if hasattr(part, "__metadata__")), None)
            if annotated is None:
                continue
            annotation, *marks = get_args(annotated)
            kinds = {annotation, *get_args(annotation)} & {int, float}
            info = next((mark for mark in marks if isinstance(mark, OptionInfo)), None)
            if kinds and info is not None and not info.count:
                flag = max(info.param_decls or (f"--{parameter.replace('_', '-')}",), key=len)
                yield Option((*path, name), flag, kinds.pop(), info)


def needed(path: tuple[str, ...], model: Path, folder: Path) -> list[object]:
    """The arguments that a command cannot do without; outputs go into `folder`."""
    verb = path[-1]
    if path == ("demo",):
        return ["-o", Path(__file__) / "demo"]  # a place that cannot be
    if path == ("plugin", "build"):
        return [model, "-o", folder / "library.so"]
    against = ["--against", model.with_suffix(".pt")] if verb in ("parity", "bisect") else []
    output = ["-o", folder / "bundle"] if path == ("bundle", "create") else []
    prompt = ["--prompt-ids", "1,2"] if verb == "generate" else []
    return [model.with_suffix(".pt") if verb == "export" else model, *against, *output, *prompt]


def assert_refused(finished: Finished, *codes: int) -> None:
    assert finished.code in (codes or (2,)), finished
    assert finished.err.startswith(("Error: ", "Usage: ")), finished.err
    assert "Traceback" not in finished.err and len(finished.err) < 2000


OPTIONS = list(numbers_of(cli.command_line()))
NAMES = [(option.path, option.flag) for option in OPTIONS]
IDS = [f"{' '.join(path)} {flag}" for path, flag in NAMES]


def test_the_command_line_shows_its_numbers() -> None:
    """The enumeration finds what is known to be there."""
    assert {(("parity",), "--seeds"), (("build",), "--workspace"), (("bundle", "create"), "--atol")} <= set(NAMES)
    assert len(OPTIONS) > 40


@pytest.mark.parametrize(("path", "flag"), NAMES, ids=IDS)
def test_no_number_helps_a_missing_file(tmp_path: Path, localattn: Command, path: tuple[str, ...], flag: str) -> None:
    for number in NUMBERS:
        finished = localattn(*path, *needed(path, tmp_path / "none.onnx", tmp_path), flag, number)
        # TensorRT is looked for before the model, and a demo needs no model but a place.
        assert_refused(finished, 2, *([3] if path in (("build",), ("demo",)) else []))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", OPTIONS, ids=IDS)
def test_numbers_are_bounded_by_the_command_line_itself(option: Option) -> None:
    """Whatever reads the number next never sees one that its own type cannot hold."""
    if option.kind is float:
        assert option.info.min is not None and option.info.callback is not None
    elif option.flag != "--threads":  # bounded by the processors of the machine, see below
        assert option.info.max is not None and option.info.max < 2**63


def test_nan_and_infinity_are_no_numbers(tmp_path: Path, localattn: Command) -> None:
    refused = 0
    for path, flag in ((option.path, option.flag) for option in OPTIONS if option.kind is float):
        for number in ("nan", "inf", "1e400"):
            finished = localattn(*path, *needed(path, tmp_path / "none.onnx", tmp_path), flag, number)
            assert_refused(finished)
            assert flag in finished.err
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(("verb", "flag"), [(verb, flag) for verb, flags in LISTS.items() for flag in flags])
def test_lists_of_numbers(tmp_path: Path, localattn: Command, verb: str, flag: str) -> None:
    for number in NUMBERS:
        if (flag, number) == ("--threads", str(2**31)):
            continue
        finished = localattn(verb, *needed((verb,), tmp_path / "none.onnx", tmp_path), flag, f"1,{number}")
        assert_refused(finished)


@pytest.mark.parametrize("flag", SHAPES)
def test_shapes_of_profiles(tmp_path: Path, localattn: Command, flag: str) -> None:
    given = dict.fromkeys(SHAPES, "x:1x8")
    for number in NUMBERS:
        options = [word for name, text in (given | {flag: f"x:1x{number}"}).items() for word in (name, text)]
        finished = localattn("build", tmp_path / "none.onnx", *options)
        assert_refused(finished)
        assert flag in finished.err


@pytest.mark.parametrize(
    "text",
    [*(f"x:float32:[{n}]" for n in NUMBERS), *(f"t:int64:[4]:{n}" for n in NUMBERS if n not in ("0", str(2**31)))],
)
def test_sizes_of_inputs(tmp_path: Path, localattn: Command, text: str) -> None:
    (tmp_path / "factory.py").write_text("import torch\nmake = torch.nn.ReLU\n")
    finished = localattn(
        "export", "--factory", f"{tmp_path}/factory.py:make", "--input", text, "-o", tmp_path / "m.onnx"
    )
    assert finished.code in (2, 3), finished
    assert not (tmp_path / "m.onnx").exists()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its step file, beside their checkpoint."""
    from localattn.exporter.export import ExportRequest, export

    from ..support.steps import export_steps

    folder = tmp_path_factory.mktemp("exported")
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", TINY, "m.pt")
    export(ExportRequest(checkpoint=checkpoint, output=folder / "m.onnx"))
    export_steps(ExportRequest(checkpoint=checkpoint, output=folder / "m_step.onnx"), "step", 1)
    return folder / "m.onnx"


# What may be large and still be meant: it is done at once, or refused by what the model is.
REAL = [
    ("run", "--threads"),
    ("run", "--seed"),
    ("run", "--iterations"),
    ("parity", "--seed"),
    ("parity", "--seeds"),
    ("parity", "--atol"),
    ("bisect", "--seed"),
    ("bench", "--threads"),
    ("bench", "--batch"),
    ("bench", "--rounds"),
    ("generate", "--max-tokens"),
    ("generate", "--seed"),
    ("generate", "--top-k"),
    ("generate", "--temperature"),
    ("generate", "--threads"),
    ("export", "--seq-len"),
    ("export", "--batch"),
    ("export", "--heads"),
    ("export", "--dim-head"),
    ("export", "--opset"),
    ("export", "--chunk"),
    ("build", "--workspace"),
]


@pytest.mark.parametrize(("verb", "flag"), REAL)
@pytest.mark.parametrize("number", ["-1", "0", str(2**31 - 1), str(2**31), str(2**63), str(2**64), "nan", "inf"])
def test_numbers_beside_a_real_file(
    exported: Path, tmp_path: Path, localattn: Command, verb: str, flag: str, number: str
) -> None:
    model = exported.with_name("m_step.onnx") if verb == "generate" else exported
    extra: list[object] = {
        "--chunk": ["--mode", "step"],
    }.get(flag, [])
    if verb == "export":
        extra = [*extra, "-o", tmp_path / "new.onnx"]
    if verb == "build":
        extra = [*extra, "-o", tmp_path / "new.engine"]
    if verb == "bench":
        extra = ["--duration", 0, "--iterations", 1, "--warmup", 0, "--rounds", 1, *extra]
    fast = {("export", "--seq-len"), ("export", "--batch")}
    finished = localattn(verb, *needed((verb,), model, tmp_path), *extra, flag, number)
    assert finished.code in ((0, 1, 2) if flag == "--atol" else (0, 2, 3)), finished
    assert finished.code != 0 or (verb, flag) not in fast
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("threads", [0, -1, most_threads() + 1, 2**31, 2**64])
def test_threads_are_bounded_by_the_machine(exported: Path, localattn: Command, threads: int) -> None:
    for verb, model in (("run", exported), ("generate", exported.with_name("m_step.onnx"))):
        assert_refused(localattn(verb, *needed((verb,), model, exported.parent), "--threads", threads))
    assert_refused(localattn("bundle", "verify", exported.parent, "--threads", threads))
    assert_refused(localattn("bench", exported, "--threads", f"1,{threads}"))


def test_most_threads_is_taken() -> None:
    check_threads(most_threads())
    check_threads(None)
    assert most_threads() >= 256


@pytest.mark.parametrize("text", ["0", "-1", "", " 1", "1.0", "²", str(LARGEST_SIZE + 1), "9" * 5000])
def test_what_is_no_size(text: str) -> None:
    assert not is_size(text)
    assert is_size("1") and is_size(str(LARGEST_SIZE))
