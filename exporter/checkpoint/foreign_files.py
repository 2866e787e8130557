"""Recognize files that are not checkpoints, and say how to get a checkpoint from them.

A file is recognized by its first bytes, a ZIP archive by the names of its members, and otherwise by the
file's own name.
"""

from __future__ import annotations

import shlex
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ...core.error_texts import argument
from ...core.errors import UsageError

_SAVE = "torch.save(model.state_dict(), 'weights.pt')"
_OTHER_LIBRARY = f"Load it with {{library}} into the PyTorch model, then: {_SAVE}"
NOT_A_CHECKPOINT = "A checkpoint is a torch file (.pt, .pth, .ckpt, .bin) or a .safetensors file."


@dataclass(frozen=True)
class Foreign:
    """A kind of file that is not a PyTorch checkpoint.

    Args:
        what: its description, to follow "is".
        fix: how to get a checkpoint; `{path}` is the file.
        start: tells it from the first bytes.
        suffixes: tell it from the name.
        why: why it is not read.
    """

    what: str
    fix: str
    start: Callable[[bytes], bool] = lambda start: False
    suffixes: tuple[str, ...] = ()
    why: str = NOT_A_CHECKPOINT


def _magic(*starts: bytes) -> Callable[[bytes], bool]:
    return lambda start: start.startswith(starts)


