"""Read a checkpoint's tensors, and nothing else, from any kind of file they are saved in.

A file's kind is found from its bytes, not its name. Pickled objects are never built: `torch.load` runs with
`weights_only=True` and there is no way to turn that off. `notes` lists what was chosen, dropped or converted to get
the plain state dict.
"""

from __future__ import annotations

import argparse
import logging
import re
import warnings
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ...core.error_texts import first_line
from ...core.errors import MissingDependency, UsageError
from ...core.storage.file_kinds import configs_beside
from ...core.storage.files import sha256
from ...core.storage.mistaken import refuse_mistaken
from ...core.storage.nesting import check_nesting
from ...core.storage.reading import check_plain, open_plain
from ...core.storage.unchanged import Unchanged, unchanged
from .documents import read_json
from .settings import ENTRIES as SETTINGS
from .tensors import SAVE_STATE_DICT, conversions, foreign_numbers, not_finite, plain_tensor
from .unwrap import unwrap

_log = logging.getLogger(__name__)

# A safetensors file begins with the header's length in 8 bytes, then the header as JSON.
_SAFETENSORS_START = 8
_NOT_A_CHECKPOINT = "A checkpoint is a torch file (.pt, .pth, .bin) or a .safetensors file."
# The safetensors element types that are real numbers of 8 bits or more, without scales of other formats (E8M0).
_REAL = re.compile(r"F64|F32|F16|BF16|F8_E[45]M[23](?:FNUZ)?|BOOL|[IU](?:8|16|32|64)")
_LONGEST_SETTINGS = 256 << 10
_BLOCK = 1 << 20

# In torch's message for a file with an object that is not a tensor.
_OBJECT = re.compile(r"[Uu]nsupported (?:global: )?(?:GLOBAL|class) (\S+)|TorchScript")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The tensors of a checkpoint.

    Args:
        state: every tensor by name, on the CPU, floating point ones in float32.
        sha256: SHA-256 of the file.
        path: path of the file.
        notes: what was chosen, dropped, converted or looks wrong, one line each.
        settings: settings that the training script saved with them, by entry; `settings.read_settings` reads them.
        files: the files as they were when they were read; None for a live model.
    """

    state: dict[str, torch.Tensor]
    sha256: str
    path: Path
    notes: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    files: Unchanged | None = None


def load_state(path: Path, roots: Collection[str] | None = None) -> LoadedCheckpoint:
    """Read the state dict of a checkpoint, from the first entry that holds weights in the order that `unwrap` states.

    Args:
        path: a file of `torch.save` (zip or legacy) or of safetensors.
        roots: first parts of the model's own tensor names, if it is none of the supported classes.

    Raises:
        UsageError: no such file, a folder, an empty, cut or foreign file, pickled objects, or no tensors.
        MissingDependency: safetensors is not installed.
    """
    with unchanged([path]) as files:
        return replace(_load_state(path, roots), files=files)


def _load_state(path: Path, roots: Collection[str] | None) -> LoadedCheckpoint:
    kind = _sniffed(path)
    notes: list[str] = []
    if (kind == "safetensors") != (path.suffix.lower() == ".safetensors"):
        notes.append(f"{path.name} is a {kind} file, whatever its name says")
    loaded = _read_safetensors(path) if kind == "safetensors" else _read_torch(path, kind == "torch zip", notes)
    state, settings = unwrap(loaded, path, notes, roots)
    file_size = path.stat().st_size
    converted = {name: plain_tensor(name, tensor, file_size) for name, tensor in state.items()}
    notes += conversions(state)
    spoilt = not_finite(converted.items())
    if spoilt:
        notes.insert(0, f"weights are NaN or infinite: {spoilt}")
    _log.info("%s: %s with %d tensors", path, kind, len(converted))
    return LoadedCheckpoint(converted, sha256(path), path, notes, settings)


def find_config(path: Path, explicit: Path | None = None) -> Path | None:
    """Find the config of a checkpoint: the explicit one, or else one beside it.

    Beside it means `<same stem>` then `config`, each as .json, .toml, .yaml or .yml, in this order.

    Raises:
        UsageError: the explicit config does not exist.
    """
    if explicit is not None:
        check_plain(explicit)
        if not explicit.is_file():
            raise UsageError(f"There is no config at {explicit}.", fix="Check the path.")
        return explicit
    return next((candidate for candidate in configs_beside(path) if candidate.is_file()), None)


def _sniffed(path: Path) -> Literal["safetensors", "torch zip", "legacy torch"]:
    """Find the kind of a file from its first bytes.

    Raises:
        UsageError: it cannot be read, or is none of these.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", why=_NOT_A_CHECKPOINT, fix="Give the file inside it.")
    try:
        with open_plain(path) as stream:
            start = stream.read(_SAFETENSORS_START + 1)
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"Cannot read {path}.", why=f"{error.strerror or error}.", fix="Check the path.") from error
    if not start:
        raise UsageError(f"{path} is empty.", why="It holds no bytes.", fix="Copy or save it again.")
    if start.startswith(b"PK"):
        return "torch zip"
    refuse_mistaken(path)
    header = int.from_bytes(start[:_SAFETENSORS_START], "little")
    has_header = start[_SAFETENSORS_START:] == b"{" and header <= size - _SAFETENSORS_START
    if has_header or (path.suffix.lower() == ".safetensors" and not start.startswith(b"\x80\x02\x8a")):
        return "safetensors"
    if start.startswith(b"\x80"):  # every pickle since protocol 2
        return "legacy torch"
    raise UsageError(
        f"{path} is not a checkpoint.",
        why=_NOT_A_CHECKPOINT,
        fix="Check the path. Exported files (.onnx, .engine) are something to compare with for localattn parity alone.",
    )


