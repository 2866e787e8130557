"""Build an engine: parse, check, build, check again, and only then move the files into place."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from .....core.documents.engine_sidecar import BuildOptions, EngineSidecar, PluginRecord
from .....core.documents.sidecar import PARITY, CheckRecord, sidecar_path
from .....core.error_texts import argument
from .....core.errors import BuildFailed, MissingDependency, UsageError
from .....core.progress import timed_steps
from .....core.storage.files import sha256
from .....core.storage.outputs import check_outputs, writing
from .....core.storage.publishing import publish_together, sealed
from .....core.versions import installed
from ...engines import BuildReport, BuildRequest, Compare
from ..device import Device, find_device, find_device_or_none, platform_name
from ..library import TensorRTLibrary, open_library
from ..open import start_device, why_never_opened
from ..plugins import loaded_plugin, registered_op_types
from .checks import check_engine, check_network
from .network import build, parse
from .request import resolve_targets
from .source import Source, check_fp8, profiles_for, read_source
from .special import check_kept, check_kind
from .timing_cache import extend, stage

_log = logging.getLogger(__name__)


@timed_steps(_log)
def build_engine(
    request: BuildRequest, progress: Callable[[str], None] = lambda _: None, compare: Compare | None = None
) -> BuildReport:
    """Build an engine and the sidecar next to it; either both appear, or nothing.

    Args:
        request: what to build.
        progress: called with a line for each step as it begins.
        compare: the numeric check, `runtime.parity.files.check_built_engine`; it runs if the engine runs here.

    Raises:
        UsageError: an input that cannot be read, a target that this library cannot build for, an existing output.
        MissingDependency: the library, its driver, or the plugin library is missing.
        BuildFailed: the file cannot be parsed, the build fails, or a check of the result does.
    """
    with ExitStack() as stack:
        check_outputs(request.outputs, inputs=request.inputs, overwrite=request.overwrite)
        engine = request.outputs[-1]
        folder = stack.enter_context(writing(engine, inputs=request.inputs, overwrite=request.overwrite))
        plan = _plan(request, progress)
        opened, source = plan.opened, plan.source
        if request.plugin.register is not None:
            request.plugin.register()
        stack.enter_context(loaded_plugin(opened, request.plugin.library))
        started = time.perf_counter()
        nodes, op_types = _served(plan)
        progress("Parsing")
        network = parse(opened, source, request.plugin.kind, op_types)
        checks = demand(check_network(opened, network.definition, source, nodes))
        cache, notes = None, []
        if request.timing_cache is not None:
            if opened.has("timing_cache"):
                cache = stage(opened, network.builder, request.timing_cache, folder)
            else:
                notes.append(f"{opened.library.name} times kernels when the engine runs; the timing cache is not used")
        progress("Building")
        staged = folder / request.output.name
        with staged.open("wb") as stream:
            stream.write(build(opened, network, request, plan.targets, plan.options.profiles, progress, cache))
        seconds = time.perf_counter() - started
        progress("Checking the engine")
        checks += demand(check_kept(staged, request))
        checks += demand(_inspect(plan, staged, nodes))
        sidecar = _sidecar_of(plan, staged, nodes, checks, seconds)
        described = sidecar_path(staged)
        described.write_text(sealed(sidecar.to_json()), encoding="utf-8")
        if compare is not None:
            progress("Comparing the engine with the ONNX file")
            sidecar.checks += demand([_parity(plan, staged, compare)])
            described.write_text(sealed(sidecar.to_json()), encoding="utf-8")
        publish_together({described: sidecar_path(request.output), staged: request.output}, folder)
        if cache is not None and cache.is_file():
            assert request.timing_cache is not None
            notes += extend(network.builder, request.timing_cache, cache.read_bytes())
    return BuildReport(request.output, sidecar, notes)


@dataclass(frozen=True)
class _Plan:
    """What is known of a build before TensorRT parses the file.

    Args:
        request: what to build.
        source: the ONNX file.
        options: the record of the request, with the sizes of the inputs.
        opened: the library.
        device: the GPU here; None without one.
        targets: compute capabilities of the GPUs to build for.
    """

    request: BuildRequest
    source: Source
    options: BuildOptions
    opened: TensorRTLibrary
    device: Device | None
    targets: Sequence[int]

    def why_not_here(self) -> str:
        """Return why the engine is not opened on this machine; "" if it is."""
        never = why_never_opened(self.options)
        if never:
            return never
        if self.device is None:
            return "no GPU here"
        return "" if self.device.capability in self.targets else f"the GPU here is {self.device.describe()}"


def _plan(request: BuildRequest, progress: Callable[[str], None]) -> _Plan:
    """Read the file, open the library, and refuse what it cannot build; raises what `build_engine` raises."""
    source = read_source(request.model)
    options = request.options(profiles_for(source, request.profiles))
    progress(f"Opening {request.backend}")
    opened, device = _library(request.backend, request.device)
    targets = resolve_targets(opened, request.targets, device)
    check_kind(opened, request, device)
    check_fp8(source.file, targets)
    return _Plan(request, source, options, opened, device, targets)


def plan_targets(backend: str, wanted: Sequence[str], gpu: int = 0) -> list[int]:
    """Return the compute capabilities an engine will be built for; raises what `build_engine` would."""
    opened, device = _library(backend, gpu)
    return resolve_targets(opened, wanted, device)


def demand(checks: Sequence[CheckRecord]) -> list[CheckRecord]:
    """Return the checks, if none failed.

    Raises:
        BuildFailed: the first that did.
    """
    for check in checks:
        if check.status == "failed":
            raise BuildFailed(
                f"The engine is not what was asked for: {check.name}.",
                why=check.detail,
                fix="No engine was written. `localattn plugin check` shows the plugins of a library.",
            )
    return list(checks)


def _library(backend: str, gpu: int) -> tuple[TensorRTLibrary, Device | None]:
    """Open the library, and find the GPU it builds with. TensorRT needs a GPU: without one it would crash or hang."""
    opened = open_library(backend)
    if opened.has("builds_without_gpu"):
        return opened, _started(gpu) if gpu else find_device_or_none()
    try:
        return opened, _started(gpu)
    except MissingDependency as error:
        other = argument("backend", "tensorrt-rtx")
        fix = f"Build on the device that will run the engine; for RTX GPUs, {other} builds anywhere."
        raise MissingDependency(f"{backend} builds on a GPU only. {error.what}", why=error.why, fix=fix) from error


def _started(gpu: int) -> Device:
    """Find a GPU, and have it current on this thread; the first is without being told."""
    device = find_device(gpu)
    if gpu:
        start_device(device)
    return device


def _served(plan: _Plan) -> tuple[list[str], list[str]]:
    """Return the names of the attention nodes that plugins compute, and their op types.

    Raises:
        UsageError: a plugin was asked for, and computes none of the file's nodes.
    """
    plugin, source = plan.request.plugin, plan.source
    if plugin.kind == "none":
        return [], []
    # Ahead-of-time plugins are found by TensorRT's Python package, not in the registry of libraries.
    known = plugin.op_types or registered_op_types(plan.opened)
    nodes = source.nodes(known)
    if not nodes:
        there = ", ".join(sorted({node.op_type for node in source.summary.windowed})) or "none"
        raise UsageError(
            f"No plugin serves a node of {source.path}.",
            why=f"Its attention nodes: {there}. Plugins: {', '.join(known)}.",
            fix=f"Build with {argument('plugin', 'none')}: the function definition in the file computes the node.",
        )
    return nodes, list(known)


def _inspect(plan: _Plan, staged: Path, nodes: Sequence[str]) -> list[CheckRecord]:
    """Open the engine and check its layers, if the GPU here is one it was built for."""
    foreign = plan.why_not_here()
    if foreign:
        detail = f"{foreign}; the network above is what was serialised"
        return [CheckRecord(name="engine inspector", status="skipped", detail=detail)]
    from polygraphy.backend.trt import engine_from_path
    from polygraphy.exception import PolygraphyException

    try:
        engine = engine_from_path(str(staged))
    except PolygraphyException as error:
        why = plan.opened.messages.reason(error)
        raise BuildFailed("The engine that was just built does not open.", why=why) from error
    ahead_of_time = plan.request.plugin.kind == "aot"
    return check_engine(engine, plan.opened, plan.source, nodes, ahead_of_time=ahead_of_time)


def _parity(plan: _Plan, staged: Path, compare: Compare) -> CheckRecord:
    """Compare the engine with its file, or record that this was skipped and how to do it."""
    request, model = plan.request, plan.source.path
    foreign = plan.why_not_here()
    if foreign:
        later = f"on the device: localattn parity {request.output.name} --against {model.name}"
        return CheckRecord(name=PARITY, status="skipped", detail=f"{foreign}: the engine did not run; {later}")
    library = request.plugin.library
    where = f"cuda:{request.device}" if request.device else "auto"
    return compare(staged, model, None if library is None else library.path, where)


def _sidecar_of(
    plan: _Plan, staged: Path, nodes: Sequence[str], checks: list[CheckRecord], seconds: float
) -> EngineSidecar:
    """Return the sidecar of the engine, which goes to a file next to it."""
    choice, source, device = plan.request.plugin, plan.source, plan.device
    plugin = None
    if choice.kind != "none":
        plugin = PluginRecord(kind=choice.kind, layers=list(nodes))
        if choice.library is not None:
            plugin.kernels = list(choice.kernels)
            plugin.path, plugin.sha256 = str(choice.library.path.resolve()), choice.library.sha256
    return EngineSidecar(
        backend=plan.request.backend,
        library_version=plan.opened.version,
        targets=[f"sm_{target}" for target in plan.targets],
        platform=platform_name(),
        device="" if device is None else device.name,
        dtype=source.dtype,
        inputs=source.summary.inputs,
        outputs=source.summary.outputs,
        plugin=plugin,
        options=plan.options,
        onnx_name=source.path.name,
        onnx_sha256=source.file.sha256,
        engine_sha256=sha256(staged),
        engine_bytes=staged.stat().st_size,
        seconds=seconds,
        versions={"python": platform.python_version(), **installed(("localattn", "onnx", "polygraphy"))},
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        checks=checks,
        model=source.summary.sidecar if source.summary.sidecar_matches else None,
    )
