"""Parse an ONNX file into TensorRT's network, and build the network into the engine's bytes.

Polygraphy makes the network, the configuration and the engine, and handles the differences between releases. Three
things it cannot do are done here: parse a model from memory whose weights are in a file (and report which node
failed), ask for ahead-of-time plugins, and turn off TF32 in TensorRT-RTX, which is on by default there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .....core.documents.engine_sidecar import ProfileRecord
from .....core.error_texts import argument
from .....core.errors import BuildFailed, MissingDependency
from .....onnx_graph.library_errors import refused_as
from ...engines import BuildRequest
from ..library import TensorRTLibrary
from . import special
from .source import Source


@dataclass(frozen=True)
class Network:
    """A parsed model. The parser is kept, because the network's weights are in its memory."""

    builder: Any
    definition: Any
    parser: Any


def parse(opened: TensorRTLibrary, source: Source, plugin_kind: str, op_types: Sequence[str]) -> Network:
    """Parse a file into a strongly typed network: every precision is the file's.

    Args:
        opened: the library.
        source: the file.
        plugin_kind: "library", "aot" or "none".
        op_types: the op types that plugins compute.

    Raises:
        BuildFailed: the parser rejects the file, or the library does not support ahead-of-time plugins; the first error
            is given.
        MissingDependency: the library does not start.
    """
    trt = opened.trt
    opened.messages.clear()
    builder, definition = _empty_network(opened, plugin_kind)
    trt.init_libnvinfer_plugins(opened.logger, "")
    parser = trt.OnnxParser(definition, opened.logger)
    with refused_as(f"{source.path} cannot be built.", "Export the model again."):
        content = source.file.content
        if plugin_kind != "none":
            prefers_plugins = opened.has("plugin_before_function")
            content = source.for_plugins(op_types, prefers_plugins=prefers_plugins, fp8=plugin_kind == "library")
    # External data is looked for next to this path; the file itself is not read.
    place = source.path if source.file.folder is None else source.file.folder / source.path.name
    what = f"{opened.library.name} cannot read {source.path}."
    with refused_as(what, "Export the model again.", of=BuildFailed):
        understood = parser.parse(content, str(place))
    source.file.check_same()
    if not understood or parser.num_errors:
        said = opened.messages.errors
        if parser.num_errors:
            error = parser.get_error(0)
            said = [f"{error.desc()} (node {error.node_name()}, {error.node_operator()})"]
        raise BuildFailed(
            what,
            why=said[0] if said else "Its parser gave no reason.",
            fix=_advice(said, source),
        )
    return Network(builder, definition, parser)


# What onnxruntime's quantizer writes for weights and activations of 8 bits, which TensorRT takes in another form.
_QUANTIZED = {"DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul", "QGemm", "ConvInteger", "QLinearConv"}
_OF_QUANTIZER = re.compile("zero point|QuantizeLinear|MatMulInteger|QLinear", re.IGNORECASE)


def _advice(said: Sequence[str], source: Source) -> str:
    """Say what helps where the parser refuses a file."""
    text = said[0] if said else ""
    operators = {op_type for _, op_type in source.file.operators}
    if _OF_QUANTIZER.search(text) or (_QUANTIZED & operators and "unsupported" in text.lower()):
        kinds = f"{argument('weight_dtype', 'int8-qdq')} (or {argument('weight_dtype', 'fp8')} for RTX 40 and later)"
        return (
            "TensorRT takes 8-bit products with scales alone, without zero points. From the checkpoint: localattn "
            f"export {kinds}, then build that file."
        )
    return (
        f"`localattn inspect` shows what is in the file; export again with an older {argument('opset')} if a node is "
        "unknown."
    )


def _empty_network(opened: TensorRTLibrary, plugin_kind: str) -> tuple[Any, Any]:
    from polygraphy.backend.trt import create_network

    try:
        if plugin_kind != "aot":
            # Every network has an explicit batch since TensorRT 10; older Polygraphy would ask RTX for it and fail.
            return create_network(explicit_batch=False, strongly_typed=True)  # type: ignore[no-any-return]
        kinds = opened.trt.NetworkDefinitionCreationFlag
        builder = opened.trt.Builder(opened.logger)
        flags = 1 << int(kinds.STRONGLY_TYPED) | 1 << int(kinds.PREFER_AOT_PYTHON_PLUGINS)
        definition = builder.create_network(flags)
    except TypeError as error:  # the bindings raise this for a constructor that returned nothing
        raise MissingDependency(
            f"{opened.library.name} {opened.version} does not start.",
            why=opened.messages.reason(error),
            fix="Its release must fit the GPU driver: `nvidia-smi` shows the driver's version.",
        ) from error
    if definition is None:
        raise BuildFailed(
            f"{opened.library.name} {opened.version} makes no network for ahead-of-time plugins.",
            why=opened.messages.reason(),
            fix=f"Use {argument('plugin', 'library')}.",
        )
    return builder, definition


