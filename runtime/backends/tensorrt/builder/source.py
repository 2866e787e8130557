"""The ONNX file as the builder uses it: its precision, its sizes, and the bytes to parse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .....core.documents.engine_sidecar import ProfileRecord
from .....core.dtypes import SHORT_NAME
from .....core.error_texts import argument
from .....core.errors import UsageError
from .....core.nodes.attention import DOMAIN
from .....core.nodes.gpu import OLDEST_WITH_FP8
from .....core.tensors import BATCH, SEQUENCE, UNNAMED_DIMENSION, TensorSpec
from .....onnx_graph.gpu_nodes import aft_nodes, gpu_nodes, keep_functions, ring_nodes
from .....onnx_graph.graph_values import element_types
from .....onnx_graph.onnx_file import OnnxFile
from .....onnx_graph.precision import fp8_attention
from .....onnx_graph.summary import OnnxSummary, inspect_onnx

# Operators that multiply matrices: if an input is a weight, they show the precision of the file.
_PRODUCTS = ("MatMul", "Gemm", "Conv")
# Its kinds as ONNX calls them.
_FP8 = {"float8e4m3fn", "float8e5m2"}


@dataclass(frozen=True)
class Source:
    """An ONNX file to build.

    Args:
        file: the file.
        summary: what is in it.
        weighted_products: products of the top graph that have weights: node name → element type.
    """

    file: OnnxFile
    summary: OnnxSummary
    weighted_products: dict[str, str]

    @property
    def path(self) -> Path:
        """The path of the file."""
        return Path(self.file)

    @property
    def dtype(self) -> str:
        """Element type of the file: "fp32", "fp16" or "bf16"; of its outputs where it has no weights."""
        if self.summary.sidecar is not None and self.summary.sidecar_matches:
            return self.summary.sidecar.dtype
        of_outputs = (spec.dtype for spec in self.summary.outputs if spec.dtype in SHORT_NAME)
        found = self.summary.weight_dtype or next(of_outputs, "float32")
        return SHORT_NAME.get(found, found)

    def largest(self) -> dict[str, int]:
        """Return the sizes of dynamic axes at export, by name: the example's batch and the longest sequence."""
        sidecar = self.summary.sidecar if self.summary.sidecar_matches else None
        return {} if sidecar is None else {BATCH: sidecar.batch, SEQUENCE: sidecar.seq_len}

    def nodes(self, op_types: Iterable[str]) -> list[str]:
        """Return the names of the nodes of these op types that kernels compute, AFT-local's among them."""
        wanted, model = set(op_types), self.file.model
        judged = [*gpu_nodes(model), *ring_nodes(model)]
        attention = [node.name for node in judged if node.proto.op_type in wanted and not node.why_not]
        return attention + [node.name for node in aft_nodes(model) if node.op_type in wanted]

    def for_plugins(self, op_types: Iterable[str], *, prefers_plugins: bool, fp8: bool = False) -> bytes:
        """Return what to parse, so that plugins take the nodes that kernels compute, no other.

        Args:
            op_types: those of the plugins.
            prefers_plugins: the parser takes a plugin where there is a function too.
            fp8: the plugins read fp8, where the file quantises the inputs of attention.
        """
        own = self.file.for_engines()
        model = fp8_attention.apply(own) if fp8 else own
        others = [node.proto for node in (*gpu_nodes(model), *ring_nodes(model)) if node.why_not]
        if not others and model is own:
            return self.file.content if prefers_plugins else stripped(model, op_types)
        keep_functions(model, others)
        return model.SerializeToString() if prefers_plugins else stripped(model, op_types)  # type: ignore[no-any-return]


def stripped(model: Any, op_types: Iterable[str]) -> bytes:
    """Return the model without the ONNX functions of these op types; external data stays where it is."""
    wanted = set(op_types)
    kept = [body for body in model.functions if not (body.domain == DOMAIN and body.name in wanted)]
    del model.functions[:]
    model.functions.extend(kept)
    return model.SerializeToString()  # type: ignore[no-any-return]


def read_source(path: Path | OnnxFile) -> Source:
    """Read an ONNX file, or take one that was already read, without its weights.

    Raises:
        UsageError: no such file, no ONNX model in it, or external data is missing.
        CheckFailed: the file was altered after its sidecar was written.
    """
    file = OnnxFile.read(path)
    file.check_unchanged()
    file.check_without_overloads("TensorRT")
    summary = inspect_onnx(file)
    if summary.missing_external_data:
        raise UsageError(
            f"{file.name} is not complete.",
            why=f"Its external data {', '.join(summary.missing_external_data)} is missing.",
            fix="Copy the file that holds the weights next to it, under its name.",
        )
    return Source(file, summary, _weighted_products(file.model.graph))


