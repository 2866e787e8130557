"""What a shared library exports and which libraries it needs: of Linux (ELF), macOS (Mach-O) and Windows (PE).

Read from the file by the layouts that the systems' own headers give: `elf.h`, `mach-o/loader.h`, and Microsoft's "PE
Format". 64-bit, little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass


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
    exports, needs = set(), set()
    for _, kind, _, _, at, length, link, _ in sections:
        if kind not in (6, 11):  # SHT_DYNAMIC, SHT_DYNSYM
            continue
        strings = sections[link][4]
        if kind == 6:
            entries = struct.iter_unpack("<qQ", data[at : at + length])
            needs |= {_text(data, strings + value) for tag, value in entries if tag == 1}  # DT_NEEDED
        else:
            symbols = struct.iter_unpack("<IBBHQQ", data[at : at + length])
            exports |= {_text(data, strings + name) for name, _, _, section, _, _ in symbols if name and section}
    return Examined({62: "x86_64", 183: "aarch64"}[machine], frozenset(exports), frozenset(needs))


def _mach_o(data: bytes) -> Examined:
    machine, _, _, count = struct.unpack_from("<IIII", data, 4)
    exports, needs, at = set(), set(), 32
    for _ in range(count):
        command, size = struct.unpack_from("<II", data, at)
        if command == 0xC:  # LC_LOAD_DYLIB
            needs.add(_text(data, at + struct.unpack_from("<I", data, at + 8)[0]))
        elif command == 0x2:  # LC_SYMTAB
            symbols_at, symbols, strings, _ = struct.unpack_from("<IIII", data, at + 8)
            for name, kind, _, _, _ in struct.iter_unpack("<IBBHQ", data[symbols_at : symbols_at + 16 * symbols]):
                # N_EXT without N_PEXT and without the bits of debuggers, in a section.
                if kind & 0xF1 == 0x01 and kind & 0x0E == 0x0E:
                    exports.add(_text(data, strings + name).removeprefix("_"))
        at += size
    return Examined({0x01000007: "x86_64", 0x0100000C: "aarch64"}[machine], frozenset(exports), frozenset(needs))


def _pe(data: bytes) -> Examined:
    (header,) = struct.unpack_from("<I", data, 0x3C)
    machine, count = struct.unpack_from("<HH", data, header + 4)
    (optional,) = struct.unpack_from("<H", data, header + 20)
    directories = header + 24 + 112
    table = [struct.unpack_from("<8xIIII", data, header + 24 + optional + 40 * i) for i in range(count)]

    def offset(address: int) -> int:
        """Where in the file lies what will be at an address."""
        for length, start, _, at in table:
            if start <= address < start + length:
                return at + address - start
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
