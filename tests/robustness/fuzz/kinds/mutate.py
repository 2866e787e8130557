"""Mutations of bytes, documents, archives and protobuf messages, each drawn from one random generator.

A reader's first check stops most random bytes. So each format is taken apart, changed inside, and put together again
with its lengths and checksums made right.
"""

from __future__ import annotations

import copy
import io
import json
import struct
import warnings
import zipfile
from random import Random
from typing import Any

ODD_INTEGERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    65535,
    1 << 31,
    (1 << 31) - 1,
    -(1 << 31),
    1 << 32,
    1 << 40,
    (1 << 62),
    1 << 63,
)
ODD_TEXTS = (
    "", "\0", "..", "../../etc/passwd", "/etc/passwd", "/dev/zero", "nul", "é" * 300, "a\nb", "\ud800", "x" * 5000, "?",
    "float32", "int64", "NaN", "-1", "{}", "%s%n", "local_attention.LocalMHA", "0.4.11", "tokens", "logits",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, [[]], {"": None}, 0.5, -0.0, 1e308, -1e-320, float("nan"), float("inf"),
    *ODD_INTEGERS, *ODD_TEXTS, 10**400,
)  # fmt: skip


def mutate_bytes(random: Random, content: bytes) -> bytes:
    """One to four changes: flips, odd integers, cuts, repeats, insertions."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(len(data) + 1)
        kind = random.randrange(7)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << random.randrange(8)
        elif kind == 1:
            size = random.choice((1, 2, 4, 8))
            value = random.choice(ODD_INTEGERS) & ((1 << 8 * size) - 1)
            data[at : at + size] = value.to_bytes(size, random.choice(("little", "big")))
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[at : at + random.randrange(1, 65)]
        elif kind == 4:
            data[at:at] = random.randbytes(random.randrange(1, 33))
        elif kind == 5:
            data[at:at] = data[at : at + random.randrange(1, 257)]
        else:
            end = at + random.randrange(1, 9)
            data[at:end] = random.randbytes(len(data[at:end]))
    return bytes(data)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document, the root left out."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def mutate_document(random: Random, document: Any) -> Any:
    """One to three places of a JSON-like document removed, replaced, renamed, or copied from elsewhere."""
    document = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        found = places(document)
        if not found:
            return random.choice(ODD_VALUES)
        path = random.choice(found)
        holder, key = at(document, path[:-1]), path[-1]
        kind = random.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            holder[key] = copy.deepcopy(at(document, random.choice(found)))
        elif kind == 2 and isinstance(holder, dict):
            holder[random.choice(ODD_TEXTS)] = holder.pop(key)
        elif kind == 3 and isinstance(holder[key], int | float | str):
            holder[key] = type(holder[key])() if random.random() < 0.3 else random.choice(ODD_VALUES)
        else:
            holder[key] = copy.deepcopy(random.choice(ODD_VALUES))
    return document


def json_bytes(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def mutate_json(random: Random, content: bytes) -> bytes:
    """A document changed as a document, or its text as bytes."""
    if random.random() < 0.25:
        return mutate_bytes(random, content)
    return json_bytes(mutate_document(random, json.loads(content)))


def mutate_zip(random: Random, content: bytes, inner: Any) -> bytes:
    """A zip with one member changed by `inner(random, name, bytes)`, renamed, doubled or compressed; sums right."""
    if random.random() < 0.25:
        return mutate_bytes(random, content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(member.filename, archive.read(member)) for member in archive.infolist()]
    index = random.randrange(len(members))
    name, data = members[index]
    kind = random.randrange(12)
    method = zipfile.ZIP_STORED
    if kind == 0:
        del members[index]
    elif kind == 1:
        members.append((name, data))
    elif kind == 2:
        members[index] = (random.choice(ODD_TEXTS).replace("\ud800", "") or "a", data)
    elif kind == 3:
        method = zipfile.ZIP_DEFLATED
    elif kind == 4:
        members[index] = (name, random.choice(members)[1])
    else:
        members[index] = (name, inner(random, name, data))
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", method) as archive:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, method)
    result = stream.getvalue()
    return mutate_bytes(random, result) if random.random() < 0.1 else result


def mutate_npy(random: Random, name: str, data: bytes) -> bytes:
    """An `.npy` whose header claims something else, or with other numbers."""
    if random.random() < 0.3 or not data.startswith(b"\x93NUMPY"):
        return mutate_bytes(random, data)
    size = int.from_bytes(data[8:10], "little")
    header, numbers = data[10 : 10 + size].decode("latin-1"), data[10 + size :]
    claims = {
        "descr": random.choice(
            ["'<f4'", "'<f8'", "'<i8'", "'|O'", "'<U4'", "'<c16'", "[('a','<f4')]", "'<f2'", "'|b1'"]
        ),
        "shape": random.choice(
            ["()", "(1,)", "(-1,)", "(99999999999,)", "(1,64)", "(64,1)", "(1,32)", "(1,65)", "(0,)"]
        ),
        "fortran_order": random.choice(["True", "False", "2"]),
    }
    key = random.choice(list(claims))
    changed = _replaced(header, key, claims[key])
    if random.random() < 0.4:
        numbers = random.choice(
            (b"", numbers[:-1], b"\xff" * len(numbers), b"\xff\x7f" * (len(numbers) // 2), numbers * 2)
        )
    text = changed.encode("latin-1")
    return data[:8] + struct.pack("<H", len(text)) + text + numbers


def _replaced(header: str, key: str, claim: str) -> str:
    start = header.find(f"'{key}': ")
    if start < 0:
        return header
    start += len(key) + 4
    end = header.find("), " if header[start] == "(" else ", ", start)
    end = end + 1 if header[start] == "(" else end
    return header[:start] + claim + header[end:]


def mutate_pickle(random: Random, name: str, data: bytes) -> bytes:
    """Pickled bytes with one opcode's argument replaced, or any bytes."""
    import pickletools

    if not name.endswith(".pkl") and not data.startswith(b"\x80\x02"):
        return mutate_bytes(random, data)
    try:
        ops = list(pickletools.genops(data))
    except Exception:
        return mutate_bytes(random, data)
    _, _, position = random.choice(ops)
    kind = random.randrange(4)
    if kind == 0:  # another number
        number = random.choice(ODD_INTEGERS) & 0xFFFFFFFF
        numbers = [place for op, _, place in ops if op.name in ("BININT", "BININT1", "BININT2")]
        if numbers:
            position = random.choice(numbers)
            size = {"K": 2, "M": 3, "J": 5}[chr(data[position])]
            return data[:position] + b"J" + struct.pack("<I", number) + data[position + size :]
    if kind == 1:
        return data[:position] + bytes([random.randrange(256)]) + data[position + 1 :]
    if kind == 2:
        end = next((place for _, _, place in ops if place > position), len(data))
        return data[:position] + data[position:end] * random.choice((0, 2, 50)) + data[end:]
    return mutate_bytes(random, data)


