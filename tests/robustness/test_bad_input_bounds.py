"""Input without an end, without a bottom or without measure is refused at once: pipes, devices, nests, floods."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from localattn.core.errors import MissingDependency, UsageError
from localattn.core.machine.memory import check_fits, memory_limit
from localattn.core.storage.nesting import DEEPEST, check_nesting
from localattn.core.storage.reading import check_plain, open_plain, read_json, read_plain
from localattn.exporter.checkpoint.config import LARGEST_FILE, load_config
from localattn.runtime.inputs.arrays import LARGEST_INFLATED, load_arrays

from ..conftest import TINY, Finished, save_upstream

Command = Callable[..., Finished]
PATIENCE = 300  # seconds after which a command counts as hanging


class Hangs(BaseException):
    """Nothing on the way takes it for an error of its own."""


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Interrupt a test that waits for a pipe, or reads a device without an end."""

    def give_up(*_: object) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with its config, its model and its step file."""
    from localattn.exporter.export import ExportRequest, export

    from ..support.steps import export_steps

    folder = tmp_path_factory.mktemp("exported")
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", TINY, "m.pt")
    export(ExportRequest(checkpoint=checkpoint, output=folder / "m.onnx"))
    export_steps(ExportRequest(checkpoint=checkpoint, output=folder / "m_step.onnx"), "step")
    (folder / "factory.py").write_text("import torch\nmake = torch.nn.ReLU\n")
    return folder


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_folder(path: Path) -> None:
    path.mkdir()


def make_link_to_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("the-pipe"))
    path.symlink_to("the-pipe")


KINDS = {"fifo": make_fifo, "endless": make_endless, "folder": make_folder, "link": make_link_to_fifo}
# Every place where a command reads a file: BAD is that file, the rest lies in the folder of `exported`.
READERS = [
    "export BAD.pt",
    "export BAD.safetensors",
    "export m.pt --config BAD.json -o NEW.onnx",
    "export m.pt --config BAD.toml -o NEW.onnx",
    "export --factory factory.py:make --weights BAD.pt --input input:float32:[4] -o NEW.onnx",
    "export --factory factory.py:make --weights BAD.pt --allow-pickle --input input:float32:[4] -o NEW.onnx",
    "export BAD.pt --allow-pickle --input input:float32:[4] -o NEW.onnx",
    "export --factory factory.py:make --load-inputs BAD.npz -o NEW.onnx",
    "export --factory BAD.py:make --input input:float32:[4] -o NEW.onnx",
    "parity BAD.onnx --against m.pt",
    "parity BAD.engine --against m.pt",
    "parity m.onnx --against BAD.pt",
    "parity m.onnx --against BAD.onnx",
    "parity m.onnx --against m.pt --config BAD.yaml",
    "parity m.onnx --against m.pt --load-inputs BAD.npz",
    "parity m.onnx --against m.onnx --load-inputs BAD.npz",
    "bisect BAD.onnx --against m.pt",
    "bisect m.onnx --against BAD.pt",
    "bisect m.onnx --against m.pt --config BAD.json",
    "bisect m.onnx --against m.pt --load-inputs BAD.npz",
    "run BAD.onnx",
    "run BAD.engine",
    "run m.onnx --load-inputs BAD.npz",
    "run m.onnx --plugin-library BAD.so",
    "generate BAD.onnx --prompt-ids 1",
    "generate m_step.onnx --prompt-file BAD.txt",
    "bench BAD.onnx",
    "bench m.onnx --against BAD.onnx",
    "bench m.onnx --load-inputs BAD.npz --duration 0 --iterations 1 --rounds 1",
    "inspect BAD.onnx",
    "inspect BAD.pt",
    "inspect BAD.engine",
    "inspect m.pt --config BAD.yml",
    "build BAD.onnx --backend tensorrt-rtx -o NEW.engine",
    "build m.onnx --backend tensorrt-rtx --timing-cache BAD.cache -o NEW.engine",
    "build m.onnx --backend tensorrt-rtx --plugin-library BAD.so -o NEW.engine",
    "bundle create BAD.onnx -o NEW",
    "bundle create m.onnx --load-inputs BAD.npz -o NEW",
    "bundle create m.onnx --plugin-library BAD.so -o NEW",
    "bundle create m.onnx --engine BAD.engine -o NEW",
    "bundle verify BAD.tar",
    "plugin build BAD.onnx -o NEW.so",
    "plugin check BAD.so",
    "plugin check BAD.so --backend onnxruntime",
    "plugin rewrite BAD.onnx -o NEW.onnx",
]


def assert_one_error(finished: Finished, *codes: int) -> None:
    assert finished.code in codes, finished
    assert "Traceback" not in finished.err and 0 < len(finished.err) < 3000, finished.err


@pytest.mark.parametrize(
    "kind", ["fifo", "endless", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("folder", "link"))]
)
@pytest.mark.parametrize("line", READERS)
def test_only_plain_files_are_read(
    exported: Path, tmp_path: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch, line: str, kind: str
) -> None:
    monkeypatch.chdir(exported)
    word = next(word.partition(":")[0] for word in line.split() if word.startswith("BAD"))
    KINDS[kind](tmp_path / word)
    words = [word.replace("BAD", f"{tmp_path}/BAD").replace("NEW", f"{tmp_path}/NEW") for word in line.split()]
    finished = localattn(*words)
    # An engine cannot be opened here, and is not looked at before.
    assert_one_error(finished, *((2, 3) if "engine" in line or "build" in line else (2,)))
    assert not list(tmp_path.glob("NEW*"))


@pytest.mark.parametrize("kind", ["fifo", "endless"])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("m.onnx.json", "run m.onnx"),
        ("m.onnx.json", "inspect m.onnx"),
        ("m.onnx.json", "parity m.onnx --against m.pt"),
        ("m.onnx.json", "parity m.onnx --against m.onnx"),
        ("m.onnx.json", "bisect m.onnx --against m.pt"),
        ("m.onnx.json", "bench m.onnx --duration 0 --iterations 1 --rounds 1"),
        ("m.onnx.json", "bundle create m.onnx -o NEW"),
        ("m_step.onnx.json", "generate m_step.onnx --prompt-ids 1"),
        ("DATA", "run m_step.onnx"),
        ("DATA", "generate m_step.onnx --prompt-ids 1"),
        ("DATA", "inspect m_step.onnx"),
        ("DATA", "bundle create m_step.onnx -o NEW"),
        ("m.json", "export m.pt -o NEW.onnx --dry-run"),
        ("x.engine.json", "run x.engine"),
        ("x.engine.json", "inspect x.engine"),
        ("x.so.json", "plugin check x.so"),
        ("x.so.json", "bundle create m.onnx --plugin-library x.so -o NEW"),
    ],
)
def test_what_lies_beside_a_file_is_plain_too(
    exported: Path, tmp_path: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch, name: str, line: str, kind: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(exported, folder)
    monkeypatch.chdir(folder)
    for other in ("x.engine", "x.so"):
        (folder / other).write_bytes(b"\x7fELF" + bytes(100))
    place = next(folder.glob("*.data")) if name == "DATA" else folder / name
    place.unlink(missing_ok=True)
    KINDS[kind](place)
    finished = localattn(*line.split())
    if name == "DATA" and "inspect" in line:
        assert finished.code == 0  # the data is not read
    else:
        assert_one_error(finished, 1, 2, 3)
    assert not (folder / "NEW").exists() and not (folder / "NEW.onnx").exists()


def test_a_bundle_whose_manifest_is_a_pipe(tmp_path: Path, localattn: Command) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    assert_one_error(localattn("bundle", "verify", tmp_path), 2)


def test_plain_files_are_read_to_their_bound(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    assert read_plain(path, 10) == b"0123456789"
    assert read_plain(path, 4) == b"01234"
    with open_plain(path) as stream:
        assert stream.read() == b"0123456789"
    check_plain(path)
    check_plain(tmp_path / "none")
    link = tmp_path / "to-x"
    link.symlink_to(path)
    assert read_plain(link, 10) == b"0123456789"
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "none")
    for kind, make in KINDS.items():
        make(tmp_path / kind)
        for read in (open_plain, check_plain):
            with pytest.raises(UsageError, match="Cannot read"):
                read(tmp_path / kind)


PARTS = 50_000
NESTS = {
    "keys.toml": "a." * PARTS + "a = 1",
    "quoted.toml": '"\\"".' * 30_000 + "a = 1",
    "literal.toml": "'a' . " * 30_000 + "a = 1",
    "table.toml": "[" + "a." * PARTS + "a]",
    "tables.toml": "a = " + "{a = " * PARTS,
    "lists.toml": "a = " + "[" * PARTS,
    "lists.json": "[" * PARTS + "]" * PARTS,
    "tables.json": '{"a":' * PARTS + "1" + "}" * PARTS,
    "lists.yaml": "[" * PARTS,
    "tables.yaml": "{a: " * PARTS,
    "blocks.yaml": "- " * PARTS + "a",
    "merges.yaml": "a0: &a0 {k: 1}\n"
    + "".join(f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
}

_LOADS = """
import resource, sys
from pathlib import Path
import yaml, localattn.exporter.checkpoint.config as config
from localattn.core.errors import UsageError
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for path in sys.argv[1:]:
    try:
        config.load_config(Path(path))
    except UsageError as error:
        print(Path(path).name, any(word in error.why for word in ("nests", "parts", "<<", "recursion", "few lines")))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell the address space")
