"""Build a complete configuration from a state dict, a partial configuration and the user's overrides.

The shapes of the weights show most arguments. The config, and the settings that a training checkpoint holds, add those
that no shape shows (the window, `causal`, ...). They may overlap but not disagree. Names are changed to those of
local-attention 1.11.2, with `.branch.` inside every layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...core.error_texts import shown
from ...core.errors import UsageError
from ..models.arguments import Arguments
from ..models.family import expected_shapes
from ..models.forms import StateDictFamily
from ..models.inference import INV_FREQ, Findings, TensorShapes, bounded
from ..models.registry import CLASSES, ClassEntry, detect_family
from .config import RawConfig, adds_residual_only, check_names, resolve_class
from .hidden_arguments import hidden_arguments, not_in_weights
from .settings import Settings, contradiction, read_settings, reconciled, stated_classes

if TYPE_CHECKING:
    import torch

# `layers.3.0.to_qkv.weight`, as local-attention saved it before 1.10.
_UNBRANCHED = re.compile(r"(layers\.[0-9]+\.[01]\.)(.+)")
# Not an argument of the class, but the release of hyper-connections used in training.
_RELEASE = "hyper_connections"


@dataclass(frozen=True)
class Resolved:
    """A checkpoint with its complete configuration.

    Args:
        class_name: a key of `CLASSES`.
        args: every argument of its constructor.
        hyper_connections: the release it was trained with, or None for today's behaviour.
        state: the tensors under local-attention 1.11.2's names.
        inferred: arguments inferred from the weights, each with the tensor that shows it.
        own: arguments from the checkpoint's own settings, and settings that are not used.
        notes: what was assumed or renamed, one line each.
        missing: names the class has and the checkpoint lacks; never rotary frequencies, which have a formula.
        unexpected: names the checkpoint has and the class lacks.
        not_in_weights: arguments that change the outputs and that no tensor shows, given or not.
    """

    class_name: str
    args: Arguments
    hyper_connections: str | None
    state: dict[str, torch.Tensor]
    inferred: dict[str, str] = field(default_factory=dict)
    own: Settings = field(default_factory=Settings)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    not_in_weights: list[str] = field(default_factory=list)

    def check_keys(self) -> None:
        """Refuse a checkpoint that does not contain exactly the class' tensors.

        Raises:
            UsageError: tensors are missing, or there are unexpected ones.
        """
        for names, verb in ((self.missing, "lacks"), (self.unexpected, "has unexpected")):
            if names:
                raise UsageError(
                    f"The checkpoint {verb} {len(names)} tensors: {bounded(names)}.",
                    why=f"These tensors do not fit {self.class_name} with this configuration.",
                    fix="Check the configuration, and that exactly the model's state dict was saved.",
                )


def canonical_state(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Rename the tensors as in local-attention 1.11.2, and return a note if the names were older."""
    if any(name.startswith("layers.") and ".branch." in name for name in state):
        return dict(state), []
    renamed = {_UNBRANCHED.sub(r"\1branch.\2", name): tensor for name, tensor in state.items()}
    if renamed.keys() == state.keys():
        return renamed, []
    return renamed, ["names from before local-attention 1.10: '.branch.' added inside every layer"]


@dataclass(frozen=True)
class Gathered:
    """The known properties of a checkpoint's model, from all sources.

    Args:
        entry: the model's class.
        family: its family.
        given: arguments from the config, the overrides and the checkpoint's own settings.
        findings: arguments inferred from the weights.
        own: arguments from the checkpoint's own settings.
        hyper_connections: the release it was trained with, or None.
        state: the tensors under local-attention 1.11.2's names.
        shapes: the shapes of these tensors.
        notes: what was renamed.
        has_config: whether there is a config, which stands for the constructor call.
    """

    entry: ClassEntry
    family: StateDictFamily[Any]
    given: dict[str, Any]
    findings: Findings
    own: Settings
    hyper_connections: str | None
    state: dict[str, torch.Tensor]
    shapes: TensorShapes
    notes: list[str]
    has_config: bool

    @property
    def values(self) -> dict[str, Any]:
        """The known arguments by name; those that zeta's LocalMHA lacks stay off."""
        inferred = {name: found.value for name, found in self.findings.items() if name not in self.entry.unsupported}
        return inferred | self.given


