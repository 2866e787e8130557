"""One complete configuration out of a state dict, a partial config and the user's overrides.

The weights tell what their shapes tell; the config only adds what they cannot (the window, `causal`,
...). The two may overlap but not disagree. Names are brought to local-attention 1.11.2's form, with
`.branch.` inside every layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...core.error_texts import shown
from ...core.errors import UsageError
from ..models.arguments import Arguments
from ..models.inference import INV_FREQ, Findings, TensorShapes, bounded
from ..models.registry import CLASSES, ClassEntry, detect_family
from .config import RawConfig, adds_residual_only, check_names, resolve_class

if TYPE_CHECKING:
    import torch

__all__ = ["Resolved", "canonical_state", "infer_config"]

# `layers.3.0.to_qkv.weight`, as local-attention saved it before 1.10.
_UNBRANCHED = re.compile(r"(layers\.[0-9]+\.[01]\.)(.+)")
# Arguments that change the result and leave no trace in any shape.
_SILENT = (
    "window_size",
    "local_attn_window_size",
    "causal",
    "exact_windowsize",
    "look_backward",
    "look_forward",
    "shared_qk",
    "autopad",
    "scale",
    "dim",
    "heads",
    "dim_head",
    "use_xpos",
)


@dataclass(frozen=True)
class Resolved:
    """A checkpoint that is fully understood.

    Args:
        class_name: a key of `CLASSES`.
        args: every argument of its constructor.
        hyper_connections: the release it was trained with, or None for today's behaviour.
        state: the tensors under local-attention 1.11.2's names.
        inferred: arguments the weights told, each with the tensor that did.
        notes: what was assumed or renamed, one line each.
        missing: names the class has and the checkpoint lacks; never rotary frequencies, which have a formula.
        unexpected: names the checkpoint has and the class lacks.
    """

    class_name: str
    args: Arguments
    hyper_connections: str | None
    state: dict[str, torch.Tensor]
    inferred: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    def check_keys(self) -> None:
        """Refuse a checkpoint that does not hold exactly the class' tensors.

        Raises:
            UsageError: tensors are missing, or there are unexpected ones.
        """
        for names, verb in ((self.missing, "lacks"), (self.unexpected, "has unexpected")):
            if names:
                raise UsageError(
                    f"The checkpoint {verb} {len(names)} tensors: {bounded(names)}.",
                    why=f"They do not fit {self.class_name} with this configuration.",
                    fix="Check the config, and that the whole state dict of the model alone was saved.",
                )


def canonical_state(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The state under 1.11.2's names, and a note if it had older ones."""
    if any(name.startswith("layers.") and ".branch." in name for name in state):
        return dict(state), []
    renamed = {_UNBRANCHED.sub(r"\1branch.\2", name): tensor for name, tensor in state.items()}
    if renamed.keys() == state.keys():
        return renamed, []
    return renamed, ["names from before local-attention 1.10: '.branch.' added inside every layer"]


