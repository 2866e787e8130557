"""Compile kernels ahead of time, without a GPU: PTX, machine code, and their resources.

Triton compiles to PTX. Two scratch pointers that it appends to the parameters are taken out again, so that the kernel
takes exactly the arguments of `spec`; the result is assembled by the ptxas in Triton's wheel.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ...core.errors import BuildFailed, MissingDependency
from ...core.machine.process import end_with_parent
from .aft import AftSpec
from .ring import JoinSpec, RingSpec
from .spec import ELEMENT_TYPES, KernelSpec, Tile
from .targets import FP8_PTX_VERSION, OLDEST, OLDEST_OF_FP8, Target
from .tiles import tile_for

# A kernel of attention nodes, of AFT-local nodes, or of step and chunk nodes.
AnySpec = KernelSpec | AftSpec | RingSpec | JoinSpec


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one target.

    Args:
        spec: what it computes.
        target: what it is compiled for.
        tile: how it cuts the work; `spec.grid` makes the launch grid of it.
        entry: its name in PTX and machine code.
        ptx: text of the kernel.
        cubin: machine code for the target.
        shared_bytes: dynamic shared memory to launch it with.
        threads: threads a block.
        registers: registers a thread.
        spills: bytes of stack a thread that registers spill to.
    """

    spec: AnySpec
    target: Target
    tile: Tile
    entry: str
    ptx: str
    cubin: bytes
    shared_bytes: int
    threads: int
    registers: int
    spills: int


def oldest_for(spec: AnySpec) -> Target:
    """Return the oldest GPU that a kernel can be compiled for: its PTX runs on all later ones."""
    return OLDEST_OF_FP8 if spec.dtype == "fp8" else OLDEST


def runs_on(spec: AnySpec, target: Target) -> bool:
    """Return whether a kernel can be compiled for a GPU."""
    return target.capability >= oldest_for(spec).capability


def compile_kernel(spec: AnySpec, target: Target, tile: Tile | None = None) -> CompiledKernel:
    """Compile a kernel with the given tile, or the one of the table.

    Raises:
        MissingDependency: Triton is not installed, or was imported as interpreter.
        BuildFailed: the compiler failed.
    """
    tile = tile or tile_for(spec, target)
    text, entry, shared_bytes, threads = _to_ptx(spec, target, tile)
    ptx = _own_parameters_only(text, entry, len(spec.arguments)).replace(entry, spec.name)
    cubin, registers, spills = assemble(ptx, target)
    if spills:
        # ptxas spilled to fit one more block on a multiprocessor; if only one block is required, it uses more
        # registers.
        ptx = re.sub(r"^\.reqntid \d+", r"\g<0>\n.minnctapersm 1", ptx, count=1, flags=re.MULTILINE)
        cubin, registers, spills = assemble(ptx, target)
    return CompiledKernel(spec, target, tile, spec.name, ptx, cubin, shared_bytes, threads, registers, spills)


