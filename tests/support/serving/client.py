"""Requests to a server of the Open Inference Protocol, over HTTP by JSON and over gRPC."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import urllib.error
import urllib.request
from types import ModuleType
from typing import Any

import numpy as np
import pytest

_NAMES = {"int64": "INT64", "int32": "INT32", "float32": "FP32", "float16": "FP16", "bool": "BOOL"}


class Refused(Exception):
    """The server's error."""


def infer(url: str, model: str, inputs: dict[str, np.ndarray], **parameters: Any) -> dict[str, np.ndarray]:
    """Ask over HTTP, in JSON alone."""
    tensors = [
        {"name": name, "datatype": _NAMES[str(x.dtype)], "shape": list(x.shape), "data": x.ravel().tolist()}
        for name, x in inputs.items()
    ]
    body = json.dumps({"inputs": tensors, "parameters": parameters}).encode()
    try:
        with urllib.request.urlopen(f"{url}/v2/models/{model}/infer", body, timeout=60) as answer:
            found = json.load(answer)["outputs"]
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(json.load(error)["error"]) from None
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    return {x["name"]: np.array(x["data"], dtypes[x["datatype"]]).reshape(x["shape"]) for x in found}


def protocol() -> tuple[ModuleType, Any]:
    """gRPC, and the messages of Triton's service as its client package carries them; skips without either."""
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("google.protobuf")
    listed = importlib.metadata.files("tritonclient") or []
    files = {file.name: str(file.locate()) for file in listed if file.parts[:2] == ("tritonclient", "grpc")}
    made = {}
    for name in ("model_config_pb2", "service_pb2"):  # the package itself would want more
        full = f"tritonclient.grpc.{name}"
        if full not in sys.modules:
            for parent in ("tritonclient", "tritonclient.grpc"):
                sys.modules.setdefault(parent, ModuleType(parent))
            spec = importlib.util.spec_from_file_location(full, files[f"{name}.py"])
            assert spec is not None and spec.loader is not None
            sys.modules[full] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[full])
            setattr(sys.modules["tritonclient.grpc"], name, sys.modules[full])
        made[name] = sys.modules[full]
    return grpc, made["service_pb2"]


def infer_by_grpc(
    address: str, model: str, inputs: dict[str, np.ndarray], **parameters: int | bool
) -> dict[str, np.ndarray]:
    """Ask over gRPC, with raw bytes."""
    grpc, service = protocol()
    request = service.ModelInferRequest(model_name=model)
    for name, value in parameters.items():
        kind = "bool_param" if isinstance(value, bool) else "int64_param"
        setattr(request.parameters[name], kind, value)
    for name, x in inputs.items():
        request.inputs.add(name=name, datatype=_NAMES[str(x.dtype)], shape=x.shape)
        request.raw_input_contents.append(x.tobytes())
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=service.ModelInferRequest.SerializeToString,
            response_deserializer=service.ModelInferResponse.FromString,
        )
        answer = call(request, timeout=60)
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
    return {x.name: np.frombuffer(raw, dtypes[x.datatype]).reshape(tuple(x.shape)) for x, raw in pairs}
