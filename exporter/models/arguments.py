"""Check constructor arguments: the base class, types and error texts of every family's `arguments.py`.

Upstream resolves its defaults in several places (`None` means 0 or 1 or `True` or half a window, and `**kwargs` pass
through two constructors). Here only the argument models resolve them: all other code uses `geometry()`, `rotary_dim`,
`xpos_base`, `score_scale`, `attention_args()` and `mha_args()`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from ...core.error_texts import close_match, shown
from ...core.errors import UsageError
from ...core.geometry import WindowGeometry

# Far above any real model, and low enough that every product of two of them fits an int64.
_LARGEST = 2**30

Size = Annotated[int, Field(strict=True, ge=1, le=_LARGEST)]
Count = Annotated[int, Field(strict=True, ge=0, le=_LARGEST)]
# A bound on depth, so that a typing error does not build a table of a billion layers.
Depth = Annotated[int, Field(strict=True, ge=1, le=4096)]
Integer = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Flag = Annotated[bool, Field(strict=True)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Factor = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=_LARGEST)]
Probability = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
OldRotaryConfig = Annotated[tuple[Size, ...], Field(min_length=1)]

_Self = TypeVar("_Self", bound="Arguments")


class Arguments(BaseModel):
    """Base of the argument models: frozen, no unknown names, no guessing of types.

    Raises:
        UsageError: an unknown name, a missing one, a value of the wrong type or outside its range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def geometry(self) -> WindowGeometry | None:
        """Return the window of every attention layer, or the widest; None if sums go over the whole sequence."""

    def describe(self) -> str:
        """Describe the window in words; arguments without one have words of their own."""
        window = self.geometry()
        assert window is not None, f"{type(self).__name__} has no window to describe"
        return window.describe()

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls: type[_Self], data: Any, handler: ModelWrapValidatorHandler[_Self]) -> _Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise _explained(cls, error) from error


def _explained(arguments: type[BaseModel], error: ValidationError) -> UsageError:
    """Make one error from pydantic's findings: the first, and how many more there are."""
    findings: list[Mapping[str, Any]] = list(error.errors(include_url=False, include_context=False))
    # A misspelt name is often found twice, as an unknown and as a missing name: the first says more.
    findings.sort(key=lambda finding: finding["type"] != "extra_forbidden")
    first = findings[0]
    name = ".".join(str(part) for part in first["loc"]) or "the arguments"
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    owner = arguments.__name__.removesuffix("Args")
    if first["type"] == "extra_forbidden":
        fix = close_match(name, arguments.model_fields)
        return UsageError(f"{owner} has no argument {shown(name)}{more}.", fix=fix)
    if first["type"] == "missing":
        return UsageError(f"{owner} needs {name}{more}.", fix=f"Give {name}.")
    return UsageError(f"{owner}: {name} is {shown(first['input'])}{more}.", why=f"{first['msg']}.")
