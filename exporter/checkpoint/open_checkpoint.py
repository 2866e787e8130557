"""Open a checkpoint: combine weights, configuration and shapes into one `SourceModel`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.files import sha256
from ...core.storage.reading import check_plain
from ...core.storage.unchanged import Unchanged, unchanged
from ...core.storage.wrong_file import check_exists
from ..models.forms import FolderContents, FolderFamily, FolderRequest, StepFamily
from ..models.registry import CLASSES, detect_family, find_folder, read_live
from ..options import ShapeRequest
from ..source.source_model import SourceModel
from ..source.upstream_class import upstream_module
from .config import RawConfig, adds_residual_only, load_config
from .infer_config import Resolved, gather, infer_config
from .load import LoadedCheckpoint, find_config, load_state, with_tied
from .tensors import check_finite

_log = logging.getLogger(__name__)
_HYPER_CONNECTIONS = "hyper-connections"


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint with its complete configuration.

    Args:
        loaded: the weights and where they came from.
        resolved: the configuration, completed from the weights.
        warnings: what may be wrong and no check of a file can see.
        original: loads upstream's own module from the user's files, where that is the reference.
    """

    loaded: LoadedCheckpoint
    resolved: Resolved
    warnings: Sequence[str] = ()
    original: Callable[[], nn.Module] | None = None

    @property
    def notes(self) -> list[str]:
        """Notes on choices, assumptions and conversions."""
        return [*self.loaded.notes, *self.resolved.notes]

    @property
    def not_in_weights(self) -> list[str]:
        """Arguments and ways to call the model that change its outputs and that no tensor shows."""
        called = CLASSES[self.resolved.class_name].family.extra_inputs & {"causal"}
        return [*self.resolved.not_in_weights, *sorted(called)]

    def for_steps(self, request: ShapeRequest) -> OpenedCheckpoint:
        """Return the checkpoint with its family's arguments for a step file, if they differ.

        Raises:
            UsageError: a longest sequence was asked for, and the model's arguments state it already.
        """
        resolved = self.resolved
        family = CLASSES[resolved.class_name].family
        if isinstance(family, StepFamily):
            args = family.step_arguments(resolved.args, request.batch, request.max_length)
            if args is not None:
                return replace(self, resolved=replace(resolved, args=args))
        if request.max_length is not None:
            raise UsageError(
                f"{argument('seq_len')} does not apply to {resolved.class_name}.",
                why="The window sets the size of its caches, and its training sets the number of positions.",
                fix=f"Leave {argument('seq_len')} out.",
            )
        return self

    def source(self, request: ShapeRequest) -> SourceModel:
        """Build the model at the requested shapes.

        Raises:
            UsageError: keys are missing or unexpected, weights are NaN or infinite, or the shapes do not fit the model.
        """
        self.resolved.check_keys()
        check_finite(self.resolved.state.items())
        return SourceModel(
            self.resolved.class_name,
            self.resolved.args,
            self.resolved.state,
            not adds_residual_only(self.resolved.hyper_connections),
            request,
            self.not_in_weights,
            self.original or self._upstream(),
        )

    def _upstream(self) -> Callable[[], nn.Module] | None:
        """Return a loader of the weights into the published class, if that class computes the same as in training."""
        resolved = self.resolved
        try:
            installed: str | None = version(_HYPER_CONNECTIONS)
        except PackageNotFoundError:
            installed = None
        if adds_residual_only(resolved.hyper_connections) != adds_residual_only(installed):
            return None  # the installed hyper-connections is of the other kind
        return upstream_module(resolved.class_name, resolved.args, resolved.state)


# Files of weights in Hugging Face folders.
_OF_FOLDERS = (".safetensors", ".bin")


