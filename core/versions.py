"""Define the versions of ONNX and onnxruntime that this package uses; `tensorrt_versions.py` has TensorRT's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from .error_texts import argument

Version = tuple[int, ...]

# PyTorch's exporter starts at 18; 24 is the newest that PyTorch, ONNX and onnxruntime support, as tested.
OPSETS = range(18, 25)
# The newest opset that TensorRT 10.3 reads.
DEFAULT_OPSET = 20
# The oldest IR with all features of an opset's files: ONNX functions need 8, fp8 numbers (opset 19) 9, numbers of 4
# bits (opset 21) 10; bf16 is older. Later opsets add nothing to the format that is used here. TensorRT 10.3 reads 10.
_IR_OF_OPSET = {18: 8, 19: 9, 20: 9}
IR_VERSION = 10
# The newest IR and opset that a release of onnxruntime reads, measured with a model of one node; those between have the
# numbers of the release before. `python -m tests.runtimes.compatibility` measures them again.
ONNXRUNTIME_READS = {
    "1.16": (9, 19),
    "1.17": (9, 20),
    "1.18": (10, 21),
    "1.21": (10, 22),
    "1.23": (11, 23),
    "1.24": (13, 25),
    "1.26": (13, 26),
}
# The oldest onnxruntime whose interface the library of compiled kernels uses
# (`plugins/cpu/source/onnxruntime/onnxruntime_c.h`), and the IR and the opset that it reads.
OLDEST_ONNXRUNTIME, OLDEST_IR_VERSION, OLDEST_OPSET = "1.17", 9, 20


def ir_of_opset(opset: int) -> int:
    """Return the IR version for files of an opset: the oldest with all their features."""
    return _IR_OF_OPSET.get(opset, IR_VERSION)


# onnxruntime's message for a file that is too new for it.
_TOO_NEW_IR = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_TOO_NEW_OPSET = re.compile(r"Opset (\d+) is under development.*till opset (\d+)", re.DOTALL)
# The same for matrices in blocks of 8 bits, and the release from which it multiplies by them (tried from 1.17 to 1.32).
_ONLY_4_BITS = "Only 4b quantization is supported"
WIDE_BLOCKS_FROM = "1.22"


def too_new(reason: str) -> str:
    """Return advice if onnxruntime refuses a file because it is too new; "" for any other reason.

    Args:
        reason: onnxruntime's message.
    """
    if _ONLY_4_BITS in reason:
        other = argument("weight_dtype", "int8-dynamic")
        return f"Update onnxruntime to {WIDE_BLOCKS_FROM} or later, or export again with {other}."
    ir, opset = _TOO_NEW_IR.search(reason), _TOO_NEW_OPSET.search(reason)
    if ir is not None:
        place, needed, newest = 0, int(ir[1]), int(ir[2])
        read = [number for number in OPSETS if ir_of_opset(number) <= newest]
    elif opset is not None:
        place, needed, newest = 1, int(opset[1]), int(opset[2])
        read = [number for number in OPSETS if number <= newest]
    else:
        return ""
    release = next((name for name, reads in ONNXRUNTIME_READS.items() if reads[place] >= needed), "")
    update = f"Update onnxruntime to {release} or later" if release else "Update onnxruntime"
    return f"{update}, or export again with {argument('opset', read[-1])}." if read else f"{update}."


def parse(version: str) -> Version:
    """Split a version into its numbers: `10.3.0`, `10.7.0.post1`, without parts that are not numbers."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("post")[0].split("+")[0]))


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed packages; a package may be installed under another name."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def package_version() -> str:
    """Return this package's release; "0+unknown" for a source tree on the path that was never installed."""
    return installed(["localattn"]).get("localattn", "0+unknown")
