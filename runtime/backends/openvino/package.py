"""OpenVINO's Python package, imported so that it writes no files for telemetry."""

from __future__ import annotations

import sys
from typing import Any

from ..package import Package

_TELEMETRY = "openvino_telemetry"


class _Quiet(Package):
    def _import(self) -> Any:
        """Hide its package for telemetry meanwhile: with it, OpenVINO writes `~/intel` as it is imported."""
        if _TELEMETRY in sys.modules:
            return super()._import()
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
        try:
            return super()._import()
        finally:
            del sys.modules[_TELEMETRY]


PACKAGE = _Quiet(name="openvino", has="Core", install="Install it: pip install 'localattn[openvino]'.")
