"""Runners: each kind beside the float64 reference, at lengths around the multiples of the window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localattn.core.documents.sidecar import Sidecar, read_sidecar
from localattn.core.errors import CheckFailed, UsageError
from localattn.core.tensors import TensorSpec
from localattn.core.tolerance import Tolerance, tolerance_for
from localattn.exporter.export import ExportRequest, export, open_request
from localattn.exporter.options import ShapeRequest
from localattn.exporter.source.reference_runner import ReferenceRunner
from localattn.runtime import load
from localattn.runtime.generation.array_step import ArrayStep
from localattn.runtime.inputs.arrays import random_inputs
from localattn.runtime.parity.compare import compare
from localattn.runtime.parity.runner import Runner, SessionRunner, StepRunner, open_runner
from localattn.runtime.session import Arrays

from ...conftest import TINY, Finished, save_upstream
from ...support.models.parity_folder import open_and_steps
from ...support.steps import export_steps

Command = Callable[..., Finished]
WINDOW, CHUNK = TINY["local_attn_window_size"], 8
LENGTHS = sorted({1, 2, *(multiple * WINDOW + n for multiple in (1, 2, 3, 6) for n in (-1, 0, 1)), 64})
TOLERANCE = tolerance_for("fp32")
MHA = {"dim": 16, "window_size": 4, "heads": 2, "dim_head": 8, "causal": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small transformer, its file with dynamic sizes and its step files with chunks of 8."""
    made = tmp_path_factory.mktemp("made")
    open_and_steps(made)
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReferenceRunner:
    request = ExportRequest(folder / "model.pt", folder / "unused.onnx", dynamic=("batch", "seq"))
    return ReferenceRunner(open_request(request)[1], axes=("batch", "seq"))


def plain_steps(folder: Path, *chunks: int) -> ArrayStep:
    """The step files in plain sessions, the smallest one first."""
    sidecar = read_sidecar(folder / ("step.onnx" if 1 in chunks else "step.prefill.onnx"))
    assert sidecar is not None and sidecar.step is not None
    names = {1: "step.onnx", CHUNK: "step.prefill.onnx"}
    return ArrayStep(sidecar.step, {chunk: load(folder / names[chunk], "cpu", plugin="none") for chunk in chunks})


RUNNERS: dict[str, tuple[int, Callable[[Path], Runner]]] = {
    "a session": (1, lambda folder: open_runner(folder / "open.onnx", "cpu", "none")),
    "a step file": (1, lambda folder: open_runner(folder / "step.onnx", "cpu", "none")),
    "chunks, then steps": (1, lambda folder: open_runner(folder / "step.onnx", "cpu", "none").modes()[1]),
    "a prefill file": (CHUNK, lambda folder: open_runner(folder / "step.prefill.onnx", "cpu", "none")),
    "steps in plain sessions": (1, lambda folder: StepRunner(plain_steps(folder, 1))),
    "chunks in plain sessions": (CHUNK, lambda folder: StepRunner(plain_steps(folder, CHUNK))),
    "both in plain sessions": (1, lambda folder: StepRunner(plain_steps(folder, 1, CHUNK), singles=3)),
}


def drawn(runner: Runner, length: int, batch: int = 1, seed: int = 0) -> Arrays:
    return random_inputs(runner.inputs, seed, TINY["num_tokens"], {"batch": batch, "seq": length})


@pytest.mark.parametrize(("multiple", "opened"), RUNNERS.values(), ids=RUNNERS)
def test_every_runner_equals_the_reference(
    folder: Path, reference: ReferenceRunner, multiple: int, opened: Callable[[Path], Runner]
) -> None:
    runner = opened(folder)
    assert runner.outputs == ["logits"] and runner.sequence_axis("logits") in (1, -2)
    for length in (n for n in LENGTHS if n % multiple == 0):
        inputs = drawn(runner, length)
        outputs, expected, (comparison,) = compare(runner, reference, inputs, TOLERANCE, spread=True)
        assert outputs["logits"].shape == expected["logits"].shape == (1, length, TINY["num_tokens"])
        assert comparison.passed and comparison.count == outputs["logits"].size, (length, comparison)
        assert comparison.spread is not None and comparison.spread.positions == tuple(range(length))
        # One other token in the middle is seen by the file as by the reference, and nowhere else.
        other = {"tokens": inputs["tokens"].copy()}
        other["tokens"][:, length // 2] = (other["tokens"][:, length // 2] + 1) % TINY["num_tokens"]
        assert compare(runner, reference, other, TOLERANCE).comparisons[0].passed
        assert not compare(runner, reference, other, TOLERANCE, expected=expected).comparisons[0].passed


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        (("batch", "seq", 16), -2),
        (("batch", 2, "seq", 16), -2),
        (("seq", "batch", 64), -3),
        ((2, 64, 64), -2),
        (("batch", "seq"), -1),
        ((1, 64), -1),
        ((64, 64), -2),
        (("batch", 3), -2),
    ],
    ids=str,
)
def test_the_sequence_is_found_by_its_size(shape: tuple[int | str, ...], axis: int) -> None:
    session: Any = SimpleNamespace(backend="", provider="cpu", plugin=None, notes=(), inputs=[])
    session.output = TensorSpec("out", "float32", shape)
    runner = SessionRunner(session, sidecar=Sidecar.model_construct(seq_len=64, batch=1, kwargs={}))
    assert runner.sequence_axis("out") == axis