def infer_config(
    state: Mapping[str, torch.Tensor],
    config: RawConfig | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Resolved:
    """Complete a configuration from the weights.

    Args:
        state: name to tensor; the shapes are looked at, and of few tensors the values.
        config: what is known about the model, or None.
        overrides: arguments that replace the config's; `class` and `hyper_connections` too.

    Raises:
        UsageError: of no supported class, something the weights do not tell is not given, or what is
            given contradicts them.
    """
    given = dict(config.kwargs if config else {}) | dict(overrides or {})
    class_name = given.pop("class", config.class_name if config else None)
    release = given.pop("hyper_connections", config.hyper_connections if config else None)
    adds_residual_only(release)  # only to refuse what is not a version
    canonical, notes = canonical_state(state)
    shapes = {name: tuple(tensor.shape) for name, tensor in canonical.items()}
    entry = _entry(class_name, shapes)
    given = check_names(entry, given)
    findings = entry.family.infer_arguments(shapes, given) | entry.family.infer_values(canonical)
    _check_given(entry, given, findings, shapes, relies_on_defaults=config is not None)
    # What zeta's LocalMHA lacks stays off; tensors that say otherwise are listed as unexpected.
    values = {name: told.value for name, told in findings.items() if name not in entry.unsupported} | given
    values |= entry.family.follow(values)
    args = entry.args(**values)
    expected = entry.family.expected_shapes(args)
    _check_findings(given, args, findings, shapes, expected)
    _check_shapes(shapes, expected)
    absent = [name for name in expected if name not in shapes]
    missing = [name for name in absent if not name.endswith(INV_FREQ)]
    notes += _assumptions(entry, args, set(values), release, buffers_absent=len(absent) > len(missing))
    return Resolved(
        class_name=entry.name,
        args=args,
        hyper_connections=release,
        state=canonical,
        inferred={name: found.how for name, found in findings.items() if name not in given},
        notes=notes,
        missing=missing,
        unexpected=[name for name in shapes if name not in expected],
    )


def _entry(class_name: object, shapes: TensorShapes) -> ClassEntry:
    """The class that is given, or the one the names tell."""
    family = detect_family(shapes)
    detected = CLASSES[family.classes[0].name]
    if class_name is None:
        return detected
    entry = resolve_class(class_name)
    if entry.family is not family:
        raise UsageError(
            f"The class is given as {entry.name}, but the weights are of a {detected.name.split('.')[1]}.",
            why=f"The checkpoint has {bounded(list(shapes), 3) or 'no tensors'}.",
            fix="Correct the class, or leave it out.",
        )
    return entry


def _check_given(
    entry: ClassEntry,
    given: Mapping[str, Any],
    findings: Findings,
    shapes: TensorShapes,
    relies_on_defaults: bool,
) -> None:
    """Refuse to guess what no shape tells.

    A config stands for the constructor call, so what it leaves out has upstream's default; without
    one the window would be a guess that no later check could catch.
    """
    window = entry.family.window_argument
    has_default = not entry.args.model_fields[window].is_required()
    if window not in {**findings, **given} and not (has_default and relies_on_defaults):
        raise _untold(entry, window, 128)
    if "heads" not in entry.args.model_fields or "heads" in {**findings, **given}:
        return
    to_qkv = next(name for name in shapes if name.endswith("to_qkv.weight"))
    fields = entry.args.model_fields
    default_width = fields["heads"].default * fields["dim_head"].default
    if not relies_on_defaults or shapes[to_qkv][0] != 3 * default_width:
        raise _untold(entry, "heads", 8)


def _untold(entry: ClassEntry, name: str, example: int) -> UsageError:
    return UsageError(
        f"{entry.name} needs {name}, and the weights do not tell it.",
        why="It leaves no trace in the tensors' shapes; guessed wrong, the model would run and be wrong.",
        fix=f'In a config: {{"class": "{entry.name}", "kwargs": {{"{name}": {example}}}}}',
    )


def _check_findings(
    given: Mapping[str, Any], args: Arguments, findings: Findings, shapes: TensorShapes, expected: TensorShapes
) -> None:
    """Refuse an argument that the weights contradict."""
    for name, told in findings.items():
        if name not in given or getattr(args, name, told.value) == told.value:
            continue
        found = list(shapes[told.key]) if told.key in shapes else "absent"
        wanted = list(expected[told.key]) if told.key in expected else "absent"
        raise UsageError(
            f"{name} is given as {shown(given[name])}, but the weights say {shown(told.value)}.",
            why=f"{told.how}." if found == wanted else f"{told.key}: found {found}, expected {wanted}.",
            fix=f"Correct {name}, or leave it out.",
        )


def _check_shapes(shapes: TensorShapes, expected: TensorShapes) -> None:
    """Refuse tensors that do not fit each other."""
    wrong = [name for name, shape in expected.items() if name in shapes and shapes[name] != shape]
    if wrong:
        first = wrong[0]
        raise UsageError(
            f"{first}: found {list(shapes[first])}, expected {list(expected[first])}.",
            why=f"{len(wrong)} tensors do not fit the others and the config: {bounded(wrong)}.",
            fix="Check the config, and that the checkpoint is of one model.",
        )


def _assumptions(
    entry: ClassEntry, args: Arguments, known: set[str], release: str | None, buffers_absent: bool
) -> list[str]:
    """Notes on what neither the weights nor the config said."""
    notes = []
    silent = [*_SILENT, *(["qk_scale"] if getattr(args, "qk_rmsnorm", False) else [])]
    fields, geometry = type(args).model_fields, entry.family.geometry(args)
    # The geometry shows what a default of None stands for.
    assumed = [
        f"{name} = {getattr(geometry, name, getattr(args, name))}"
        for name in silent
        if name in fields and name not in known
    ]
    if assumed:
        notes.append(f"not given, so upstream's defaults: {', '.join(assumed)}")
    if buffers_absent:
        notes.append("rotary frequencies are not in the checkpoint: 10000^(-2c/d) is used")
    elif getattr(args, "rotary_dim", 0) is None and not getattr(args, "use_dynamic_pos_bias", False):
        notes.append("rotary is off: no frequencies in the checkpoint, and no argument that turns it on")
    if getattr(args, "num_residual_streams", 1) > 1 and release is None:
        notes.append("hyper_connections is not given: residuals are mixed as in releases since 0.3.10")
    return notes