def check_fp8(file: OnnxFile, targets: Sequence[int]) -> None:
    """Refuse a file with numbers in fp8 for GPUs that have none: TensorRT would say so late, in words of its own.

    Raises:
        UsageError: one of the compute capabilities is below 8.9.
    """
    older = [f"sm_{target}" for target in targets if target < OLDEST_WITH_FP8]
    if older and not _FP8.isdisjoint(element_types(file.model)):
        raise UsageError(
            f"{file.name} has numbers in fp8, and {', '.join(older)} cannot multiply them.",
            why="GPUs can from compute capability 8.9 on: RTX 40 and 50, L4, Hopper, Blackwell, Jetson Thor.",
            fix="Name such GPUs alone as targets, or export with int8-qdq weights, which every GPU multiplies.",
        )


def _weighted_products(graph: Any) -> dict[str, str]:
    import onnx

    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    found: dict[str, str] = {}
    for node in graph.node:
        weight = next((types[name] for name in node.input[:2] if name in types), None)
        if node.name and node.domain in ("", "ai.onnx") and node.op_type in _PRODUCTS and weight is not None:
            found[node.name] = onnx.helper.tensor_dtype_to_np_dtype(weight).name
    return found


def profiles_for(source: Source, given: Sequence[ProfileRecord]) -> list[ProfileRecord]:
    """Return the sizes the engine will take, one entry an input and profile; none if every size is fixed.

    A profile that is not given goes from 1 to the sizes of the export: batch and longest sequence, from the sidecar.

    Raises:
        UsageError: an input that does not exist or whose sizes are fixed, sizes that do not fit, or dynamic axes whose
            sizes are unknown.
    """
    specs = {spec.name: spec for spec in source.summary.inputs}
    for profile in given:
        if profile.input not in specs:
            raise UsageError(f"There is no input {profile.input!r}.", fix=f"Known: {', '.join(specs)}.")
        _check_profile(specs[profile.input], profile, source)
    if not any(isinstance(size, str) for spec in specs.values() for size in spec.shape):
        if given:
            raise UsageError("The model's sizes are fixed.", fix="Leave out the options for shapes.")
        return []
    by_place = {(profile.profile, profile.input): profile for profile in given}
    return [
        by_place.get((number, name)) or _default_profile(spec, source, number)
        for number in sorted({profile.profile for profile in given} or {0})
        for name, spec in specs.items()
    ]


def _check_profile(spec: TensorSpec, profile: ProfileRecord, source: Source) -> None:
    longest = source.largest().get(SEQUENCE)
    for sizes in (profile.min, profile.opt, profile.max):
        fits = len(sizes) == len(spec.shape) and all(
            isinstance(wanted, str) or wanted == size for wanted, size in zip(spec.shape, sizes, strict=True)
        )
        if not fits:
            raise UsageError(f"The shape {list(sizes)} does not fit the input.", why=f"It is {spec.describe()}.")
    if not all(low <= opt <= high for low, opt, high in zip(profile.min, profile.opt, profile.max, strict=True)):
        raise UsageError(
            f"The shapes of {spec.name!r} are not in order.", why="Every size must go up from min to opt to max."
        )
    length = max((size for axis, size in zip(spec.shape, profile.max, strict=True) if axis == SEQUENCE), default=0)
    if longest and length > longest:
        raise UsageError(
            f"Sequences of {length} tokens are too long.",
            why=f"The model was exported for up to {longest}.",
            fix=f"Export it again with {argument('seq_len', length)}.",
        )


def _default_profile(spec: TensorSpec, source: Source, number: int) -> ProfileRecord:
    largest = source.largest()
    top: list[int] = []
    for size in spec.shape:
        if isinstance(size, str) and (size == UNNAMED_DIMENSION or size not in largest):
            raise UsageError(
                f"The sizes of input {spec.name!r} are open.",
                why=f"It is {spec.describe()}, and nothing says how large it becomes.",
                fix=f"Give {argument('min_shapes')}, {argument('opt_shapes')} and {argument('max_shapes')}, by input.",
            )
        top.append(largest[size] if isinstance(size, str) else size)
    low = [1 if isinstance(size, str) else size for size in spec.shape]
    return ProfileRecord(profile=number, input=spec.name, min=tuple(low), opt=tuple(top), max=tuple(top))
