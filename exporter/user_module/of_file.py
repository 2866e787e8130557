"""The user's own module as the reference of a file that was exported from it.

The module is made by the function that the user names, or by the one that the user's own cache remembers from the
export. A function that only a sidecar names is not run.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...core.documents.sidecar import Sidecar
from ...core.error_texts import argument, named_line
from ...core.errors import UsageError
from ...core.limits import LARGEST_SIZE
from ...core.storage.files import is_file, sha256
from ...core.storage.module_places import recall
from ...core.tensors import BATCH, SEQUENCE, TensorSpec
from ...runtime.parity.baseline import UntouchedModule
from ...runtime.parity.runner import FileRunner
from ...runtime.session import Arrays
from ..models.registry import CLASSES
from .factory import module_from_factory
from .inputs import ModuleInput, bind, draw_all, with_token_limits
from .module_runner import AutocastRunner, ModuleRunner
from .observe import working_copy
from .origin import Origin

_FP32 = {"float16": "float32"}


def is_own_module(sidecar: Sidecar | None) -> bool:
    """Return whether a file was exported from a module of the user's own."""
    return sidecar is not None and sidecar.class_name not in CLASSES


def own_module(
    model: Path,
    sidecar: Sidecar | None,
    factory: str | None,
    factory_args: str | Mapping[str, Any] | None,
    weights: Path | None,
    entry: str | None,
    command: str,
) -> tuple[nn.Module, Origin]:
    """Make the module that a file was exported from.

    Args:
        model: the file.
        sidecar: its sidecar.
        factory: the function that the user names; None for the one of the export.
        factory_args: its arguments; None for those of the export, where it is the same function.
        weights: the checkpoint; None for the weights that the function makes.
        entry: the set of weights of the checkpoint.
        command: of this package, for the error.

    Raises:
        UsageError: no function is known, or it does not make the module.
    """
    if factory is not None:
        if factory_args is None and sidecar is not None and sidecar.class_name == factory:
            factory_args = sidecar.kwargs
        return module_from_factory(factory, factory_args, weights, entry=entry)
    assert sidecar is not None
    name, kwargs = sidecar.class_name, sidecar.kwargs
    if ":" not in name:
        raise UsageError(
            f"{model} was exported from a module in memory, of the class {name}.",
            why="Nothing says how to make that module again.",
            fix=f"Name a function that makes it: {argument('factory', 'file.py:function')}; "
            f"or compare with what it computed: {argument('golden', 'golden.npz')}, which localattn.record writes.",
        )
    note = recall(sidecar.factory_sha256, name, kwargs)
    if note is None or not {"code", "factory", "folder"} <= note.keys() or not is_file(Path(note["code"])):
        raise UsageError(
            f"{model} was exported from {name}, whose code is not known here.",
            why="Code that only a sidecar names is not run: anybody can write a sidecar.",
            fix=f"If you trust it: {_line(command, model, weights, name, kwargs)}",
        )
    if sha256(Path(note["code"])) != sidecar.factory_sha256:
        raise UsageError(
            f"{note['code']} has changed since {model} was exported.",
            why="The module that it makes now may be another one.",
            fix=f"To compare with it as it is: {_line(command, model, weights, note['factory'], kwargs)}",
        )
    # A package is imported from where it was at the export: the current folder may be a stranger's.
    found = module_from_factory(note["factory"], kwargs, weights, entry=entry, folder=Path(note["folder"]))
    if found[1].code_sha256 != sidecar.factory_sha256:
        raise UsageError(
            f"{name} is another function now than when {model} was exported.",
            why=f"It is defined in {found[1].code}.",
            fix=f"To compare with it: {_line(command, model, weights, name, kwargs)}",
        )
    return found


def _line(command: str, model: Path, weights: Path | None, factory: str, kwargs: Mapping[str, Any]) -> str:
    """Return the command that names the function."""
    given = {
        "against": None if weights is None else str(weights),
        "factory": factory,
        "factory_args": json.dumps(kwargs) if kwargs else None,
    }
    named = [argument(name, value) for name, value in given.items() if value is not None]
    return " ".join((f"localattn {command} {shlex.quote(str(model))}", *named))


# Tokens of an example, where a file of steps has positions without end.
_SOME = 16


