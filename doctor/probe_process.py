"""Run a probe that may crash, as a separate script that prints one line of JSON.

    python probe_process.py package torch
    python probe_process.py package tensorrt builder
    python probe_process.py provider CUDAExecutionProvider
    python probe_process.py library IMAGE /path/liblocalattn_onnxruntime.so
    python probe_process.py kernels IMAGE /path/liblocalattn_plugin.so fp16:64 fp32:64

A broken shared library can crash on import and a driver can hang; then only this process dies. It needs nothing but the
standard library and what it looks at. Whatever a package prints goes to stderr.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this script's own folder: files next to it must not be imported in place of packages

import contextlib
import ctypes
import json
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

# y = x·x for x float32 [2, 2]: one MatMul, opset 13, as an ONNX file.
MODEL = bytes.fromhex(
    "080712003a400a110a01780a017812017922064d61744d756c1201675a130a0178120e0a0c080112"
    "080a0208020a02080262130a0179120e0a0c080112080a0208020a02080242040a00100d"
)

_MAJOR, _MINOR = 75, 76  # CUdevice_attribute of cuda.h


class Missing(Exception):
    """The package or device is missing on this machine."""


def package(name: str, more: str = "") -> dict[str, Any]:
    """Import a package; return its version and, with `more`, what a function of `_MORE` tells of it."""
    # onnxruntime and OpenVINO write files for telemetry as they are imported.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            raise Missing(f"No module named {name!r}.") from error
        raise
    findings: dict[str, Any] = {"version": str(getattr(module, "__version__", ""))}
    if more:
        findings |= _MORE[more](module)
    return findings


def _cuda(torch: Any) -> dict[str, Any]:
    return {"detail": "with CUDA" if torch.cuda.is_available() else "CPU only"}


def _providers(ort: Any) -> dict[str, Any]:
    return {"items": list(ort.get_available_providers())}


def _builder(trt: Any) -> dict[str, Any]:
    """Create a builder, because the package can be imported even if its libraries do not load."""
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    if builder is None:
        raise RuntimeError("it cannot create a builder")
    return {}


# What else to tell of a package, from the imported module.
_MORE: dict[str, Callable[[Any], dict[str, Any]]] = {"cuda": _cuda, "providers": _providers, "builder": _builder}


def provider(name: str) -> dict[str, Any]:
    """Run a small model on one of onnxruntime's providers, without falling back on the CPU."""
    package("onnxruntime")
    import numpy as np
    import onnxruntime as ort

    if name not in ort.get_available_providers():
        raise Missing(f"onnxruntime {ort.__version__} here was built without it.")
    if name != "CPUExecutionProvider" and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    if name == "TensorrtExecutionProvider":
        # The package contains the libraries, which the system may have instead.
        with contextlib.suppress(ImportError, OSError):
            import_module("tensorrt")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if name != "CPUExecutionProvider":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = ort.InferenceSession(MODEL, options, providers=[name], enable_fallback=0)
    except Exception as error:
        if "fallback to CPU EP" in str(error):
            raise RuntimeError(_why_not_started(ort, name)) from error
        raise
    session.disable_fallback()
    if session.get_providers()[0] != name:
        raise RuntimeError(f"it did not start; {session.get_providers()[0]} did")
    x = np.array([[1, 2], [3, 4]], np.float32)
    if not np.allclose(session.run(None, {"x": x})[0], x @ x):
        raise RuntimeError("it computes a wrong product")
    return {"version": ort.__version__, "detail": "starts and computes"}