def test_nested_configs_cost_no_memory(tmp_path: Path) -> None:
    """64 MiB are enough for all of them, where one took 9.9 GB."""
    for name, text in NESTS.items():
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in NESTS]
    finished = subprocess.run(
        [sys.executable, "-c", _LOADS, *files], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert finished.returncode == 0, finished.stderr
    said = dict(line.split() for line in finished.stdout.splitlines())
    assert set(said) == set(NESTS)
    assert set(said.values()) == {"True"}


@pytest.mark.parametrize("text", ["[" * 40 + "]" * 40, "{", "\ufeff{}", "9" * 5000])
def test_why_a_document_cannot_be_read_ends_in_one_full_stop(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_json(tmp_path / "config.json", 1 << 20, "Copy it again.")
    assert caught.value.why.endswith(".") and not caught.value.why.endswith("..")


def test_nesting_is_counted() -> None:
    check_nesting("[" * DEEPEST + "]" * DEEPEST + "[" * DEEPEST)
    check_nesting(".".join("a" * DEEPEST) + " = 1")
    check_nesting("x = [" + ", ".join(["1.5"] * 1000) + "]")
    for text in ("[" * (DEEPEST + 1), "{" * (DEEPEST + 1), ".".join("a" * (DEEPEST + 1)), '"a".' * DEEPEST + "a"):
        with pytest.raises(ValueError, match=str(DEEPEST)):
            check_nesting(text)


@pytest.mark.parametrize(
    "text", ["a: !!int ''", "a: !!bool x", "a: !!timestamp x", "a: " + ":".join(["59"] * 5000) + ".5", "a: !!float x"]
)
def test_whatever_yaml_stumbles_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match="not valid YAML"):
        load_config(tmp_path / "c.yaml")


def test_a_large_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(" " * LARGEST_FILE + "{}")
    with pytest.raises(UsageError, match="larger than 256 KiB"):
        load_config(tmp_path / "c.json")


def deflated(path: Path, **sizes: int) -> Path:
    """An .npz of zeros, so many float32 each, written without having them all in memory."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, count in sizes.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array_header_1_0(
                    stream, {"descr": "<f4", "fortran_order": False, "shape": (count,)}
                )
                for start in range(0, 4 * count, 1 << 22):
                    stream.write(bytes(min(1 << 22, 4 * count - start)))
    return path


def test_an_archive_that_inflates_is_refused(tmp_path: Path, exported: Path, localattn: Command) -> None:
    bomb = deflated(tmp_path / "bomb.npz", tokens=300 << 20 >> 2)
    many = deflated(tmp_path / "many.npz", **{f"x{i}": 30 << 20 >> 2 for i in range(10)})
    for path in (bomb, many):
        assert path.stat().st_size < 1 << 20 and LARGEST_INFLATED < 300 << 20
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(UsageError, match="would become"):
            load_arrays(path)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert_one_error(localattn("run", exported / "m.onnx", "--load-inputs", bomb), 2)
    small = deflated(tmp_path / "small.npz", x=4 << 20 >> 2)
    assert load_arrays(small)["x"].size == 1 << 20


def test_memory_is_known_and_compared() -> None:
    limit = memory_limit()
    assert limit is not None and limit > 1 << 28
    check_fits("Something", limit, "")
    with pytest.raises(MissingDependency, match="does not fit into memory"):
        check_fits("Something", limit + 1, "Take less.")


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("x:float32:[1000000,1000000]", 3, "does not fit into memory"),
        ("x:float32:[2147483647,2147483647,2147483647]", 3, "does not fit into memory"),
        ("x:bool:[600000000]", 2, "cannot be drawn"),
        ("x:float32:[2147483648]", 2, "from 1 to"),
    ],
)
def test_inputs_of_a_module_that_no_memory_holds(
    exported: Path, tmp_path: Path, localattn: Command, text: str, code: int, words: str
) -> None:
    finished = localattn(
        "export", "--factory", f"{exported}/factory.py:make", "--input", text, "-o", tmp_path / "m.onnx"
    )
    assert_one_error(finished, code)
    assert words in finished.err
    assert not list(tmp_path.iterdir())


def test_inputs_of_a_checkpoint_that_no_memory_holds(tmp_path: Path, localattn: Command) -> None:
    kwargs = {"dim": 16, "window_size": 4, "heads": 2, "dim_head": 8, "causal": True}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", kwargs)
    for options in (["--seq-len", 2**31 - 1], ["--seq-len", 8, "--batch", 2**31 - 1]):
        finished = localattn("export", checkpoint, *options, "-o", tmp_path / "m.onnx")
        assert_one_error(finished, 3)
        assert "Input x float32" in finished.err


SIGNATURES = {
    "no rank": [("tokens", TensorProto.INT64, [])],
    "rank 1": [("tokens", TensorProto.INT64, [64])],
    "open rank 1": [("tokens", TensorProto.INT64, ["n"])],
    "rank 3": [("tokens", TensorProto.INT64, [1, 64, 2])],
    "another type": [("tokens", TensorProto.INT32, [1, 64])],
    "another name": [("x", TensorProto.INT64, [1, 64])],
    "another class": [(name, TensorProto.FLOAT, [1, 2, 64, 8]) for name in "qkv"],
    "one more": [("tokens", TensorProto.INT64, [1, 64]), ("y", TensorProto.INT64, [1])],
    "a flat mask": [("tokens", TensorProto.INT64, [1, 64]), ("mask", TensorProto.BOOL, [64])],
    "no batch": [("tokens", TensorProto.INT64, [0, 64])],
    "too long": [("tokens", TensorProto.INT64, [1, 6400])],
}


@pytest.mark.parametrize("verb", ["parity", "bisect"])
@pytest.mark.parametrize("name", SIGNATURES)
def test_a_file_with_other_inputs_than_its_checkpoint(
    exported: Path, tmp_path: Path, localattn: Command, verb: str, name: str
) -> None:
    inputs = [helper.make_tensor_value_info(*entry) for entry in SIGNATURES[name]]
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, SIGNATURES[name][0][2])
    node = helper.make_node("Cast", [inputs[0].name], ["logits"], to=TensorProto.FLOAT)
    graph = helper.make_graph([node], "g", inputs, [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), tmp_path / "m.onnx")
    finished = localattn(verb, tmp_path / "m.onnx", "--against", exported / "m.pt")
    assert_one_error(finished, 2)
    assert f"The model takes {SIGNATURES[name][0][0]} " in finished.err
    assert "LocalTransformer takes tokens int64" in finished.err


def test_a_file_without_inputs(exported: Path, tmp_path: Path, localattn: Command) -> None:
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [1.0])
    node = helper.make_node("Constant", [], ["logits"], value=value)
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1])
    model = helper.make_model(
        helper.make_graph([node], "g", [], [output]), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )
    onnx.save(model, tmp_path / "m.onnx")
    for verb in ("parity", "bisect"):
        finished = localattn(verb, tmp_path / "m.onnx", "--against", exported / "m.pt")
        assert_one_error(finished, 2)
        assert "takes nothing" in finished.err


def test_an_endless_prompt(exported: Path) -> None:
    """Standard input has no end: no more of it is read than a prompt may have."""
    command = [sys.executable, "-m", "localattn.cli", "generate", str(exported / "m_step.onnx")]
    with Path("/dev/zero").open("rb") as endless:
        finished = subprocess.run(command, stdin=endless, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert finished.returncode == 2
    assert "is not a prompt" in finished.stderr