def build(
    opened: TensorRTLibrary,
    network: Network,
    request: BuildRequest,
    targets: Sequence[int],
    profiles: Sequence[ProfileRecord],
    progress: Callable[[str], None],
    cache: Path | None = None,
) -> Any:
    """Build the engine and return its bytes as a buffer; `cache` is a file of kernel times to read and extend.

    Raises:
        BuildFailed: the builder failed; its last error is given.
    """
    from polygraphy.backend.trt import engine_bytes_from_network
    from polygraphy.exception import PolygraphyException

    opened.messages.clear()
    watch = _monitor(opened.trt, progress)
    measured = None if cache is None else str(cache)
    try:
        engine = engine_bytes_from_network(
            (network.builder, network.definition, network.parser),
            config=_configuration(opened, request, targets, profiles, watch, measured),
            save_timing_cache=measured,
        )
    except PolygraphyException as error:
        if watch.cancelled:
            raise KeyboardInterrupt from None
        reason = opened.messages.reason(error)
        other = "" if request.plugin.kind == "none" else f" Or build without it: {argument('plugin', 'none')}."
        raise BuildFailed(
            f"{opened.library.name} {opened.version} could not build {Path(request.model)}.",
            why=reason,
            fix=_TURING
            if "Turing" in reason or opened.library.lacks_products(targets)
            else f"`localattn inspect` shows the nodes of the file; another release may build them.{other}",
        ) from error
    return engine


# TensorRT-RTX has no fp32 matrix products for Turing, and attention in standard operators has them in fp16 files too.
_TURING = (
    "Leave rtx20 (sm_75) out of the targets: files of localattn have fp32 products, in fp16 files too, where attention "
    f"is summed. On such cards the ONNX file runs in onnxruntime ({argument('provider', 'cuda')}), and "
    f"{argument('backend', 'tensorrt')} builds an engine on the card itself."
)


def _monitor(trt: Any, tell: Callable[[str], None]) -> Any:
    """Return an `IProgressMonitor` that reports each step; its `cancelled` is set when the user presses Ctrl-C.

    TensorRT calls it from inside the build, where no exception may pass: an interrupt makes it ask TensorRT to stop,
    and the caller of the build raises it again.

    Args:
        trt: the library's module.
        tell: called with one line a step, as "Building: Tactic selection 3/12".
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.cancelled = False
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            self._tell(f"Building: {phase_name}")

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._tell(f"Building: {phase_name} {step + 1}/{self.steps.get(phase_name, 0)}")
            return not self.cancelled

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

        def _tell(self, line: str) -> None:
            try:
                tell(line)
            except KeyboardInterrupt:
                self.cancelled = True

    return Monitor()


def _configuration(
    opened: TensorRTLibrary,
    request: BuildRequest,
    targets: Sequence[int],
    profiles: Sequence[ProfileRecord],
    watch: Any,
    cache: str | None,
) -> Any:
    """Return Polygraphy's builder configuration."""
    from polygraphy.backend.trt import PostprocessConfig, Profile

    trt = opened.trt
    common: dict[str, Any] = {
        "progress_monitor": watch,
        "builder_optimization_level": request.builder_optimization_level,
        "load_timing_cache": cache,
        **special.options(opened, request),
    }
    if request.workspace is not None:
        common["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: request.workspace}
    numbered: dict[int, Any] = {}
    for record in profiles:
        shapes = numbered.setdefault(record.profile, Profile())
        shapes.add(record.input, min=record.min, opt=record.opt, max=record.max)
    if numbered:
        common["profiles"] = [numbered[number] for number in sorted(numbered)]

    def adjusted(builder: Any, network: Any, config: Any) -> None:
        opened.library.adjust(trt, config)
        if request.embed_plugin and request.plugin.library is not None:
            config.plugins_to_serialize = [request.plugin.library.image]

    return PostprocessConfig(opened.library.configuration(targets, common), adjusted)
