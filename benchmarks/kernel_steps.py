"""What bounds a step of the kernel's loops, counted in its machine code: `python -m benchmarks.kernel_steps`.

A multiprocessor has four schedulers, and each issues one instruction of a warp in a cycle; 16 exponentials leave it in
a cycle. What its tensor cores do in one is a figure of the maker. The largest of the three bounds a step. The model
knows nothing of memory, latencies and overlap: it is a lower bound of a step's time.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from localattn.plugins.kernel.compile import CompiledKernel, compile_kernel
from localattn.plugins.kernel.spec import KernelSpec
from localattn.plugins.kernel.targets import TARGETS

SCHEDULERS, EXPONENTIALS = 4, 16
# Operations of fp16 products a cycle and multiprocessor: Jetson Orin, H100, B200.
TENSOR_OPERATIONS = {"sm_87": 2048, "sm_90": 4096, "sm_100": 8192}
SPECS = (KernelSpec("fp16", 64), KernelSpec("fp16", 64, has_mask=True), KernelSpec("fp16", 128))
# What an instruction of the tensor cores is called.
_PRODUCTS = ("HMMA", "HGMMA", "UTCHMMA", "UTCMMA")


@dataclass(frozen=True)
class Step:
    """One tile of keys in one of the two loops: instructions of a warp, and cycles of a multiprocessor."""

    instructions: int
    issue: int
    tensor: int
    exponentials: int

    @property
    def cycles(self) -> int:
        """What it takes at least."""
        return max(self.issue, self.tensor, self.exponentials)


def steps_of(kernel: CompiledKernel) -> tuple[Step, Step]:
    """Return a step of the loop with comparisons, and of that without."""
    tile, padded = kernel.tile, 1 << (kernel.spec.head_dim - 1).bit_length()
    scores = tile.block_queries * tile.block_keys
    tensor = 4 * scores * padded // TENSOR_OPERATIONS[kernel.target.name]
    compared, plain = list(_loops(kernel.cubin))[:2]
    issue = [count * tile.warps // SCHEDULERS for count in (compared, plain)]
    return (
        Step(compared, issue[0], tensor, scores // EXPONENTIALS),
        Step(plain, issue[1], tensor, scores // EXPONENTIALS),
    )


def _loops(cubin: bytes) -> Iterator[int]:
    """Count the instructions of each loop that multiplies, in the order of the code."""
    import triton

    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    labels = {line.strip()[:-1]: at for at, line in enumerate(code) if re.fullmatch(r"\s*\.L_\w+:", line)}
    for at, line in enumerate(code):
        jump = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        if jump and labels[jump[1]] < at:
            found = [
                re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", x)
                for x in code[labels[jump[1]] : at + 1]
            ]
            names = [match[1] for match in found if match]
            if any(name.startswith(_PRODUCTS) for name in names):
                yield len(names)


def main() -> None:
    """Print the table of docs/kernel.md."""
    print("| target, kernel | loop | instructions | issue | tensor cores | exponentials |\n|---|---|---|---|---|---|")
    for name in TENSOR_OPERATIONS:
        for spec in SPECS:
            for loop, step in zip(("compares", "plain"), steps_of(compile_kernel(spec, TARGETS[name])), strict=True):
                figures = (step.instructions, step.issue, step.tensor, step.exponentials)
                what = f"{name}, {spec.head_dim} wide{', key mask' * spec.has_mask}"
                print(f"| {what} | {loop} | {' | '.join(map(str, figures))} |")


if __name__ == "__main__":
    main()
