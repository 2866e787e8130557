"""Check a file with dynamic sizes.

Parity is compared over a sweep of lengths around the multiples of the window, because between the multiples upstream
pads, and a length that was traced as a constant would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice

import numpy as np
import onnx
from numpy.typing import NDArray

from ...core.documents.sidecar import CheckRecord
from ...core.geometry import WindowGeometry
from ...core.tensors import BATCH, POSITION_IDS, SEQUENCE
from ...core.tolerance import Tolerance
from ...runtime.inputs.arrays import random_inputs
from ...runtime.inputs.rows import check_rows, spans_the_batch
from ...runtime.inputs.size_sweep import sweep_sizes
from ...runtime.parity.inputs import InputSet
from ...runtime.session import Arrays, Session
from ...runtime.text_inputs.rows import Row
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel
from .judged import HEAVY, MOST_WORK, Judged, most_tokens
from .layers import check_layer_memory
from .parity import baseline_meter, check_input_sets

# If rounding decides the experts of all of a few tokens, other tokens are drawn.
_DRAWS = 8
# Tokens of a sequence for other batch sizes, if the reference is slow.
_FEW = 16
# Tokens of several rows in one call: logits of a large vocabulary are large.
_TOGETHER = 192


def check_sweep(
    judged: Judged, source: SourceModel, dtype: str, axes: Sequence[str], tolerance: Tolerance, *, quick: bool = False
) -> CheckRecord:
    """Compare a written file with the float64 reference on rows as in use, and over a sweep of sizes.

    Quick checks compare only on the longest row.
    """
    reference = ReferenceRunner(source, dtype, axes)
    meter = baseline_meter(source, dtype, tolerance)
    sets = chain(_rows_of_use(judged, reference), _input_sets(judged, reference, axes))
    record = check_input_sets(judged, reference, islice(sets, 1 if quick else None), tolerance, meter)
    longest = _longest(source)
    hidden = [window for window in source.windows if not window.sees_all and not shows(window, longest)]
    if SEQUENCE in axes and hidden and record.status == "passed":
        widest = max(window.backward_reach for window in hidden) + 1
        detail = f"no compared sequence is longer than a window ({longest} tokens, {widest} keys); {record.detail}"
        record = record.model_copy(update={"status": "not proven", "detail": detail})
    return record


def shows(window: WindowGeometry, length: int) -> bool:
    """Return whether a sequence shows the window: a query does not see the first token, or the last if not causal."""
    first, end = window.visible_interval(np.arange(length), length)
    return bool(first.any()) and (window.causal or bool((end < length).any()))


def _longest(source: SourceModel) -> int:
    """Return the longest sequence that is compared."""
    return min(source.family.longest_compared(source.args) or source.shapes.seq_len, source.shapes.seq_len)


def check_dynamic_memory(model: onnx.ModelProto, source: SourceModel, axes: Sequence[str]) -> CheckRecord:
    """Look for tensors quadratic in the sequence length in a file with dynamic sizes; its weights may be absent."""
    sequence = [axis for axis in axes if axis == SEQUENCE]
    return check_layer_memory(model, {source.shapes.seq_len}, sequence, lambda _: None)


def check_joined_rows(
    session: Session,
    written: onnx.ModelProto,
    dtype: str,
    draw: Callable[[int, Mapping[str, int]], Arrays],
    sizes: Mapping[str, int],
    lengths: Sequence[int],
    in_pairs: Sequence[int] = (),
) -> CheckRecord:
    """Try whether a server may join requests: for files in which axis 0 of every tensor is one dynamic axis.

    Args:
        session: the written file.
        written: its graph; the weights may be absent.
        dtype: "fp32", "fp16" or "bf16".
        draw: makes inputs from a seed and the sizes of the dynamic axes.
        sizes: of the dynamic axes.
        lengths: of the sequences to try, where that axis is dynamic.
        in_pairs: lengths of more sequences, of which only a pair is compared with one of them alone.
    """
    each = dict.fromkeys(lengths if SEQUENCE in sizes else (0,))
    examples = (draw(seed, {**sizes, SEQUENCE: length}) for seed, length in enumerate(each))
    pairs = (draw(0, {**sizes, SEQUENCE: length}) for length in (in_pairs if SEQUENCE in sizes else ()))
    return check_rows(session.run, examples, dtype, spans_the_batch(written), pairs)


def rows_of_checkpoint(
    session: Session, written: onnx.ModelProto, source: SourceModel, dtype: str, axes: Sequence[str], *, quick: bool
) -> CheckRecord:
    """Try whether a server may join requests to a checkpoint's file; quick checks try one length.

    Of a heavy model only a pair of rows is as long as the window shows.
    """
    specs = ReferenceRunner(source, dtype, axes).inputs
    window = source.window_size
    length = source.shapes.seq_len
    if source.family.longest_compared(source.args) is not None:  # a window does not matter for the independence of rows
        length = min(length, max(_edges(source)))
    lengths = [length] if quick else [length, max(1, length // 2 // window) * window]
    sizes = {BATCH: 2} | ({SEQUENCE: length} if SEQUENCE in axes else {})

    def draw(seed: int, at: Mapping[str, int]) -> Arrays:
        return random_inputs(specs, seed, source.token_limit, at)

    if source.work > HEAVY and length > _FEW:
        in_pairs = [] if quick else [length]
        return check_joined_rows(session, written, dtype, draw, sizes, [_FEW], in_pairs)
    return check_joined_rows(session, written, dtype, draw, sizes, [n for n in lengths if n <= length])


def _rows_of_use(judged: Judged, reference: ReferenceRunner) -> Iterator[InputSet]:
    """Yield realistic rows, one at a time, if a call may take one of any length; of a heavy model several at a time."""
    source, specs = reference.source, reference.inputs
    names = {size for spec in specs for size in spec.shape if isinstance(size, str)}
    if SEQUENCE not in names:
        return
    longest = _longest(source)
    rows = judged.rows(longest, longest - 1, most_tokens(source), specs)
    together = BATCH in names and source.work > HEAVY and not judged.judges_alone
    for several in _of_one_length(rows) if together else ([row] for row in rows):
        sizes = {BATCH: len(several) if BATCH in names else source.shapes.batch, SEQUENCE: several[0].length}
        inputs = judged.set_of(several, specs, sizes)
        if not reference.hardly_decided(inputs.arrays):
            yield inputs


def _of_one_length(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows of one length, of some tokens together: a heavy model reads its weights once for all of them."""
    found: list[list[Row]] = []
    for row in rows:
        last = found[-1] if found else [row]
        if found and row.length == last[0].length and (len(last) + 1) * row.length <= _TOGETHER:
            last.append(row)
        else:
            found.append([row])
    return found


