"""The options that every request for an export has in common, whatever model is exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...core.errors import UsageError
from ...core.tolerance import Tolerance, tolerance_for
from ...core.versions import DEFAULT_OPSET
from .publish import EXTERNAL_DATA_FROM


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options of a file to write.

    Args:
        opset: ONNX opset.
        function_body: store the attention node's ONNX function in the file; without it only a runtime with a
            plugin or a kernel for the node can run the file (TensorRT 10.3 needs a file without it).
        standard_ops: write standard operators alone, no functions (`onnx_graph.standard_ops`).
        overwrite: replace an existing file.
        seeds: seeds of the parity check; by default a few.
        atol: absolute tolerance of the parity check instead of the precision's.
        rtol: relative tolerance instead of the precision's.
        quick: compare on one set of inputs, and leave out the checks of the window and of quadratic memory.
        allow_quadratic: accept tensors that are square in the sequence length.
        allow_wide_integers: accept integers beyond 32 bits, which some runtimes compute wrongly without an error.
        external_data_from: size of the weights in bytes from which they go into a file of their own.
        golden: an .npz of inputs and of the outputs that the user's own model computed from them.
    """

    opset: int = DEFAULT_OPSET
    function_body: bool = True
    standard_ops: bool = False
    overwrite: bool = False
    seeds: tuple[int, ...] | None = None
    atol: float | None = None
    rtol: float | None = None
    quick: bool = False
    allow_quadratic: bool = False
    allow_wide_integers: bool = False
    external_data_from: int = EXTERNAL_DATA_FROM
    golden: Path | None = None

    def __post_init__(self) -> None:
        if self.standard_ops and not self.function_body:
            raise UsageError(
                "standard_ops=True and function_body=False contradict each other.",
                why="A file in standard operators computes the attention in them.",
                fix="Leave one of them out.",
            )

    def tolerance(self, precision: str) -> Tolerance:
        """Return the tolerance for a file of this precision, an entry of `core.tolerance`."""
        return tolerance_for(precision, self.atol, self.rtol)
