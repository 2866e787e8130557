"""One session, several threads: right numbers or one clear error, never a mixture of two texts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localattn.core.errors import UsageError
from localattn.runtime.generation.generator import Generator
from localattn.runtime.generation.step_session import open_step

from ...support.models import step_model

RUNTIMES = ["onnxruntime", "openvino"]


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    if request.param == "openvino":
        pytest.importorskip("openvino")
        return "openvino"
    return "auto"


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run work in threads that begin together; return what each returned or raised."""
    found: list[Any] = [None] * count
    together = threading.Barrier(count)

    def run(number: int) -> None:
        together.wait()
        try:
            found[number] = work(number)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_steps_of_several_threads_are_right_or_refused(tmp_path: Path, runtime: str) -> None:
    session = open_step(step_model.write(tmp_path), "cpu", 1, runtime=runtime)
    texts = np.random.default_rng(0).integers(0, 256, (8, 1, 11))

    def work(number: int) -> list[Any]:
        results: list[Any] = []
        for _ in range(25):
            try:
                session.reset()
                session.consume({"tokens": texts[number][:, :10]})
                results.append(session.advance({"tokens": texts[number][:, 10:]}).copy())
            except UsageError as error:
                results.append(error)
        return results

    right = refused = 0
    for number, results in enumerate(in_threads(8, work)):
        wanted = step_model.expected_logits(texts[number], 256)[:, -1]
        assert isinstance(results, list), results
        for result in results:
            if isinstance(result, UsageError):
                assert "Another thread" in result.what and "take_over" in result.fix
                refused += 1
            else:
                np.testing.assert_allclose(result[:, -1], wanted, rtol=1e-4, atol=1e-4)
                right += 1
    assert right + refused == 200 and right


@pytest.mark.parametrize("call", ["prefill", "step"])
def test_a_generator_returns_its_own_logits_when_another_text_begins_at_once(call: str, tmp_path: Path) -> None:
    """The other text begins when this call has let the session go, and before it returns."""
    generator = Generator.open(step_model.write(tmp_path), "cpu", 1)
    tokens = np.random.default_rng(2).integers(0, 256, (2, 1, 4))
    if call == "step":
        generator.prefill(tokens[0][:, :3])
    own_text, waiting, inside = generator.session.own_text, [tokens[1]], list[None]()

    def another(text: Any, _: int) -> None:
        generator.reset()
        generator.prefill(text)

    @contextmanager
    def interrupted() -> Iterator[None]:
        inside.append(None)
        with own_text():
            yield
        inside.pop()
        if waiting and not inside:  # calls inside this one still hold the session
            in_threads(1, partial(another, waiting.pop()))

    generator.session.own_text = interrupted  # type: ignore[method-assign]
    got = generator.prefill(tokens[0]) if call == "prefill" else generator.step(tokens[0][:, 3])
    np.testing.assert_allclose(got, step_model.expected_logits(tokens[0], 256)[:, -1], rtol=1e-4, atol=1e-4)
    assert not waiting


def test_a_text_belongs_to_its_thread_until_another_takes_it_over(tmp_path: Path) -> None:
    session = open_step(step_model.write(tmp_path), "cpu", 1)
    tokens = np.random.default_rng(1).integers(0, 256, (1, 6))
    session.consume({"tokens": tokens[:, :3]})
    (refused,) = in_threads(1, lambda _: session.advance({"tokens": tokens[:, 3:4]}))
    assert isinstance(refused, UsageError) and session.position == 3, "nothing was consumed"

    def go_on(_: int) -> Any:
        session.take_over()
        return session.advance({"tokens": tokens[:, 3:4]}).copy()

    (taken,) = in_threads(1, go_on)
    np.testing.assert_allclose(
        taken[:, -1], step_model.expected_logits(tokens[:, :4], 256)[:, -1], rtol=1e-4, atol=1e-4
    )
    with pytest.raises(UsageError, match="Another thread"):
        session.advance({"tokens": tokens[:, 4:5]})  # that thread is over, but it took the place of this one
    session.take_over()
    got = session.advance({"tokens": tokens[:, 4:5]})
    np.testing.assert_allclose(got[:, -1], step_model.expected_logits(tokens[:, :5], 256)[:, -1], rtol=1e-4, atol=1e-4)


def test_a_text_whose_thread_is_over_goes_on_in_any_other(tmp_path: Path) -> None:
    session = open_step(step_model.write(tmp_path), "cpu", 1)
    tokens = np.random.default_rng(1).integers(0, 256, (1, 4))
    in_threads(1, lambda _: session.consume({"tokens": tokens[:, :3]}))
    got = session.advance({"tokens": tokens[:, 3:]})
    np.testing.assert_allclose(got[:, -1], step_model.expected_logits(tokens, 256)[:, -1], rtol=1e-4, atol=1e-4)


def test_generators_of_several_threads_write_their_own_text_or_say_so(tmp_path: Path, runtime: str) -> None:
    generator = Generator.open(step_model.write(tmp_path), "cpu", 1, runtime=runtime)
    prompts = np.random.default_rng(2).integers(0, 256, (8, 7))
    wanted = [np.concatenate(list(generator.generate(prompt, 12, temperature=0))).tolist() for prompt in prompts]

    def work(number: int) -> list[Any]:
        results: list[Any] = []
        for _ in range(10):
            try:
                stream = generator.generate(prompts[number], 12, temperature=0)
                results.append(np.concatenate(list(stream)).tolist())
            except UsageError as error:
                results.append(error)
        return results

    found = in_threads(8, work)
    for number, results in enumerate(found):
        assert isinstance(results, list), results
        for result in results:
            if isinstance(result, UsageError):
                assert "cannot continue" in result.what
            else:
                assert result == wanted[number]


def test_a_stream_may_go_from_thread_to_thread(tmp_path: Path) -> None:
    """As servers iterate one: each token in whichever thread of a pool is free."""
    generator = Generator.open(step_model.write(tmp_path), "cpu", 1)
    wanted = np.concatenate(list(generator.generate([1, 2, 3], 10, temperature=0))).tolist()
    stream = generator.generate([1, 2, 3], 10, temperature=0)
    got = [int(in_threads(1, lambda _: next(stream))[0][0]) for _ in range(10)]
    assert got == wanted


def test_two_streams_of_one_generator_do_not_mix(tmp_path: Path) -> None:
    generator = Generator.open(step_model.write(tmp_path), "cpu", 1)
    first = generator.generate([1, 2, 3], 10, temperature=0)
    next(first)
    second = generator.generate([4, 5], 10, temperature=0)
    with pytest.raises(UsageError, match="cannot continue"):
        next(first)
    wanted = np.concatenate(list(Generator.open(tmp_path / "model_step.onnx").generate([4, 5], 10, temperature=0)))
    assert np.concatenate(list(second)).tolist() == wanted.tolist()
    third = generator.generate([4, 5], 10, temperature=0)
    next(third)
    generator.step(7)
    with pytest.raises(UsageError, match="cannot continue"):
        next(third)
