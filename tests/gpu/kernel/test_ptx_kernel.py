"""The compiled kernel's numbers: the PTX of every target, run on a machine for PTX, against the float64 reference."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST
from localattn.plugins.kernel import compile
from localattn.plugins.kernel.compile import CompiledKernel, compile_kernel
from localattn.plugins.kernel.spec import KernelSpec, grid, pack_scalars
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.kernel.tiles import tile_for

from ...support.native.kernel_cases import DTYPES, Case, expected, geometries, judge, named, some_case
from ..simulators.ptx.launch import launch
from ..simulators.ptx.memory import GlobalMemory
from ..simulators.ptx.program import Program, PtxFault, read_program

pytest.importorskip("triton", reason="Triton compiles the kernel: pip install 'localattn[plugin]'")

# One target of each set of instructions; the others have the text of one of them.
DISTINCT = ("sm_80", "sm_90", "sm_100", "sm_110", "sm_120")
SAME_TEXT = {"sm_86": "sm_80", "sm_87": "sm_80", "sm_89": "sm_80", "sm_103": "sm_100"}
SPECS = [
    KernelSpec("fp16", 64),
    KernelSpec("bf16", 40, has_mask=True, has_bias=True),
    KernelSpec("fp16", 128, has_mask=True),
    KernelSpec("bf16", 256),
    KernelSpec("fp32", 24, has_bias=True),
]
KINDS = [
    WindowGeometry(40, 1, 0, causal=True, exact_windowsize=True),
    WindowGeometry(24, 2, 0, causal=True),
    WindowGeometry(24, 1, 2, exact_windowsize=True),
    WindowGeometry(40, 0, 1),
]


@cache
def compiled(spec: KernelSpec, target: str) -> tuple[CompiledKernel, Program]:
    kernel = compile_kernel(spec, TARGETS[target])
    return kernel, read_program(kernel.ptx)


def run(target: str, case: Case, tensors: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    """The output of a target's kernel."""
    return launched(*compiled(case.spec, target), case, tensors)[0]


