"""Generating with exported models: the same logits as whole sequences give, at every position."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from localattn.core.errors import UsageError
from localattn.demo import checkpoint_path, config_path, validation_path
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest
from localattn.runtime.generation.generator import Generator
from localattn.runtime.generation.step_session import open_step
from localattn.runtime.session import load

from ...conftest import TINY, save_upstream
from ...support.steps import export_steps

# Pieces a prompt of 64 comes in: single tokens, whole chunks, chunks with a rest.
PIECES = {"one by one": [1] * 64, "at once": [64], "mixed": [1, 13, 2, 20, 7, 21]}


def both(checkpoint, folder, length, chunk, **shapes):
    """Step file and full file of a checkpoint."""
    step, full = folder / "step.onnx", folder / "full.onnx"
    export_steps(ExportRequest(checkpoint, step, shapes=ShapeRequest(**shapes)), chunk=chunk)
    export(ExportRequest(checkpoint, full, shapes=ShapeRequest(seq_len=length, **shapes)))
    return step, load(full, "cpu")


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory):
    """Two sequences a call, 16 windows of 4."""
    folder = tmp_path_factory.mktemp("tiny")
    return both(save_upstream(folder, "local_attention.LocalTransformer", TINY), folder, 64, 6, batch=2)


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
def test_logits_at_every_position_are_those_of_the_full_file(tiny_files, pieces):
    step, full = tiny_files
    tokens = np.random.default_rng(0).integers(0, 23, (2, 64))
    expected = full.run({"tokens": tokens})["logits"]
    generator = Generator.open(step, "cpu", 1)
    assert generator.session.chunks == (1, 6)
    for _ in range(2):  # the second time after a reset, over caches that are full
        generator.reset()
        for count in pieces:
            start = generator.position
            generator.prefill(tokens[:, start : start + count])
            wanted = expected[:, start + count - 1]
            np.testing.assert_allclose(generator.logits, wanted, rtol=1e-4, atol=1e-4)
        assert generator.position == 64
    with pytest.raises(UsageError, match="no position 65"):
        generator.step([0, 0])


def test_every_row_of_a_chunk_is_that_of_the_full_file(tiny_files):
    step, full = tiny_files
    tokens = np.random.default_rng(1).integers(0, 23, (2, 60))
    padded = np.pad(tokens, ((0, 0), (0, 4)))
    expected = full.run({"tokens": padded})["logits"]
    session = open_step(step, "cpu", 1)
    for start in range(0, 60, 6):
        got = session.advance({"tokens": tokens[:, start : start + 6]})
        np.testing.assert_allclose(got, expected[:, start : start + 6], rtol=1e-4, atol=1e-4)


def test_what_is_generated_is_what_recomputation_chooses(tiny_files):
    """Greedy and sampled: the full file's logits, and the same draws, give the same tokens."""
    from localattn.runtime.generation.sampler import Sampler
    from localattn.runtime.generation.sampling import Sampling

    step, full = tiny_files
    generator = Generator.open(step, "cpu", 1)
    prompt = np.random.default_rng(2).integers(0, 23, (2, 9))
    for settings in ({"temperature": 0.0}, {"temperature": 1.3, "top_k": 9, "top_p": 0.9}):
        got = np.stack(list(generator.generate(prompt, seed=3, **settings)), axis=1)
        assert got.shape == (2, 64 - 9 + 1), "to the last position"
        sampler = Sampler(Sampling(**settings), 3, range(2))
        text = prompt
        while text.shape[1] <= 64:
            padded = np.pad(text, ((0, 0), (0, 64 - text.shape[1])))
            logits = full.run({"tokens": padded})["logits"][:, text.shape[1] - 1]
            text = np.concatenate([text, sampler.choose(logits)[:, None]], axis=1)
        np.testing.assert_array_equal(got, text[:, 9:])


@pytest.mark.parametrize(
    ("class_name", "kwargs", "shapes"),
    [
        ("local_attention.LocalMHA", {"dim": 16, "window_size": 4, "dim_head": 8, "heads": 2, "causal": True}, {}),
        (
            "local_attention.LocalAttention",
            {"dim": 8, "window_size": 4, "causal": True, "use_xpos": True},
            {"heads": 2, "dim_head": 8},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_modules_without_tokens_stream_too(tmp_path, class_name, kwargs, shapes):
    """Embeddings, or queries with keys and values, in pieces of any length; 50 windows."""
    step, full = both(save_upstream(tmp_path, class_name, kwargs), tmp_path, 200, 8, batch=2, **shapes)
    rng = np.random.default_rng(0)
    inputs = {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in full.inputs}
    (expected,) = full.run(inputs).values()
    session = open_step(step, "cpu", 1)
    axis = session.record.sequence_axis
    assert session.max_positions == 2**31 - 1
    for count in (3, 8, 1, 50, 21, 117):
        start = session.position
        piece = {name: np.take(x, range(start, start + count), axis=axis) for name, x in inputs.items()}
        output = session.consume(piece)
        wanted = np.take(expected, range(start + count - output.shape[axis], start + count), axis=axis)
        np.testing.assert_allclose(output, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(UsageError, match="does not generate tokens"):
        Generator(session)
    with pytest.raises(UsageError, match="does not fit"):
        session.advance({name: x.astype(np.float64) for name, x in piece.items()})
    assert session.position == 200


@pytest.fixture(scope="module")
def demo_step(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "pybytes_step.onnx"
    export_steps(ExportRequest(checkpoint_path(), path, config=config_path()), chunk=64)
    return path


@pytest.mark.slow
def test_the_demo_model_predicts_as_upstream_does(demo_step):
    """Bits per byte of held-out text, fed a byte at a time, against the full forward pass of the upstream package."""
    import local_attention
    from safetensors.torch import load_file

    module = local_attention.LocalTransformer(**json.loads(config_path().read_text())["kwargs"]).eval()
    module.load_state_dict({name: tensor.float() for name, tensor in load_file(checkpoint_path()).items()})
    rows = np.frombuffer(validation_path().read_bytes(), np.uint8).reshape(-1, 512)[:4].astype(np.int64)
    generator = Generator.open(demo_step, "cpu", 1)
    for row in rows:
        with torch.inference_mode():
            expected = module(torch.from_numpy(row)[None])[0].numpy()
        generator.reset()
        got = np.stack([generator.step(byte)[0].copy() for byte in row])
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_the_demo_model_writes_python(demo_step, localattn):
    common = ["generate", demo_step, "--prompt", "import os\n\n\ndef ", "--temperature", 0.5, "--max-tokens", 400]
    done = localattn(*common)
    assert done.code == 0 and localattn(*common).out == done.out, "the same seed, the same text"
    assert localattn(*common, "--seed", 1).out != done.out
    assert "    " in done.out and "self" in done.out and "\n" in done.out
    document = json.loads(localattn(*common, "--format", "json").out)
    assert document["text"] == [done.out] and document["finish"] == "length"


def test_a_full_file_is_refused_with_the_way_to_a_step_file(tiny_files, localattn):
    done = localattn("generate", tiny_files[0].with_name("full.onnx"), "--prompt-ids", "1")
    assert done.code == 2 and "is not a step file" in done.err
    assert "localattn export model.pt --mode step" in done.err
