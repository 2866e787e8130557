"""`.npz` files: what is written comes back, and a hostile file costs one line and no memory."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localattn.core.errors import UsageError
from localattn.core.tensors import TensorSpec
from localattn.runtime.inputs.arrays import load_arrays, random_inputs, save_arrays

ARRAYS = {
    "tokens": np.arange(6).reshape(2, 3),
    "mask": np.array([[True, False]]),
    "file": np.float16([1.5, np.nan]),
    "/layers.0/x": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "scalar": np.array(3.0),
    "none": np.zeros((0, 4), np.float32),
}


def npy(array, **changes) -> bytes:
    """One `.npy` member, with the header's claims changed."""
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape, **changes}
    text = repr(header).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + array.tobytes()


def npz(path, compression=zipfile.ZIP_STORED, **members: bytes):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def test_arrays_come_back_as_they_were(tmp_path):
    path = tmp_path / "out.npz"
    save_arrays(path, ARRAYS)
    for loaded in (load_arrays(path), np.load(path)):
        assert list(loaded) == list(ARRAYS)
        for name, array in ARRAYS.items():
            assert loaded[name].dtype == array.dtype and loaded[name].shape == array.shape
            np.testing.assert_array_equal(loaded[name], array)
    assert [file.name for file in tmp_path.iterdir()] == ["out.npz"]


def test_equal_arrays_give_equal_bytes(tmp_path):
    for name in ("a.npz", "b.npz"):
        save_arrays(tmp_path / name, ARRAYS)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_files_of_numpy_are_read_compressed_or_not(tmp_path):
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", zeros=np.zeros((300, 300)), ones=np.ones(3, ">i4"))
        loaded = load_arrays(tmp_path / "x.npz")
        assert loaded["zeros"].shape == (300, 300) and loaded["ones"].sum() == 3


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "out.npz"
    save_arrays(path, {"x": np.ones(2)})
    before = path.read_bytes()
    with pytest.raises(UsageError, match="object"):
        save_arrays(path, {"x": np.ones(2), "y": np.array([{}], dtype=object)}, overwrite=True)
    with pytest.raises(UsageError, match="exists"):
        save_arrays(path, {"x": np.ones(3)})
    with pytest.raises(UsageError):
        save_arrays(path / "out.npz", {"x": np.ones(2)})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def good_zip() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, x=np.arange(100), y=np.ones(100))
    return stream.getvalue()


