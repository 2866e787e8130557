"""Opening a checkpoint: weights, configuration and shapes become one `SourceModel`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models.family import ShapeRequest
from ..models.registry import detect_family
from ..source.source_model import SourceModel
from .config import RawConfig, adds_residual_only, load_config
from .infer_config import Resolved, infer_config
from .load import LoadedCheckpoint, find_config, load_state


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint with its complete configuration.

    Args:
        loaded: the weights and where they came from.
        resolved: the configuration, completed from the weights.
        config: the file the configuration was read from, if there was one.
    """

    loaded: LoadedCheckpoint
    resolved: Resolved
    config: Path | None

    @property
    def notes(self) -> list[str]:
        """What was chosen, assumed or converted on the way."""
        return [*self.loaded.notes, *self.resolved.notes]

    def source(self, request: ShapeRequest) -> SourceModel:
        """The model at the shapes asked for.

        Raises:
            UsageError: keys are missing or unexpected, or the shapes do not fit the model.
        """
        self.resolved.check_keys()
        return SourceModel(
            self.resolved.class_name,
            self.resolved.args,
            self.resolved.state,
            not adds_residual_only(self.resolved.hyper_connections),
            request,
        )


def open_checkpoint(
    path: Path,
    config: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    known: RawConfig | None = None,
    key: str | None = None,
) -> OpenedCheckpoint:
    """Load a checkpoint and complete its configuration.

    Args:
        path: the checkpoint.
        config: its configuration file; by default the one beside it, if there is one.
        overrides: arguments that replace the configuration's.
        known: a configuration known already (from a sidecar); `config` goes before it.
        key: the entry of the checkpoint that holds the weights, if it is an unusual one.

    Raises:
        UsageError: a file that is broken, or a configuration that does not fit the weights.
        MissingDependency: a package that the checkpoint's format needs is not installed.
    """
    loaded = load_state(path, key)
    if not detect_family({name: tuple(tensor.shape) for name, tensor in loaded.state.items()}).sizes_are_arguments:
        # Heads and their size are shapes of the inputs there, not arguments of the class.
        overrides = {name: value for name, value in (overrides or {}).items() if name not in ("heads", "dim_head")}
    if config is None and known is not None:
        return OpenedCheckpoint(loaded, infer_config(loaded.state, known, overrides), None)
    found = find_config(path, config)
    raw = load_config(found) if found is not None else None
    return OpenedCheckpoint(loaded, infer_config(loaded.state, raw, overrides), found)
