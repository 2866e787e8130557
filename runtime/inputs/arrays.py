"""Read and write inputs and outputs as `.npz` files, and draw random inputs.

An `.npy` header can claim any shape, so each claim is compared with the bytes that the archive holds for it before
anything is allocated. No array is ever unpickled.
"""

from __future__ import annotations

import io
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ...core.errors import UsageError
from ...core.machine.memory import check_fits
from ...core.storage.file_kinds import NPZ
from ...core.storage.files import publish
from ...core.storage.outputs import Output, writing
from ...core.storage.reading import open_plain
from ...core.storage.wrong_file import refuse_wrong_file
from ...core.tensors import INTEGER_MASKS, POSITION_IDS, UNNAMED_DIMENSION, TensorSpec, format_shape

_MEMBER_SUFFIX = ".npy"
# Headers of plain arrays have some hundred bytes; numpy refuses to parse more than 10,000.
_MAX_HEADER = 10_000
# Deflate cannot compress better than this; a header that states more is wrong.
_MAX_DEFLATE_RATIO = 1032
# Compressed arrays may expand to 256 MiB, or to 20 times the file if that is more: a model's numbers compress less.
LARGEST_INFLATED = 256 << 20
MOST_INFLATION = 20
# 2 GiB of float32: random inputs beyond it come from a broken file, not from a model.
_MOST_ELEMENTS = 1 << 29
_HEADER_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays of an `.npz` file, by name.

    Raises:
        UsageError: no such file, not an `.npz`, cut or damaged, pickled objects inside, a header that claims more than
            the file holds, or arrays of many times its size.
        MissingDependency: the arrays do not fit into memory.
    """
    refuse_wrong_file(path)
    with _as_usage_error(path), open_plain(path) as stream, zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        names = [member.filename.removesuffix(_MEMBER_SUFFIX) for member in members]
        if len(set(names)) != len(names):
            raise ValueError("two arrays have the same name")
        if sum(member.compress_size for member in members) > path.stat().st_size:
            raise ValueError("its directory states more bytes than the file has")
        for member in members:
            _check_member(archive, member)
        _check_total(path, members)
        return {name: _read_member(archive, member) for name, member in zip(names, members, strict=True)}


@contextmanager
def _as_usage_error(path: Path) -> Iterator[None]:
    """Turn any error of a damaged archive into a `UsageError` that names the file."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"Cannot read {path}.", why=error.strerror or str(error)) from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        KeyError,  # zipfile: a member that the directory lists but the file lacks
        MemoryError,
        OverflowError,
        RuntimeError,  # zipfile: an encrypted member, or a feature it lacks
        ValueError,
    ) as error:
        raise UsageError(
            f"{path} is not a readable .npz file.",
            why=(str(error).splitlines() or [type(error).__name__])[0],
            fix="Write it with numpy.savez, or localattn run.",
        ) from error


def _check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Compare the header's size with the bytes in the file, without allocating memory."""
    name = member.filename
    if not name.endswith(_MEMBER_SUFFIX):
        raise ValueError(f"{name!r} is not an array")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name!r} is compressed in a way numpy does not write")
    ratio = 1 if member.compress_type == zipfile.ZIP_STORED else _MAX_DEFLATE_RATIO
    if member.file_size > member.compress_size * ratio:
        raise ValueError(f"{name!r} states {member.file_size} bytes but has {member.compress_size}")
    with archive.open(member) as stream:
        head = io.BytesIO(stream.read(_MAX_HEADER))
    shape, dtype = _read_header(name, head)
    if dtype.kind not in "biufc":
        raise ValueError(f"{name!r} contains {dtype}, not numbers")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name!r} has a negative size: {shape}")
    claimed, there = math.prod(shape) * dtype.itemsize, member.file_size - head.tell()
    if claimed != there:
        raise ValueError(f"{name!r} states {claimed} bytes of numbers but has {there}")