def _input_sets(judged: Judged, reference: ReferenceRunner, axes: Sequence[str]) -> Iterator[InputSet]:
    """Draw inputs at every size of the sweep; the check leaves out sizes that the class refuses."""
    source = reference.source
    windows = [window for window in source.windows if not window.sees_all]
    now: Mapping[str, int] = {BATCH: source.shapes.batch, SEQUENCE: _longest(source)}
    trials: Sequence[Mapping[str, int]] = sweep_sizes(axes, now, SEQUENCE, windows)
    tokens = sum(sizes[BATCH] * sizes[SEQUENCE] for sizes in trials)
    if source.family.longest_compared(source.args) is not None and source.work * tokens > MOST_WORK:
        trials = fewer_sizes(trials, {max(_edges(source), default=0)})
        if judged.tokens is not None and SEQUENCE in axes:  # the longest row of text is the longest sequence
            trials = [{**x, SEQUENCE: min(_FEW, x[SEQUENCE])} for x in trials[1:]]
            trials += [{BATCH: batch, SEQUENCE: _FEW} for batch in (2, 3) if BATCH in axes]
            trials = [dict(x) for x in dict.fromkeys(tuple(sorted(trial.items())) for trial in trials)]
    for place, sizes in enumerate(trials):
        # In fp32 every second size has random tokens, in which any of the vocabulary occurs.
        random = judged.takes_random and judged.tokens is not None and place % 2 == 0
        for seed in range(sum(sizes.values()), sum(sizes.values()) + _DRAWS):
            drawn = random_inputs(reference.inputs, seed, source.token_limit, sizes)
            if source.family.key_mask in drawn:
                _pad(drawn[source.family.key_mask], left=place % 2 == 1)
                if POSITION_IDS in drawn:
                    drawn[POSITION_IDS] = _positions(drawn[source.family.key_mask], seed, source.shapes.seq_len)
            drawn = drawn if random else judged.filled(drawn, reference.inputs, seed)
            if not reference.hardly_decided(drawn):
                break
        yield InputSet(" ".join(f"{axis}={sizes[axis]}" for axis in axes), drawn, random=random)


def _edges(source: SourceModel) -> set[int]:
    """List the lengths around which the windows begin to show: the number of tokens a query sees, and one more."""
    windows = [window for window in source.windows if not window.sees_all]
    spans = [w.backward_reach + 1 + w.forward_reach if w.exact_windowsize else w.keys_per_window for w in windows]
    return {n for span in spans for n in (span, span + 1)}


def fewer_sizes(trials: Sequence[Mapping[str, int]], lengths: set[int]) -> list[Mapping[str, int]]:
    """Choose the longest sequence, these lengths, and other batch sizes at the longest of these."""
    first = trials[0]
    kept = [x for x in trials[1:] if x[BATCH] == first[BATCH] and x[SEQUENCE] in lengths]
    batches = {x[BATCH] for x in trials} - {first[BATCH]}
    at = kept[-1] if kept else first
    return [first, *kept, *({**at, BATCH: batch} for batch in sorted(batches))]


def _pad(mask: NDArray[np.int64], *, left: bool) -> None:
    """Keep the first sequence whole, so that windows show, and put the padding of the others on one side."""
    mask[0] = 1
    if left:
        mask[:] = mask[:, ::-1].copy()


def _positions(mask: NDArray[np.int64], seed: int, longest: int) -> NDArray[np.int64]:
    """Draw positions: with gaps in the first sequence, to find files that ignore this input; without gaps in others.

    Positions count from a sequence's first token that is not padding, as in transformers' generation.
    """
    found: NDArray[np.int64] = np.maximum(mask.cumsum(axis=1) - 1, 0)
    length = mask.shape[1]
    generator = np.random.default_rng(seed)
    found[0] = np.sort(generator.choice(min(2 * length, longest), length, replace=False))
    return found
