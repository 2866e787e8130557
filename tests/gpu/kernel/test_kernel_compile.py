"""Ahead-of-time compilation without a GPU: parameters, targets, budget."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from localattn.core.errors import BuildFailed, MissingDependency, UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import HEADS_FIRST, SEQUENCE_FIRST, NodeAttributes, NodeVariant
from localattn.core.nodes.gpu import SERVED
from localattn.core.nodes.grouped import GroupedAttributes
from localattn.plugins.kernel import budget
from localattn.plugins.kernel.compile import CompiledKernel, assemble, compile_kernel, compile_tiles
from localattn.plugins.kernel.spec import (
    HEAD_DIMS,
    KernelSpec,
    Tile,
    full_set,
    grid,
    pack_flags,
    pack_scalars,
    spec_for,
    why_unsupported,
)
from localattn.plugins.kernel.targets import TARGETS, target
from localattn.plugins.kernel.tiles import FREE_SHARED_BYTES, OPT_IN_SHARED_BYTES, tile_for

triton = pytest.importorskip("triton", reason="Triton compiles the kernel: pip install 'localattn[plugin]'")

PLAIN = KernelSpec("fp16", 64)
FULL = KernelSpec("bf16", 40, has_mask=True, has_bias=True)


def parameters(kernel: CompiledKernel) -> list[str]:
    """Types of the entry's parameters in order."""
    declared = re.search(rf"\.entry {kernel.entry}\((.*?)\)", kernel.ptx, re.DOTALL)
    assert declared is not None
    return re.findall(r"\.param \.(\w+)", declared[1])


@pytest.mark.parametrize("spec", [PLAIN, FULL], ids=lambda spec: spec.name)
def test_the_kernel_takes_exactly_its_arguments(spec: KernelSpec) -> None:
    kernel = compile_kernel(spec, target("sm_87"))
    tensors = 3 + spec.has_mask + spec.has_bias
    assert parameters(kernel) == ["u64"] * tensors + ["u32"] * 10 + ["u64"]
    assert len(spec.arguments) == len(parameters(kernel))
    assert kernel.entry == spec.name and f"{spec.name}_param_0" in kernel.ptx
    assert kernel.cubin.startswith(b"\x7fELF") and spec.name.encode() in kernel.cubin
    assert kernel.threads == 32 * kernel.tile.warps == int(re.search(r"\.reqntid (\d+)", kernel.ptx)[1])
    assert ".loc" not in kernel.ptx and ".version 8.0" in kernel.ptx


INSTRUCTION = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma"}


@pytest.mark.parametrize("name", TARGETS)
def test_every_target(name: str) -> None:
    chosen = target(name)
    kernel = compile_kernel(PLAIN, chosen)
    version = f".version {chosen.ptx_version // 10}.{chosen.ptx_version % 10}"
    assert version in kernel.ptx
    assert re.search(rf"^\.target {name}a?$", kernel.ptx, re.MULTILINE)
    assert INSTRUCTION[chosen.matrix_unit] in kernel.ptx
    # Without knowing that tensors are aligned, Triton would load them element by element.
    assert "cp.async.cg" in kernel.ptx
    assert budget.beyond_limits(kernel) == ""
    assert elf_capability(kernel.cubin) == chosen.capability


def elf_capability(cubin: bytes) -> int:
    """Compute capability in the flags of a cubin's ELF header; its place depends on the ABI version."""
    flags = struct.unpack_from("<I", cubin, 48)[0]
    return (flags >> 8) & 0xFF if cubin[8] >= 8 else flags & 0xFF


def test_portable_ptx_assembles_for_later_devices() -> None:
    kernel = compile_kernel(PLAIN, target("sm_80"))
    assert kernel.target.portable_ptx
    for name in ("sm_86", "sm_89", "sm_90", "sm_100", "sm_120"):
        assert assemble(kernel.ptx, target(name))[0].startswith(b"\x7fELF")


def test_fp32_keeps_its_precision_and_tensor_cores_are_used_otherwise() -> None:
    fp32 = compile_kernel(KernelSpec("fp32", 64), target("sm_80"))
    assert "tf32" not in fp32.ptx and "mma.sync" not in fp32.ptx
    assert "mma.sync" in compile_kernel(KernelSpec("bf16", 64), target("sm_80")).ptx


