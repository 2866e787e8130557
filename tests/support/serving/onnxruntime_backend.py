"""Stand in for Triton's onnxruntime backend, which PyPI's server lacks: a Python backend of the same name.

The server is real: it parses and judges `config.pbtxt`, joins requests, orders sequences and hands over initial
states. Only what the backend's own code would do is written here. Python backends cannot write implicit states, so the
states of a sequence stay here after the server has given the first ones.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as utils

_DTYPES = {
    "TYPE_BOOL": "tensor(bool)",
    "TYPE_FP16": "tensor(float16)",
    "TYPE_FP32": "tensor(float)",
    "TYPE_INT32": "tensor(int32)",
    "TYPE_INT64": "tensor(int64)",
}


class TritonPythonModel:
    """One instance of a model."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        return config

    def initialize(self, args: dict[str, str]) -> None:
        self.config = json.loads(args["model_config"])
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        threads = self.config.get("parameters", {}).get("intra_op_thread_count")
        if threads:
            options.intra_op_num_threads = int(threads["string_value"])
        for library in self.config.get("model_operations", {}).get("op_library_filename", []):
            options.register_custom_ops_library(library)
        folder = Path(args["model_repository"], args["model_version"])
        path = folder / self.config["default_model_filename"]
        if profile := os.environ.get("LOCALATTN_TEST_PROFILE"):
            options.enable_profiling, options.profile_file_prefix = True, f"{profile}/{args['model_name']}"
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.states = self.config.get("sequence_batching", {}).get("state", [])
        self.batched = self.config["max_batch_size"] > 0
        self.inputs = [value.name for value in self.session.get_inputs()]
        self.outputs = [value.name for value in self.session.get_outputs()]
        self.check("input", self.session.get_inputs(), whole=True)
        self.check("output", self.session.get_outputs(), whole=False)
        self.kept: dict[int, dict[str, Any]] = {}

    def check(self, side: str, values: list[Any], *, whole: bool) -> None:
        """Refuse a configuration that is not the file's, as the backend does."""
        states = {state[f"{side}_name"]: state for state in self.states}
        given = {tensor["name"]: tensor for tensor in self.config[side]} | states
        known = {value.name: value for value in values}
        if (given.keys() != known.keys()) if whole else (given.keys() - known.keys()):
            raise utils.TritonModelException(f"{side}s are {sorted(given)}, the file has {sorted(known)}")
        for name, tensor in given.items():
            dims = [int(size) for size in tensor["dims"]]
            shape = [size if isinstance(size, int) else -1 for size in known[name].shape]
            wanted = [-1, *dims] if self.batched else dims
            # A tensor without dimensions is configured as one element.
            if wanted != (shape or [1]) or tensor["data_type"] not in _DTYPES:
                raise utils.TritonModelException(f"{name} is {dims}, the file has {shape}")
            if _DTYPES[tensor["data_type"]] != known[name].type:
                raise utils.TritonModelException(f"{name} is {tensor['data_type']}, the file has {known[name].type}")

    def execute(self, requests: list[Any]) -> list[Any]:
        # A test that wants requests to be joined keeps this instance busy until they wait in the server's queue.
        while Path(os.environ.get("LOCALATTN_TEST_HOLD", ""), f"{self.config['name']}.hold").is_file():
            time.sleep(0.01)
        if len(requests) > 1 and os.environ.get("LOCALATTN_TEST_JOINED"):
            with Path(os.environ["LOCALATTN_TEST_JOINED"]).open("a") as stream:
                stream.write(f"{self.config['name']} {len(requests)}\n")
        if self.states:
            return [self.guarded(self.step, request) for request in requests]
        if not self.batched:
            return [self.guarded(self.single, request) for request in requests]
        feeds = [self.feed(request) for request in requests]
        joined = self.run({name: np.concatenate([feed[name] for feed in feeds]) for name in self.inputs})
        ends = np.cumsum([len(feed[self.inputs[0]]) for feed in feeds])[:-1]
        parts = {name: np.split(array, ends) for name, array in joined.items()}
        return [self.reply({name: parts[name][index] for name in parts}) for index in range(len(requests))]

    def feed(self, request: Any) -> dict[str, Any]:
        # This server's stub reads the memory layout of numpy 1 only; DLPack serves every release, both ways.
        found = {name: utils.get_input_tensor_by_name(request, name) for name in self.inputs}
        return {name: np.from_dlpack(tensor) for name, tensor in found.items() if tensor is not None}

    def run(self, feed: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self.outputs, self.session.run(self.outputs, feed), strict=True))

    def reply(self, outputs: dict[str, Any]) -> Any:
        names = [tensor["name"] for tensor in self.config["output"]]
        arrays = {name: np.atleast_1d(outputs[name]).copy() for name in names}
        return utils.InferenceResponse([utils.Tensor.from_dlpack(name, array) for name, array in arrays.items()])

    @staticmethod
    def guarded(call: Any, request: Any) -> Any:
        try:
            return call(request)
        except Exception as error:
            return utils.InferenceResponse([], error=utils.TritonError(str(error)))

    def single(self, request: Any) -> Any:
        return self.reply(self.run(self.feed(request)))

    def step(self, request: Any) -> Any:
        sequence, flags, feed = request.correlation_id(), request.flags(), self.feed(request)
        if not flags & utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            feed.update(self.kept[sequence])
        elif missing := {state["input_name"] for state in self.states} - feed.keys():
            raise RuntimeError(f"the server gave no initial state for {sorted(missing)}")
        outputs = self.run(feed)
        self.kept[sequence] = {state["input_name"]: outputs[state["output_name"]] for state in self.states}
        if flags & utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            del self.kept[sequence]
        return self.reply(outputs)

    def finalize(self) -> None:
        if os.environ.get("LOCALATTN_TEST_PROFILE"):
            self.session.end_profiling()
