"""Tell what rounding costs a model on text: size, perplexity before and after, divergence, same likeliest token.

"Before" is upstream's own module in fp32, as PyTorch runs it with the user's weights. The text is the part of the
shipped text on which files are judged, and nothing was rounded on.

Perplexity: e to the mean negative log-likelihood of the next token (F. Jelinek et al., Perplexity, 1977).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.documents.sidecar import CheckRecord
from ...core.error_texts import first_line
from ...onnx_graph.graph_values import external_files
from ...onnx_graph.without_weights import read_message
from ...runtime.inputs.arrays import random_inputs
from ...runtime.parity.baseline import UntouchedModule
from ...runtime.parity.distribution import LOGITS, Distribution, compare_distributions
from ...runtime.parity.runner import Runner
from ...runtime.text_inputs.rows import Row, arrays_of_rows, token_names
from ...runtime.text_inputs.tokens import Tokens
from ..source.reference_runner import ReferenceRunner
from ..source.source_model import SourceModel
from ..source.step_source import is_causal
from ..source.untouched_module import untouched_module
from .outcome import passed, skipped

QUALITY = "quality on text"
# e to this number is still a number.
_MOST_SURPRISE = 700.0
# Tokens of all rows, and of one; passages of a row.
_TOKENS, ROW, _PASSAGES = 1024, 256, 2


def has_quality(source: SourceModel, tokens: Tokens | None) -> bool:
    """Return whether a model gives logits of tokens, and there is text for it."""
    if tokens is None or source.outputs[0] != LOGITS or not token_names(source.inputs("fp32")):
        return False
    return tokens.is_text


def check_quality(
    candidate: Runner, source: SourceModel, tokens: Tokens, path: Path, *, dtype: str = "fp32", multiple: int = 1
) -> CheckRecord:
    """Compare a rounded file with the model as PyTorch runs it, on rows of text.

    Args:
        candidate: runs the file.
        source: the model, at the file's length, or at its largest where that is dynamic or the file takes steps.
        tokens: where the text comes from.
        path: of the file, whose size counts.
        dtype: element type of the file.
        multiple: rows are multiples of it; 0 for a file of one size.
    """
    length = source.shapes.seq_len
    if multiple:
        length = max(multiple, min(ROW, length) // multiple * multiple)
        source = source.resized(seq_len=length, dynamic_length=False)
    exact, batch = _before(source, dtype), source.shapes.batch
    specs = source.inputs(dtype)
    drawn = random_inputs(specs, 0, source.token_limit)
    name = token_names(specs)[0]
    found, before, after, predicted, rows = Distribution(), 0.0, 0.0, 0, 0
    for start in range(0, max(batch, _TOKENS // length), batch):
        texts = [Row("", tokens.row(start + place, length, pieces=_PASSAGES)) for place in range(batch)]
        inputs = arrays_of_rows(texts, specs, drawn, tokens.pad)
        try:
            wanted = exact.run(inputs)[LOGITS]
        except Exception as error:  # upstream's module may raise anything, for example where it lacks memory
            return skipped(f"{exact.name} does not run here ({first_line(error, 100)})")
        given = candidate.run(inputs)[LOGITS]
        found += compare_distributions(given, wanted)
        ids = inputs[name]
        before += _surprise(wanted, ids)
        after += _surprise(given, ids)
        predicted += ids[:, 1:].size
        rows += len(ids)
    figures: dict[str, float | int | str] = {"bytes": size_with_weights(path), **found.figures()}
    words = [f"{int(figures['bytes']) / 1e6:,.4g} MB with its weights"]
    if is_causal(source) and predicted:
        figures |= {"perplexity_before": _perplexity(before / predicted), "perplexity": _perplexity(after / predicted)}
        words.append(
            f"perplexity {figures['perplexity_before']:.4g} before rounding and {figures['perplexity']:.4g} after"
        )
    words += [
        f"divergence {found.divergence:.2g} nats a token",
        f"the same likeliest token at {found.agreement:.1%} of positions",
    ]
    return passed(f"{', '.join(words)}, on {tokens.describe(rows, rows * length)}", **figures)


def _before(source: SourceModel, dtype: str) -> Runner:
    """Return upstream's own module in fp32, or the float64 reference where that does not run."""
    module = untouched_module(source, "fp32")
    return module.exact if isinstance(module, UntouchedModule) else ReferenceRunner(source, dtype).unsampled()


def _perplexity(surprise: float) -> float:
    """Return e to a mean negative log-likelihood; a model of random weights may be beyond what float64 holds."""
    return math.exp(min(surprise, _MOST_SURPRISE))


def _surprise(logits: NDArray[Any], ids: NDArray[np.int64]) -> float:
    """Return the sum of negative log-likelihoods of the next tokens; logits `[B, N, V]`, ids `[B, N]`."""
    total = 0.0
    for row, tokens in zip(logits, ids, strict=True):
        for place, token in enumerate(tokens[1:]):
            scores = row[place].astype(np.float64)
            most = scores.max()
            total += most + math.log(np.exp(scores - most).sum()) - scores[token]
    return total


def size_with_weights(path: Path) -> int:
    """Return the bytes of a file and of the files of weights that it refers to."""
    outside = [path.parent / name for name in external_files(read_message(path)) if name]
    return path.stat().st_size + sum(data.stat().st_size for data in outside if data.is_file())
