"""The GPU benchmark, as far as a machine without a GPU can run it."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from localattn.benchmarks import gpu, gpu_candidates, gpu_cases, gpu_engines
from localattn.benchmarks.gpu_cases import Case, Device, Work, cases, floor_seconds, work
from localattn.benchmarks.gpu_driver import Arguments
from localattn.core.errors import MissingDependency
from localattn.core.geometry import WindowGeometry
from localattn.core.node import NodeAttributes
from localattn.plugins.kernel.spec import pack_scalars

from . import reference

pytest.importorskip("triton", reason="the benchmark runs the kernel: pip install 'localattn[plugin]'")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
ROOT = Path(__file__).resolve().parents[1]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_dry_run_lists_the_cases() -> None:
    finished = command("--dry-run", "--quick")
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[-1] == "8 cases" and len(lines) == 9
    assert "non-causal block-local, window 256" in lines[-2] and "kernel, ptx, cubin, flex" in lines[-2]


@without_gpu
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    finished = command("--quick", "--output", str(tmp_path / "gpu.json"))
    assert finished.returncode == 3
    assert "no GPU" in finished.stderr and "--dry-run" in finished.stderr
    assert not list(tmp_path.iterdir())


def test_it_runs_from_a_tree_that_is_not_installed() -> None:
    code = f"""
import importlib.util, sys
sys.path.insert(0, {str(ROOT)!r})
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "localattn" else found(name, *rest)
from benchmarks import gpu
import localattn
print(localattn.__path__)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(ROOT) in finished.stdout


def test_the_grid() -> None:
    grid = cases(quick=False)
    assert len(set(grid)) == len(grid)
    assert {c.window for c in grid} == {64, 128, 256, 512, 1024} and {c.head_dim for c in grid} == {64, 128}
    assert {c.length for c in grid} == set(gpu_cases.LENGTHS) and {c.dtype for c in grid} == {"fp16", "bf16"}
    assert {(c.causal, c.exact) for c in grid} == {(a, b) for a in (True, False) for b in (True, False)}


def test_roofline() -> None:
    case = Case(True, False, 256, 8192, 64, "fp16")
    needed = work(case)
    keys = np.mean([min(t + 1, t % 256 + 1 + 256) for t in range(8192)])
    assert needed.operations == pytest.approx(4 * 8 * 8192 * 64 * keys)
    assert needed.bytes == 4 * 2 * 8 * 8192 * 64
    assert needed.exponentials == pytest.approx(8 * 8192 * keys)
    seconds, limit = floor_seconds(needed, Device(4.8e12, 989e12, 1e18, "test"))
    assert limit == "memory" and seconds == pytest.approx(33.55e6 / 4.8e12, rel=1e-3)
    assert floor_seconds(Work(2e12, 1, 1), Device(1e12, 1e12, 1e12, "test")) == (2.0, "matrix products")
    assert floor_seconds(Work(1, 1, 3e12), Device(1e12, 1e12, 1e12, "test")) == (3.0, "exponentials")


def test_data_sheets() -> None:
    h200 = gpu_cases.data_sheet("NVIDIA H200", 132, 1.98e9)
    assert h200 is not None and h200.exponentials == 16 * 132 * 1.98e9
    pcie = gpu_cases.data_sheet("NVIDIA H100 PCIe", 114, 1.7e9)
    assert pcie is not None and pcie.bandwidth == 2.0e12
    assert gpu_cases.data_sheet("Some other GPU", 1, 1.0) is None


@pytest.mark.parametrize("causal", [False, True], ids=["open", "causal"])
@pytest.mark.parametrize("exact", [False, True], ids=["block", "exact"])
def test_visibility_and_reference_of_the_benchmark(causal: bool, exact: bool) -> None:
    case = Case(causal, exact, 16, 90, 16, "fp16")
    position = torch.arange(90)
    seen = gpu_candidates.visible(case, position[:, None], position[None, :]).numpy()
    assert np.array_equal(seen, case.geometry.visibility(position.numpy(), position.numpy(), 90))
    inputs = gpu_candidates.random_inputs(case, "cpu")
    dense = reference.windowed_attention(
        case.attributes, *(x.double().numpy() for x in (inputs.query, inputs.key, inputs.value))
    )
    np.testing.assert_allclose(gpu_candidates.reference(case, inputs, rows=20).numpy(), dense, atol=1e-5)
    by_sdpa = gpu_candidates.CANDIDATES["sdpa"].prepare(case, inputs)()
    np.testing.assert_allclose(by_sdpa.double().numpy(), dense, atol=5e-3)


def test_arguments_as_the_driver_reads_them() -> None:
    attributes = NodeAttributes(WindowGeometry(128, 1, 0, True, True), -0.125)
    scalars = pack_scalars(attributes, 1000, 8)
    packed = Arguments.pack([0x1000, 0x2000, 0x7FFF_FFFF_F000], scalars, 0x4000)
    read = [ctypes.cast(packed.pointers[i], ctypes.POINTER(type(v)))[0] for i, v in enumerate(packed.values)]
    assert read[:3] + read[-1:] == [0x1000, 0x2000, 0x7FFF_FFFF_F000, 0x4000]
    sizes = [ctypes.sizeof(type(v)) for v in packed.values]
    assert sizes == [8, 8, 8, *[4] * 7, 8]
    assert read[3:-1] == list(scalars) and scalars[-1] < 0


@without_gpu
def test_candidates_say_why_not() -> None:
    block = Case(True, False, 64, 65536, 64, "fp16")
    assert "dense mask" in gpu_candidates.CANDIDATES["sdpa"].why_not(block)
    for name in ("cudnn", "flash"):
        assert gpu_candidates.CANDIDATES[name].why_not(block)
    with pytest.raises(MissingDependency, match="no GPU"):
        gpu.device_of_this_machine()


def test_what_is_wrong_is_reported() -> None:
    case = {"length": 4096, "window": 256}
    good, wrong = {"agrees": True, "max_error": 0.0}, {"agrees": False, "max_error": 0.5}
    results = [{**case, "candidates": {"kernel": good, "ptx": wrong, "cubin": {"failed": "RuntimeError: no"}}}]
    complaints = gpu.ours_is_wrong(results)
    assert len(complaints) == 2 and complaints[0].startswith("ptx") and "RuntimeError: no" in complaints[1]
    assert gpu.ours_is_wrong([{**case, "candidates": {"kernel": good, "flex": wrong}}]) == []


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot is drawn with matplotlib")
    from localattn.benchmarks.gpu_plot import draw

    entry = {"median_ms": 0.1, "agrees": True}
    results = [
        {**case.as_json(), "floor_ms": 0.01, "candidates": {"kernel": entry, "sdpa": {"skipped": "long"}}}
        for case in cases(quick=True)
    ]
    document = json.loads(json.dumps({"device": {"name": "a GPU"}, "cases": results}))
    path = draw(document, tmp_path / "images" / "gpu.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_engines_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engines, "BACKENDS", {"no_such_module": "tensorrt"})
    assert gpu_engines.build_and_compare() == [{"status": "skipped", "what": "engines: TensorRT is not installed"}]
