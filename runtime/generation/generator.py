"""Generate tokens from a step file: prefill, step, sample; needs no torch.

    generator = Generator.open("model_step.onnx")
    for (token,) in generator.generate(prompt, max_tokens=100, temperature=0.8, seed=1):
        ...

or by hand: `prefill(ids)`, then look at `logits`, choose, `step(ids)`, as often as wanted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...core.error_texts import argument, close_match, shown
from ...core.errors import UsageError
from ...core.tensors import INTEGER_MASKS
from ..inputs.vocabulary import check_tokens
from .fields import FIELDS
from .sampler import Sampler
from .sampling import Sampling, Tokens
from .step_session import StepSession, open_step
from .stop_strings import StopStrings

# The value for a row that has ended; it is not a valid token.
ENDED = -1


class Generator:
    """A language model that generates token by token, at constant memory and time.

    Args:
        session: a step file whose input is tokens.

    Attributes:
        session: runs the model; `session.provider` names the provider.
        batch: `B`, sequences that are generated together.
        vocabulary: `V`, tokens are 0 … V-1.

    Raises:
        UsageError: the file takes something other than tokens.
    """

    def __repr__(self) -> str:
        """Return what it is in one line."""
        return f"<Generator: {self.vocabulary} tokens, {self.batch} sequence(s) at once, on {self.session.provider}>"

    def __init__(self, session: StepSession) -> None:
        spec, *others = session.inputs
        masks = [other.name for other in others if other.name in INTEGER_MASKS and other.shape == spec.shape]
        if len(masks) != len(others) or spec.dtype != "int64" or len(spec.shape) != 2:
            listed = ", ".join(spec.describe() for spec in session.inputs)
            raise UsageError(
                "This file does not generate tokens.",
                why=f"Its inputs are {listed}.",
                fix="Step through it with localattn.runtime.open_step.",
            )
        self.session = session
        self.batch = int(spec.shape[0])
        self.vocabulary = int(session.output.shape[-1])
        self._input, self._mask = spec.name, next(iter(masks), None)
        self._kept: dict[str, NDArray[Any]] = {}
        if self._mask is not None:  # every token of a step is kept
            self._kept[self._mask] = np.ones((self.batch, 1), dtype=np.int64)
        self._logits: NDArray[Any] | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        provider: str = "auto",
        threads: int | None = None,
        *,
        plugin: str | Path = "auto",
        runtime: str = "auto",
    ) -> Generator:
        """Open a step file; arguments and errors as `runtime.step_session.open_step`."""
        return cls(open_step(path, provider, threads, plugin=plugin, runtime=runtime))

    @property
    def position(self) -> int:
        """Tokens consumed so far, in each sequence."""
        return self.session.position

    @property
    def logits(self) -> NDArray[Any]:
        """Scores of the next token, `[B, V]`; while `generate` runs, in a buffer that the next token overwrites.

        Raises:
            UsageError: nothing was consumed yet.
        """
        logits = self._logits
        if logits is None:
            raise UsageError("There are no logits yet.", why="No token was consumed.", fix="Call prefill first.")
        return logits

    def reset(self) -> None:
        """Drop all tokens and return to position 0."""
        with self.session.exclusive():
            self.session.reset()
            self._logits = None

    def prefill(self, ids: ArrayLike, mask: ArrayLike | None = None) -> NDArray[Any]:
        """Consume tokens, in chunks as far as a prefill file allows and one by one for the rest.

        Args:
            ids: `[B, T]`, or `[T]` for the same tokens in every sequence; T ≥ 1.
            mask: `[B, T]`, 1 for a token and 0 for padding, which stands before a shorter prompt; None without.

        Returns:
            `logits`, those after the last token.

        Raises:
            UsageError: no token, one outside the vocabulary, or more than the model has positions for; or a mask that
                the file does not take or that has another shape.
        """
        with self.session.own_text():
            logits: NDArray[Any] = self._consumed(ids, mask).copy()
            self._logits = logits
        return logits  # `self._logits` may be another thread's by now

    def _consumed(self, ids: ArrayLike, mask: ArrayLike | None = None) -> NDArray[Any]:
        """Consume tokens as `prefill` does, and return the logits in the session's buffer."""
        tokens = np.asarray(ids)
        if tokens.ndim == 1:
            tokens = np.broadcast_to(tokens, (self.batch, len(tokens)))
        if tokens.size == 0 or tokens.ndim != 2 or tokens.shape[0] != self.batch:
            raise UsageError(
                f"Tokens of shape {list(tokens.shape)} cannot be consumed.",
                why=f"Expected: [T] or [{self.batch}, T], with at least one token.",
                fix="Give a prompt of at least one token.",
            )
        self._check_tokens(tokens)
        output = self.session.consume({self._input: tokens.astype(np.int64), **self._hiding(tokens, mask)}, shared=True)
        return output[:, -1]

    def _hiding(self, tokens: NDArray[Any], mask: ArrayLike | None) -> dict[str, NDArray[Any]]:
        """Return the mask of tokens `[B, T]` by the name of its input; empty if the file has no mask."""
        if mask is not None and (self._mask is None or np.shape(mask) != tokens.shape):
            why = (
                f"The mask needs the shape {list(tokens.shape)}."
                if self._mask
                else "The file was exported for one sequence per call."
            )
            raise UsageError(f"A mask of {list(np.shape(mask))} does not fit this file.", why=why)
        if self._mask is None:
            return {}
        kept = np.ones(tokens.shape) if mask is None else np.asarray(mask) != 0
        return {self._mask: kept.astype(np.int64)}

    def _check_tokens(self, tokens: NDArray[Any]) -> None:
        if tokens.dtype.kind not in "iu":
            raise UsageError("The tokens are not integers.", why=f"They are {tokens.dtype}.")
        check_tokens({self._input: tokens}, self.vocabulary)

    def step(self, ids: ArrayLike) -> NDArray[Any]:
        """Consume one token of every sequence.

        Args:
            ids: `[B]`, or one number where B is 1.

        Returns:
            `logits`, `[B, V]`.

        Raises:
            UsageError: as `prefill`.
        """
        with self.session.own_text():
            logits: NDArray[Any] = self._stepped(ids).copy()
            self._logits = logits
        return logits

    def _stepped(self, ids: ArrayLike) -> NDArray[Any]:
        """Consume tokens as `step` does, and return the logits in the session's buffer."""
        tokens = np.asarray(ids)
        if tokens.size != self.batch or self.session.chunks[0] != 1:
            return self._consumed(tokens.reshape(-1, 1))
        self._check_tokens(tokens)
        column = tokens.reshape(self.batch, 1).astype(np.int64, copy=False)
        return self.session.advance({self._input: column, **self._kept}, checked=True, shared=True)[:, -1]

    def begin(self, ids: ArrayLike, mask: ArrayLike | None = None) -> None:
        """Begin a text with a prompt, as `reset` and `prefill` do; `logits` are in the session's buffer."""
        self.reset()
        self._logits = self._consumed(ids, mask)

    def go_on(self, ids: ArrayLike) -> None:
        """Continue with a token, as `step` does; `logits` are in the session's buffer."""
        self._logits = self._stepped(ids)

    def room(self, prompt_length: int) -> int | None:
        """Return how many tokens can be generated after a prompt of this length; None: any number.

        The last one needs no position, because it is not consumed.
        """
        limit = self.session.max_positions
        return None if limit is None else max(0, limit - prompt_length + 1)

    def _for_more(self, positions: int) -> str:
        """Say how to export for more positions, where their number was chosen at the export; else ""."""
        sidecar = self.session.sidecar
        if sidecar is None or not (sidecar.kwargs.get("max_length") or sidecar.factory_sha256):
            return ""
        return f" Or export it for more positions: {argument('seq_len', positions)}."

    def generate(
        self,
        prompt: ArrayLike,
        max_tokens: int | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Collection[int] = (),
        stop_strings: StopStrings | None = None,
        max_time: float | None = None,
        first_row: int = 0,
        mask: ArrayLike | None = None,
        **others: Any,
    ) -> TokenStream:
        """Start from a prompt and return the stream of tokens that follow.

        The stream ends with an error once another text began in the session: a generator writes one at a time.

        Args:
            prompt: as for `prefill`.
            max_tokens: the most tokens to yield; None continues until the model has no position left, if ever.
            temperature: as in `runtime.generation.sampling.Sampling`; 0 is greedy.
            top_k: the same.
            top_p: the same.
            repetition_penalty: the same; the prompt counts.
            seed: of the draws; the same seed gives the same tokens.
            stop: a sequence ends with the first of these tokens, which is still yielded.
            stop_strings: a sequence ends with the token in which one of these strings ends.
            max_time: all sequences end with the first token after this many seconds.
            first_row: number of the first sequence; row `r` draws from the seed's stream `first_row + r`.
            mask: of the prompt, as for `prefill`.
            others: further arguments of `Sampling`: `min_p`, `no_repeat_ngram_size`, `bad_words_ids` and so on.

        Raises:
            UsageError: as `prefill`, or max_tokens goes past the model's positions, or an argument of `Sampling` cannot
                be used. Raised by this call, before anything is yielded.
        """
        unknown = others.keys() - Sampling.__dataclass_fields__.keys()
        if unknown:
            name = sorted(unknown)[0]
            raise UsageError(f"generate has no argument {name}.", fix=close_match(name, Sampling.__dataclass_fields__))
        if wrong := FIELDS["max_time"].wrong(max_time):
            raise UsageError(f"max_time is {shown(max_time)}.", why=wrong)
        begin = time.monotonic()
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty, **others)
        if max_tokens is not None and max_tokens < 0:
            raise UsageError(f"{argument('max_tokens')} is {max_tokens}.", why="It must be a number of tokens.")
        length = np.shape(prompt)[-1] if np.ndim(prompt) else 0
        room = self.room(length)
        if room is not None and max_tokens is not None and max_tokens > room:
            raise UsageError(
                f"{max_tokens} tokens after a prompt of {length} do not fit the model.",
                why=self.session.record.why_positions_end,
                fix=(f"Generate at most {room}, or give a shorter prompt." if room else "Give a shorter prompt.")
                + self._for_more(length + max_tokens),
            )
        count = room if max_tokens is None else max_tokens
        rows = range(first_row, first_row + self.batch)
        sampler = Sampler(sampling, seed, rows, stop=stop, max_tokens=count)
        with self.session.exclusive():
            self.begin(prompt, mask)
            sampler.see(np.asarray(prompt), self.vocabulary, mask)
            if stop_strings is not None:
                stop_strings.begin(prompt, self.batch)
            ends = Ends(count, frozenset(map(int, stop)), stop_strings, None if max_time is None else begin + max_time)
            return TokenStream(self, sampler, ends)


