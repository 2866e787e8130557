"""Whether ahead-of-time plugins can be used here: every condition, and the reason when one fails."""

from __future__ import annotations

import importlib
import re

# Release that brought them out of an ONNX file, and releases in which they are broken (no plugin is found).
FIRST = (10, 9)
BROKEN = ((10, 14),)


def why_not_release(version: str) -> str:
    """Why a TensorRT release cannot use them; empty if it can."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < FIRST:
        return f"TensorRT {version} has no ahead-of-time plugins out of ONNX files; they came with {_text(FIRST)}"
    if numbers in BROKEN:
        return f"TensorRT {version} does not find them when it reads an ONNX file; take another release"
    return ""


def why_not() -> str:
    """Why they cannot be used on this machine; empty if they can."""
    try:
        trt = importlib.import_module("tensorrt")
        version = str(trt.__version__)
    except Exception as error:  # NVIDIA's package fails in many ways without its libraries
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"does not import ({error})"
        return f"tensorrt {reason}; pip install 'localattn[tensorrt]'"
    reason = why_not_release(version)
    if reason:
        return reason
    try:
        plugin = importlib.import_module("tensorrt.plugin")
    except Exception as error:
        return f"tensorrt.plugin does not import ({error})"
    if not hasattr(plugin, "aot_impl"):
        return f"tensorrt.plugin of TensorRT {version} has no aot_impl"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"Triton, which compiles the kernel, does not import ({error}); pip install 'localattn[plugin]'"
    return ""


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
