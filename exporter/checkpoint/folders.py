"""Read a folder that a trainer or a library saved: shards with an index, or a training framework's own format.

What torch or safetensors reads without running code is read. For the others one sentence says what the folder is, and
which command of its project makes one file of it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...core.errors import UsageError
from ...core.storage.reading import check_plain, read_plain
from ...core.storage.unchanged import Unchanged
from ..models.inference import bounded
from ..models.registry import detect_folder
from .distcp import METADATA, is_name, read_distcp
from .documents import read_json
from .sharded_training import ZERO

_INDEX = ".index.json"
_LARGEST_INDEX = 64 << 20
_SHARD = re.compile(r"(?P<stem>.+?)[-_.]?(?P<number>\d{1,6})[-_]of[-_](?P<count>\d{1,6})(?P<suffix>\.\w+)")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# Files of a training run that hold no weights, by the first letters of their names.
_OTHERS = (
    "optim",
    "sched",
    "random_states",
    "rng",
    "training_args",
    "scaler",
    "sampler",
    "custom_checkpoint",
    "dl_state",
)
_MEGATRON = (
    "python tools/checkpoint/convert.py --model-type GPT --loader mcore --saver mcore --target-tensor-parallel-size 1 "
    "--target-pipeline-parallel-size 1 --load-dir {folder} --save-dir ONE"
)

ReadFile = Callable[[Path, list[str]], tuple[object, dict[str, str]]]


@dataclass(frozen=True)
class Contents:
    """The contents of a folder.

    Args:
        loaded: the tables of tensors, as one file would hold them.
        files: the files that were read.
        notes: how it was read.
        tied: names that were left out because they share the tensor of another name, each with that name.
    """

    loaded: object
    files: list[Path]
    notes: list[str]
    tied: dict[str, str] = field(default_factory=dict)


def is_index(path: Path) -> bool:
    """Return whether a file says which shard holds which tensor."""
    return path.name.lower().endswith(_INDEX) and path.is_file()


def read_folder(path: Path, read_file: ReadFile, files: Unchanged) -> Contents:
    """Read a folder of weights, or the index of one.

    Args:
        path: the folder or the index.
        read_file: reads one file, as `load._read_file`.
        files: gets every file before it is read.

    Raises:
        UsageError: its kind is not supported, or a part is missing.
    """
    if not path.is_dir():
        return _of_index(path, read_file, files)
    indices = sorted(path.glob(f"*{_INDEX}"), key=lambda index: (".safetensors." not in index.name, index.name))
    if indices:
        return _of_one_index(path, indices, read_file, files)
    if (path / METADATA).exists() or any(path.glob("*.distcp")):
        return Contents(*read_distcp(path, files))
    _refuse_frameworks(path)
    inner = [x for x in sorted(path.iterdir()) if x.is_dir() and (x / METADATA).is_file()]
    weights = [x for x in inner if not x.name.lower().startswith(_OTHERS)]
    if len(weights) == 1:
        contents = Contents(*read_distcp(weights[0], files))
        return Contents(contents.loaded, contents.files, [f"weights read from {weights[0].name}", *contents.notes])
    if weights:
        raise UsageError(
            f"{path} holds several checkpoints of torch.distributed.checkpoint.",
            why=f"They are in {bounded([x.name for x in weights], 5)}.",
            fix=f"Give one of them: {weights[-1]}",
        )
    return _of_files(path, read_file, files)


def _of_one_index(path: Path, indices: list[Path], read_file: ReadFile, known: Unchanged) -> Contents:
    """Read the shards of a folder's index, safetensors first, and note other weights in the folder.

    Raises:
        UsageError: several indices are of one format.
    """
    formats = {index: index.name.lower().removesuffix(_INDEX).rpartition(".")[2] for index in indices}
    rivals = [index for index in indices if formats[index] == formats[indices[0]]]
    if len(rivals) > 1:
        raise UsageError(
            f"{path} contains several sets of shards: {bounded([index.name for index in rivals], 5)}.",
            why="The command cannot tell which one you mean.",
            fix=f"Give one of them: {rivals[0]}",
        )
    contents = _of_index(indices[0], read_file, known)
    others = [index.name for index in indices[1:]] + [
        x.name for x in _weights_in(path) if x not in contents.files and not _SHARD.fullmatch(x.name)
    ]
    if others:
        contents.notes.append(f"weights read from {indices[0].name}; not from {bounded(others, 5)}")
    return contents


def _weights_in(path: Path) -> list[Path]:
    """List the files of weights in a folder, by their names."""
    files = sorted(x for x in path.iterdir() if x.is_file() and x.suffix.lower() in _WEIGHTS)
    return [
        x for x in files if not x.name.lower().startswith(_OTHERS) and not x.name.lower().endswith("_optim_states.pt")
    ]


def _of_index(index: Path, read_file: ReadFile, known: Unchanged) -> Contents:
    """Read the shards that an index names."""
    known.add([index])
    try:
        document = read_json(read_plain(index, _LARGEST_INDEX).decode("utf-8"))
        places = document["weight_map"]
        names = sorted(set(places.values()))
        if not names or not all(isinstance(name, str) and is_name(name) for name in names):
            raise ValueError("its weight_map names no file in this folder")
    except OSError as error:
        raise UsageError(f"Cannot read {index}.", why=f"{error.strerror or error}.", fix="Check the path.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{index} is not an index of shards.", why=f"{' '.join(str(error).split())[:200]}.", fix="Copy it again."
        ) from error
    shards = [index.parent / name for name in names]
    _check_there(shards, index.parent)
    contents = _merged(shards, read_file, known)
    table: Mapping[str, Any] = contents.loaded if isinstance(contents.loaded, Mapping) else {}
    lost = [name for name in places if name not in table]
    if lost:
        raise UsageError(
            f"The shards of {index} lack {len(lost)} tensors: {bounded(lost, 3)}.",
            why="The index and the shards come from different checkpoints.",
            fix="Copy the whole folder again.",
        )
    return Contents(table, [index, *contents.files], contents.notes, contents.tied)


def _check_there(shards: list[Path], folder: Path) -> None:
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise UsageError(
            f"{folder} lacks {len(missing)} of its {len(shards)} shards: {bounded(missing, 3)}.",
            why="Each shard holds some of the tensors.",
            fix="Copy all shards.",
        )
    for shard in shards:
        check_plain(shard)


def _merged(shards: list[Path], read_file: ReadFile, known: Unchanged) -> Contents:
    """Read shards into one table."""
    known.add(shards)
    table: dict[Any, Any] = {}
    notes, tied = [f"read from {len(shards)} shard(s)"], dict[str, str]()
    for shard in shards:
        loaded, omitted = read_file(shard, notes)
        if not isinstance(loaded, Mapping):
            raise UsageError(f"{shard} is not a shard of a state dict.", why=f"It contains a {type(loaded).__name__}.")
        twice = [str(name) for name in loaded if name in table and isinstance(loaded[name], torch.Tensor)]
        if twice:
            raise UsageError(
                f"{bounded(twice, 3)} is in more than one shard of {shard.parent}.",
                why="Shards of an index contain each tensor once; these may be parts of tensor parallelism.",
                fix="Merge the parts with the tool that wrote them.",
            )
        table |= loaded
        tied |= omitted
    return Contents(table, shards, notes, {name: other for name, other in tied.items() if name not in table})


def _of_files(path: Path, read_file: ReadFile, known: Unchanged) -> Contents:
    """Read the one file of weights in a folder, or shards without an index."""
    files = _weights_in(path)
    shards = {match["stem"] + match["suffix"]: match for x in files if (match := _SHARD.fullmatch(x.name))}
    if len(shards) == 1 and len(files) > 0 and all(_SHARD.fullmatch(x.name) for x in files):
        match = next(iter(shards.values()))
        count = int(match["count"])
        if len(files) != count:
            raise UsageError(
                f"{path} has {len(files)} of the {count} shards of a checkpoint.",
                why=f"There are {bounded([x.name for x in files], 3)}.",
                fix="Copy all shards.",
            )
        return _merged(files, read_file, known)
    plain = [x for x in files if x.suffix.lower() == ".safetensors"] or files
    if len(plain) > 1:
        raise UsageError(
            f"{path} contains several files of weights: {bounded([x.name for x in plain], 5)}.",
            why="The command cannot tell which one you mean.",
            fix=f"Give one of them: {plain[0]}",
        )
    if not plain:
        detect_folder(path)  # lists the supported folders
        raise UsageError(f"{path} contains no weights.", fix="Give the folder that contains the weights.")
    known.add(plain)
    loaded, tied = read_file(plain[0], notes := [f"weights read from {plain[0].name}"])
    return Contents(loaded, [plain[0]], notes, tied)


def _refuse_frameworks(path: Path) -> None:
    """Refuse folders of DeepSpeed and Megatron, which hold the parts of several devices.

    Raises:
        UsageError: it is one of these; the text has the command that makes one file of it.
    """
    quoted = shlex.quote(str(path))
    steps = sorted(x for x in path.iterdir() if x.is_dir() and re.fullmatch(r"global_step\d+", x.name))
    states = sorted(path.glob("*_model_states.pt"))
    if steps or states or (path / "zero_to_fp32.py").is_file():
        top = path.parent if states and not steps else path
        one = [*states, *(steps[-1].glob("mp_rank_*_model_states.pt") if steps else ())]
        short = [x for x in one if x.name.startswith("mp_rank_")]
        also = f" Or give {short[0]}, which has the weights in their training precision." if len(short) == 1 else ""
        raise UsageError(
            f"{path} is a DeepSpeed checkpoint, with a part of the weights in the file of each device.",
            why="DeepSpeed's script zero_to_fp32.py in that folder merges the parts, in fp32.",
            fix=f"cd {shlex.quote(str(top))} && python zero_to_fp32.py . fp32, then give fp32/pytorch_model.bin or the "
            f"folder fp32.{also}",
        )
    ranks = sorted(x for x in path.rglob("mp_rank_*") if x.is_dir())[:100]
    if ranks or (path / "latest_checkpointed_iteration.txt").is_file():
        folders = {x.parent for x in ranks}
        parts = f"{len(ranks) // len(folders)} parts" if ranks else "parts"
        one = sorted(ranks[0].glob("*.pt")) if len(ranks) == 1 else []
        if len(one) == 1:
            raise UsageError(
                f"{path} is a checkpoint of Megatron-LM.",
                why="It was trained without tensor parallelism, so one file has all weights.",
                fix=f"Give {one[0]}",
            )
        raise UsageError(
            f"{path} is a checkpoint of Megatron-LM, in {parts} of tensor or pipeline parallelism.",
            why="Each part holds some rows or columns of every matrix.",
            fix=f"In Megatron-LM: {_MEGATRON.format(folder=quoted)}",
        )


def refuse_shard(path: Path) -> None:
    """Refuse a file that is one of several parts of a checkpoint, by its name and the other files in its folder.

    Raises:
        UsageError: it is such a part.
    """
    name, folder = path.name, path.parent
    match = _SHARD.fullmatch(name)
    if match is not None and int(match["count"]) > 1 and path.suffix.lower() in _WEIGHTS and path.is_file():
        count = int(match["count"])
        others = [x for x in folder.iterdir() if (m := _SHARD.fullmatch(x.name)) and m["stem"] == match["stem"]]
        there = len(others) >= count or any(folder.glob(f"*{_INDEX}"))
        raise UsageError(
            f"{path} is one of {count} shards of a checkpoint.",
            why="Each shard holds some of the tensors.",
            fix=f"Give the folder: {folder}" if there else f"Copy all {count} into one folder, and give the folder.",
        )
    if path.suffix.lower() == ".distcp" and path.is_file():
        raise UsageError(
            f"{path} is one file of a folder of torch.distributed.checkpoint.",
            why=f"It contains what one device wrote: whole tensors or parts of them, as {METADATA} says.",
            fix=f"Give the folder with all its files: {folder}",
        )
    if re.fullmatch(r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt", name) and path.is_file():
        raise UsageError(
            f"{path} is DeepSpeed's optimizer state of one device.",
            why="It contains a part of the fp32 weights, without their names.",
            fix=f"Gather the weights: {ZERO}.",
        )
    for pattern, siblings in (
        (r"mp_rank_(\d+)_model_states\.pt", "mp_rank_*_model_states.pt"),
        (r"consolidated\.(\d+)\.(pth?|safetensors)", f"consolidated.*{path.suffix}"),
    ):
        if re.fullmatch(pattern, name) and len(parts := sorted(folder.glob(siblings))) > 1:
            raise UsageError(
                f"{path} is one of {len(parts)} parts of tensor parallelism.",
                why="Each part holds some rows or columns of every matrix.",
                fix="Merge the parts with the tool of the project that wrote them; for DeepSpeed: ds_to_universal.py "
                "or "
                "zero_to_fp32.py.",
            )
    if re.fullmatch(r"mp_rank_\d+(_\d+)*", folder.name) and path.is_file():
        parts = [x for x in folder.parent.glob("mp_rank_*") if x.is_dir()]
        if len(parts) > 1:
            raise UsageError(
                f"{path} is one of {len(parts)} parts of a checkpoint of Megatron-LM.",
                why="Each part holds some rows or columns of every matrix.",
                fix=f"In Megatron-LM: {_MEGATRON.format(folder=shlex.quote(str(folder.parent.parent)))}",
            )
