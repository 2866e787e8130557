"""Step by step and in chunks, in PyTorch: equal to the published packages' full forward pass at every position."""

from __future__ import annotations

import dataclasses
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from localattn.core.nodes.step import ring_slots
from localattn.exporter.models.parts import step_rotary
from localattn.exporter.models.parts.step_rotary import RotaryPhase, rotate
from localattn.exporter.source.source_model import SourceModel
from localattn.exporter.source.step_source import StepSource, largest_chunk

from ...support.upstream import Case, Pair, draw

# The step computes in fp32, upstream in float64; the error is relative to the output's scale.
ERROR = 1e-5
CLASSES = {
    "local_attention.LocalAttention": 40,
    "local_attention.LocalMHA": 25,
    "local_attention.LocalTransformer": 40,
    "zeta.LocalAttention": 10,
    "zeta.LocalMHA": 10,
}


def causal_case(class_name: str, index: int) -> Case:
    """The drawn case made causal and maskless, at least three windows longer than its ring."""
    case = draw(class_name, index)
    kwargs = {**case.kwargs, "causal": True}
    kwargs.pop("look_forward", None)
    if kwargs.get("use_dynamic_pos_bias"):
        kwargs["look_backward"] = 1
    if case.kind == "LocalAttention":
        kwargs["autopad"] = True
    case = dataclasses.replace(case, kwargs=kwargs, mask="", name=f"step-{case.name}")
    geometry = case.geometry
    length = ring_slots(geometry) + 3 * geometry.window_size + index % 5
    return dataclasses.replace(case, length=min(length, 64))


def grid(first: int, last: int) -> list[Case]:
    return [causal_case(name, i) for name, count in CLASSES.items() for i in range(first * count, last * count)]


def run(source: SourceModel, inputs: dict[str, NDArray[Any]], calls: list[int]) -> NDArray[Any]:
    """The output over calls of the given numbers of tokens, the caches handed on."""
    steps = {chunk: StepSource(source, chunk) for chunk in set(calls)}
    modules = {chunk: step.module("fp32") for chunk, step in steps.items()}
    caches = [torch.full(x.shape, x.fill, dtype=getattr(torch, x.dtype)) for x in steps[calls[0]].caches("fp32")]
    outputs, done = [], 0
    for chunk in calls:
        axis = steps[chunk].family.length_axis
        data = [
            torch.from_numpy(x) if name == "attn_bias" else torch.from_numpy(x).narrow(axis, done, chunk)
            for name, x in inputs.items()
        ]
        output, *caches = steps[chunk].call(modules[chunk], data, torch.tensor([done]), caches)
        outputs.append(output)
        done += chunk
    return torch.cat(outputs, dim=axis).numpy()


def chunked_calls(length: int, seed: int, most: int | None) -> list[int]:
    """Chunks of all sizes mixed with single tokens, so that hand-overs fall everywhere."""
    rng, calls = np.random.default_rng(seed), []
    while (left := length - sum(calls)) > 0:
        calls.append(int(min(rng.choice([1, 1, 2, 3, 7, 16]), left, most or left)))
    return calls


def check(case: Case) -> None:
    pair = Pair(case)
    expected = pair.expected()
    assert pair.error(pair.reference_output(), expected) < 1e-6
    for calls in ([1] * case.length, chunked_calls(case.length, case.length, largest_chunk(pair.source))):
        assert pair.error(run(pair.source, pair.inputs, calls), expected) < ERROR


