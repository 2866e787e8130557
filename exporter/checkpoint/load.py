"""Read only the tensors of a checkpoint, from any supported kind of file.

A file's kind is found from its bytes, not its name. Pickled objects are never built: `torch.load` runs with
`weights_only=True` and there is no way to turn that off. `notes` lists what was chosen, dropped or converted to get
the plain state dict.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import warnings
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from ...core.error_texts import argument, first_line
from ...core.errors import MissingDependency, UsageError
from ...core.storage.file_kinds import CONFIG_SUFFIXES, default_configs
from ...core.storage.files import sha256
from ...core.storage.nesting import check_nesting
from ...core.storage.reading import check_plain, open_plain
from ...core.storage.unchanged import Unchanged, unchanged
from ...core.storage.wrong_file import check_exists, refuse_wrong_file
from .documents import read_json
from .folders import is_index, read_folder, refuse_shard
from .foreign_files import NOT_A_CHECKPOINT, archive_error, refuse_foreign
from .pickled_objects import object_error
from .settings import ENTRIES as SETTINGS
from .sharded_training import NEEDS_DTENSOR, gathered, know_dtensors, quiet_meshes, refuse_parts
from .tensors import SAVE_STATE_DICT, conversions, foreign_numbers, not_finite, plain_tensor, refuse_quantized
from .unwrap import unwrap
from .weight_sets import told

_log = logging.getLogger(__name__)

# A safetensors file begins with the header's length in 8 bytes, then the header as JSON.
_SAFETENSORS_START = 8
# The safetensors element types that are real numbers of 8 bits or more, without scales of other formats (E8M0).
_REAL = re.compile(r"F64|F32|F16|BF16|F8_E[45]M[23](?:FNUZ)?|BOOL|[IU](?:8|16|32|64)")
_LONGEST_SETTINGS = 256 << 10
_ENOUGH = 512  # first bytes that show the kind of a file
_BLOCK = 1 << 20

# Part of torch's message for a file with an object that is not a tensor.
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
        entry: the entry of the file that was read; "" for the file itself.
        warnings: choices between several sets of weights that nobody made, one line each.
        others: every other set of weights in the file, as `inspect` lists them.
        tied: names that the file leaves out because they share the tensor of another name, each with that name.
        files: the files as they were when they were read; None for a live model.
    """

    state: dict[str, torch.Tensor]
    sha256: str
    path: Path
    notes: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    entry: str = ""
    warnings: list[str] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    files: Unchanged | None = None


def load_state(
    path: Path, roots: Collection[str] | None = None, entry: str | None = None, empty: Collection[str] = ()
) -> LoadedCheckpoint:
    """Read the state dict of a checkpoint, from the first entry with weights in the order of `unwrap`.

    Args:
        path: a file of `torch.save` (zip or legacy) or of safetensors; or a folder, or an index, of several of them.
        roots: first parts of the model's own tensor names, if its class is not a supported one.
        entry: the set of weights to read, where the file holds several; None chooses.
        empty: names of tensors that have no elements in the model either.

    Raises:
        UsageError: no such file or entry, a folder of another kind, an empty, cut or foreign file, pickled objects, or
            no tensors.
        MissingDependency: safetensors is not installed.
    """
    check_exists(path)
    if path.is_dir() or is_index(path):
        with unchanged() as files:
            contents = read_folder(path, _read_file, files)
            digest = hashlib.sha256("".join(sha256(file) for file in contents.files).encode()).hexdigest()
            size = sum(file.stat().st_size for file in contents.files)
            read = read_state(contents.loaded, path, contents.notes, roots, entry, empty, contents.tied, digest, size)
        return replace(read, files=files)
    refuse_shard(path)
    with unchanged([path]) as files:
        notes: list[str] = []
        loaded, tied = _read_file(path, notes)
        return replace(read_state(loaded, path, notes, roots, entry, empty, tied), files=files)


