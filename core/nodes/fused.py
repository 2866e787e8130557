"""Define the fused nodes, which compute what is between matrix products and attention in one pass each.

Their ONNX functions are standard operators, which every runtime inlines, TensorRT too: no plugin is needed. The
compiled kernels for onnxruntime on the CPU compute each in one pass over its tensors (`plugins/cpu`).

With `B` batch, `N` sequence length, `S` residual streams `r_s` of width `D`, `H` heads:

======================  ===================================================================================
`ReadStreams`           `streams [B, N, S, D]`, `weight [D, 2+S]`, `gain`, `constant [S, 2+S]`, all fp32 →
                        `read = Σ_s A[s, 0]·r_s [B, N, D]`, `mix = A[:, 1:1+S] [B, N, S, S]`,
                        `beta = A[:, 1+S:] [B, N, S, 1]` with `A = tanh((r @ weight)/‖r‖)·gain + constant`
`ReadStreamsNorm`       the same with `scale`, `shift [D]` and the LayerNorm of what is read:
                        `read = (x - mean(x))/√(variance(x) + 1e-5)·scale + shift` of `x = Σ_s A[s, 0]·r_s`
`MixStreams`            `streams`, `mix`, `beta`, `output [B, N, D]` → `r'_t = Σ_s mix[s, t]·r_s + beta_t·output`
`MixReadStreamsNorm`    `MixStreams`, then `ReadStreamsNorm` of what it wrote → `written = r'`, and `read`,
                        `next_mix` and `next_beta` of `r'`
`AddToStreams`          `streams`, `beta`, `output` → `r'_t = r_t + beta_t·output`
`BeginStreams`          `x [B, N, D]`, `mix [B, N, S, 1]`, `beta`, `output` → `r'_t = mix_t·x + beta_t·output`
`EndStreams`            as `MixStreams` → the sum of its streams, `Σ_t r'_t [B, N, D]`
`RotateHeads`           `x [B, N, H, D]` and tables `[N, 1, 2, D/2]`, or `x [B, H, N, D]` and `[N, 2, D/2]`, fp32,
                        fp16 or bf16 → `x·cosine + (x₂, x₁)·sine` for the halves `x = (x₁, x₂)` of a head; `sine`
                        carries the signs. Where sequences differ in their positions, `[B, N, 1, 2, D/2]` or
                        `[B, 1, N, 2, D/2]`
`RotatePairs`           the same of neighbours: `x·cosine + (x₁, x₀, x₃, x₂, …)·sine`, tables `[N, 1, D/2, 2]` for
                        `x [B, N, H, D]`, `[N, D/2, 2]` for `x [B, H, N, D]`, `B` before them as above
`GatedGelu`             `value`, `gate` of one shape, fp32, fp16 or bf16 → `value·gelu(gate)`, the exact (erf) gelu
`GatedGeluTanh`         the same with `gelu(x) = x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`
`GatedSilu`             the same with `silu(x) = x/(1 + e⁻ˣ)`
======================  ===================================================================================

A step file has one token a call. Nodes that read, mix or add take it without the axes `B, N`: `streams [S, D]`,
`mix [S, S]`, `beta [S, 1]`, and `read` and `output [1, D]`.
"""

from __future__ import annotations

from dataclasses import dataclass

FUSED_DOMAIN = "localattn.fused"
FUSED_VERSION = 1
# ε of the LayerNorm in a node; PyTorch's default.
NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class FusedNode:
    """The contract of one op type.

    Args:
        op_type: its name.
        inputs: names of the inputs, in order.
        outputs: names of the outputs, in order.
        dtypes: element types of its compiled kernels.
    """

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dtypes: tuple[str, ...] = ("fp32",)


ROTATIONS = ("RotateHeads", "RotatePairs")
GATES = ("GatedGelu", "GatedGeluTanh", "GatedSilu")
_ANY = ("fp32", "fp16")
_WRITING = ("streams", "mix", "beta", "output")
_READING = ("weight", "gain", "constant")
_NORM = ("scale", "shift")
FUSED_NODES = (
    FusedNode("ReadStreams", ("streams", *_READING), ("read", "mix", "beta")),
    FusedNode("ReadStreamsNorm", ("streams", *_READING, *_NORM), ("read", "mix", "beta")),
    FusedNode("MixStreams", _WRITING, ("written",)),
    FusedNode("MixReadStreamsNorm", (*_WRITING, *_READING, *_NORM), ("written", "read", "next_mix", "next_beta")),
    FusedNode("AddToStreams", ("streams", "beta", "output"), ("written",)),
    FusedNode("BeginStreams", ("x", "mix", "beta", "output"), ("written",)),
    FusedNode("EndStreams", _WRITING, ("written",)),
    *(FusedNode(op_type, ("x", "cosine", "sine"), ("rotated",), _ANY) for op_type in ROTATIONS),
    *(FusedNode(op_type, ("value", "gate"), ("gated",), _ANY) for op_type in GATES),
)
FUSED_BY_OP_TYPE = {node.op_type: node for node in FUSED_NODES}