def _why_not_started(ort: Any, name: str) -> str:
    """Say why the CPU would do the work: the provider did not start, or does not support the model."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    started = ort.InferenceSession(MODEL, options, providers=[name, "CPUExecutionProvider"]).get_providers()
    if name in started:
        return "it starts but leaves the work to the CPU"
    # onnxruntime only logs missing libraries; the system's loader names them.
    library = f"libonnxruntime_providers_{name.removesuffix('ExecutionProvider').lower()}.so"
    folder = os.path.join(os.path.dirname(ort.__file__), "capi")  # noqa: PTH118, PTH120
    lacks = ""
    if os.path.isfile(os.path.join(folder, library)):  # noqa: PTH113, PTH118
        try:
            ctypes.CDLL(os.path.join(folder, "libonnxruntime_providers_shared.so"), mode=ctypes.RTLD_GLOBAL)  # noqa: PTH118
            ctypes.CDLL(os.path.join(folder, library))  # noqa: PTH118
        except OSError as error:
            lacks = f": {error}"
    return f"it did not start{lacks}"


def driver() -> dict[str, Any]:
    """Ask the CUDA driver which CUDA version it supports, and for its GPUs."""
    for name in ("libcuda.so.1", "libcuda.so", "nvcuda.dll"):
        try:
            cuda = ctypes.CDLL(name)
            break
        except OSError:
            continue
    else:
        raise Missing("There is no CUDA driver (libcuda.so.1).")
    code = cuda.cuInit(0)
    if code:
        raise RuntimeError(f"cuInit returned CUDA error {code}" + (": no GPU" if code == 100 else ""))
    number, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    gpus = [_gpu(cuda, index) for index in range(count.value)]
    if not gpus:
        raise RuntimeError("it finds no GPU")
    return {"version": f"{number.value // 1000}.{number.value % 1000 // 10}", "items": gpus}


def _gpu(cuda: Any, index: int) -> str:
    """Describe a GPU: `NVIDIA L4, compute capability 8.9, 22.5 GiB`."""
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(str(value.value))
    text = name.value.decode(errors="replace")
    return f"{text}, compute capability {'.'.join(capability)}, {memory.value / 2**30:.1f} GiB"


def library(image: str, path: str) -> dict[str, Any]:
    """Load a library of custom operators into onnxruntime; return the instruction set that ours uses.

    Args:
        image: path that leads to the bytes that were verified.
        path: the library's own path, for messages.
    """
    package("onnxruntime")
    import onnxruntime as ort

    try:
        ort.SessionOptions().register_custom_ops_library(image)
        ask = ctypes.CDLL(image).localattn_instruction_set
    except Exception as error:
        raise RuntimeError(str(error).replace(image, path)) from error
    ask.restype = ctypes.c_char_p
    return {"detail": f"{ask().decode()}; {path}"}


def kernels(image: str, path: str, *wanted: str) -> dict[str, Any]:
    """Load kernels of a plugin library onto the first GPU; report for each whether it is machine code or PTX.

    Args:
        image: path that leads to the bytes that were verified.
        path: the library's own path, for messages.
        wanted: element types and head sizes, as "fp16:64".
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Missing("There is no CUDA driver (libcuda.so.1).") from error
    device, context = ctypes.c_int(), ctypes.c_void_p()
    steps: tuple[Callable[[], int], ...] = (
        lambda: cuda.cuInit(0),
        lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        lambda: cuda.cuCtxPushCurrent_v2(context),
    )
    for step in steps:
        code = step()
        if code:
            raise RuntimeError(f"no context on the GPU: CUDA error {code}")
    library = ctypes.CDLL(image)
    text = ctypes.create_string_buffer(1 << 14)
    lines, failed = [], 0
    for name in wanted:
        element, _, head_dim = name.partition(":")
        arguments = (("fp16", "bf16", "fp32").index(element), int(head_dim), 0)
        bad = library.localattn_load_kernel_with(*arguments, text, ctypes.c_size_t(len(text)))
        line = text.value.decode(errors="replace").replace(image, path)
        lines.append(f"{name.replace(':', ', head size ')}: {line}" if bad else line)
        failed += bool(bad)
    if failed:
        raise RuntimeError("; ".join(lines))
    status = "limited" if any("PTX of" in line for line in lines) else "ok"
    return {"status": status, "detail": path, "items": lines}


# By the first argument of this script.
_PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "package": package,
    "provider": provider,
    "driver": driver,
    "library": library,
    "kernels": kernels,
}


def main() -> None:
    """Run the probe, and print what was found as one line of JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # including the output of C libraries
    kind, *arguments = sys.argv[1:]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = {"status": "ok", **_PROBES[kind](*arguments)}
    except Missing as error:
        found = {"status": "missing", "detail": str(error)}
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        found = {"status": "broken", "detail": text if len(text) <= 300 else text[:299] + "…"}
    print(json.dumps(found), file=out, flush=True)
    os._exit(0)  # the answer is printed: a library that crashes while it is unloaded does not count


if __name__ == "__main__":
    main()
