"""`parity`, `inspect` and `bisect` as JSON, Markdown and HTML: the same figures, safe names, readable on a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from localattn.core.documents.error_spread import ErrorSpread
from localattn.core.documents.sidecar import sidecar_path
from localattn.core.extras import as_installed
from localattn.core.storage.files import sha256
from localattn.core.storage.publishing import SEAL
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest
from localattn.reports.documents import document_html, document_markdown
from localattn.reports.figures import comparison_figure, cosine, figure

from ..conftest import TINY, Finished, save_upstream
from ..support.browser import assert_fits_a_phone, needs_browser, show

Run = Callable[..., Finished]
HOSTILE = '<script>document.title = "taken"</script>|`x`&amp;"\''
LENGTH = 70  # no multiple of the window


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An exported model and its checkpoint."""
    folder = tmp_path_factory.mktemp("good")
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", {**TINY, "max_seq_len": 128})
    export(ExportRequest(checkpoint, folder / "model.onnx", shapes=ShapeRequest(seq_len=LENGTH)))
    return folder / "model.onnx", checkpoint


@pytest.fixture(scope="module")
def faulty(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one matrix of the second layer's feed-forward changed."""
    document = onnx.load(pair[0])
    held = {tensor.name: tensor for tensor in document.graph.initializer}
    nodes = [n for n in document.graph.node if any(p.value == "layers.1.1.branch.4" for p in n.metadata_props)]
    names = {name for node in nodes for name in node.input if name in held and len(held[name].dims) == 2}
    assert names
    for name in names:
        held[name].CopyFrom(numpy_helper.from_array(1.5 * numpy_helper.to_array(held[name]), name))
    path = tmp_path_factory.mktemp("faulty") / "faulty.onnx"
    onnx.save(document, path)
    sidecar = json.loads(sidecar_path(pair[0]).read_text())
    write_sidecar(path, {**sidecar, "model_sha256": sha256(path)})
    return path


def write_sidecar(model: Path, sidecar: dict[str, Any]) -> None:
    """A sidecar as older releases wrote it, without the seal that would not fit changed entries."""
    sidecar_path(model).write_text(json.dumps({name: value for name, value in sidecar.items() if name != SEAL}))


class Cells(HTMLParser):
    """Tags, cells of tables by row, and everything that would be fetched or run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [a for a in attrs if a[0] in ("src", "href", "xlink:href", "action") or a[0].startswith("on")]
        if tag == "tr":
            self.rows.append([])
        self._inside = tag in ("td", "th")
        if self._inside:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.rows[-1][-1] += data


def markdown_cells(text: str) -> list[list[str]]:
    """Cells of the tables by row, without escapes."""
    rows = [line[2:-2] for line in text.splitlines() if line.startswith("| ") and not re.match(r"\| -+:? \|", line)]
    return [[plain(cell) for cell in re.split(r" \| ", row)] for row in rows]


def plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text).replace("&amp;", "&").strip()


def renderings(localattn: Run, *arguments: object, code: int = 0) -> tuple[dict[str, Any], str, str]:
    """The result as JSON, Markdown and HTML, each by the command line."""
    found = [localattn(*arguments, "--format", name) for name in ("json", "md", "html")]
    assert [finished.code for finished in found] == [code] * 3, found[0].err
    return json.loads(found[0].out), found[1].out, found[2].out


def same_tables(kind: str, document: dict[str, Any], text: str, page: str) -> list[list[str]]:
    """The cells that Markdown and HTML both show, made of nothing but the JSON."""
    assert document_markdown(kind, document).rstrip("\n") == text.rstrip("\n")
    assert document_html(kind, document).rstrip("\n") == page.rstrip("\n")
    rows = Cells(page).rows
    assert [[" ".join(cell.split()) for cell in row] for row in rows] == markdown_cells(text)
    return rows


def two_outputs(path: Path, names: tuple[str, str]) -> Path:
    """Write a file with weights of 8 bits, whose logits have figures that its other output lacks."""
    helper, generator = onnx.helper, np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(generator.integers(-99, 99, (16, 5)).astype(np.int8), "q"),
        numpy_helper.from_array(np.float32(0.02), "scale"),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["logits"]),
        helper.make_node("Neg", ["logits"], ["hidden"]),
    ]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 9, 16])
    outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 9, 5]) for name in names]
    graph = helper.make_graph(nodes, "two", [x], outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("names", [("logits", "hidden"), ("hidden", "logits")])
def test_outputs_with_different_figures_share_a_table(tmp_path: Path, names: tuple[str, str], localattn: Run) -> None:
    arguments = (two_outputs(tmp_path / "m.onnx", names), "--against", two_outputs(tmp_path / "n.onnx", names))
    shown = localattn("parity", *arguments, "--seeds", 1)
    assert shown.code == 0 and "divergence" in shown.out, shown.err
    assert localattn("parity", *arguments, "--seeds", 1, "-o", tmp_path / "page.md").code == 0
    page = (tmp_path / "page.md").read_text()
    (logits,) = (line for line in page.splitlines() if line.startswith("| logits |"))
    (hidden,) = (line for line in page.splitlines() if line.startswith("| hidden |"))
    assert "divergence" in page and "–" not in logits and hidden.count(" – |") == 2


@pytest.mark.parametrize("good", [True, False])
def test_parity_says_the_same_three_times(pair: tuple[Path, Path], faulty: Path, localattn: Run, good: bool) -> None:
    model, checkpoint = (pair[0] if good else faulty), pair[1]
    document, text, page = renderings(
        localattn, "parity", model, "--against", checkpoint, "--seeds", 2, code=0 if good else 1
    )
    rows = same_tables("parity", document, text, page)
    assert ("**Equal**" in text, "**NOT equal**" in text) == (good, not good)
    assert len(document["comparisons"]) == 2
    assert (document["compared_windows"] == []) == good
    if not good:
        assert {row[1] for row in rows if "window 4" in row[-1]} == {"the file", "the reference"}
        assert "They are the same." in text
    for row in document["comparisons"]:
        names = ("max_abs", "max_rel", "rms", "relative_rms", "cosine", "not_finite", "worst_index")
        verdict = "ok" if good else "FAILED"
        assert [row["output"], row["inputs"], verdict, *(comparison_figure(row, name) for name in names)] in rows
    (spread,) = (ErrorSpread.from_dict(saved) for saved in document["errors"].values())
    assert spread.total == 2 * LENGTH * TINY["num_tokens"]
    assert max(spread.largest) == max(row["max_abs"] for row in document["comparisons"])
    assert (sum(spread.beyond) == 0) == good
    for exponent, count in spread.decades():
        if count:
            assert [f"1e{exponent:+03d}", f"1e{exponent + 1:+03d}", f"{count:,}"] in [row[:3] for row in rows]
    worst = max(range(LENGTH), key=lambda i: (spread.beyond[i], spread.largest[i]))
    assert [str(worst), figure(spread.largest[worst]), str(spread.beyond[worst])] in rows
    for example in document["windows"][0]["examples"]:
        answer = [
            f"{first} to {end - 1}" if end - first > 1 else str(first)
            for first, end in ((example["first"], example["end"]), (example["deep_first"], example["deep_end"]))
        ]
        assert [str(example["query"]), answer[0], str(example["end"] - example["first"]), answer[1]] in rows
    for check in document["sidecar"]["checks"]:
        assert [check["name"], check["status"], check["detail"]] in [row[:3] for row in rows]
    assert ["SHA-256 of the file", sha256(model)] in rows
    assert page.count("<svg") == 4 and ('class="bad"' in page) is not good


def test_the_spread_is_that_of_the_saved_arrays(pair: tuple[Path, Path], tmp_path: Path, localattn: Run) -> None:
    saved = tmp_path / "outputs.npz"
    finished = localattn(
        "parity", pair[0], "--against", pair[1], "--seeds", 1, "--save-outputs", saved, "--format", "json"
    )
    (spread,) = (ErrorSpread.from_dict(x) for x in json.loads(finished.out)["errors"].values())
    with np.load(saved) as arrays:
        error = np.abs(arrays["logits"].astype(np.float64) - arrays["logits.reference"])
    assert spread.largest == tuple(error.max((0, 2)))


def test_parity_of_several_files(pair: tuple[Path, Path], faulty: Path, localattn: Run) -> None:
    document, text, page = renderings(localattn, "parity", pair[0], faulty, "--against", pair[1], "--seeds", 1, code=1)
    same_tables("parity", document, text, page)
    assert [file["passed"] for file in document["files"]] == [True, False]
    assert "## model.onnx: Errors of logits" in text and "## faulty.onnx: Errors of logits" in text
    assert page.count("<svg") == 8


def test_inspect_says_the_same_three_times(pair: tuple[Path, Path], localattn: Run) -> None:
    document, text, page = renderings(localattn, "inspect", pair[0])
    rows = same_tables("onnx", document, text, page)
    assert "**Not proven against your own model**" in text
    assert ["input", "tokens", "int64", f"[1, {LENGTH}]"] in rows
    assert [view["length"] for view in document["windows"]] == [LENGTH]
    assert len(document["windows"][0]["layers"]) == TINY["depth"]
    answer = {row[0]: row[1] for row in rows if len(row) == 2}
    for name, count in sorted(document["nodes"].items(), key=lambda item: (-item[1], item[0]))[:12]:
        assert answer[name] == str(count)
    assert "num_tokens = 23" in answer["Arguments"] and answer["Opset"] == "20"
    check = next(c for c in document["sidecar"]["checks"] if c["name"] == "window")
    deep = document["windows"][0]["examples"][-1]
    assert f"query {deep['query']} depends on tokens {deep['deep_first']}–" in check["detail"]


def test_inspect_of_a_checkpoint(pair: tuple[Path, Path], localattn: Run) -> None:
    document, text, page = renderings(localattn, "inspect", pair[1])
    rows = same_tables("checkpoint", document, text, page)
    assert "**Ready to export**" in text
    for entry in ("inferred", "given"):
        for name, value in document[entry].items():
            assert [name, json.dumps(value["value"])] in [row[:2] for row in rows]


def test_inspect_of_a_checkpoint_without_config(pair: tuple[Path, Path], tmp_path: Path, localattn: Run) -> None:
    lone = tmp_path / "lone.pt"
    lone.write_bytes(pair[1].read_bytes())
    document, text, page = renderings(localattn, "inspect", lone)
    same_tables("checkpoint", document, text, page)
    assert "**More is needed**" in text and document["needed"].splitlines()[0] in plain(text)


def test_another_window_is_seen_at_once(pair: tuple[Path, Path], tmp_path: Path, localattn: Run) -> None:
    """A configuration with another window than the file's: both stand side by side."""
    checkpoint = tmp_path / "model.pt"
    checkpoint.write_bytes(pair[1].read_bytes())
    config = json.loads(pair[1].with_suffix(".json").read_text())
    config["kwargs"] |= {"local_attn_window_size": 8}
    (tmp_path / "other.json").write_text(json.dumps(config))
    words = ("parity", pair[0], "--against", checkpoint, "--config", tmp_path / "other.json", "--seeds", 1)
    result = localattn(*words)
    assert result.code == 1
    lines = [line for line in result.out.splitlines() if line.strip().startswith("window of")]
    assert "the file" in lines[0] and "window 4" in lines[0] and "(2 layers)" in lines[0]
    assert "the reference" in lines[1] and "window 8" in lines[1]
    assert "They differ" in localattn(*words, "--format", "md").out


@pytest.mark.parametrize(
    ("value", "passed", "text"),
    [
        (1.0, True, "1"),
        (1.0, False, "1 - <1e-16"),
        (1 - 2**-30, False, "1 - 9.3e-10"),
        (0.9996, False, "1 - 4.0e-04"),
        (0.9993, False, "0.999"),
        (-1.0, False, "-1"),
        ("inf", False, "inf"),
    ],
)
def test_no_failed_row_has_a_cosine_of_1(value: float, passed: bool, text: str) -> None:
    assert cosine(value, passed) == text


def test_a_window_without_end_in_a_config(pair: tuple[Path, Path], tmp_path: Path, localattn: Run) -> None:
    path = tmp_path / "odd.pt"
    path.write_bytes(pair[1].read_bytes())
    config = json.loads(pair[1].with_suffix(".json").read_text())
    config["kwargs"] |= {"local_attn_window_size": 10**30, "max_seq_len": 10**30}
    path.with_suffix(".json").write_text(json.dumps(config))
    assert renderings(localattn, "inspect", path)[0]["windows"] == []


def test_bisect_says_the_same_three_times(pair: tuple[Path, Path], faulty: Path, localattn: Run) -> None:
    document, text, page = renderings(localattn, "bisect", faulty, "--against", pair[1], code=1)
    rows = same_tables("bisect", document, text, page)
    assert document["fault"]["module"] == "layers.1.1.branch.4"
    for number, row in enumerate(document["boundaries"], 1):
        figures = [
            comparison_figure(row, n) for n in ("max_abs", "relative_rms", "cosine", "not_finite", "worst_index")
        ]
        verdict = "ok" if row["passed"] else "WRONG"
        assert [str(number), row["module"] or "(the model)", row["role"], verdict, *figures] in rows
    assert "first fault: layers.1.1.branch" in page and 'class="fault"' in page
    good = localattn("bisect", pair[0], "--against", pair[1], "--format", "html")
    assert good.code == 0 and "first fault" not in good.out and "No fault" in good.out


def test_a_page_goes_to_its_file_whole_or_not_at_all(
    pair: tuple[Path, Path], tmp_path: Path, localattn: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    finished = localattn("inspect", pair[0], "-o", path)
    assert finished.code == 0 and "Attention windows" in finished.out and f"Wrote {path}" in finished.err
    before = path.read_bytes()
    assert before.endswith(b"</html>\n") or before.endswith(b"</html>")
    again = localattn("inspect", pair[0], "-o", path)
    assert again.code == 2 and "--force" in again.err and path.read_bytes() == before
    assert localattn("inspect", pair[0], "-o", tmp_path / "sidecar.txt").code == 2
    made = tmp_path / "missing" / "page.md"
    assert localattn("inspect", pair[0], "-o", made).code == 0 and made.exists()

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("localattn.core.storage.files.os.fsync", fail)
    assert localattn("inspect", pair[0], "-o", path, "--force").code != 0
    assert path.read_bytes() == before
    assert {entry.name for entry in tmp_path.iterdir()} == {"page.html", "missing"}


def test_json_to_a_file_is_the_json_of_stdout(pair: tuple[Path, Path], tmp_path: Path, localattn: Run) -> None:
    path = tmp_path / "sidecar.json"
    quiet = localattn("inspect", pair[0], "-o", path)
    assert quiet.out == "" and path.read_text() == localattn("inspect", pair[0], "--format", "json").out


def hostile_file(folder: Path, good: Path) -> Path:
    """The exported model with markup in every name that a stranger may choose."""
    document = onnx.load(good)
    document.producer_name = HOSTILE
    for node in document.graph.node:
        if node.domain == "localattn":
            node.name = HOSTILE
        node.output[:] = [HOSTILE if name == "logits" else name for name in node.output]
    document.graph.output[0].name = HOSTILE
    document.graph.node.append(onnx.helper.make_node(HOSTILE, [], [HOSTILE + "2"], domain=HOSTILE))
    path = folder / "hostile.onnx"
    path.write_bytes(document.SerializeToString())
    sidecar = json.loads(sidecar_path(good).read_text())
    sidecar |= {
        "class": HOSTILE,
        "checkpoint_name": HOSTILE,
        "versions": {HOSTILE: HOSTILE},
        "options": {HOSTILE: HOSTILE},
    }
    sidecar |= {"kwargs": {HOSTILE: HOSTILE}, "model_sha256": sha256(path), "hyper_connections": HOSTILE}
    sidecar["checks"] = [{"name": HOSTILE, "status": "failed", "detail": HOSTILE, "figures": {HOSTILE: HOSTILE}}]
    sidecar["layers"] = [{"path": HOSTILE, "class": HOSTILE, "replaced": False, "detail": HOSTILE}]
    write_sidecar(path, sidecar)
    return path


def assert_harmless(page: str, text: str) -> None:
    cells = Cells(page)
    assert "script" not in cells.tags and cells.fetched == [] and "url(" not in page and "@import" not in page
    assert any("<script>" in cell for row in cells.rows for cell in row), "the name is shown as it is"
    assert "<script" not in text.replace("\\<", "") and "`x`" not in text.replace("\\`", "")


def test_names_from_files_stay_names(pair: tuple[Path, Path], tmp_path: Path, localattn: Run) -> None:
    document, text, page = renderings(localattn, "inspect", hostile_file(tmp_path, pair[0]))
    assert document["windows"][0]["layers"] == [HOSTILE] * TINY["depth"]
    assert_harmless(page, text)


def test_names_in_comparisons_stay_names(pair: tuple[Path, Path], faulty: Path, localattn: Run) -> None:
    for kind, model in (("parity", faulty), ("bisect", faulty)):
        found = localattn(kind, model, "--against", pair[1], "--format", "json").out
        for name in ("logits", "faulty.onnx", "layers.1.1.branch.4", "seed 0", "weights"):
            found = found.replace(name, json.dumps(HOSTILE)[1:-1])
        document = json.loads(found)
        assert_harmless(document_html(kind, document), document_markdown(kind, document))


@pytest.mark.parametrize("size", [-1, 0, 1 << 40, (1 << 63) - 1])
def test_impossible_sizes_in_a_file_draw_nothing(
    pair: tuple[Path, Path], tmp_path: Path, localattn: Run, size: int
) -> None:
    document = onnx.load(pair[0])
    for node in document.graph.node:
        for attribute in node.attribute:
            if node.domain == "localattn" and attribute.name == "look_backward":
                attribute.i = size
    path = tmp_path / "odd.onnx"
    onnx.save(document, path)
    sidecar = json.loads(sidecar_path(pair[0]).read_text())
    kwargs = {"local_window_size": 10**30}
    write_sidecar(path, {**sidecar, "model_sha256": sha256(path), "kwargs": kwargs, "seq_len": 10**30})
    if size != 0:
        finished = localattn("inspect", path, "--format", "html")
        assert finished.code == 2 and "look_backward" in finished.err and not finished.out
        return
    found, text, page = renderings(localattn, "inspect", path)
    same_tables("onnx", found, text, page)
    assert len(found["windows"]) == 1


def test_an_altered_file_is_pointed_out(pair: tuple[Path, Path], tmp_path: Path, localattn: Run) -> None:
    path = tmp_path / "altered.onnx"
    path.write_bytes(pair[0].read_bytes() + b"\x12\x00")
    sidecar_path(path).write_text(sidecar_path(pair[0]).read_text())
    document, text, page = renderings(localattn, "inspect", path)
    same_tables("onnx", document, text, page)
    assert "NOT written for this file" in text and "**Do not use**" in text and "## Sidecar" not in text


def test_without_jinja_only_html_is_missing(
    pair: tuple[Path, Path], localattn: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("localattn.reports")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("jinja2", "markupsafe"):
        monkeypatch.setitem(sys.modules, name, None)
    assert localattn("inspect", pair[0], "--format", "md").code == 0
    finished = localattn("inspect", pair[0], "--format", "html")
    assert finished.code == 3 and as_installed("pip install 'localattn[report]'") in finished.err and finished.out == ""


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("kind", ["parity", "inspect", "bisect"])
def test_a_phone_shows_it(
    pair: tuple[Path, Path], faulty: Path, tmp_path: Path, localattn: Run, kind: str, dark: bool
) -> None:
    if kind == "inspect":
        page = localattn("inspect", hostile_file(tmp_path, pair[0]), "--format", "html").out
    else:
        page = localattn(kind, faulty, "--against", pair[1], "--format", "html").out
    shown = show(tmp_path, page, dark)
    assert_fits_a_phone(shown, dark)
    assert shown.title != "taken"