def read_state(
    loaded: object,
    path: Path,
    notes: list[str],
    roots: Collection[str] | None = None,
    entry: str | None = None,
    empty: Collection[str] = (),
    tied: Mapping[str, str] = MappingProxyType({}),
    digest: str | None = None,
    size: int | None = None,
) -> LoadedCheckpoint:
    """Find the state dict in a checkpoint's contents, and convert its tensors to plain ones.

    Args:
        loaded: the contents.
        path: the checkpoint.
        notes: notes on how it was read.
        roots: as of `load_state`.
        entry: as of `load_state`.
        empty: as of `load_state`.
        tied: names that were left out because they share the tensor of another name, each with that name.
        digest: its SHA-256; by default the file's.
        size: bytes of its files; by default the file's.

    Raises:
        UsageError: there are no tensors, or some are not plain or are only one device's part.
    """
    found = unwrap(loaded, path, notes, roots, entry)
    state = found.state
    further, warnings = told(found.others, path, found.entry, asked=entry is not None)
    notes += further
    refuse_parts(state, path, loaded, empty)
    refuse_quantized(state, path)
    file_size = path.stat().st_size if size is None else size
    converted = {name: plain_tensor(name, tensor, file_size) for name, tensor in state.items()}
    notes += conversions(state)
    spoilt = not_finite(converted.items())
    if spoilt:
        notes.insert(0, f"weights are NaN or infinite: {spoilt}")
    _log.info("%s: %d tensors", path, len(converted))
    others = [
        {
            "entry": other.entry,
            "tensors": len(other.state),
            "parameters": sum(tensor.numel() for tensor in other.state.values()),
            "same_model": other.same_model,
            "equal": other.equal,
        }
        for other in found.others
    ]
    digest = sha256(path) if digest is None else digest
    return LoadedCheckpoint(
        converted, digest, path, notes, found.settings, found.entry, warnings, others, _own_names(tied, state)
    )


def with_tied(loaded: LoadedCheckpoint) -> LoadedCheckpoint:
    """Return a checkpoint with the tensors that it omits as duplicates, according to its metadata."""
    named = {name: other for name, other in loaded.tied.items() if other in loaded.state and name not in loaded.state}
    if not named:
        return loaded
    pairs = ", ".join(f"{name} is {other}" for name, other in [*named.items()][:3])
    state = loaded.state | {name: loaded.state[other] for name, other in named.items()}
    return replace(loaded, state=state, notes=[*loaded.notes, f"shared tensors are in the file once: {pairs}"])