def gather(
    state: Mapping[str, torch.Tensor],
    config: RawConfig | None = None,
    overrides: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Gathered:
    """Combine the weights, the configuration, the overrides and the checkpoint's own settings.

    Args:
        state: tensors by name; their shapes are used, and the values of a few.
        config: what is known about the model, or None.
        overrides: arguments that replace the config's and the checkpoint's own.
        settings: the checkpoint's own settings, as `load_state` found them.

    Raises:
        UsageError: the class is not supported, or the sources contradict each other.
    """
    has_config = config is not None
    config, overrides, settings = config or RawConfig(), overrides or {}, settings or {}
    canonical, notes = canonical_state(state)
    shapes = {name: tuple(tensor.shape) for name, tensor in canonical.items()}
    entry, family = _entry(shapes, *_class_name(config, settings))
    release = config.hyper_connections
    adds_residual_only(release)  # only to refuse an invalid version
    given = check_names(entry, {**config.kwargs, **overrides})
    own = read_settings(settings, entry)
    for name in {*overrides, *(name for name, value in given.items() if value is None)}:
        own = own.without(name, f"{shown(given.get(name))} is given")
    findings = _findings(family, canonical, shapes, {**own.values, **given}, given)
    inferred = {name: found.value for name, found in findings.items()}
    own = reconciled(own, {**given, _RELEASE: release}, inferred, config.source)
    if _RELEASE in own.values:
        try:
            adds_residual_only(own.values[_RELEASE])
            release = own.values[_RELEASE]
        except UsageError:
            own = own.without(_RELEASE, "it is not a release")
    given = own.without(_RELEASE, "").values | given
    try:
        findings = _findings(family, canonical, shapes, given)
    except UsageError as error:
        sources = ", ".join(setting.source for settings in own.used.values() for setting in settings)
        why = f"{error.why} The checkpoint states: {sources}." if sources else error.why
        raise UsageError(error.what, why=why, fix=error.fix) from error
    return Gathered(entry, family, given, findings, own, release, canonical, shapes, notes, has_config)


def _findings(
    family: StateDictFamily[Any],
    state: dict[str, torch.Tensor],
    shapes: TensorShapes,
    *attempts: Mapping[str, Any],
) -> Findings:
    """Infer arguments from the weights, with the first set of given arguments that fits their shapes.

    Raises:
        UsageError: no set fits.
    """
    for given in attempts[:-1]:
        with suppress(UsageError):
            return family.infer_arguments(shapes, given) | family.infer_values(state)
    return family.infer_arguments(shapes, attempts[-1]) | family.infer_values(state)


def infer_config(known: Gathered) -> Resolved:
    """Complete a configuration from the weights.

    Raises:
        UsageError: an argument that the weights do not show is not given, or a given argument contradicts them.
    """
    entry, findings, shapes = known.entry, known.findings, known.shapes
    _check_given(known)
    values = known.values
    values |= known.family.follow(values)
    args = entry.args(**values)
    expected = expected_shapes(entry.family, args)
    _check_consistent(known, args, expected)
    absent = [name for name in expected if name not in shapes]
    missing = [name for name in absent if not name.endswith(INV_FREQ)]
    buffers_absent = len(absent) > len(missing)
    return Resolved(
        class_name=entry.name,
        args=args,
        hyper_connections=known.hyper_connections,
        state=known.state,
        inferred={name: found.how for name, found in findings.items() if name not in known.given},
        own=known.own,
        notes=[
            *known.notes,
            *known.own.notes(set(findings)),
            *_assumptions(entry, args, set(values), known.hyper_connections, buffers_absent),
        ],
        missing=missing,
        unexpected=[name for name in shapes if name not in expected],
        not_in_weights=not_in_weights(entry, args, findings),
    )


def _class_name(config: RawConfig, settings: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the given class, and its source.

    Raises:
        UsageError: the config and the checkpoint's own settings name two classes.
    """
    said = [] if config.class_name is None else [(config.class_name, config.source)]
    for setting in stated_classes(settings):
        with suppress(UsageError):  # another program's class
            said.append((resolve_class(setting.value).name, f"the checkpoint's {setting.source}"))
    if len({name for name, _ in said}) > 1:
        raise contradiction("class", said)
    return said[0] if said else (None, "")


def _entry(shapes: TensorShapes, class_name: str | None, source: str) -> tuple[ClassEntry, StateDictFamily[Any]]:
    """Return the entry of the given class, or else of the class that the tensors' names show, and its family."""
    family = detect_family(shapes)
    detected = CLASSES[family.classes[0].name]
    if class_name is None:
        return detected, family
    entry = resolve_class(class_name)
    if entry.family is not family:
        raise UsageError(
            f"{source} gives the class {entry.name}, but the weights belong to a {detected.name.split('.')[1]}.",
            why=f"The checkpoint has {bounded(list(shapes), 3) or 'no tensors'}.",
            fix="Correct the class, or leave it out.",
        )
    return entry, family


def _check_given(known: Gathered) -> None:
    """Refuse to guess an argument that no shape shows and that is not given.

    A config stands for the constructor call, so arguments it leaves out have upstream's defaults. Without a config
    the window would be a guess that no later check could find.
    """
    window, fields, names = known.entry.family.window_argument, known.entry.args.model_fields, known.values
    if window not in names and (fields[window].is_required() or not known.has_config):
        raise _not_shown(known.entry, window)
    if "heads" not in fields or "heads" in names:
        return
    width = next(shape[0] for name, shape in known.shapes.items() if name.endswith("to_qkv.weight"))
    if not known.has_config or width != 3 * fields["heads"].default * fields["dim_head"].default:
        raise _not_shown(known.entry, "heads")


def _not_shown(entry: ClassEntry, name: str) -> UsageError:
    """Make the error for an argument that neither the weights nor the configuration contain."""
    return UsageError(
        f"{entry.name} needs {name}, which cannot be read from the weights.",
        why="No tensor's shape depends on it. With a wrong value the model would run and give wrong results.",
        fix="Set it in a configuration: `localattn inspect CHECKPOINT --write-config` writes one to complete.",
    )


def _check_consistent(known: Gathered, args: Arguments, expected: TensorShapes) -> None:
    """Refuse an argument that the weights contradict, and tensors that do not fit each other."""
    given, shapes = known.given, known.shapes
    for name, inferred in known.findings.items():
        if name not in given or getattr(args, name, inferred.value) == inferred.value:
            continue
        found = list(shapes[inferred.key]) if inferred.key in shapes else "absent"
        wanted = list(expected[inferred.key]) if inferred.key in expected else "absent"
        raise UsageError(
            f"{name} is given as {shown(given[name])}, but the weights show {shown(inferred.value)}.",
            why=f"{inferred.how}." if found == wanted else f"{inferred.key}: found {found}, expected {wanted}.",
            fix=f"Correct {name}, or leave it out.",
        )

    wrong = [name for name, shape in expected.items() if name in shapes and shapes[name] != shape]
    if wrong:
        first = wrong[0]
        raise UsageError(
            f"{first}: found {list(shapes[first])}, expected {list(expected[first])}.",
            why=f"{len(wrong)} tensors do not fit the others and the configuration: {bounded(wrong)}.",
            fix="Check the configuration, and that the checkpoint contains one model.",
        )


def _assumptions(
    entry: ClassEntry, args: Arguments, known: set[str], release: str | None, buffers_absent: bool
) -> list[str]:
    """Write notes on the arguments that neither the weights nor the configuration contain."""
    notes, geometry = [], args.geometry()
    # The geometry has the value for which a default of None stands.
    assumed = [
        f"{name} = {getattr(geometry, name, getattr(args, name))}"
        for name in hidden_arguments(entry, args.model_dump())
        if name not in known
    ]
    if assumed:
        notes.append(f"not given, so upstream's defaults are used: {', '.join(assumed)}")
    if buffers_absent:
        notes.append("rotary frequencies are not in the checkpoint: 10000^(-2c/d) is used")
    elif getattr(args, "rotary_dim", 0) is None and not getattr(args, "use_dynamic_pos_bias", False):
        notes.append("rotary is off: no frequencies in the checkpoint, and no argument that turns it on")
    if getattr(args, "num_residual_streams", 1) > 1 and release is None:
        notes.append("hyper_connections is not given: residuals are mixed as in release 0.3.10 and later")
    return notes
