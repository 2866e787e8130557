"""`localattn bench`: its statistics, its processes, and the command on real files."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from localattn.core.documents.bench_report import BUSY, OTHERS, BenchReport, Ratio
from localattn.core.errors import CheckFailed, UsageError
from localattn.core.tensors import TensorSpec
from localattn.reports.bench.tables import comparison_text
from localattn.runtime.bench import statistics
from localattn.runtime.bench.inputs import Sizes, sizes_of
from localattn.runtime.bench.measure import run_bench
from localattn.runtime.bench.process import WorkerProcess
from localattn.runtime.bench.request import BenchRequest, labels


def save(path: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}'), path)
    return path


def chain(path: Path, products: int, shape: str = "64, 192", width: int = 192) -> Path:
    """A model of so many matrix products in a row."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[{shape}] x) => (float[{shape}] y{products}) {{'
        + "".join(f"y{i + 1} = MatMul({f'y{i}' if i else 'x'}, w)\n" for i in range(products))
        + "}"
    )
    weight = np.eye(width, dtype=np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, path)
    return path


# --- statistics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(6, 1), (8, 1), (9, 2), (12, 3), (20, 6), (40, 14)])
def test_the_intervals_ends_are_the_sign_tests(n, k):
    # Tables of the sign test: k is the largest with 2·P(Bin(n, ½) < k) ≤ 0.05.
    assert statistics.median_interval([float(i) for i in range(n)]) == (k - 1, n - k)
    below = sum(math.comb(n, i) for i in range(k)) / 2**n
    assert 2 * below <= 0.05 < 2 * (below + math.comb(n, k) / 2**n)


def test_too_few_rounds_give_no_interval():
    assert statistics.median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    ratio = statistics.paired_ratio("a", [1.0], [2.0])
    assert (ratio.value, ratio.low, ratio.verdict) == (0.5, None, "too few rounds")


@pytest.mark.parametrize("n", [6, 12, 30])
def test_the_interval_holds_the_median_as_often_as_it_says(n):
    draws = np.random.default_rng(n).exponential(size=(4000, n))  # far from normal, as latencies are
    held = [low <= math.log(2) <= high for low, high in map(statistics.median_interval, draws.tolist())]
    assert np.mean(held) > 0.95 - 3 * math.sqrt(0.95 * 0.05 / 4000)


def test_what_slows_a_whole_round_cancels_out():
    random = np.random.default_rng(0)
    noise = random.uniform(1, 5, 12)
    first = 10 * noise
    second = 12 * noise * random.uniform(0.99, 1.01, 12)
    ratio = statistics.paired_ratio("first", second.tolist(), first.tolist())
    assert 1.18 < ratio.low <= ratio.value <= ratio.high < 1.22
    assert ratio.verdict == "slower"
    assert statistics.spread(first.tolist()) > 0.5


def test_verdicts():
    assert Ratio(against="", value=0.8, low=0.7, high=0.9).verdict == "faster"
    assert Ratio(against="", value=0.9, low=0.7, high=1.01).verdict == "no difference shown"


def test_a_busy_machine_gets_no_verdict():
    calm = statistics.paired_ratio("a", [1.0] * 12, [2.0] * 12)
    busy = statistics.paired_ratio("a", [1.0] * 12, [2.0] * 12, busy=True)
    assert calm.verdict == "faster" and (calm.low, calm.high) == (0.5, 0.5)
    assert busy.verdict == "withheld: machine busy" and (busy.value, busy.low, busy.high) == (0.5, None, None)
    assert statistics.busy_share([0.0, OTHERS, OTHERS + 0.01, 1.0]) == 0.5
    assert statistics.busy_share([]) is None, "the system does not tell"


def test_figures_of_samples():
    samples = np.random.default_rng(1).gamma(2, 3, 1000)
    figures = statistics.latency(samples, (99, 50))
    assert list(figures.percentiles) == ["p50", "p99"]
    assert figures.percentiles["p99"] == np.percentile(samples, 99)
    assert figures.std == pytest.approx(np.std(samples, ddof=1))
    bins = statistics.histogram(samples)
    assert sum(bins.counts) + bins.beyond == 1000 and bins.beyond == 10
    assert len(bins.edges) == len(bins.counts) + 1 and bins.edges == sorted(bins.edges)


@pytest.mark.parametrize("count", [1, 50])
def test_equal_samples_have_a_histogram(count):
    bins = statistics.histogram(np.full(count, 2.5))
    assert sum(bins.counts) == count and bins.beyond == 0
    assert statistics.latency(np.full(count, 2.5), (50,)).std == 0


