"""Files in other people's runtimes: what the package runs of them in OpenVINO, tract and WebAssembly stays right.

`python -m tests.runtimes` runs the whole matrix. Here are three runtimes on two kinds of files, in environments of
their own; without a network, and before they were ever fetched, they skip.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .__main__ import explained, tables, wrong
from .cases import write_cases
from .environments import RUNTIMES, TOOLS, Absent, run
from .kinds import KINDS

# In the default run, each with the kinds that it is tried on there.
QUICK = {"openvino": ("full", "AFT"), "tract": ("full",), "web": ("full", "AFT")}
pytestmark = pytest.mark.runtimes


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cases(tmp_path_factory.mktemp("quick"), ["full", "AFT"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cases(tmp_path_factory.mktemp("whole"), list(KINDS))


@pytest.mark.parametrize("name", QUICK)
def test_standard_operators_are_right_elsewhere(name: str, quick: Path) -> None:
    try:
        results = run(name, quick, QUICK[name])["results"]
    except Absent as error:
        pytest.skip(str(error))
    assert sorted(results) == sorted(QUICK[name])
    for kind, forms in results.items():
        assert "failed" not in forms["standard ops"], forms
        assert not wrong(kind, forms["standard ops"]["error"]), forms


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in (*RUNTIMES, *TOOLS) if name != "quantize_dynamic" and not explained(name)]
)
def test_nothing_is_wrong_without_an_error(name: str, whole: Path) -> None:
    try:
        results = run(name, whole)["results"]
    except Absent as error:
        pytest.skip(str(error))
    shown = {(kind, form): x for kind, forms in results.items() for form, x in forms.items() if "error" in x}
    assert {key: x for key, x in shown.items() if wrong(key[0], x["error"])} == {}


def test_the_table_shows_errors_failures_and_what_is_wrong() -> None:
    results = {
        "full": {"standard ops": {"error": 4.8e-7}, "as exported": {"failed": "no functions"}},
        "fp16": {"standard ops": {"error": 9.8e-4}},
        "step": {"standard ops": {"error": 36.0}},
        "AFT": {"standard ops": {"error": None}},
    }
    page = tables({"tract": {"version": "0.23.9", "results": results}})
    row = next(line for line in page.splitlines() if line.startswith("| tract") and "5e-7" in line)
    assert row.split(" | ")[:3] == ["| tract 0.23.9", "5e-7", "1e-3"]
    assert "**wrong: 4e+01**" in row
    assert "**wrong: not a number**" in row
    assert "| tract 0.23.9 | fails |" in page
