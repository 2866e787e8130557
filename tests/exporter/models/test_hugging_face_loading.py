"""What is loaded from a Hugging Face folder is what transformers loads, and the reference shares nothing with the file.

A fault in any part of the exporter's own loading must show in parity; so each part is swapped for a wrong one here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from localattn.core.errors import CheckFailed, UsageError
from localattn.exporter.checkpoint.open_checkpoint import open_checkpoint, open_live
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.models.hugging_face import module, reading, weights
from localattn.exporter.models.hugging_face.family import HuggingFaceFamily
from localattn.exporter.options import ShapeRequest

from ...conftest import Finished
from ...support import run_folder
from ...support.models.hugging_face import CASES, HEADS, Case, build
from ...support.models.hugging_face import save as save_model
from ...support.models.hugging_face import update_config as _config

transformers = pytest.importorskip("transformers")
Command = Callable[..., Finished]
BY_NAME = {case.name: case for case in CASES}
NOT_EXPORTED = ("recurrent_gemma",)


def save(folder: Path, name: str, kind: str = "untied", **values: Any) -> Path:
    """Save a model of a type, with a head of this kind, and return its folder."""
    save_model(folder, BY_NAME[name], kind, **values)
    return folder


@pytest.fixture(scope="module")
def qwen3() -> Path:
    """A Qwen3 with a head of its own."""
    return run_folder.once("loading-qwen3", lambda place: save(place / "model", "qwen3")) / "model"


def _inputs(length: int = 60) -> dict[str, Tensor]:
    ids = torch.randint(3, 128, (2, length), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _as_users_load_it(folder: Path, case: Case) -> Any:
    return getattr(transformers, case.model).from_pretrained(folder).eval()


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.name in ("gemma3_text", "modernbert") else pytest.mark.slow)
        for case in CASES
        if case.name not in NOT_EXPORTED
    ],
    ids=lambda case: case.name,
)
def test_the_module_of_a_folder_is_what_transformers_loads(case: Case, kind: str, tmp_path: Path) -> None:
    """Whatever the head is; the reference too, which is a load of its own."""
    save(tmp_path / "model", case.name, kind)
    opened = open_checkpoint(tmp_path / "model", task=case.task)
    source = opened.source(ShapeRequest(batch=2, seq_len=60, dynamic_length=True))
    model = _as_users_load_it(tmp_path / "model", case)
    if case.name == "led":
        model = model.get_encoder()
    inputs = {name: x for name, x in _inputs().items() if name in opened.resolved.args.inputs}
    with torch.no_grad():
        wanted = model(**inputs)[opened.resolved.args.outputs[0]].numpy()
        found = source.module("fp32")(**inputs)[0].numpy()
    (judge,) = source.reference({name: x.numpy() for name, x in inputs.items()}).values()
    scale = np.abs(wanted).max()
    assert np.abs(found - wanted).max() < 2e-4 * scale and np.abs(judge - wanted).max() < 2e-4 * scale
    heads = model.get_output_embeddings() if hasattr(model, "lm_head") else None
    if kind == "retied" and heads is not None and case.task is None:
        assert any("although config.json says tie_word_embeddings" in note for note in opened.notes), opened.notes


def test_a_head_that_training_untied_is_exported_untied_and_told(tmp_path: Path, localattn: Command) -> None:
    """transformers keeps both matrices; tying them again would change two thirds of the tokens."""
    folder = save(tmp_path / "model", "gemma3_text", "retied")
    done = localattn("export", folder, "-o", tmp_path / "model.onnx", "--checks", "quick")
    assert done.code == 0 and "lm_head.weight is not model.embed_tokens.weight" in done.err, done.err
    inputs = _inputs()
    with torch.no_grad():
        wanted = _as_users_load_it(folder, BY_NAME["gemma3_text"])(**inputs).logits.numpy()
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    assert np.abs(found - wanted).max() < 1e-4
    assert localattn("parity", tmp_path / "model.onnx", "--against", folder, "--seq-len", "40").code == 0


def test_a_tied_head_is_one_tensor_in_the_state_and_in_the_module(tmp_path: Path) -> None:
    save(tmp_path, "gemma3_text", "tied", dtype="bfloat16")
    opened = open_checkpoint(tmp_path)
    names = ("lm_head.weight", "model.embed_tokens.weight")
    assert len({opened.loaded.state[name].data_ptr() for name in names}) == 1
    made: Any = opened.source(ShapeRequest(seq_len=40)).module("fp32")
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert not any("tie_word_embeddings" in note for note in opened.notes)


def test_a_head_that_is_nowhere_is_refused_and_the_advice_works(tmp_path: Path) -> None:
    """The file has no head, and config.json says that the head is not the embedding."""
    save(tmp_path, "qwen3", "tied")
    _config(tmp_path, {"tie_word_embeddings": False})
    with pytest.raises(UsageError, match=r"lacks 1 tensors of a Qwen3ForCausalLM: lm_head\.weight") as caught:
        open_checkpoint(tmp_path)
    assert "set tie_word_embeddings to true in config.json" in caught.value.fix
    _config(tmp_path, {"tie_word_embeddings": True})
    state = open_checkpoint(tmp_path).loaded.state
    assert state[HEAD].data_ptr() == state[EMBEDDING].data_ptr()


@pytest.mark.parametrize("kind", ["tied", "untied", "retied"])
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3"])
def test_a_folder_that_does_not_say_whether_its_head_is_tied(name: str, kind: str, tmp_path: Path) -> None:
    """Older folders have no such entry: what is exported is what transformers loads, or nothing."""
    folder = save(tmp_path / "model", name, kind)
    _config(folder, {}, without=["tie_word_embeddings"])
    if name == "qwen3" and kind == "tied":  # its default is a head of its own
        with pytest.raises(UsageError, match=r"lm_head\.weight"):
            open_checkpoint(folder)
        return
    state = open_checkpoint(folder).loaded.state
    wanted = _as_users_load_it(folder, BY_NAME[name]).state_dict()
    assert torch.equal(state[HEAD], wanted[HEAD]) and torch.equal(state[EMBEDDING], wanted[EMBEDDING])
    assert kind != "retied" or not torch.equal(state[HEAD], state[EMBEDDING])


# --- Each part of the exporter's loading, swapped for a wrong one ---------------------------------------------------

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ATTENTION = "model.layers.1.self_attn."


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def spoil(state: dict[str, Tensor]) -> None:
        state[name] = change(state[name]).contiguous()

    return spoil


def _tied(state: dict[str, Tensor]) -> None:
    state[HEAD] = state[EMBEDDING]


def _layers_swapped(state: dict[str, Tensor]) -> None:
    for name in [name for name in state if ".layers.0." in name]:
        other = name.replace(".layers.0.", ".layers.1.")
        state[name], state[other] = state[other], state[name]


FAULTS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "transposed": _changed(_ATTENTION + "o_proj.weight", lambda x: x.T),
    "tied": _tied,
    "dropped": _changed(_ATTENTION + "o_proj.weight", torch.zeros_like),
    "scaled by 1.01": _changed(HEAD, lambda x: x * 1.01),
    "one norm scaled by 1.01": _changed("model.norm.weight", lambda x: x * 1.01),
    "heads permuted": _changed(_ATTENTION + "q_proj.weight", lambda x: x.reshape(4, 16, -1).flip(0).reshape(x.shape)),
    "halves of heads swapped": _changed(
        _ATTENTION + "k_proj.weight", lambda x: x.reshape(2, 2, 8, -1).flip(1).reshape(x.shape)
    ),
    "layers swapped": _layers_swapped,
    "rotation": _changed("model.rotary_emb.inv_freq", lambda x: x * 1.01),
    "in half precision": _changed(HEAD, lambda x: x.half().float()),
}


def load_with(fault: Callable[[dict[str, Tensor]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the exporter load weights that a fault has changed."""
    whole = weights.whole_state

    def spoilt(model: Any) -> dict[str, Tensor]:
        state = dict(whole(model))
        fault(state)
        return state

    monkeypatch.setattr(weights, "whole_state", spoilt)


