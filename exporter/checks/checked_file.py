"""Give checks access to a written file before it is published.

Each kind of export (`checkpoint`, `steps`, `module`, `convert`) has one subclass next to its pipeline, which says how
that kind answers the checks that depend on the model's origin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import onnx

from ...core.documents.sidecar import CheckRecord
from ...onnx_graph.without_weights import read_message
from ...runtime.parity.golden import Golden
from ...runtime.session import Session
from ..options import CheckOptions
from .model_checker import check_model

if TYPE_CHECKING:
    from .rounded import GraphProof

Kind = Literal["checkpoint", "steps", "module", "convert"]


class CheckedFile(ABC):
    """A written file in its temporary folder.

    Args:
        path: the file, with its external data in the same folder.
        options: how it is checked.
        progress: called with the name of each check as it begins.
        nodes: the model before its attention nodes were rewritten in standard operators, without its large weights;
            None where the file still has these nodes.

    Attributes:
        kind: what kind of export wrote the file.
        session: the file in onnxruntime on the CPU, once the check "onnxruntime loads" has opened it.
    """

    kind: ClassVar[Kind]
    session: Session

    def __init__(
        self, path: Path, options: CheckOptions, progress: Callable[[str], None], nodes: onnx.ModelProto | None = None
    ) -> None:
        self.path, self.options, self.progress = path, options, progress
        self._nodes = nodes

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The file's model, without the bytes of its large weights."""
        return read_message(self.path)

    def valid(self) -> CheckRecord:
        """Run ONNX's full checker."""
        return check_model(self.path)

    @property
    def nodes(self) -> onnx.ModelProto:
        """The model with its attention nodes, without the bytes of its large weights."""
        return self._nodes or self.model

    @property
    def rewritten(self) -> bool:
        """Whether the file has standard operators where `nodes` has attention nodes."""
        return self._nodes is not None

    def remedy(self) -> str:
        """Say which other option would pass where parity failed; "" where that is not known."""
        return ""


class ExportedFile(CheckedFile):
    """A file that was made from a model in PyTorch, which it is compared with.

    Attributes:
        golden: what the user's own model computed; None where nothing was recorded.
    """

    golden: Golden | None
    _graph: GraphProof | None = None

    @abstractmethod
    def golden_outputs(self, golden: Golden) -> CheckRecord:
        """Compare with the outputs of the user's own model."""

    @abstractmethod
    def parity(self) -> CheckRecord:
        """Compare with the reference."""

    @property
    def has_own_constants(self) -> bool:
        """Whether the user's own model is at hand, whose constants can be read."""
        return False

    def constants(self) -> CheckRecord:
        """Compare its constants with those of the user's own model."""
        raise NotImplementedError

    @property
    def has_proofs(self) -> bool:
        """Whether its weights are rounded, and its graph before rounding was kept."""
        return self._graph is not None

    def graph(self) -> CheckRecord:
        """Compare its graph before rounding with the reference, on the inputs of parity."""
        assert self._graph is not None
        self.parity()
        assert self._graph.record is not None
        return self._graph.record

    def rounded(self) -> CheckRecord:
        """Compare with the graph before rounding, in which its own weights stand."""
        raise NotImplementedError

    def halves(self) -> CheckRecord | None:
        """Report how large fp16 values were during the comparison; None if they were not watched."""
        return None

    @property
    def has_quality(self) -> bool:
        """Whether its weights are rounded, and it gives logits for text, so that it can tell what rounding costs."""
        return False

    def quality(self) -> CheckRecord:
        """Tell what rounding costs on text."""
        raise NotImplementedError

    @abstractmethod
    def integers(self) -> CheckRecord:
        """Bound the integers of the file."""


class SequenceFile(ExportedFile):
    """A file for whole sequences."""

    @abstractmethod
    def rows(self) -> CheckRecord:
        """Try whether the rows of a batch are independent, in a file whose batch is dynamic."""

    @abstractmethod
    def window(self) -> CheckRecord:
        """Check the window of every attention node, and of the model where it is known."""

    @abstractmethod
    def memory(self) -> CheckRecord:
        """Look for tensors that grow with the square of the sequence length."""


class ConvertedFile(CheckedFile):
    """A file that was made from another ONNX file."""

    @abstractmethod
    def same(self) -> CheckRecord:
        """Compare with the file that it was made from."""
