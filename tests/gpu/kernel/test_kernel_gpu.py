"""The GPU benchmark, as far as a machine without a GPU can run it."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from localattn.benchmarks.gpu import __main__, candidates, driver, engines, ours, tune
from localattn.benchmarks.gpu import cases as gpu_cases
from localattn.benchmarks.gpu import check as gpu_check
from localattn.benchmarks.gpu import device as gpu_device
from localattn.benchmarks.gpu import measure as gpu_measure
from localattn.benchmarks.gpu.cases import Case, Device, Work, cases, floor_seconds, work
from localattn.benchmarks.gpu.driver import Arguments
from localattn.core.errors import MissingDependency
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST, NodeAttributes
from localattn.plugins.kernel.spec import KernelSpec, pack_scalars
from localattn.plugins.kernel.targets import TARGETS

from ...support import reference
from ..simulators.ptx.launch import launch
from ..simulators.ptx.memory import GlobalMemory
from ..simulators.ptx.program import read_program

pytest.importorskip("triton", reason="the benchmark runs the kernel: pip install 'localattn[plugin]'")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
ROOT = Path(__file__).resolve().parents[3]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_dry_run_lists_the_cases() -> None:
    finished = command("--dry-run", "--quick")
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[-1] == "8 cases" and len(lines) == 10 and lines[0] == "50 checks of numbers"
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
from benchmarks.gpu import __main__
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
    seen = candidates.visible(case, position[:, None], position[None, :]).numpy()
    assert np.array_equal(seen, case.geometry.visibility(position.numpy(), position.numpy(), 90))
    inputs = candidates.random_inputs(case, "cpu")
    dense = reference.windowed_attention(
        case.attributes, *(x.double().numpy() for x in (inputs.query, inputs.key, inputs.value))
    )
    np.testing.assert_allclose(candidates.reference(case, inputs, rows=20).numpy(), dense, atol=1e-5)
    by_sdpa = candidates.CANDIDATES["sdpa"].prepare(case, inputs)()
    np.testing.assert_allclose(by_sdpa.double().numpy(), dense, atol=5e-3)


def test_arguments_as_the_driver_reads_them() -> None:
    attributes = NodeAttributes(WindowGeometry(128, 1, 0, True, True), -0.125)
    scalars = pack_scalars(attributes, 1000, 8)
    packed = Arguments.pack([0x1000, 0x2000, 0x7FFF_FFFF_F000], scalars, 0x4000)
    read = [ctypes.cast(packed.pointers[i], ctypes.POINTER(type(v)))[0] for i, v in enumerate(packed.values)]
    assert read[:3] + read[-1:] == [0x1000, 0x2000, 0x7FFF_FFFF_F000, 0x4000]
    sizes = [ctypes.sizeof(type(v)) for v in packed.values]
    assert sizes == [8, 8, 8, *[4] * 10, 8]
    assert read[3:-1] == list(scalars) and scalars[7] < 0


class PtxDriver:
    """The part of the CUDA driver that the benchmark calls; launches go to a machine for PTX.

    Args:
        tensors: whose addresses launches get.
    """

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        images: list[bytes] = []
        sizes_of = {x.data_ptr(): x.numel() * x.element_size() for x in tensors if x is not None}
        output = tensors[0]
        assert output is not None

        def load(_module: Any, image: bytes) -> int:
            images.append(image)
            return 0

        def find(function: Any, _module: Any, entry: bytes) -> int:
            assert read_program(images[-1].rstrip(b"\0").decode()).entry == entry.decode()
            function._obj.value = len(images)
            return 0

        def start(function: Any, *rest: Any) -> int:
            *sizes, shared, stream, pointers, extra = rest
            assert (stream, extra) == (0x55, None)
            program, memory = read_program(images[function.value - 1].rstrip(b"\0").decode()), GlobalMemory()
            kinds = {64: ctypes.c_uint64, 32: ctypes.c_int32}
            values = [kinds[bits].from_address(pointers[i]).value for i, bits in enumerate(program.parameters.values())]
            for value, bits in zip(values, program.parameters.values(), strict=True):
                if bits == 64:
                    size = sizes_of.get(value, output.numel() * output.element_size())
                    memory.put(np.frombuffer((ctypes.c_ubyte * size).from_address(value), np.uint8), value)
            launch(program, memory, sizes[:3], sizes[3:], shared, values)
            return 0

        self.cuModuleLoadData, self.cuModuleGetFunction, self.cuLaunchKernel = load, find, start


@pytest.fixture
def ptx_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a machine for PTX the driver, for the tensors given."""

    def begin(*tensors: torch.Tensor | None) -> None:
        ours._loaded.cache_clear()
        monkeypatch.setattr(driver, "_open", lambda: PtxDriver(*tensors))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0x55))
    yield begin
    ours._loaded.cache_clear()


