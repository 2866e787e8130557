"""Describe a checkpoint that contains Python objects, and say how to get its tensors."""

from __future__ import annotations

import io
import pickletools
import shlex
import zipfile
from contextlib import suppress
from pathlib import Path

from ...core.errors import UsageError
from .sharded_training import GATHER
from .tensors import SAVE_STATE_DICT

_CODE = (
    "Opening it runs code from the file: whoever wrote the file can do anything that you can on this machine. It is "
    "opened only if you ask for it."
)
_START = 1 << 16  # bytes of a pickle that are examined


def object_error(path: Path, name: str) -> UsageError:
    """Return the error for a file that holds an object of a class.

    Args:
        path: the file.
        name: the class, with its module; "" for a TorchScript program.
    """
    if not name:
        return UsageError(
            f"{path} is a TorchScript program, not a state dict.",
            why="torch.save does not write such files.",
            fix=f"In Python: torch.save(torch.jit.load({str(path)!r}, map_location='cpu').state_dict(), 'weights.pt')",
        )
    if "sharded_tensor" in name or name.endswith(("ShardedTensor", "._flat_param.FlatParameter")):
        return UsageError(
            f"{path} contains the part of one device only: sharded tensors of FSDP ({name}).",
            why="Each device has a file with its parts of the tensors.",
            fix=f"Gather the weights where the model was trained: {GATHER}",
        )
    if name.startswith("torchao."):
        return UsageError(
            f"{path} contains weights that torchao quantised ({name}).",
            why="These are packed numbers and scales, in classes of torchao.",
            fix="Give the weights from before the quantisation; localattn can quantise them: `--weight-dtype int8` "
            "or int4.",
        )
    first = _first_class(path)
    if first is not None and not first.startswith(("collections ", "torch._utils ", "argparse ")):
        module = first.replace(" ", ".")
        return UsageError(
            f"{path} is one pickled Python object ({module}), such as a whole module, not a table of tensors.",
            why=_CODE,
            fix=f"{SAVE_STATE_DICT}. Or, if you trust the file and {module.split('.')[0]} can be imported here: "
            f"localattn export {shlex.quote(str(path))} --allow-pickle --input NAME:DTYPE:[SIZES]",
        )
    return UsageError(
        f"{path} contains Python objects ({name}), not only tensors.",
        why=_CODE,
        fix=f"{SAVE_STATE_DICT}. Or, if you trust the file: localattn export --factory FUNCTION --weights "
        f"{shlex.quote(str(path))} --allow-pickle --input NAME:DTYPE:[SIZES]",
    )


def _first_class(path: Path) -> str | None:
    """Return the class, as "module name", of a file's object; None if it is a table or unknown."""
    with suppress(Exception):  # for any failure, another message is given
        with path.open("rb") as file:
            start = file.read(_START)
        if start.startswith(b"PK"):
            with zipfile.ZipFile(path) as archive:
                member = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                with archive.open(member) as inside:
                    start = inside.read(_START)
            return _of_pickle(io.BytesIO(start))
        stream = io.BytesIO(start)
        for _ in range(3):  # torch's older format: a magic number, its version, and properties of the system come first
            for opcode, _, _ in pickletools.genops(stream):
                if opcode.name == "STOP":
                    break
        return _of_pickle(stream)
    return None


def _of_pickle(stream: io.BytesIO) -> str | None:
    for opcode, value, _ in pickletools.genops(stream):
        if opcode.name == "GLOBAL":
            return str(value)
        # Before the class of a module the older format has the word "module", as a part of a reference to its source.
        if opcode.name not in ("PROTO", "FRAME", "MARK", "BINPUT", "MEMOIZE") and value != "module":
            return None
    return None
