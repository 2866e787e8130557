"""Open an engine safely: check everything that may not fit before TensorRT reads the file.

TensorRT's own refusals come late, in its log, or as a crash. The sidecar of an engine states what it was built for
(`core/documents/engine_sidecar.py`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....core.documents.engine_sidecar import BuildOptions, EngineSidecar, read_engine_sidecar
from ....core.errors import MissingDependency, UsageError
from ....core.storage.library_store import AUTO
from .device import Device, cuda_runtime_on_path, find_device, platform_name
from .library import TensorRTLibrary, open_library
from .plugins import find_library, load_plugin

_log = logging.getLogger(__name__)

_AMPERE = 80  # compute capability of the oldest GPU that runs engines of the level "ampere-plus"


@dataclass(frozen=True)
class OpenEngine:
    """An engine in GPU memory.

    Args:
        sidecar: its sidecar.
        opened: the library.
        device: the GPU.
        engine: its `ICudaEngine`.
    """

    sidecar: EngineSidecar
    opened: TensorRTLibrary
    device: Device
    engine: Any


def open_engine(path: Path, plugin: str = AUTO, gpu: int = 0) -> OpenEngine:
    """Load an engine onto the GPU; callers first check the file with `core.storage.publishing.check_unchanged`.

    Args:
        path: the engine.
        plugin: its plugin library, as `runtime.backends.tensorrt.plugins.find_library` takes it.
        gpu: its place among the GPUs that the driver shows to this process.

    Raises:
        UsageError: no engine, no sidecar next to it, it was built for another system, library version or GPU, or it
            needs no plugin library and one was named.
        MissingDependency: the library, the driver, the CUDA runtime or the plugin library is missing.
        CheckFailed: the sidecar or the plugin library were changed after the build.
    """
    sidecar = read_engine_sidecar(path)
    reason = why_never_opened(sidecar.options)
    if reason:
        raise UsageError(f"{path} is not opened by localattn.", why=f"{reason}.", fix=_ELSEWHERE)
    opened = open_library(sidecar.backend)
    check_library(path, sidecar, opened.version)
    library = find_library(sidecar.plugin, path, plugin)
    device = find_device(gpu)
    check_device(path, sidecar, device)
    start_device(device)
    if library is not None:
        load_plugin(opened, library)
    _log.info("%s opens with %s %s on %s", path.name, sidecar.backend, opened.version, device.describe())
    return OpenEngine(sidecar, opened, device, _deserialise(path, opened))


# Who runs what is never opened here.
_ELSEWHERE = (
    "Run it in a program of yours that allows such engines, or puts the weights in; or build it again without that "
    "option."
)


def why_never_opened(options: BuildOptions) -> str:
    """Return why an engine of this kind is never opened here; "" if it can be.

    TensorRT loads code out of an engine only where it is told to. An engine comes from others, so it is never told.
    """
    if options.version_compatible or options.embed_plugin:
        return "it holds code besides the GPU's, which would run in this process"
    return "it has no weights until somebody puts them in" if options.strip_weights else ""


def check_library(path: Path, sidecar: EngineSidecar, version: str) -> None:
    """Refuse an engine built on another system or by another release of the library.

    Raises:
        UsageError: the engine needs another one than is here; both are named.
    """
    if sidecar.platform != platform_name():
        raise UsageError(
            f"{path} was built for {sidecar.platform}.",
            why=f"This is {platform_name()}.",
            fix=f"Build it here from {sidecar.onnx_name}.",
        )
    if sidecar.library_version != version:
        raise UsageError(
            f"{path} was built by {sidecar.backend} {sidecar.library_version}.",
            why=f"Here is {sidecar.backend} {version}, which does not read engines of other releases.",
            fix=f"Build it here from {sidecar.onnx_name}, or install {sidecar.backend} {sidecar.library_version}.",
        )


def check_device(path: Path, sidecar: EngineSidecar, device: Device) -> None:
    """Refuse an engine built for another compute capability.

    Raises:
        UsageError: the GPU here has another; both are named.
    """
    ampere_plus = sidecar.options.hardware_compatible == "ampere-plus" and device.capability >= _AMPERE
    if device.target not in sidecar.targets and not ampere_plus:
        built = f" on {sidecar.device}" if sidecar.device else ""
        raise UsageError(
            f"{path} was built for {', '.join(sidecar.targets)}{built}.",
            why=f"The GPU here is {device.describe()}.",
            fix=f"Build it for this GPU from {sidecar.onnx_name}.",
        )


def start_device(device: Device) -> None:
    """Have Polygraphy load libcudart, which it needs for streams and memory, and a GPU current on this thread.

    Raises:
        MissingDependency: there is no libcudart, or it does not take the GPU.
    """
    from polygraphy import cuda
    from polygraphy.exception import PolygraphyException

    try:
        with cuda_runtime_on_path():
            cuda.wrapper()
    except (OSError, PolygraphyException) as error:
        raise MissingDependency(
            "The CUDA runtime library (libcudart) cannot be found.",
            why=str(error).splitlines()[0],
            fix="Install CUDA (on Jetson: nvidia-jetpack), or: pip install nvidia-cuda-runtime.",
        ) from error
    use_device(device)


def use_device(device: Device) -> None:
    """Have a GPU current on this thread; every thread begins with the first.

    Raises:
        MissingDependency: the CUDA runtime does not take it.
    """
    if device.index == 0:
        return
    from polygraphy import cuda

    status = cuda.wrapper().handle.cudaSetDevice(device.index)
    if status:
        raise MissingDependency(
            f"GPU {device.index} cannot be used.", why=f"cudaSetDevice returned CUDA error {status}."
        )


def _deserialise(path: Path, opened: TensorRTLibrary) -> Any:
    from polygraphy.backend.trt import engine_from_path
    from polygraphy.exception import PolygraphyException

    opened.messages.clear()
    try:
        return engine_from_path(str(path))
    except (PolygraphyException, TypeError) as error:  # TypeError: the runtime's constructor returned nothing
        raise UsageError(
            f"{opened.library.name} {opened.version} cannot read {path}.",
            why=opened.messages.reason(error),
            fix="Build the engine again on this machine: localattn build.",
        ) from error
