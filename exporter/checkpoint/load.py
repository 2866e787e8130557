"""Reading a checkpoint's tensors, and nothing else, out of any file people save them in.

What a file is, its bytes decide, not its name. Pickled objects are never built: `torch.load` runs with
`weights_only=True` and there is no way to turn that off. What was chosen, dropped or converted on the
way to the plain state dict is listed in `notes`.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...core.errors import MissingDependency, UsageError
from ...core.storage.file_kinds import configs_beside
from ...core.storage.files import sha256
from ...core.storage.reading import check_plain, open_plain
from .unwrap import plain_state

if TYPE_CHECKING:
    import torch

# The safetensors header is JSON behind its length in 8 bytes.
_SAFETENSORS_START = 8
_NOT_A_CHECKPOINT = "A checkpoint is a torch file (.pt, .pth, .bin) or a .safetensors file."
_SAVE_STATE_DICT = "Where the model was made, run: torch.save(model.state_dict(), 'weights.pt')"

# How torch says that a file wants something built that is no tensor.
_OBJECT = re.compile(r"[Uu]nsupported (?:global: )?(?:GLOBAL|class) (\S+)|TorchScript")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The tensors of a checkpoint.

    Args:
        state: every tensor by name, on the CPU, floating point ones in float32.
        sha256: of the file.
        path: of the file.
        notes: what was chosen, dropped, converted or looks wrong, one line each.
    """

    state: dict[str, torch.Tensor]
    sha256: str
    path: Path
    notes: list[str]


def load_state(path: Path, key: str | None = None, roots: Collection[str] | None = None) -> LoadedCheckpoint:
    """Read the state dict of a checkpoint.

    Args:
        path: a file of `torch.save` (zip or legacy) or of safetensors.
        key: the entry (`ema`, `model.state_dict`) or name prefix (`encoder.`) that holds the weights;
            by default it is found in the order that `unwrap` states.
        roots: first parts of the model's own names, where it is none of the supported classes.

    Raises:
        UsageError: no such file, a folder, an empty, cut or foreign file, pickled objects, no tensors,
            or an unknown `key`.
        MissingDependency: torch or safetensors is not installed.
    """
    kind = _sniffed(path)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "Reading a checkpoint needs torch.",
            why="The base install only runs exported models.",
            fix="pip install 'localattn[cpu]'",
        ) from error
    notes: list[str] = []
    if (kind == "safetensors") != (path.suffix.lower() == ".safetensors"):
        notes.append(f"{path.name} is a {kind} file, whatever its name says")
    loaded = _read_safetensors(path) if kind == "safetensors" else _read_torch(path, kind == "torch zip")
    state = plain_state(loaded, key, path, notes, *([] if roots is None else [roots]))
    file_size = path.stat().st_size
    converted = {name: _plain_tensor(name, tensor, file_size) for name, tensor in state.items()}
    notes += _conversions(state) + _non_finite(converted)
    return LoadedCheckpoint(converted, sha256(path), path, notes)


def find_config(path: Path, explicit: Path | None = None) -> Path | None:
    """The config of a checkpoint: the explicit one, else one beside it.

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
    """What a file is, by its first bytes.

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
        reason = error.strerror or str(error)
        raise UsageError(f"Cannot read {path}.", why=f"{reason}.", fix="Check the path.") from error
    if not start:
        raise UsageError(f"{path} is empty.", why="It holds no bytes.", fix="Copy or save it again.")
    if start.startswith(b"PK"):
        return "torch zip"
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


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependency("This checkpoint needs safetensors.", fix="pip install safetensors") from error
    try:
        with safe_open(str(path), framework="pt", device="cpu") as stream:
            return {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise _damaged(path, error) from error


def _read_torch(path: Path, is_zip: bool) -> object:
    """What a torch file holds: tensors, numbers, text, and lists and tables of them."""
    import torch

    if is_zip:
        _check_zip(path)
    # torch.load believes a path's suffix; behind a stream it looks at the bytes, but cannot map them.
    by_path = is_zip and path.suffix.lower() != ".safetensors"
    try:
        with path.open("rb") as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it warns of, it then refuses
            return torch.load(path if by_path else stream, map_location="cpu", weights_only=True, mmap=by_path)
    # A file decides what the unpickler does, so it can fail in any way.
    except Exception as error:
        found = _OBJECT.search(str(error))
        if found is None:
            raise _damaged(path, error) from error
        raise UsageError(
            f"{path} holds Python objects ({found[1] or 'a TorchScript program'}), not only tensors.",
            why="Opening them would run code from the file; this package never does.",
            fix=_SAVE_STATE_DICT,
        ) from error


def _check_zip(path: Path) -> None:
    """Refuse a zip that torch did not write: cut, another archive, or compressed (it may be a bomb)."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise _damaged(path, error) from error
    if not any(member.filename.endswith("data.pkl") for member in members):
        raise UsageError(f"{path} is a zip file without tensors.", why=_NOT_A_CHECKPOINT)
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise UsageError(f"{path} is a compressed zip.", why="torch.save never compresses.", fix=_SAVE_STATE_DICT)


def _damaged(path: Path, error: Exception) -> UsageError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # torch's own advice is to load the file unsafely.
    reason = "Its pickled data is not a state dict's." if "weights_only" in lines[0] else lines[0][:200]
    return UsageError(
        f"{path} is damaged or not a checkpoint.",
        why=reason,
        fix="Copy or save it again; compare its size with the original's.",
    )


def _plain_tensor(name: str, tensor: torch.Tensor, file_size: int) -> torch.Tensor:
    """A dense CPU tensor without history, floating point in float32.

    Raises:
        UsageError: a tensor without data (meta), sparse or quantized, or that claims more data than the
            whole file holds (a broadcast view: copying it could take any amount of memory).
    """
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        kind = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device}"
        raise UsageError(f"{name} is not a dense tensor.", why=f"It is {kind}.", fix=_SAVE_STATE_DICT)
    if tensor.numel() * tensor.element_size() > file_size:
        raise UsageError(
            f"{name} claims the shape {list(tensor.shape)}.",
            why="That is more data than the whole file holds.",
            fix=_SAVE_STATE_DICT,
        )
    tensor = tensor.detach()
    return (tensor.to(torch.float32) if tensor.is_floating_point() else tensor).contiguous()


def _conversions(state: Mapping[str, torch.Tensor]) -> list[str]:
    """One note for every floating point type that became float32."""
    counts: dict[str, int] = {}
    for tensor in state.values():
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_floating_point() and kind != "float32":
            counts[kind] = counts.get(kind, 0) + 1
    return [f"{count} tensors converted from {kind} to float32" for kind, count in sorted(counts.items())]


def _non_finite(state: Mapping[str, Any]) -> list[str]:
    """A note if weights are NaN or infinite: the export goes on, but its numbers mean nothing."""
    bad = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if not bad:
        return []
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return [f"NaN or infinite values in {', '.join(bad[:3])}{more}"]
