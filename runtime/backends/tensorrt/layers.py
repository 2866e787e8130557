"""The layers of a finished engine, as TensorRT's engine inspector lists them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ....core.dtypes import NUMPY_NAME, SHORT_NAME
from ..engines import EngineLayer
from .library import TensorRTLibrary

# TensorRT's words for element types, in lower case → numpy's name. Older inspectors write a sentence ("Row major linear
# FP16 format"), newer ones a word ("Half").
ELEMENTS = (
    NUMPY_NAME
    | {"half": "float16", "float": "float32"}
    | {name: name for name in (*SHORT_NAME, "int64", "int32", "int8", "bool")}
)


def read_layers(opened: TensorRTLibrary, engine: Any) -> list[EngineLayer]:
    """Return the layers of an `ICudaEngine`; details need ProfilingVerbosity.DETAILED, as `build_engine` sets it."""
    text = engine.create_engine_inspector().get_engine_information(opened.trt.LayerInformationFormat.JSON)
    return parse_layers(text)


def parse_layers(text: str) -> list[EngineLayer]:
    """Parse the layers in the inspector's JSON; a layer is an object, or only its name where details are missing."""
    return [_layer(entry) for entry in json.loads(text).get("Layers", [])]


def _layer(entry: str | Mapping[str, Any]) -> EngineLayer:
    if isinstance(entry, str):
        return EngineLayer(entry, "unknown")
    tensors = [*entry.get("Inputs", []), *entry.get("Outputs", [])]
    found = [_type(str(tensor.get("Format/Datatype", ""))) for tensor in tensors if isinstance(tensor, Mapping)]
    return EngineLayer(
        name=str(entry.get("Name", "")),
        kind=str(entry.get("LayerType", "unknown")),
        nodes=str(entry.get("Metadata", "")),
        types=tuple(kind for kind in found if kind),
    )


def _type(text: str) -> str:
    return next((ELEMENTS[word] for word in re.findall(r"\w+", text.lower()) if word in ELEMENTS), "")