TENSOR_CORES = [
    ("sm_87", KernelSpec("fp32", 64, fp32_products="tf32x3")),
    ("sm_87", KernelSpec("fp32", 256, fp32_products="tf32")),
    ("sm_90", KernelSpec("fp32", 64, has_mask=True, fp32_products="tf32")),
    ("sm_100", KernelSpec("fp32", 128, has_mask=True, has_bias=True, fp32_products="tf32x3")),
]


@pytest.mark.parametrize(("name", "spec"), TENSOR_CORES, ids=lambda value: getattr(value, "name", value))
def test_fp32_on_tensor_cores_where_it_is_asked_for(name: str, spec: KernelSpec) -> None:
    kernel = compile_kernel(spec, target(name))
    assert "tf32" in kernel.ptx and not budget.beyond_limits(kernel)


def test_another_tile_and_a_failing_one() -> None:
    tile = Tile(32, 32, 4, 2)
    assert compile_kernel(PLAIN, target("sm_80"), tile).tile == tile
    with pytest.raises(BuildFailed, match="could not compile localattn_fp16_d64 for sm_80"):
        compile_kernel(PLAIN, target("sm_80"), Tile(48, 64, 4, 2))
    with pytest.raises(BuildFailed, match="ptxas could not assemble"):
        assemble(".version 8.0\n.target sm_80\n.address_size 64\nnonsense\n", target("sm_80"))


def test_spills_are_traded_for_registers() -> None:
    """Left alone, ptxas spills a few bytes of this one to fit more blocks on a multiprocessor."""
    kernel = compile_kernel(KernelSpec("fp32", 128, has_mask=True), target("sm_87"), Tile(32, 16, 4, 2))
    alone = kernel.ptx.replace(".minnctapersm 1", "")
    assert alone != kernel.ptx and kernel.spills == 0 < assemble(alone, kernel.target)[2]


def test_many_in_processes() -> None:
    seen: list[str] = []
    specs = [KernelSpec("fp16", 16), KernelSpec("fp16", 32)]
    targets = [target("sm_80"), target("sm_87")]
    wanted = [(spec, chosen, tile_for(spec, chosen)) for chosen in targets for spec in specs]
    kernels = compile_tiles(wanted, jobs=2, progress=lambda kernel: seen.append(kernel.spec.name))
    assert [(k.target.name, k.spec) for k in kernels] == [(t.name, s) for t in targets for s in specs]
    assert seen == [kernel.spec.name for kernel in kernels]


@pytest.mark.parametrize(
    ("text", "name"), [("sm_87", "sm_87"), ("87", "sm_87"), ("8.7", "sm_87"), ("SM_90", "sm_90"), ("sm120", "sm_120")]
)
def test_targets_by_name(text: str, name: str) -> None:
    assert target(text).name == name


def test_refused_targets() -> None:
    with pytest.raises(UsageError, match="spills") as refused:
        target("sm_75")
    assert "sm_87 (Jetson Orin)" in refused.value.fix
    with pytest.raises(UsageError, match="no GPU target 'sm_13'"):
        target("sm_13")


@pytest.mark.parametrize(("dtype", "head_dim"), [("int8", 64), ("fp16", 15), ("fp16", 257)])
def test_refused_specs(dtype: str, head_dim: int) -> None:
    with pytest.raises(UsageError):
        KernelSpec(dtype, head_dim)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "products"), [("fp16", 64, "tf32"), ("fp32", 256, "tf32x3"), ("fp32", 64, "bf16")]
)
def test_refused_products(dtype: str, head_dim: int, products: str) -> None:
    with pytest.raises(UsageError, match=f"with {products} products"):
        KernelSpec(dtype, head_dim, fp32_products=products)


