"""Write the files of a Triton model repository: `config.pbtxt` of each model, and the states of step files.

Requests are joined only where the file's first axis is dynamic and its rows are proven independent. A step file is
served with Triton's implicit state: the caches stay in the server, one set a sequence. The position becomes a state
too, so the served copy of the file has one more output, `position + chunk`. `stream_config` is for the Python model
that takes any number of tokens.
Source: Triton's user guide (model configuration, implicit state management) and its `model_config.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.documents.step_record import StepRecord
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.tensors import TensorSpec
from ...onnx_graph.onnx_file import OnnxFile

NEXT_POSITION = "next_position"
# Abandoned sequences free their caches after this time; Triton's own default is one second.
IDLE_SECONDS = 60

# Names of element types in the Open Inference Protocol; in Triton's configurations they begin with TYPE_.
TYPE_NAMES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class Serving:
    """How the server may run a model.

    Args:
        instances: copies of the model that run at once, on every GPU, or on the CPU where there is none.
        max_batch: most requests joined in one call, where the file's batch axis is dynamic.
        sequences: sequences that share one instance, for step files; a further one waits for a place.
        threads: CPU threads of an instance; None: one for step files and where there are several instances, else all.
    """

    instances: int = 1
    max_batch: int = 8
    sequences: int = 16
    threads: int | None = None

    def threads_of(self, steps: bool) -> int:
        """Return the threads of an instance; 0 leaves them to the server."""
        if self.threads is not None:
            return self.threads
        return 1 if steps or self.instances > 1 else 0


@dataclass(frozen=True)
class Served:
    """The description of a served file.

    Args:
        batched: the rows of its first axis are independent: requests may be joined.
        rows: most rows of a sample.
        libraries: names of the libraries of kernels for the CPU, found through LD_LIBRARY_PATH.
        gpu: it runs on GPUs only.
        sample: inputs for a first call, before the server says that the model is ready; empty for none.
    """

    batched: bool = False
    rows: int = 1
    libraries: tuple[str, ...] = ()
    gpu: bool = False
    sample: Mapping[str, NDArray[Any]] = field(default_factory=dict)


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
    step: StepRecord | None = None,
    served: Served | None = None,
) -> str:
    """Return the text of a `config.pbtxt`.

    Args:
        name: the model's folder.
        backend: "onnxruntime" or "tensorrt".
        filename: the model file in the version folder.
        inputs: what the file takes; states are found among them by `step`.
        outputs: its outputs.
        serving: batching, instances, sequences.
        step: how a step file is called; None for a model without state.
        served: what is known of the file.

    Raises:
        UsageError: Triton does not support an element type.
    """
    served = served or Served()
    batched = step is None and served.batched
    states = [] if step is None else list(_states(step, {spec.name for spec in outputs}))
    handed = {state["input_name"] for state in states} | {state["output_name"] for state in states}
    kind = "KIND_GPU" if backend == "tensorrt" or served.gpu else "KIND_CPU" if served.libraries else "KIND_AUTO"
    config: dict[str, Any] = {
        "name": name,
        "backend": backend,
        "default_model_filename": filename,
        "max_batch_size": max(serving.max_batch, served.rows) if batched else 0,
        "input": [_tensor(spec, batched) for spec in inputs if spec.name not in handed],
        "output": [_tensor(spec, batched) for spec in outputs if spec.name not in handed],
        "instance_group": [{"count": serving.instances, "kind": Word(kind)}],
    }
    if batched:
        config["dynamic_batching"] = {}
    if step is not None:
        config["sequence_batching"] = _sequences(serving) | {"state": states}
    if backend == "onnxruntime" and (threads := serving.threads_of(step is not None)):
        value = {"string_value": str(threads)}
        config["parameters"] = [{"key": "intra_op_thread_count", "value": value}]
    if backend == "onnxruntime" and served.libraries:
        config["model_operations"] = {"op_library_filename": list(served.libraries)}
    if served.sample and step is None:
        config["model_warmup"] = [_warmup(served.sample, inputs, batched)]
    return "".join(_lines(config, ""))


def stream_config(
    name: str, inputs: Sequence[TensorSpec], output: TensorSpec, serving: Serving, axis: int, rows: int, draws: bool
) -> str:
    """Return the `config.pbtxt` of the Python model that takes any number of positions a request.

    Args:
        name: the model's folder.
        inputs: data inputs of the step file.
        output: its output without the caches.
        serving: instances, sequences.
        axis: which one counts positions.
        rows: sequences that one call of the file takes; 0 where sequences are not joined.
        draws: the model can go on by itself.
    """
    batched = rows > 0

    def any_length(spec: TensorSpec) -> dict[str, Any]:
        shape = (*spec.shape[:axis], "positions", *spec.shape[axis + 1 :])
        return _tensor(TensorSpec(spec.name, spec.dtype, shape), batched)

    ragged = {"allow_ragged_batch": True} if batched else {}
    served_inputs = [any_length(spec) | ragged for spec in inputs]
    given = [any_length(output)]
    if draws:
        extra = {"new_tokens": "int32", "temperature": "float32", "seed": "int64"}
        served_inputs += [
            _tensor(TensorSpec(x, dtype, (1, 1)), True) | {"optional": True} for x, dtype in extra.items()
        ]
        given.append(_tensor(TensorSpec("generated", "int64", (1, "positions")), True))
    config: dict[str, Any] = {
        "name": name,
        "backend": "python",
        "max_batch_size": rows,
        "input": served_inputs,
        "output": given,
        "instance_group": [{"count": serving.instances, "kind": Word("KIND_AUTO")}],
        "sequence_batching": _sequences(serving),
    }
    return "".join(_lines(config, ""))


def warmup_files(sample: Mapping[str, NDArray[Any]], batched: bool) -> dict[str, bytes]:
    """Return the files of `warmup/`: the inputs of a sample, one row of it for a model whose requests are joined."""
    return {
        _warmup_file(index): np.ascontiguousarray(array[0] if batched else array).tobytes()
        for index, array in enumerate(sample.values())
    }


def _warmup(sample: Mapping[str, NDArray[Any]], inputs: Sequence[TensorSpec], batched: bool) -> dict[str, Any]:
    dtypes = {spec.name: spec.dtype for spec in inputs}
    given = [
        {
            "key": name,
            "value": {
                "data_type": _type(name, dtypes[name]),
                "dims": list(array.shape[1:] if batched else array.shape) or [1],
                "input_data_file": _warmup_file(index),
            },
        }
        for index, (name, array) in enumerate(sample.items())
    ]
    return {"name": "sample", "batch_size": 1, "inputs": given}


def _warmup_file(index: int) -> str:
    return f"input_{index}"


def _sequences(serving: Serving) -> dict[str, Any]:
    return {
        "max_sequence_idle_microseconds": IDLE_SECONDS * 1_000_000,
        "oldest": {"max_candidate_sequences": serving.sequences},
    }


def served_name(name: str) -> str:
    """Return a model's folder in the repository: letters, digits, `_`, `-` and `.`."""
    plain = "".join(sign if sign.isascii() and (sign.isalnum() or sign in "_-.") else "_" for sign in name)
    return plain.strip(".") or "model"


