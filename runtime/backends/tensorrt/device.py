"""Query the GPU and its driver through libcuda alone, before a library is loaded that would crash without them."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ....core.errors import MissingDependency
from ....core.machine.processor import machine

_LIBRARIES = ("libcuda.so.1", "libcuda.so") if sys.platform.startswith("linux") else ("nvcuda.dll",)

# CUdevice_attribute of cuda.h.
_MAJOR, _MINOR = 75, 76

_FIX = "Run it on a machine with an NVIDIA GPU and its driver; `nvidia-smi` there must show the GPU."


@dataclass(frozen=True)
class Device:
    """A GPU.

    Args:
        name: the driver's name of it.
        capability: compute capability, 87 for 8.7.
        driver: highest CUDA version the driver supports, as "12.6".
        index: its place among the GPUs that the driver shows to this process.
    """

    name: str
    capability: int
    driver: str
    index: int = 0

    @property
    def target(self) -> str:
        """Its compute capability as `sm_87`."""
        return f"sm_{self.capability}"

    @property
    def provider(self) -> str:
        """What a session on it is called: "cuda" on the first, else "cuda:1" for example."""
        return f"cuda:{self.index}" if self.index else "cuda"

    def describe(self) -> str:
        """Return name and target for reports: `Orin (sm_87)`."""
        return f"{self.name} ({self.target})"


def find_device(index: int = 0) -> Device:
    """Find a GPU that the driver shows to this process, by default the first.

    Raises:
        MissingDependency: no driver, a driver that does not start, or no such GPU.
    """
    cuda = _driver()
    _check(cuda.cuInit(0), "The driver does not start")
    version, count, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _check(cuda.cuDriverGetVersion(ctypes.byref(version)), "The driver does not tell its version")
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)), "The driver does not count its GPUs")
    if count.value < 1:
        raise MissingDependency(
            "No NVIDIA GPU can be seen.", why="The driver is there and knows none.", fix="Look at CUDA_VISIBLE_DEVICES."
        )
    if index >= count.value:
        raise MissingDependency(
            f"There is no GPU {index}.",
            why=f"The driver shows {count.value} to this process, numbered from 0.",
            fix="Look at CUDA_VISIBLE_DEVICES.",
        )
    _check(cuda.cuDeviceGet(ctypes.byref(device), index), f"GPU {index} cannot be opened")
    name = ctypes.create_string_buffer(256)
    _check(cuda.cuDeviceGetName(name, len(name), device), f"GPU {index} does not tell its name")
    major, minor = (_attribute(cuda, device, which) for which in (_MAJOR, _MINOR))
    return Device(
        name=name.value.decode("utf-8", "replace"),
        capability=10 * major + minor,
        driver=f"{version.value // 1000}.{version.value % 1000 // 10}",
        index=index,
    )


def find_device_or_none() -> Device | None:
    """Find the first GPU, or None on a machine without one that works."""
    try:
        return find_device()
    except MissingDependency:
        return None


@contextmanager
def primary_context(index: int = 0) -> Iterator[None]:
    """Have the primary context of a GPU current on this thread: the one that the CUDA runtime and TensorRT use.

    Raises:
        MissingDependency: no driver, no such GPU, or no context can be made on it.
    """
    cuda = _driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(cuda.cuInit(0), "The driver does not start")
    _check(cuda.cuDeviceGet(ctypes.byref(device), index), f"GPU {index} cannot be opened")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"GPU {index} gives no context")
    try:
        _check(cuda.cuCtxPushCurrent_v2(context), f"GPU {index} gives no context")
        try:
            yield
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)


def _driver() -> ctypes.CDLL:
    problem = ""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problem = problem or str(error)
    raise MissingDependency("No NVIDIA driver is installed.", why=problem, fix=_FIX)


def _check(status: int, what: str) -> None:
    if status != 0:
        # 100 and 803 are the common ones: no device, and a driver too old for the libraries on the path.
        raise MissingDependency("No NVIDIA GPU can be used.", why=f"{what} (CUresult {status}).", fix=_FIX)


def _attribute(cuda: ctypes.CDLL, device: ctypes.c_int, which: int) -> int:
    value = ctypes.c_int()
    _check(cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device), "The GPU does not tell its capability")
    return value.value


def platform_name() -> str:
    """Return operating system and processor, which engines depend on: `linux-x86_64`, `linux-aarch64`."""
    return f"{platform.system().lower()}-{machine()}"


@contextmanager
def cuda_runtime_on_path() -> Iterator[None]:
    """Let Polygraphy find libcudart in NVIDIA's wheels while the context lasts.

    Polygraphy looks in LD_LIBRARY_PATH, the usual system folders and the wheels for CUDA 12; the wheels for CUDA 13 put
    the library into `nvidia/cu13/lib`, which is added here.
    """
    before = os.environ.get("LD_LIBRARY_PATH")
    folders = [str(Path(entry) / "nvidia" / "cu13" / "lib") for entry in sys.path if entry]
    found = [folder for folder in folders if Path(folder).is_dir()]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([*([before] if before else []), *found])
    try:
        yield
    finally:
        if before is None:
            del os.environ["LD_LIBRARY_PATH"]
        else:
            os.environ["LD_LIBRARY_PATH"] = before