@dataclass(frozen=True)
class Ends:
    """The conditions that end a sequence.

    Args:
        count: the most tokens; None for any number.
        stop: tokens that end it.
        strings: strings that end it.
        deadline: of `time.monotonic`; None: no deadline.
    """

    count: int | None
    stop: frozenset[int]
    strings: StopStrings | None
    deadline: float | None


class TokenStream(Iterator[Tokens]):
    """Iterate over the tokens after a prompt: each item is `[B]`, with `ENDED` for sequences that ended.

    Args:
        generator: has consumed the prompt.
        sampler: chooses the tokens.
        ends: what ends a sequence.

    Attributes:
        finish: why each sequence ended: "stop" (a token or a string), "time", "length"; None while it goes on.
    """

    def __init__(self, generator: Generator, sampler: Sampler, ends: Ends) -> None:
        self._generator, self._sampler, self._ends = generator, sampler, ends
        self._text, self._position = generator.session.texts, generator.position
        self._ended = np.zeros(generator.batch, dtype=np.bool_)
        self._made = 0
        self._last: Tokens | None = None
        self.finish: list[str | None] = [None] * generator.batch

    def __next__(self) -> Tokens:
        """Return the next token of every sequence.

        Raises:
            UsageError: another text began in the session.
        """
        if self._ended.all() or self._made == self._ends.count:
            raise StopIteration
        with self._generator.session.exclusive():
            if (self._text, self._position) != (self._generator.session.texts, self._generator.position):
                raise UsageError(
                    "This stream of tokens cannot continue.",
                    why="Its session now generates another text; a session holds one text at a time.",
                    fix="Open one generator for each text that is generated at the same time.",
                )
            if self._last is not None:
                self._generator.go_on(self._last)
                self._position = self._generator.position
            tokens = self._sampler.choose(self._generator.logits, self._ended)
        self._last = tokens
        self._made += 1
        shown: Tokens = np.where(self._ended, ENDED, tokens)
        for row in np.flatnonzero(~self._ended):
            self._end_row(int(row), int(tokens[row]))
        if self._made == self._ends.count:
            self.finish = [reason or "length" for reason in self.finish]
        return shown

    def _end_row(self, row: int, token: int) -> None:
        """Note whether a sequence ends with a token."""
        found = token in self._ends.stop
        if self._ends.strings is not None:
            found |= self._ends.strings.add(row, token)
        late = self._ends.deadline is not None and time.monotonic() > self._ends.deadline
        if found or late:
            self._ended[row], self.finish[row] = True, "stop" if found else "time"