def initial_states(step: StepRecord) -> dict[str, bytes]:
    """Return the files of `initial_state/`: caches that do not start as zeros."""
    return {
        _state_file(index): np.full(cache.shape, cache.fill, cache.dtype).tobytes()
        for index, cache in enumerate(step.caches)
        if cache.fill
    }


def stateful(model: OnnxFile, step: StepRecord) -> bytes:
    """Return the copy of a step file that is served: it also returns the position of the next call.

    External data stays where it is: the copy belongs into the same folder as the model's.
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
    return bytes(proto.SerializeToString())


def _states(step: StepRecord, outputs: set[str]) -> Iterator[dict[str, Any]]:
    for index, cache in enumerate(step.caches):
        source = {"data_file": _state_file(index)} if cache.fill else {"zero_data": True}
        yield _state(cache.input, cache.output, cache.dtype, cache.shape, source)
    if NEXT_POSITION in outputs:
        yield _state(step.position_input, NEXT_POSITION, "int64", [1], {"zero_data": True})


def _state(name: str, output: str, dtype: str, dims: Sequence[int], source: Message) -> dict[str, Any]:
    kind = {"data_type": _type(name, dtype), "dims": list(dims)}
    initial = {**kind, **source, "name": f"start of {name}"}
    return {"input_name": name, "output_name": output, **kind, "initial_state": [initial]}


def _state_file(index: int) -> str:
    return f"cache_{index}"


def _tensor(spec: TensorSpec, batched: bool) -> dict[str, Any]:
    shape = spec.shape[1:] if batched else spec.shape
    dims = [size if isinstance(size, int) else -1 for size in shape]
    # Triton has no tensors without dimensions: its onnxruntime backend hands a scalar out as one element.
    return {"name": spec.name, "data_type": _type(spec.name, spec.dtype), "dims": dims or [1]}


def _type(name: str, dtype: str) -> Word:
    if dtype not in TYPE_NAMES:
        raise UsageError(f"{name!r} is {dtype}, which Triton does not support.", fix=f"Leave out {argument('triton')}.")
    return Word(f"TYPE_{TYPE_NAMES[dtype]}")


def _lines(message: Message, indent: str) -> Iterator[str]:
    """Yield a message in protobuf's text format; a list of messages is the field repeated."""
    for name, value in message.items():
        blocks = [value] if isinstance(value, Mapping) else value
        if isinstance(blocks, list) and blocks and isinstance(blocks[0], Mapping):
            for block in blocks:
                yield f"{indent}{name} {{\n"
                yield from _lines(block, indent + "  ")
                yield f"{indent}}}\n"
        elif isinstance(value, list):
            yield f"{indent}{name}: [{', '.join(map(_scalar, value))}]\n"
        else:
            yield f"{indent}{name}: {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not isinstance(value, Word):
        return _quoted(value)
    return str(value)


def _quoted(text: str) -> str:
    """Quote a string; bytes other than plain ASCII are written in octal."""
    plain = set(range(32, 127)) - set(b'"\\')
    return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in text.encode()) + '"'
