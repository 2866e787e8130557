"""AFT-local a few tokens at a time: float64's numbers at every position, with biases and keys that break naive sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from localattn.core.errors import UsageError
from localattn.exporter.models.aft_local.arguments import AFTLocalArgs
from localattn.exporter.models.aft_local.reference import aft_local
from localattn.exporter.options import ShapeRequest
from localattn.exporter.source.source_model import SourceModel
from localattn.exporter.source.step_source import StepSource

DIM = 6


def state_of(args: AFTLocalArgs, seed: int, scale: float) -> dict[str, Tensor]:
    """A state dict as labml saves it."""
    torch.manual_seed(seed)
    side = args.seq_len
    state = {"pos_bias": scale * torch.randn(side, side)}
    for name in ("query", "key", "value", "output"):
        state[f"{name}.weight"] = torch.randn(DIM, DIM) / math.sqrt(DIM)
        if args.bias or name == "output":
            state[f"{name}.bias"] = torch.randn(DIM)
    below = torch.ones(side, side, dtype=torch.bool).tril(args.local_window_size - 1)
    return state | {"local_mask": below & below.T}


def run(source: SourceModel, inputs: list[Tensor], calls: list[int]) -> Tensor:
    outputs, done = [], 0
    caches = [torch.full(x.shape, x.fill) for x in StepSource(source, 1).caches("fp32")]
    steps = {chunk: StepSource(source, chunk) for chunk in calls}
    modules = {chunk: step.module("fp32") for chunk, step in steps.items()}
    for chunk in calls:
        data = [x[done : done + chunk] for x in inputs]
        output, *caches = steps[chunk].call(modules[chunk], data, torch.tensor([done]), caches)
        outputs.append(output)
        done += chunk
    return torch.cat(outputs)


@pytest.mark.parametrize("calls", [[1] * 40, [7, 1, 1, 16, 3, 1, 11], [40], [39, 1]], ids=str)
@pytest.mark.parametrize("window", [1, 2, 5, 40, 64])
@pytest.mark.parametrize(("scale", "keys"), [(1.0, 1.0), (30.0, 1.0), (1.0, 60.0)])
def test_equals_the_reference(window: int, scale: float, keys: float, calls: list[int]) -> None:
    args = AFTLocalArgs(d_model=DIM, seq_len=40, local_window_size=window, bias=window != 5)
    state = state_of(args, window, scale)
    source = SourceModel("labml_nn.AFTLocal", args, state, True, ShapeRequest(40, 2, causal=True))
    query, key, value = (torch.randn(40, 2, DIM) for _ in range(3))
    key *= keys  # rising and falling by hundreds: only the exact maximum as stabiliser survives it
    precise = {name: x.double() if x.is_floating_point() else x for name, x in state.items()}
    expected = aft_local(args, precise, query.double(), key.double(), value.double(), causal=True)
    with torch.no_grad():
        got = run(source, [query, key, value], calls)
    assert (got - expected).abs().max() < 2e-4 * max(1.0, float(expected.abs().max()))


def test_not_causal_is_refused() -> None:
    args = AFTLocalArgs(d_model=DIM, seq_len=8, local_window_size=2)
    source = SourceModel("labml_nn.AFTLocal", args, state_of(args, 0, 1.0), True, ShapeRequest(8))
    with pytest.raises(UsageError, match="not causal"):
        StepSource(source, 1)


def test_a_window_that_the_checkpoint_contradicts_is_refused() -> None:
    args = AFTLocalArgs(d_model=DIM, seq_len=8, local_window_size=2)
    wrong = AFTLocalArgs(d_model=DIM, seq_len=8, local_window_size=3)
    source = SourceModel("labml_nn.AFTLocal", wrong, state_of(args, 0, 1.0), True, ShapeRequest(8, causal=True))
    with pytest.raises(UsageError, match="local_mask"):
        StepSource(source, 1).module("fp32")
