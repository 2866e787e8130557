"""What reports are made of: figures, tables, charts, and a page that browsers show well."""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml
from datetime import datetime, timezone
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localattn.core.documents.bench_report import (
    BenchReport,
    BenchRow,
    BenchSettings,
    Machine,
    Memory,
    NodeTime,
    Profile,
    Ratio,
    Share,
)
from localattn.reports.bench.page import bench_page
from localattn.reports.bench.tables import bench_markdown, speed
from localattn.reports.figures import digits, percent, size
from localattn.reports.page import Page, Section, render
from localattn.reports.svg import bars
from localattn.reports.table import Column, Table, markdown
from localattn.runtime.bench.statistics import histogram, latency

from ..support.browser import PHONE, asked, assert_fits_a_phone, needs_browser, show

HOSTILE = '<script>document.title = "taken"</script>|`x`&amp;"\''


def row(label: str, scale: float, ratio: Ratio | None) -> BenchRow:
    times = scale * np.random.default_rng(0).gamma(9, 1, 500)
    return BenchRow(
        label=label,
        model=label,
        backend="onnxruntime",
        provider="cpu",
        threads=2,
        seq_len=4096,
        batch=1,
        bound=True,
        cuda_graph=False,
        load_ms=40.0,
        first_run_ms=9.5,
        calls=500,
        latency=latency(times, (50, 90, 99)),
        histogram=histogram(times),
        rounds_ms=[scale * (8 + n % 3) for n in range(12)],
        runs_per_s=1e3 / times.mean(),
        tokens_per_s=4096e3 / times.mean(),
        memory=Memory(imports=60_000_000, loaded=15_000_000, peak=46_000_000),
        others=0.01,
        ratio=ratio,
    )


def report(first: str = "first.onnx", second: str = "second.onnx") -> BenchReport:
    shares = [Share(name=f"layers.*.{second}", ms=3.0, share=0.75, nodes=4), Share(name="b", ms=1, share=0.25, nodes=1)]
    return BenchReport(
        created=datetime(2026, 1, 2, tzinfo=timezone.utc).isoformat(),
        machine=Machine(cpu="A CPU", cores=2, architecture="x86_64", system="Linux", python="3.11"),
        versions={"onnxruntime": "1.31.1"},
        settings=BenchSettings(duration=3, iterations=10, warmup_ms=200, rounds=12, seed=0, input_source=second),
        rows=[row(first, 1.0, None), row(second, 1.3, Ratio(against=first, value=1.3, low=1.25, high=1.36))],
        profiles=[
            Profile(
                label=second,
                runs=10,
                run_ms=4.4,
                node_ms=4.0,
                modules=shares,
                patterns=shares,
                operators=shares,
                nodes=[NodeTime(name=second, operator="MatMul", module=second, ms=3.0, share=0.75)],
                named=1.0,
            )
        ],
        warnings=[f"Careful with {second}."],
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.012345, "0.0123"), (9.996, "10.0"), (99.96, "100"), (1234.5, "1,234"), (0, "0"), (None, "–"), (-2.5, "-2.50"),
     (1e-9, "1.00e-09"), (float("inf"), "inf")],
)  # fmt: skip
def test_three_digits(value, text):
    assert digits(value) == text


def test_units():
    assert (digits(4.5, "ms"), percent(0.042), percent(1.0), percent(0), size(14_800_000), size(None)) == (
        "4.50 ms", "4.2 %", "100 %", "0 %", "14.8 MB", "–"
    )  # fmt: skip


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 12))
def test_ticks_are_few_and_inside(low, width, most):
    high = low + width
    found = bars.ticks(low, high, most)
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert len(found) <= most + 1 and found == sorted(found)
    assert all(low - slack <= tick <= high + slack for tick in found)


def elements(drawing: str, kind: str) -> list[xml.Element]:
    return list(xml.fromstring(str(drawing)).iter(kind))


def test_bars_are_as_long_as_their_values():
    drawing = bars.bars([bars.Bar("a", 2.0), bars.Bar("b", 8.0, 4.0, 10.0)], "t", "ms")
    short, long = (float(rect.get("width")) for rect in elements(drawing, "rect"))
    assert long == pytest.approx(4 * short, rel=0.01) and long == pytest.approx(0.8 * (bars.WIDTH - 2), rel=0.01)


def test_a_line_goes_through_its_points():
    drawing = bars.lines([bars.Series("s", ((0, 0), (1, 10), (2, 5)))], "t", "x", "y")
    (path,) = (p for p in elements(drawing, "path") if "line" in p.get("class"))
    corners = [tuple(map(float, pair.split())) for pair in path.get("d")[1:].split("L")]
    (x0, bottom), (x1, top), (x2, middle) = corners
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11) and top < middle < bottom
    assert middle - top == pytest.approx((bottom - top) / 2, abs=0.11)


def test_a_histogram_has_a_bar_a_bin():
    drawing = bars.histogram([0, 1, 2, 3], [4, 0, 2], "t", "x")
    heights = [float(rect.get("height")) for rect in elements(drawing, "rect")]
    assert len(heights) == 3 and heights[0] == pytest.approx(2 * heights[2], rel=0.01)