def test_drift_compares_the_first_rounds_with_the_last():
    assert statistics.drift([3, 3, 2, 2, 2, 2]) == pytest.approx(0.5)
    assert statistics.drift([3, 2]) == 0


# --- what is measured ---------------------------------------------------------------------------------------


def test_candidates_are_every_combination_and_their_labels_tell_what_differs():
    request = BenchRequest((Path("a/m.onnx"), Path("b/m.onnx")), threads=(1, 2))
    listed = request.candidates()
    assert list(labels(listed).values()) == [
        "a/m.onnx, 1 thread", "a/m.onnx, 2 threads", "b/m.onnx, 1 thread", "b/m.onnx, 2 threads"
    ]  # fmt: skip
    assert [listed.index(candidate.compared_with(listed)) for candidate in listed[1:]] == [0, 0, 1]
    assert list(labels(listed[:1]).values()) == ["m.onnx"]


def test_an_engine_beside_onnx_files_takes_no_threads_and_no_provider():
    request = BenchRequest((Path("m.onnx"), Path("m.engine")), providers=("cpu", "cuda"), threads=(2,))
    listed = request.candidates()
    assert [(c.model.name, c.provider, c.threads) for c in listed] == [
        ("m.onnx", "cpu", 2), ("m.onnx", "cuda", 2), ("m.engine", "auto", None)
    ]  # fmt: skip
    assert listed[2].compared_with(listed) == listed[0]
    # Alone it is asked for what was asked, and refuses it itself.
    assert BenchRequest((Path("m.engine"),), threads=(2,)).candidates()[0].threads == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"models": ()},
        {"models": (Path("a"), Path("a"))},
        {"models": (Path("a"),), "percentiles": (0.0,)},
        {"models": (Path("a"),), "percentiles": (101.0,)},
        {"models": (Path("a"),), "duration": float("nan")},
        {"models": (Path("a"),), "seq_lens": (4,), "inputs": Path("x.npz")},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(UsageError):
        BenchRequest(**wrong)


def test_sizes_of_open_and_fixed_axes():
    opened = [TensorSpec("tokens", "int64", ("batch_size", "sequence_length"))]
    assert sizes_of(Path("m"), opened, None, 3, 128) == Sizes(3, 128)
    with pytest.raises(UsageError, match="The batch of m is dynamic"):
        sizes_of(Path("m"), opened, None, None, 128)
    fixed = [TensorSpec("tokens", "int64", (1, 64))]
    assert sizes_of(Path("m"), fixed, None, None, None).tokens is None
    with pytest.raises(UsageError, match="no dynamic axis"):
        sizes_of(Path("m"), fixed, None, None, 128)


def test_more_work_is_slower_and_every_round_has_each_once(tmp_path):
    short, long = chain(tmp_path / "short.onnx", 40), chain(tmp_path / "long.onnx", 160)
    steps: list[str] = []
    request = BenchRequest((short, long), providers=("cpu",), threads=(1,), duration=0.6, warmup_ms=20)
    report = run_bench(request, steps.append)
    turns = [step.split(": ")[1] for step in steps if step.startswith("Round")]
    rounds = [turns[index : index + 2] for index in range(0, len(turns), 2)]
    assert len(rounds) == 12 and all(sorted(pair) == ["long.onnx", "short.onnx"] for pair in rounds)
    assert len({tuple(pair) for pair in rounds}) == 2, "the order changes"
    first, second = report.rows
    assert first.ratio is None and second.ratio.against == "short.onnx"
    # Four times the work.
    assert second.ratio.verdict == "slower" or second.ratio.busy
    assert second.ratio.value > 1
    for row in report.rows:
        assert row.bound and row.backend == "onnxruntime" and row.provider == "cpu"
        assert row.calls >= 10 and len(row.rounds_ms) == 12
        assert row.latency.min <= row.latency.percentiles["p50"] <= row.latency.percentiles["p99"] <= row.latency.max
        assert row.runs_per_s == pytest.approx(1e3 / row.latency.mean)
        assert row.tokens_per_s is None, "no sidecar tells the tokens"
    assert BenchReport.model_validate_json(report.to_json()) == report


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system does not tell who uses the processors")
def test_under_load_the_verdict_is_withheld(tmp_path):
    """Processes that spin on every processor: the ratio stays, without an interval that may exclude the truth."""
    short, long = chain(tmp_path / "short.onnx", 40), chain(tmp_path / "long.onnx", 80)
    request = BenchRequest((short, long), providers=("cpu",), threads=(1,), duration=0.3, warmup_ms=0, iterations=6)
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        report = run_bench(request)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    first, second = report.rows
    assert first.busy > BUSY and second.busy > BUSY and first.others > OTHERS
    assert second.ratio.busy and second.ratio.low is None and second.ratio.value > 0
    assert second.ratio.verdict == "withheld: machine busy"
    assert any("Other programs used the processors" in line for line in report.warnings)
    assert "no verdict" in comparison_text(second.label, second.ratio)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's memory")
