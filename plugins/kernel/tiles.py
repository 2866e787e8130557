"""The tile of each kernel on each target: one table.

It goes by the tensor core instructions, bytes an element, bias and padded head size. `budget` holds every entry to no
spills and at most 48 KB of shared memory, which needs no opt-in at launch (TensorRT's ahead-of-time plugins have none).
"""

from __future__ import annotations

from .spec import KernelSpec, Tile
from .targets import MatrixUnit, Target

# A step of 64 queries and 64 keys repeats little work and leaves room for two or three blocks a multiprocessor.
# Triton splits the warps of a product along its longer side: with fewer queries than the head is wide the two products
# would be split differently and the weights would travel between warps. Hence 128 queries for heads of 128.
_MMA = {
    16: Tile(64, 64, 4, 2),
    32: Tile(64, 64, 4, 2),
    64: Tile(64, 64, 4, 2),
    128: Tile(128, 32, 8, 2),
    256: Tile(32, 16, 4, 2),
}
_WGMMA = _MMA | {128: Tile(64, 32, 4, 2)}
_TCGEN05 = _MMA | {128: Tile(64, 32, 4, 1)}
# An additive bias takes registers for its addresses and shared memory for its tile.
_NARROW = dict.fromkeys((16, 32, 64), Tile(64, 32, 4, 2))
_MMA_BIAS = _MMA | _NARROW | {128: Tile(128, 16, 8, 2)}
_WGMMA_BIAS = _MMA | _NARROW | {128: Tile(64, 16, 4, 2)}
# fp32 goes through ordinary multiply-adds: larger tiles do not fit the registers.
_FP32 = {
    16: Tile(32, 32, 4, 2),
    32: Tile(32, 32, 4, 2),
    64: Tile(32, 32, 4, 2),
    128: Tile(32, 16, 4, 2),
    256: Tile(16, 16, 4, 1),
}
_FP32_BIAS = _FP32 | dict.fromkeys((16, 32, 64), Tile(32, 16, 4, 2))

# (matrix unit, bytes an element, has a bias) → padded head size → tile
# xpos scales keys in registers and lays them out anew for the product, as fp32.
_XPOS = {
    16: Tile(64, 32, 4, 2),
    32: Tile(64, 32, 4, 2),
    64: Tile(64, 32, 4, 2),
    128: Tile(64, 16, 4, 1),
    256: Tile(16, 16, 4, 1),
}
_XPOS_FP32 = dict.fromkeys((16, 32, 64), Tile(32, 16, 4, 2)) | dict.fromkeys((128, 256), Tile(16, 16, 4, 1))

TABLE: dict[tuple[MatrixUnit, int, bool], dict[int, Tile]] = {
    ("mma", 2, False): _MMA,
    ("wgmma", 2, False): _WGMMA,
    ("tcgen05", 2, False): _TCGEN05,
    ("mma", 2, True): _MMA_BIAS,
    ("wgmma", 2, True): _WGMMA_BIAS,
    ("tcgen05", 2, True): _WGMMA_BIAS,
    ("mma", 4, False): _FP32,
    ("wgmma", 4, False): _FP32,
    ("tcgen05", 4, False): _FP32,
    ("mma", 4, True): _FP32_BIAS,
    ("wgmma", 4, True): _FP32_BIAS,
    ("tcgen05", 4, True): _FP32_BIAS,
}


def tile_for(spec: KernelSpec, target: Target) -> Tile:
    """The tile this kernel is compiled with for this target."""
    if spec.has_xpos:
        return (_XPOS_FP32 if spec.element_size == 4 else _XPOS)[spec.padded_head_dim]
    return TABLE[target.matrix_unit, spec.element_size, spec.has_bias][spec.padded_head_dim]
