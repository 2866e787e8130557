"""Run the user's unchanged module as the reference of its file."""

from __future__ import annotations

import numpy as np
from torch import nn

from ...core.errors import UsageError
from ...runtime.parity.runner import Runner
from ...runtime.session import Arrays
from .inputs import call
from .observe import working_copy
from .outputs import as_arrays


class ModuleRunner(Runner):
    """A runner of a module in PyTorch: in float64 if that works, so that it shows the file's own error, else in fp32.

    Args:
        module: the user's module.
        untouched: an unchanged copy of it in fp32.
        by_name: whether inputs are passed by name.
        example: inputs that it accepts.

    Attributes:
        notes: why it does not run in float64; empty if it does.
    """

    def __init__(self, module: nn.Module, untouched: nn.Module, by_name: bool, example: Arrays) -> None:
        self._module, self._by_name, self._double = untouched, by_name, False
        self.notes: list[str] = []
        try:
            twin = working_copy(module, double=True)
            call(twin, example, by_name, double=True)
        except Exception as error:  # often it makes fp32 tensors itself; other errors are raised again in fp32
            why = (str(error).strip().splitlines() or [""])[0][:200]
            self.notes = [
                f"the reference is in fp32: the module does not run in float64 ({type(error).__name__}: {why})"
            ]
        else:
            self._module, self._double = twin, True
        self.name = f"the untouched module in {'float64' if self._double else 'fp32'}"

    def run(self, inputs: Arrays) -> Arrays:
        """Call the module; its errors are not caught."""
        return as_arrays(call(self._module, inputs, self._by_name, double=self._double))

    def check_repeats(self, inputs: Arrays) -> Arrays:
        """Run twice on the same inputs, check that the outputs are equal, and return them.

        Raises:
            UsageError: the two runs differ.
        """
        first, second = self.run(inputs), self.run(inputs)
        for name, array in first.items():
            if not np.array_equal(array, second[name], equal_nan=True):
                raise UsageError(
                    "The module gives two answers to the same inputs.",
                    why=f"Its output {name!r} differs from run to run in evaluation mode, so nothing can be compared.",
                    fix="Turn off what is random in it.",
                )
        return first
