"""Run a TensorRT or TensorRT-RTX engine with only its Python package, numpy and the CUDA driver.

The driver is called first, through ctypes: deserialising without one can end the process. Versions and the GPU are
compared with the manifest before the engine is opened, and only files whose SHA-256 was checked are opened here.
Source of the calls: the CUDA driver API reference and TensorRT's Python API (execute_async_v3 and named tensors).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

# The import name of each backend, and how to install it.
MODULES = {
    "tensorrt": ("tensorrt", "JetPack and NVIDIA's containers include it; else pip install tensorrt"),
    "tensorrt-rtx": ("tensorrt_rtx", "pip install tensorrt-rtx-cu13"),
}
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


class NotHere(Exception):
    """This machine lacks what the engine needs, or the engine is for another GPU or another TensorRT."""


class Refused(Exception):
    """TensorRT does not load the engine, or a CUDA call failed."""


class Cuda:
    """Call the CUDA driver functions that a run needs, on the first GPU.

    Raises:
        NotHere: no driver, or no GPU.
    """

    def __init__(self) -> None:
        for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
            try:
                self._library = ctypes.CDLL(name)
                break
            except OSError:
                continue
        else:
            raise NotHere("There is no CUDA driver (libcuda.so.1).")
        device, count = ctypes.c_int(), ctypes.c_int()
        if self._library.cuInit(0) or self._library.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
            raise NotHere("The CUDA driver finds no GPU.")
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._device = device
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise Refused(f"{name} returned CUDA error {code}.")

    def capability(self) -> str:
        """Return the compute capability, as "8.7"."""
        numbers = []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
            numbers.append(value.value)
        return f"{numbers[0]}.{numbers[1]}"

    def allocate(self, size: int) -> int:
        """Allocate at least `size` bytes of device memory and return the address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        return address.value

    def free(self, address: int) -> None:
        """Free the memory at an address."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def upload(self, address: int, array: Any) -> None:
        """Copy a contiguous array to the device."""
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), array.ctypes.data_as(ctypes.c_void_p), _size(array))

    def download(self, array: Any, address: int) -> None:
        """Fill a contiguous array from the device."""
        self._call("cuMemcpyDtoH_v2", array.ctypes.data_as(ctypes.c_void_p), ctypes.c_uint64(address), _size(array))

    def synchronize(self) -> None:
        """Wait for all work that was started."""
        self._call("cuCtxSynchronize")


def _size(array: Any) -> ctypes.c_size_t:
    return ctypes.c_size_t(array.nbytes)


def open_engine(
    path: Path, model: dict[str, Any], plugins: list[dict[str, Any]]
) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Open an engine.

    The result is a function from inputs to outputs, by name; and the plugin library that was loaded, with its `ops`,
    or {}.

    Args:
        path: the engine.
        model: its entry in the manifest: `backend`, `backend_version`, `compute_capability` ("" is any).
        plugins: plugin libraries that it needs (`source`, `image`); one for another processor is passed over.

    Raises:
        NotHere: TensorRT, a driver or the right GPU is missing.
        Refused: the engine does not load.
    """
    name, advice = MODULES.get(model["backend"], (model["backend"], ""))
    if not advice:
        raise NotHere(f"Unknown backend {name!r}.")
    try:
        trt = import_module(name)
    except ImportError as error:
        raise NotHere(f"{name} cannot be imported ({error}). {advice}.") from error
    _same_release(model["backend_version"], str(trt.__version__))
    cuda = Cuda()
    _same_gpu(model["compute_capability"], cuda.capability())
    logger = trt.Logger(trt.Logger.ERROR)
    if hasattr(trt, "init_libnvinfer_plugins"):
        trt.init_libnvinfer_plugins(logger, "")
    library = _load_plugins(trt, plugins)
    engine = trt.Runtime(logger).deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise Refused(f"TensorRT {trt.__version__} refuses it; see its message above.")
    context = engine.create_execution_context()
    return lambda inputs: _run(trt, cuda, engine, context, inputs), library


def _same_release(built: str, here: str) -> None:
    """Refuse an engine of another release: major, minor and patch must be the same."""
    if built and built.split(".")[:3] != here.split(".")[:3]:
        raise NotHere(f"It was built by TensorRT {built}; this device has {here}. Build it again on this device.")


def _same_gpu(wanted: str, here: str) -> None:
    if wanted and here not in wanted.replace(" ", "").split(","):
        raise NotHere(f"It was built for another GPU: compute capability {wanted}; this one has {here}.")


def _load_plugins(trt: Any, plugins: list[dict[str, Any]]) -> dict[str, Any]:
    registry, problems = trt.get_plugin_registry(), []
    for library in plugins:
        try:
            ctypes.CDLL(library["image"])  # raises an error with the reason, which the registry does not give
        except OSError as error:
            problems.append(str(error).replace(library["image"], library["source"]))
            continue
        before = {(creator.plugin_namespace, creator.name) for creator in registry.all_creators}
        if registry.load_library(library["image"]) is not None:
            after = {(creator.plugin_namespace, creator.name) for creator in registry.all_creators}
            return library | {"ops": sorted(name for _, name in after - before)}
        problems.append(f"{library['source']} has no plugins for this TensorRT")
    if plugins:
        raise NotHere(f"No plugin library could be loaded: {'; '.join(problems)}.")
    return {}


def _run(trt: Any, cuda: Cuda, engine: Any, context: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Run once; device memory is freed afterwards."""
    import numpy as np

    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    takes = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    if set(takes) != set(inputs):
        raise Refused(f"The engine needs {sorted(takes)}, the sample has {sorted(inputs)}.")
    addresses: dict[str, int] = {}
    outputs: dict[str, Any] = {}
    try:
        for name in takes:
            array = np.ascontiguousarray(inputs[name]).reshape(np.shape(inputs[name]))
            wanted = np.dtype(trt.nptype(engine.get_tensor_dtype(name)))
            if array.dtype != wanted:
                raise Refused(f"Input {name!r} is {array.dtype}; the engine needs {wanted}.")
            if not context.set_input_shape(name, array.shape):
                raise Refused(f"The engine does not accept {name!r} of shape {array.shape}.")
            addresses[name] = cuda.allocate(array.nbytes)
            cuda.upload(addresses[name], array)
        for name in names:
            if name not in takes:
                shape = tuple(context.get_tensor_shape(name))
                dtype = np.dtype(trt.nptype(engine.get_tensor_dtype(name)))
                outputs[name] = np.empty(shape, dtype)
                addresses[name] = cuda.allocate(math.prod(shape) * dtype.itemsize)
        for name, address in addresses.items():
            context.set_tensor_address(name, address)
        if not context.execute_async_v3(0):
            raise Refused("execute_async_v3 failed.")
        cuda.synchronize()
        for name, array in outputs.items():
            cuda.download(array, addresses[name])
    finally:
        for address in addresses.values():
            cuda.free(address)
    return outputs