@pytest.mark.parametrize("exact", [False, True], ids=["block", "exact"])
def test_the_plugins_ptx_as_the_benchmark_launches_it(exact: bool, ptx_machine: Callable[..., None]) -> None:
    case = Case(True, exact, 24, 100, 64, "bf16")
    inputs = candidates.random_inputs(case, "cpu")
    ptx_machine(inputs.query)
    run = candidates.CANDIDATES["ptx"].prepare(case, inputs)
    difference = run().float() - candidates.reference(case, inputs)
    assert difference.abs().max() < 0.02 and difference.abs().max() > 0


CHECKS = [c for c in gpu_check.checks() if 1 < c.length < 150 and c.head_dim <= 64 and c.dtype != "fp32"]


@pytest.mark.parametrize("check", CHECKS[::4], ids=gpu_check.Check.describe)
def test_the_checks_of_the_benchmark(check: gpu_check.Check, ptx_machine: Callable[..., None]) -> None:
    call = check.call()
    held = [call.query, call.key, call.value, call.key_mask, call.attn_bias]
    ptx_machine(*held)
    with mock.patch.object(gpu_check.Check, "call", lambda self: call):
        found = gpu_check.run_check(check, ["ptx"], "cpu")
        assert found["agrees"] and found["errors"]["ptx"] > 0, found
        with mock.patch.object(gpu_check, "TOLERANCES", {check.dtype: 1e-9}):
            assert not gpu_check.run_check(check, ["ptx"], "cpu")["agrees"]
        with mock.patch.dict(gpu_check.WAYS, ptx=lambda _call: 1 / 0):
            failed = gpu_check.run_check(check, ["ptx"], "cpu")
    assert not failed["agrees"] and "ZeroDivisionError" in failed["errors"]["ptx"]


def test_checks_cover_every_option() -> None:
    found = list(gpu_check.checks())
    for name in ("mask", "bias", "shared_qk"):
        assert {getattr(check, name) for check in found} == {True, False}
    assert {check.dtype for check in found} == set(gpu_check.DTYPES)
    assert {check.perm for check in found} == {SEQUENCE_FIRST, HEADS_FIRST}
    assert {check.geometry for check in found} == set(gpu_check.WINDOWS)


@without_gpu
def test_candidates_say_why_not() -> None:
    block = Case(True, False, 64, 65536, 64, "fp16")
    assert "dense mask" in candidates.CANDIDATES["sdpa"].why_not(block)
    for name in ("cudnn", "flash"):
        assert candidates.CANDIDATES[name].why_not(block)
    with pytest.raises(MissingDependency, match="no GPU"):
        gpu_device.device_of_this_machine()