def test_a_batch_is_taken_as_it_comes(folder: Path, reference: ReferenceRunner) -> None:
    runner = open_runner(folder / "open.onnx", "cpu", "none")
    for batch in (1, 3):
        (comparison,) = compare(runner, reference, drawn(runner, 9, batch), TOLERANCE).comparisons
        assert comparison.passed and comparison.count == batch * 9 * TINY["num_tokens"]
    with pytest.raises(UsageError):
        runner.run({"tokens": np.zeros((1, 2, 3), np.int64)})


class Altered(Runner):
    """Another runner whose outputs are changed."""

    name = "altered"

    def __init__(self, runner: Runner, change: Callable[[Arrays], Arrays]) -> None:
        self._runner, self._change = runner, change

    def run(self, inputs: Arrays) -> Arrays:
        return self._change(self._runner.run(inputs))


def test_any_runner_can_be_compared_and_a_wrong_one_is_found(folder: Path, reference: ReferenceRunner) -> None:
    runner = open_runner(folder / "open.onnx", "cpu", "none")
    inputs = drawn(runner, 9)
    found = compare(Altered(runner, lambda x: {"logits": x["logits"] * 1.01}), runner, inputs, TOLERANCE)
    assert not found.comparisons[0].passed and found.comparisons[0].max_rel == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(CheckFailed, match="altered has no output 'logits'"):
        compare(Altered(runner, lambda x: {"scores": x["logits"]}), reference, inputs, TOLERANCE)
    with pytest.raises(CheckFailed, match="another shape"):
        compare(Altered(runner, lambda x: {"logits": x["logits"][:, :-1]}), reference, inputs, TOLERANCE)
    both = Altered(runner, lambda x: {**x, "more": -x["logits"]})
    assert [x.name for x in compare(both, reference, inputs, TOLERANCE).comparisons] == ["logits"]


def test_a_sampled_reference_is_compared_where_it_computes(tmp_path: Path) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY | {"max_seq_len": 2100, "depth": 1})
    request = ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=ShapeRequest(2100, batch=3), seeds=(0,))
    report = export(request)
    detail = next(check.detail for check in report.sidecar.checks if check.name == "parity")
    source = open_request(ExportRequest(checkpoint, tmp_path / "n.onnx", shapes=request.shapes))[1]
    reference = ReferenceRunner(source, samples=True, few_sequences=True)
    runner = SessionRunner(load(tmp_path / "m.onnx", "cpu", plugin="none"))
    inputs = random_inputs(reference.inputs, 0, reference.token_limit)
    sequences, positions = (np.flatnonzero(reference.sample(inputs)[axis]) for axis in (0, -2))
    assert sequences.tolist() == [0, 2] and {0, WINDOW, 2099} <= set(positions.tolist())
    assert f"2 of 3 sequences, {len(positions)} of 2100 positions" in detail
    outputs, expected, (comparison,) = compare(runner, reference, inputs, TOLERANCE, spread=True)
    assert comparison.passed and expected["logits"].shape == (2, len(positions), TINY["num_tokens"])
    assert comparison.spread is not None and comparison.spread.positions[-1] > 2048
    whole = reference.unsampled().run(inputs)["logits"]
    np.testing.assert_allclose(whole[[0, 2]][:, positions], expected["logits"], rtol=0, atol=1e-12)
    assert not reference.unsampled().sample(inputs) and whole.shape == outputs["logits"].shape

    def spoiled(x: Arrays, at: tuple[int, int]) -> Arrays:
        logits = x["logits"].copy()
        logits[at] += 1
        return {"logits": logits}

    for at, passed in (((2, 2099), False), ((0, 0), False), ((1, 0), True), ((0, 1000), True)):
        wrong = Altered(runner, lambda x, at=at: spoiled(x, at))  # type: ignore[misc]
        assert compare(wrong, reference, inputs, TOLERANCE).comparisons[0].passed == passed
    longer = Altered(runner, lambda x: {"logits": np.concatenate([x["logits"], x["logits"][:, -1:]], axis=1)})
    with pytest.raises(CheckFailed, match="another shape"):
        compare(longer, reference, inputs, TOLERANCE)