def _read_safetensors(path: Path) -> dict[str, Any]:
    """Read the tensors by name, and the settings among the metadata."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependency("This checkpoint needs safetensors.", fix="pip install safetensors") from error
    try:
        with safe_open(str(path), framework="pt", device="cpu") as stream:
            names = list(stream.keys())
            for name in names:
                dtype = stream.get_slice(name).get_dtype()
                if not _REAL.fullmatch(dtype):
                    raise foreign_numbers(name, dtype)
            return _settings_of(stream.metadata() or {}) | {name: stream.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise _damaged(path, error) from error


def _settings_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of safetensors' metadata, which are all text, that hold settings as JSON."""
    found = {}
    for name in SETTINGS:
        text = metadata.get(name, "")
        with suppress(ValueError, RecursionError):  # the text need not be JSON
            if 0 < len(text) <= _LONGEST_SETTINGS:
                check_nesting(text)
                found[name] = read_json(text)
    return found


def _read_torch(path: Path, is_zip: bool, notes: list[str]) -> object:
    """Read what a torch file holds: tensors, numbers, text, and lists and tables of them."""
    if is_zip:
        _check_zip(path, notes)
    # torch.load trusts a path's suffix; given a stream it looks at the bytes, but cannot map them.
    by_path = is_zip and path.suffix.lower() != ".safetensors"
    try:
        with path.open("rb") as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it warns about, it then refuses
            # A Namespace is built from plain data without running any of it; only its attributes are read.
            with torch.serialization.safe_globals([argparse.Namespace]):
                return torch.load(path if by_path else stream, map_location="cpu", weights_only=True, mmap=by_path)
    # The file controls what the unpickler does, so it can fail in any way.
    except Exception as error:
        found = _OBJECT.search(str(error))
        if found is None:
            raise _damaged(path, error) from error
        raise UsageError(
            f"{path} holds Python objects ({found[1] or 'a TorchScript program'}), not only tensors.",
            why="Opening them would run code from the file; this package never does.",
            fix=SAVE_STATE_DICT,
        ) from error


def _check_zip(path: Path, notes: list[str]) -> None:
    """Refuse a zip that was altered or not written by torch (cut, another archive, or compressed: maybe a zip bomb).

    `torch.load` compares no checksums, so a flipped bit would change a weight unnoticed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if not any(member.filename.endswith("data.pkl") for member in members):
                raise UsageError(f"{path} is a zip file without tensors.", why=_NOT_A_CHECKPOINT)
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise UsageError(
                    f"{path} is a compressed zip.", why="torch.save never compresses.", fix=SAVE_STATE_DICT
                )
            if sum(member.file_size for member in members) > path.stat().st_size:
                raise zipfile.BadZipFile("Its parts are larger than the file.")
            if not any(member.CRC for member in members):
                notes.append("the file was saved without checksums: damage to it cannot be told")
                return
            for member in members:
                with archive.open(member) as stream:
                    while stream.read(_BLOCK):  # the last read compares the checksum
                        pass
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, RuntimeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UsageError:
    line = first_line(error)
    # torch's own advice would be to load the file unsafely.
    reason = "Its pickled data is not a state dict's." if "weights_only" in line else line[:200]
    return UsageError(
        f"{path} is damaged or not a checkpoint.",
        why=reason,
        fix="Copy or save it again; compare its size with the original's.",
    )
