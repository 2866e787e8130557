"""DLPack in ctypes: tensors that libraries hand to each other in capsules, without a copy.

The structures are those of dlpack.h 0.8, which every library reads and writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

# DLDeviceType.
CUDA, CUDA_MANAGED = 2, 13

_NAME = b"dltensor"
# DLDataTypeCode → numpy's name without the bits.
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, _Destructor)

# What was given away: address of the structure → everything it points to.
_given: dict[int, Any] = {}


def _forget(managed: Any) -> None:
    _given.pop(ctypes.addressof(managed.contents), None)


def _destroy(capsule: int) -> None:
    """Free the tensor of a capsule that nobody took; whoever takes one renames it."""
    if _is_valid(capsule, _NAME):
        _given.pop(_get_pointer(capsule, _NAME), None)


_FORGET, _DESTROY = _Deleter(_forget), _Destructor(_destroy)


def give(owner: object, address: int, shape: tuple[int, ...], dtype: str, device: tuple[int, int]) -> Any:
    """Return a capsule with a contiguous tensor.

    Args:
        owner: keeps the memory; held until the taker is done.
        address: of the first element.
        shape: of the tensor.
        dtype: numpy's name of its elements, or "bfloat16".
        device: kind and number.
    """
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    managed = _Managed()
    tensor = managed.tensor
    tensor.data, tensor.device, tensor.ndim = address, _Device(*device), len(shape)
    tensor.dtype, tensor.shape = _data_type(dtype), sizes
    managed.deleter = _FORGET
    place = ctypes.addressof(managed)
    _given[place] = owner, managed, sizes
    return _new(place, _NAME, _DESTROY)


class Found(NamedTuple):
    """An array in GPU memory, as the library that owns it describes it.

    Attributes:
        address: of its first element.
        shape: of the array.
        dtype: numpy's name of its elements, or "bfloat16".
        is_contiguous: whether its elements lie one after the other, in the order of its axes.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    is_contiguous: bool


def take(capsule: Any) -> Found:
    """Look at the tensor in a capsule, which keeps the memory.

    Raises:
        ValueError: it is no such capsule, was taken already, or its elements have no name here.
    """
    place = ctypes.c_void_p(id(capsule))
    if not _is_valid(place, _NAME):
        raise ValueError("it is no DLPack capsule, or was taken already")
    tensor = ctypes.cast(_get_pointer(place, _NAME), ctypes.POINTER(_Managed)).contents.tensor
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    kind, bits = _CODES.get(tensor.dtype.code), tensor.dtype.bits
    if kind is None or tensor.dtype.lanes != 1:
        raise ValueError(f"its elements have the unknown code {tensor.dtype.code}")
    return Found(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        dtype=kind if kind == "bool" else f"{kind}{bits}",
        is_contiguous=not tensor.strides or are_contiguous(tensor.strides[: tensor.ndim], shape, 1),
    )


def are_contiguous(strides: Sequence[int], shape: tuple[int, ...], step: int) -> bool:
    """Return whether strides are those of a contiguous array whose elements lie `step` apart."""
    for stride, size in zip(reversed(strides), reversed(shape), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _data_type(dtype: str) -> _DataType:
    kind = dtype.rstrip("0123456789")
    code = next(code for code, name in _CODES.items() if name == kind)
    return _DataType(code, int(dtype[len(kind) :] or 8), 1)