def _own_names(tied: Mapping[str, str], state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the omitted names without the prefixes that were removed from the others."""
    own = {}
    for name, other in tied.items():
        starts = [0, *(place + 1 for place, letter in enumerate(other) if letter == ".")]
        start = next((at for at in starts if other[at:] in state and name[:at] == other[:at]), None)
        if start is not None:
            own[name[start:]] = other[start:]
    return own


def _read_file(path: Path, notes: list[str]) -> tuple[object, dict[str, str]]:
    """Read one file, and return its contents and the names that share a tensor with another name.

    Raises:
        UsageError: it is not a checkpoint, or cannot be read.
    """
    kind = _sniffed(path)
    if (kind == "safetensors") != (path.suffix.lower() == ".safetensors"):
        notes.append(f"{path.name} is a {kind} file, despite its name")
    if kind == "safetensors":
        return _read_safetensors(path)
    return _read_torch(path, kind == "torch zip", notes), {}


def find_config(path: Path, explicit: Path | None = None) -> Path | None:
    """Find the configuration of a checkpoint: the explicit one, or else one in its folder.

    Beside it means `<same stem>` then `config`, each as .json, .toml, .yaml or .yml, in this order; of a folder,
    config and model inside it come first.

    Raises:
        UsageError: the explicit config does not exist.
    """
    if explicit is not None:
        check_plain(explicit)
        if not explicit.is_file():
            raise UsageError(f"There is no configuration at {explicit}.", fix="Check the path.")
        return explicit
    inside = [path / f"{stem}{suffix}" for stem in ("config", "model") for suffix in CONFIG_SUFFIXES]
    stem = path.with_name(path.name.partition(".")[0]) if is_index(path) else path
    candidates = [*(inside if path.is_dir() else ()), *default_configs(stem)]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _sniffed(path: Path) -> Literal["safetensors", "torch zip", "legacy torch"]:
    """Find the kind of a file from its first bytes.

    Raises:
        UsageError: it cannot be read, or is of another kind.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", why=NOT_A_CHECKPOINT, fix="Give the file in it.")
    try:
        with open_plain(path) as stream:
            start = stream.read(_ENOUGH)
        size = path.stat().st_size
    except OSError as error:
        raise UsageError(f"Cannot read {path}.", why=f"{error.strerror or error}.", fix="Check the path.") from error
    if not start:
        raise UsageError(f"{path} is empty.", why="It has no bytes.", fix="Copy or save it again.")
    if start.startswith(b"PK"):
        return "torch zip"
    refuse_wrong_file(path)
    refuse_foreign(path, start)
    header = int.from_bytes(start[:_SAFETENSORS_START], "little")
    has_header = start[_SAFETENSORS_START : _SAFETENSORS_START + 1] == b"{" and header <= size - _SAFETENSORS_START
    if has_header or (path.suffix.lower() == ".safetensors" and not start.startswith(b"\x80\x02\x8a")):
        return "safetensors"
    if start.startswith(b"\x80"):  # every pickle since protocol 2
        return "legacy torch"
    fix = "Check the path."
    if path.suffix == ".py":
        fix = f"Name the function in it that makes your module: {argument('factory', f'{path}:FUNCTION')}."
    raise UsageError(f"{path} is not a checkpoint.", why=NOT_A_CHECKPOINT, fix=fix)


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the tensors by name, the settings in the metadata, and the names that `save_model` omitted."""
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
            metadata, held = stream.metadata() or {}, set(names)
            tied = {name: other for name, other in metadata.items() if other in held and name not in held}
            return _settings_of(metadata) | {name: stream.get_tensor(name) for name in names}, tied
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
    """Read the contents of a torch file: tensors, numbers, text, and lists and tables of them."""
    if is_zip:
        _check_zip(path, notes)
    # torch.load trusts a path's suffix; for a stream it checks the bytes, but cannot map them.
    by_path = is_zip and path.suffix.lower() != ".safetensors"

    def load() -> object:
        with path.open("rb") as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it warns about, it then refuses
            # A Namespace is built from plain data without running any of it; only its attributes are read.
            with torch.serialization.safe_globals([argparse.Namespace]):
                return torch.load(path if by_path else stream, map_location="cpu", weights_only=True, mmap=by_path)

    # The file controls the unpickler, which can therefore fail in any way.
    with quiet_meshes():
        try:
            return gathered(load(), path)
        except UsageError:
            raise
        except Exception as error:
            if NEEDS_DTENSOR not in str(error):
                raise _not_read(path, error) from error
        know_dtensors()
        try:
            loaded = load()
        except Exception as error:
            raise _not_read(path, error) from error
        return gathered(loaded, path)


def _not_read(path: Path, error: Exception) -> UsageError:
    """Return the error for a file that `torch.load` refuses to read as plain data."""
    found = _OBJECT.search(str(error))
    return _damaged(path, error) if found is None else object_error(path, found[1] or "")


def _check_zip(path: Path, notes: list[str]) -> None:
    """Refuse a zip that was altered or not written by torch (cut, another archive, or compressed: maybe a zip bomb).

    `torch.load` compares no checksums, so a flipped bit would change a weight unnoticed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            foreign = archive_error(path, archive)
            if foreign is not None:
                raise foreign
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise UsageError(
                    f"{path} is a compressed zip.", why="torch.save never compresses.", fix=SAVE_STATE_DICT
                )
            if sum(member.file_size for member in members) > path.stat().st_size:
                raise zipfile.BadZipFile("Its parts are larger than the file.")
            if not any(member.CRC for member in members):
                notes.append("the file was saved without checksums, so damage cannot be detected")
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
    reason = "Its pickled data is not that of a state dict." if "weights_only" in line else line[:200]
    return UsageError(
        f"{path} is damaged or not a checkpoint.",
        why=reason,
        fix="Copy or save it again; compare its size with the original's.",
    )
