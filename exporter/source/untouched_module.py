"""Run upstream's own module with a checkpoint's weights, to measure its own error in a precision.

In half precision it runs under `torch.autocast`, with its weights in fp32. Converted to half precision, local-attention
1.11.2 does not run at all, because its rotary embedding returns fp32, and with xpos it rounds the frequencies. Its own
decorators exclude the rotary embedding from autocast on GPUs; here it is excluded on the CPU too.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch
from torch import Tensor, nn

from ...core.error_texts import first_line
from ...core.tolerance import TOLERANCES
from ...runtime.parity.baseline import UntouchedModule
from ...runtime.parity.runner import Runner, Sample
from ...runtime.session import Arrays
from ..models.family import TORCH_DTYPE
from ..models.registry import CLASSES
from .source_model import SourceModel, as_tensors

# The class of local-attention whose forward is the rotary embedding.
_ROTARY = "SinusoidalEmbeddings"
# Inputs with these names are passed by name, as upstream's options; the others in order.
_OPTIONS = ("mask", "attn_bias")


def autocast_to(dtype: str) -> torch.autocast:
    """Return a context in which a module computes in "fp16" or "bf16" as in mixed training; "fp32" changes nothing."""
    enabled = dtype != "fp32"
    # Without its cache autocast keeps no second copy of the weights.
    return torch.autocast("cpu", TORCH_DTYPE[dtype] if enabled else None, enabled, cache_enabled=False)


class UntouchedRunner(Runner):
    """A runner of upstream's unchanged module.

    Args:
        module: in fp32, with its weights; by name, a function that calls it, as `Family.untouched` returns it.
        output: name of its output.
        dtype: "fp32", "fp16" or "bf16".
        by_name: inputs are passed by the names of the file.
        sequence_axis: of the output, the axis that counts positions.
    """

    def __init__(
        self, module: Callable[..., Tensor], output: str, dtype: str, *, by_name: bool = False, sequence_axis: int = -2
    ) -> None:
        self.name, self.outputs = f"{getattr(module, '__name__', type(module).__name__)} in {dtype}", [output]
        self._module, self._dtype, self._by_name = module, dtype, by_name
        self._sequence_axis = sequence_axis

    def run(self, inputs: Arrays) -> Arrays:
        """Compute the output in fp32; errors of the module are not caught."""
        return self._run(inputs, {})

    def run_sampled(self, inputs: Arrays, sample: Sample) -> Arrays:
        """Compute the sampled positions alone, if the module can."""
        if not self._by_name or list(sample) != [self._sequence_axis]:
            return super().run_sampled(inputs, sample)
        ((_, kept),) = sample.items()
        return self._run(inputs, {"positions": torch.from_numpy(np.flatnonzero(kept))})

    @torch.no_grad()
    def _run(self, inputs: Arrays, only: Mapping[str, Tensor]) -> Arrays:
        tensors = as_tensors(inputs, torch.float32)
        options = {name: tensors.pop(name) for name in list(tensors) if self._by_name or name in _OPTIONS}
        with autocast_to(self._dtype):
            output: Tensor = self._module(*tensors.values(), **options, **only)
        return {self.outputs[0]: output.float().numpy()}


def untouched_module(source: SourceModel, dtype: str) -> UntouchedModule | str:
    """Build upstream's module of a checkpoint, or return why that is not possible.

    Args:
        source: the model.
        dtype: the precision of its file.
    """
    package, _, kind = source.class_name.partition(".")
    reason = CLASSES[source.class_name].why_not_run
    if not TOLERANCES[dtype].takes_baseline:
        return f"a file in {dtype} is not held against it"
    if (
        source.original is not None
        and (own := source.family.untouched(source.spec, source.loaded_original)) is not None
    ):
        axis = source.family.sequence_axis
        exact, rounded = (
            UntouchedRunner(own, source.outputs[0], each, by_name=True, sequence_axis=axis) for each in ("fp32", dtype)
        )
        rounded = exact if dtype == "fp32" else rounded
        return UntouchedModule(exact, rounded, f"{source.title} itself in {_how(dtype)}")
    if reason:
        return reason
    try:
        found = getattr(importlib.import_module(package), kind)
        release = version(package)
    except (ImportError, PackageNotFoundError, AttributeError) as error:
        project = package.replace("_", "-")
        return (
            f"{project} cannot be imported ({error}); with it ({project} on PyPI) its own error in {dtype} is measured"
        )
    module = _build(found, source)
    if isinstance(module, str):
        return f"{source.class_name} cannot be built from these weights: {module}"
    exact = rounded = UntouchedRunner(module, source.outputs[0], "fp32")
    if dtype != "fp32":
        rounded = UntouchedRunner(module, source.outputs[0], dtype)
    return UntouchedModule(exact, rounded, f"{source.class_name} {release} itself in {_how(dtype)}")


def _how(dtype: str) -> str:
    return f"{dtype} ({'PyTorch' if dtype == 'fp32' else 'torch.autocast'})"


def _build(found: Callable[..., nn.Module], source: SourceModel) -> nn.Module | str:
    """Build the module with the weights, or return its error; random generators keep their state."""
    drawn = random.getstate()  # hyper-connections draw a random stream
    try:
        with torch.random.fork_rng(devices=[]):
            module = found(**source.args.model_dump())
        given = {name: tensor.float() for name, tensor in source.state.items()}
        missing, unexpected = module.load_state_dict(given, strict=False, assign=True)
    except Exception as error:  # another release of the package may raise anything
        return first_line(error, 200)
    finally:
        random.setstate(drawn)
    # What inv_freq holds is computed by a formula; old files lack it.
    strange = [name for name in (*missing, *unexpected) if not name.endswith("inv_freq")]
    if strange:
        return f"{strange[0]} is in one of the two only"
    for part in module.modules():
        if type(part).__name__ == _ROTARY:
            part.forward = torch.autocast("cpu", enabled=False)(part.forward)
    return module.requires_grad_(False).eval()
