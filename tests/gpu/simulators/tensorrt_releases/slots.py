"""TensorRT's functions at the places where TensorRT-RTX has them.

The bindings call networks, tensors and builder configurations through tables of virtual functions, by position.
TensorRT-RTX has the same tables without the functions that it gave up, so the positions after those differ. While a
method of such an object runs, its table is replaced by one with gaps at these positions; TensorRT-RTX's own code sees
its own. A function in a gap does nothing and answers zero: no calibrator, no layer, the default location.

The positions are those of the abstract classes of `NvInferImpl.h`; within a major release, tables only grow at the end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from typing import Any

# Major release → class → what TensorRT-RTX gave up: 1.4.0 of TensorRT 10, 1.7.1 of TensorRT 11.
GAPS: dict[str, dict[str, Collection[int]]] = {
    "10": {
        # The INT8 calibrator; algorithm selector, calibration profile and quantization flags.
        "IBuilderConfig": {4, 5, *range(27, 36)},
        # addPluginV2, addPluginV3; the first addDequantize and addQuantize.
        "INetworkDefinition": {25, 26, 47, 48},
        # setDynamicRange; broadcast, location and what else there is of dynamic ranges.
        "ITensor": {6, *range(9, 17)},
    },
    "11": {
        "INetworkDefinition": {25, 26},
        "ITensor": {7, 8, 9, 10},  # broadcast, location
    },
}
_LONGEST = 110  # functions of the longest table
_BEFORE = 4  # offset to top and type information, which lie before a table; two destructors

_Word = ctypes.c_void_p
_nothing = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: 0)
_tables: dict[int, Any] = {}
_ours: set[int] = set()


def put_in_place(trt: Any, release: str) -> None:
    """Let the classes of module `trt` call what they name; `release` is "10" or "11"."""
    for name, gaps in GAPS[release].items():
        kind = getattr(trt, name)
        for method, what in list(vars(kind).items()):
            if isinstance(what, property):
                get, put = (function and _placed(function, gaps) for function in (what.fget, what.fset))
                setattr(kind, method, property(get, put))
            elif callable(what) and not method.startswith("__"):
                setattr(kind, method, _placed(what, gaps))


def _placed(function: Callable[..., Any], gaps: Collection[int]) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        # The bindings' object holds the address of an object of the API, and that, after its own table, of the
        # implementation, whose first word is the address of its table.
        implementation = _read(_read(id(self) + 2 * ctypes.sizeof(_Word)) + ctypes.sizeof(_Word))
        shipped = _read(implementation)
        if shipped in _ours:
            return function(self, *arguments, **named)
        _Word.from_address(implementation).value = _table(shipped, gaps)
        try:
            return function(self, *arguments, **named)
        finally:
            _Word.from_address(implementation).value = shipped

    return call


def _table(shipped: int, gaps: Collection[int]) -> int:
    """Address of the table with gaps."""
    word = ctypes.sizeof(_Word)
    if shipped not in _tables:
        places = [place for place in range(_LONGEST) if place not in gaps]
        table = (_Word * (_BEFORE + _LONGEST))(*[ctypes.cast(_nothing, _Word).value] * (_BEFORE + _LONGEST))
        for place, source in enumerate([*range(-_BEFORE, 0), *places]):
            table[_BEFORE + source] = _read(shipped + (place - _BEFORE + 2) * word)
        _tables[shipped] = table
        _ours.add(ctypes.addressof(table) + 2 * word)
    return ctypes.addressof(_tables[shipped]) + 2 * word


def _read(address: int) -> int:
    return _Word.from_address(address).value or 0
