"""Step files of Hugging Face decoders: equal to the untouched model far beyond its window, and to its `generate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from localattn.benchmarks.hugging_face.traffic import bytes_of_token
from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import UsageError
from localattn.exporter.export import ExportRequest
from localattn.exporter.models.hugging_face.arguments import HuggingFaceArgs, Layer
from localattn.exporter.models.hugging_face.step_module import RotaryTable, step_arguments
from localattn.exporter.models.parts.float64 import InFloat64
from localattn.exporter.options import ShapeRequest
from localattn.runtime.backends.onnxruntime import step_session
from localattn.runtime.backends.onnxruntime.step_session import OnnxRuntimeStep
from localattn.runtime.generation.generator import Generator

from ...conftest import Finished
from ...support.models.engine_models import needs_rtx
from ...support.models.hugging_face import STEPS, WINDOW, build
from ...support.steps import export_steps

transformers = pytest.importorskip("transformers")
BY_NAME = {case.name: case for case in STEPS}
CHUNK, POSITIONS = 24, 640
JSON, GREEDY = ("--format", "json"), ("--temperature", 0)
# Types that the default run tries: both kinds of layers, and padding.
QUICK = ("gemma3_text",)
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BY_NAME]


class Files:
    """A tiny decoder of a type, its folder and its step files, each made when first asked for."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / "saved"
        self.model = build(BY_NAME[name], max_position_embeddings=POSITIONS, tie_word_embeddings=False)
        self.model.save_pretrained(self.folder)
        self._made: dict[int, Path] = {}

    def step(self, batch: int = 1) -> Path:
        """The step file for a batch, the file for prompts beside it."""
        if batch not in self._made:
            path = self.folder.with_name(f"batch{batch}") / "model_step.onnx"
            path.parent.mkdir()
            export_steps(ExportRequest(self.folder, path, shapes=ShapeRequest(batch=batch)), chunk=CHUNK)
            self._made[batch] = path
        return self._made[batch]

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """The untouched model's whole pass in float64."""
        # Experts one by one: products of batches have no kernel for float64.
        read = transformers.AutoModelForCausalLM.from_pretrained
        model = read(self.folder, experts_implementation="eager").double().eval()
        with torch.no_grad(), InFloat64():
            found: NDArray[np.float64] = model(input_ids=torch.from_numpy(ids), use_cache=False).logits.numpy()
        return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Files]:
    made: dict[str, Files] = {}

    def of(name: str) -> Files:
        if name not in made:
            made[name] = Files(tmp_path_factory.mktemp("decoder"), name)
        return made[name]

    return of