CASES = grid(0, 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_upstreams_full_pass(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", grid(1, 8), ids=lambda case: case.name)
def test_equals_upstreams_full_pass_on_the_large_grid(case: Case) -> None:
    check(case)


def test_the_grid_reaches_every_option() -> None:
    seen: dict[str, set[object]] = {}
    for case in CASES:
        properties = dict(case.kwargs) | {"bias": case.attn_bias, "batch": case.batch, "mixes": case.mixes_residuals}
        for name, value in properties.items():
            seen.setdefault(name, set()).add(value)
    assert seen["look_backward"] == {0, 1, 2, 3}
    assert seen["num_residual_streams"] == {1, 2, 4}
    flags = "exact_windowsize shared_qk use_xpos use_rotary_pos_emb qk_rmsnorm prenorm bias mixes gate_values_per_head"
    for name in [*flags.split(), "use_dynamic_pos_bias"]:
        assert {True, False} <= seen[name], name
    for name in ("scale", "qk_scale", "num_tokens", "batch"):
        assert len(seen[name]) == 2, name


@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_chunks_leave_the_caches_that_single_tokens_leave(chunk: int) -> None:
    for name, index in (("local_attention.LocalAttention", 3), ("local_attention.LocalTransformer", 1)):
        case = causal_case(name, index)
        case = dataclasses.replace(case, kwargs={**case.kwargs, "use_xpos": False}, length=40)
        pair = Pair(case)
        left = []
        for size in (1, chunk):
            step = StepSource(pair.source, size)
            module, axis = step.module("fp32"), step.family.length_axis
            caches = [torch.zeros(x.shape) for x in step.caches("fp32")]
            for start in range(0, 40, size):
                data = [
                    torch.from_numpy(x) if key == "attn_bias" else torch.from_numpy(x).narrow(axis, start, size)
                    for key, x in pair.inputs.items()
                ]
                _, *caches = step.call(module, data, torch.tensor([start]), caches)
            left.append(caches)
        for one, other in zip(*left, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


NEAR, FAR = [0, 1, 5, 255, 256, 1000], [65535, 10**6 + 3, 2**24 - 1, 2**24, 2**24 + 1, 10**9 + 7, 2**31 - 1]


@pytest.mark.parametrize("positions", [None, 1001], ids=["by digits", "by position"])
def test_rotation_is_exact_at_any_position(positions: int | None) -> None:
    check_rotation(positions, NEAR if positions else NEAR + FAR)


def test_rotation_is_exact_where_integers_are_divided_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_fp32(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        return (x.float() / divisor.float()).trunc().long()

    monkeypatch.setattr(step_rotary, "quotient", in_fp32)
    rng = np.random.default_rng(0)
    check_rotation(None, NEAR + FAR + rng.integers(2**24, 2**31, 100).tolist())
    for divisor in (1, 5, 9, 64, 129, 255, 1000, 4097, 65536):
        x = torch.from_numpy(rng.integers(0, 2**31, 1000))
        assert torch.equal(step_rotary.far_remainder(x, divisor), x % divisor)
        left = step_rotary.left_over(x, divisor)
        assert left.min() >= -128 and left.max() <= divisor + 128 and left.min() < 0


def check_rotation(positions: int | None, tried: list[int]) -> None:
    """Rotations of a head as a matrix and as cosines and sines, against 60 digits of π."""
    phase = RotaryPhase(64, positions)
    phase.inv_freq = 1.0 / 10000 ** (torch.arange(0, 64, 2).float() / 64)
    phase.prepare()
    x = torch.randn(1, 3, 1, 64, generator=torch.Generator().manual_seed(0))
    for position in tried:
        angle = torch.tensor([_angle(position, float(f)) for f in phase.inv_freq.double()], dtype=torch.float64)
        c, s, (first, second) = angle.cos(), angle.sin(), x.double().chunk(2, -1)
        expected = torch.cat((first * c - second * s, second * c + first * s), -1)
        for rotation in (phase(torch.tensor([position])), phase.several(torch.tensor([position, 0]))):
            assert (
                rotate(x, [part[:1] if len(rotation) > 1 else part for part in rotation]) - expected
            ).abs().max() < 2e-6


@pytest.mark.parametrize("positions", [None, 1001], ids=["by digits", "by position"])
def test_there_is_no_rotation_past_the_last_row(positions: int | None) -> None:
    phase = RotaryPhase(8, positions)
    phase.prepare()
    with pytest.raises(IndexError):
        phase(torch.tensor([positions or 2**31 + 2**24]))


def _angle(position: int, frequency: float) -> float:
    """`position · frequency` modulo 2π, with 60 digits of π."""
    with localcontext() as context:
        context.prec = 60
        pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
        return float(Decimal(position) * Decimal(frequency) % (2 * pi))


@pytest.mark.parametrize("xpos", [False, True])
@pytest.mark.parametrize("first", [10**6, 59 * 2**24 - 20])
def test_far_positions_equal_near_ones(first: int, xpos: bool) -> None:
    """Without learned positions only distances count: once the rings hold real keys alone, nothing else shows."""
    kwargs = {
        "num_tokens": None,
        "max_seq_len": None,
        "dim": 16,
        "depth": 2,
        "local_attn_window_size": 4,
        "dim_head": 8,
        "heads": 2,
        "use_xpos": xpos,
    }
    pair = Pair(Case("far", "local_attention.LocalTransformer", kwargs, 1, 40))
    expected, step = pair.expected(), StepSource(pair.source, 1)
    module, caches = step.module("fp32"), [torch.zeros(x.shape) for x in step.caches("fp32")]
    x, outputs = torch.from_numpy(pair.inputs["x"]), []
    for i in range(40):
        output, *caches = step.call(module, [x[:, i : i + 1]], torch.tensor([first + i]), caches)
        outputs.append(output)
    settled = 2 * ring_slots(Case("", "local_attention.LocalTransformer", kwargs, 1, 40).geometry)
    got = torch.cat(outputs, dim=1).numpy()[:, settled:]
    assert np.abs(got - expected[:, settled:]).max() < 1e-4 * max(1.0, np.abs(expected).max())
