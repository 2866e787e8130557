"""Define the schema of `model.onnx.json`, the sidecar of every exported model.

An artefact's metadata lives here and never inside the artefact, so that the model stays a plain ONNX
file. Importing this module imports pydantic: light modules import it inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator

from ..errors import UsageError
from ..geometry import WindowGeometry
from ..storage.publishing import MAX_BYTES, SEAL, check_seal, sidecar_path
from ..storage.reading import read_plain
from ..tensors import TensorSpec
from ..tolerance import Baseline
from .schema import Record
from .step_record import StepRecord

__all__ = [
    "PARITY",
    "CheckRecord",
    "LayerRecord",
    "Sidecar",
    "TensorSpec",
    "WindowRecord",
    "class_title",
    "first_problem",
    "parse_sidecar",
    "read_sidecar",
    "sidecar_path",
]

_Sidecar = TypeVar("_Sidecar", bound=BaseModel)

# The check of an export that compares the written file with a reference.
PARITY = "parity"


# The four outcomes of a check.
Outcome = Literal["passed", "failed", "not proven", "skipped"]


class WindowRecord(Record):
    """The window of one windowed attention node."""

    name: str
    op_type: str
    window_size: int = Field(ge=1)
    look_backward: int = Field(ge=0)
    look_forward: int = Field(ge=0)
    causal: bool
    exact_windowsize: bool

    @property
    def sees_all(self) -> bool:
        """Whether the node has no window: it sees all keys."""
        names = WindowGeometry.__dataclass_fields__
        return WindowGeometry(**{name: getattr(self, name) for name in names}).sees_all


class LayerRecord(Record):
    """What happened to one upstream layer of a user's own module.

    `detail` is its window if it was replaced, else the reason why it was not.
    """

    path: str
    class_name: str = Field(validation_alias="class", serialization_alias="class")
    replaced: bool
    detail: str = ""


class CheckRecord(Record):
    """The result of one check.

    `not proven` means that the check ran and could not decide; `skipped` that it did not run. `baseline` is what a
    comparison in half precision measured of the untouched module.
    """

    name: str
    status: Outcome
    detail: str = ""
    figures: dict[str, float | int | str] = Field(default_factory=dict)
    baseline: Baseline | None = None


def class_title(class_name: str, kwargs: Mapping[str, Any]) -> str:
    """Return a class in words; for a Hugging Face model, its architecture."""
    architecture = kwargs.get("architecture")
    return f"transformers.{architecture}" if isinstance(architecture, str) else class_name


# Options of an export by the names that files of older releases have → today's names.
_OLD_OPTIONS = {"weights": "weight_dtype", "attention": "attention_dtype"}


class Sidecar(Record):
    """The sidecar of an exported model.

    Args:
        format: always "localattn-sidecar".
        format_version: 1; a reader refuses other versions.
        class_name: the exported class ("local_attention.LocalTransformer"), or the function that made the module
            ("package.module:function"); JSON key `class`.
        kwargs: its arguments.
        hyper_connections: release of hyper-connections whose numbers the export reproduces.
        options: options of the export that differ from their defaults, by their names (`exporter/options.py`).
        inputs: inputs of the graph, in order.
        outputs: outputs of the graph, in order.
        seq_len: tokens a sequence; where the length is dynamic, the longest.
        batch: sequences a call; where it is dynamic, that of the example.
        dynamic: names of the dynamic axes; none in a file with static shapes.
        dtype: element type of the weights and activations.
        opset: version of the standard operators.
        windows: one entry per windowed attention node.
        layers: one entry per upstream layer of a user's own module.
        step: how a step graph is called; None for a file that takes whole sequences.
        function_body: the file contains the node's ONNX function in standard operators.
        standard_ops: the file has standard operators only; `windows` describe the nodes that they replaced.
        external_data: name of the file in the model's folder that holds the weights.
        versions: release of each package that took part.
        checkpoint_sha256: SHA-256 of the checkpoint; "" where a function made the weights too.
        checkpoint_name: its file name.
        token_limits: one more than the largest token of each input of integers, where a user's own module shows it.
        factory_sha256: SHA-256 of the file that defines the function that made the module; "" for other models.
        model_sha256: SHA-256 of the ONNX file, without external data.
        created: time of the export, ISO 8601.
        checks: the results of the checks.
        unproven: arguments that the weights do not show and no golden outputs proved.
    """

    format: Literal["localattn-sidecar"] = "localattn-sidecar"
    format_version: Literal[1] = 1
    class_name: str = Field(validation_alias="class", serialization_alias="class")
    kwargs: dict[str, Any]
    hyper_connections: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    seq_len: int = Field(ge=1)
    batch: int = Field(ge=1)
    dynamic: list[str] = Field(default_factory=list)
    dtype: Literal["fp32", "fp16", "bf16"]
    opset: int = Field(ge=1)
    windows: list[WindowRecord] = Field(default_factory=list)
    layers: list[LayerRecord] = Field(default_factory=list)
    step: StepRecord | None = None
    function_body: bool
    standard_ops: bool = False
    external_data: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    token_limits: dict[str, int] = Field(default_factory=dict)
    checkpoint_sha256: str
    checkpoint_name: str
    factory_sha256: str = ""
    model_sha256: str
    created: str
    checks: list[CheckRecord] = Field(default_factory=list)
    unproven: list[str] = Field(default_factory=list)

    @field_validator("options", mode="before")
    @classmethod
    def _rename_old_options(cls, options: object) -> object:
        """Give options of older releases today's names."""
        if not isinstance(options, dict):
            return options
        return {_OLD_OPTIONS.get(name, name): value for name, value in options.items()}

    @property
    def title(self) -> str:
        """The class in words."""
        return class_title(self.class_name, self.kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the sidecar as JSON types, under the names used in the file."""
        return self.model_dump(mode="json", by_alias=True)


def read_sidecar(model: Path) -> Sidecar | None:
    """Read the sidecar of a model; None if there is none.

    Raises:
        UsageError: the sidecar is there but is not one; the first problem is named.
        CheckFailed: it was altered after it was written.
    """
    path = sidecar_path(model)
    try:
        text = read_plain(path, MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _broken(path, error.strerror or str(error)) from error
    return parse_sidecar(Sidecar, path, text, partial(_broken, path))


def parse_sidecar(schema: type[_Sidecar], path: Path, text: bytes, broken: Callable[[str], UsageError]) -> _Sidecar:
    """Parse the text of a sidecar, and check its seal.

    Args:
        schema: the schema that the text must fit.
        path: the file, for errors.
        text: its content; of a file that is too large, at least one byte more than is taken.
        broken: makes the error to raise for the first problem, which it is given in a sentence.

    Raises:
        UsageError: the text does not fit; `broken` made the error.
        CheckFailed: the sidecar was changed after it was written.
    """
    if len(text) > MAX_BYTES:
        raise broken(f"It is larger than {MAX_BYTES >> 20} MiB.")
    try:
        parsed = schema.model_validate_json(text)
    except ValidationError as error:
        raise broken(first_problem(error)) from error
    check_seal(path, text)
    (parsed.model_extra or {}).pop(SEAL, None)  # the seal belongs to the bytes of the file, not to its entries
    return parsed


def first_problem(error: ValidationError) -> str:
    """Describe the first entry that does not fit the schema."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]


def _broken(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is not a localattn sidecar.", why=why, fix="Export the model again, or remove the file.")
