"""Choose the tile of each kernel on each target: one table, and a second one of tiles with more shared memory.

It goes by the tensor core instructions, bytes an element, bias and padded head size. More than 48 KB of shared memory a
launch must ask for. TensorRT's ahead-of-time plugins cannot, so they have the first table alone. `budget` holds every
entry to no spills and to the shared memory that there is.

Three stages: Triton's loop waits for the tile that it needs while the next one is on its way. With two it waits for all
that it asked for (the waits in the machine code show it), so nothing overlaps within a block.
"""

from __future__ import annotations

from ...core.nodes.gpu import WIDEST_FP32_RING_HEAD
from . import aft
from .aft import AftSpec
from .ring import JoinSpec, RingSpec
from .spec import KernelSpec, Tile
from .targets import MatrixUnit, Target

# A step of 64 queries and 64 keys repeats little work and leaves room for two or three blocks a multiprocessor.
# Triton splits the warps of a product along its longer side: with fewer queries than the head is wide the two products
# would be split differently and the weights would travel between warps. Hence 128 queries for heads of 128.
_MMA = {
    16: Tile(64, 64, 4, 3),
    32: Tile(64, 64, 4, 3),
    64: Tile(64, 64, 4, 3),
    128: Tile(128, 32, 8, 2),
    256: Tile(32, 16, 4, 2),
}
_WGMMA = _MMA | {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2)}
# Three stages take 100 registers more there than two.
_TCGEN05 = _MMA | dict.fromkeys((16, 32, 64), Tile(64, 64, 4, 2)) | {128: Tile(64, 32, 4, 1)}
# An additive bias takes registers for its addresses and shared memory for its tile.
_NARROW = dict.fromkeys((16, 32, 64), Tile(64, 32, 4, 3))
_MMA_BIAS = _MMA | _NARROW | {128: Tile(128, 16, 8, 2)}
_WGMMA_BIAS = _MMA | _NARROW | {128: Tile(64, 16, 4, 2)}
_TCGEN05_BIAS = _WGMMA_BIAS | dict.fromkeys((16, 32, 64), Tile(64, 32, 4, 2))
# fp32 goes through ordinary multiply-adds: larger tiles do not fit the registers.
_FP32 = {
    16: Tile(32, 32, 4, 2),
    32: Tile(32, 32, 4, 2),
    64: Tile(32, 32, 4, 2),
    128: Tile(32, 16, 4, 2),
    256: Tile(16, 16, 4, 1),
}
_FP32_BIAS = _FP32 | dict.fromkeys((16, 32, 64), Tile(32, 16, 4, 2))

# xpos scales keys in registers and lays them out anew for the product, as fp32.
_XPOS = {
    16: Tile(64, 32, 4, 2),
    32: Tile(64, 32, 4, 2),
    64: Tile(64, 32, 4, 2),
    128: Tile(64, 16, 4, 1),
    256: Tile(16, 16, 4, 1),
}
# Tiles that ptxas for sm_120 and later does not spill.
_XPOS_BIAS_120 = _XPOS | {64: Tile(64, 16, 4, 2)}
_XPOS_FP32 = dict.fromkeys((16, 32, 64), Tile(32, 16, 4, 2)) | dict.fromkeys((128, 256), Tile(16, 16, 4, 1))

# fp32 on tensor cores, in one product of TF32 or in three.
_TF32 = dict.fromkeys((16, 32, 64), Tile(64, 32, 4, 2)) | {128: Tile(32, 16, 4, 2), 256: Tile(16, 16, 4, 1)}
_TF32X3 = dict.fromkeys((16, 32, 64), Tile(32, 32, 4, 2)) | {128: Tile(16, 16, 4, 1)}

# Products of fp8 take 32 keys at least.
_FP8 = {32: Tile(64, 64, 4, 3), 64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 2)}
_TCGEN05_FP8 = {32: Tile(64, 64, 4, 2), 64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 1)}

