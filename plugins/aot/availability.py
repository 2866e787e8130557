"""Find out whether ahead-of-time plugins can be used here, and if not, why."""

from __future__ import annotations

import importlib

from ...core.tensorrt_versions import TENSORRT, describe, has


def why_not_release(version: str) -> str:
    """Return why a TensorRT release cannot use ahead-of-time plugins; empty if it can."""
    if has("aot_plugins", TENSORRT, version):
        return ""
    able = describe("aot_plugins", TENSORRT)
    return f"TensorRT {version} does not find ahead-of-time plugins for nodes of ONNX files; {able} does"


def why_not() -> str:
    """Return why ahead-of-time plugins cannot be used on this machine; empty if they can."""
    try:
        trt = importlib.import_module("tensorrt")
        version = str(trt.__version__)
    except Exception as error:  # NVIDIA's package fails in many ways without its libraries
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        return f"tensorrt {reason}; pip install 'localattn[tensorrt]'"
    reason = why_not_release(version)
    if reason:
        return reason
    try:
        plugin = importlib.import_module("tensorrt.plugin")
    except Exception as error:
        return f"tensorrt.plugin cannot be imported ({error})"
    if not hasattr(plugin, "aot_impl"):
        return f"tensorrt.plugin of TensorRT {version} has no aot_impl"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton, which compiles the kernel, cannot be imported ({error}); pip install 'localattn[plugin]'"
    return ""
