"""Write exported models: the file, its external weights, and its sidecar."""

from __future__ import annotations

import gc
import logging
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from ...core.documents.proof import GOLDEN_CHECK
from ...core.documents.sidecar import PARITY, CheckRecord, Sidecar, sidecar_path
from ...core.error_texts import argument
from ...core.errors import CheckFailed
from ...core.machine.resident_memory import release_memory
from ...core.nodes.aft import AFT_VARIANT_BY_OP_TYPE
from ...core.nodes.attention import DOMAIN
from ...core.storage.files import sha256
from ...core.storage.publishing import publish_together, sealed
from ...core.tensors import TensorSpec
from ...core.versions import installed
from ...onnx_graph.graph_values import outside_weights
from ..checks.checked_file import CheckedFile
from ..checks.loads import check_model
from ..checks.table import run_checks, way_to_accept
from .form import FileOptions, WrittenForm
from .serialize import forget_weights, write_model
from .shared_weights import share_weights

_log = logging.getLogger(__name__)

_PACKAGES = ("localattn", "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


# Advice for a failed check.
_WIDER = f"To accept this difference, raise {argument('atol')} or {argument('rtol')}."
_REPORT = "Run again with -v for details, and report the model's configuration."


def held_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """List the initializers of a model's graphs that have a value."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    return (value.const_value for value in values if value.const_value is not None)


def save_model(model: ir.Model, path: Path, external_data_from: int, shared: str | None = None) -> str | None:
    """Write the model and, if needed, a file of external weights; return the name of that file.

    Its name carries a fingerprint of the weights, so that an older model keeps its own until the new
    one is in place. Weights that are in a `shared` file stay there.
    """
    if shared is not None:
        ir.save(model, path)
        return shared
    if sum(tensor.nbytes for tensor in held_tensors(model)) < external_data_from:
        write_model(model, path)
        return None
    temporary = path.parent / "weights"
    ir.save(model, path, external_data=temporary.name)
    name = f"{path.name}.{sha256(temporary)[:12]}.data"
    temporary.rename(path.parent / name)
    written = onnx.load(path, load_external_data=False)
    for tensor in outside_weights(written):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    onnx.save(written, path)
    return name


def companion_path(step: Path) -> Path:
    """Return the path of a step file's chunk file: `model_step.onnx` → `model_step.prefill.onnx`."""
    return step.with_name(f"{step.stem}.prefill{step.suffix}")


def demand(records: Iterable[CheckRecord], mapped: Path | None = None) -> list[CheckRecord]:
    """Run checks one after the other, and return their records, that of golden outputs first.

    The memory of each check, and the pages of the checkpoint `mapped`, are released before the next one.

    Raises:
        CheckFailed: a check failed; the later ones are not run.
    """
    passed = []
    for record in records:
        release_memory(mapped)
        _log.info("check %s: %s: %s", record.name, record.status, record.detail)
        if record.status == "failed":
            raise CheckFailed(
                f"The exported file failed its check: {record.name}.",
                why=record.detail,
                fix=f"Nothing was written. {_advice(record.name)}",
            )
        passed.append(record)
    return sorted(passed, key=lambda record: record.name != GOLDEN_CHECK)


def _advice(check: str) -> str:
    """Say what to do about a failed check."""
    accepted_by = way_to_accept(check)
    if accepted_by:
        return f"To accept this, add {argument(accepted_by, True)}."
    return _WIDER if check == PARITY else _REPORT


@dataclass(frozen=True)
class Part:
    """One file of an export.

    Args:
        path: its final path.
        form: the traced model with its ONNX functions; with `function_body` its weights are dropped once written.
        checked: returns the saved file as its checks see it.
        describe: returns the model's sidecar, from the records of the checks.
    """

    path: Path
    form: WrittenForm
    checked: Callable[[Path], CheckedFile]
    describe: Callable[[list[CheckRecord]], Mapping[str, Any]]


def finish_export(
    parts: Sequence[Part],
    folder: Path,
    options: FileOptions,
    progress: Callable[[str], None],
    mapped: Path | None = None,
) -> list[Sidecar]:
    """Save traced models, check and describe them, and publish them at one moment.

    Args:
        parts: the files, the requested one first; several have their weights in one file.
        folder: the staging folder.
        options: options of the files; without `function_body` the functions of the attention nodes are removed after
            the checks, so that a plugin must compute these nodes.
        progress: called with the name of each step as it begins.
        mapped: the memory-mapped checkpoint, whose pages need not stay in memory.

    Raises:
        CheckFailed: a check found a fault; nothing was published.
    """
    models = {folder / part.path.name: part.form.model for part in parts}
    shared = share_weights([*models.values()], folder, parts[0].path.name) if len(parts) > 1 else None

    def save() -> list[str | None]:
        return [save_model(model, staged, options.external_data_from, shared) for staged, model in models.items()]

    data = save()
    if options.function_body:
        for model in models.values():
            forget_weights(model)
    gc.collect()  # the traced program is full of cycles
    release_memory(mapped)
    checks = [demand(run_checks(part.checked(staged)), mapped) for part, staged in zip(parts, models, strict=True)]
    if not options.function_body:
        progress("Removing the function definition")
        for model in models.values():
            _drop_attention_functions(model)
        data = save()
        bare = {"name": "onnx checker, no functions", "detail": "already checked, before the functions were removed"}
        for staged, records in zip(models, checks, strict=True):
            records.append(check_model(staged).model_copy(update=bare))
    progress("Writing")
    written = [
        (staged, _sidecar(part, options, staged, name, records), part.path)
        for part, staged, name, records in zip(parts, models, data, checks, strict=True)
    ]
    publish_models(written[::-1], sorted({name for name in data if name is not None}))
    return [sidecar for _, sidecar, _ in written]


def _drop_attention_functions(model: ir.Model) -> None:
    """Remove the ONNX functions of the attention nodes in place; no plugin computes the nodes of other functions."""
    for identifier, function in list(model.functions.items()):
        if function.domain == DOMAIN and function.name not in AFT_VARIANT_BY_OP_TYPE:
            del model.functions[identifier]


def publish_models(models: Sequence[tuple[Path, Sidecar, Path]], data: Sequence[str]) -> None:
    """Publish checked models that belong together at one moment.

    Args:
        models: each staged file, its sidecar and its final path; the main one last. All are staged in one folder.
        data: names of the files of weights in the same staging folder.
    """
    folder, place = models[0][0].parent, models[0][2].parent
    files = {folder / name: place / name for name in data}
    for staged, sidecar, output in models:
        described = sidecar_path(staged)
        described.write_text(sealed(sidecar.to_json()), encoding="utf-8")
        files |= {described: sidecar_path(output), staged: output}
    publish_together(files, folder)


def _sidecar(part: Part, options: FileOptions, staged: Path, data: str | None, checks: list[CheckRecord]) -> Sidecar:
    """Build the sidecar of a written file of any kind."""
    facts: dict[str, Any] = {
        "outputs": output_specs(part.form.model),
        "opset": options.opset,
        "windows": part.form.windows,
        "function_body": options.function_body,
        "standard_ops": options.standard_ops,
        "external_data": data,
        "versions": package_versions(),
        "model_sha256": sha256(staged),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "checks": checks,
    }
    return Sidecar(**facts, **part.describe(checks))


def output_specs(model: ir.Model) -> list[TensorSpec]:
    """List the names, element types and shapes of a graph's outputs, with dynamic dimensions by name."""
    return [
        TensorSpec(
            x.name or "",
            x.dtype.numpy().name,  # type: ignore[union-attr]
            tuple(size if isinstance(size, int) else str(size.value or "?") for size in x.shape),  # type: ignore[union-attr]
        )
        for x in model.graph.outputs
    ]


def package_versions() -> dict[str, str]:
    """Return the installed versions of Python and of the packages that took part."""
    return {"python": platform.python_version(), **installed(_PACKAGES)}