def compile_tiles(
    wanted: Sequence[tuple[AnySpec, Target, Tile]],
    jobs: int | None = None,
    progress: Callable[[CompiledKernel], None] | None = None,
) -> list[CompiledKernel]:
    """Compile kernels, each for its target with its tile, in `jobs` processes (all processors by default).

    Args:
        wanted: what to compile.
        jobs: processes at a time.
        progress: called with each kernel, in the order of the result.

    Raises:
        MissingDependency: Triton is not installed, or was imported as interpreter.
        BuildFailed: the compiler failed.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(wanted))
    results: list[CompiledKernel] = []
    with contextlib.ExitStack() as stack:
        compiled: Iterable[CompiledKernel]
        if jobs <= 1:
            compiled = (compile_kernel(*each) for each in wanted)
        else:
            _triton()  # raise a clear error before any process is started
            pool = stack.enter_context(
                ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=end_with_parent)
            )
            compiled = pool.map(compile_kernel, *zip(*wanted, strict=True))
        for kernel in compiled:
            results.append(kernel)
            if progress is not None:
                progress(kernel)
    return results


def _triton() -> Any:
    """Import the Triton package, and return it.

    Raises:
        MissingDependency: it is not installed, or was imported as interpreter.
    """
    try:
        import triton
    except ImportError as error:
        raise MissingDependency(
            "Triton is not installed.",
            why=f"Triton compiles the attention kernel ({error}).",
            fix="Install it: pip install 'localattn[plugin]'",
        ) from error
    if triton.knobs.runtime.interpret:
        raise MissingDependency(
            "Triton runs as an interpreter in this process.",
            why="The environment variable TRITON_INTERPRET is set.",
            fix="Unset it to compile kernels.",
        )
    return triton


def _source_of(spec: AnySpec) -> Any:
    """Import the Triton function that a kernel is compiled from."""
    if isinstance(spec, AftSpec):
        from .aft_local import aft_local

        return aft_local
    if isinstance(spec, RingSpec):
        from .ring_attention import ring_attention

        return ring_attention
    if isinstance(spec, JoinSpec):
        from .ring_attention import join

        return join
    from .windowed_attention import windowed_attention

    return windowed_attention


def _to_ptx(spec: AnySpec, target: Target, tile: Tile) -> tuple[str, str, int, int]:
    """Compile to PTX, and return it with its entry name, bytes of shared memory and threads a block."""
    triton = _triton()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = _source_of(spec)
    pointer = f"*{ELEMENT_TYPES[spec.dtype].triton}"
    constants = spec.constants(tile)
    types = dict.fromkeys(spec.arguments, pointer) | dict.fromkeys(spec.scalars, "i32")
    types |= {name: f"*{element}" for name, element in spec.pointers.items()}
    types |= dict.fromkeys(constants, "constexpr")
    # Targets with portable PTX have the same text, so Triton's cache compiles it once for all of them.
    text_of = oldest_for(spec) if target.portable_ptx else target
    # Tensors always start at multiples of 16 bytes; this hint makes loads 16 bytes wide and asynchronous.
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in types if types[name][0] == "*"}
    version = max(target.ptx_version, FP8_PTX_VERSION if text_of is OLDEST_OF_FP8 else 0)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "ptx_version": version}
    printed = io.StringIO()
    try:
        # Line tables would make the PTX six times as long; on a failure Triton prints all of it.
        with triton.knobs.compilation.scope(), contextlib.redirect_stdout(printed):
            triton.knobs.compilation.disable_line_info = True
            compiled = triton.compile(
                ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned),
                target=GPUTarget("cuda", text_of.capability, 32),
                options=options,
            )
    except Exception as error:  # a Triton failure has no common base class
        raise BuildFailed(
            f"Triton could not compile {spec.name} for {target.name} with {tile}.",
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
        ) from error
    facts = compiled.metadata
    if facts.global_scratch_size or facts.profile_scratch_size:
        raise BuildFailed(
            f"{spec.name} for {target.name} uses scratch memory.",
            why="Plugins launch kernels without scratch memory.",
            fix="Choose another tile.",
        )
    ptx = compiled.asm["ptx"].replace(f".target {text_of.name}", f".target {target.name}")
    return ptx, facts.name, facts.shared, 32 * facts.num_warps


def _own_parameters_only(ptx: str, entry: str, arguments: int) -> str:
    """Remove from the PTX the parameters that Triton appends to the kernel's own."""
    begin = ptx.index(f".entry {entry}(")
    end = ptx.index("\n)", begin)
    head, parameters, body = ptx[:begin], ptx[begin:end], ptx[end:]
    lines = [line for line in parameters.splitlines() if ".param" in line]
    for extra in range(arguments, len(lines)):
        if re.search(rf"\b{entry}_param_{extra}\b", body):
            raise BuildFailed(f"The kernel {entry} reads parameter {extra}, beyond its {arguments} arguments.")
    kept = "\n".join(lines[:arguments]).rstrip(",")
    return f"{head}.entry {entry}(\n{kept}{body}"


def assemble(ptx: str, target: Target) -> tuple[bytes, int, int]:
    """Return the machine code of a PTX text for a target, and registers and bytes of spills a thread.

    Raises:
        MissingDependency: Triton is not installed.
        BuildFailed: ptxas refused the text.
    """
    tools = _triton().knobs.nvidia
    ptxas = (tools.ptxas_blackwell if target.capability >= 100 else tools.ptxas).path
    # Triton names the architecture-specific feature set ("a") in the PTX where it uses one.
    found = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    suffix = "a" if found and found[1] == target.name + "a" else ""
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx, encoding="ascii")
        command = [ptxas, "-v", "--regAllocOptLevel=2", f"--gpu-name={target.name}{suffix}", str(source)]
        finished = subprocess.run([*command, "-o", str(result)], capture_output=True, text=True)
        log = finished.stdout + finished.stderr
        if finished.returncode:
            why = next((line for line in log.splitlines() if "error" in line or "fatal" in line), log.strip())
            raise BuildFailed(f"ptxas could not assemble the kernel for {target.name}.", why=why)
        registers = re.search(r"Used (\d+) registers", log)
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        if registers is None or spills is None:
            raise BuildFailed("ptxas did not report registers and spills.", why=log.strip()[:200])
        return result.read_bytes(), int(registers[1]), max(map(int, spills.groups()))
