"""Instructions of one thread: arithmetic, logic, comparisons, selections, conversions, moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

from .blocks import HANDLERS, NUMPY, Blocks, Handler, handles
from .memory import Array
from .program import Instruction, PtxFault, Vector

BFLOAT16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_E4M3 = np.float32(448)


def _shifted(shift: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """A shift as PTX has it: by the register's width and more, nothing of the number is left but its sign."""

    def function(value: Array, amount: Array) -> Array:
        most = 8 * value.dtype.itemsize - 1
        amount = amount.astype(np.uint32)
        result = shift(value, np.minimum(amount, most).astype(value.dtype))
        if np.issubdtype(value.dtype, np.signedinteger):
            return result
        return np.where(amount > most, value.dtype.type(0), result)

    return function


def _truncated(a: Array, b: Array) -> Array:
    """Integer quotient, rounded towards zero."""
    if (b == 0).any():
        raise PtxFault("division by zero")
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


def _fused(a: Array, b: Array, c: Array) -> Array:
    """`a·b + c` rounded once (but for the sum's rounding to fp64, which is 2⁻²⁹ of it)."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _exp2(x: Array) -> Array:
    """2ˣ; subnormal numbers are zero, before and after."""
    smallest = np.finfo(np.float32).tiny
    result = np.exp2(np.where(np.abs(x) < smallest, np.float32(0), x).astype(np.float64)).astype(np.float32)
    return np.where(result < smallest, np.float32(0), result)


def _field(value: Array, start: Array, length: Array) -> Array:
    """Bits `start … start + length` of a number, with the sign of the highest if its type has one."""
    wide = value.astype(np.int64) >> start.astype(np.int64) & ((np.int64(1) << length.astype(np.int64)) - 1)
    if np.issubdtype(value.dtype, np.signedinteger):
        sign = np.int64(1) << (length.astype(np.int64) - 1)
        wide = (wide ^ sign) - sign
    return wide.astype(value.dtype)


# Opcode without its type → the function of its operands.
FUNCTIONS: dict[str, Callable[..., Array]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "div": _truncated,
    "div.full": np.divide,
    "ex2.approx.ftz": _exp2,
    "fma.rn": _fused,
    "mad.lo": lambda a, b, c: a * b + c,
    "max": lambda *values: reduce(np.fmax, values),
    "min": lambda *values: reduce(np.fmin, values),
    "mul": np.multiply,
    "mul.lo": np.multiply,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": lambda a, b: a - _truncated(a, b) * b,
    "shl": _shifted(np.left_shift),
    "shr": _shifted(np.right_shift),
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}


def _computing(name: str) -> Handler:
    function = FUNCTIONS[name]
    shift = name in ("shl", "shr")

    def handler(blocks: Blocks, instruction: Instruction) -> None:
        result, *operands = instruction.operands
        if instruction.type == "f32x2":
            halves = [np.ascontiguousarray(blocks.read(x, NUMPY["b64"])).view(np.float32) for x in operands]
            pairs = [half.reshape(*blocks.shape, 2) for half in halves]
            value = np.ascontiguousarray(function(*pairs)).view(np.uint64)[..., 0]
        else:
            dtype = NUMPY[instruction.type]
            dtypes = [dtype, NUMPY["u32"]] if shift else [dtype] * len(operands)
            value = function(*(blocks.read(x, kind) for x, kind in zip(operands, dtypes, strict=True)))
        blocks.write(result, value)

    return handler


HANDLERS.update({name: _computing(name) for name in FUNCTIONS})


@handles("mul.wide", "mad.wide")
def _wide(blocks: Blocks, instruction: Instruction) -> None:
    """The product of two numbers in twice their width, and a sum with a third."""
    result, a, b, *rest = instruction.operands
    dtype = NUMPY[instruction.type]
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
    value = blocks.read(a, dtype).astype(wide) * blocks.read(b, dtype).astype(wide)
    if rest:
        value = value + blocks.read(rest[0], wide)
    blocks.write(result, value)


@handles("bfe")
def _extract(blocks: Blocks, instruction: Instruction) -> None:
    result, value, start, length = instruction.operands
    fields = (blocks.read(value, NUMPY[instruction.type]), *(blocks.read(x, NUMPY["u32"]) for x in (start, length)))
    blocks.write(result, _field(*fields))


@handles("setp")
def _compare(blocks: Blocks, instruction: Instruction) -> None:
    _, comparison, kind = instruction.opcode.split(".")
    result, a, b = instruction.operands
    value = _COMPARISONS[comparison](blocks.read(a, NUMPY[kind]), blocks.read(b, NUMPY[kind]))
    blocks.write(result, value)


@handles("selp")
def _select(blocks: Blocks, instruction: Instruction) -> None:
    result, a, b, condition = instruction.operands
    dtype = NUMPY[instruction.type]
    value = np.where(blocks.read(condition, NUMPY["pred"]), blocks.read(a, dtype), blocks.read(b, dtype))
    blocks.write(result, value)


@handles("mov")
def _move(blocks: Blocks, instruction: Instruction) -> None:
    """A copy; between a register and a vector of narrower ones, of the bits, lowest first."""
    result, source = instruction.operands
    dtype = NUMPY[instruction.type]
    if isinstance(result, Vector):
        part = np.dtype(f"u{dtype.itemsize // len(result.parts)}")
        bits = np.ascontiguousarray(blocks.read(source, dtype)).view(part)
        blocks.write_all(result, bits.reshape(*blocks.shape, -1))
    elif isinstance(source, Vector):
        part = np.dtype(f"u{dtype.itemsize // len(source.parts)}")
        blocks.write(result, np.ascontiguousarray(blocks.read_all(source, part)).view(dtype)[..., 0])
    else:
        blocks.write(result, blocks.read(source, dtype))


@handles("cvt")
def _convert(blocks: Blocks, instruction: Instruction) -> None:
    """Between types; to a pair of numbers from two, the higher part first."""
    _, *rounding, to, source = instruction.opcode.split(".")
    known = [([], to), (["rn"], to), (["rna"], "tf32"), (["rz"], "f16"), (["rn", "satfinite"], "e4m3x2")]
    if (rounding, to) not in known or (to == "e4m3x2" and rounding == ["rn"]):
        raise PtxFault(f"a conversion with {rounding}")
    result, *operands = instruction.operands
    if to == "e4m3x2":
        _to_e4m3(blocks, instruction)
    elif source == "e4m3x2":
        pair = np.ascontiguousarray(blocks.read(operands[0], NUMPY["b16"])).view(E4M3).astype(np.float16)
        blocks.write(result, pair.view(np.uint32))
    elif rounding == ["rz"]:
        blocks.write(result, _truncated_half(blocks.read(operands[0], NUMPY[source])).view(np.uint16))
    elif to == "tf32":
        # To the nearest, halves away from zero: in the bits a sum, whatever the sign.
        nearest = blocks.read(operands[0], NUMPY["b32"]) + np.uint32(0x1000)
        blocks.write(result, nearest & np.uint32(0xFFFFE000))
    elif to in ("f16x2", "bf16x2"):
        high, low = (_bits(blocks.read(x, NUMPY[source]), to.removesuffix("x2")).astype(np.uint32) for x in operands)
        blocks.write(result, high << np.uint32(16) | low)
    elif to in ("f16", "bf16"):
        blocks.write(result, _bits(blocks.read(operands[0], NUMPY[source]), to))
    elif source in ("f16", "bf16"):
        blocks.write(result, numbers(blocks.read(operands[0], NUMPY["b16"]), source))
    else:
        # The register of an integer may be wider than its type, which then takes the lowest bits.
        width = blocks.width(operands[0]) if source[0] in "us" else NUMPY[source].itemsize
        wide = width > NUMPY[source].itemsize
        value = blocks.read(operands[0], np.dtype(f"u{width}") if wide else NUMPY[source])
        blocks.write(result, value.astype(NUMPY[source]).astype(NUMPY[to]))


def _to_e4m3(blocks: Blocks, instruction: Instruction) -> None:
    """To two numbers of E4M3: to the nearest, of two the even one, at most the largest; from fp32, or from fp16."""
    result, *operands = instruction.operands
    if instruction.type == "f16x2":
        both = np.ascontiguousarray(blocks.read(operands[0], NUMPY["b32"])).view(np.float16)
        values = both.reshape(*blocks.shape, 2).astype(np.float32)
    else:
        values = np.stack([blocks.read(x, NUMPY["f32"]) for x in reversed(operands)], axis=-1)
    bits = np.clip(values, -LARGEST_E4M3, LARGEST_E4M3).astype(E4M3).view(np.uint8)
    blocks.write(result, np.ascontiguousarray(bits).view(np.uint16)[..., 0])


def _truncated_half(value: Array) -> Array:
    """fp32 numbers as halves that are not larger in size; what is beyond the largest becomes that."""
    nearest = np.clip(value, -65504, 65504).astype(np.float16)
    return np.where(np.abs(nearest.astype(np.float32)) > np.abs(value), np.nextafter(nearest, np.float16(0)), nearest)


@handles("prmt.b32")
def _permute(blocks: Blocks, instruction: Instruction) -> None:
    """Four of the eight bytes of two registers, each chosen by a digit of the third; no signs are copied."""
    result, a, b, selector = instruction.operands
    low, high = (blocks.read(x, NUMPY["u32"]).astype(np.uint64) for x in (a, b))
    chosen, both = blocks.read(selector, NUMPY["u32"]), low | high << np.uint64(32)
    if (chosen & np.uint32(0x8888)).any():
        raise PtxFault("a permutation that copies signs")
    value = np.zeros(blocks.shape, np.uint64)
    for byte in range(4):
        place = np.uint64(8) * (chosen >> np.uint32(4 * byte) & np.uint32(7)).astype(np.uint64)
        value |= (both >> place & np.uint64(0xFF)) << np.uint64(8 * byte)
    blocks.write(result, value.astype(np.uint32))


def _bits(value: Array, kind: str) -> Array:
    """fp32 numbers rounded to a half type, as bits."""
    dtype: np.dtype[Any] = NUMPY["f16"] if kind == "f16" else BFLOAT16
    return np.ascontiguousarray(value).astype(dtype).view(np.uint16)


def numbers(bits: Array, kind: str) -> Array:
    """Bits of a half type as fp32 numbers; of TF32, 32 bits of which the last 13 do not count; of E4M3, bytes."""
    if kind == "e4m3":
        return np.ascontiguousarray(bits).view(E4M3).astype(np.float32)
    if kind == "tf32":
        return (np.ascontiguousarray(bits).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    dtype: np.dtype[Any] = NUMPY["f16"] if kind == "f16" else BFLOAT16
    return np.ascontiguousarray(bits).view(dtype).astype(np.float32)