_UNPACK = "Unpack it, and give the file of weights inside."
_KINDS = (
    Foreign(
        "a GGUF file of llama.cpp",
        "Export the model from which it was converted: its Hugging Face folder or its checkpoint.",
        _magic(b"GGUF", b"ggml", b"tjgg"),
        (".gguf", ".ggml"),
        "Its weights are quantised and renamed for llama.cpp.",
    ),
    Foreign(
        "an HDF5 file, as Keras writes them",
        _OTHER_LIBRARY.format(library="Keras or h5py"),
        _magic(b"\x89HDF\r\n\x1a\n"),
        (".h5", ".hdf5"),
    ),
    Foreign(
        "a NumPy array",
        "Save the arrays as tensors with their names: torch.save({name: torch.from_numpy(array)}, 'weights.pt')",
        _magic(b"\x93NUMPY"),
        (".npy",),
    ),
    Foreign("a TensorFlow Lite file", _OTHER_LIBRARY.format(library="TensorFlow"), lambda start: start[4:8] == b"TFL3"),
    Foreign("compressed (bzip2)", _UNPACK, _magic(b"BZh"), (".bz2",), "Compressed files are not read."),
    Foreign("compressed (xz)", _UNPACK, _magic(b"\xfd7zXZ\0"), (".xz",), "Compressed files are not read."),
    Foreign("compressed (zstd)", _UNPACK, _magic(b"\x28\xb5\x2f\xfd"), (".zst",), "Compressed files are not read."),
    Foreign("a 7-Zip archive", _UNPACK, _magic(b"7z\xbc\xaf\x27\x1c"), (".7z",), "Compressed files are not read."),
    Foreign("a RAR archive", _UNPACK, _magic(b"Rar!"), (".rar",), "Compressed files are not read."),
    Foreign(
        "a web page",
        "Download the file itself: the address led to a web page about the file, or to a login page.",
        lambda start: start.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")),
    ),
    Foreign("a library or program", "Check the path.", _magic(b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe")),
    Foreign(
        "an ONNX file",
        "It is already exported: `localattn run` runs it, `localattn convert` rewrites it. An export needs the "
        "checkpoint.",
        lambda start: (
            len(start) > 2 and start[0] == 0x08 and start[1] < 0x40 and start[2] in b"\x12\x1a\x22\x28\x3a\x42"
        ),
        (".onnx",),
    ),
    Foreign(
        "a file of Flax (MessagePack)",
        _OTHER_LIBRARY.format(library="flax.serialization"),
        suffixes=(".msgpack",),
    ),
    Foreign(
        "a part of a TensorFlow checkpoint",
        _OTHER_LIBRARY.format(library="TensorFlow"),
        suffixes=(".index", ".ckpt.meta", ".data-00000-of-00001", ".pb"),
    ),
    Foreign("an engine", "Give the checkpoint from which its ONNX file was exported.", suffixes=(".engine", ".plan")),
    Foreign("a JAX or Orbax file", _OTHER_LIBRARY.format(library="JAX"), suffixes=(".orbax",)),
    Foreign(
        "a model of Core ML", "Give the checkpoint from which it was converted.", suffixes=(".mlmodel", ".mlpackage")
    ),
    Foreign(
        "an index of weight files, not the weights",
        "Give its folder, with all the files that the index names.",
        suffixes=(".index.json",),
    ),
    Foreign(
        "a text of JSON, not weights",
        f"Give the file of weights; use {argument('config')} for a configuration.",
        lambda start: start.lstrip()[:1] in (b"{", b"["),
        (".json",),
    ),
    Foreign("a text of YAML or TOML, not weights", "Give the file of weights.", suffixes=(".yaml", ".yml", ".toml")),
)
_MEMBERS: tuple[tuple[str, Callable[[Collection[str]], bool], str], ...] = (
    (
        "a program of torch.export (.pt2)",
        lambda names: (
            any(
                name.endswith(("archive_format", "serialized_exported_program.json", "archive_version"))
                for name in names
            )
            or any("/models/" in name and name.endswith(".json") for name in names)
        ),
        "In Python: program = torch.export.load({path}); torch.save(dict(program.state_dict), 'weights.pt')",
    ),
    (
        "a TorchScript program",
        lambda names: any(name.endswith("constants.pkl") or "/code/" in name for name in names),
        "In Python: torch.save(torch.jit.load({path}, map_location='cpu').state_dict(), 'weights.pt')",
    ),
    (
        "an .npz file of NumPy arrays",
        lambda names: bool(names) and all(name.endswith(".npy") for name in names),
        "In Python: torch.save({{name: torch.from_numpy(x) for name, x in numpy.load({path}).items()}}, 'weights.pt')",
    ),
    (
        "a model of Keras",
        lambda names: "model.weights.h5" in names or ("metadata.json" in names and "config.json" in names),
        _OTHER_LIBRARY.format(library="Keras"),
    ),
    (
        "an archive of MLflow or TorchServe",
        lambda names: "MAR-INF/MANIFEST.json" in names or "MLmodel" in names,
        _UNPACK,
    ),
)


def refuse_foreign(path: Path, start: bytes) -> None:
    """Refuse a file that is one of the kinds above.

    Args:
        path: the file.
        start: its first bytes, a few hundred of them.

    Raises:
        UsageError: it is one of them.
    """
    name = path.name.lower()
    if start[:1] == b"\x80" and len(start) > 1 and 2 <= start[1] <= 5:  # a pickle with any name
        return
    by_start = next((kind for kind in _KINDS if kind.start(start)), None)
    kind = by_start or next((kind for kind in _KINDS if kind.suffixes and name.endswith(kind.suffixes)), None)
    index = next(kind for kind in _KINDS if kind.suffixes == (".index.json",))
    if name.endswith(".index.json") and kind is not None:
        kind = index
    if kind is not None:
        raise UsageError(f"{path} is {kind.what}.", why=kind.why, fix=kind.fix)


def archive_error(path: Path, archive: zipfile.ZipFile) -> UsageError | None:
    """Return the error for a ZIP archive that `torch.save` did not write, by its members; None otherwise."""
    names = archive.namelist()
    quoted = repr(str(path))
    for what, matches, fix in _MEMBERS:
        if matches(names):
            fix = fix.replace("{{", "{").replace("}}", "}").replace("{path}", quoted)
            return UsageError(
                f"{path} is {what}, not a state dict.", why="torch.save does not write such files.", fix=fix
            )
    if any(name.endswith("data.pkl") for name in names):
        return None
    weights = [name for name in names if name.lower().endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors"))]
    if weights:
        return UsageError(
            f"{path} is a ZIP archive that contains a checkpoint.",
            why=f"It contains {', '.join(weights[:3])}.",
            fix=f"Unpack it: unzip {shlex.quote(str(path))}, and give {weights[0]}.",
        )
    return UsageError(
        f"{path} is a zip file without tensors.",
        why=f"It contains {', '.join(names[:3]) or 'nothing'}; a checkpoint is written by torch.save or safetensors.",
        fix="Check the path.",
    )
