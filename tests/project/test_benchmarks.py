"""The benchmarks' own machinery: which cells are measured, what is kept of them, how they are judged and shown."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime", reason="the candidates run in onnxruntime")
pytest.importorskip("local_attention", reason="a peer is the upstream package")

from localattn.benchmarks import clock, machine
from localattn.benchmarks.cases import node, startup
from localattn.benchmarks.cases.compiled import why_no_library
from localattn.benchmarks.peers import report, run
from localattn.benchmarks.peers import store as peers_store
from localattn.benchmarks.peers.grid import GEOMETRIES, QUICK, Cell, cells, choose
from localattn.benchmarks.peers.store import Store
from localattn.benchmarks.peers.table import OURS, PEERS
from localattn.core.nodes.attention import HEADS_FIRST, VARIANT_BY_OP_TYPE, NodeAttributes
from localattn.core.tensorrt_versions import parse

from ..conftest import TINY, save_upstream
from ..support.models.node_model import one_node

SHORT = 192


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    monkeypatch.setattr(peers_store, "RESULTS", tmp_path)
    return tmp_path


def row(cell: Cell, *, others: float = 0.0, **milliseconds: float) -> dict[str, Any]:
    """A row as `measure_cell` makes it, of a limit of 1 ms."""
    times = {"node": 1.6, "kernel": 1.2, "sdpa_blocks": 2.4} | milliseconds
    candidates: dict[str, Any] = {name: {"skipped": "not now"} for name in PEERS}
    candidates |= {name: {"median_ms": ms, "over_limit": ms, "samples": 3} for name, ms in times.items()}
    return cell.to_dict() | {"limit_ms": 1.0, "others_cpu": others, "candidates": candidates}


def fill(store: Store, chosen: list[Cell], **more: float) -> None:
    for cell in chosen:
        store.add(cell, row(cell, **more), run._setting())


def test_the_grid_has_every_window_length_geometry_mask_and_dtype() -> None:
    grid = list(cells())
    assert len(grid) == len(set(grid)) == 126
    assert {cell.length for cell in grid} == {1024 << power for power in range(6)}
    for field, values in (("window", {64, 256, 512}), ("shape", set(GEOMETRIES)), ("masked", {True, False})):
        for dtype in ("fp32", "fp16"):
            assert {getattr(cell, field) for cell in grid if cell.dtype == dtype} == values
    assert all(Cell.of(json.loads(json.dumps(cell.to_dict()))) == cell for cell in grid)


def test_filters_choose_cells() -> None:
    assert choose([]) == list(cells())
    chosen = choose(["window=64,512", "geometry=causal exact", "mask=no", "dtype=fp16"])
    assert len(chosen) == 2 * 3 and {cell.window for cell in chosen} == {64, 512}
    assert all(cell.shape == "causal exact" and not cell.masked and cell.dtype == "fp16" for cell in chosen)
    assert {cell.length for cell in choose(QUICK)} == {1024}
    for wrong in ("width=3", "window=63", "mask=maybe", "window"):
        with pytest.raises(ValueError, match=r"There is no|The grid has no"):
            choose([wrong])


def test_what_was_measured_stays_and_resume_measures_the_rest(results: Path) -> None:
    whole = choose(QUICK)
    store = Store("peers", whole)
    fill(store, whole[:5])
    assert [path.name for path in results.iterdir()] == ["peers_partial.json"]  # as after a kill

    store = Store("peers", whole)
    wanted = run.cells_to_measure(store, only=[], noisy=None, resume=True, quick=True)
    assert wanted == whole[5:]
    fill(store, wanted)
    document = store.publish(run._setting())
    assert [path.name for path in results.iterdir()] == ["peers.json"]
    assert [Cell.of(entry) for entry in document["cells"]] == whole
    rows = [line for line in (results / "peers.json").read_text().splitlines() if line.startswith("  {")]
    assert [Cell.of(json.loads(row.rstrip(","))) for row in rows[-len(whole) :]] == whole, "a cell is a line"


def test_only_some_cells_are_measured_again(results: Path) -> None:
    whole = choose(QUICK)
    store = Store("peers", whole)
    fill(store, whole[1:])
    fill(store, whole[:1], others=0.5)
    store.publish(run._setting())
    for options, expected in (
        ({"only": ["dtype=fp16"], "noisy": None}, [cell for cell in whole if cell.dtype == "fp16"]),
        ({"only": [], "noisy": 0.2}, whole[:1]),
        ({"only": [], "noisy": 0.6}, []),
    ):
        store = Store("peers", whole)
        wanted = run.cells_to_measure(store, resume=False, quick=True, **options)  # type: ignore[arg-type]
        assert wanted == expected and store.complete
    fill(store, [whole[2]], node=7.0)
    assert store.publish(run._setting())["cells"][2]["candidates"]["node"]["median_ms"] == 7.0


def test_without_options_everything_is_measured_anew(results: Path) -> None:
    fill(Store("peers", choose([])), choose([])[:3])
    store = Store("peers", choose([]))
    assert run.cells_to_measure(store, only=[], noisy=None, resume=False, quick=False) == list(cells())
    assert not store.rows


def test_cells_of_another_machine_are_not_mixed_in(results: Path) -> None:
    whole = choose(QUICK)
    fill(Store("peers", whole), whole[:1])
    path = results / "peers_partial.json"
    path.write_text(path.read_text().replace('"onnxruntime": "', '"onnxruntime": "0.'))
    with pytest.raises(ValueError, match=r"onnxruntime: 0\..* then"):
        run.cells_to_measure(Store("peers", whole), only=[], noisy=None, resume=True, quick=True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", GEOMETRIES)
def test_every_peer_computes_the_same(shape: str, masked: bool) -> None:
    """All that need no compiling or exporting; each is compared with the node, and a difference is its reason."""
    import onnxruntime

    cell = Cell(shape, 64, SHORT, "fp32", masked)
    runs, entries = run._prepare(cell, thorough=False)
    reasons = {name: entry["skipped"] for name, entry in entries.items()}
    if (no_compiler := why_no_library()) is not None:
        assert no_compiler in reasons.pop("kernel")
    if parse(onnxruntime.__version__) < (1, 24):  # 1.23.2's operator is off by 0.47, and so is not timed
        reasons.pop("gqa", None)
    for name, reason in reasons.items():
        assert PEERS[name].slow_to_make or reason == PEERS[name].refuses(cell), (name, reason)
    assert {"node", "upstream", "dense", "attention_op", "sdpa_blocks"} <= runs.keys()


def test_a_peer_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("causal exact", 64, SHORT, "fp32", False)
    wrong = Cell("causal block-local", 64, SHORT, "fp32", False)
    dense = PEERS["dense"]
    monkeypatch.setitem(PEERS, "dense", replace(dense, prepare=lambda _, feed: dense.prepare(wrong, feed)))
    runs, entries = run._prepare(cell, thorough=False)
    assert "dense" not in runs and "computes something else" in entries["dense"]["skipped"]


def test_targets_judge_body_and_kernel_each() -> None:
    near, far = Cell("causal exact", 64, 1024, "fp32", False), Cell("causal exact", 64, 4096, "fp32", False)
    met = {target.what.split(",")[0].split(" /")[0]: target for target in run.targets([row(near), row(far)])}
    assert set(met) == {"best of ours", *(PEERS[name].label.split(",")[0] for name in OURS)}
    assert all(target.met for target in met.values())
    slow = row(far, node=2.6, kernel=2.3)
    verdicts = [(target.met, target.value) for target in run.targets([row(near), slow])]
    assert verdicts == [(False, 2.3), (False, 2.6 / 2.4), (True, 2.3 / 2.4)]
    alone = row(near)
    alone["candidates"]["kernel"] = {"skipped": "no compiler"}
    assert [target.value for target in run.targets([alone])] == [1.6 / 2.4]


def test_tables_name_the_fastest_and_what_ours_lose() -> None:
    near, far = Cell("causal exact", 64, 1024, "fp32", False), Cell("non-causal", 256, 4096, "fp16", True)
    result = run._setting() | machine.facts() | {"date": "2026-11-21", "targets": []}
    result["cells"] = [row(near), row(far, node=3.0)]
    page = report.markdown(result)
    assert "| 64 | 1,024 |  | 1.00 | 1.60 | **1.20** |" in page
    assert "| 256 | 4,096 | yes | 1.00 | 3.00 | **1.20** |" in page
    assert "- node / blocks 1.25: fp16, non-causal, w=256, n=4096, mask" in page
    assert page.count("\n## causal exact, fp32") == page.count("\n## non-causal, fp16") == 1
    for lines in report.tables(result):
        assert {len(cells) for cells, _ in lines.rows} == {len(lines.columns)}


def test_the_figures_show_every_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from localattn.benchmarks.peers import plot

    assert set(plot._STYLE) == set(PEERS)
    result = run._setting() | machine.facts() | {"cells": [row(cell) for cell in choose(["dtype=fp32"])]}
    path = plot.draw(result, tmp_path / "peers.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 50_000


def test_a_slow_candidate_takes_no_more_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_PATIENCE", 0)
    monkeypatch.setattr(clock, "_SAMPLE", 0.01)
    ready = {"fast": lambda: lambda: time.sleep(0.001), "slow": lambda: lambda: time.sleep(0.05)}
    measured = clock.interleave(ready, samples=5, least=5, seconds=0, most=0.08)
    assert measured.counts["slow"] == 2 and measured.counts["fast"] >= 5
    assert 0.05 <= measured.timings["slow"].median < 0.5 and measured.samples == 2


def test_the_kernel_is_judged_by_its_memory() -> None:
    def size(length: int, peak: float) -> dict[str, Any]:
        data = 16 * 8 * length * 64 / 2**20
        entry = {"median_ms": length / 100, "peak_mib": peak}
        return {
            "length": length,
            "limit_ms": length / 200,
            "inputs_outputs_mib": data,
            "candidates": {"node": dict(entry), "kernel": entry},
        }

    least = [size(1024, 2.1), size(2048, 4.2)]
    assert node.memory_over_data(least[0]) == pytest.approx((6 + 2.1) / 8)
    judged = {target.what: target for target in node._targets(least)}
    assert all(target.met for target in judged.values())
    assert not node._targets([size(1024, 2.1), size(2048, 13)])[-1].met  # 12 MiB in, 13 more, over 16
    quadratic = [
        target for target in node._targets([size(1024, 2), size(2048, 8)]) if "growth of memory" in target.what
    ]
    assert [target.met for target in quadratic] == [False, False]


def test_run_imports_no_giant_beyond_its_engine(tmp_path: Path) -> None:
    attributes = NodeAttributes(Cell("causal exact", 64, SHORT, "fp32", False).geometry, 0.3, perm=HEADS_FIRST)
    path = tmp_path / "model.onnx"
    path.write_bytes(one_node(VARIANT_BY_OP_TYPE["WindowedAttention"], attributes, SHORT).SerializeToString())
    loaded = startup.imported(startup.of_model(path)[startup.RUN])
    assert "onnxruntime" in loaded and not loaded & set(startup.GIANTS_OF_RUN)


@pytest.mark.slow
def test_a_candidate_that_fails_is_reported_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its matrices are too narrow for int8, so that export fails; the rest is measured all the same."""
    from localattn.benchmarks import report as tables
    from localattn.benchmarks.cases import model

    monkeypatch.setattr(model, "why_no_library", lambda: "not built in a test")
    steps: list[str] = []
    result = model.measure(save_upstream(tmp_path, "local_attention.LocalTransformer", TINY), 0, steps.append)
    assert (
        list(result["failed"]) == ["localattn, int8"] and "nothing to quantize" in result["failed"]["localattn, int8"]
    )
    assert set(result["candidates"]) == {f"localattn, fp32, {model.BODIES}", "local-attention, eager"}
    assert any(step.startswith("Failed: localattn, int8") for step in steps)
    tables.print_model(result)
    assert "nothing to quantize" in " ".join(capsys.readouterr().out.split())
