"""An exported model on disk: the file, large weights beside it, and the facts both pipelines record about it."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx
import onnx_ir as ir

from ...core.documents.sidecar import CheckRecord, Sidecar, WindowFacts, sidecar_path
from ...core.errors import CheckFailed
from ...core.machine.resident_memory import release_memory
from ...core.nodes.attention import DOMAIN, geometry_of
from ...core.storage.files import sha256
from ...core.storage.publishing import publish_together, sealed
from ...core.tensors import TensorSpec
from ..checks.loads import check_model
from .serialize import forget_weights, write_model

# A protobuf message ends at 2 GiB; some room is left for the graph itself.
EXTERNAL_DATA_FROM = 1_900_000_000
_PACKAGES = ("localattn", "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


def save_model(model: ir.Model, path: Path, external_data_from: int) -> str | None:
    """Write the model, large weights beside it; the name of that file, if there is one.

    Its name carries a fingerprint of the weights, so that an older model keeps its own until the new
    one is in place.
    """
    weights = sum(x.const_value.nbytes for x in model.graph.initializers.values() if x.const_value is not None)
    if weights < external_data_from:
        write_model(model, path)
        return None
    temporary = path.parent / "weights"
    ir.save(model, path, external_data=temporary.name)
    name = f"{path.name}.{sha256(temporary)[:12]}.data"
    temporary.rename(path.parent / name)
    written = onnx.load(path, load_external_data=False)
    for tensor in written.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    onnx.save(written, path)
    return name


def demand(records: Iterable[CheckRecord], mapped: Path | None = None) -> list[CheckRecord]:
    """The records of checks that run one after the other, up to the first that fails.

    The memory of each, and the pages of the checkpoint `mapped`, are given back before the next.

    Raises:
        CheckFailed: that one.
    """
    passed = []
    for record in records:
        release_memory(mapped)
        if record.status == "failed":
            raise CheckFailed(
                f"The exported file failed its check: {record.name}.",
                why=record.detail,
                fix="Nothing was written. Run again with -v for more, or report the model's configuration.",
            )
        passed.append(record)
    return passed


def finish_export(
    model: ir.Model,
    folder: Path,
    output: Path,
    *,
    function_body: bool,
    external_data_from: int,
    check: Callable[[Path], Iterable[CheckRecord]],
    describe: Callable[[Path, str | None, list[CheckRecord]], Sidecar],
    progress: Callable[[str], None],
    mapped: Path | None = None,
) -> Sidecar:
    """Save a traced model, check it, describe it, and move it to its place.

    Args:
        model: with its function bodies; without `function_body` they are removed, after the checks. With it the model's
            weights are gone once they are written.
        folder: the staging folder of `output`.
        output: the ONNX file to write.
        function_body: the file carries the attention node's function.
        external_data_from: bytes of weights from which they go into a file of their own.
        check: runs the checks of the saved file.
        describe: the sidecar, from the saved file, the name of its external data and the checks.
        progress: told each step as it begins.
        mapped: the checkpoint, whose pages need not stay in memory.

    Raises:
        CheckFailed: a check found a fault; nothing was published.
    """
    staged = folder / output.name
    data = save_model(model, staged, external_data_from)
    if function_body:
        forget_weights(model)
    gc.collect()  # the traced program is full of cycles
    release_memory(mapped)
    checks = demand(check(staged), mapped)
    if not function_body:
        progress("Removing the function body")
        drop_attention_bodies(model)
        data = save_model(model, staged, external_data_from)
        bare = {"name": "onnx checker, no body", "detail": "checked above with the body attached"}
        checks.append(check_model(staged).model_copy(update=bare))
    progress("Writing")
    sidecar = describe(staged, data, checks)
    publish_model(staged, data, sidecar, output)
    return sidecar


def drop_attention_bodies(model: ir.Model) -> None:
    """Leave the attention nodes to plugins, in place; nothing else computes the nodes of the other functions."""
    for identifier in [key for key, body in model.functions.items() if body.domain == DOMAIN]:
        del model.functions[identifier]


def publish_model(staged: Path, data: str | None, sidecar: Sidecar, output: Path) -> None:
    """Move a checked model and what belongs to it to its place."""
    publish_models([(staged, sidecar, output)], [] if data is None else [data])


def publish_models(models: Sequence[tuple[Path, Sidecar, Path]], data: Sequence[str]) -> None:
    """Move checked models that belong together to their places at one moment.

    Args:
        models: each staged file, its facts and its place; the main one last. All are staged in one folder.
        data: names of the files of weights, staged with them.
    """
    folder, place = models[0][0].parent, models[0][2].parent
    files = {folder / name: place / name for name in data}
    for staged, sidecar, output in models:
        described = sidecar_path(staged)
        described.write_text(sealed(sidecar.to_json()), encoding="utf-8")
        files |= {described: sidecar_path(output), staged: output}
    publish_together(files, folder)


def window_facts(node: ir.Node) -> WindowFacts:
    """What the sidecar says of one attention node."""
    geometry = geometry_of({name: attribute.value for name, attribute in node.attributes.items()})
    return WindowFacts(name=node.name or "", op_type=node.op_type, **asdict(geometry))


def output_specs(model: ir.Model) -> list[TensorSpec]:
    """Names, element types and shapes of a graph's outputs; open dimensions by name."""
    return [
        TensorSpec(
            x.name or "",
            x.dtype.numpy().name,  # type: ignore[union-attr]
            tuple(size if isinstance(size, int) else str(size.value or "?") for size in x.shape),  # type: ignore[union-attr]
        )
        for x in model.graph.outputs
    ]


def package_versions(others: Sequence[str] = ()) -> dict[str, str]:
    """Releases of what took part, and of others; one may be installed under another name (onnxruntime-gpu)."""
    found = {"python": platform.python_version()}
    for package in (*_PACKAGES, *others):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
