"""Every output of every command, as the command line declares them: nothing that is there gets lost."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shutil
import socket
import stat
import struct
import subprocess
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from typer.models import ArgumentInfo, OptionInfo

from localattn.cli import command_line
from localattn.commands.parts.paths import InputPath, OutputPath, declared_paths
from localattn.core.errors import UsageError
from localattn.core.storage import file_kinds, outputs
from localattn.core.storage.file_kinds import Kind, contents_of
from localattn.core.storage.outputs import Output, check_outputs, writing
from localattn.exporter.jobs.convert import to_standard_ops

from ..conftest import TINY, Finished, save_upstream

Command = Callable[..., Finished]
posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes and links of POSIX")


# --- what the command line declares -----------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """A parameter of a command.

    Args:
        name: of the function's parameter.
        flag: as it is typed; None for an argument.
        required: whether the command refuses to run without.
        is_path: whether it is a path, or a list of them.
        declared: what it is declared as, if it is a path.
    """

    name: str
    flag: str | None
    required: bool
    is_path: bool
    declared: InputPath | OutputPath | None


def all_commands() -> dict[str, Callable[..., Any]]:
    """Every command by its words, as the function in `commands/`."""
    app = command_line()
    found = {(info.name or info.callback.__name__): info.callback for info in app.registered_commands}  # type: ignore[union-attr]
    for group in app.registered_groups:
        inner = group.typer_instance
        assert inner is not None
        for info in inner.registered_commands:
            assert info.callback is not None
            found[f"{inner.info.name} {info.name or info.callback.__name__}"] = info.callback
    return {words: inspect.unwrap(callback) for words, callback in found.items()}  # type: ignore[arg-type]


def parameters(command: Callable[..., Any]) -> list[Parameter]:
    hints, declared, found = typing.get_type_hints(command, include_extras=True), declared_paths(command), []
    for name, parameter in inspect.signature(command).parameters.items():
        extras = [extra for part in (hints[name], *typing.get_args(hints[name])) for extra in metadata(part)]
        for info in (extra for extra in extras if isinstance(extra, ArgumentInfo | OptionInfo)):
            flags = [flag for flag in (info.default, *(info.param_decls or ())) if isinstance(flag, str)]
            flag = None if isinstance(info, ArgumentInfo) else (flags or [f"--{name.replace('_', '-')}"])[0]
            required = parameter.default is inspect.Parameter.empty
            found.append(Parameter(name, flag, required, "Path" in str(hints[name]), declared.get(name)))
    return found


def metadata(hint: Any) -> tuple[Any, ...]:
    return tuple(getattr(hint, "__metadata__", ()))


COMMANDS = all_commands()
OUTPUTS = [
    pytest.param(words, parameter, id=f"{words} {parameter.flag}")
    for words, command in COMMANDS.items()
    for parameter in parameters(command)
    if isinstance(parameter.declared, OutputPath)
]


@pytest.mark.parametrize("words", COMMANDS)
def test_every_path_is_declared(words: str) -> None:
    for parameter in parameters(COMMANDS[words]):
        if parameter.is_path:
            assert parameter.declared is not None, f"{words} {parameter.name} is neither an input nor an output"
        else:
            assert parameter.declared is None
    outputs = [each for each in parameters(COMMANDS[words]) if isinstance(each.declared, OutputPath)]
    if outputs:
        assert "force" in inspect.signature(COMMANDS[words]).parameters


def test_the_outputs_are_found() -> None:
    assert {each.id for each in OUTPUTS} >= {"export --output", "run --save-outputs", "bundle create --output"}
    assert len(OUTPUTS) >= 14


# --- files of every kind ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A file of each kind that may lie in a user's folder, by its usual name."""
    folder = tmp_path_factory.mktemp("samples")
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", TINY, "checkpoint.pt")
    torch.save({"x": torch.ones(2)}, folder / "old.bin", _use_new_zipfile_serialization=False)
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    onnx.save(
        onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []), producer_name="somebody"), folder / "m.onnx"
    )
    np.savez(folder / "x.npz", x=np.ones(3))
    (folder / "m.onnx.json").write_text('{"format": "localattn-sidecar", "class": "x"}')
    (folder / "report.json").write_text('{"passed": true, "comparisons": []}')
    (folder / "package.json").write_text('{"name": "mine"}')
    (folder / "x.engine").write_bytes(bytes(range(256)) * 4)
    (folder / "times.cache").write_bytes(b"ptrt" + struct.pack("<3IQ", 0, 239, 0, 40) + bytes(40))
    (folder / "x.so").write_bytes(b"\x7fELF" + bytes(60))
    (folder / "page.html").write_text("<!DOCTYPE html>\n<html></html>")
    (folder / "notes.md").write_text("# Ünïcode\n")
    subprocess.run(["tar", "cf", "x.tar", "notes.md"], cwd=folder, check=True)
    shutil.make_archive(str(folder / "x"), "zip", folder, "notes.md")
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {checkpoint.name: checkpoint.read_bytes()}