# (matrix unit, bytes an element, has a bias) → padded head size → tile
TABLE: dict[tuple[MatrixUnit, int, bool], dict[int, Tile]] = {
    ("mma", 2, False): _MMA,
    ("wgmma", 2, False): _WGMMA,
    ("tcgen05", 2, False): _TCGEN05,
    ("mma", 2, True): _MMA_BIAS,
    ("wgmma", 2, True): _WGMMA_BIAS,
    ("tcgen05", 2, True): _TCGEN05_BIAS,
    ("mma", 1, False): _FP8,
    ("wgmma", 1, False): _FP8,
    ("tcgen05", 1, False): _TCGEN05_FP8,
    ("mma", 4, False): _FP32,
    ("wgmma", 4, False): _FP32,
    ("tcgen05", 4, False): _FP32,
    ("mma", 4, True): _FP32_BIAS,
    ("wgmma", 4, True): _FP32_BIAS,
    ("tcgen05", 4, True): _FP32_BIAS,
}


# Steps: a product has 16 rows at least, and fewer heads share keys. Chunks: with 32 rows, scores and biases fit the
# registers, and every target multiplies by mma.
_RINGS: dict[tuple[str, str], dict[int, Tile]] = {
    ("step", "fp16"): dict.fromkeys((16, 32, 64), Tile(16, 64, 4, 3)) | {128: Tile(16, 32, 4, 3)},
    ("step", "bf16"): dict.fromkeys((16, 32, 64), Tile(16, 32, 4, 2)) | {128: Tile(16, 16, 4, 2)},
    ("step", "fp32"): dict.fromkeys((16, 32, 64), Tile(16, 32, 4, 2)) | {128: Tile(16, 16, 8, 1)},
    ("chunk", "fp16"): dict.fromkeys((16, 32, 64), Tile(32, 64, 4, 2)) | {128: Tile(32, 32, 4, 2)},
    ("chunk", "bf16"): dict.fromkeys((16, 32, 64), Tile(16, 32, 4, 2)) | {128: Tile(16, 16, 4, 2)},
    ("chunk", "fp32"): dict.fromkeys((16, 32, 64, 128), Tile(16, 16, 4, 2)),
}
# Heads above 128 of these; those of fp32 spill with every tile.
_WIDE_RINGS = {
    ("step", "fp16"): Tile(16, 16, 4, 3),
    ("step", "bf16"): Tile(16, 16, 4, 1),
    ("chunk", "fp16"): Tile(16, 32, 4, 2),
    ("chunk", "bf16"): Tile(16, 16, 4, 1),
}
# The splits that are joined at a time.
_JOIN = Tile(1, 16, 4, 1)

# Tiles for which more shared memory allows a third stage or wider products.
OPT_IN: dict[tuple[MatrixUnit, int, bool], dict[int, Tile]] = {
    ("mma", 2, False): {128: Tile(128, 32, 8, 3)},
    ("wgmma", 2, False): {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 3)},
}
# Bytes that a launch has without asking, and bytes that it may ask for: of the smallest device with the instructions.
# PTX of sm_80 runs on all later devices.
FREE_SHARED_BYTES = 48 << 10
OPT_IN_SHARED_BYTES: dict[MatrixUnit, int] = {"mma": 99 << 10, "wgmma": 227 << 10, "tcgen05": 227 << 10}


def tile_for(spec: KernelSpec | AftSpec | RingSpec | JoinSpec, target: Target, *, opt_in: bool = True) -> Tile:
    """Return the tile this kernel is compiled with for this target.

    Args:
        spec: the kernel.
        target: the GPU.
        opt_in: whether the launch can ask for more than `FREE_SHARED_BYTES` of shared memory.
    """
    if isinstance(spec, AftSpec):
        return aft.TILE
    if isinstance(spec, JoinSpec):
        return _JOIN
    if isinstance(spec, RingSpec):
        wide = spec.padded_head_dim > WIDEST_FP32_RING_HEAD
        return _WIDE_RINGS[spec.node, spec.dtype] if wide else _RINGS[spec.node, spec.dtype][spec.padded_head_dim]
    row = target.matrix_unit, spec.element_size, spec.has_bias
    if spec.has_xpos:
        halves = _XPOS_BIAS_120 if spec.has_bias and target.capability >= 120 else _XPOS
        return (_XPOS_FP32 if spec.element_size == 4 else halves)[spec.padded_head_dim]
    if spec.fp32_products == "tf32x3" and (spec.padded_head_dim == 128 or not spec.has_bias):
        return _TF32X3[spec.padded_head_dim]
    if spec.fp32_products == "tf32" and not spec.has_bias:
        return _TF32[spec.padded_head_dim]
    large = OPT_IN.get(row, {}) if opt_in else {}
    return large.get(spec.padded_head_dim) or TABLE[row][spec.padded_head_dim]