def test_names_are_unique_identifiers_and_every_spec_has_a_tile() -> None:
    specs = full_set(head_dims=(16, 32, 64, 80, 128, 256))
    assert len({spec.name for spec in specs}) == len(specs) == 3 * 6 * (12 + 8)
    for spec in specs:
        assert spec.name.isidentifier()
        for chosen in TARGETS.values():
            assert tile_for(spec, chosen).block_queries >= tile_for(spec, chosen, opt_in=False).block_queries >= 16
    assert len(full_set()) == 3 * (5 * 4 + 4 + 2 * 2 + 2 + 4)
    assert {spec.fp32_products for spec in full_set(fp32_products="tf32x3") if spec.dtype != "fp32"} == {"ieee"}


def test_every_served_op_type_has_one_kernel() -> None:
    for node in SERVED:
        mine = [spec for spec in full_set(["fp16"], [64]) if node.op_type in spec.op_types]
        shared = [spec_for(node, "fp16", 64, shared_qk=True)] if isinstance(node, NodeVariant) else []
        assert mine == [spec_for(node, "fp16", 64), *shared]
        assert mine[0].inputs == node.input_names
    with pytest.raises(UsageError, match="no attention kernel with these inputs"):
        KernelSpec("fp16", 64, has_bias=True, has_sinks=True)


def test_a_tile_is_loaded_while_the_one_before_is_computed(tmp_path: Path) -> None:
    """Every wait inside a loop leaves copies under way; with two stages it would wait for all."""
    for stages, left in ((3, 2), (2, 0)):
        kernel = compile_kernel(PLAIN, target("sm_87"), Tile(64, 64, 4, stages))
        (tmp_path / "cubin").write_bytes(kernel.cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(tmp_path / "cubin")]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        labels = {line.strip()[:-1]: at for at, line in enumerate(code) if re.fullmatch(r"\s*\.L_\w+:", line)}
        loops = []
        for at, line in enumerate(code):
            jump = re.search(r"BRA `\((\.L_\w+)\)", line)
            if jump and labels[jump[1]] < at:
                body = code[labels[jump[1]] : at]
                if any("HMMA" in inside for inside in body):
                    loops.append([int(w, 16) for text in body for w in re.findall(r"DEPBAR\.LE SB0, (0x\w+)", text)])
        assert loops == [[left], [left]], "one wait in each of the two loops"


def test_scalars() -> None:
    attributes = NodeAttributes(WindowGeometry(128, 2, 1, exact_windowsize=True), 0.125, shared_qk=True)
    bits = struct.unpack("<i", struct.pack("<f", 0.125))[0]
    assert pack_scalars(attributes, 1000, 8) == (1000, 8, 8, 128, 2, 1, 2 + 4, bits, 0, 0)
    assert pack_scalars(replace(attributes, xpos_scale_base=0.125), 1000, 8)[-1] == bits
    everything = GroupedAttributes(WindowGeometry.all_keys(causal=True), 0.125, 0.125)
    assert pack_scalars(everything, 1000, 8, 2) == (1000, 8, 2, 1000, 0, 0, 1 + 4, bits, bits, 0)
    causal = NodeAttributes(WindowGeometry(128, causal=True), -1.0, perm=HEADS_FIRST)
    assert pack_flags(causal) == 1
    assert pack_scalars(causal, 1, 1)[7] == struct.unpack("<i", struct.pack("<f", -1.0))[0] < 0
    assert grid(Tile(64, 64, 4, 2), 129, 16) == (3, 16, 1)


