"""Division by the Euclidean norm of the last axis, `x / max(‖x‖, 1e-12)`, in fp32.

The same numbers as `torch.nn.functional.normalize`, without the Expand node that one exports to; in
fp16 the sum of squares would overflow at a norm of 256.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unit_norm(x: Tensor) -> Tensor:
    """`[…, D]` → `[…, D]` fp32."""
    precise = x.float()
    norm: Tensor = torch.linalg.vector_norm(precise, dim=-1, keepdim=True).clamp_min(1e-12)
    return precise / norm
