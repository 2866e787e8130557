"""List the supported families: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...core.errors import UsageError
from .aft_local.family import AFT_LOCAL
from .arguments import Arguments
from .family import Family
from .inference import TensorShapes, bounded
from .local_attention.family import LOCAL_ATTENTION
from .local_mha.family import LOCAL_MHA
from .local_transformer.family import LOCAL_TRANSFORMER

# In the order in which a state dict is asked: a transformer holds the names of the others too.
FAMILIES: tuple[Family, ...] = (LOCAL_TRANSFORMER, LOCAL_MHA, AFT_LOCAL, LOCAL_ATTENTION)


@dataclass(frozen=True)
class ClassEntry:
    """A supported class with its family.

    Args:
        name: `package.Class`, as written in a config.
        family: the row of its family.
        unsupported: arguments that cannot be given, each with the reason.
    """

    name: str
    family: Family
    unsupported: Mapping[str, str]

    @property
    def args(self) -> type[Arguments]:
        """The model of its constructor arguments."""
        return self.family.arguments

    @property
    def kind(self) -> str:
        """The name of its family."""
        return self.family.name


CLASSES: Mapping[str, ClassEntry] = MappingProxyType(
    {
        upstream.name: ClassEntry(upstream.name, family, upstream.unsupported)
        for family in FAMILIES
        for upstream in family.classes
    }
)


def detect_family(shapes: TensorShapes) -> Family:
    """Return the family that the names in a state dict belong to.

    Raises:
        UsageError: none of them, or a model with a part that no family can rebuild.
    """
    for family in FAMILIES:
        if family.recognises(shapes):
            return family
    raise UsageError(
        f"The checkpoint is of no supported class: it has {bounded(list(shapes), 5)}.",
        why=f"{', '.join(family.recognised_by for family in FAMILIES)}.",
        fix="If the model is a part of a larger one, name the prefix of its weights.",
    )
