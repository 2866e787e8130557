"""What files call the axes whose sizes they leave open: our names, then PyTorch's and Hugging Face's habits."""

from __future__ import annotations

BATCH_AXES = ("batch", "batch_size", "b", "N")
SEQUENCE_AXES = ("seq", "seq_len", "sequence", "sequence_length", "length", "n", "T")


def named_sizes(batch: int | None, seq_len: int | None) -> dict[str, int]:
    """The sizes of open axes, by every name they may have; none for a size that is None."""
    sizes: dict[str, int] = {}
    for axes, size in ((BATCH_AXES, batch), (SEQUENCE_AXES, seq_len)):
        sizes |= dict.fromkeys(axes, size) if size is not None else {}
    return sizes