def hostile_files(folder):
    """Each file that must be refused, and a word of the reason."""
    one = np.ones(4, np.float32)
    whole = good_zip()
    flipped = bytearray(whole)
    flipped[200] ^= 0xFF
    objects = io.BytesIO()
    np.savez(objects, x=np.array([{"a": 1}], dtype=object))
    plain = io.BytesIO()
    np.save(plain, one)
    raw = {
        "empty": (b"", "zip"), "text": (b"no arrays here\n", "zip"), "random": (bytes(range(256)) * 9, "zip"),
        "cut": (whole[: len(whole) // 2], "zip"), "flipped": (bytes(flipped), "CRC"),
        "objects": (objects.getvalue(), "object"), "an npy": (plain.getvalue(), "zip"),
    }  # fmt: skip
    for name, (content, reason) in raw.items():
        (folder / name).write_bytes(content)
        yield folder / name, reason
    members = {
        "huge": (npy(one, shape=(1 << 40,)), "states"),
        "overflow": (npy(one, shape=(1 << 62, 1 << 62)), "states"),
        "short": (npy(one, shape=(3,)), "states"), "negative": (npy(one, shape=(-2, -2)), "negative"),
        "floats": (npy(one, shape=(4.0,)), "shape"), "text type": (npy(one, descr="<U4"), "not numbers"),
        "no type": (npy(one, descr="zz"), "descr"), "no numpy": (b"hello", "magic"),
        "code": (b"\x93NUMPY\x01\x00\x0e\x00__import__(1)\n", "header"), "nothing": (b"", "magic"),
        "open bracket": (b"\x93NUMPY\x01\x00\x05\x00{'''\n", "header"),
        "long header": (b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 30) + b" " * 100, "EOF"),
        "version 3": (b"\x93NUMPY\x03\x00" + struct.pack("<I", 4) + b"{}  ", "format"),
    }  # fmt: skip
    for name, (content, reason) in members.items():
        yield npz(folder / f"{name}.npz", x=content), reason
    path = npz(folder / "not an array.npz", x=npy(one))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("readme.txt", "hello")
    yield path, "not an array"
    yield npz(folder / "lzma.npz", zipfile.ZIP_LZMA, x=npy(one)), "compressed"


def test_hostile_files_are_refused_with_their_reason(tmp_path):
    seen = 0
    for path, reason in hostile_files(tmp_path):
        with pytest.raises(UsageError) as caught:
            load_arrays(path)
        assert path.name in caught.value.what, path
        assert reason in caught.value.why and "\n" not in caught.value.why, (path, caught.value.why)
        seen += 1
    assert seen > 20


def test_two_arrays_of_one_name_are_refused(tmp_path):
    with pytest.warns(UserWarning), zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for _ in range(2):
            archive.writestr("x.npy", npy(np.ones(1)))
    with pytest.raises(UsageError, match="same name"):
        load_arrays(tmp_path / "x.npz")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_sizes_that_the_directory_only_claims_are_not_allocated(tmp_path, compression):
    """The archive's directory and the header agree on 1 GiB that is not there."""
    member = npy(np.ones(4, np.float32), shape=(1 << 28,))
    path = npz(tmp_path / "x.npz", compression, x=member)
    content = bytearray(path.read_bytes())
    directory = content.index(b"PK\x01\x02")
    claimed = (1 << 30) + len(member) - 16
    struct.pack_into("<I", content, directory + 24, claimed)
    variants = [bytes(content)]
    struct.pack_into("<I", content, directory + 20, claimed)  # the compressed size lies too
    variants.append(bytes(content))
    tracemalloc.start()
    for variant in variants:
        path.write_bytes(variant)
        with pytest.raises(UsageError, match="states"):
            load_arrays(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_paths_that_are_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.npz"):
        with pytest.raises(UsageError, match="Cannot read"):
            load_arrays(path)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(good_zip()) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_file_is_read_right_or_refused(tmp_path_factory, damage):
    content = bytearray(good_zip())
    for place, value in damage:
        content[place] = value
    path = tmp_path_factory.mktemp("fuzz") / "x.npz"
    path.write_bytes(content)
    try:
        loaded = load_arrays(path)
    except UsageError:
        return
    for array in loaded.values():
        assert array.size <= 400  # no claim of a header was believed


SPECS = [
    TensorSpec("tokens", "int64", (4, 500)),
    TensorSpec("mask", "bool", (4, 500)),
    TensorSpec("x", "float16", (4, 500)),
    TensorSpec("y", "float64", ("N", 500)),
]


def test_random_inputs_fit_and_repeat():
    drawn = random_inputs(SPECS, 3, token_limit=7, sizes={"N": 4})
    again = random_inputs(SPECS, 3, token_limit=7, sizes={"N": 4})
    other = random_inputs(SPECS, 4, token_limit=7, sizes={"N": 4})
    for spec in SPECS:
        array = drawn[spec.name]
        assert array.dtype.name == spec.dtype and array.shape == (4, 500)
        np.testing.assert_array_equal(array, again[spec.name])
        assert (array != other[spec.name]).any()
    assert set(np.unique(drawn["tokens"])) == set(range(7))
    assert 0.75 < drawn["mask"].mean() < 0.85
    assert abs(drawn["x"].mean()) < 0.1 and 0.9 < drawn["x"].std() < 1.1


@pytest.mark.parametrize("shape", [(2000, 1), (500, 2, 1), (1,), ()])
def test_no_row_of_a_mask_is_wholly_false(shape):
    for seed in range(20):
        mask = random_inputs([TensorSpec("mask", "bool", shape)], seed)["mask"]
        assert mask.shape == shape and mask.dtype == bool
        assert mask.reshape(shape[0] if len(shape) > 1 else 1, -1).any(axis=1).all()


@pytest.mark.parametrize("limit", [None, 0, 129])
def test_tokens_need_a_limit_their_type_can_hold(limit):
    with pytest.raises(UsageError, match="tokens"):
        random_inputs([TensorSpec("tokens", "int8", (3,))], 0, token_limit=limit)
    assert random_inputs([TensorSpec("tokens", "int8", (3,))], 0, token_limit=128)["tokens"].min() >= 0


@pytest.mark.parametrize(
    ("spec", "seed"),
    [
        (TensorSpec("x", "float32", ("N", 2)), 0),
        (TensorSpec("x", "float32", ("?", 2)), 0),
        (TensorSpec("x", "bfloat16", (1, 2)), 0),
        (TensorSpec("x", "float32", (1, 2)), -1),
    ],
)
def test_what_cannot_be_drawn_is_said(spec, seed):
    with pytest.raises(UsageError):
        random_inputs([spec], seed)
