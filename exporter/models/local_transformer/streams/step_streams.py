"""Residual streams around a branch that also returns its caches: read, run the branch, write.

The formula of `hyper_connections.py`, with its weights and its nodes, in two functions so that the branch between them
may return more than one tensor. One token has no axes but those of its streams, for which the nodes' functions have
fewer operators: there every one costs the same, however little it computes.
"""

from __future__ import annotations

from torch import Tensor, nn

from ...parts.fused_calls import read_streams, write_streams
from .hyper_connections import HyperConnection

# What `write` needs: the streams or the residual, and mix and β of a hyper-connection.
Kept = tuple[Tensor, Tensor | None, Tensor | None]


class StepResidual(nn.Module):
    """A plain residual connection, `[R, D]`, which is the case of one stream."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def read(self, x: Tensor) -> tuple[Tensor, Kept]:
        """Return the branch's input, and what `write` needs."""
        return x, (x, None, None)

    def write(self, kept: Kept, output: Tensor) -> Tensor:
        """Add the branch's output to the residual."""
        return kept[0] + output.float()


class StepHyperConnection(HyperConnection):
    """A branch `[R, D]` → `[R, D]` between the residual streams `[1, R, S, D]` of `R` tokens, or `[S, D]` of one."""

    def read(self, streams: Tensor) -> tuple[Tensor, Kept]:
        """Return the branch's input, and what `write` needs."""
        read, mix, beta = read_streams(streams, self.weight, self.gain, self.static)
        kept = streams, mix if self.mixes_residuals else None, beta
        return read if read.dim() == 2 else read.squeeze(0), kept

    def write(self, kept: Kept, output: Tensor) -> Tensor:
        """Compute the next streams."""
        streams, mix, beta = kept
        assert beta is not None
        output = output.float()
        return write_streams(streams, mix, beta, output if streams.dim() == 2 else output.unsqueeze(0))