def test_what_no_kernel_computes() -> None:
    plain = NodeAttributes(WindowGeometry(128), 1.0, perm=SEQUENCE_FIRST)
    assert why_unsupported(plain, batch=1, heads=8, length=1 << 20) == ""
    assert "65535" in why_unsupported(plain, batch=8192, heads=8, length=16)
    wide = NodeAttributes(WindowGeometry(1 << 16), 1.0)
    assert "overflow" in why_unsupported(wide, batch=1, heads=8, length=16)
    everything = GroupedAttributes(WindowGeometry.all_keys(causal=True), 1.0)
    assert why_unsupported(everything, batch=1, heads=8, length=1 << 20, kv_heads=2) == ""
    assert "overflows" in why_unsupported(everything, batch=1, heads=8, length=1 << 30, kv_heads=2)
    assert "cannot share 3" in why_unsupported(everything, batch=1, heads=8, length=16, kv_heads=3)


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.modules['triton'] = None",
        "import os; os.environ['TRITON_INTERPRET'] = '1'",
    ],
    ids=["absent", "interpreter"],
)
def test_without_a_compiler(code: str) -> None:
    code += """
from localattn.plugins.kernel.compile import compile_kernel
from localattn.plugins.kernel.spec import KernelSpec
from localattn.plugins.kernel.targets import target
try:
    compile_kernel(KernelSpec("fp16", 64), target("sm_80"))
except Exception as error:
    print(type(error).__name__, error.fix)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.startswith(MissingDependency.__name__)
    assert "[plugin]" in finished.stdout or "TRITON_INTERPRET" in finished.stdout or "Unset" in finished.stdout


def test_importing_the_description_is_light() -> None:
    modules = "localattn.plugins.kernel.spec, localattn.plugins.kernel.tiles, localattn.plugins.kernel.compile"
    code = f"import sys, {modules}; print([name for name in ('torch', 'triton') if name in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


# One kernel a target, together of every element type, head size and variant.
SAMPLE = [
    ("sm_80", KernelSpec("bf16", 128)),
    ("sm_86", KernelSpec("fp16", 256, has_mask=True)),
    ("sm_87", KernelSpec("fp16", 64, has_bias=True)),
    ("sm_87", KernelSpec("fp32", 32, has_mask=True)),
    ("sm_89", KernelSpec("fp32", 64)),
    ("sm_90", KernelSpec("fp16", 128, has_mask=True, has_bias=True)),
    ("sm_100", KernelSpec("bf16", 64, has_mask=True)),
    ("sm_110", KernelSpec("fp16", 16, has_bias=True)),
    ("sm_120", KernelSpec("fp16", 64, has_mask=True)),
    ("sm_80", KernelSpec("bf16", 64, has_bias=True, has_xpos=True)),
    ("sm_90", KernelSpec("fp16", 64, has_mask=True, has_sinks=True)),
    ("sm_87", KernelSpec("fp32", 128, has_softcap=True)),
    ("sm_103", KernelSpec("bf16", 64, has_shared_qk=True)),
    ("sm_121", KernelSpec("fp16", 128)),
]


def hold(name: str, spec: KernelSpec, tile: Tile | None = None) -> None:
    table = budget.read_table()
    kernel = compile_kernel(spec, target(name), tile)
    assert budget.beyond_limits(kernel) == ""
    if triton.__version__ == table["triton"]:
        assert budget.figures(kernel) == table["kernels"][name][budget.entry_name(kernel)]


@pytest.mark.parametrize(("name", "spec"), SAMPLE, ids=lambda value: getattr(value, "name", value))
def test_budget(name: str, spec: KernelSpec) -> None:
    hold(name, spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spec", "tile"), [(name, *entry) for name in TARGETS for entry in budget.entries(target(name))]
)
def test_whole_budget(name: str, spec: KernelSpec, tile: Tile) -> None:
    hold(name, spec, tile)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    "spec",
    [spec for full in [full_set()] for spec in full_set(head_dims=HEAD_DIMS) if spec not in full],
    ids=lambda spec: spec.name,
)
def test_kernels_outside_of_the_full_set(name: str, spec: KernelSpec) -> None:
    assert budget.beyond_limits(compile_kernel(spec, target(name))) == ""


def test_the_table_is_whole_and_within_the_limits() -> None:
    table = budget.read_table()["kernels"]
    assert set(table) == set(TARGETS)
    for name, kernels in table.items():
        chosen = target(name)
        wanted = {}
        for spec, tile in budget.entries(chosen):
            own = tile == tile_for(spec, chosen)
            free = tile == tile_for(spec, chosen, opt_in=False)
            wanted[spec.name + budget.AHEAD_OF_TIME * (not own)] = (
                FREE_SHARED_BYTES if free else OPT_IN_SHARED_BYTES[chosen.matrix_unit]
            )
        assert set(kernels) == set(wanted)
        for kernel, figures in kernels.items():
            assert figures["spills"] == 0
            assert figures["shared_bytes"] <= wanted[kernel]
            assert figures["registers"] <= 255
    assert Path(budget.TABLE).name == "budget.json"