def prompt(length: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(3, 128, (1, length))


@pytest.mark.parametrize("name", EACH)
def test_every_call_gives_the_logits_of_the_whole_pass(files: Callable[[str], Files], name: str) -> None:
    made = files(name)
    generator, ids = Generator.open(made.step(), "cpu", 1), prompt(12 * WINDOW)
    wanted = made.logits(ids)
    # A prompt in chunks and single tokens; then single tokens; then chunks again, over full rings.
    found = [generator.session.advance({"input_ids": ids[:, :CHUNK]}).copy()]
    while generator.position < ids.shape[1]:
        start = generator.position
        size = 1 if CHUNK * 2 < start < 5 * WINDOW or ids.shape[1] - start < CHUNK else CHUNK
        found.append(generator.session.advance({"input_ids": ids[:, start : start + size]}).copy())
    assert np.abs(np.concatenate(found, axis=1) - wanted).max() < 5e-5 and np.abs(wanted).max() > 0.1


@pytest.mark.parametrize("name", EACH)
def test_a_prompt_of_any_length_goes_in_chunks(files: Callable[[str], Files], name: str) -> None:
    made, ids = files(name), prompt(6 * WINDOW, 5)
    generator, wanted = Generator.open(made.step(), "cpu", 1), made.logits(ids)
    for length in (1, 2, 3, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 20, 6 * WINDOW):
        generator.reset()
        calls = [positions for _, positions in spied(generator, lambda n=length: generator.prefill(ids[:, :n]))]
        assert len(calls) == -(-(length - 1) // CHUNK) + 1 or length < 4, (length, calls)
        assert np.abs(generator.logits - wanted[:, length - 1]).max() < 5e-5
        # What filled the first chunk up is in the rings, and no later token sees it.
        following = ids[:, length : length + WINDOW]
        for place, token in enumerate(following[0]):
            assert np.abs(generator.step(token) - wanted[:, length + place]).max() < 5e-5


def test_chunks_of_a_prompt_compute_no_logits(files: Callable[[str], Files]) -> None:
    session = Generator.open(files("gemma3_text").step(), "cpu", 1).session
    assert isinstance(session, OnnxRuntimeStep)
    session.consume({"input_ids": prompt(3 * CHUNK)})
    assert {chunk: file.outputs for (chunk, _), file in session._files.items() if chunk > 1} == {CHUNK: []}
    assert session.advance({"input_ids": prompt(CHUNK)}).shape == (1, CHUNK, 128)


def test_long_chunks_keep_no_arranged_matrices(files: Callable[[str], Files], monkeypatch: pytest.MonkeyPatch) -> None:
    ids, found = prompt(3 * CHUNK), []
    for least in (CHUNK + 1, CHUNK):
        monkeypatch.setattr(step_session, "_MANY_TOKENS", least)
        generator = Generator.open(files("gemma3_text").step(), "cpu", 1)
        found.append(generator.prefill(ids).copy())
        session = generator.session
        assert isinstance(session, OnnxRuntimeStep)
        (chunks,) = (file._session._session for (chunk, _), file in session._files.items() if chunk > 1)
        asked = pytest.raises(RuntimeError) if least > CHUNK else nullcontext()  # of an entry that was never made
        with asked:
            assert chunks.get_session_options().get_session_config_entry("session.disable_prepacking") == "1"
    np.testing.assert_allclose(*found, atol=1e-5)


def test_a_reset_leaves_nothing_of_the_text_before(files: Callable[[str], Files]) -> None:
    session = Generator.open(files("gemma3_text").step(), "cpu", 1).session
    assert isinstance(session, OnnxRuntimeStep)
    for length in (CHUNK + 2, 2 * CHUNK):  # the second leaves its caches in the other bank
        session.consume({"input_ids": prompt(length)})
        assert all(cache.numpy().any() for cache in session._banks[session._banks.current])
        session.reset()
        assert not any(cache.numpy().any() for cache in session._banks[session._banks.current])


def test_a_call_that_fails_moves_nothing(files: Callable[[str], Files]) -> None:
    session = Generator.open(files("gemma3_text").step(), "cpu", 1).session
    for wrong in ({"input_ids": prompt(POSITIONS + 1)}, {"input_ids": prompt(40)[0]}, {"ids": prompt(40)}):
        with pytest.raises(UsageError):
            session.consume(wrong)
        assert session.position == 0


def spied(generator: Generator, run: Callable[[], object]) -> list[tuple[int, int]]:
    """Position and size of each call of the engine while something runs."""
    session, found = generator.session, list[tuple[int, int]]()

    def spy(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(inputs: Any, chunk: int) -> Any:
            found.append((session.position, chunk))
            return own(inputs, chunk)

        return call

    for name in ("_execute", "_skip"):
        setattr(session, name, spy(getattr(session, name)))
    run()
    for name in ("_execute", "_skip"):
        delattr(session, name)
    return found


def greedy(generator: Generator, ids: NDArray[np.int64], count: int) -> list[int]:
    return [int(token) for (token,) in generator.generate(ids, count, temperature=0)]


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EACH)
def test_greedy_tokens_are_those_of_transformers(files: Callable[[str], Files], name: str, count: int) -> None:
    made, ids = files(name), prompt(3 * WINDOW + 5, 1)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": count}
    made.model.generation_config.eos_token_id = None
    given = torch.from_numpy(ids)
    with torch.no_grad():
        whole = made.model.generate(given, attention_mask=torch.ones_like(given), **options)
    wanted = whole[0, ids.shape[1] :].tolist()
    assert greedy(Generator.open(made.step(), "cpu", 1), ids, count) == wanted
    assert len(set(wanted)) > 3


@pytest.mark.parametrize("name", EACH)
def test_it_goes_on_from_saved_caches_in_plain_onnxruntime(files: Callable[[str], Files], name: str) -> None:
    step, ids = files(name).step(), prompt(5 * WINDOW, 2)
    sidecar = read_sidecar(step)
    assert sidecar is not None and sidecar.step is not None
    record = sidecar.step
    whole = Generator.open(step, "cpu", 1)
    state = {cache.input: np.zeros(cache.shape, cache.dtype) for cache in record.caches}

    def run(state: dict[str, Any], tokens: Sequence[int], first: int) -> tuple[dict[str, Any], NDArray[Any]]:
        """Feed tokens in a session of its own."""
        session = onnxruntime.InferenceSession(step, providers=["CPUExecutionProvider"])
        names = [record.logits_output, *(cache.output for cache in record.caches)]
        for place, token in enumerate(tokens):
            fed = {record.token_input: np.array([[token]]), record.position_input: np.array([first + place])}
            logits, *after = session.run(names, {**fed, **state})
            state = dict(zip(state, after, strict=True))
        return state, logits

    state, _ = run(state, ids[0, : 3 * WINDOW].tolist(), 0)
    _, logits = run({name: x.copy() for name, x in state.items()}, ids[0, 3 * WINDOW :].tolist(), 3 * WINDOW)
    np.testing.assert_allclose(logits[:, -1], whole.prefill(ids), atol=2e-5)


@pytest.mark.parametrize("name", EACH)
def test_prompts_of_different_lengths_go_as_each_alone(files: Callable[[str], Files], name: str) -> None:
    made, lengths = files(name), (4 * WINDOW + 3, WINDOW // 2)
    prompts = [prompt(length, 3 + length)[0] for length in lengths]
    longest = max(lengths)
    ids = np.stack([np.concatenate((np.zeros(longest - len(x), np.int64), x)) for x in prompts])
    mask = np.stack([np.arange(longest) >= longest - length for length in lengths])
    together, alone = Generator.open(made.step(2), "cpu", 1), Generator.open(made.step(), "cpu", 1)
    logits = [together.prefill(ids, mask).copy()]
    tokens = [list(row) for row in prompts]
    for _ in range(2 * WINDOW):  # until the padding has left every window
        best = logits[-1].argmax(axis=1)
        for row, token in zip(tokens, best, strict=True):
            row.append(int(token))
        logits.append(together.step(best).copy())
    for row, (given, all_tokens) in enumerate(zip(prompts, tokens, strict=True)):
        alone.reset()
        found = [alone.prefill(given).copy()]
        found += [alone.step(token).copy() for token in all_tokens[len(given) :]]
        np.testing.assert_allclose(np.concatenate(found), np.stack([x[row] for x in logits]), atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "opset", "batch"), [("bf16", 20, 2), ("fp16", 20, 2), ("fp32", 18, 2), ("fp16", 24, 1)]
)
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_precisions_and_opsets(
    files: Callable[[str], Files], tmp_path: Path, name: str, dtype: str, opset: int, batch: int
) -> None:
    path = tmp_path / "model_step.onnx"
    shapes = ShapeRequest(batch=batch, max_length=128)
    asked = ExportRequest(files(name).folder, path, dtype=dtype, opset=opset, shapes=shapes)
    reports = export_steps(asked, chunk=CHUNK)
    assert [check.status for r in reports for check in r.sidecar.checks if check.name == "parity"] == ["passed"] * 2
    generator, ids = Generator.open(path, "cpu", 1), prompt(4 * WINDOW + 3)
    in_chunks = generator.prefill(ids[0]).copy()
    generator.reset()
    for token in ids[0]:
        one_by_one = generator.step(np.repeat(token, batch))
    np.testing.assert_allclose(in_chunks, one_by_one, atol={"fp32": 5e-5, "fp16": 1e-2, "bf16": 5e-2}[dtype])


def test_caches_have_the_window_and_the_heads_of_keys(files: Callable[[str], Files]) -> None:
    sidecar = read_sidecar(files("gemma3_text").step())
    assert sidecar is not None and sidecar.step is not None
    shapes = {cache.input: cache.shape for cache in sidecar.step.caches}
    assert shapes["key_cache.0"] == [1, 2, WINDOW, 16] and shapes["value_cache.1"] == [1, 2, POSITIONS, 16]
    assert (sidecar.step.token_input, sidecar.step.max_positions) == ("input_ids", POSITIONS)
    checks = {check.name: check.status for check in sidecar.checks}
    assert checks["parity"] == checks["no wide integers"] == "passed"


@pytest.mark.slow
def test_layers_that_share_keys_share_a_ring(files: Callable[[str], Files]) -> None:
    sidecar = read_sidecar(files("gemma4_text shared keys").step())
    assert sidecar is not None and sidecar.step is not None
    assert len(sidecar.step.caches) == 4 and len(sidecar.kwargs["layers"]) == 4


def test_what_a_token_reads_is_counted(files: Callable[[str], Files]) -> None:
    made = files("gemma3_text")
    table = sum(x.numel() for name, x in made.model.named_parameters() if "embed_tokens" in name)
    weights = sum(x.numel() for x in made.model.parameters()) - table
    for context in (1, WINDOW, POSITIONS):
        caches = sum(  # two tensors a layer, of two heads of 16
            2 * 2 * 16 * min(context, WINDOW if kind == "sliding_attention" else POSITIONS)
            for kind in made.model.config.layer_types
        )
        found = bytes_of_token(made.step(), context) / 4 - caches
        assert weights <= found < 1.1 * weights, (found, weights)  # beside weights, rotation and masks


def test_the_commands_take_the_file(files: Callable[[str], Files], localattn: Callable[..., Finished]) -> None:
    made = files("gemma3_text")
    ids = prompt(10, 4)
    given = ("--prompt-ids", ",".join(map(str, ids[0])), "--max-tokens", 40)
    done = localattn("generate", made.step(), *given, *JSON, *GREEDY)
    assert done.code == 0, done.err
    assert json.loads(done.out)["tokens"] == [greedy(Generator.open(made.step(), "cpu", 1), ids, 40)]
    compared = localattn("parity", made.step(), "--against", made.folder, "--seeds", 1, *JSON)
    assert compared.code == 0, compared.err


def test_what_cannot_be_is_refused(
    files: Callable[[str], Files], localattn: Callable[..., Finished], tmp_path: Path
) -> None:
    folder = files("gemma3_text").folder
    for options, words in (
        (("--mode", "step", "--seq-len", POSITIONS + 1), f"{POSITIONS} positions"),
        (("--mode", "step", "--seq-len", 0), "at least 1 position"),
        (("--mode", "step", "--seq-len", 64, "--dynamic", "seq"), "does not apply"),
    ):
        refused = localattn("export", folder, *options, "-o", tmp_path / "model.onnx")
        assert refused.code == 2 and words in refused.err, (options, refused.err)


@pytest.mark.parametrize(
    ("config", "layer", "said"),
    [
        ({"layer_types": ["sliding_attention", "linear_attention"]}, {}, "the kind linear_attention, whose state"),
        ({"text_config": {"layer_types": ["conv", "full_attention"]}}, {}, "the kind conv, whose state"),
        ({"block_types": ["recurrent", "attention", "recurrent"]}, {}, "the kind recurrent, whose state"),
        ({}, {"back": None, "chunk": 4}, "begin anew at fixed positions"),
        ({}, {"head_dim": 0}, "no row for each token"),
    ],
)
def test_what_keeps_more_than_keys_cannot_run_in_steps(
    config: dict[str, Any], layer: dict[str, Any], said: str
) -> None:
    layers = (Layer(**{"path": "attention", "back": 3, "ahead": 0, "kv_heads": 1, "head_dim": 4, **layer}),)
    args = HuggingFaceArgs(
        architecture="Mixed",
        config=config,
        inputs=("input_ids",),
        outputs=("logits",),
        per_token=True,
        layers=layers,
        vocab_size=8,
        longest=16,
    )
    with pytest.raises(UsageError, match="Mixed cannot run step by step") as caught:
        step_arguments(args, 1, None)
    assert said in caught.value.why


def test_a_rotation_that_changes_with_the_length_is_refused() -> None:
    config = transformers.Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    )
    rotary = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    RotaryTable(rotary, None, 64).prepare()
    for length in (65, 256):
        with pytest.raises(UsageError, match=f"changes within {length} positions"):
            RotaryTable(rotary, None, length).prepare()


@pytest.mark.slow
def test_a_rotation_that_grows_past_the_last_position_is_exported(tmp_path: Path) -> None:
    case = BY_NAME["mistral"]
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    build(case, rope_parameters=scaled, max_position_embeddings=64).save_pretrained(tmp_path / "saved")
    path = tmp_path / "model_step.onnx"
    report, _ = export_steps(ExportRequest(tmp_path / "saved", path), chunk=CHUNK)
    checks = {check.name: check.status for check in report.sidecar.checks}
    assert checks["parity"] == "passed" and report.sidecar.step is not None
    assert report.sidecar.step.max_positions == 64


@needs_rtx
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in BY_NAME])
def test_tensorrt_rtx_builds_both_files(
    files: Callable[[str], Files], localattn: Callable[..., Finished], tmp_path: Path, name: str
) -> None:
    step = files(name).step()
    for path in (step, step.with_name("model_step.prefill.onnx")):
        options = ("--backend", "tensorrt-rtx", "--target", "rtx40", "--plugin", "none")
        done = localattn("build", path, "-o", tmp_path / f"{path.stem}.engine", *options)
        assert done.code == 0, done.err


def test_a_plan_names_the_architecture(
    files: Callable[[str], Files], tmp_path: Path, localattn: Callable[..., Finished]
) -> None:
    done = localattn("export", files("gemma3_text").folder, "--mode", "step", "-o", tmp_path / "m.onnx", "--dry-run")
    assert done.code == 0 and "Would export transformers.Gemma3ForCausalLM to" in done.out, done.err
    assert not (tmp_path / "m.onnx").exists()