def launched(
    kernel: CompiledKernel, program: Program, case: Case, tensors: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor, Counter[str]]:
    """The output of a launch as a driver launches it, NaN where nothing was written; and what was executed."""
    query = tensors[0]
    assert query is not None
    output = torch.full_like(query, torch.nan, dtype=DTYPES[case.spec.output_dtype])
    memory = GlobalMemory()
    inputs = [memory.put(x.contiguous().view(torch.uint8).numpy()) for x in tensors if x is not None]
    scalars = pack_scalars(case.attributes, case.length, case.heads, case.heads // case.group)
    executed = launch(
        program,
        memory,
        grid(kernel.tile, case.length, case.batch * case.heads),
        (kernel.threads, 1, 1),
        kernel.shared_bytes,
        [*inputs, *scalars, memory.put(output.view(torch.uint8).numpy())],
    )
    return output, executed


def case_of(spec: KernelSpec, geometry: WindowGeometry, seed: int) -> Case:
    """A call that this kernel serves; the rest is drawn."""
    drawn = some_case(geometry, seed)
    return replace(drawn, dtype=spec.dtype, head_dim=spec.head_dim, mask=spec.has_mask, bias=spec.has_bias)


GRID = [case_of(spec, kind, seed) for seed, spec in enumerate(SPECS) for kind in KINDS]
FULL_GRID = [
    case_of(KernelSpec(dtype, head_dim, mask, bias), geometry, seed)
    for seed, (dtype, head_dim, mask, bias, geometry) in enumerate(
        (dtype, head_dim, mask, bias, geometry)
        for dtype in ("fp16", "bf16", "fp32")
        for head_dim in (16, 40, 64, 128, 200, 256)
        for mask in (False, True)
        for bias in (False, True)
        for geometry in geometries(33)[:: 1 if head_dim == 64 else 7]
    )
]


@pytest.mark.parametrize("target", DISTINCT)
@pytest.mark.parametrize("case", GRID, ids=named)
def test_numbers(target: str, case: Case) -> None:
    tensors = case.tensors()
    judge(run(target, case, tensors), case, tensors)


ALL_KEYS = WindowGeometry.all_keys(causal=True)
RARE = [
    Case(KINDS[0], 150, 64, "fp16", heads=4, group=2, batch=2),
    Case(ALL_KEYS, 150, 64, "fp16", heads=2, group=2),
    Case(KINDS[3], 90, 40, "bf16", heads=4, group=4, mask=True, softcap=2.0),
    Case(KINDS[2], 90, 64, "fp16", heads=2, mask=True, sinks=True, perm=HEADS_FIRST),
    Case(KINDS[0], 90, 64, "fp16", xpos=20.0, mask=True, bias=True, shared_qk=True),
    Case(KINDS[2], 90, 128, "bf16", heads=1, xpos=12.0, perm=HEADS_FIRST),
    Case(WindowGeometry(2, 1, 0, causal=True), 90, 64, "fp16", heads=1, xpos=1.0),
    Case(KINDS[1], 70, 16, "fp32", heads=1, xpos=12.0, mask=True),
    Case(KINDS[0], 90, 64, "fp32", heads=1, mask=True, fp32_products="tf32x3"),
    Case(KINDS[2], 90, 32, "fp32", heads=1, fp32_products="tf32"),
    Case(KINDS[3], 70, 16, "fp32", heads=1, bias=True, shared_qk=True, fp32_products="tf32x3"),
]


@pytest.mark.parametrize(
    ("case", "target"),
    [
        pytest.param(case, target, id=f"{named(case)}-{target}", marks=[pytest.mark.slow] * (index % 5 != place))
        for index, case in enumerate(RARE)
        for place, target in enumerate(DISTINCT)
    ],
)
def test_shared_heads_all_keys_softcap_sinks_xpos_and_tensor_cores_for_fp32(case: Case, target: str) -> None:
    tensors = case.tensors()
    judge(run(target, case, tensors), case, tensors)


@pytest.mark.parametrize("target", DISTINCT)
@pytest.mark.parametrize(("head_dim", "dtype", "perm"), [(17, "fp16", SEQUENCE_FIRST), (250, "bf16", HEADS_FIRST)])
def test_heads_whose_rows_align_with_nothing(head_dim: int, dtype: str, perm: tuple[int, ...], target: str) -> None:
    case = Case(KINDS[2], 70, head_dim, dtype, heads=3, perm=perm)
    tensors = case.tensors()
    judge(run(target, case, tensors), case, tensors)


@pytest.mark.slow
@pytest.mark.parametrize("target", DISTINCT)
@pytest.mark.parametrize("case", FULL_GRID, ids=named)
def test_every_kernel(target: str, case: Case) -> None:
    tensors = case.tensors()
    judge(run(target, case, tensors), case, tensors)


@pytest.mark.parametrize(("target", "other"), SAME_TEXT.items())
def test_other_targets_have_the_same_text(target: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is made once. Here it is made for the target itself."""
    monkeypatch.setattr(compile, "OLDEST", TARGETS[target])
    for spec in SPECS[:2]:
        theirs, tile = compiled(spec, other)[0].ptx, tile_for(spec, TARGETS[target])
        mine = compile.compile_kernel(spec, TARGETS[target], tile).ptx
        mine, theirs = (re.sub(r"^\.version .*", "", text, flags=re.MULTILINE) for text in (mine, theirs))
        assert mine == theirs.replace(f".target {other}", f".target {target}")


def test_numbers_of_dgx_spark() -> None:
    """Its text differs from that of sm_120 in the order of a few instructions."""
    tensors = GRID[0].tensors()
    judge(run("sm_121", GRID[0], tensors), GRID[0], tensors)


@pytest.mark.parametrize("length", [1, 31, 63, 64, 65, 127, 128, 129])
def test_lengths_around_the_tiles(length: int) -> None:
    """Also: nothing outside of the tensors is read or written, which the machine would refuse."""
    case = Case(KINDS[0], length, 64, "fp16", batch=2, perm=HEADS_FIRST if length % 2 else SEQUENCE_FIRST)
    tensors = case.tensors()
    judge(run("sm_80", case, tensors), case, tensors)


def test_work_is_what_the_windows_need() -> None:
    """Matrix products: as many as there are tiles with visible keys. So time is linear, and nothing else is read."""
    window, found = 128, {}
    geometry = WindowGeometry(window, 1, 0, causal=True)
    for length in (512, 1024):
        case = Case(geometry, length, 64, "fp16", heads=1)
        kernel, program = compiled(KernelSpec("fp16", 64), "sm_80")
        executed = launched(kernel, program, case, case.tensors())[1]
        tile, tiles = kernel.tile, 0
        for start in range(0, length, tile.block_queries):
            low = max(0, start // window - 1) * window
            tiles += -(-(start + tile.block_queries - low) // tile.block_keys)
        # Of 16 × 8 × 16 each, in both products, by four warps.
        wanted = tiles * 2 * tile.block_queries * tile.block_keys * 64 // (16 * 8 * 16)
        found[length] = sum(count for opcode, count in executed.items() if opcode.startswith("mma"))
        assert found[length] == wanted
    assert found[1024] / found[512] == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("target", DISTINCT)
def test_shared_qk_and_a_negative_scale(target: str) -> None:
    for geometry in KINDS[:2]:
        case = Case(geometry, 90, 64, "fp16", shared_qk=True, scale=-0.3)
        tensors = case.tensors()
        judge(run(target, case, tensors), case, tensors)


def faulty(target: str, pattern: str, replacement: str) -> torch.Tensor:
    """What the kernel gives after a change to its text."""
    case = Case(KINDS[0], 150, 64, "fp16", batch=2)
    kernel, _ = compiled(KernelSpec("fp16", 64), target)
    text, changes = re.subn(pattern, replacement, kernel.ptx)
    assert changes
    return launched(kernel, read_program(text), case, case.tensors())[0]


@pytest.mark.parametrize(
    ("target", "pattern", "replacement", "message"),
    [
        ("sm_80", r"cp\.async\.wait_group\s+\d", "cp.async.wait_group 9", "waited for"),
        ("sm_80", r"bar\.sync\s+0;", "", "without a barrier"),
        ("sm_90", r"bar\.sync\s+0;", "", "without a barrier"),
        ("sm_90", r"wgmma\.wait_group\.sync\.aligned\s+0;", "", "product that was not waited for"),
        ("sm_90", r"(ld\.global\.v4[^;]*\+ )0 \]", r"\g<1>262144 ]", "in no tensor"),
        ("sm_80", r"(ld\.global\.v4[^;]*\+ )0 \]", r"\g<1>2 ]", "no multiple"),
        ("sm_100", r"tcgen05\.commit[^;]*;", "ret;", "threads of a warp, or blocks, disagree"),
        ("sm_100", r"waitLoop:\s*mbarrier[^;]*;\s*@!complete bra\.uni waitLoop;", "", "was not waited for"),
        ("sm_80", r"mma\.sync\.aligned\.m16n8k16", "mma.sync.aligned.m16n8k8", "has no mma"),
    ],
)
def test_faults_are_found(target: str, pattern: str, replacement: str, message: str) -> None:
    with pytest.raises(PtxFault, match=message):
        faulty(target, pattern, replacement)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"(mul\.f32\s+%r\d+, %r\d+, )0f3FB8AA3B", r"\g<1>0f3F800000"),  # log₂ e of the exponentials
        (r"\.x4\.trans\.", ".x4."),
        (r"shfl\.sync\.bfly\.b32\s+(%r\d+, %r\d+), 2,", r"shfl.sync.bfly.b32 \1, 1,"),
    ],
    ids=["constant", "transpose", "shuffle"],
)
def test_wrong_instructions_give_wrong_numbers(pattern: str, replacement: str) -> None:
    case = Case(KINDS[0], 150, 64, "fp16", batch=2)
    changed = faulty("sm_80", pattern, replacement)
    assert (changed - run("sm_80", case, case.tensors())).abs().max() > 0.01


def test_launches_that_a_driver_refuses() -> None:
    case = Case(KINDS[0], 64, 64, "fp16")
    kernel, program = compiled(KernelSpec("fp16", 64), "sm_80")
    memory = GlobalMemory()
    tensors = [memory.put(x.view(torch.uint8).numpy()) for x in case.tensors()[:3]]
    scalars = pack_scalars(case.attributes, case.length, case.heads)
    arguments = [*tensors, *scalars, tensors[0]]
    for block, given, message in (
        ((64, 1, 1), arguments, "needs blocks of 128 threads"),
        ((128, 1, 1), arguments[:-1], "takes 14 arguments, not 13"),
    ):
        with pytest.raises(PtxFault, match=message):
            launch(program, memory, (1, 2, 1), block, kernel.shared_bytes, given)
    with pytest.raises(PtxFault, match="outside of its"):
        launch(program, memory, (1, 2, 1), (128, 1, 1), kernel.shared_bytes - 16, arguments)


@pytest.mark.parametrize("target", DISTINCT)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_huge_scores_are_averages_too(dtype: str, target: str) -> None:
    """Compiled, the exponent is one multiply-add, whose two products of the largest score are rounded differently."""
    for size in {"fp16": (4e2, 6e3, 6e4), "bf16": (1e6, 1e18), "fp32": (1e6, 1e18)}[dtype]:
        case = Case(KINDS[0], 90, 64, dtype)
        query, key, value, *_ = case.tensors()
        query, key = (
            torch.clamp(x.float() * size, -6e4, 6e4).to(x) if dtype == "fp16" else x * size for x in (query, key)
        )
        output = run(target, case, (query, key, value, None, None))
        assert torch.isfinite(output).all()
        assert output.abs().max() <= value.abs().max() * 1.01
        # Of each row, the key of the largest score is all that counts.
        exact = expected(case, (query, key, value, None, None))
        assert np.median(np.abs(output.double().numpy() - exact)) < 0.01


@pytest.mark.parametrize("target", DISTINCT)
def test_a_row_of_lowest_biases_is_an_average(target: str) -> None:
    case = Case(KINDS[0], 90, 64, "fp16", bias=True)
    query, key, value, _, bias = case.tensors()
    tensors = query, key, value, None, torch.full_like(bias, -torch.inf)
    judge(run(target, case, tensors), case, tensors)