QUICK = ("transposed", "tied", "rotation", "scaled by 1.01")


@pytest.mark.parametrize("fault", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in FAULTS])
def test_parity_sees_wrong_weights(fault: str, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_with(FAULTS[fault], monkeypatch)
    with pytest.raises(CheckFailed, match="parity"):
        export(ExportRequest(qwen3, tmp_path / "model.onnx", checks="quick"))
    assert not (tmp_path / "model.onnx").exists()


# In a type without norms of queries and keys, which would undo a change of their size.
_FIRST = "model.layers.0."
OTHERS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "queries alone scaled by 1.01": _changed(_ATTENTION + "q_proj.weight", lambda x: x * 1.01),
    "keys alone scaled by 1.01": _changed(_ATTENTION + "k_proj.weight", lambda x: x * 1.01),
    "queries alone transposed": _changed(_ATTENTION + "q_proj.weight", lambda x: x.T),
    "a norm squared": _changed(_FIRST + "input_layernorm.weight", torch.square),
    "the last norm squared": _changed("model.norm.weight", torch.square),
    "one channel of a norm": _changed("model.norm.weight", lambda x: torch.cat([x[:1] * 1.1, x[1:]])),
}


@pytest.fixture(scope="module")
def mistral() -> Path:
    """A Mistral whose norms are no ones."""

    def make(place: Path) -> None:
        model = build(BY_NAME["mistral"])
        generator = torch.Generator().manual_seed(1)
        for name, x in model.named_parameters():
            if x.ndim == 1:
                x.data += 0.3 * torch.randn(x.shape, generator=generator)
                assert "norm" in name
        model.save_pretrained(place / "model")

    return run_folder.once("loading-mistral", make) / "model"


