"""Define `localattn.bundle`: a model with samples, their outputs, and a check that runs on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.storage.wrong_file import check_exists
from .notebook import IN_NOTEBOOKS

if TYPE_CHECKING:
    from ...runtime.bundle.create import CreatedBundle

Progress = Callable[[str], None]


def bundle(
    model: str | Path,
    output: str | Path,
    *,
    samples: int = 2,
    seed: int = 0,
    inputs: Sequence[str | Path] = (),
    plugin_library: Sequence[str | Path] = (),
    engine: Sequence[str | Path] = (),
    atol: float | None = None,
    rtol: float | None = None,
    overwrite: bool = False,
    progress: Progress = IN_NOTEBOOKS,
) -> CreatedBundle:
    """Pack a model for a device: a tar where the name ends in .tar, else a folder.

    Args:
        model: the ONNX file; with a step file its prefill file is packed too, with a Hugging Face model what `export`
            laid beside it.
        output: the tar or folder to write.
        samples: samples to draw for each model.
        seed: of the first sample.
        inputs: .npz files to take as samples as well.
        plugin_library: libraries of plugins or of CPU kernels to include.
        engine: engines of the model to include.
        atol: absolute tolerance on the device; by default the element type's.
        rtol: relative tolerance on the device; by default the element type's.
        overwrite: replace an earlier bundle.
        progress: called with each step as it begins.

    Raises:
        UsageError: the target or one of the files cannot be used.
        CheckFailed: a file was altered after its sidecar was written, or a sample gives NaN.
        MissingDependency: onnxruntime is not installed.

    Examples:
        >>> localattn.bundle("model.onnx", "model.tar").path.name
        'model.tar'
    """
    from ...runtime.bundle.create import BundleRequest, create_bundle

    check_exists(Path(model))
    request = BundleRequest(
        model=Path(model),
        output=Path(output),
        as_tar=Path(output).suffix.lower() == ".tar",
        samples=samples,
        seed=seed,
        load_inputs=tuple(map(Path, inputs)),
        plugins=tuple(map(Path, plugin_library)),
        engines=tuple(map(Path, engine)),
        atol=atol,
        rtol=rtol,
        overwrite=overwrite,
    )
    return create_bundle(request, progress)