# The samples that an output may replace with --force, by the kind's name; it may be a folder where there is none.
OWN = {
    "an ONNX file": ("m.onnx", ".onnx"),
    "an engine": ("x.engine", ".engine"),
    "a library": ("x.so", ".so"),
    "an .npz file": ("x.npz", ".npz"),
    "a JSON report": ("report.json", ".json"),
    "a Markdown report": ("notes.md", ".md"),
    "an HTML report": ("page.html", ".html"),
    "a bundle": ("x.tar", ".tar"),
    "a timing cache": ("times.cache", ".cache"),
}
KINDS = [kind for kind in vars(file_kinds).values() if isinstance(kind, Kind) and kind.name in OWN]


def test_contents_are_told_apart(samples: dict[str, bytes], tmp_path: Path) -> None:
    shown = {}
    for name, content in samples.items():
        (tmp_path / name).write_bytes(content)
        shown[name] = contents_of(tmp_path / name)
    assert shown == {
        "checkpoint.pt": file_kinds.CHECKPOINT,
        "checkpoint.json": file_kinds.CONFIG,
        "old.bin": file_kinds.CHECKPOINT,
        "x.safetensors": file_kinds.SAFETENSORS,
        "m.onnx": file_kinds.MODEL,
        "x.npz": file_kinds.ARRAYS,
        "m.onnx.json": file_kinds.SIDECAR_OR_MANIFEST,
        "report.json": file_kinds.REPORT,
        "package.json": file_kinds.DOCUMENT,
        "x.engine": file_kinds.UNKNOWN,
        "times.cache": file_kinds.TIMES,
        "x.so": file_kinds.PROGRAM,
        "page.html": file_kinds.PAGE,
        "notes.md": file_kinds.TEXT,
        "x.tar": file_kinds.ARCHIVE,
        "x.zip": file_kinds.ZIP,
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_force_replaces_the_same_kind_and_no_other(kind: Kind, samples: dict[str, bytes], tmp_path: Path) -> None:
    own, suffix = OWN[kind.name]
    path = tmp_path / f"out{suffix}"
    for name, content in samples.items():
        path.write_bytes(content)
        if content == samples[own]:
            check_outputs([Output(path, kind)], overwrite=True)
            continue
        with pytest.raises(UsageError, match="is not replaced"):
            check_outputs([Output(path, kind)], overwrite=True)
        assert path.read_bytes() == content, name


def test_a_sidecar_is_replaced_by_a_sidecar_only(samples: dict[str, bytes], tmp_path: Path) -> None:
    model = Output(tmp_path / "m.onnx", file_kinds.ONNX)
    sidecar = tmp_path / "m.onnx.json"
    sidecar.write_bytes(samples["m.onnx.json"])
    check_outputs([model], overwrite=True)
    with pytest.raises(UsageError, match=r"m\.onnx\.json already exists"):
        check_outputs([model])
    for other in ("package.json", "report.json", "checkpoint.json"):
        sidecar.write_bytes(samples[other])
        with pytest.raises(UsageError, match=r"m\.onnx\.json is not replaced"):
            check_outputs([model], overwrite=True)


# --- every output of every command ------------------------------------------------------------------------------------


Ask = Callable[..., None]


def state(folder: Path) -> dict[str, object]:
    """Everything in a folder: names, types, link targets, bytes."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            found[str(path)] = str(path.readlink())
        else:
            found[str(path)] = path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
    return found


@pytest.fixture
def refused(samples: dict[str, bytes], tmp_path: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Run a command with an output that it must refuse, and look that nothing changed."""
    monkeypatch.chdir(tmp_path)
    for name, content in samples.items():
        (tmp_path / name).write_bytes(content)

    def ask(words: str, output: Parameter, value: Path | str, *messages: str, **inputs: Path) -> None:
        for forced in ([], ["--force"]):
            arguments: list[object] = []
            for parameter in parameters(COMMANDS[words]):
                given = inputs.get(parameter.name, Path("checkpoint.pt") if parameter.required else None)
                if parameter.name == output.name:
                    arguments += [output.flag, value]
                elif given is not None and parameter.is_path:
                    given = Path("free.tar") if isinstance(parameter.declared, OutputPath) else given
                    arguments += [given] if parameter.flag is None else [parameter.flag, given]
            before = state(tmp_path)
            finished = localattn(*words.split(), *arguments, *forced)
            assert finished.code == 2, (words, arguments, forced, finished)
            assert finished.out == "" and finished.err.startswith("Error: "), finished
            assert not messages or any(message in finished.err for message in messages), finished.err
            assert state(tmp_path) == before, (words, arguments, forced)

    return ask


def usual(parameter: Parameter) -> list[tuple[Kind, str, str]]:
    """For each kind that an output may be: that kind, a sample of it, and a suffix of its names."""
    assert isinstance(parameter.declared, OutputPath)
    return [(kind, *OWN.get(kind.name, ("x.engine", ".folder"))) for kind in parameter.declared.kinds]


@posix
@pytest.mark.parametrize(("words", "output"), OUTPUTS)
def test_an_input_is_never_written_over(
    words: str, output: Parameter, refused: Ask, samples: dict[str, bytes], tmp_path: Path
) -> None:
    inputs = [each for each in parameters(COMMANDS[words]) if isinstance(each.declared, InputPath)]
    for _, own, suffix in usual(output):
        given = tmp_path / f"given{suffix}"
        given.write_bytes(samples[own])
        (tmp_path / "folder").mkdir(exist_ok=True)
        through = tmp_path / "folder" / ".." / given.name
        symbolic, hard = tmp_path / f"symbolic{suffix}", tmp_path / f"hard{suffix}"
        for link in (symbolic, hard):
            link.unlink(missing_ok=True)
        symbolic.symlink_to(given)
        hard.hardlink_to(given)
        for parameter in inputs:
            for value in (given, through, hard):
                refused(words, output, value, "The command reads it", "It is a file", **{parameter.name: given})
            refused(words, output, given, "The command reads it", "It is a file", **{parameter.name: symbolic})
            refused(words, output, symbolic, "symbolic link", **{parameter.name: given})


@posix
@pytest.mark.parametrize(("words", "output"), OUTPUTS)
def test_what_is_there_stays(
    words: str, output: Parameter, refused: Ask, samples: dict[str, bytes], tmp_path: Path
) -> None:
    for kind, own, suffix in usual(output):
        target = tmp_path / f"out{suffix}"
        for content in {content for content in samples.values() if content != samples[own]}:
            target.write_bytes(content)
            refused(words, output, target)
        target.unlink()
        if not kind.folder:
            target.mkdir()
            refused(words, output, target, "It is a folder")
            target.rmdir()
        os.mkfifo(target)
        refused(words, output, target, "a device, a pipe or a socket")
        target.unlink()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(target.name)  # a path of a socket must be short
            refused(words, output, target, "a device, a pipe or a socket")
        target.unlink()
        for leads_to in ("nowhere", own, "/dev/null"):
            target.symlink_to(leads_to)
            refused(words, output, target, "symbolic link")
            target.unlink()


@pytest.mark.parametrize(("words", "output"), OUTPUTS)
def test_the_same_kind_is_replaced_only_with_force(
    words: str, output: Parameter, samples: dict[str, bytes], tmp_path: Path, localattn: Command
) -> None:
    for kind, own, suffix in usual(output):
        if kind.extended or kind.name not in OWN:
            continue
        target = tmp_path / f"out{suffix}"
        target.write_bytes(samples[own])
        needed = [each for each in parameters(COMMANDS[words]) if each.required and each.name != output.name]
        given = [word for each in needed for word in ([each.flag] if each.flag else []) + ["no-such-file.onnx"]]
        finished = localattn(*words.split(), *given, output.flag, target)
        assert finished.code == 2 and "exists" in finished.err and "--force" in finished.err, finished
        assert target.read_bytes() == samples[own] and list(tmp_path.iterdir()) == [target]
        target.unlink()


@pytest.mark.parametrize(("words", "output"), OUTPUTS)
def test_names_of_another_kind_are_refused(words: str, output: Parameter, refused: Ask) -> None:
    assert isinstance(output.declared, OutputPath)
    own = {suffix for kind in output.declared.kinds for suffix in kind.suffixes}
    known = {*(suffix for kind in KINDS for suffix in kind.suffixes), ".pt", ".safetensors", ".yaml", ".py", ".data"}
    folders = {""} if output.declared.kinds == (file_kinds.ONNX,) else set()  # a name without a suffix is a folder
    for suffix in (known | {".onnx.json", ".engine.json"}) - own - folders:
        refused(words, output, f"new{suffix}", "is not called")
    for name in ("", ".", "..", "/"):
        refused(words, output, name, "Cannot write")
    suffix = next(iter(own), "")
    refused(words, output, "n" * 256 + suffix, "too long")
    for folder in ("n" * 300, "m.onnx"):  # one that is not there is made
        refused(words, output, f"{folder}/new{suffix}", "Cannot write")


def test_names_are_refused_where_the_sidecars_would_not_fit(tiny: Path, localattn: Command) -> None:
    name = "n" * 247 + ".onnx"  # 252 bytes; with .json 257
    finished = localattn("export", tiny, "-o", tiny.with_name(name))
    assert finished.code == 2 and "too long" in finished.err
    assert {path.name for path in tiny.parent.iterdir()} == {"model.pt", "model.json"}


def test_two_outputs_of_one_name_are_refused(tmp_path: Path, localattn: Command) -> None:
    saved = ("--save-inputs", tmp_path / "x.npz", "--save-outputs", tmp_path / "." / "x.npz")
    finished = localattn("parity", "no.onnx", "--against", "no.pt", *saved)
    assert finished.code == 2 and "is named twice" in finished.err


# --- files that are read without being named --------------------------------------------------------------------------


def test_files_beside_an_input_stay(tmp_path: Path) -> None:
    step = tmp_path / "step.onnx"
    sidecar = {"format": "localattn-sidecar", "step": {"prefill": "step.prefill.onnx"}, "external_data": "weights.onnx"}
    step.with_name("step.onnx.json").write_text(json.dumps(sidecar))
    for name in ("step.onnx", "step.prefill.onnx", "weights.onnx"):
        (tmp_path / name).write_bytes(b"\x08\x08\x12\x00")
    for name in ("step.prefill.onnx", "weights.onnx"):
        with pytest.raises(UsageError, match="The command reads it"):
            check_outputs([Output(tmp_path / name, file_kinds.ONNX)], inputs=[step], overwrite=True)


def test_a_configuration_that_would_be_found_stays(tiny: Path, localattn: Command) -> None:
    config = tiny.with_suffix(".json")
    config.write_text('{"passed": true}')  # a report as far as its content goes
    refused = localattn("inspect", tiny, "-o", config, "--force")
    assert refused.code == 2 and "The command reads it" in refused.err
    named = tiny.with_name("m.onnx.json")
    named.write_text('{"format": "localattn-sidecar"}')
    refused = localattn("export", tiny, "--config", named, "-o", tiny.with_name("m.onnx"), "--force")
    assert refused.code == 2 and f"{named} is not replaced" in refused.err


def test_a_bundle_that_holds_the_model_is_not_replaced(tmp_path: Path, samples: dict[str, bytes]) -> None:
    bundle = tmp_path / "bundle"
    (bundle / "model").mkdir(parents=True)
    model = bundle / "model" / "m.onnx"
    model.write_bytes(samples["m.onnx"])
    with pytest.raises(UsageError, match="which the command reads"):
        check_outputs([Output(bundle, file_kinds.BUNDLE)], inputs=[model], overwrite=True)


def test_a_trained_checkpoint_survives(tiny: Path, localattn: Command) -> None:
    before = tiny.read_bytes()
    assert localattn("export", tiny, "-o", tiny.with_name("m.onnx")).code == 0
    for options in ([], ["--force"]):
        finished = localattn("run", tiny.with_name("m.onnx"), "--save-outputs", tiny, *options)
        assert finished.code == 2 and "is not called an .npz file" in finished.err
    outputs = tiny.with_name("out.npz")
    run = ("run", tiny.with_name("m.onnx"), "--save-outputs", outputs)
    assert localattn(*run).code == 0
    first = outputs.read_bytes()
    assert localattn(*run, "--seed", 1).code == 2 and outputs.read_bytes() == first
    assert localattn(*run, "--seed", 1, "--force").code == 0 and outputs.read_bytes() != first
    assert tiny.read_bytes() == before


# --- disks that refuse ------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A disk of 1 MiB, with so many bytes free."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small disk cannot be mounted here")

    def prepare(free: int) -> Path:
        with (place / "filler").open("wb", buffering=0) as stream:
            stream.write(bytes((1 << 20) - free))
        return place

    yield prepare
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and a file exported from it."""
    from localattn.exporter.export import ExportRequest, export

    checkpoint = save_upstream(tmp_path_factory.mktemp("made"), "local_attention.LocalTransformer", TINY)
    export(ExportRequest(checkpoint, checkpoint.with_suffix(".onnx"), seeds=(0,)))
    return checkpoint


def test_an_output_is_judged_three_times(
    made: Path, tmp_path: Path, localattn: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the door, once its name is reserved, and before the move; by the command or by the function, not by both."""
    judged: list[str] = []
    check = outputs._check_place

    def count(path: Path, kind: Kind, read: Any) -> None:
        judged.append(path.name)
        check(path, kind, read)

    monkeypatch.setattr(outputs, "_check_place", count)
    ended = localattn("convert", made.with_suffix(".onnx"), "--standard-ops", "-o", tmp_path / "c.onnx", "-q")
    assert ended.code == 0 and sorted(judged) == ["c.onnx"] * 3 + ["c.onnx.json"] * 3
    judged.clear()
    to_standard_ops(made.with_suffix(".onnx"), tmp_path / "f.onnx", checks="quick")
    assert sorted(judged) == ["f.onnx"] * 3 + ["f.onnx.json"] * 3


def test_a_reserved_output_is_judged_again_with_other_inputs_or_permission(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(
        onnx.parser.parse_model(
            '<ir_version: 9, opset_import: ["" : 20]> g (float[1] x) => (float[1] y) { y = Neg(x) }'
        ),
        path,
    )
    output = Output(path, file_kinds.ONNX)
    with writing(output, overwrite=True):
        with pytest.raises(UsageError, match="exists"), writing(output):
            pass
        with pytest.raises(UsageError, match="reads it"), writing(output, inputs=[path], overwrite=True):
            pass
        with writing(output, overwrite=True):
            pass


WRITES: dict[str, tuple[int, list[str]]] = {
    "export": (8192, ["export", "{pt}", "-o", "{}/m.onnx"]),
    "export, only sidecar do not fit": (0, ["export", "{pt}", "-o", "{}/m.onnx"]),
    "steps": (8192, ["export", "{pt}", "--mode", "step", "-o", "{}/m.onnx"]),
    "page": (4096, ["inspect", "{onnx}", "-o", "{}/page.html"]),
    "npz": (4096, ["run", "{onnx}", "--save-outputs", "{}/out.npz"]),
    "bundle": (8192, ["bundle", "{onnx}", "-o", "{}/bundle"]),
    "tar": (8192, ["bundle", "{onnx}", "-o", "{}/bundle.tar"]),
}


@pytest.mark.parametrize("case", WRITES)
def test_a_full_disk(case: str, made: Path, small_disk: Callable[[int], Path], localattn: Command) -> None:
    free, words = WRITES[case]
    place = small_disk(free)
    finished = localattn(*(word.format(place, pt=made, onnx=made.with_suffix(".onnx")) for word in words))
    assert finished.code == 2, finished
    assert "Cannot write" in finished.err and "No space left" in finished.err and "Free some space" in finished.err
    assert [path.name for path in place.iterdir()] == ["filler"]


@pytest.mark.parametrize("case", WRITES)
def test_a_folder_that_cannot_be_written(
    case: str, made: Path, small_disk: Callable[[int], Path], localattn: Command
) -> None:
    place = small_disk(1 << 19)
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    finished = localattn(*(word.format(place, pt=made, onnx=made.with_suffix(".onnx")) for word in WRITES[case][1]))
    assert finished.code == 2 and "Read-only file system" in finished.err, finished
    assert len(finished.err.splitlines()) == 3
    assert [path.name for path in place.iterdir()] == ["filler"]


def test_an_error_of_the_disk_in_the_middle_of_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Free some space"), writing(Output(tmp_path / "x.npz", file_kinds.NPZ)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError), writing(Output(tmp_path / "x.npz", file_kinds.NPZ)):
        (tmp_path / "an input that is gone").read_bytes()  # no fault of the output
    assert list(tmp_path.iterdir()) == []
