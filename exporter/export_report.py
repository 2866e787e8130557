"""What an export tells of the files that it wrote."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..core.documents.proof import no_window, not_proven, proven_by_golden
from ..core.documents.report import Report
from ..core.documents.sidecar import CheckRecord, Sidecar, sidecar_path
from ..core.renamed import RenamedAttribute


@dataclass(frozen=True, repr=False)
class ExportReport(Report):
    """What was written.

    Args:
        path: the ONNX file.
        sidecar: what its sidecar says, checks included.
        notes: what was assumed.
        prefill: for a step file, what was written as its prefill file.
        copied: files of the model's folder that were copied next to it.
        doubts: what may be wrong in the model itself and no check of the file sees.
    """

    path: Path
    sidecar: Sidecar
    notes: list[str]
    prefill: ExportReport | None = field(default=None, kw_only=True)
    copied: list[Path] = field(default_factory=list, kw_only=True)
    doubts: tuple[str, ...] = field(default=(), kw_only=True)
    companion = RenamedAttribute("prefill")

    @property
    def files(self) -> list[Path]:
        """The written files: the model, its sidecar, its weights if separate, copies, and those of its prefill file."""
        data = [] if self.sidecar.external_data is None else [self.path.with_name(self.sidecar.external_data)]
        others = [] if self.prefill is None else self.prefill.files
        return list(dict.fromkeys([self.path, sidecar_path(self.path), *data, *self.copied, *others]))

    @property
    def checks(self) -> list[CheckRecord]:
        """The checks of the file and of its prefill file."""
        return [*self.sidecar.checks, *([] if self.prefill is None else self.prefill.checks)]

    @property
    def warnings(self) -> list[str]:
        """Warnings about older releases, a window that was not found, and arguments that no check proves."""
        sidecar, model = self.sidecar, str(self.path)
        doubts = () if proven_by_golden(sidecar.checks) else self.doubts
        return [*doubts, *no_window(sidecar.windows, sidecar.checks, model), *not_proven(sidecar.unproven, model)]

    def headline(self) -> str:
        """Describe the file in one line."""
        return f"{self.path}  {self.sidecar.title}, {self.sidecar.dtype}, opset {self.sidecar.opset}"
