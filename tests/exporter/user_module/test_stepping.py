"""A module of the user's own a few tokens at a time: equal to the module itself, or refused by module and operator."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import localattn as package
from localattn.core.errors import LocalAttnError
from localattn.exporter.jobs.module import ModuleOptions
from localattn.exporter.user_module.opened_module import OpenedModule
from localattn.exporter.user_module.stepping.module import StepModule
from localattn.exporter.user_module.stepping.stepped import Stepped

from ...support.models import stepping
from ...support.models.stepping import CHANNELS, FRAMES, TOKENS
from ...support.own_module import cache, tagger
from .test_replace import randomised

POOLED = """from torch import nn


class Pool(nn.Module):
    def forward(self, x):
        # over time
        return x.mean(dim=1, keepdim=True)


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.head = Pool(), nn.Linear(6, 3)

    def forward(self, frames):
        return self.head(frames - self.pool(frames))
"""
BOTH = ["x:float32:[2,seq=40,16]"]
STEPS = [
    (stepping.Everything, TOKENS, 40),
    (stepping.TokenShift, FRAMES, 40),
    (stepping.Bare, FRAMES, None),
    (stepping.BiasOfPadding, FRAMES, None),
    (stepping.Dilated, CHANNELS, None),
    (stepping.TwoRows, BOTH, None),
    (stepping.LearnedStart, FRAMES, None),
    (stepping.Transformer, TOKENS, 40),
    (stepping.Einsum, FRAMES, None),
    (stepping.Gated, FRAMES, None),
]
REFUSED = {
    "mean": "mean over time needs the whole sequence",
    "bidirectional": "both, recurrent.*bidirectional",
    "last_state": "gru, last_state.*after the last position",
    "padding": "same, conv1d.*depends on 1 later one: the kernel of 3 needs 2 entries of padding on the left",
    "not_causal": "looks_ahead, attention.*not causal",
    "masked": "attn, attention.*takes a mask",
    "dense": "scaled_dot_product_attention.*attends to all positions",
    "scores": "matmul.*combines each position with all positions",
    "group_norm": "group, group_norm.*whole sequence",
    "reversed": "flip.*order of the positions",
    "length": "div.*length of the sequence",
    "first": "fixed positions of the sequence",
    "later": "drops the first positions",
    "from_the_end": "add.* belongs to a position depends on the length of the sequence",
    "two": "returns out_0, out_1",
}


def opened(module: nn.Module, inputs: list[str]) -> OpenedModule:
    return OpenedModule(module, inputs, ModuleOptions(dynamic=("seq",)))


@pytest.mark.parametrize(("kind", "inputs", "positions"), STEPS, ids=lambda x: getattr(x, "__name__", ""))
def test_calls_one_after_another_are_the_module(
    kind: type[nn.Module], inputs: list[str], positions: int | None
) -> None:
    module = randomised(kind())
    own = opened(module, inputs)
    stepped = Stepped(own, 7)
    given = own.draw(3, own.sizes)
    (wanted,) = own.reference.run(given).values()
    assert stepped.max_positions == (positions or 2**31 - 1)
    for chunk, plan in stepped.plans.items():
        steps = StepModule(plan)
        caches = [torch.full(cache.shape, cache.fill, dtype=cache.dtype) for cache in plan.caches]
        found = []
        for start in range(0, 40 // chunk * chunk, chunk):
            data = [torch.from_numpy(x).narrow(stepped.axis, start, chunk) for x in given.values()]
            with torch.no_grad():
                output, *caches = steps(data, torch.tensor([start]), caches)
            found.append(output.numpy())
        actual = np.concatenate(found, stepped.axis)
        expected = wanted.take(range(actual.shape[stepped.axis]), stepped.axis)
        np.testing.assert_allclose(actual, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_needs_more_than_the_past_is_refused_by_name(kind: str) -> None:
    with pytest.raises(LocalAttnError, match="Refused cannot run step by step") as refused:
        Stepped(opened(stepping.Refused(kind), FRAMES), None)
    assert re.search(REFUSED[kind], refused.value.why), refused.value.why


def test_a_refusal_names_the_users_line(tmp_path: Path, localattn) -> None:
    (tmp_path / "pooled.py").write_text(POOLED)
    given = ("--factory", f"{tmp_path}/pooled.py:Pooled", "--input", "frames:float32:[1,seq=12,6]", "--mode", "step")
    done = localattn("export", *given, "-o", tmp_path / "m.onnx")
    assert done.code == 2 and "Pooled cannot run step by step" in done.err
    assert "pool, mean (`return x.mean(dim=1, keepdim=True)`, pooled.py:7): mean over time" in done.err


def test_a_step_file_of_an_own_module(tmp_path: Path, localattn) -> None:
    folder, output = tagger(), tmp_path / "own_step.onnx"
    given = ("--factory", f"{folder}/tagger.py:build", "--weights", folder / "epoch.ckpt", "--seq-len", 48)
    with cache(tmp_path):
        made = localattn("export", *given, "--input", "frames:float32:[batch,seq,6]", "--mode", "step", "-o", output)
        assert made.code == 0 and "2 of" in made.out and made.out.count("✓ parity") == 2, made.err
        same = localattn("parity", output, "--against", folder / "epoch.ckpt", "--seeds", 1)
        assert same.code == 0 and "equal within" in same.out, same.err
    x = np.random.default_rng(0).standard_normal((1, 60, 6), np.float32)
    whole = package.load(folder / "model.onnx").run({"frames": x[:, :24]})["scores"]
    step = package.open_step(output)
    assert step.chunks == (1, 64)
    calls = [step.advance({"frames": x[:, [place]]}) for place in range(24)]
    np.testing.assert_allclose(np.concatenate(calls, 1), whole, atol=1e-5)
    done = localattn("bundle", output, "-o", tmp_path / "own.tar", "--samples", 1)
    assert done.code == 0 and localattn("bundle", "verify", tmp_path / "own.tar").code == 0
    assert localattn("run", output).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"weight_dtype": "int8"}, {"standard_ops": True}, {"mode": "prefill", "chunk": 5}]
)
def test_files_in_every_form(options: dict, tmp_path: Path) -> None:
    settings = {"mode": "step", "seq_len": 90, **options}
    torch.manual_seed(0)
    report = package.export_module(
        randomised(stepping.Everything()), ["tokens:int64:[batch,seq]"], tmp_path / "m.onnx", **settings
    )
    assert report.passed and {check.name: check.status for check in report.checks}["parity"] == "passed"
    step = report.sidecar.step
    assert step is not None and step.max_positions == 90 and not step.in_place


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "fp16"}, "does not apply to steps"),
        ({"dynamic": ("seq",)}, "does not apply to"),
        ({"chunk": 41, "seq_len": 40}, "beyond the file's 40 positions"),
        ({"mode": "full", "chunk": 4}, "needs `mode='step'`"),
    ],
)
def test_options_that_do_not_go_with_steps(options: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(package.UsageError, match=said):
        package.export_module(stepping.Everything(), TOKENS, tmp_path / "m.onnx", **{"mode": "step", **options})
