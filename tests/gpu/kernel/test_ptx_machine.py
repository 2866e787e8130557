"""The machine for PTX: what its instructions compute, and the faults it must find, on programs written by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ..simulators.ptx import blocks
from ..simulators.ptx.launch import launch
from ..simulators.ptx.memory import GlobalMemory
from ..simulators.ptx.program import PtxFault, read_program
from ..simulators.ptx.wgmma import offsets, swizzled

THREADS = 64


def program(body: str, registers: str = "", threads: int = THREADS) -> str:
    """A kernel of one argument, `%rd0`; the address of a thread's own result is `%rd1`."""
    return f"""
.version 8.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry test(
    .param .u64 .ptr .global .align 1 test_param_0
)
.reqntid {threads}
{{
    .reg .pred %p<10>;
    .reg .b16 %rs<10>;
    .reg .b32 %r<40>;
    .reg .b64 %rd<10>;
    {registers}
    ld.param.b64 %rd0, [test_param_0];
    mov.u32 %r0, %tid.x;  // a comment; with a semicolon
    mad.wide.s32 %rd1, %r0, 8, %rd0;
    mov.b32 %r30, global_smem;
    {body}
    ret;
}}"""


def run(body: str, registers: str = "", rows: int = 1, shared: int = 4096) -> np.ndarray:
    """The eight bytes that each thread of the last block wrote, `[threads]` of uint64."""
    memory, results = GlobalMemory(), np.zeros(THREADS, np.uint64)
    address = memory.put(results)
    launch(read_program(program(body, registers)), memory, (1, rows, 1), (THREADS, 1, 1), shared, [address])
    return results


def bits(value: float) -> str:
    """`0f…`, as PTX writes an fp32 number."""
    return "0f" + struct.pack(">f", value).hex().upper()


def one(line: str) -> int:
    """What a line leaves in `%r1`, of thread 5."""
    return int(run(f"{line}\n mov.b32 %r2, 0;\n st.global.v2.b32 [%rd1], {{%r1, %r2}};")[5])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("div.s32 %r1, -7, 2;", -3),
        ("prmt.b32 %r1, 0x33221100, 0x77665544, 0x6240U;", 0x66224400),
        (f"cvt.rz.f16.f32 %rs1, {bits(-2049.9)}; cvt.u32.u16 %r1, %rs1;", 0xE800),
        (f"cvt.rn.satfinite.e4m3x2.f32 %rs1, {bits(450)}, {bits(-1)}; cvt.u32.u16 %r1, %rs1;", 0x7EB8),
        ("mov.b32 %r2, 0x4C404C50; cvt.rn.satfinite.e4m3x2.f16x2 %rs1, %r2; cvt.u32.u16 %r1, %rs1;", 0x5859),
        (f"cvt.rn.satfinite.e4m3x2.f32 %rs1, {bits(448)}, {bits(-1)}; cvt.rn.f16x2.e4m3x2 %r1, %rs1;", 0x5F00BC00),
        ("rem.s32 %r1, -7, 2;", -1),
        ("shl.b32 %r1, 1, 40;", 0),
        ("shl.b32 %r1, 3, 31;", -(2**31)),
        ("shr.u32 %r1, -1, 28;", 15),
        ("shr.s32 %r1, -16, 2;", -4),
        ("shr.s32 %r1, -16, 99;", -1),
        ("bfe.u32 %r1, 0xF0A5, 4, 8;", 0x0A),
        ("bfe.s32 %r1, 0x80, 4, 4;", -8),
        ("mul.lo.s32 %r1, 0x10001, 0x10001;", 0x20001),
        ("mad.lo.s32 %r1, %r0, -3, 100;", 85),
        ("setp.lt.u32 %p1, -1, 3; selp.b32 %r1, 1, 2, %p1;", 2),
        ("setp.lt.s32 %p1, -1, 3; selp.b32 %r1, 1, 2, %p1;", 1),
        ("mov.b32 %r1, 7; setp.eq.b32 %p1, %r0, 6; @%p1 mov.b32 %r1, 8;", 7),
        ("mov.b32 %r1, 7; setp.eq.b32 %p1, %r0, 6; @!%p1 mov.b32 %r1, 8;", 8),
        ("mov.b32 %r3, 0x12345678; mov.b32 {%rs1, %rs2}, %r3; mov.b32 %r1, {%rs2, %rs1};", 0x56781234),
        ("cvt.u16.u32 %rs1, %r0; shl.b16 %rs2, %rs1, 2; cvt.u32.u16 %r1, %rs2;", 20),
        ("mov.b32 %r3, 0x1FFFE; cvt.u32.u16 %r1, %r3;", 0xFFFE),
        ("min.s32 %r1, %r0, -2;", -2),
        ("max.s32 %r1, %r0, 3;", 5),
    ],
)
def test_integers(line: str, expected: int) -> None:
    assert one(line) == expected % 2**32


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"fma.rn.f32 %r1, {bits(3.0)}, {bits(0.5)}, {bits(-1.0)};", 0.5),
        # One rounding: 1 + 2⁻²⁴ squared is 1 + 2⁻²³ + 2⁻⁴⁸, of which the last digit is not lost before the sum.
        (f"fma.rn.f32 %r1, {bits(1 + 2**-23)}, {bits(1 - 2**-23)}, {bits(-1.0)};", -(2.0**-46)),
        (f"max.f32 %r1, 0f7FC00000, {bits(-2.0)};", -2.0),
        (f"max.f32 %r1, {bits(1.0)}, {bits(-2.0)}, {bits(4.0)};", 4.0),
        (f"ex2.approx.ftz.f32 %r1, {bits(-3.0)};", 0.125),
        ("ex2.approx.ftz.f32 %r1, 0fFF800000;", 0.0),
        (f"ex2.approx.ftz.f32 %r1, {bits(-130.0)};", 0.0),
        (f"div.full.f32 %r1, {bits(1.0)}, {bits(4.0)};", 0.25),
        (f"neg.f32 %r3, {bits(2.0)}; abs.f32 %r1, %r3;", 2.0),
        (f"cvt.rn.bf16x2.f32 %r3, {bits(1.0)}, {bits(3.0)}; mov.b32 {{%rs1, %rs2}}, %r3; cvt.f32.bf16 %r1, %rs1;", 3.0),
        (f"cvt.rn.f16.f32 %rs1, {bits(1.0005)}; cvt.f32.f16 %r1, %rs1;", 1.0009765625),
    ],
)
def test_numbers(line: str, expected: float) -> None:
    assert struct.unpack("<f", struct.pack("<I", one(line)))[0] == expected


