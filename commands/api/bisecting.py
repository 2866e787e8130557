"""Define `localattn.bisect`: the first module whose output leaves the tolerance, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.error_texts import argument
from ...core.errors import UsageError
from ...core.storage.wrong_file import check_exists
from .factory_args import as_json
from .notebook import IN_NOTEBOOKS
from .packages import packages_named
from .paths import as_path

if TYPE_CHECKING:
    from ...exporter.bisect.request import BisectReport

Progress = Callable[[str], None]


def bisect(
    model: str | Path,
    against: str | Path | None = None,
    *,
    config: str | Path | None = None,
    entry: str | None = None,
    factory: str | None = None,
    factory_args: str | Mapping[str, Any] | None = None,
    seed: int = 0,
    inputs: str | Path | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    provider: str = "auto",
    plugin: str | Path = "auto",
    progress: Progress = IN_NOTEBOOKS,
) -> BisectReport:
    """Compare a file with a float64 run of its model wherever a module begins or ends.

    Args:
        model: the file, or an engine in the folder of the file it was built from.
        against: the checkpoint; None where a `factory` makes the weights too.
        config: the checkpoint's configuration; by default the sidecar's, else the one in the checkpoint's folder.
        entry: the set of weights, where the checkpoint holds several; by default the one that was exported.
        factory: a function that makes your own module; by default the one of the export, where your own cache
            remembers it.
        factory_args: its keyword arguments; by default those of the export.
        seed: of the random inputs.
        inputs: an .npz of inputs instead.
        atol: absolute tolerance, in units of each value's root mean square; by default the element type's.
        rtol: relative tolerance; by default the element type's.
        provider: where to run the file.
        plugin: the plugin library that an engine was built with.
        progress: called with each step as it begins.

    Returns:
        The report; `passed` is True where all boundaries agree, else `fault` is the first that does not.

    Raises:
        UsageError: a file cannot be read, the two do not belong together, or the file names no modules.
        MissingDependency: a package, or the provider asked for, is not there.

    Examples:
        >>> localattn.bisect("model.onnx", "model.pt").passed
        True
    """
    if against is None and factory is None:
        raise UsageError(
            "There is nothing to compare with.", fix=f"Give {argument('against')}, or {argument('factory')}, or both."
        )
    if against is not None:
        check_exists(Path(against))
    with packages_named():
        from ...exporter.bisect.bisect import run_bisect
        from ...exporter.bisect.request import BisectRequest

    request = BisectRequest(
        model=Path(model),
        checkpoint=as_path(against),
        config=as_path(config),
        seed=seed,
        inputs=as_path(inputs),
        atol=atol,
        rtol=rtol,
        provider=provider,
        plugin=str(plugin),
        entry=entry,
        factory=factory,
        factory_args=as_json(factory_args),
    )
    return run_bisect(request, progress)
