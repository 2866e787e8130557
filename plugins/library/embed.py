"""Write compiled kernels as sources of the library: a table in C++, and an assembler file that includes their bytes.

Machine code is embedded for every target that has the kernel's instructions. PTX is embedded once a kernel, that of the
oldest target whose PTX runs on all later GPUs: it is for the GPUs that no machine code is there for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..kernel.compile import AnySpec, CompiledKernel, oldest_for, runs_on
from ..kernel.spec import Tile
from ..kernel.targets import Target
from ..kernel.tiles import tile_for
from .sidecar import KernelRecord

_ELEMENT = {"fp16": "Element::kFP16", "bf16": "Element::kBF16", "fp32": "Element::kFP32", "fp8": "Element::kFP8"}


@dataclass(frozen=True)
class Image:
    """The form of a compiled kernel in the library: machine code or PTX."""

    kernel: CompiledKernel
    is_ptx: bool

    @property
    def content(self) -> bytes:
        """The bytes; PTX ends with a zero byte, by which the driver knows its end."""
        return self.kernel.ptx.encode("ascii") + b"\0" if self.is_ptx else self.kernel.cubin


def to_compile(specs: Sequence[AnySpec], asked: Sequence[Target]) -> list[tuple[AnySpec, Target, Tile]]:
    """List the kernels to compile, target by target: each for those in `asked` on which it runs, and once for PTX."""
    own = {spec: [target for target in dict.fromkeys(asked) if runs_on(spec, target)] for spec in specs}
    for spec, there in own.items():
        if not any(target.portable_ptx for target in there):
            there.append(oldest_for(spec))
    order = dict.fromkeys((*asked, *(target for there in own.values() for target in there)))
    return [(spec, target, tile_for(spec, target)) for target in order for spec in specs if target in own[spec]]


def images_of(kernels: Sequence[CompiledKernel], asked: Sequence[Target]) -> list[Image]:
    """Choose the parts of compiled kernels to embed."""
    portable = [kernel for kernel in kernels if kernel.target.portable_ptx]
    oldest: dict[AnySpec, CompiledKernel] = {}
    for kernel in sorted(portable, key=lambda kernel: -kernel.target.capability):
        oldest[kernel.spec] = kernel
    images = [Image(kernel, is_ptx=False) for kernel in kernels if kernel.target in asked]
    return images + [Image(kernel, is_ptx=True) for kernel in portable if kernel is oldest[kernel.spec]]


def write_sources(images: Sequence[Image], version: str, folder: Path) -> None:
    """Write `table.cpp`, `images.S` and the images themselves into `folder`."""
    assembly = ['    .section .rodata, "a"']
    declarations, rows = [], []
    for index, image in enumerate(images):
        kernel, name = image.kernel, f"localattn_image_{index}"
        content = image.content
        (folder / f"{name}.bin").write_bytes(content)
        assembly += ["    .balign 64", f"    .hidden {name}", f"    .globl {name}", f"{name}:"]
        assembly.append(f'    .incbin "{name}.bin"')
        declarations.append(f'extern "C" __attribute__((visibility("hidden"))) unsigned char const {name}[];')
        spec = kernel.spec
        options = ", ".join(str(there).lower() for there in spec.flags)
        key = f"{{{_ELEMENT[spec.dtype]}, {spec.head_dim}, {{{options}}}}}"
        rows.append(
            f'    {{{key}, {kernel.target.capability}, {str(image.is_ptx).lower()}, "{kernel.entry}", '
            f"{kernel.tile.block_queries}, {kernel.threads}, {kernel.shared_bytes}, {name}, {len(content)}}},"
        )
    assembly += ['    .section .note.GNU-stack, "", %progbits', ""]
    (folder / "images.S").write_text("\n".join(assembly))
    (folder / "table.cpp").write_text(
        "// Written by the build.\n"
        '#include "kernels/kernels.h"\n\n' + "\n".join(declarations) + "\n\nnamespace localattn {\n\n"
        "extern Kernel const kKERNELS[] = {\n" + "\n".join(rows) + "\n};\n"
        f"extern size_t const kKERNEL_COUNT = {len(images)};\n"
        f'extern char const kVERSION[] = "{version}";\n\n'
        "}  // namespace localattn\n"
    )


def kernel_records(images: Sequence[Image]) -> list[KernelRecord]:
    """List what was embedded, one entry a kernel."""
    by_spec: dict[AnySpec, KernelRecord] = {}
    for image in images:
        spec = image.kernel.spec
        record = by_spec.setdefault(
            spec,
            KernelRecord(
                op_type=spec.op_types[0], op_types=list(spec.op_types), **asdict(spec), machine_code=[], ptx=[]
            ),
        )
        (record.ptx if image.is_ptx else record.machine_code).append(image.kernel.target.name)
    return list(by_spec.values())
