"""The generator on a step file made by hand, whose logits are known by formula."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest

from localattn.core.documents.sidecar import sidecar_path
from localattn.core.errors import UsageError
from localattn.runtime.generation.generator import ENDED, Generator
from localattn.runtime.generation.step_session import open_step

from ...support.models import step_model


def tokens_of(batch, length, vocabulary=256, seed=0):
    return np.random.default_rng(seed).integers(0, vocabulary, (batch, length))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("prefill_in_place", [True, False])
@pytest.mark.parametrize(("batch", "chunk"), [(1, 4), (2, 5), (3, 1)])
def test_logits_are_those_of_the_formula_however_tokens_come(tmp_path, in_place, prefill_in_place, batch, chunk):
    path = step_model.write(tmp_path, batch=batch, chunk=chunk, in_place=in_place, prefill_in_place=prefill_in_place)
    generator = Generator.open(path, "cpu", 1)
    assert (generator.batch, generator.vocabulary) == (batch, 256)
    tokens = tokens_of(batch, 31)
    step_model.check_logits(generator, tokens, 256, ([31], [1] * 31, [13, 1, 1, 4, 9, 3], [4, 4, 1, 22]))


def test_greedy_generation_is_that_of_full_recomputation(tmp_path):
    path = step_model.write(tmp_path, batch=2)
    prompt = tokens_of(2, 6)
    text = prompt
    for _ in range(20):
        following = step_model.expected_logits(text, 256)[:, -1].argmax(axis=1)
        text = np.concatenate([text, following[:, None]], axis=1)
    generator = Generator.open(path)
    for _ in range(2):  # the second time after a reset
        got = np.stack(list(generator.generate(prompt, 20, temperature=0)), axis=1)
        np.testing.assert_array_equal(got, text[:, 6:])
    assert generator.position == 6 + 19, "the last token is not consumed"


def test_seeds_decide(tmp_path):
    generator = Generator.open(step_model.write(tmp_path))

    def run(**settings):
        return np.concatenate(list(generator.generate([1, 2, 3], 12, temperature=5.0, **settings))).tolist()

    assert run(seed=4) == run(seed=4) != run(seed=5)
    assert run(seed=4, top_k=1) == np.concatenate(list(generator.generate([1, 2, 3], 12, temperature=0))).tolist()


def test_a_row_does_not_depend_on_the_rows_beside_it(tmp_path):
    for name, batch in (("one", 1), ("three", 3)):
        (tmp_path / name).mkdir()
        step_model.write(tmp_path / name, batch=batch)
    three = Generator.open(tmp_path / "three" / "model_step.onnx")
    rows = np.stack(list(three.generate([5, 6, 7, 8, 9], 10, seed=2, temperature=3.0)), axis=1)
    one = Generator.open(tmp_path / "one" / "model_step.onnx")
    for row in range(3):
        alone = np.concatenate(list(one.generate([5, 6, 7, 8, 9], 10, seed=2, temperature=3.0, first_row=row)))
        assert alone.tolist() == rows[row].tolist()


def test_stop_tokens_end_their_row(tmp_path):
    generator = Generator.open(step_model.write(tmp_path, batch=2))
    free = np.stack(list(generator.generate([3, 4], 40, seed=1, temperature=4.0)))
    first, second = free[4, 0], free[9, 1]
    assert first not in free[:4, 0] and first not in free[:10, 1] and second not in free[:9]  # of this seed
    got = np.stack(list(generator.generate([3, 4], 40, seed=1, temperature=4.0, stop=[first, second])))
    assert len(got) == 10
    assert got[:5, 0].tolist() == free[:5, 0].tolist() and (got[5:, 0] == ENDED).all()
    assert got[:, 1].tolist() == free[:10, 1].tolist()


def test_without_a_limit_it_goes_on(tmp_path):
    generator = Generator.open(step_model.write(tmp_path))
    assert len(list(itertools.islice(generator.generate([1]), 500))) == 500
    assert generator.room(10**9) is None


def test_positions_end(tmp_path):
    generator = Generator.open(step_model.write(tmp_path, max_positions=10))
    assert generator.room(4) == 7
    assert len(list(generator.generate([1, 2, 3, 4]))) == 7
    assert generator.position == 10
    with pytest.raises(UsageError, match="no position 11"):
        generator.step(1)
    assert generator.position == 10, "a refused token is not consumed"
    with pytest.raises(UsageError, match="8 tokens after a prompt of 4") as caught:
        generator.generate([1, 2, 3, 4], 8)
    assert "Generate at most 7" in caught.value.fix
    with pytest.raises(UsageError, match="after a prompt of 11"):
        generator.generate(list(range(11)), 1)
    generator.reset()
    with pytest.raises(UsageError, match="no position 11"):
        generator.prefill(list(range(11)))
    assert generator.position == 0
    assert len(list(generator.generate(list(range(10)), 1))) == 1


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([], "cannot be consumed"),
        ([256], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        ([0.5], "not integers"),
        ([[1], [2]], "cannot be consumed"),
        (3, "cannot be consumed"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(tmp_path, ids, says):
    generator = Generator.open(step_model.write(tmp_path))
    with pytest.raises(UsageError, match=says):
        generator.generate(ids, 3)
    with pytest.raises(UsageError, match="no logits yet"):
        _ = generator.logits


def test_without_its_prefill_file_it_reads_token_by_token(tmp_path):
    path = step_model.write(tmp_path)
    with_it = [t.tolist() for t in Generator.open(path).generate(tokens_of(1, 30), 8, temperature=0)]
    (tmp_path / "model_step.prefill.onnx").unlink()
    generator = Generator.open(path)
    assert generator.session.missing_prefill == "model_step.prefill.onnx" and generator.session.chunks == (1,)
    assert [t.tolist() for t in generator.generate(tokens_of(1, 30), 8, temperature=0)] == with_it


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    path = step_model.write(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    step_model.write(other, batch=2)
    for name in ("model_step.prefill.onnx", "model_step.prefill.onnx.json"):
        shutil.copy(other / name, tmp_path / name)
    with pytest.raises(UsageError, match="does not belong"):
        open_step(path)
    shutil.copy(other / "model_step.onnx", path)
    with pytest.raises(UsageError, match="not the file that its sidecar describes"):
        sidecar_path(tmp_path / "model_step.prefill.onnx").unlink()
        open_step(path)


def test_what_is_no_step_file_is_refused_with_the_way_to_one(tmp_path):
    path = step_model.write(tmp_path)
    with pytest.raises(UsageError, match="prefill file"):
        open_step(tmp_path / "model_step.prefill.onnx")
    sidecar = sidecar_path(path)
    text = sidecar.read_text()
    sidecar.unlink()
    with pytest.raises(UsageError, match="Cannot generate") as caught:
        open_step(path)
    assert "sidecar" in caught.value.why
    sidecar.write_text(text.replace('"step": {', '"ignored": {'))
    with pytest.raises(UsageError, match="not a step file") as caught:
        open_step(path)
    assert "localattn export model.pt --mode step" in caught.value.fix
    for wrong in ("missing.onnx", "model.engine"):
        with pytest.raises(UsageError, match="Cannot generate"):
            open_step(tmp_path / wrong)
    with pytest.raises(UsageError, match="threads is 0"):
        open_step(path, threads=0)


def test_memory_stays_where_it_was(tmp_path):
    """Buffers are bound once: ten thousand tokens leave no more behind than the first thousand."""
    import resource

    generator = Generator.open(step_model.write(tmp_path, in_place=False), "cpu", 1)
    buffers = set()
    peaks = []
    for count in (1_000, 10_000):
        for tokens in generator.generate([1, 2], count, temperature=0):
            buffers.add((generator.logits.ctypes.data, tokens.shape))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert len(buffers) <= 2, "the logits of the prefill file and of the step file"
    assert peaks[1] - peaks[0] <= 2048, "KiB"
