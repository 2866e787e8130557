"""Writing compiled kernels as sources of the library: a table in C++, and an assembler file that includes their bytes.

Machine code is embedded for every target. PTX is embedded once a kernel, that of the oldest target whose PTX runs on
all later GPUs: it is for the GPUs that no machine code is there for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..kernel.compile import AnySpec, CompiledKernel
from ..kernel.targets import TARGETS, Target
from .facts import KernelFacts

_ELEMENT = {"fp16": "Element::kFP16", "bf16": "Element::kBF16", "fp32": "Element::kFP32"}
# The oldest target whose PTX every later GPU takes.
PORTABLE = min((target for target in TARGETS.values() if target.portable_ptx), key=lambda target: target.capability)


@dataclass(frozen=True)
class Image:
    """What one compiled kernel becomes in the library: machine code, or PTX."""

    kernel: CompiledKernel
    is_ptx: bool

    @property
    def content(self) -> bytes:
        """The bytes; PTX ends with a zero byte, by which the driver knows its end."""
        return self.kernel.ptx.encode("ascii") + b"\0" if self.is_ptx else self.kernel.cubin


def targets_to_compile(asked: Sequence[Target]) -> list[Target]:
    """The targets asked for, each once, and one with portable PTX if none of them has it."""
    unique = list(dict.fromkeys(asked))
    return unique if any(target.portable_ptx for target in unique) else [*unique, PORTABLE]


def images_of(kernels: Sequence[CompiledKernel], asked: Sequence[Target]) -> list[Image]:
    """What to embed of compiled kernels."""
    portable = [kernel.target for kernel in kernels if kernel.target.portable_ptx]
    ptx_target = min(portable, key=lambda target: target.capability)
    images = [Image(kernel, is_ptx=False) for kernel in kernels if kernel.target in asked]
    return images + [Image(kernel, is_ptx=True) for kernel in kernels if kernel.target == ptx_target]


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
        options = ", ".join(_flag(there) for there in spec.flags)
        key = f"{{{_ELEMENT[spec.dtype]}, {spec.head_dim}, {{{options}}}}}"
        rows.append(
            f'    {{{key}, {kernel.target.capability}, {_flag(image.is_ptx)}, "{kernel.entry}", '
            f"{kernel.tile.block_queries}, {kernel.threads}, {kernel.shared_bytes}, {name}, {len(content)}}},"
        )
    assembly += ['    .section .note.GNU-stack, "", %progbits', ""]
    (folder / "images.S").write_text("\n".join(assembly))
    (folder / "table.cpp").write_text(
        "// Written by the build.\n"
        '#include "kernels.h"\n\n' + "\n".join(declarations) + "\n\nnamespace localattn {\n\n"
        "extern Kernel const kKERNELS[] = {\n" + "\n".join(rows) + "\n};\n"
        f"extern size_t const kKERNEL_COUNT = {len(images)};\n"
        f'extern char const kVERSION[] = "{version}";\n\n'
        "}  // namespace localattn\n"
    )


def kernel_facts(images: Sequence[Image]) -> list[KernelFacts]:
    """What was embedded, one entry a kernel."""
    by_spec: dict[AnySpec, KernelFacts] = {}
    for image in images:
        spec = image.kernel.spec
        facts = by_spec.setdefault(
            spec,
            KernelFacts(
                op_type=spec.op_types[0], op_types=list(spec.op_types), **asdict(spec), machine_code=[], ptx=[]
            ),
        )
        (facts.ptx if image.is_ptx else facts.machine_code).append(image.kernel.target.name)
    return list(by_spec.values())


def _flag(value: bool) -> str:
    return "true" if value else "false"
