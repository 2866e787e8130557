"""Choose how a written file is judged: on realistic inputs, with fp16 rounded as in the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ...core.documents.sidecar import CheckRecord
from ...core.tensors import TensorSpec
from ...runtime.backends.onnxruntime.session import open_file
from ...runtime.inputs.arrays import random_inputs
from ...runtime.parity.inputs import InputSet
from ...runtime.parity.overflow import range_record, refuse_overflow, unproven
from ...runtime.session import Arrays, Session
from ...runtime.text_inputs.rows import Row, arrays_of_rows, fill, rows_of_use, token_names
from ...runtime.text_inputs.tally import Tally
from ...runtime.text_inputs.tokens import Tokens
from ..source.source_model import SourceModel

# Tokens of all rows of text together, at most.
MOST_TOKENS = 4096
# Weights times tokens that the reference multiplies over all sizes; beyond, it is compared at fewer of them. A core
# multiplies some 10¹⁰ of them a second in float64.
MOST_WORK = 15 * 10**10


# A model that multiplies a token by more numbers than this one takes 10 ms and more for it: fewer tokens are fed.
HEAVY = 2 * 10**7


def most_tokens(source: SourceModel) -> int:
    """Return how many tokens the rows of a model may have together, so that its reference does not take minutes."""
    return min(MOST_TOKENS, MOST_WORK // max(1, source.work))


class AlsoCompared(Protocol):
    """What is compared on the same inputs as a file: its graph before rounding."""

    @property
    def session(self) -> Session:
        """It in onnxruntime on the CPU."""

    @property
    def then(self) -> AlsoCompared | None:
        """Of a graph that takes chunks, that of the step file; None elsewhere."""

    def take(
        self, name: str, inputs: Arrays, source: SourceModel, reference: Any, expected: Arrays, feeds: Any = ...
    ) -> None:
        """Compare on one set of inputs, for which the reference gave these outputs."""


@dataclass
class Judged:
    """Prepare a file for its checks, and record the inputs of the checks.

    Args:
        session: the written file; where it is fp16 on the CPU, one that rounds as a GPU does.
        path: of the file.
        precision: its entry of `core.tolerance`.
        tokens: where its tokens come from; None for inputs of floats.
        others: sessions of files that run with it, judged in the same way.
        halves: whether the file is in fp16.
        graph: of a file of rounded weights, the proof of its graph before rounding, on the same inputs.
    """

    session: Session
    path: Path
    precision: str
    tokens: Tokens | None = None
    others: Sequence[Session] = ()
    halves: bool = False
    graph: AlsoCompared | None = None
    _tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self._tally = Tally(self.tokens)

    @classmethod
    def open(cls, path: Path, session: Session, dtype: str, precision: str, tokens: Tokens | None) -> Judged:
        """Return a written file prepared for its checks.

        Args:
            path: of the file.
            session: the file, opened as usual.
            dtype: its element type.
            precision: its entry of `core.tolerance`.
            tokens: where its tokens come from.
        """
        if dtype == "fp16":
            session.rest()
            session = open_file(path, provider="cpu", plugin="none", lean=True, halves="rounded")
        return cls(session, path, precision, tokens, halves=dtype == "fp16")

    @property
    def takes_random(self) -> bool:
        """Whether random tokens count too; they do not for rounded weights or half precision."""
        return self.tokens is None or self.precision == "fp32"

    @property
    def judges_alone(self) -> bool:
        """Whether each row is judged by itself: figures over all rows would hide one that is all wrong."""
        return self.tokens is not None and self.precision not in ("fp32", "fp16", "bf16")

    def filled(self, drawn: Arrays, specs: Sequence[TensorSpec], start: int) -> Arrays:
        """Return random inputs with realistic tokens."""
        return drawn if self.tokens is None else fill(drawn, specs, self.tokens, start)

    def rows(self, longest: int, spans: int, most: int, specs: Sequence[TensorSpec], *, multiple: int = 1) -> list[Row]:
        """Return realistic rows; arguments as of `rows_of_use`. None if there is no token input."""
        if self.tokens is None or not token_names(specs):
            return []
        masked = any(spec.name in ("mask", "attention_mask") for spec in specs)
        return rows_of_use(self.tokens, longest, spans, most, pads=masked, multiple=multiple)

    def set_of(self, rows: Sequence[Row], specs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> InputSet:
        """Return rows of one length as one set of inputs, at the given sizes of the dynamic axes."""
        assert self.tokens is not None
        drawn = random_inputs(specs, 0, self.tokens.limit, sizes)
        arrays = arrays_of_rows(rows, specs, drawn, self.tokens.pad)
        name = rows[0].name if len(rows) == 1 else f"{len(rows)} rows of {rows[0].length} tokens"
        return InputSet(name, arrays, alone=self.judges_alone)

    def count(self, inputs: InputSet, specs: Sequence[TensorSpec]) -> None:
        """Count a set of inputs that was compared."""
        self._tally.add(inputs.arrays, specs, random=inputs.random)

    def describe(self) -> str:
        """Describe in words the inputs of the checks."""
        return self._tally.describe()

    def refuse_overflow(self, inputs: str) -> None:
        """Refuse the file where its fp16 overflowed in the runs so far, and an output changed by it.

        Args:
            inputs: the name of those that it was run on last.

        Raises:
            CheckFailed: an output did.
        """
        refuse_overflow([self.session, *self.others], self.path, inputs)

    def range_record(self) -> CheckRecord | None:
        """Return the record of fp16's range; None if the file is not in fp16."""
        record = range_record([self.session, *self.others], self.describe())
        return unproven("no value of the file is computed in fp16") if record is None and self.halves else record
