"""Files that belong together (a model, its weights, its facts) change as one, whenever the process ends.

A rename is one step, several are not. So finished files are gathered in a folder, and one rename of that folder to a
name readers know is the moment of change; then its files move to their places. If the process is killed in between,
whoever reads or writes there next moves the rest. The facts of a file also carry a seal, their own SHA-256, and the
SHA-256 of the file: `check_unchanged` notices that either was altered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import CheckFailed, UsageError
from .files import flush, sha256

# Finished files on their way to their places: a folder of this name and the main file's.
_PREFIX = ".localattn.next."
# The entry of a file of facts that holds the SHA-256 of all others.
SEAL = "facts_sha256"
# The entries that hold the SHA-256 of the file they describe, each with what helps where it differs.
_DIGESTS = {
    "model_sha256": "Copy them again together, or make them again; to use the file as it is, remove {}.",
    "engine_sha256": "Copy engine and {} together, or build the engine again: localattn build.",
}
# External data written here carries the first hex digits of its SHA-256 in its name.
_DATA_NAME = re.compile(r".*\.([0-9a-f]{12})\.data", re.DOTALL)
# A file of facts is a few kilobytes; a larger file beside a model is something else.
MAX_BYTES = 16 << 20


def sidecar_path(model: Path) -> Path:
    """Where the facts of a file lie: `model.onnx` → `model.onnx.json`."""
    return model.with_name(model.name + ".json")


def publish_together(staged: Mapping[Path, Path], folder: Path) -> None:
    """Move finished files to their places, which change at one moment.

    Args:
        staged: each finished file and its place; all places lie in one folder, and the last is the main file's.
        folder: a staging folder (`core.files.staging`) on the same disk.

    Raises:
        UsageError: one of the places is a folder, or cannot be written.
    """
    main = list(staged.values())[-1]
    for place in staged.values():
        if place.is_dir():
            raise UsageError(f"Cannot write {place}.", why="It is a folder.", fix="Remove it, or choose another name.")
    gathered = folder / "gathered"
    gathered.mkdir()
    for file, place in staged.items():
        flush(file)
        file.replace(gathered / place.name)
    flush(gathered)
    batch = main.parent / f"{_PREFIX}{main.name}"
    finish_interrupted(main)
    try:
        try:
            gathered.rename(batch)  # the moment
        except OSError:  # another process has just published the same name
            finish_interrupted(main)
            gathered.rename(batch)
        _move(batch)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"Cannot write {main}.", why=why, fix="Check who else writes there.") from error


def finish_interrupted(path: Path) -> None:
    """Move what a killed process had published beside `path` and not yet moved; cheap where there is nothing."""
    with contextlib.suppress(OSError):  # a place that only others may write stays as it is
        for batch in sorted(path.parent.glob(f"{_PREFIX}*")):
            _move(batch)


def _move(batch: Path) -> None:
    # Data first and facts last, for readers that know nothing of this: no model is ever without its weights.
    rank = {".data": 0, ".onnx": 1, ".json": 3}
    for file in sorted(batch.iterdir(), key=lambda file: (rank.get(file.suffix, 2), file.name)):
        with contextlib.suppress(FileNotFoundError):  # another process moves them too
            file.replace(batch.parent / file.name)
    with contextlib.suppress(OSError):
        batch.rmdir()


def sealed(text: str) -> str:
    """Facts in JSON, with the SHA-256 of all their entries as one more.

    Raises:
        ValueError: the text is not one JSON object.
    """
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError("facts are a table")
    document[SEAL] = _seal(document)
    return json.dumps(document, indent=2) + "\n"


def _seal(document: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in document.items() if name != SEAL}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def check_seal(path: Path, text: bytes) -> None:
    """Facts that carry a seal must agree with it.

    Raises:
        CheckFailed: they do not.
    """
    try:
        document = json.loads(text)
        stated = document.get(SEAL) if isinstance(document, dict) else None
        intact = stated is None or stated == _seal(document)
    except (ValueError, RecursionError):  # JSON that another reader understood, and that was not written here
        intact = False
    if not intact:
        raise CheckFailed(
            f"{path} was altered.",
            why=f"Its entries do not give its {SEAL}.",
            fix="Copy it again together with its model, or make both again.",
        )


def check_unchanged(model: Path, digest: Callable[[], str] | None = None) -> None:
    """An ONNX file and its external data, or an engine, must be what the facts beside it were written for.

    Facts that are missing, broken, or say nothing of this are not this function's to judge.

    Args:
        model: the file.
        digest: gives its SHA-256, where it was read already.

    Raises:
        CheckFailed: the SHA-256 of the file or of its data differs.
    """
    finish_interrupted(model)
    try:
        with sidecar_path(model).open("rb") as stream:
            document = json.loads(stream.read(MAX_BYTES))
        for entry, fix in _DIGESTS.items():
            stated = document.get(entry)
            if isinstance(stated, str) and stated and stated != (digest or (lambda: sha256(model)))():
                raise _changed(model, model.name, fix)
        data = document.get("external_data")
        named = _DATA_NAME.fullmatch(data) if isinstance(data, str) and Path(data).name == data else None
        if named is not None and not sha256(model.with_name(named[0])).startswith(named[1]):
            raise _changed(model, named[0], _DIGESTS["model_sha256"])
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return


def _changed(model: Path, name: str, fix: str) -> CheckFailed:
    return CheckFailed(
        f"{name} is not the file that {sidecar_path(model).name} was written for.",
        why="Its SHA-256 differs: one of the two was altered, or replaced alone.",
        fix=fix.format(sidecar_path(model)),
    )
