"""Define the versions of ONNX and onnxruntime that this package uses; `tensorrt_versions.py` has TensorRT's."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

# PyTorch's exporter starts at 18; 24 is the newest that it, ONNX and onnxruntime were seen to agree on.
OPSETS = range(18, 25)
# The newest opset that TensorRT 10.3 reads.
DEFAULT_OPSET = 20
# The newest IR that TensorRT 10.3 and onnxruntime 1.18 still read; it has all that is used here.
IR_VERSION = 10
# The oldest onnxruntime whose interface the library of compiled kernels uses
# (`plugins/cpu/source/onnxruntime/onnxruntime_c.h`), and the IR and the opset that it reads.
OLDEST_ONNXRUNTIME, OLDEST_IR_VERSION, OLDEST_OPSET = "1.17", 9, 20


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed; one may be there under another name."""
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
