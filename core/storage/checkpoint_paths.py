"""Refuse a checkpoint that is not there, before anything heavy is imported to read it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from ..errors import UsageError

# As the Hub writes a model's name: owner/model.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".onnx", ".npz")


def check_exists(path: Path) -> None:
    """Refuse a path with no file or folder, and a name of the Hugging Face Hub; what is wrong with a file is left.

    Raises:
        UsageError: there is nothing of this name.
    """
    name = path.as_posix()
    if _HUB_NAME.fullmatch(name) and path.suffix.lower() not in _WEIGHTS and not path.parent.exists():
        raise UsageError(
            f"There is no folder {name}.",
            why="Nothing is downloaded; a model of the Hugging Face Hub is exported from a folder.",
            fix=f"hf download {name} --local-dir {path.name}, then export {path.name}.",
        )
    try:
        path.stat()
    except FileNotFoundError as error:
        raise UsageError(f"Cannot read {path}.", why=f"{os.strerror(errno.ENOENT)}.", fix="Check the path.") from error
    except (OSError, ValueError):  # opening it says why
        return
