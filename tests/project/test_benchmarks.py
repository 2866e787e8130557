"""The benchmarks' own machinery: which cells are measured, what is kept of them, how they are judged and shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the candidates run in onnxruntime")
pytest.importorskip("local_attention", reason="a peer is the upstream package")

from localattn.benchmarks import clock, machine
from localattn.benchmarks.cases import generate, node, startup
from localattn.benchmarks.cases.compiled import why_no_library
from localattn.benchmarks.hugging_face import decoder
from localattn.benchmarks.limit import program as loops_program
from localattn.benchmarks.limit import windows
from localattn.benchmarks.limit.roofline import LIMIT, OLD_LIMIT, Loops, Roofline, name_of_limit
from localattn.benchmarks.peers import report, run
from localattn.benchmarks.peers.grid import GEOMETRIES, QUICK, Cell, cells, choose
from localattn.benchmarks.peers.store import Store
from localattn.benchmarks.peers.table import OURS, PEERS
from localattn.core.nodes.attention import HEADS_FIRST, VARIANT_BY_OP_TYPE, NodeAttributes
from localattn.core.versions import parse

from ..conftest import TINY, save_upstream
from ..support.models.node_model import one_node

SHORT = 192


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    monkeypatch.setattr(machine, "_cpu_model", lambda: "Fast(R) Chip")
    monkeypatch.setattr(machine, "_cpu_generation", lambda: "family 7, model 3")
    return tmp_path / "fast_chip_family_7_model_3"


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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_the_keys_of_a_cell_are_counted() -> None:
    for shape in GEOMETRIES:
        for masked in (False, True):
            cell = Cell(shape, 64, SHORT, "fp32", masked)
            feed = cell.inputs()
            assert cell.count_pairs(feed) == cell.visible(feed).sum()


def test_the_limit_is_what_takes_longer() -> None:
    roofline = Roofline(peak=2e11, pass_seconds=1e-3, bytes=32_000_000, square=1e11)
    assert roofline.limit(4e8) == 2e-3 and roofline.limit(1e8) == 1e-3
    bound = [roofline.to_dict(operations)["bound"] for operations in (4e8, 1e8)]
    assert bound == ["multiply-adds", "copy"]
    stored = roofline.to_dict(4e8)
    assert (stored["limit_ms"], stored["peak_gflops"], stored["copy_gb_s"], stored["square_gflops"]) == (
        2,
        200,
        32,
        100,
    )
    assert name_of_limit(stored) == LIMIT and name_of_limit({"matmul_gflops": 100.0, "limit_ms": 4.0}) == OLD_LIMIT


def test_the_loops_of_every_instruction_set() -> None:
    """They count what they compute, and pass over every element; the rate itself is a matter of benchmarks."""
    if why_no_library() is not None:
        pytest.skip("needs a C++ compiler")
    for name in dict.fromkeys((loops_program.instruction_set(), "baseline")):
        loops = loops_program.Program(loops_program.build(), name)
        once = loops.multiply_add(1, 1)
        assert once % 8 == 0 and loops.multiply_add(1000, 3) == 3000 * once
        arrays = [np.arange(1, 1004, dtype=np.float32) * factor for factor in (1, 10, 100, 0)]
        loops.pass_over(arrays, 2, 3)
        assert np.array_equal(arrays[3], arrays[0] * 111)
        with pytest.raises(ValueError, match="different shapes"):
            loops.pass_over([*arrays[:3], arrays[3][1:]], 1, 1)
    with pytest.raises(ValueError, match="no loops for the instruction set altivec"):
        loops_program.Program(loops_program.build(), "altivec").multiply_add(1, 1)


def test_the_loops_are_made_ready_beside_candidates() -> None:
    if why_no_library() is not None:
        pytest.skip("needs a C++ compiler")
    loops = Loops(1 << 16, 4, 1)
    assert set(loops.ready) == {"peak", "pass", "square"} and loops.bytes == 1 << 20
    seconds = {name: clock.Timing(2.0, 2.0, 2.0) for name in loops.ready}
    measured = loops.roofline(seconds)
    assert measured.peak == loops.ready["peak"]()() / 2 and measured.square == 2048**3
    assert 0 < measured.pass_seconds <= 2


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
    result = run._setting() | machine.describe_machine() | {"date": "2026-11-21", "targets": []}
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
    result = run._setting() | machine.describe_machine() | {"cells": [row(cell) for cell in choose(["dtype=fp32"])]}
    path = plot.draw(result, tmp_path / "peers.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 50_000


def test_a_slow_candidate_takes_no_more_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the candidates alone move."""
    now = [0.0]

    def lasting(seconds: float) -> Callable[[], Callable[[], None]]:
        return lambda: lambda: now.append(now.pop() + seconds)

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(clock, "_PATIENCE", 0)
    monkeypatch.setattr(clock, "_SAMPLE", 0.01)
    monkeypatch.setattr(clock, "_machine_busy", lambda: float("nan"))
    ready = {"fast": lasting(0.002), "slow": lasting(0.05)}
    measured = clock.interleave(ready, samples=5, least=5, seconds=0, most=0.08)
    assert measured.counts == {"fast": 5, "slow": 2} and measured.samples == 2
    assert measured.timings["slow"].median == pytest.approx(0.05)
    assert measured.timings["fast"].median == pytest.approx(0.002)


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


