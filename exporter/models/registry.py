"""The supported families, one row each, and how one is found for a class, a state dict, a folder or a live module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ...core.error_texts import argument
from ...core.errors import UsageError
from .adapter_names import refuse_adapters
from .aft_local.family import AFT_LOCAL
from .arguments import Arguments
from .family import Adapter, Family, UpstreamClass
from .forms import FolderContents, FolderFamily, StateDictFamily
from .hugging_face.family import HUGGING_FACE
from .inference import TensorShapes, bounded
from .local_attention.family import LOCAL_ATTENTION
from .local_mha.family import LOCAL_MHA
from .local_transformer.family import LOCAL_TRANSFORMER

# In the order in which a state dict is tested, because a transformer has the names of the others too.
FAMILIES: list[Family[Any]] = [
    LOCAL_TRANSFORMER,
    LOCAL_MHA,
    AFT_LOCAL,
    LOCAL_ATTENTION,
    HUGGING_FACE,
]


@dataclass(frozen=True)
class ClassEntry(UpstreamClass):
    """A supported class with the row of its family."""

    family: Family[Any] = field(kw_only=True)

    @property
    def args(self) -> type[Arguments]:
        """The model of its constructor arguments."""
        return self.family.arguments


CLASSES: dict[str, ClassEntry] = {}


def register(family: Family[Any]) -> None:
    """Add a family to the table of classes, and to that of families if it has no row there.

    Raises:
        UsageError: one of its classes is another family's.
    """
    entries = {upstream.name: ClassEntry(**vars(upstream), family=family) for upstream in family.classes}
    for name in entries:
        if name in CLASSES and CLASSES[name].family is not family:
            others = f"{CLASSES[name].family.name!r} and {family.name!r}"
            raise UsageError(f"{name} is a class of two families, {others}.", why="A class has one family.")
    if family not in FAMILIES:
        FAMILIES.append(family)
    CLASSES.update(entries)


for _family in FAMILIES:
    register(_family)


def adapters() -> dict[str, Adapter]:
    """Return what gives live layers an export-friendly forward, by the import path of their class."""
    return {path: adapt for family in FAMILIES for path, adapt in family.adapters.items()}


def live_class(module: nn.Module) -> Family[Any] | None:
    """Return the family of a live module of a supported class whose forward is upstream's; None for any other."""
    for owner in type(module).__mro__:
        entry = CLASSES.get(f"{owner.__module__.partition('.')[0]}.{owner.__qualname__}")
        if entry is not None and type(module).forward is owner.forward:  # type: ignore[attr-defined]
            return entry.family
    return None


def detect_family(shapes: TensorShapes) -> StateDictFamily[Any]:
    """Return the family that the names in a state dict belong to.

    Raises:
        UsageError: there is no such family, or the model has a part that no family can rebuild, or an adapter.
    """
    refuse_adapters(shapes)
    families = [family for family in FAMILIES if isinstance(family, StateDictFamily)]
    for family in families:
        if family.recognises_state(shapes):
            return family
    parts = _parts(shapes, families)
    raise UsageError(
        f"The checkpoint is of no supported class: it has {bounded(list(shapes), 5)}.",
        why=f"{', '.join(family.state_dict_of for family in families)}."
        + (f" There are such models below {bounded(parts, 5)}." if parts else ""),
        fix=f"To export that part alone: {argument('entry', parts[0])}. Export the whole: {argument('factory')}."
        if parts
        else f"If the model is your own and contains such layers: {argument('factory')}.",
    )


def parts_of(shapes: TensorShapes) -> list[str]:
    """List the prefixes of names below which the weights of a supported class lie, the shortest first."""
    return _parts(shapes, [family for family in FAMILIES if isinstance(family, StateDictFamily)])


def _parts(shapes: TensorShapes, families: Sequence[StateDictFamily[Any]]) -> list[str]:
    """List the prefixes of names below which a supported model's weights lie, the shortest first."""
    found: list[str] = []
    prefixes = {name[:place] for name in shapes for place, letter in enumerate(name) if letter == "."}
    for prefix in sorted(prefixes, key=lambda x: (x.count("."), x))[:500]:
        if any(prefix.startswith(f"{outer}.") for outer in found):
            continue
        inner = {name[len(prefix) + 1 :]: shape for name, shape in shapes.items() if name.startswith(f"{prefix}.")}
        if any(family.recognises_state(inner) for family in families):
            found.append(prefix)
    return found


def read_live(module: nn.Module) -> FolderContents | None:
    """Read a live module as the folder that it would be saved to; None if it is of no family that has folders.

    Raises:
        UsageError: it is of such a family, and cannot be exported.
    """
    return next((found for family in _folder_families() if (found := family.read_live(module)) is not None), None)


def find_folder(path: Path) -> FolderFamily[Any] | None:
    """Return the family of a model's folder; None for any other folder."""
    return next((family for family in _folder_families() if family.recognises_folder(path)), None)


def detect_folder(path: Path) -> FolderFamily[Any]:
    """Return the family of a model's folder.

    Raises:
        UsageError: the folder belongs to none of those families.
    """
    family = find_folder(path)
    if family is None:
        raise UsageError(
            f"{path} is a folder of no supported family.",
            why=f"{', '.join(family.folder_of for family in _folder_families())}.",
            fix="Give the folder that holds the configuration, or the file of weights inside it.",
        )
    return family


def _folder_families() -> list[FolderFamily[Any]]:
    return [family for family in FAMILIES if isinstance(family, FolderFamily)]