def _longest(sidecar: Sidecar) -> int:
    """Return the longest sequence that a file takes; 0 for a step file that takes any."""
    if sidecar.step is None:
        return sidecar.seq_len
    positions = sidecar.step.max_positions
    return 0 if positions is None or positions == LARGEST_SIZE else positions


class OwnReference(ModuleRunner):
    """The user's untouched module at the sizes of a file's inputs, in float64 where it runs so.

    Args:
        module: the user's module, with its weights.
        candidate: the file.

    Raises:
        UsageError: the module does not take the file's inputs.
    """

    def __init__(self, module: nn.Module, candidate: FileRunner) -> None:
        sidecar = candidate.sidecar
        self.inputs = list(candidate.inputs)
        self.longest = 0 if sidecar is None else _longest(sidecar)
        self.batch = None if sidecar is None else sidecar.batch
        names = [spec.name for spec in self.inputs]
        by_name = bind(module, names)
        untouched = working_copy(module)
        given, _ = with_token_limits([self._input(spec) for spec in self.inputs], untouched, by_name)
        limits = [x.limit for x in given if x.limit is not None]
        self.token_limit = min(limits, default=None)
        self.token_limits = {x.name: x.limit for x in given if x.limit is not None}
        self.module, self.by_name = untouched, by_name
        self.example = draw_all(given, 0, {})
        try:
            super().__init__(module, untouched, by_name, self.example)
            self.outputs = list(self.run(self.example))
        except UsageError:
            raise
        except Exception as error:  # the user's module may raise anything
            raise UsageError(
                f"{type(module).__name__} does not take the inputs of {candidate.name}.",
                why=named_line(error, 200),
                fix="Give the function and the arguments that the file was exported with.",
            ) from error
        self._last: tuple[Arrays, Arrays] | None = None

    def _input(self, spec: TensorSpec) -> ModuleInput:
        """Return an input at the sizes that the file was exported for; an axis of another name has 8."""
        sizes = {BATCH: max(2, self.batch or 1), SEQUENCE: max(2, self.longest or _SOME)}
        axes = tuple("" if isinstance(size, int) else size for size in spec.shape)
        shape = tuple(size if isinstance(size, int) else sizes.get(size, 8) for size in spec.shape)
        return ModuleInput(spec.name, _FP32.get(spec.dtype, spec.dtype), shape, axes)

    def run(self, inputs: Arrays) -> Arrays:
        """Compute the outputs; errors of the module are not caught."""
        last = getattr(self, "_last", None)
        if last is None or last[0] is not inputs:
            self._last = last = inputs, super().run(inputs)
        return last[1]

    def refuses(self, inputs: Arrays) -> str | None:
        """Return why the module does not take inputs of these sizes; None if it does."""
        try:
            self.run(inputs)
        except Exception as error:  # the user's module may raise anything
            return named_line(error, 200)
        return None

    def limits(self, name: str, axis: int) -> tuple[int, int | None]:
        """Return the smallest and the largest size of an input's axis; the longest sequence is the file's."""
        size = next(spec.shape[axis] for spec in self.inputs if spec.name == name)
        return 1, (self.longest or None) if size == SEQUENCE else None

    def compute(self, inputs: Arrays) -> Arrays:
        """Run the module, although it ran on these inputs before."""
        return super().run(inputs)

    def baseline(self, dtype: str) -> UntouchedModule | str:
        """Return the module to measure its own error in half precision with."""
        if dtype not in ("fp16", "bf16"):
            return f"a file in {dtype} is not held against it"
        exact, rounded = (AutocastRunner(self.module, self.by_name, each) for each in ("fp32", dtype))
        return UntouchedModule(exact, rounded, f"{type(self.module).__name__} itself in {dtype} (torch.autocast)")


def notes_on_weights(model: Path, sidecar: Sidecar | None, origin: Origin) -> list[str]:
    """Return what the user should know of the weights that are compared with."""
    if not origin.weights:
        return [f"compared with the weights that {origin.name} makes"]
    notes: Sequence[str] = origin.notes
    if sidecar is not None and sidecar.checkpoint_sha256 and sidecar.checkpoint_sha256 != origin.weights_sha256:
        notes = [f"{origin.weights} is not the checkpoint {model} was exported from", *notes]
    return [*origin.warnings, *notes]
