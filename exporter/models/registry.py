"""The supported families, one row each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from ...core.error_texts import argument
from ...core.errors import UsageError
from .aft_local.family import AFT_LOCAL
from .arguments import Arguments
from .family import Family, FolderContents, FolderForm, StateDictForm, UpstreamClass
from .hugging_face.family import HUGGING_FACE
from .inference import TensorShapes, bounded
from .local_attention.family import LOCAL_ATTENTION
from .local_mha.family import LOCAL_MHA
from .local_transformer.family import LOCAL_TRANSFORMER

# In the order in which a state dict is tested, because a transformer has the names of the others too.
FAMILIES: list[Family] = [LOCAL_TRANSFORMER, LOCAL_MHA, AFT_LOCAL, LOCAL_ATTENTION, HUGGING_FACE]


@dataclass(frozen=True)
class ClassEntry(UpstreamClass):
    """A supported class with the row of its family."""

    family: Family = field(kw_only=True)

    @property
    def args(self) -> type[Arguments]:
        """The model of its constructor arguments."""
        return self.family.arguments


def class_entries(family: Family) -> dict[str, ClassEntry]:
    """List a family's classes by name."""
    return {upstream.name: ClassEntry(**vars(upstream), family=family) for upstream in family.classes}


CLASSES: dict[str, ClassEntry] = {name: entry for family in FAMILIES for name, entry in class_entries(family).items()}


def live_class(module: nn.Module) -> Family | None:
    """Return the family of a live module of a supported class whose forward is upstream's; None for any other."""
    for owner in type(module).__mro__:
        entry = CLASSES.get(f"{owner.__module__.partition('.')[0]}.{owner.__qualname__}")
        if entry is not None and type(module).forward is owner.forward:  # type: ignore[attr-defined]
            return entry.family
    return None


def detect_family(shapes: TensorShapes) -> tuple[Family, StateDictForm]:
    """Return the family that the names in a state dict belong to.

    Raises:
        UsageError: there is no such family, or the model has a part that no family can rebuild.
    """
    forms = [(family, family.state_dict) for family in FAMILIES if family.state_dict is not None]
    for family, form in forms:
        if form.recognises(shapes):
            return family, form
    parts = _parts(shapes, [form for _, form in forms])
    raise UsageError(
        f"The checkpoint is of no supported class: it has {bounded(list(shapes), 5)}.",
        why=f"{', '.join(form.recognised_by for _, form in forms)}."
        + (f" There are such models below {bounded(parts, 5)}." if parts else ""),
        fix=f"To export that part alone: {argument('entry', parts[0])}. Export the whole: {argument('factory')}."
        if parts
        else f"If the model is your own and contains such layers: {argument('factory')}.",
    )


def _parts(shapes: TensorShapes, forms: Sequence[StateDictForm]) -> list[str]:
    """List the prefixes of names below which a supported model's weights lie, the shortest first."""
    found: list[str] = []
    prefixes = {name[:place] for name in shapes for place, letter in enumerate(name) if letter == "."}
    for prefix in sorted(prefixes, key=lambda x: (x.count("."), x))[:500]:
        if any(prefix.startswith(f"{outer}.") for outer in found):
            continue
        inner = {name[len(prefix) + 1 :]: shape for name, shape in shapes.items() if name.startswith(f"{prefix}.")}
        if any(form.recognises(inner) for form in forms):
            found.append(prefix)
    return found


def read_live(module: nn.Module) -> FolderContents | None:
    """Read a live module as the folder that it would be saved to; None if it is of no family that has folders.

    Raises:
        UsageError: it is of such a family, and cannot be exported.
    """
    forms = (family.folder for family in FAMILIES if family.folder is not None)
    return next((found for form in forms if (found := form.live(module)) is not None), None)


def find_folder(path: Path) -> FolderForm | None:
    """Return how a folder of a known family is read; None for any other folder."""
    forms = [family.folder for family in FAMILIES if family.folder is not None]
    return next((form for form in forms if form.recognises(path)), None)


def detect_folder(path: Path) -> FolderForm:
    """Return how a folder of a known family is read.

    Raises:
        UsageError: the folder belongs to none of those families.
    """
    forms = [family.folder for family in FAMILIES if family.folder is not None]
    for form in forms:
        if form.recognises(path):
            return form
    raise UsageError(
        f"{path} is a folder of no supported family.",
        why=f"{', '.join(form.recognised_by for form in forms)}.",
        fix="Give the folder that holds the configuration, or the file of weights inside it.",
    )