def open_checkpoint(
    path: Path,
    config: str | Path | None = None,
    known: RawConfig | None = None,
    task: str | None = None,
    shapes: ShapeRequest | None = None,
    *,
    steps: bool = False,
    entry: str | None = None,
) -> OpenedCheckpoint:
    """Load a checkpoint and complete its configuration.

    Args:
        path: the checkpoint, a file or the folder of a family that is read from one.
        config: its configuration file; by default the one in its folder, if there is one.
        known: a configuration that is already known (from a sidecar); `config` takes precedence.
        task: the task of a model in a folder, if it was saved for another task.
        shapes: of an export, whose heads replace the configuration's; sizes that a model in a folder does not have are
            refused before its weights are read.
        steps: whether that export is in steps.
        entry: the set of weights to read, where a file holds several; None chooses.

    Raises:
        UsageError: a file that is broken, a configuration that does not fit the weights, or sizes that do not fit it.
        MissingDependency: a package that the checkpoint's format needs is not installed.
    """
    check_exists(path)
    if path.is_dir() and (folder_family := find_folder(path)) is not None:
        if config is not None:
            raise UsageError(
                f"{path} needs no separate configuration.",
                why="The folder has its own configuration.",
                fix=f"Leave {argument('config')} out.",
            )
        if entry is not None:
            raise UsageError(
                f"{argument('entry')} does not apply to {path}.", why="A model's folder holds one set of weights."
            )
        request = FolderRequest(task, {} if known is None else known.kwargs, shapes, steps)
        return _open_folder(path, folder_family, request)
    if task is not None:
        raise UsageError(
            f"{argument('task')} does not apply to {path}.", why="It applies to Hugging Face folders only."
        )
    if config is None and known is None and path.suffix in _OF_FOLDERS and find_folder(path.parent) is not None:
        raise UsageError(
            f"{path} is a part of the Hugging Face folder {path.parent}.",
            why="Its configuration and its tokenizer are files of that folder.",
            fix=f"Give the folder: {path.parent}.",
        )
    loaded = with_tied(load_state(path, entry=entry))
    overrides = {}
    family = detect_family({name: tuple(x.shape) for name, x in loaded.state.items()})
    if shapes is not None and family.sizes_are_arguments:  # else they follow from the shapes of the inputs
        sizes = {"heads": shapes.heads, "dim_head": shapes.dim_head}
        overrides = {name: size for name, size in sizes.items() if size is not None}
    if config is not None or known is None:
        config = find_config(path, None if config is None else Path(config))
        known = load_config(config) if config is not None else None
        _log.info("configuration: %s", config or "none; everything is inferred from the weights")
    resolved = infer_config(gather(loaded.state, known, overrides, loaded.settings))
    return OpenedCheckpoint(loaded, resolved, tuple(loaded.warnings))


def open_live(module: nn.Module) -> OpenedCheckpoint | None:
    """Open a live module as the folder that it would be saved to; None if its family has no folders.

    Raises:
        UsageError: it is of such a family, and cannot be exported.
    """
    read = read_live(module)
    if read is None:
        return None
    return _opened(read, "", Path(type(module).__name__))


def _opened(read: FolderContents, digest: str, path: Path, files: Unchanged | None = None) -> OpenedCheckpoint:
    loaded = LoadedCheckpoint(dict(read.state), digest, path, list(read.notes), files=files)
    args = CLASSES[read.class_name].args(**read.arguments)
    resolved = Resolved(read.class_name, args, None, loaded.state)
    return OpenedCheckpoint(loaded, resolved, tuple(read.warnings), read.original)


def _open_folder(path: Path, family: FolderFamily[Any], request: FolderRequest) -> OpenedCheckpoint:
    """Read a checkpoint folder, whose configuration is complete.

    Its SHA-256 is computed from the SHA-256 of its files in order.

    Raises:
        UsageError: one of its files is missing, not a plain file, or cannot be read, or changes meanwhile.
    """
    files = family.files(path)
    for file in files:
        check_plain(file)
        if not file.is_file():
            raise UsageError(
                f"{path} has no {file.name}.",
                why="Every model of its family has this file.",
                fix="Copy the whole folder.",
            )
    with unchanged(files) as state:
        read = family.read(path, request)
        _log.info("%s: %s with %d tensors", path, read.class_name, len(read.state))
        digest = hashlib.sha256("".join(sha256(file) for file in files).encode()).hexdigest()
    return _opened(read, digest, path, state)
