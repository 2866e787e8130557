"""Measure second moments of the inputs of linear layers on realistic inputs, and how much the outputs change."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

# Bytes of moments that are held at a time; a model with more is run once for each part of its layers.
_MEMORY = 1 << 30
# Layers with so many outputs or more are heads, which no other layer reads.
_HEAD = 1 << 15
# Positions whose logits become distributions at a time.
_POSITIONS = 64
# Outputs of a layer on which a rounding of its inputs is measured: every so many-th, so that about these are left.
_OUTPUTS = 1024


class Calibration:
    """A model in fp32, with realistic inputs.

    Args:
        entry: takes the inputs by position and returns its outputs; its attribute `model` is the traced module, whose
            linear layers are identified by their paths in it.
        rows: the inputs of each call.
        judged: the inputs on which effects are measured; others than `rows`.
        words: what the inputs are, for reports.
        begun: inputs that begin in each way in which a sequence may begin; by default those to judge.
    """

    def __init__(
        self,
        entry: nn.Module,
        rows: Sequence[tuple[Tensor, ...]],
        judged: Sequence[tuple[Tensor, ...]],
        words: str,
        begun: Sequence[tuple[Tensor, ...]] = (),
    ) -> None:
        self.entry, self.rows, self.judged, self.words = entry, rows, judged, words
        self.begun = begun or judged
        model = entry.model
        assert isinstance(model, nn.Module)
        self.layers = {path: part for path, part in model.named_modules() if isinstance(part, nn.Linear)}

    def moments(self, paths: Collection[str]) -> Iterator[Mapping[str, Tensor]]:
        """Yield the second moments of the inputs of layers, fp32 `[K, K]` by path, some layers at a time.

        Layers that the inputs never reach are left out. Moments are the mean of x·xᵀ over all positions, without those
        whose input is all zeros.
        """
        part: list[str] = []
        size = 0
        for path in paths:
            width = self.layers[path].in_features
            if part and size + 4 * width * width > _MEMORY:
                yield self._moments(part)
                part, size = [], 0
            part.append(path)
            size += 4 * width * width
        if part:
            yield self._moments(part)

    @torch.no_grad()
    def _moments(self, paths: Sequence[str]) -> Mapping[str, Tensor]:
        sums: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        # Layers that read one tensor, as queries, keys and values do, share its moments.
        last: dict[int, tuple[Tensor, Tensor]] = {}

        def take(path: str, given: Tensor) -> None:
            known = last.get(given.data_ptr())
            if known is not None and known[0] is given:
                product = known[1]
            else:
                x = given.detach().reshape(-1, given.shape[-1]).float()
                product = x.T @ x
                last.clear()
                last[given.data_ptr()] = given, product
            sums[path] = sums[path].add_(product) if path in sums else product.clone()
            counts[path] = counts.get(path, 0) + given.numel() // given.shape[-1]

        with ExitStack() as stack:
            self._without_heads(stack)
            for path in paths:
                hook = self.layers[path].register_forward_pre_hook(lambda _, inputs, path=path: take(path, inputs[0]))
                stack.callback(hook.remove)
            for row in self.rows:
                self.entry(*row)
                last.clear()
        return {path: total / counts[path] for path, total in sums.items()}

    @torch.no_grad()
    def rounded_inputs(self, blocks: Mapping[str, int]) -> dict[str, float]:
        """Return how much layers change, at most at one token, if their inputs are rounded to 8 bits.

        It is the norm of a token's change over that of its outputs, or over the median of all tokens' where that is
        larger: a token whose outputs are next to nothing has no say. Measured on the inputs that begin in each way.

        Args:
            blocks: by path of a layer, how many neighbouring numbers of a token share a scale.
        """
        largest: dict[str, float] = {}

        def take(path: str, given: Tensor) -> None:
            weight = self.layers[path].weight.float()
            weight = weight[:: -(-len(weight) // _OUTPUTS)]
            x = given.detach().reshape(-1, given.shape[-1]).float()
            sizes = (x @ weight.T).norm(dim=-1)
            change = ((_rounded(x, blocks[path]) - x) @ weight.T).norm(dim=-1)
            parts = change / torch.maximum(sizes, sizes.median())
            largest[path] = max(largest.get(path, 0.0), float(parts.nan_to_num(0.0).amax()) if len(parts) else 0.0)

        with ExitStack() as stack:
            self._without_heads(stack)
            for path in blocks:
                hook = self.layers[path].register_forward_pre_hook(lambda _, inputs, path=path: take(path, inputs[0]))
                stack.callback(hook.remove)
            for row in self.begun:
                self.entry(*row)
        return largest

    def _without_heads(self, stack: ExitStack) -> None:
        """Compute nothing in heads until the stack is left."""
        for layer in self.layers.values():
            own = vars(layer)
            if layer.out_features >= _HEAD and "forward" not in own:
                own["forward"] = _nothing
                stack.callback(own.pop, "forward")

    @torch.no_grad()
    def outputs(self) -> list[Tensor]:
        """Return the first output on the inputs to judge, fp32."""
        return [self.entry(*row)[0].float() for row in self.judged]

    @torch.no_grad()
    def distance(self, wanted: Sequence[Tensor], *, logits: bool) -> float:
        """Return how far the model's outputs are from its original ones on the judging inputs.

        Args:
            wanted: of `outputs`.
            logits: the last axis is a distribution over a vocabulary: the distance is then the Kullback-Leibler
                divergence in nats a position; else the mean squared error relative to the mean square.
        """
        total, count = 0.0, 0.0
        for before, after in zip(wanted, self.outputs(), strict=True):
            old, new = (x.reshape(-1, x.shape[-1]) for x in (before, after))
            if not logits:
                total += float((old - new).square().sum())
                count += float(old.square().sum())
                continue
            for first in range(0, len(old), _POSITIONS):
                p, q = (x[first : first + _POSITIONS].log_softmax(-1) for x in (old, new))
                total += float((p.exp() * (p - q)).sum())
            count += len(old)
        return total / count if count else 0.0


def _nothing(x: Tensor) -> Tensor:
    """Return one column of zeros, in place of the logits of a large vocabulary, which moments do not need."""
    return x.new_zeros((*x.shape[:-1], 1))


def _rounded(x: Tensor, block: int) -> Tensor:
    """Round tokens `[T, K]` as `MatMulNBits` does at its accuracy level 4: blocks share the scale of their largest."""
    padded = nn.functional.pad(x, (0, -x.shape[-1] % block)).reshape(len(x), -1, block)
    scales = padded.abs().amax(-1, keepdim=True) / 127
    rounded = torch.where(scales > 0, (padded / scales).round() * scales, padded)
    return rounded.flatten(-2)[:, : x.shape[-1]]


def kind_of(path: str) -> str:
    """Return the kind of a layer: its path with `*` in place of numbers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