@pytest.mark.parametrize(
    "fault", [pytest.param(x, marks=[] if x.startswith("queries alone s") else pytest.mark.slow) for x in OTHERS]
)
def test_parity_sees_a_wrong_weight_of_a_model_without_norms_of_heads(
    fault: str, mistral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_with(OTHERS[fault], monkeypatch)
    with pytest.raises(CheckFailed, match="parity"):
        export(ExportRequest(mistral, tmp_path / "model.onnx", checks="quick"))


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("load", "ties the weights again"),
        pytest.param("made_config", "another base of the rotation", marks=pytest.mark.slow),
        pytest.param("load_model", "random weights", marks=pytest.mark.slow),
    ],
)
def test_parity_sees_a_wrong_part_of_the_loading(
    part: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part computes something else than it should; the reference does not go through it."""
    folder = save(tmp_path / "model", "qwen3", "retied")
    if part == "load":
        load = HuggingFaceFamily.load

        def tie(self: Any, model: Any, state: Any) -> None:
            load(self, model, state)
            model.lm_head.weight = model.model.embed_tokens.weight

        monkeypatch.setattr(HuggingFaceFamily, "load", tie)
    elif part == "made_config":
        made = reading.made_config
        changed = {"rope_parameters": {"rope_type": "default", "rope_theta": 9e3}}
        for owner in (reading, module):
            monkeypatch.setattr(owner, "made_config", lambda raw, where: made({**raw, **changed}, where))
    else:
        loaded = weights.load_model

        def random(*given: Any, **named: Any) -> Any:
            model, notes = loaded(*given, **named)
            torch.nn.init.normal_(model.model.layers[0].mlp.down_proj.weight)
            return model, notes

        monkeypatch.setattr(weights, "load_model", random)
    with pytest.raises(CheckFailed, match="parity"):
        export(ExportRequest(folder, tmp_path / "model.onnx", checks="quick"))
    assert wrong


def test_the_reference_reads_the_folder_itself(qwen3: Path, tmp_path: Path) -> None:
    """Its numbers are those of the files, whatever happened to the exporter's tensors since."""
    opened = open_checkpoint(qwen3)
    for tensor in opened.loaded.state.values():
        if tensor.is_floating_point():
            tensor.data = torch.full_like(tensor, 0.5)
    inputs = _inputs(40)
    (found,) = (
        opened.source(ShapeRequest(batch=2, seq_len=40))
        .reference({name: x.numpy() for name, x in inputs.items()})
        .values()
    )
    with torch.no_grad():
        wanted = _as_users_load_it(qwen3, BY_NAME["qwen3"])(**inputs).logits.numpy()
    assert np.abs(found - wanted).max() < 1e-4


def test_the_reference_of_a_live_model_is_a_copy_of_it(tmp_path: Path) -> None:
    model = build(BY_NAME["qwen3"])
    opened = open_live(model)
    assert opened is not None and opened.original is not None
    copied: Any = opened.original()
    assert copied is not model and type(copied) is type(model)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), copied.parameters(), strict=True))