def test_steps_in_plain_sessions_are_those_of_bound_buffers(folder: Path) -> None:
    plain, bound = StepRunner(plain_steps(folder, 1)), open_runner(folder / "step.onnx", "cpu", "none", prefill=False)
    inputs = drawn(plain, 19)
    assert compare(plain, bound, inputs, Tolerance(0, 0)).comparisons[0].passed
    assert plain.session.position == 19
    state = plain.session.state
    assert state["position"].tolist() == [19] and len(state) == 1 + len(plain.record.caches)
    assert all(np.abs(array).max() > 0 for array in state.values())
    assert bound.modes() == [bound], "the prefill file was not asked for"


def test_single_tokens_follow_the_chunks(folder: Path) -> None:
    calls: list[int] = []

    class Counted(ArrayStep):
        def _execute(self, inputs: Arrays, chunk: int) -> NDArray[Any]:
            calls.append(chunk)
            return super()._execute(inputs, chunk)

    steps = plain_steps(folder, 1, CHUNK)
    counted = Counted(steps.record, steps._sessions)
    for singles, wanted in ((0, [8, 8, 8]), (1, [8, 8, *[1] * 8]), (None, [1] * 24)):
        calls.clear()
        runner = StepRunner(counted, singles=singles)
        runner.run(drawn(runner, 24))
        assert calls == wanted


def test_every_sequence_of_a_step_files_batch_is_drawn(tmp_path: Path, localattn: Command) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", MHA)
    request = ExportRequest(checkpoint, tmp_path / "s.onnx", shapes=ShapeRequest(batch=3))
    export_steps(request, chunk=1)
    saved = ("--save-inputs", tmp_path / "in.npz", "--save-outputs", tmp_path / "out.npz")
    finished = localattn("parity", tmp_path / "s.onnx", "--against", checkpoint, "--seeds", 1, *saved)
    assert finished.code == 0, finished.err
    x, outputs = np.load(tmp_path / "in.npz")["x"], np.load(tmp_path / "out.npz")
    assert len(x) == 3 and len({row.tobytes() for row in x}) == 3
    np.testing.assert_allclose(outputs["out"], outputs["out.reference"], atol=1e-5)
    again = localattn("parity", tmp_path / "s.onnx", "--against", checkpoint, "--load-inputs", tmp_path / "in.npz")
    assert again.code == 0, again.err


def test_nothing_compared_is_not_equal(tmp_path: Path, localattn: Command) -> None:
    attention = {"window_size": 4, "causal": True, "dim": 8, "autopad": False}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalAttention", attention)
    export(ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=ShapeRequest(16, heads=2), dynamic=("seq",)))
    pair = (tmp_path / "m.onnx", "--against", checkpoint)
    some = localattn("parity", *pair, "--seq-len", "8,3", "--seeds", 2)
    assert some.code == 0 and some.err.count("not compared at seq=3") == 1 and "seq=8" in some.out
    x = np.zeros((1, 2, 7, 8), np.float32)
    np.savez(tmp_path / "in.npz", q=x, k=x, v=x)
    none = localattn("parity", *pair, "--load-inputs", tmp_path / "in.npz")
    assert none.code == 2 and "inputs was accepted by both" in none.err and "multiple of the window size" in none.err


def test_given_numbers_are_cast_to_the_files_float_type(tmp_path: Path, localattn: Command) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", MHA)
    export(ExportRequest(checkpoint, tmp_path / "m.onnx", dtype="fp16", shapes=ShapeRequest(9), seeds=(0,)))
    np.savez(tmp_path / "in.npz", x=np.random.default_rng(0).standard_normal((1, 9, 16)).astype(np.float32))
    pair = (tmp_path / "m.onnx", "--against", checkpoint)
    assert localattn("parity", *pair, "--load-inputs", tmp_path / "in.npz").code == 0
    np.savez(tmp_path / "in.npz", x=np.zeros((1, 9, 16), np.int64))
    assert localattn("parity", *pair, "--load-inputs", tmp_path / "in.npz").code == 2
