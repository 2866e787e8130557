"""A benchmark's process that runs the user's module in PyTorch, as one more candidate beside the exported files.

It answers the requests of `runtime.bench.worker`. The module is the user's own, untouched, in fp32 and in evaluation
mode, on the CPU; inputs are tensors from the start, so that a call only computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.error_texts import argument, named_line
from ...core.errors import UsageError
from ...core.tensors import TensorSpec
from ...onnx_graph.summary import inspect_onnx
from ...runtime.bench.resources import forget_peak, resident
from ...runtime.bench.worker import Worker, serve_as
from ...runtime.session import Arrays, Session, read_model_sidecar
from ..source.source_model import as_tensors
from .inputs import apply, bind
from .module_runner import as_arrays
from .observe import working_copy
from .of_file import is_own_module, own_module


class ModuleSession(Session):
    """The user's module behind the interface of a file's session.

    Args:
        module: the module, in evaluation mode.
        specs: the inputs of the file that was exported from it.
    """

    backend, provider = "torch", "cpu"

    def __init__(self, module: nn.Module, specs: Sequence[TensorSpec]) -> None:
        self.inputs, self.outputs = list(specs), []
        self._module = module
        self._by_name = bind(module, [spec.name for spec in specs])

    def bound(self, inputs: Arrays) -> Callable[[], None]:
        """Return a call that only computes, on tensors that are there already; it ran once."""
        tensors = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in as_tensors(inputs).items()
        }

        def compute() -> None:
            with torch.inference_mode():
                apply(self._module, tensors, self._by_name)

        try:
            compute()
        except Exception as error:  # the user's module may raise anything
            raise UsageError(
                f"{type(self._module).__name__} does not take these inputs.", why=named_line(error, 200)
            ) from error
        return compute

    def _execute(self, inputs: Arrays) -> Arrays:
        with torch.inference_mode():
            return as_arrays(apply(self._module, as_tensors(inputs), self._by_name))


class ModuleWorker(Worker):
    """The user's module in this process."""

    def open_module(self, model: str, threads: int | None, made_by: dict[str, Any]) -> dict[str, Any]:
        """Make the module that a file was exported from; the measured time excludes importing PyTorch.

        Args:
            model: the exported file, which says what the inputs are.
            threads: of PyTorch; None leaves it to PyTorch.
            made_by: `factory`, `factory_args`, `weights` and `entry`, as `own_module` takes them.
        """
        path, weights = Path(model), made_by["weights"]
        sidecar = read_model_sidecar(path)
        if sidecar is not None and sidecar.step is not None:
            raise UsageError(
                f"{path} takes a few tokens a call, and the module whole sequences.",
                fix="Measure it beside the file of whole sequences.",
            )
        if made_by["factory"] is None and not is_own_module(sidecar):
            raise UsageError(
                f"{path} does not say which function makes its module.",
                why="It was exported from a checkpoint of a supported class.",
                fix=f"Name a function that makes the PyTorch module: {argument('factory', 'file.py:function')}.",
            )
        if threads is not None:
            torch.set_num_threads(threads)
        forget_peak()
        self._imports = resident()
        begin = time.perf_counter()
        module, origin = own_module(
            path,
            sidecar,
            made_by["factory"],
            made_by["factory_args"],
            None if weights is None else Path(weights),
            made_by["entry"],
            "bench",
        )
        self._session = session = ModuleSession(working_copy(module), inspect_onnx(path).inputs)
        spent = time.perf_counter() - begin
        self._loaded = resident()
        return {
            "load_ms": 1e3 * spent,
            "backend": session.backend,
            "provider": session.provider,
            "plugin": None,
            "notes": list(origin.warnings),
            "inputs": [asdict(spec) for spec in session.inputs],
        }


def main() -> None:
    """Serve on stdin and stdout."""
    serve_as(ModuleWorker())
