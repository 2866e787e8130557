"""How an ONNX file is made and judged, whatever model it is of: what every request for an export has in common."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.tolerance import Tolerance, tolerance_for
from .publish import EXTERNAL_DATA_FROM

DEFAULT_OPSET = 20


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options of a file to write.

    Args:
        dynamic: names of the axes that stay open; none: static shapes.
        opset: ONNX opset.
        function_body: carry the attention node's function; without it only a runtime with a plugin or
            a kernel for the node can run the file (TensorRT 10.3 needs it so).
        overwrite: replace an existing file.
        seeds: seeds of the parity check; by default a few.
        atol: absolute tolerance of the parity check instead of the precision's.
        rtol: relative tolerance instead of the precision's.
        allow_quadratic: accept tensors that are square in the sequence length.
        external_data_from: bytes of weights from which they go into a file of their own.
    """

    dynamic: tuple[str, ...] = ()
    opset: int = DEFAULT_OPSET
    function_body: bool = True
    overwrite: bool = False
    seeds: tuple[int, ...] | None = None
    atol: float | None = None
    rtol: float | None = None
    allow_quadratic: bool = False
    external_data_from: int = EXTERNAL_DATA_FROM

    def tolerance(self, precision: str) -> Tolerance:
        """What judges a file of this precision, an entry of `core.tolerance`."""
        return tolerance_for(precision, self.atol, self.rtol)
