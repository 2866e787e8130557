"""An exported model on disk: the file, large weights next to it, and the move to their places."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from ...core.documents.sidecar import Sidecar, sidecar_path
from ...core.nodes.aft import AFT_VARIANT_BY_OP_TYPE
from ...core.nodes.attention import DOMAIN
from ...core.storage.files import sha256
from ...core.storage.publishing import publish_together, sealed
from ...core.tensors import TensorSpec
from ...core.versions import installed
from ...onnx_graph.graph_values import outside_weights
from .serialize import write_model

_PACKAGES = ("localattn", "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


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


def prefill_output(step: Path) -> Path:
    """Return the path of a step file's chunk file: `model_step.onnx` → `model_step.prefill.onnx`."""
    return step.with_name(f"{step.stem}.prefill{step.suffix}")


def drop_attention_functions(model: ir.Model) -> None:
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
