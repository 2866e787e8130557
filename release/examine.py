"""What a shared library exports and which libraries it needs: of Linux (ELF), macOS (Mach-O) and Windows (PE).

Read from the file by the layouts that the systems' own headers give: `elf.h`, `mach-o/loader.h`, and Microsoft's "PE
Format". 64-bit, little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_SHT_DYNAMIC, _SHT_DYNSYM, _DT_NEEDED = 6, 11, 1  # elf.h
_LC_LOAD_DYLIB, _LC_DYLD_INFO_ONLY, _LC_DYLD_EXPORTS_TRIE = 0xC, 0x80000022, 0x80000033  # mach-o/loader.h


@dataclass(frozen=True)
class Examined:
    """A library.

    Args:
        machine: "x86_64" or "aarch64".
        exports: symbols that others see.
        needs: libraries that the system loads with it.
    """

    machine: str
    exports: frozenset[str]
    needs: frozenset[str]


def examine(data: bytes) -> Examined:
    """Read a library of any of the three kinds; ValueError for anything else."""
    if data[:6] == b"\x7fELF\x02\x01":
        return _elf(data)
    if data[:4] == b"\xcf\xfa\xed\xfe":
        return _mach_o(data)
    if data[:2] == b"MZ":
        return _pe(data)
    raise ValueError("no shared library of Linux, macOS or Windows")


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _elf(data: bytes) -> Examined:
    (machine,) = struct.unpack_from("<H", data, 18)
    (sections_at,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQII", data, sections_at + i * size) for i in range(count)]
    exports: set[str] = set()
    needs: set[str] = set()
    for _, kind, _, _, at, length, link, _ in sections:
        if kind not in (_SHT_DYNAMIC, _SHT_DYNSYM):
            continue
        strings = sections[link][4]  # where the names of this section lie
        if kind == _SHT_DYNAMIC:
            entries = struct.iter_unpack("<qQ", data[at : at + length])
            needs |= {_text(data, strings + value) for tag, value in entries if tag == _DT_NEEDED}
        else:
            symbols = struct.iter_unpack("<IBBHQQ", data[at : at + length])
            exports |= {_text(data, strings + name) for name, _, _, section, _, _ in symbols if name and section}
    return Examined({62: "x86_64", 183: "aarch64"}[machine], frozenset(exports), frozenset(needs))


def _mach_o(data: bytes) -> Examined:
    machine, _, _, count = struct.unpack_from("<IIII", data, 4)
    exports: set[str] = set()
    needs, at = set(), 32
    for _ in range(count):
        command, size = struct.unpack_from("<II", data, at)
        if command == _LC_LOAD_DYLIB:
            needs.add(_text(data, at + struct.unpack_from("<I", data, at + 8)[0]))
        elif command == _LC_DYLD_INFO_ONLY:
            exports |= _trie(data, *struct.unpack_from("<II", data, at + 40))
        elif command == _LC_DYLD_EXPORTS_TRIE:
            exports |= _trie(data, *struct.unpack_from("<II", data, at + 8))
        at += size
    return Examined({0x01000007: "x86_64", 0x0100000C: "aarch64"}[machine], frozenset(exports), frozenset(needs))


def _trie(data: bytes, begin: int, size: int) -> set[str]:
    """Read the names in the tree of exported symbols, whose edges are their parts."""

    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte, at = data[at], at + 1
            value, shift = value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value, at

    found: set[str] = set()
    nodes = [(begin, "")] if size else []
    while nodes:
        at, name = nodes.pop()
        length, at = number(at)
        if length:
            found.add(name.removeprefix("_"))
        at += length
        children, at = data[at], at + 1
        for _ in range(children):
            edge = _text(data, at)
            offset, at = number(at + len(edge) + 1)
            nodes.append((begin + offset, name + edge))
    return found


def _pe(data: bytes) -> Examined:
    (header,) = struct.unpack_from("<I", data, 0x3C)
    machine, count = struct.unpack_from("<HH", data, header + 4)
    (optional,) = struct.unpack_from("<H", data, header + 20)
    directories = header + 24 + 112
    table = [struct.unpack_from("<8xIIII", data, header + 24 + optional + 40 * i) for i in range(count)]

    def offset(address: int) -> int:
        """Return where in the file lies what will be at an address."""
        for length, start, _, at in table:
            if start <= address < start + length:
                return int(at + address - start)
        raise ValueError(f"nothing lies at {address:#x}")

    exported, imported = (struct.unpack_from("<I", data, directories + 8 * i)[0] for i in range(2))
    (names,) = struct.unpack_from("<I", data, offset(exported) + 24)
    (names_at,) = struct.unpack_from("<I", data, offset(exported) + 32)
    pointers = struct.unpack_from(f"<{names}I", data, offset(names_at))
    exports = {_text(data, offset(pointer)) for pointer in pointers}
    needs, at = set(), offset(imported)
    while name := struct.unpack_from("<I", data, at + 12)[0]:
        needs.add(_text(data, offset(name)))
        at += 20
    return Examined({0x8664: "x86_64", 0xAA64: "aarch64"}[machine], frozenset(exports), frozenset(needs))
