"""The constructor arguments of `labml_nn.transformers.aft.AFTLocal`, with upstream's names and defaults.

Whether a model is causal is no argument of the class: upstream passes a mask to `forward`, so the
user says it at export. Source: labml-nn 0.5.1.
"""

from __future__ import annotations

from ..arguments import Arguments, Flag, Size

__all__ = ["AFTLocalArgs"]


class AFTLocalArgs(Arguments):
    """Arguments of `AFTLocal`.

    `local_window_size` s gives learned biases to the keys at `|i - j| < s`; the others stay visible, with bias 0.
    `seq_len` is the side of the table of biases, and so the longest sequence. `bias` is that of the
    query, key and value matrices; the output matrix always has one.
    """

    d_model: Size
    seq_len: Size
    local_window_size: Size
    bias: Flag = True