def test_peak_memory_is_what_the_model_holds(tmp_path):
    """64 MiB go in and 64 come out, and nothing else is large."""
    mib = 1 << 20
    model = save(tmp_path / "m.onnx", f"g (float[{16 * mib}] x) => (float[{16 * mib}] y) {{ y = Add(x, x) }}")
    report = run_bench(BenchRequest((model,), providers=("cpu",), duration=0, rounds=1, iterations=2, warmup_ms=0))
    memory = report.rows[0].memory
    assert memory.loaded < 32 * mib
    assert 128 * mib <= memory.peak < 220 * mib  # reading the file holds its bytes beside the array for a moment


def test_the_bound_call_computes_what_the_session_does(tmp_path):
    from localattn.runtime.bench.calls import ready_call
    from localattn.runtime.session import load

    text = "g (float[n, 4] x, int64[n] i) => (float[n, 4] y, bool[n] b) { y = Exp(x) z = Mul(i, i) b = Greater(z, i) }"
    session = load(save(tmp_path / "m.onnx", text), "cpu")
    bindings: list = []
    run_bound = session.run_bound
    session.run_bound = lambda binding: bindings.append(binding) or run_bound(binding)  # type: ignore[method-assign]
    inputs = {"x": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32), "i": np.arange(3)}
    call, bound = ready_call(session, inputs)
    assert bound
    before = bindings[-1].get_outputs()  # kept, so that their memory cannot be given out again
    for _ in range(3):
        call()
    results = bindings[-1].get_outputs()
    assert [v.data_ptr() for v in results] == [v.data_ptr() for v in before], "a call allocates its outputs"
    for value, expected in zip(results, session.run(inputs).values(), strict=True):
        np.testing.assert_array_equal(value.numpy(), expected)


def test_a_dead_process_is_said_to_be_dead(tmp_path):
    with WorkerProcess("model.onnx") as process:
        process.ask("open", model=str(chain(tmp_path / "m.onnx", 1)), provider="cpu", threads=1, cuda_graph=False,
                    profile=None)  # fmt: skip
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(CheckFailed, match="failed during") as raised:
            process.ask("end")
    assert "memory" in raised.value.why


def test_half_an_answer_is_one_of_a_dead_process(monkeypatch):
    half = "import os, signal; input(); os.write(1, b'{\"nanoseconds\": [1, 2'); os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr("localattn.runtime.bench.process._START", half)
    with WorkerProcess("model.onnx") as process, pytest.raises(CheckFailed, match="failed during") as raised:
        process.ask("turn", seconds=1.0, calls=1)
    assert "memory" in raised.value.why


def test_a_process_that_leaves_another_behind_is_dead(monkeypatch, tmp_path):
    """The other one holds its pipes: their end never comes."""
    left = tmp_path / "left"
    leaving = f"""
import os, signal, time
input()
if os.fork() == 0:
    open({str(left)!r} + ".new", "w").write(str(os.getpid()))
    os.rename({str(left)!r} + ".new", {str(left)!r})
    time.sleep(60)
    os._exit(0)
while not os.path.exists({str(left)!r}):
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    monkeypatch.setattr("localattn.runtime.bench.process._START", leaving)
    with WorkerProcess("model.onnx") as process, pytest.raises(CheckFailed, match="failed during") as raised:
        process.ask("turn", seconds=1.0, calls=1)
    os.kill(int(left.read_text()), signal.SIGKILL)
    assert "SIGSEGV" in raised.value.why


def test_values_the_engine_refuses_are_an_error_with_a_reason(tmp_path, localattn):
    text = "g (int64[1, 3] tokens) => (float[1, 3, 2] y) <float[4, 2] w = {0,1,2,3,4,5,6,7}> { y = Gather(w, tokens) }"
    model = save(tmp_path / "m.onnx", text)
    np.savez(tmp_path / "x.npz", tokens=np.full((1, 3), 9))
    done = localattn("bench", model, "--load-inputs", tmp_path / "x.npz")
    assert done.code == 2 and "did not run" in done.err
    assert localattn("bench", model).code == 2, "no vocabulary is known"


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A tiny LocalTransformer, exported with dynamic axes."""
    from localattn.exporter.export import ExportRequest, export

    from ...conftest import TINY, save_upstream

    folder = tmp_path_factory.mktemp("bench")
    checkpoint = save_upstream(folder, "local_attention.LocalTransformer", TINY)
    export(ExportRequest(checkpoint, folder / "tiny.onnx", dynamic=("batch", "seq")))
    return folder / "tiny.onnx"


