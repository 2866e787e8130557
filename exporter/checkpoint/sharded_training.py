"""Handle checkpoints of training on several devices: DTensors, empty parameters, one device's parts.

A tensor that is whole is read. What is a part is refused with the command of its project that puts the parts together.
"""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...core.errors import UsageError
from ..models.inference import bounded
from .tensors import shape_of

GATHER = (
    "from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions; "
    "state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)); "
    "on rank 0: torch.save(state, 'weights.pt')"
)
ZERO = (
    "python zero_to_fp32.py . OUTPUT_FOLDER in the folder of the DeepSpeed checkpoint (it contains the script), or "
    "engine.save_16bit_model(folder) with stage3_gather_16bit_weights_on_model_save"
)
_DTENSORS = "torch.distributed.tensor"
# Part of torch's message if that module was not imported.
NEEDS_DTENSOR = "must be imported to load DTensors"
_DEEPEST = 8
_VERL = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def know_dtensors() -> None:
    """Let `torch.load(weights_only=True)` build DTensors: importing their module registers their classes."""
    importlib.import_module(_DTENSORS)


@contextmanager
def quiet_meshes() -> Iterator[None]:
    """Hide torch's log messages about device meshes without processes."""
    log = logging.getLogger("torch.distributed.device_mesh")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def gathered(loaded: object, path: Path) -> Any:
    """Return a file's contents with each complete DTensor as a plain tensor.

    Partial tensors in the state of an optimizer are dropped, because they are no reason to refuse the weights.

    Raises:
        UsageError: a DTensor outside an optimizer's state is the part of one device.
    """
    if _DTENSORS not in sys.modules:  # then there are none
        return loaded
    return _gathered(loaded, path, 0, of_optimizer=False)


def _gathered(loaded: object, path: Path, depth: int, *, of_optimizer: bool) -> Any:
    if isinstance(loaded, torch.Tensor):
        return _whole(loaded, path)
    if depth > _DEEPEST:
        return loaded
    if isinstance(loaded, Mapping):
        inside = {name: of_optimizer or str(name).lower().startswith("optim") for name in loaded}
        kept = {name: inner for name, inner in loaded.items() if not (inside[name] and _is_part(inner))}
        return {name: _gathered(inner, path, depth + 1, of_optimizer=inside[name]) for name, inner in kept.items()}
    if isinstance(loaded, list) or type(loaded) is tuple:
        entries = [inner for inner in loaded if not (of_optimizer and _is_part(inner))]
        return type(loaded)(_gathered(inner, path, depth + 1, of_optimizer=of_optimizer) for inner in entries)
    return loaded


def _is_part(value: object) -> bool:
    """Return whether a value is a DTensor of which this file holds one device's part."""
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return False
    return value._local_tensor.shape != value.shape or any(placement.is_partial() for placement in value.placements)


def _whole(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """Return a DTensor's own tensor, and any other tensor unchanged.

    Raises:
        UsageError: it is the part of one device.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor._local_tensor
    if not _is_part(tensor):
        return local
    partial = any(placement.is_partial() for placement in tensor.placements)
    mesh = tensor.device_mesh.mesh
    named = _VERL.fullmatch(path.name)
    fix = f"Gather the weights where the model was trained: {GATHER}"
    if named is not None:
        folder = path.parent
        fix = (
            f"Merge the files of all ranks: python -m verl.model_merger merge --backend fsdp --local_dir {folder} "
            f"--target_dir OUTPUT_FOLDER. Or gather them in training: {GATHER}"
        )
    raise UsageError(
        f"{path} contains the part of one device only: DTensors of FSDP2 or tensor parallelism.",
        why=f"A tensor of {list(tensor.shape)} is the sum over {mesh.numel()} devices; this file has the part of one."
        if partial
        else f"A tensor of {list(tensor.shape)} is spread over {mesh.numel()} devices; this file has "
        f"{list(local.shape)} of it.",
        fix=fix,
    )


def refuse_parts(state: Mapping[str, torch.Tensor], path: Path, loaded: object, empty: Collection[str] = ()) -> None:
    """Refuse a state dict whose parameters are in other files.

    Args:
        state: the tensors.
        path: the file.
        loaded: all that it holds, which may show who wrote it.
        empty: names of tensors that are empty in the model too.

    Raises:
        UsageError: parameters are empty, or flattened into one.
    """
    flat = [name for name in state if re.search(r"(^|\.)_?flat_param(_\d+)?$", name)]
    if flat:
        raise UsageError(
            f"{path} contains flat parameters of FSDP: {bounded(flat, 3)}.",
            why="Each is one device's part of many tensors, joined one after the other.",
            fix=f"Gather the weights where the model was trained: {GATHER}",
        )
    lost = [name for name, tensor in state.items() if 0 in shape_of(tensor) and name not in empty]
    if not lost:
        return
    deepspeed = isinstance(loaded, Mapping) and {"ds_version", "ds_config", "param_shapes"} & set(map(str, loaded))
    raise UsageError(
        f"{len(lost)} of the {len(state)} tensors of {path} are empty: {bounded(lost, 3)}.",
        why="This is a checkpoint of DeepSpeed's ZeRO-3, which writes the values of parameters into other files, one "
        "per device."
        if deepspeed
        else "DeepSpeed's ZeRO-3 and FSDP spread parameters over devices. A state_dict() that does not gather them "
        "has empty tensors.",
        fix=f"Gather the weights: {ZERO}." + ("" if deepspeed else f" With FSDP: {GATHER}"),
    )
