"""The constructor arguments of `labml_nn.transformers.aft.AFTLocal`, with upstream's names and defaults.

The class has no argument for a causal model: upstream passes a mask to `forward`, so the user gives it at export.
Source: labml-nn 0.5.1.
"""

from __future__ import annotations

from ..arguments import Arguments, Flag, Size


class AFTLocalArgs(Arguments):
    """Arguments of `AFTLocal`.

    With `local_window_size` s the keys at `|i - j| < s` have learned biases; the others stay visible, with bias 0.
    `seq_len` is the side of the table of biases, and so the longest sequence. `bias` gives the query, key and value
    matrices a bias; the output matrix always has one.
    """

    d_model: Size
    seq_len: Size
    local_window_size: Size
    bias: Flag = True

    def geometry(self) -> None:
        """Return no window: every sum goes over the whole sequence."""

    def describe(self) -> str:
        """Describe the reach of its biases in words."""
        return f"learned biases up to {self.local_window_size - 1} positions away, 0 beyond"