def mutate_safetensors(random: Random, content: bytes) -> bytes:
    """A header that says something else, with a right or a wrong length."""
    if random.random() < 0.25:
        return mutate_bytes(random, content)
    size = int.from_bytes(content[:8], "little")
    header = json_bytes(mutate_document(random, json.loads(content[8 : 8 + size])))
    length = len(header) if random.random() < 0.9 else random.choice(ODD_INTEGERS) & ((1 << 64) - 1)
    return length.to_bytes(8, "little") + header + content[8 + size :]


_YAML = (
    "\n".join(["k0: &a0 [x]", *(f"k{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]),
    "kwargs: !!python/object/apply:os.system ['true']", "? {a: b}\n: c", "kwargs: &k {dim: *k}", "[" * 5000,
    "- " * 3000,
    "kwargs: {dim: 1_000, depth: 0o7, heads: 1e3}", "kwargs: {dim: 010}", "kwargs: {dim: 1:30}", "kwargs: {a: 1, a: 2}",
    "? &a [x]\n: 1\n? *a\n: 2", "kwargs: !!set {a, a}", "kwargs: !!omap [a: 1, a: 2]", "a: -0:0.0", "a: !!int 0x",
    "class: 2026-01-01", "kwargs: {? [a]: b}", "%YAML 9.9\n---\n{}",
)  # fmt: skip
_TOML = (
    "[" * 2000,
    "a = " + "[" * 5000,
    "kwargs.dim = 1\nkwargs = 2",
    "class = 1979-05-27",
    "dim = 1e99999",
    "[kwargs]\n[kwargs]",
)
_JSON = (
    '{"kwargs": {"dim": 1, "dim": 2}}',
    '{"a": ' * 30 + "1" + "}" * 30,
    '{"kwargs": {"dim": "<fill in: x>"}}',
    "NaN",
)


def mutate_config(random: Random, document: Any, suffix: str) -> bytes:
    """A config changed as a document and written in its format, or its text changed."""
    changed = mutate_document(random, document)
    if suffix == ".json":
        text = random.choice(_JSON).encode() if random.random() < 0.1 else json_bytes(changed)
    elif suffix in (".yaml", ".yml"):
        import yaml

        text = (
            random.choice(_YAML).encode()
            if random.random() < 0.1
            else yaml.safe_dump(changed).encode("utf-8", "replace")
        )
    else:
        text = (
            random.choice(_TOML).encode() if random.random() < 0.1 else _toml(changed).encode("utf-8", "surrogatepass")
        )
    return mutate_bytes(random, text) if random.random() < 0.3 else text


def _toml(document: Any) -> str:
    """TOML of a config: what TOML has no word for stays as JSON, which is then an error to find."""
    if not isinstance(document, dict):
        return json.dumps(document)
    flat = [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in document.items() if not isinstance(v, dict)]
    tables = [
        "\n".join([f"[{json.dumps(k)}]", *(f"{json.dumps(n)} = {json.dumps(x)}" for n, x in v.items())])
        for k, v in document.items()
        if isinstance(v, dict)
    ]
    return "\n".join([*flat, *tables]) + "\n"
