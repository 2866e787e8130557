"""Define `localattn.parity`: whether a file computes the same as its checkpoint, another file, or your model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.error_texts import argument
from ...core.errors import MissingDependency, UsageError
from ...core.storage.wrong_file import check_exists
from .factory_args import as_json
from .notebook import IN_NOTEBOOKS
from .packages import missing_package
from .paths import as_path

if TYPE_CHECKING:
    from ...runtime.parity.report import ParityReport, ParityRequest

Progress = Callable[[str], None]


def parity(
    model: str | Path,
    against: str | Path | None = None,
    *,
    golden: str | Path | None = None,
    config: str | Path | None = None,
    entry: str | None = None,
    factory: str | None = None,
    factory_args: str | Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    inputs: str | Path | None = None,
    seq_len: Sequence[int] = (),
    causal: bool | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    provider: str = "auto",
    plugin: str | Path = "auto",
    runtime: str = "auto",
    save_inputs: str | Path | None = None,
    save_outputs: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress = IN_NOTEBOOKS,
) -> ParityReport:
    """Compare an exported file or engine with a reference; at least one of `against` and `golden` is needed.

    Args:
        model: the file.
        against: the checkpoint, whose float64 reference needs PyTorch; or another exported file, which does not.
        golden: an .npz that `record` wrote: what your own model computed.
        config: the checkpoint's configuration; by default the sidecar's, else the one in the checkpoint's folder.
        entry: the set of weights, where the checkpoint holds several; by default the one that was exported.
        factory: a function that makes your own module, `package.module:function` or `file.py:function`; `against` has
            its weights. By default the one of the export, where your own cache remembers it.
        factory_args: its keyword arguments; by default those of the export.
        seeds: each gives one set of inputs at the largest size: text, or random ones.
        inputs: an .npz of inputs instead.
        seq_len: lengths to compare at, for a dynamic axis; by default around the window.
        causal: for AFTLocal: how it was exported; by default as the sidecar says.
        atol: absolute tolerance; by default the element type's.
        rtol: relative tolerance; by default the element type's.
        provider: where to run the file: "auto", "cpu", "cuda" or "tensorrt".
        plugin: compiled kernels: "auto", "none", or the path of a library.
        runtime: what runs an ONNX file: "auto" (onnxruntime) or "openvino".
        save_inputs: write the worst inputs to this .npz.
        save_outputs: write the outputs for them to this .npz; NAME.reference is the reference's.
        overwrite: replace existing files.
        progress: called with each step as it begins.

    Returns:
        The report, also where they differ; `passed` is True where they are equal.

    Raises:
        UsageError: a file cannot be read, or the two do not belong together.
        CheckFailed: an output is missing or has another shape than the reference's.
        MissingDependency: a package, or the provider asked for, is not there.

    Examples:
        >>> report = localattn.parity("model.onnx", golden="golden.npz")
        >>> report.passed
        True
    """
    from ...runtime.parity.report import ParityRequest

    reference = against
    if reference is None:
        reference = golden if factory is None else factory
    if reference is None:
        raise UsageError(
            "The command needs something to compare with.",
            fix=f"Give {argument('against')}, or {argument('golden')}, or both.",
        )
    request = ParityRequest(
        model=Path(model),
        against=Path(reference),
        golden=as_path(golden),
        config=as_path(config),
        seeds=tuple(seeds),
        inputs=as_path(inputs),
        lengths=tuple(seq_len),
        atol=atol,
        rtol=rtol,
        provider=provider,
        plugin=str(plugin),
        runtime=runtime,
        causal=causal,
        keep_reference=save_outputs is not None,
        entry=entry,
        factory=factory,
        factory_args=as_json(factory_args),
    )
    report = _comparison(request, progress)(request, progress)
    report.save(as_path(save_inputs), as_path(save_outputs), overwrite=overwrite)
    return report


def _comparison(request: ParityRequest, progress: Progress) -> Callable[[ParityRequest, Progress], ParityReport]:
    """Choose the comparison for a reference: files that a backend runs are exported, all others checkpoints.

    Raises:
        MissingDependency: the reference is a checkpoint, and PyTorch is not installed.
    """
    from ...runtime.backends import registry
    from ...runtime.parity.files import run_file_parity, run_golden_parity

    if request.against == request.golden:
        return run_golden_parity
    if request.factory is None and request.against.suffix.lower() == ".npz":
        raise UsageError(
            f"{request.against} holds arrays, and no weights.",
            why="What localattn.record wrote is compared by another option.",
            fix=f"Give it as {argument('golden', str(request.against))}.",
        )
    if registry.of_file(request.against) is not None:
        return run_file_parity
    if str(request.against) != request.factory:
        check_exists(request.against)
    progress("Loading PyTorch")
    try:
        from ...exporter.parity import run_parity
    except ModuleNotFoundError as error:
        lacking = missing_package(error)
        if lacking is None:
            raise
        other = argument("against", "model.onnx")
        fix = f"{lacking.fix} Or compare with an exported file, which needs no PyTorch: {other}."
        raise MissingDependency(lacking.what, why=lacking.why, fix=fix) from error
    return run_parity
