"""The engine backend: an engine of TensorRT or TensorRT-RTX as a `Session`."""

from __future__ import annotations

import re
import weakref
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...core.error_texts import argument
from ...core.errors import MissingDependency, UsageError
from ..session import Arrays, Session
from .kernels import loaded_kernels
from .open import OpenEngine, open_engine, use_device
from .plugins import mapped_library

# An engine has machine code for one kind of GPU; each of these names means the first one, "cuda:1" the second.
_PROVIDERS = ("auto", "cuda", "tensorrt")


class EngineSession(Session):
    """An engine loaded on its GPU.

    Memory and streams use Polygraphy's CUDA wrapper, execution its runner; torch is not needed.

    Args:
        opened: the engine, deserialised.
        source: the file's name, for errors.

    Raises:
        MissingDependency: the GPU has not enough memory for it.
    """

    def __init__(self, opened: OpenEngine, source: str) -> None:
        from polygraphy.backend.trt import TrtRunner
        from polygraphy.exception import PolygraphyException

        self.backend = opened.facts.backend
        self.provider = f"cuda:{opened.device.index}" if opened.device.index else "cuda"
        self.device = opened.device
        self.facts = opened.facts
        self.inputs = list(opened.facts.inputs)
        self.outputs = list(opened.facts.outputs)
        self._source = source
        self._profile = 0
        self._messages = opened.opened.messages
        self._runner = TrtRunner(opened.engine)
        try:
            self._runner.activate()
        except PolygraphyException as error:
            raise MissingDependency(
                f"{source} does not start on {opened.device.describe()}.",
                why=self._messages.reason(error),
                fix=f"Free GPU memory: close what else runs there, or build with a smaller {argument('workspace')}.",
            ) from error
        self._closer = weakref.finalize(self, _deactivate, self._runner)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Which machine code or PTX of the plugin library was loaded, a line a kernel; complete after a run."""
        library = mapped_library(self.facts.plugin)
        return () if library is None else loaded_kernels(library)

    def _execute(self, inputs: Arrays) -> Arrays:
        from polygraphy.exception import PolygraphyException

        self._messages.clear()
        use_device(self.device)  # the thread may be another than the one that opened it
        self._choose_profile(inputs)
        try:
            results = self._runner.infer(feed_dict=inputs, check_inputs=False)
        except PolygraphyException as error:
            raise UsageError(
                f"{self._source} did not run on these inputs.",
                why=self._messages.reason(error),
                fix="Check that the shapes lie within the sizes it was built for: localattn inspect shows them.",
            ) from error
        # Copies, because the runner writes the next results into the same host memory.
        return {spec.name: np.array(results[spec.name], copy=True) for spec in self.outputs}

    def _choose_profile(self, inputs: Arrays) -> None:
        """Switch to the optimization profile that these sizes fit, if the engine has several.

        Of those that fit it is the one with the smallest largest sizes, which was tuned nearest to them.

        Raises:
            UsageError: they fit none.
        """
        numbers = sorted({profile.profile for profile in self.facts.options.profiles})
        if len(numbers) < 2:
            return
        fitting = [number for number in numbers if self._fits(number, inputs)]
        if not fitting:
            sizes = "; ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
            raise UsageError(
                f"{self._source} was not built for these sizes.",
                why=f"They are {sizes}, and lie in none of its {len(numbers)} profiles.",
                fix="localattn inspect shows the sizes of each.",
            )
        chosen = min(fitting, key=self._largest)
        if chosen != self._profile:
            self._runner.set_profile(chosen)
            self._profile = chosen

    def _fits(self, number: int, inputs: Arrays) -> bool:
        ranges = [profile for profile in self.facts.options.profiles if profile.profile == number]
        return all(
            low <= size <= high
            for profile in ranges
            for low, size, high in zip(profile.min, inputs[profile.input].shape, profile.max, strict=True)
        )

    def _largest(self, number: int) -> int:
        return sum(prod(profile.max) for profile in self.facts.options.profiles if profile.profile == number)

    def close(self) -> None:
        """Free the GPU memory; the session cannot run any more."""
        self._closer()


def _deactivate(runner: Any) -> None:
    if runner.is_active:
        runner.deactivate()


def open_file(path: Path, provider: str = "auto", threads: int | None = None, plugin: str = "auto") -> EngineSession:
    """Open an engine; `plugin` as in `open_engine`.

    Raises:
        UsageError: a provider other than the GPU, a number of threads, or what `open_engine` refuses.
        MissingDependency: the library, the driver or the plugin library is missing.
        CheckFailed: the facts or the plugin library were changed after the build.
    """
    gpu = check_place(path, provider, threads)
    return EngineSession(open_engine(path, plugin, gpu), str(path))


def check_place(path: Path, provider: str, threads: int | None) -> int:
    """Refuse to run an engine anywhere but on a GPU; return which: 1 for "cuda:1".

    Raises:
        UsageError: another provider, or a number of threads.
    """
    numbered = re.fullmatch(r"cuda:(\d{1,3})", provider)
    if provider not in _PROVIDERS and numbered is None:
        raise UsageError(f"{path} cannot run on {provider!r}.", why="An engine runs on the GPU it was built for.")
    if threads is not None:
        raise UsageError(f"{path} takes no number of threads.", why="An engine runs on the GPU.")
    return 0 if numbered is None else int(numbered[1])