QUICK = ("--duration", "0.05", "--rounds", "6", "--warmup", "0", "--iterations", "6")


def test_json_is_all_that_stdout_holds(exported, localattn):
    done = localattn("bench", exported, *QUICK, "--seq-len", "16,32", "--batch", 3, "--format", "json", "--threads", 1)
    assert done.code == 0
    report = json.loads(done.out)
    assert [row["label"] for row in report["rows"]] == ["tiny.onnx, n=16", "tiny.onnx, n=32"]
    assert [(row["batch"], row["seq_len"]) for row in report["rows"]] == [(3, 16), (3, 32)]
    for row in report["rows"]:
        assert row["tokens_per_s"] == pytest.approx(row["runs_per_s"] * row["batch"] * row["seq_len"])
    assert report["format"] == "localattn-bench" and report["format_version"] == 1
    assert str(exported.parent) not in done.out, "no paths of this machine"


def test_every_rendering_has_the_same_figures(exported, localattn, tmp_path):
    from localattn.reports.bench.page import bench_page
    from localattn.reports.bench.tables import bench_markdown, tables

    other = shutil.copy(exported, tmp_path / "other.onnx")
    done = localattn(
        "bench", exported, "--against", other, *QUICK, "--batch", 1, "-o", tmp_path / "r.json", "--profile"
    )
    # The copy has no sidecar: its tokens are drawn as the first one's, and its length must be given.
    assert done.code == 2 and "--seq-len" in done.err
    done = localattn("bench", exported, "--against", other, *QUICK, "--batch", 1, "--seq-len", 32, "-o",
                     tmp_path / "r.json", "--profile")  # fmt: skip
    assert (done.code, done.out) == (0, "")
    report = BenchReport.model_validate_json((tmp_path / "r.json").read_text())
    page, text = bench_page(report), bench_markdown(report)
    for table in tables(report):
        assert table.rows
        for row in table.rows:
            for cell in row:
                assert cell in page and cell.replace("_", r"\_") in text
    assert len(report.profiles) == 2 and "By operator" in page and "By operator" in text
    for profile in report.profiles:
        assert profile.named == pytest.approx(1), "every node of an export knows its module"
        assert profile.node_ms <= profile.run_ms
        assert any(share.name.endswith("attn_fn") for share in profile.modules)
        for shares in (profile.modules, profile.patterns, profile.operators):
            assert sum(share.share for share in shares) == pytest.approx(1)


@pytest.mark.parametrize("suffix", ["md", "html"])
def test_a_file_takes_its_format_from_its_name(exported, localattn, tmp_path, suffix):
    path = tmp_path / f"report.{suffix}"
    done = localattn("bench", exported, *QUICK, "-o", path)
    assert done.code == 0 and "Latency and throughput" in done.out
    assert path.read_text().startswith("<!DOCTYPE html>" if suffix == "html" else "## Benchmark")
    before = path.read_bytes()
    assert localattn("bench", exported, *QUICK, "-o", path).code == 2
    assert path.read_bytes() == before
    assert localattn("bench", exported, *QUICK, "-o", tmp_path / "report.txt").code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seq-len", "65"), "longer than"),
        (("--seq-len", "x"), "not understood"),
        (("--threads", "0"), "not understood"),
        (("--cuda-graph",), "CUDA graph"),
        (("--provider", "nonsense"), "no provider"),
        (("--against", "missing.onnx"), "no such file"),
    ],
)
def test_what_does_not_apply_is_refused(exported, localattn, arguments, message):
    done = localattn("bench", exported, *QUICK, *arguments)
    assert done.code == 2 and message in done.err and done.out == ""


def test_a_provider_that_is_not_here_ends_with_its_exit_code(exported, localattn):
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    assert localattn("bench", exported, *QUICK, "--provider", "cpu,cuda").code == 3


def test_a_missing_template_engine_is_told_before_the_measurement(exported, localattn, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = localattn("bench", exported, *QUICK, "-o", tmp_path / "r.html")
    assert done.code == 3 and "Jinja2" in done.err and list(tmp_path.iterdir()) == []


def test_models_compared_at_different_sizes_are_pointed_out(exported, localattn, tmp_path):
    other = shutil.copy(exported, tmp_path / "other.onnx")
    from localattn.core.documents.sidecar import read_sidecar, sidecar_path

    sidecar = read_sidecar(exported)
    sidecar_path(tmp_path / "other.onnx").write_text(sidecar.model_copy(update={"batch": sidecar.batch + 1}).to_json())
    done = localattn("bench", exported, "--against", other, *QUICK)
    assert done.code == 0 and "different sizes" in done.err
