"""Define how sidecars are read and written as JSON.

Importing this module imports pydantic: light modules import it inside functions.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Base of everything in a sidecar."""

    # Unknown keys are kept, so that entries written by a newer release survive when this release adds a check.
    # A NaN figure is written as a string, because JSON has no NaN.
    model_config = ConfigDict(extra="allow", validate_by_name=True, ser_json_inf_nan="strings", protected_namespaces=())

    def to_json(self) -> str:
        """Return the text of the file."""
        return self.model_dump_json(by_alias=True, indent=2) + "\n"