def _check_total(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse arrays that expand to many times the file's size, and those that do not fit into memory."""
    there, claimed = path.stat().st_size, sum(member.file_size for member in members)
    if claimed > max(LARGEST_INFLATED, MOST_INFLATION * there):
        raise ValueError(f"its {there:,} bytes would become {claimed:,}: compressed arrays that large are not read")
    check_fits(str(path), claimed, "Give smaller inputs, or use a machine with more memory.")


def _read_header(name: str, head: io.BytesIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the shape and dtype from the start of an `.npy` member; leaves `head` at the numbers."""
    try:
        version = npy.read_magic(head)
        if version not in _HEADER_READERS:
            raise ValueError(f".npy format {version}, which plain arrays do not need")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's, which parses the header
            shape, _, dtype = _HEADER_READERS[version](head)
    except (MemoryError, RecursionError) as error:  # Python's parser says either
        raise ValueError(f"{name!r} has an invalid array header: it nests too deep") from error
    except (SyntaxError, TypeError, ValueError, tokenize.TokenError) as error:
        raise ValueError(f"{name!r} has an invalid array header: {error}") from error
    return shape, dtype


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as stream:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array: NDArray[Any] = npy.read_array(stream, allow_pickle=False)
        if stream.read(1):  # also makes zipfile compare the checksum
            raise ValueError(f"{member.filename!r} is longer than its header says")
        return array


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], *, overwrite: bool = False) -> None:
    """Write arrays to an `.npz` file, whole or not at all; equal arrays give equal bytes.

    Any name of an array is possible (`numpy.savez` cannot write one called "file").

    Args:
        path: a name that ends in .npz.
        arrays: what to write, by name.
        overwrite: an existing .npz file may be replaced.

    Raises:
        UsageError: the place cannot be written, or an array holds something other than numbers.
    """
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":
            raise UsageError(
                f"Cannot write {name!r} to {path}.", why=f"numpy's file format does not support {array.dtype}."
            )
    with writing(Output(path, NPZ), overwrite=overwrite) as folder:
        staged = folder / path.name
        with zipfile.ZipFile(staged, "w", zipfile.ZIP_STORED) as archive:
            for name, array in arrays.items():
                # A ZipInfo made here carries no time, so that equal arrays give equal bytes.
                member = zipfile.ZipInfo(name + _MEMBER_SUFFIX)
                with archive.open(member, "w", force_zip64=True) as stream:
                    npy.write_array(stream, np.asanyarray(array), allow_pickle=False)
        publish(staged, path)


def random_inputs(
    specs: Sequence[TensorSpec],
    seed: int,
    token_limit: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, NDArray[Any]]:
    """Draw inputs that fit `specs`, the same for the same seed.

    Integers are tokens, uniform in `[0, token_limit)`; floats are standard normal; a bool is a mask,
    about 80 % True, in which no row of the first dimension is wholly False (a vector is one row). A mask of
    integers, by its name, keeps the first tokens of each row and hides the padding after them, as tokenizers make it.
    Positions, by their name, count from 0.

    Args:
        specs: what the model takes.
        seed: seed of numpy's default generator, ≥ 0.
        token_limit: one more than the largest token; needed if an input is an integer.
        sizes: sizes of the dynamic axes, by name.

    Raises:
        MissingDependency: they do not fit into memory together.
        UsageError: a dynamic axis without a size, an array too large, tokens without a limit or with one their type
            cannot hold, a type that is neither, or a negative seed.
    """
    if seed < 0:
        raise UsageError(f"The seed is {seed}.", why="A seed must be 0 or more.")
    generator = np.random.default_rng(seed)
    inputs: dict[str, NDArray[Any]] = {}
    closed = [replace(spec, shape=_closed_shape(spec, sizes or {})) for spec in specs]
    check_drawable(closed)
    for spec in closed:
        shape = tuple(int(size) for size in spec.shape)
        if spec.dtype == "bool":
            inputs[spec.name] = _mask(generator, shape)
        elif spec.dtype in ("float16", "float32", "float64"):
            drawn_in = np.float64 if spec.dtype == "float64" else np.float32
            inputs[spec.name] = np.asarray(generator.standard_normal(shape, drawn_in), dtype=spec.dtype)
        elif spec.name in INTEGER_MASKS and "int" in spec.dtype:
            inputs[spec.name] = padding_mask(generator, shape).astype(spec.dtype)
        elif spec.name == POSITION_IDS and shape and "int" in spec.dtype:
            inputs[spec.name] = np.broadcast_to(np.arange(shape[-1]), shape).astype(spec.dtype)
        elif "int" in spec.dtype:
            inputs[spec.name] = _tokens(generator, spec, shape, token_limit)
        else:
            raise UsageError(
                f"Input {spec.name!r} cannot be drawn at random.",
                why=f"Its type {spec.dtype} is unknown to numpy.",
                fix="Give the inputs in a file.",
            )
    return inputs


def check_drawable(specs: Sequence[TensorSpec]) -> None:
    """Refuse arrays that are too large or impossible, before any is made.

    Args:
        specs: what is to be drawn; every dimension is a number.

    Raises:
        MissingDependency: they do not fit into memory together.
        UsageError: a negative size, or an array larger than any that is drawn at random.
    """
    shapes = [[int(size) for size in spec.shape] for spec in specs]
    sizes = [math.prod(shape) * _item_bytes(spec) for spec, shape in zip(specs, shapes, strict=True)]
    if sizes:
        largest = specs[sizes.index(max(sizes))]
        fix = "Give smaller sizes, or use a machine with more memory."
        check_fits(f"Input {largest.describe()}", sum(sizes), fix)
    for spec, shape in zip(specs, shapes, strict=True):
        if min(shape, default=0) < 0 or math.prod(shape) > _MOST_ELEMENTS:
            raise UsageError(
                f"Input {spec.name!r} cannot be drawn at random.",
                why=f"Its shape is {format_shape(spec.shape)}, and at most {_MOST_ELEMENTS:,} numbers are drawn.",
                fix="If this shape is right, give the inputs in a file.",
            )


def _item_bytes(spec: TensorSpec) -> int:
    """Return the bytes of an element; 0 for a type that numpy lacks, which is refused when it is drawn."""
    try:
        return np.dtype(spec.dtype).itemsize
    except TypeError:
        return 0


def _closed_shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    shape: list[int] = []
    for size in spec.shape:
        if isinstance(size, str):
            if size == UNNAMED_DIMENSION or size not in sizes:
                raise UsageError(
                    f"Input {spec.name!r} cannot be drawn at random.",
                    why=f"Dimension {size!r} of {list(spec.shape)} is dynamic.",
                    fix="Give the inputs in a file.",
                )
            size = sizes[size]
        shape.append(size)
    return tuple(shape)


def _tokens(
    generator: np.random.Generator, spec: TensorSpec, shape: tuple[int, ...], limit: int | None
) -> NDArray[Any]:
    dtype = np.dtype(spec.dtype)
    if limit is None or not 1 <= limit <= int(np.iinfo(dtype).max) + 1:
        raise UsageError(
            f"Tokens for input {spec.name!r} cannot be drawn at random.",
            why="The vocabulary size is unknown."
            if limit is None
            else f"{dtype} cannot hold every token below {limit}.",
            fix="Keep the sidecar in the model's folder, or give the inputs in a file.",
        )
    return generator.integers(0, limit, size=shape, dtype=dtype)


def _mask(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    mask = np.asarray(generator.random(shape) < 0.8)
    if mask.size:
        # Without any kept key, a row's result has no meaning.
        rows = mask.reshape(shape[0] if len(shape) > 1 else 1, -1)
        rows[~rows.any(axis=1), 0] = True
        mask = rows.reshape(shape)
    return mask


def padding_mask(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Draw a mask that keeps the first tokens of each row, at least one."""
    length = shape[-1] if shape else 1
    kept = generator.integers(min(1, length), length + 1, (*shape[:-1], 1))
    return np.broadcast_to(np.arange(length) < kept, shape)
