"""One call of a step file by `run`, `bench` and `bundle`: the position is no token, and a sequence begins empty."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from localattn.core.documents.sidecar import read_sidecar
from localattn.core.documents.step_record import CacheRecord
from localattn.core.errors import UsageError
from localattn.core.tensors import TensorSpec
from localattn.exporter.options import ShapeRequest
from localattn.runtime.bench.inputs import Sizes, draw
from localattn.runtime.generation.step_session import open_step
from localattn.runtime.inputs.arrays import load_arrays
from localattn.runtime.inputs.example_inputs import first_call

from ...conftest import TINY, Finished, save_upstream
from ...exporter.test_step_export import MHA, TRANSFORMER, save_aft, steps

Command = Callable[..., Finished]
# Far more tokens than positions, as models have: drawn like a token, the position would nearly always be too large.
WORDY = TINY | {"num_tokens": 5000}


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step file of 64 positions, with a companion that takes 8 tokens."""
    return steps(save_upstream(tmp_path_factory.mktemp("wordy"), TRANSFORMER, WORDY), 8)[0].path


@pytest.fixture(scope="module")
def files(wordy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Step files of a model with tokens, of one without a vocabulary, and of one whose caches are sums."""
    mha = save_upstream(tmp_path_factory.mktemp("mha"), "local_attention.LocalMHA", MHA)
    aft = save_aft(tmp_path_factory.mktemp("aft"))
    return {
        "tokens": wordy,
        "embeddings": steps(mha)[0].path,
        "sums": steps(aft, shapes=ShapeRequest(causal=True))[0].path,
    }


@pytest.mark.parametrize("kind", ["tokens", "embeddings", "sums"])
def test_random_inputs_begin_a_sequence(files: dict[str, Path], kind: str, localattn: Command, tmp_path: Path) -> None:
    """What `run` returns is what the session that fills the caches itself returns for the first token."""
    path, saved = files[kind], tmp_path / "out.npz"
    ran = localattn("run", path, "--seed", "4", "--save-outputs", saved, "--format", "json", "--provider", "cpu")
    assert ran.code == 0, ran.err
    sidecar = read_sidecar(path)
    assert sidecar is not None and sidecar.step is not None
    step = sidecar.step
    session = open_step(path, provider="cpu")
    drawn = draw(session.inputs, Sizes(1, 1), sidecar, 4)
    wanted = session.consume(drawn)
    np.testing.assert_array_equal(load_arrays(saved)[step.logits_output], wanted)
    ranges = {fact["name"]: (fact["min"], fact["max"]) for fact in json.loads(ran.out)["inputs"]}
    assert ranges[step.position_input] == (0, 0)
    assert {name: ranges[name] for name in first_call(step)} == {
        step.position_input: (0, 0),
        **{cache.input: (cache.fill, cache.fill) for cache in step.caches},
    }


def test_bench_measures_the_same_call(wordy: Path, localattn: Command) -> None:
    timed = localattn("bench", wordy, "--duration", "0", "--iterations", "1", "--rounds", "1", "--format", "json")
    assert timed.code == 0, timed.err
    specs = [TensorSpec("tokens", "int64", (1, 1)), TensorSpec("position", "int64", (1,))]
    drawn = [draw(specs, Sizes(1, 1), read_sidecar(wordy), seed) for seed in range(9)]
    assert {int(arrays["position"][0]) for arrays in drawn} == {0}
    assert max(int(arrays["tokens"].max()) for arrays in drawn) >= 64


def given(path: Path, folder: Path, position: object) -> Path:
    sidecar = read_sidecar(path)
    assert sidecar is not None and sidecar.step is not None
    tokens = np.full((1, sidecar.step.chunk), 4999)
    file = folder / "in.npz"
    np.savez(file, **{**first_call(sidecar.step), "tokens": tokens, "position": np.asarray(position)})
    return file


@pytest.mark.parametrize(("last", "name"), [(63, "m_step.onnx"), (56, "m_step.prefill.onnx")])
def test_a_position_has_limits_of_its_own(
    wordy: Path, last: int, name: str, localattn: Command, tmp_path: Path
) -> None:
    path = wordy.with_name(name)
    for position in (0, 30, last):
        assert localattn("run", path, "--load-inputs", given(path, tmp_path, [position])).code == 0
    for position in (-1, last + 1, 4999):
        for command in (("run", path), ("bundle", path, "-o", tmp_path / "bundle")):
            refused = localattn(*command, "--load-inputs", given(path, tmp_path, [position]))
            assert refused.code == 2
            assert "Input 'position'" in refused.err and f"is {position}." in refused.err
            assert f"from 0 to {last}" in refused.err
    assert not (tmp_path / "bundle").exists()


def test_a_position_of_another_shape_or_type_is_refused(wordy: Path, localattn: Command, tmp_path: Path) -> None:
    for position in ([0, 0], [0.5]):
        refused = localattn("run", wordy, "--load-inputs", given(wordy, tmp_path, position))
        assert refused.code == 2 and "position" in refused.err


def test_open_sizes_are_those_of_the_export(tmp_path: Path, localattn: Command) -> None:
    checkpoint = save_upstream(tmp_path, TRANSFORMER, TINY)
    made = localattn("export", checkpoint, "--seq-len", "24", "--dynamic", "batch,seq", "-q")
    assert made.code == 0, made.err
    ran = localattn("run", checkpoint.with_suffix(".onnx"), "--format", "json")
    assert ran.code == 0, ran.err
    sidecar = read_sidecar(checkpoint.with_suffix(".onnx"))
    assert sidecar is not None and sidecar.seq_len == 24
    assert json.loads(ran.out)["inputs"][0]["shape"] == [sidecar.batch, 24]


def test_a_type_that_numpy_has_not_is_an_error(wordy: Path) -> None:
    sidecar = read_sidecar(wordy)
    assert sidecar is not None and sidecar.step is not None
    strange = CacheRecord(input="a", output="b", shape=[2], dtype="float7")
    with pytest.raises(UsageError, match="'a' cannot be filled"):
        first_call(sidecar.step.model_copy(update={"caches": [strange]}))
