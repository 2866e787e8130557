"""`record`: write golden outputs, which a live module computes on some inputs and exported files are checked with.

The names in the file are those that the export will have: for a supported class those of its checkpoint's file, for any
other module those of `export_module`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...core.documents.report import Report
from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.file_kinds import NPZ
from ...core.storage.outputs import Output, check_outputs
from ...core.tensors import format_shape
from ...runtime.inputs.arrays import save_arrays
from ..models.registry import live_class
from .inputs import apply, bind
from .module_runner import named_tensors
from .observe import working_copy

if TYPE_CHECKING:
    from ...core.documents.sidecar import CheckRecord

Arrays = dict[str, NDArray[Any]]
Inputs = Mapping[str, NDArray[Any] | Tensor]
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, repr=False)
class RecordReport(Report):
    """The result of a recording.

    Args:
        path: the .npz.
        samples: the arrays of each sample, inputs and outputs by name.
        notes: what was chosen while recording.
    """

    path: Path
    samples: Sequence[Mapping[str, NDArray[Any]]]
    notes: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[Path]:
        """The written files: the .npz."""
        return [self.path]

    @property
    def checks(self) -> Sequence[CheckRecord]:
        """The checks, which are none: the model's own outputs are recorded."""
        return ()

    def headline(self) -> str:
        """Describe the file and its contents in one line."""
        arrays = ", ".join(f"{name} {x.dtype} {format_shape(x.shape)}" for name, x in self.samples[0].items())
        return f"{self.path}  {len(self.samples)} sample(s) of {arrays}"


def record(
    module: nn.Module,
    inputs: Inputs | Sequence[Inputs],
    path: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> RecordReport:
    """Run a live module, and write its inputs and outputs by name.

    The module runs on its own device, in evaluation mode and without gradients; afterwards its modes and the random
    generators are as before. A module in half precision runs as a copy in fp32, because golden outputs must be more
    exact than a file.

    Args:
        module: the user's own, with the weights that are exported.
        inputs: arrays or tensors by name, as forward or the exported file calls them; a list of them for several
            samples. Sequences should be longer than a window sees: shorter ones do not show where it ends.
        path: the .npz to write.
        names: other names for some arrays, instead of those that the export will have.
        overwrite: replace an existing file.

    Raises:
        UsageError: the module does not take the inputs, returns no tensors or NaN, or the file cannot be written.

    Examples:
        >>> localattn.record(module, {"tokens": tokens}, "golden.npz").files[0].name
        'golden.npz'
    """
    path, notes = Path(path), []
    if not isinstance(module, nn.Module):
        raise UsageError(f"A {type(module).__name__} cannot be recorded.", why="It is no torch.nn.Module.")
    sets = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    if not sets or not all(isinstance(given, Mapping) and given for given in sets):
        raise UsageError(f"{argument('inputs')} has no arrays.", fix="Give a dict of arrays or tensors by name.")
    check_outputs([Output(path, NPZ)], overwrite=overwrite)  # the model may run for long
    running = module
    if any(tensor.dtype in _HALF for tensor in (*module.parameters(), *module.buffers())):
        running = working_copy(module)
        notes.append("the module is in half precision, and was recorded as a copy in fp32")
    with _undisturbed(running):
        samples = [_sample(running, given, names or {}) for given in sets]
    arrays = samples[0]
    if len(samples) > 1:
        arrays = {f"{number}/{name}": x for number, sample in enumerate(samples) for name, x in sample.items()}
    save_arrays(path, arrays, overwrite=overwrite)
    return RecordReport(path, samples, notes)


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients, and restore modes and random generators afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    devices = sorted({x.device.index or 0 for x in module.parameters() if x.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        module.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training


def _sample(module: nn.Module, given: Inputs, names: Mapping[str, str]) -> Arrays:
    """Run the module once, and return inputs and outputs under the names of the exported file."""
    device = next((x.device for x in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    tensors = {name: torch.as_tensor(x).detach().to(device) for name, x in given.items()}
    tensors = {name: x.float() if x.dtype in _HALF else x for name, x in tensors.items()}
    for name, x in tensors.items():
        if x.dtype == torch.float64 and not any(p.dtype == torch.float64 for p in module.parameters()):
            raise UsageError(
                f"Input {name!r} is float64.",
                why=f"The {type(module).__name__} computes in float32.",
                fix=f"Give it as float32: {name}.astype('float32').",
            )
    family, output = live_class(module), None
    inputs = dict(tensors)
    if family is not None:
        tensors, inputs, output = family.live_call(tensors)
    result = named_tensors(apply(module, tensors, bind(module, list(tensors))))
    if output is not None and list(result) == ["out"]:
        result = {output: result["out"]}
    clash = sorted(set(inputs) & set(result))
    if clash:
        raise UsageError(f"{clash[0]!r} is an input and an output of the module.", why="A file cannot have both.")
    arrays: Arrays = {}
    for name, tensor in {**inputs, **result}.items():
        written = names.get(name, name)
        if written in arrays:
            raise UsageError(f"Two arrays would be named {written!r}.", fix="Give other names.")
        arrays[written] = _array(tensor)
    for name, array in arrays.items():
        if array.dtype.kind == "f" and bool(np.isnan(array).any()):
            raise UsageError(f"{name!r} contains NaN.", why="Nothing is equal to NaN, so it would prove nothing.")
    return arrays


def _array(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    array: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()
    return array
