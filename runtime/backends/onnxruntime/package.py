"""onnxruntime's Python package, imported without telemetry."""

from __future__ import annotations

from typing import Any

from ....core.machine.process import without_telemetry
from ..package import Package


class _Quiet(Package):
    def _import(self) -> Any:
        without_telemetry()
        return super()._import()


PACKAGE = _Quiet(
    name="onnxruntime",
    has="InferenceSession",
    install="Install it: pip install onnxruntime (CPU), or pip install 'onnxruntime-gpu[cuda,cudnn]'.",
)