def test_an_interval_that_spans_one_is_drawn_across_the_line():
    drawing = bars.intervals([bars.Bar("a", 1.1, 0.9, 1.3)], "t")
    classes = {
        p.get("class"): [float(x) for x in re.findall(r"M([\d.]+)", p.get("d"))] for p in elements(drawing, "path")
    }
    assert classes["whisker"][0] < classes["reference"][0] < classes["whisker"][-1]


def test_markdown_shows_what_cells_hold():
    text = markdown(Table("T|", (Column("a|b", number=False), Column("n")), (("x\n|<b>", "1"),), ("note",)))
    assert "| a\\|b | n |\n| --- | ---: |\n| x\\\\n\\|\\<b\\> | 1 |" in text
    assert text.startswith("### T\\|\n")


class Outline(HTMLParser):
    """Tags and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [a for a in attrs if a[0] in ("src", "href", "xlink:href", "action") or a[0].startswith("on")]


def test_names_from_files_stay_names_and_nothing_is_fetched():
    html = bench_page(report(HOSTILE, HOSTILE + "2"))
    outline = Outline()
    outline.feed(html)
    assert "script" not in outline.tags and outline.fetched == []
    assert "url(" not in html and "@import" not in html
    assert {"svg", "table", "figure"} <= set(outline.tags)
    text = bench_markdown(report(HOSTILE, HOSTILE + "2"))
    assert "<script" not in text.replace("\\<", "")


def test_a_page_of_another_kind_needs_only_text():
    html = render(Page("T", sections=(Section("S", ("<p>",)),)))
    assert "<h2>S</h2>" in html and "&lt;p&gt;" in html and "<footer>" not in html


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_the_page_without_overflow(tmp_path, dark):
    long = "a_model_with_a_very_long_name_" * 4 + ".onnx"
    assert_fits_a_phone(show(tmp_path, bench_page(report(long, "b" + long)), dark), dark)


def test_the_headline_says_how_much_faster():
    base = report("first.onnx", "second.onnx")
    faster = Ratio(against="first.onnx", value=0.48, low=0.46, high=0.5)
    html = bench_page(base.model_copy(update={"rows": [base.rows[0], row("second.onnx", 0.48, faster)]}))
    assert '<strong class="verdict good">2.1 × faster</strong>' in html
    assert "second.onnx is 2.1 × faster than first.onnx (2.0 × faster to 2.2 × faster)." in html
    unsure = Ratio(against="first.onnx", value=0.98, low=0.9, high=1.1)
    html = bench_page(base.model_copy(update={"rows": [base.rows[0], row("second.onnx", 0.9, unsure)]}))
    assert "verdict good" not in html and "No difference is shown" in html
    assert "second.onnx is 1.3 × slower than first.onnx" in bench_page(base)


@pytest.mark.parametrize(("value", "text"), [(0.48, "2.1 × faster"), (0.96, "4.2 % faster"), (1.3, "1.3 × slower")])
def test_speeds(value, text):
    assert speed(value) == text


def test_names_in_charts_are_whole():
    name = "a_model_with_a_very_long_name_" * 3 + "and_an_end.onnx, plugin auto"
    items = [bars.Bar(name, 2.0), bars.Bar("b", 1.0)]
    for drawing in (bars.bars(items, "t", "ms"), bars.intervals(items, "t")):
        shown = [text.text for text in elements(drawing, "text") if text.get("class") == "label"]
        assert "".join(shown).replace(" ", "") == name.replace(" ", "") + "b" and len(shown) > 3
        heights = [float(text.get("y")) for text in elements(drawing, "text") if text.get("class") == "label"]
        assert heights == sorted(set(heights)), "no line lies on another"
    legend = bars.lines([bars.Series(name, ((0, 0), (1, 1))), bars.Series("b", ((0, 1), (1, 0)))], "t", "x", "y")
    assert "".join(x.text for x in elements(legend, "text") if x.get("class") == "label").startswith(name[:20])
    assert "…" not in str(legend)


# Scrolls the first table to its end: what is its last column's right edge, where are its names, how is the cue drawn?
_SCROLL = """<script>
const wide = document.querySelector(".wide");
const style = getComputedStyle(wide);
const cue = [style.backgroundImage.split("linear-gradient").length - 1, style.backgroundAttachment];
const hidden = wide.scrollWidth - wide.clientWidth;
wide.scrollLeft = wide.scrollWidth;
const edge = wide.querySelector("thead th:last-child").getBoundingClientRect().right;
const name = wide.querySelector("tbody th").getBoundingClientRect();
const said = [hidden, edge, name.left, name.right, cue.join(";")];
parent.document.documentElement.setAttribute("data-probe", said.join("|"));
</script>"""


@needs_browser
def test_a_phone_reaches_the_whole_table_and_sees_that_it_goes_on(tmp_path):
    hidden, edge, left, right, cue = asked(tmp_path, bench_page(report()), False, _SCROLL).split("|")
    assert float(hidden) > 0, "else there is nothing to scroll"
    assert float(edge) <= PHONE and float(left) <= 16 < 100 < float(right), "the names stay where they are"
    assert cue == "4;local, local, scroll, scroll"