def test_instruction_sets_that_were_not_asked_for_keep_their_rows(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def in_child(_: str, name: str, threads: str) -> dict[str, Any]:
        asked.append(name)
        row = {"instruction_set": name, "threads": int(threads), "dtype": "fp32", "window": 64, "limit_ms": 1.0}
        return {"rows": [row | {"median_ms": float(len(asked))}] if name != "neon" else []}

    monkeypatch.setattr(windows, "library", lambda: None)
    monkeypatch.setattr(windows, "in_child", in_child)
    machine.write_result("windows", windows.measure([], lambda _: None))
    assert (results / "windows.json").exists()
    rows = windows.measure(["avx2"], lambda _: None)["rows"]
    assert asked == ["avx512", "avx512", "avx2", "avx2", "neon", "neon", "avx2", "avx2"]
    assert [(row["instruction_set"], row["median_ms"]) for row in rows] == [
        ("avx512", 1), ("avx512", 2), ("avx2", 7), ("avx2", 8)
    ]  # fmt: skip


def test_memory_of_generating_is_judged_without_the_mapped_table() -> None:
    def size(length: int, own: float) -> dict[str, Any]:
        return {"length": length, "candidates": {"step": {"median_ms": 1.0, "peak_mib": length / 10, "own_mib": own}}}

    same = {name: {"median_ms": 1.0} for name in ("step", "cached", "products")}
    for own, met in ((51.0, True), (60.0, False)):
        result = {"sizes": [size(1024, 50.0), size(65536, own)], "as_it_is": same}
        (judged,) = (target for target in generate.targets(result) if "memory" in target.what)
        assert judged.met is met


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
        list(result["failed"]) == ["localattn, int8"] and "no layer to quantize" in result["failed"]["localattn, int8"]
    )
    assert set(result["candidates"]) == {f"localattn, fp32, {model.BODIES}", "local-attention, eager"}
    assert any(step.startswith("Failed: localattn, int8") for step in steps)
    tables.print_model(result)
    assert "no layer to quantize" in " ".join(capsys.readouterr().out.split())


def test_a_decoder_is_held_against_peers_of_its_precision_and_against_what_it_reads() -> None:
    def took(token: float, first: float, peak: int, **more: float) -> dict[str, float]:
        return {"token_ms": token, "first_s": first, "peak_mib": peak, **more}

    rows = [
        {
            "context": context,
            "candidates": {
                "ours": took(40, 2, 1000, over_rate=1.2),
                "ours_int4": took(30, 3, 500, over_rate=2.0),
                "genai": {"failed": "it did"},
                "genai_int4": took(20, 4, 300),
                "pytorch": took(50, 1, 4000),
            },
        }
        for context in (1024, 8192)
    ]
    found = {target.what: target.value for target in decoder.targets(rows)}
    assert found["a token after 1024 / the fastest peer's"] == 0.8
    assert found["the prompt after 8192 / the fastest peer's"] == 2.0
    assert found["int4, a token after 8192 / the fastest peer's"] == 1.5
    assert found["localattn, int4: a token after 1024 / its bytes at the measured rate"] == 2.0
    assert [name for name in found if "memory" in name] == ["memory after 8192 / PyTorch's"]


def test_a_decoder_that_does_not_run_is_a_row_like_others(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for made in ("model/config.json", "llama/model.gguf"):
        (tmp_path / made).parent.mkdir()
        (tmp_path / made).touch()
    np.save(tmp_path / "ours-1024.npy", np.zeros(3))
    for variable in (decoder.LLAMA, decoder.LLAMA_SOURCE):
        monkeypatch.setenv(variable, "somewhere")
    monkeypatch.setattr(decoder, "measured", lambda *words, **options: {"failed": "there is no node"})
    document = decoder.measure(decoder.SHAPES["gemma3"], tmp_path, [1024], ["llama"], lambda step: None)
    assert document["sizes"] == [{"context": 1024, "candidates": {"llama": {"failed": "there is no node"}}}]


def test_reasons_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    from localattn.benchmarks import report as tables

    reason = "[enforce fail at alloc.cpp] no [/tmp/m.onnx]"
    sizes = [{"length": 1024, "candidates": {"ours": {"failed": reason}}}]
    tables.print_hugging_face({"model": "a model", "labels": {"ours": "localattn"}, "sizes": sizes})
    peers = (
        run._setting()
        | machine.describe_machine()
        | {"targets": [], "cells": [row(Cell("non-causal", 64, 1024, "fp32", False))]}
    )
    peers["cells"][0]["candidates"]["gqa"] = {"skipped": reason}
    report.print_peers(peers)
    assert capsys.readouterr().out.count(reason) == 2