def test_what_is_wrong_is_reported() -> None:
    case = {"length": 4096, "window": 256}
    good, wrong = {"agrees": True, "max_error": 0.0}, {"agrees": False, "max_error": 0.5}
    results = [{**case, "candidates": {"kernel": good, "ptx": wrong, "cubin": {"failed": "RuntimeError: no"}}}]
    complaints = gpu_measure.ours_is_wrong(results)
    assert len(complaints) == 2 and complaints[0].startswith("ptx") and "RuntimeError: no" in complaints[1]
    assert gpu_measure.ours_is_wrong([{**case, "candidates": {"kernel": good, "flex": wrong}}]) == []


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot is drawn with matplotlib")
    from localattn.benchmarks.gpu.plot import draw

    entry = {"median_ms": 0.1, "agrees": True}
    results = [
        {**case.as_json(), "floor_ms": 0.01, "candidates": {"kernel": entry, "sdpa": {"skipped": "long"}}}
        for case in cases(quick=True)
    ]
    document = json.loads(json.dumps({"device": {"name": "a GPU"}, "cases": results}))
    path = draw(document, tmp_path / "images" / "gpu.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_engines_are_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "BACKENDS", {"no_such_module": "tensorrt"})
    assert engines.build_and_compare() == [{"status": "skipped", "what": "engines: TensorRT is not installed"}]


DEVICE = Device(1e12, 1e14, 1e12, "test")


def measured(case: Case, _device: Device) -> dict[str, Any]:
    """A row, as if measured: the kernel takes half the time of FlexAttention, and twice its floor."""
    floor = floor_seconds(work(case), DEVICE)[0] * 1e3
    entries = {"kernel": {"median_ms": 2 * floor, "roofline": 0.5, "agrees": True, "max_error": 0.0, "tflops": 1.0}}
    entries["flex"] = entries["kernel"] | {"median_ms": 4 * floor}
    return {**case.as_json(), "floor_ms": floor, "limit": "memory", "candidates": entries}


def test_a_run_that_ends_early_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The document is whole after every case; only what is missing is measured again; another GPU begins anew."""
    calls: list[Case] = []

    def measure(case: Case, device: Device) -> dict[str, Any]:
        if len(calls) in (3, 4):
            calls.append(case)
            raise KeyboardInterrupt
        calls.append(case)
        return measured(case, device)

    monkeypatch.setattr(__main__, "device_of_this_machine", lambda: ("a GPU", DEVICE))
    monkeypatch.setattr(__main__, "measure", measure)
    monkeypatch.setattr(__main__, "check_numbers", lambda: [{"what": "a call", "errors": {}, "agrees": True}])
    monkeypatch.setattr("localattn.benchmarks.gpu.engines.BACKENDS", {})
    options = ["--quick", "--output", str(tmp_path / "gpu.json"), "--plot", str(tmp_path / "gpu.png")]
    with pytest.raises(KeyboardInterrupt):
        __main__.main(options)
    assert len(json.loads((tmp_path / "gpu.json").read_text())["cases"]) == 3
    with pytest.raises(KeyboardInterrupt):
        __main__.main(options)
    assert __main__.main([*options, "--minutes", "0"]) == 0
    assert "5 of 8 cases are left" in capsys.readouterr().out
    assert __main__.main(options) == 0
    printed = capsys.readouterr().out
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert [case for case in calls if calls.count(case) == 1] and len(document["cases"]) == 8 and len(calls) == 10
    assert "not slower than the fastest other: 8 of 8" in printed
    assert "60% of the roofline from n 32768 on: 0 of 4" in printed
    assert document["engines"] == [{"status": "skipped", "what": "engines: TensorRT is not installed"}]
    monkeypatch.setattr(__main__, "device_of_this_machine", lambda: ("another GPU", DEVICE))
    assert __main__.main([*options, "--minutes", "-1"]) == 0
    assert "another device: it is begun anew" in capsys.readouterr().out


def test_wrong_numbers_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "device_of_this_machine", lambda: ("a GPU", DEVICE))
    monkeypatch.setattr(
        __main__, "check_numbers", lambda: [{"what": "a call", "errors": {"ptx": 1.0}, "agrees": False}]
    )
    paths = ["--output", str(tmp_path / "gpu.json"), "--plot", str(tmp_path / "gpu.png")]
    assert __main__.main([*paths, "--minutes", "-1", "--no-engines"]) == 1


def test_tiles_to_try() -> None:
    found = list(tune.tiles())
    assert len(set(found)) == len(found) > 20
    spec, target = KernelSpec("fp16", 64), TARGETS["sm_90"]
    assert tune.why_skipped(spec, target, tune.Tile(64, 64, 4, 2)) == ""
    assert "shared memory" in tune.why_skipped(spec, TARGETS["sm_80"], tune.Tile(128, 128, 8, 5))
    assert {case.length for case in tune.cases_for(spec, [64, 256])} == {tune.LENGTH}


@without_gpu
def test_tuning_without_a_gpu_says_so() -> None:
    finished = subprocess.run([sys.executable, "-m", "benchmarks.gpu.tune"], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 3 and "no GPU" in finished.stderr