def test_pairs_of_numbers() -> None:
    body = f"""
    mov.b32 %r1, {bits(2.0)}; mov.b32 %r2, {bits(-3.0)};
    mov.b64 %rd2, {{%r1, %r2}};
    fma.rn.f32x2 %rd3, %rd2, %rd2, %rd2;
    st.global.b64 [%rd1], %rd3;"""
    assert run(body)[:1].view(np.float32).tolist() == [6.0, 6.0]


def test_a_warp_exchanges_values() -> None:
    body = """
    shfl.sync.bfly.b32 %r1, %r0, 3, 31, -1;
    shfl.sync.idx.b32 %r2, %r0, 4, 31, -1;
    st.global.v2.b32 [%rd1], {%r1, %r2};"""
    pairs = run(body).view(np.uint32).reshape(THREADS, 2)
    threads = np.arange(THREADS)
    assert (pairs[:, 0] == threads ^ 3).all() and (pairs[:, 1] == threads // 32 * 32 + 4).all()


def test_a_warp_finds_its_least_and_greatest_number() -> None:
    body = """
    cvt.rn.f32.s32 %r3, %r0;
    redux.sync.min.f32 %r1, %r3, -1;
    redux.sync.max.f32 %r2, %r3, -1;
    st.global.v2.b32 [%rd1], {%r1, %r2};"""
    pairs = run(body).view(np.float32).reshape(THREADS, 2)
    assert pairs.tolist() == [[0, 31]] * 32 + [[32, 63]] * 32


@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_spread_over_a_warp(count: int) -> None:
    """Word `w` of shared memory is `w`; a matrix has 32 of them, four a row."""
    names = ", ".join(f"%r{10 + i}" for i in range(count))
    body = f"""
    mad.lo.s32 %r3, %r0, 4, %r30; st.shared.b32 [%r3], %r0; st.shared.b32 [%r3+256], %r0;
    add.s32 %r4, %r0, 64; st.shared.b32 [%r3+256], %r4;
    bar.sync 0;
    and.b32 %r5, %r0, {8 * count - 1}; mad.lo.s32 %r6, %r5, 16, %r30;
    ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {{{names}}}, [%r6];
    st.global.v2.b32 [%rd1], {{%r10, %r{9 + count}}};"""
    pairs = run(body).view(np.uint32).reshape(THREADS, 2)
    lanes = np.arange(THREADS) % 32
    assert (pairs[:, 0] == lanes).all() and (pairs[:, 1] == lanes + 32 * (count - 1)).all()


def test_loops_scopes_and_warps_that_part() -> None:
    """The second warp leaves out an instruction; a label of a scope is its own."""
    body = """
    mov.b32 %r1, 0;
    {
    again: add.s32 %r1, %r1, 1;
    .reg .pred more;
    setp.lt.s32 more, %r1, 4;
    @more bra.uni again;
    }
    setp.ge.s32 %p1, %r0, 32;
    @%p1 bra $L_after;
    add.s32 %r1, %r1, 100;
    $L_after:
    cvt.u64.u32 %rd2, %r1;
    st.global.b64 [%rd1], %rd2;"""
    assert run(body).tolist() == [104] * 32 + [4] * 32


def test_shared_memory_and_barriers() -> None:
    """Each thread reads what its opposite wrote."""
    body = """
    mad.lo.s32 %r3, %r0, 4, %r30;
    st.shared.b32 [%r3], %r0;
    bar.sync 0;
    sub.s32 %r4, 63, %r0;
    mad.lo.s32 %r5, %r4, 4, %r30;
    ld.shared.b32 %rd2, [%r5];
    st.global.b64 [%rd1], %rd2;"""
    assert run(body, rows=3).tolist() == list(range(63, -1, -1))
    for wrong, message in (
        (body.replace("bar.sync 0;", ""), "read without a barrier since another warp wrote it"),
        (body.replace("[%r3], %r0", "[%r3+4096], %r0"), "outside of its 4096 bytes"),
        (body.replace("[%r3], %r0", "[%r3+2], %r0"), "no multiple"),
        (body.replace("[%r5]", "[%r5+512]"), "before anything was written"),
        (body.replace("bar.sync 0;", "setp.eq.b32 %p1, %r0, 0; @%p1 bar.sync 0;"), "not all threads take part"),
        (body + "\nst.shared.b32 [%r3], %r0;", "written without a barrier since another warp read it"),
    ):
        with pytest.raises(PtxFault, match=message):
            run(wrong)


def test_a_copy_arrives_when_it_is_waited_for() -> None:
    body = """
    mov.b64 %rd2, 77;
    st.global.b64 [%rd1], %rd2;
    mad.lo.s32 %r3, %r0, 16, %r30;
    setp.lt.s32 %p1, %r0, 32;
    mad.wide.s32 %rd3, %r0, 16, %rd0;
    @%p1 cp.async.cg.shared.global [%r3], [%rd3], 0x10, 8;
    cp.async.commit_group;
    cp.async.wait_group 0;
    @%p1 ld.shared.v2.b64 {%rd4, %rd5}, [%r3];
    @%p1 st.global.v2.b64 [%rd3], {%rd4, %rd5};"""
    assert run(body).tolist() == [77, 0] * 32  # the second half of each is filled with zeros
    with pytest.raises(PtxFault, match="waited for"):
        run(body.replace("wait_group 0", "wait_group 1"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b64 [%rd1+8], %rd0;", "in no tensor"),
        ("st.global.b64 [%rd1+4], %rd0;", "no multiple"),
        ("ld.global.b32 %r1, [%rd1+-2000];", "in no tensor"),
        ("add.s32 %r1, %r2, 1; mov.b32 %r2, 0;", "%r2 is read before it is written"),
        ("add.s64 %rd2, %r0, 1;", "%r0 has 32 bits, not 64"),
        ("div.s32 %r1, 5, 0;", "division by zero"),
        ("sqrt.rn.f32 %r1, %r0;", "no sqrt.rn.f32"),
        ("shfl.sync.down.b32 %r1, %r0, 1, 31, -1;", "a shuffle of the kind down"),
        ("redux.sync.add.s32 %r1, %r0, -1;", "a reduction of the kind add.s32"),
        ("cvt.rn.f32.s32 %r1, %r0; redux.sync.min.f32 %r1, %r1, 255;", "a reduction over parts of a warp"),
        ("cvt.rp.f16.f32 %rs1, %r0;", "a conversion with"),
        ("cvt.u64.u32 %rd2, %rs1;", "%rs1 has 16 bits, not 32"),
        ("setp.lt.s32 %p1, %r0, 7; @%p1 bra $L_a; $L_b: mov.b32 %r1, 0; $L_a: mov.b32 %r1, 1;", "disagree on a branch"),
        ("mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r30], 0;", "was not initialised"),
    ],
)
def test_faults(body: str, message: str) -> None:
    with pytest.raises(PtxFault, match=message):
        run(body)


def test_what_nobody_writes_is_not_a_number() -> None:
    """Compilers fill halves of registers that they do not need with such."""
    halves = run("mov.b32 %r1, 7; mov.b64 %rd2, {%r1, %r2}; st.global.b64 [%rd1], %rd2;").view(np.uint32)
    assert halves[0] == 7 and np.isnan(halves[1:2].view(np.float32))[0]


def test_an_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_STEPS", 1000)
    with pytest.raises(PtxFault, match="no end after 1000 instructions"):
        run("$L_a: bra.uni $L_a;")


def test_products_of_a_warp() -> None:
    """`mma` of matrices that `ldmatrix` read: 16 and 8 rows of 16 halves, from the tensor into shared memory."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((8, 16)).astype(np.float16)
    text = program(
        """
    mad.wide.s32 %rd2, %r0, 16, %rd0;
    mad.lo.s32 %r9, %r0, 16, %r30;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd2];
    ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd2+512];
    st.shared.v4.b32 [%r9], {%r1, %r2, %r3, %r4};
    st.shared.v4.b32 [%r9+512], {%r5, %r6, %r7, %r8};
    bar.sync 0;
    and.b32 %r1, %r0, 15;
    shr.u32 %r2, %r0, 4;
    mad.lo.s32 %r3, %r1, 32, %r30;
    mad.lo.s32 %r3, %r2, 16, %r3;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r3];
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r14, %r15, %r16, %r17}, [%r3+512];
    mov.b32 %r20, 0;
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r21, %r22, %r23, %r24}, {%r10, %r11, %r12, %r13},
        {%r14, %r16}, {%r20, %r20, %r20, %r20};
    mad.wide.s32 %rd3, %r0, 8, %rd0;
    st.global.v2.b32 [%rd3+1024], {%r21, %r22};
    st.global.v2.b32 [%rd3+1280], {%r23, %r24};""",
        threads=32,
    )
    # The rows of `a`, those of `b` and as many of zeros, then the product.
    tensor = np.zeros(1536, np.uint8)
    tensor[:512], tensor[512:768] = a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    memory = GlobalMemory()
    launch(read_program(text), memory, (1, 1, 1), (32, 1, 1), 1024, [memory.put(tensor)])
    product = tensor[1024:].view(np.float32).reshape(16, 8)
    np.testing.assert_allclose(product, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", ["", ".trans"])
@pytest.mark.parametrize("loaded", ["", ".trans"])
def test_matrices_stored_and_loaded(stored: str, loaded: str) -> None:
    """What `stmatrix` stores, `ldmatrix` gives back; transposed by one of the two, it is transposed."""
    body = f"""
    shl.b32 %r1, %r0, 1;
    add.s32 %r2, %r1, 1;
    shl.b32 %r3, %r2, 16;
    or.b32 %r4, %r1, %r3;
    mad.lo.s32 %r5, %r0, 16, %r30;
    stmatrix.sync.aligned.m8n8.x4{stored}.shared.b16 [%r5], {{%r4, %r4, %r4, %r4}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{loaded}.shared.b16 {{%r6, %r7, %r8, %r9}}, [%r5];
    st.global.v2.b32 [%rd1], {{%r6, %r9}};"""
    halves = run(body).view(np.uint16).reshape(THREADS, 2, 2)
    warp = np.arange(64).reshape(8, 8)  # thread t holds numbers 2·t and the next: the matrix, row by row
    expected = warp if stored == loaded else warp.T
    for part in range(2):
        assert (halves[:32, part].reshape(8, 8) == expected).all()


@pytest.mark.parametrize("width", [32, 64, 128])
def test_swizzled_places_are_a_permutation(width: int) -> None:
    """Each 16-byte piece of eight rows lies somewhere else in its row, all eight of a column apart from each other."""
    pieces = np.arange(0, 8 * width, 16)
    places = swizzled(pieces, width)
    assert sorted(places) == sorted(pieces)
    assert (places // 128 == pieces // 128).all()
    column = places.reshape(8, -1)[:, 0] if width == 128 else None
    assert column is None or len(set(column % 128)) == 8
    outer, inner = np.meshgrid(np.arange(16), np.arange(16), indexing="ij")
    for contiguous in (True, False):
        leading = stride = 8 * width
        found = offsets(outer % 8, inner % 8, width, leading, stride, contiguous)
        assert len(np.unique(found)) == 64