def test_the_reference_of_live_experts_runs_in_float64() -> None:
    """transformers computes them by a product that PyTorch has in fp32 alone, unless it is told otherwise."""
    model = build(BY_NAME["gpt_oss"])
    opened = open_live(model)
    assert opened is not None and opened.original is not None
    copied: Any = opened.original()
    with torch.no_grad():
        wanted, found = (x(input_ids=_inputs()["input_ids"]).logits for x in (model, copied.double()))
    assert (found - wanted).abs().max() < 1e-4
    assert model.get_experts_implementation() != copied.get_experts_implementation()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "lm_head", torch.nn.Sequential(torch.nn.Linear(64, 128))),
        lambda model: setattr(model.model, "layers", model.model.layers[:1]),
        lambda model: setattr(model, "lm_head", torch.nn.Linear(64, 100)),
    ],
    ids=["another head", "a layer less", "fewer tokens"],
)
def test_a_live_model_that_its_configuration_does_not_make_is_refused(change: Callable[[Any], None]) -> None:
    model = build(BY_NAME["qwen3"])
    change(model)
    with pytest.raises(UsageError, match=r"is not the one that its configuration makes|does not run"):
        open_live(model)


def test_what_transformers_warns_of_is_told(qwen3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And its own lines do not stand among the command's."""
    folder = tmp_path / "model"
    shutil.copytree(qwen3, folder)
    _config(folder, {"id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": 2})
    notes = open_checkpoint(folder).notes
    assert any("transformers: You passed `num_labels=2`" in note for note in notes), notes
    assert "num_labels" not in capsys.readouterr().err


def test_running_entries_of_a_configuration_do_not_stop_the_reference(qwen3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(qwen3, folder)
    entries = {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    _config(folder, entries | {"_attn_implementation": "flash_attention_2", "torch_dtype": "float16"})
    export(ExportRequest(folder, tmp_path / "model.onnx", checks="quick"))
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [x.name for x in graph.output] == ["logits"]


def test_tensors_that_no_class_of_the_folder_has_are_not_left_out(qwen3: Path, tmp_path: Path) -> None:
    """With another class than the saved one, its head may go; a tensor that it does not have either may not."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(qwen3, folder)
    assert any("1 tensors of model are no part of Qwen3Model" in x for x in _notes(folder, "feature-extraction"))
    state = load_file(folder / "model.safetensors")
    save_file({**state, "extra.weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    for task in (None, "feature-extraction"):
        with pytest.raises(UsageError, match=r"unexpected 1 tensors.*extra\.weight"):
            open_checkpoint(folder, task=task)


def _notes(folder: Path, task: str) -> list[str]:
    return open_checkpoint(folder, task=task).notes
