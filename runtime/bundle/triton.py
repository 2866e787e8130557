"""A model repository for NVIDIA Triton Inference Server: `config.pbtxt` of each model, and the states of step files.

Batching is offered only where the file's first axis is dynamic. A step file is served with Triton's implicit state:
the caches stay in the server, one set a sequence. The position becomes a state too, so the served copy of the file
has one more output, `position + chunk`.
Source: Triton's user guide (model configuration, implicit state management) and its `model_config.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.documents.step_facts import StepFacts
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.tensors import UNNAMED_DIMENSION, TensorSpec
from ...onnx_graph.onnx_file import OnnxFile

NEXT_POSITION = "next_position"
# Abandoned sequences free their caches after this time; Triton's own default is one second.
_IDLE_MICROSECONDS = 60_000_000

_TYPES = {
    "bool": "TYPE_BOOL",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "bfloat16": "TYPE_BF16",
    **{f"int{bits}": f"TYPE_INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"TYPE_UINT{bits}" for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class Serving:
    """How the server may run a model.

    Args:
        instances: copies of the model that run at once, on every GPU, or on the CPU where there is none.
        max_batch: most requests joined in one call, where the file's batch axis is dynamic.
        sequences: sequences that share one instance, for step files.
    """

    instances: int = 1
    max_batch: int = 8
    sequences: int = 16


class Word(str):
    """A value of `config.pbtxt` that is written without quotes: an enumerator."""


Message = Mapping[str, Any]


def model_config(
    name: str,
    backend: str,
    filename: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    serving: Serving,
    step: StepFacts | None = None,
) -> str:
    """Return the text of a `config.pbtxt`.

    Args:
        name: the model's folder.
        backend: "onnxruntime" or "tensorrt".
        filename: the model file in the version folder.
        inputs: what the file takes; states are found among them by `step`.
        outputs: what it returns.
        serving: batching, instances, sequences.
        step: how a step file is called; None for a model without state.

    Raises:
        UsageError: an element type that Triton has no name for.
    """
    batched = step is None and open_batch(inputs, outputs)
    states = [] if step is None else list(_states(step, {spec.name for spec in outputs}))
    handed = {state["input_name"] for state in states} | {state["output_name"] for state in states}
    config: dict[str, Any] = {
        "name": name,
        "backend": backend,
        "default_model_filename": filename,
        "max_batch_size": serving.max_batch if batched else 0,
        "input": [_tensor(spec, batched) for spec in inputs if spec.name not in handed],
        "output": [_tensor(spec, batched) for spec in outputs if spec.name not in handed],
        "instance_group": [
            {"count": serving.instances, "kind": Word("KIND_GPU" if backend == "tensorrt" else "KIND_AUTO")}
        ],
    }
    if batched:
        config["dynamic_batching"] = {}
    if step is not None:
        config["sequence_batching"] = {
            "max_sequence_idle_microseconds": _IDLE_MICROSECONDS,
            "oldest": {"max_candidate_sequences": serving.sequences},
            "state": states,
        }
    return "".join(_lines(config, ""))


def open_batch(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Return whether the first axis of every tensor is the same dynamic one."""
    first = {spec.shape[0] if spec.shape else 0 for spec in (*inputs, *outputs)}
    name = first.pop() if len(first) == 1 else 0
    return isinstance(name, str) and name != UNNAMED_DIMENSION


def served_name(name: str) -> str:
    """Return a model's folder in the repository: letters, digits, `_`, `-` and `.`."""
    plain = "".join(sign if sign.isascii() and (sign.isalnum() or sign in "_-.") else "_" for sign in name)
    return plain.strip(".") or "model"


def initial_states(step: StepFacts) -> dict[str, bytes]:
    """Return the files of `initial_state/`: caches that do not start as zeros."""
    return {
        _state_file(index): np.full(cache.shape, cache.fill, cache.dtype).tobytes()
        for index, cache in enumerate(step.caches)
        if cache.fill
    }


def write_stateful(model: OnnxFile, target: Path, step: StepFacts) -> None:
    """Write the copy of a step file that is served: it also returns the position of the next call.

    External data stays where it is: `target` is in the folder of the model's copy.
    """
    import onnx

    proto = model.parse()
    graph = proto.graph
    if NEXT_POSITION not in {value.name for value in graph.output}:
        chunk = onnx.numpy_helper.from_array(np.array([step.chunk], np.int64), "localattn.served.chunk")
        graph.initializer.append(chunk)
        add = onnx.helper.make_node("Add", [step.position_input, chunk.name], [NEXT_POSITION], "localattn.served.add")
        graph.node.append(add)
        graph.output.append(onnx.helper.make_tensor_value_info(NEXT_POSITION, onnx.TensorProto.INT64, [1]))
    target.write_bytes(proto.SerializeToString())


def _states(step: StepFacts, outputs: set[str]) -> Iterator[dict[str, Any]]:
    for index, cache in enumerate(step.caches):
        source = {"data_file": _state_file(index)} if cache.fill else {"zero_data": True}
        yield _state(cache.input, cache.output, _type(cache.input, cache.dtype), cache.shape, source)
    if NEXT_POSITION in outputs:
        yield _state(step.position_input, NEXT_POSITION, Word("TYPE_INT64"), [1], {"zero_data": True})


def _state(name: str, output: str, kind: Word, dims: Sequence[int], source: Message) -> dict[str, Any]:
    initial = {"data_type": kind, "dims": list(dims), **source, "name": f"start of {name}"}
    return {
        "input_name": name,
        "output_name": output,
        "data_type": kind,
        "dims": list(dims),
        "initial_state": [initial],
    }


def _state_file(index: int) -> str:
    return f"cache_{index}"


def _tensor(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    shape = spec.shape[1:] if batched else spec.shape
    dims = [size if isinstance(size, int) else -1 for size in shape]
    tensor = {"name": spec.name, "data_type": _type(spec.name, spec.dtype), "dims": dims or [1]}
    # Triton has no tensors without dimensions: clients send one element, the model gets a scalar.
    return tensor if dims else tensor | {"reshape": {"shape": []}}


def _type(name: str, dtype: str) -> Word:
    if dtype not in _TYPES:
        raise UsageError(f"{name!r} is {dtype}, which Triton does not serve.", fix=f"Leave out {argument('triton')}.")
    return Word(_TYPES[dtype])


def _lines(message: Message, indent: str) -> Iterator[str]:
    """Yield a message in protobuf's text format; a list of messages is the field repeated."""
    for name, value in message.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            for item in value:
                yield from _block(name, item, indent)
        elif isinstance(value, Mapping):
            yield from _block(name, value, indent)
        elif isinstance(value, list):
            yield f"{indent}{name}: [{', '.join(map(_scalar, value))}]\n"
        else:
            yield f"{indent}{name}: {_scalar(value)}\n"


def _block(name: str, message: Message, indent: str) -> Iterator[str]:
    yield f"{indent}{name} {{\n"
    yield from _lines(message, indent + "  ")
    yield f"{indent}}}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, bool):
        return str(value).lower()
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
    """Quote a string; bytes other than plain ASCII are written in octal."""
    plain = set(range(32, 127)) - set(b'"\\')
    return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in text.encode()) + '"'
