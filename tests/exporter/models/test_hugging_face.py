"""Hugging Face folders: from `save_pretrained` to a file that plain onnxruntime opens, equal to the untouched model."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed, UsageError
from localattn.core.geometry import WindowGeometry
from localattn.exporter.checkpoint.open_checkpoint import open_checkpoint, open_live
from localattn.exporter.checks.sweep import fewer_sizes, shows
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.jobs.module import ModuleOptions, plan_module
from localattn.exporter.models.hugging_face import observe
from localattn.exporter.models.hugging_face.arguments import Layer, words
from localattn.exporter.models.hugging_face.config import made_config
from localattn.exporter.models.hugging_face.model_class import choose_class
from localattn.exporter.models.hugging_face.observe import Observation, Reach, Seen, read_reach
from localattn.exporter.models.hugging_face.quirks import Quirks
from localattn.exporter.models.hugging_face.reading import describe
from localattn.exporter.models.hugging_face.routing import margin, undecided
from localattn.exporter.models.parts.float64 import InFloat64
from localattn.exporter.options import ShapeRequest
from localattn.runtime.inputs.size_sweep import sweep_sizes

from ...conftest import Finished
from ...support.models.hugging_face import CASES, WINDOW, Case, build

transformers = pytest.importorskip("transformers")
Command = Callable[..., Finished]
BY_NAME = {case.name: case for case in CASES}
# Types whose file is made by default; the others are slow tests.
QUICK = ("modernbert", "gemma3_text")
# A rotary embedding that changes beyond the model's positions.
GROWING = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
# Types whose layers are read, and whose own code cannot be exported.
NOT_TRACED = {"recurrent_gemma": "cannot be dynamic"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ModernBERT as its users have it: `save_pretrained` of the model and of a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("hub") / "tiny-modernbert"
    build(BY_NAME["modernbert"]).save_pretrained(path)
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, **{f"w{n}": n for n in range(3, 128)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[SEP]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    """Its file, in a folder of its own."""
    output = folder.with_name("exported") / "model.onnx"
    output.parent.mkdir()
    export(ExportRequest(folder, output))
    return output


def test_plain_onnxruntime_and_tokenizers_run_the_folder(exported: Path, folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(exported.with_name("tokenizer.json")))
    tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")
    texts = [" ".join(f"w{3 + n % 120}" for n in range(length)) for length in (90, 41, 7)]
    encoded = tokenizer.encode_batch(texts)
    inputs = {
        "input_ids": np.array([x.ids for x in encoded]),
        "attention_mask": np.array([x.attention_mask for x in encoded]),
    }
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    assert [x.name for x in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert [x.name for x in session.get_outputs()] == ["logits"]
    (logits,) = session.run(None, inputs)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).double().eval()
    with torch.no_grad(), InFloat64():
        wanted = model(**{name: torch.from_numpy(x) for name, x in inputs.items()}).logits.numpy()
    kept = inputs["attention_mask"] != 0
    assert np.abs(logits - wanted)[kept].max() < 5e-5 and np.abs(wanted[kept]).max() > 1


def test_between_products_and_attention_the_file_has_fused_nodes(exported: Path) -> None:
    """Of each of its three layers: queries and keys rotated, one gate, no packed product, and nothing transposed."""
    graph = onnx.load(exported).graph
    found = Counter(node.op_type for node in graph.node)
    assert (found["RotateHeads"], found["GatedGelu"], found["Transpose"], found["Slice"]) == (6, 3, 0, 0)
    attention = [node for node in graph.node if "Attention" in node.op_type]
    assert len(attention) == 3
    rotated = {node.output[0] for node in graph.node if node.op_type == "RotateHeads"}
    assert all({*node.input[:2]} <= rotated for node in attention)


@pytest.mark.slow
def test_a_file_for_another_task_is_compared_with_that_class(
    folder: Path, tmp_path: Path, localattn: Callable[..., Finished]
) -> None:
    output = tmp_path / "model.onnx"
    export(ExportRequest(folder, output, task="feature-extraction"))
    finished = localattn("parity", output, "--against", folder, "--seeds", 1, "--format", "json")
    assert finished.code == 0, finished.err
    assert [row["output"] for row in json.loads(finished.out)["overall"]] == ["last_hidden_state"]


def test_the_sidecar_say_what_was_read_and_checked(exported: Path) -> None:
    sidecar = read_sidecar(exported)
    assert sidecar is not None
    assert (sidecar.kwargs["architecture"], sidecar.dynamic) == ("ModernBertForMaskedLM", ["batch", "seq"])
    names = ("onnx checker", "onnxruntime loads", "parity", "window", "linear memory", "no wide integers")
    names += ("independent rows", "model constants")
    assert {check.name: check.status for check in sidecar.checks} == dict.fromkeys(names, "passed")
    assert {path.name for path in exported.parent.iterdir()} == {
        *("model.onnx", "model.onnx.json", "config.json", "tokenizer.json", "tokenizer_config.json"),
    }


@pytest.mark.parametrize(("weights", "floor"), [("int8", 0.999), ("int4", 0.99)])
def test_rounded_weights_state_what_they_cost(weights: str, floor: float, tmp_path: Path, localattn: Command) -> None:
    """Of an encoder the cosine of its embeddings, of logits the divergence and the agreement."""
    mine = tmp_path / "hub"
    build_quiet("modernbert").save_pretrained(mine)
    tasks = (("feature-extraction", ("pooled_cosine",)), ("fill-mask", ("divergence", "agreement")))
    for task, names in tasks if weights == "int4" else tasks[:1]:
        output = tmp_path / task / "model.onnx"
        output.parent.mkdir()
        done = localattn(
            *("export", mine, "--task", task, "-o", output),
            *("--weight-dtype", weights, "--checks", "quick", "--format", "json"),
        )
        assert done.code == 0, done.err
        parity = next(check for check in json.loads(done.out)["checks"] if check["name"] == "parity")
        assert parity["figures"]["max_abs"] > 1e-3 and set(names) <= parity["figures"].keys()
        assert parity["figures"]["cosine"] > floor and parity["figures"].get("pooled_cosine", 1) > floor
        written = onnxruntime.InferenceSession(output, providers=["CPUExecutionProvider"])
        assert [x.name for x in written.get_inputs()] == ["input_ids", "attention_mask"]
    if weights == "int4":  # the other file: hidden states
        again = localattn("parity", tmp_path / "feature-extraction" / "model.onnx", "--against", mine, "--seq-len", 40)
        assert again.code == 0 and "pooled_cosine" in again.out, again.err


def build_quiet(name: str) -> Any:
    """Build a model whose layers add less to what they read, as those of trained models do."""
    model = build(BY_NAME[name])
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("Wo.weight", "o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.3)
    return model


def test_the_command_line_takes_a_folder_and_a_task(
    folder: Path, tmp_path: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(folder, mine)
    monkeypatch.chdir(tmp_path)
    done = localattn("export", mine, "--task", "feature-extraction", "--checks", "quick")
    assert done.code == 0, done.err
    sidecar = read_sidecar(tmp_path / "mine-onnx" / "model.onnx")
    assert sidecar is not None and [x.name for x in sidecar.outputs] == ["last_hidden_state"]
    assert "no part of ModernBertModel" in done.err


def test_parity_and_golden_outputs_take_the_folder(
    exported: Path, folder: Path, tmp_path: Path, localattn: Command
) -> None:
    assert localattn("parity", exported, "--against", folder, "--seq-len", "40").code == 0
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    ids = np.random.default_rng(0).integers(3, 128, (1, 80))
    mask = np.ones_like(ids)
    mask[:, 70:] = 0
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits.numpy()
    np.savez(tmp_path / "golden.npz", input_ids=ids, attention_mask=mask, logits=logits)
    done = localattn("parity", exported, "--against", folder, "--golden", tmp_path / "golden.npz", "--seq-len", "40")
    assert done.code == 0, done.err
    np.savez(tmp_path / "golden.npz", input_ids=ids, attention_mask=mask, logits=logits + mask[..., None] * 0.01)
    assert localattn("parity", exported, "--against", folder, "--golden", tmp_path / "golden.npz").code == 1


def test_a_file_whose_window_is_one_short_is_found(folder: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(folder)
    args = opened.resolved.args
    narrow = [layer.model_copy(update={"back": 7}) if layer.back else layer for layer in args.layers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quirks, "read_layers", lambda self, model, names: (narrow, _run(model, names)))
        with pytest.raises(CheckFailed, match="parity"):
            export(ExportRequest(folder, tmp_path / "model.onnx"))


def _run(model: Any, names: list[str]) -> Any:
    from localattn.exporter.models.hugging_face.observe import observe

    return observe(model, names, 40)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_windows_are_read_off_the_models_own_masks(case: Case) -> None:
    raw = json.loads(build(case).config.to_json_string()) | {"architectures": [case.model]}
    config = made_config(raw, case.name)
    args = describe(choose_class(raw, config, case.task, case.name), raw, config, case.name)
    assert tuple(words(layer) for layer in args.layers) == case.windows


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.name in QUICK[1:] else pytest.mark.slow) for case in CASES[1:]],
    ids=lambda case: case.name,
)
def test_every_type_is_exported_and_equal(case: Case, tmp_path: Path) -> None:
    build(case).save_pretrained(tmp_path / "model")
    request = ExportRequest(tmp_path / "model", tmp_path / "model.onnx", task=case.task)
    if case.name in NOT_TRACED:
        with pytest.raises(Exception, match=NOT_TRACED[case.name]):
            export(request)
        return
    report = export(request)
    assert {check.status for check in report.checks} == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["gpt_oss", "mellum"])
def test_experts_that_rounding_decides_are_not_compared_in_half_precision(
    name: str, dtype: str, tmp_path: Path
) -> None:
    build(BY_NAME[name]).save_pretrained(tmp_path / "model")
    report = export(ExportRequest(tmp_path / "model", tmp_path / "model.onnx", dtype=dtype))
    record = next(check for check in report.checks if check.name == "parity")
    assert record.status == "passed" and record.baseline is not None
    assert record.figures["max_abs"] < 1  # a token of another expert is off by 2


def test_the_margin_of_a_choice_is_that_of_its_scores() -> None:
    scores = torch.tensor([[3.0, 1.0, 0.0], [1.0, 1.001, -1.0]], dtype=torch.float64)
    size = scores.square().mean().sqrt()
    assert torch.allclose(margin(scores, 1) * size, torch.tensor([2.0, 0.001], dtype=torch.float64))
    centred = scores - scores.mean(-1, keepdim=True)
    shown = margin(scores.softmax(-1), 1) * centred.square().mean().sqrt()
    assert torch.allclose(shown, torch.tensor([2.0, 0.001], dtype=torch.float64))
    assert undecided(margin(scores, 1), torch.float16).tolist() == [False, True]
    assert margin(scores, 3) is None  # all are taken


@pytest.mark.parametrize(
    ("name", "task", "longest"),
    [
        ("longformer", "fill-mask", 255),  # positions count from that of padding
        ("longformer", "feature-extraction", 255),
        ("led", "feature-extraction", 240),  # of 250 positions, whole windows
    ],
)
def test_chunked_attention_without_its_code_computes_the_same(
    name: str, task: str, longest: int, tmp_path: Path
) -> None:
    """At lengths that upstream pads to whole windows, with padding of the caller's on both sides."""
    build(BY_NAME[name], chunk_size_feed_forward=8).save_pretrained(tmp_path)
    opened = open_checkpoint(tmp_path, task=task)
    assert opened.resolved.args.longest == longest
    assert any("no token is global" in note for note in opened.notes)
    module = opened.source(ShapeRequest()).module("fp32")
    model = getattr(transformers, BY_NAME[name].model).from_pretrained(tmp_path).eval()
    if task == "feature-extraction":
        model = model.get_encoder() if name == "led" else model.longformer
    rng = np.random.default_rng(0)
    for length in (1, 9, 16, 31, 50):
        ids = torch.from_numpy(rng.integers(1, 128, (3, length)))
        mask = torch.ones_like(ids)
        mask[1, : length // 3], mask[2, length - length // 3 :] = 0, 0
        ids *= mask
        with torch.no_grad():
            (found,), wanted = module(input_ids=ids, attention_mask=mask), model(input_ids=ids, attention_mask=mask)
        assert (found - wanted[opened.resolved.args.outputs[0]])[mask != 0].abs().max() < 5e-5


def test_an_encoder_is_exported_without_its_decoder(tmp_path: Path, localattn: Command) -> None:
    """From a whole model, from one without a head, and from the encoder by itself; with the decoder it is refused."""
    whole = build(BY_NAME["led"])
    whole.save_pretrained(tmp_path / "whole")
    whole.led.save_pretrained(tmp_path / "base")
    whole.get_encoder().save_pretrained(tmp_path / "alone")
    states = [
        open_checkpoint(tmp_path / folder, task=task).loaded.state
        for folder, task in (("whole", "feature-extraction"), ("base", "feature-extraction"), ("alone", None))
    ]
    assert all(states[0].keys() == state.keys() for state in states)
    assert all(torch.equal(x, state[name]) for state in states for name, x in states[0].items())
    live = open_live(whole.get_encoder())
    assert live is not None and live.loaded.state.keys() == states[0].keys()
    done = localattn("export", tmp_path / "whole", "-o", tmp_path / "model.onnx")
    assert done.code == 2 and "--task feature-extraction exports its encoder alone" in done.err, done.err
    with pytest.raises(UsageError, match="LEDForConditionalGeneration has an encoder and a decoder"):
        open_live(whole)
    with pytest.raises(UsageError, match="It has some for feature-extraction"):
        open_checkpoint(tmp_path / "whole", task="text-generation")
    _config(tmp_path / "whole", {"max_encoder_position_embeddings": 15})
    with pytest.raises(UsageError, match="max_encoder_position_embeddings is 15"):
        open_checkpoint(tmp_path / "whole", task="feature-extraction")


def test_global_attention_is_refused_by_name(tmp_path: Path) -> None:
    build(BY_NAME["longformer"]).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="LongformerForSequenceClassification has global attention"):
        open_checkpoint(tmp_path, task="text-classification")
    _config(tmp_path, {"attention_window": [16, 2]})
    with pytest.raises(UsageError, match=r"layer\.1\.attention\.self is 2"):
        open_checkpoint(tmp_path)
    _config(tmp_path, {"attention_window": 16, "chunk_size_feed_forward": 5})
    with pytest.raises(UsageError, match="chunk_size_feed_forward is 5"):
        open_checkpoint(tmp_path)


def test_a_mask_that_is_no_window_is_told_by_its_shape() -> None:
    distance = np.arange(40)[:, None] - np.arange(40)
    assert read_reach((distance >= 0) & (distance < 8)) == Reach(7, 0)
    assert read_reach((distance >= -3) & (distance <= 8)) == Reach(8, 3)
    assert read_reach(distance >= 0) == Reach(None, 0)
    chunk = np.arange(40) // 8
    assert read_reach((distance >= 0) & (chunk[:, None] == chunk)) == Reach(None, 0, 8)
    prefix = (distance >= 0) | (np.arange(40) < 5)
    assert "differs" in str(read_reach(prefix))
    assert "next to each other" in str(read_reach((distance % 2 == 0) & (distance >= 0)))
    for endless in (distance >= -3, distance <= 3, distance <= 0):
        assert read_reach(endless) == "it ends to one side only"


def test_layers_that_are_called_more_often_in_a_longer_sequence_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(path="attention", back=WINDOW - 1, ahead=0)

    def by_the_token(model: object, names: object, length: int) -> Observation:
        return Observation(length, {}, [Seen("attention", layer, local=True)] * length)

    monkeypatch.setattr(observe, "observe", by_the_token)
    with pytest.raises(UsageError, match=r"(?s)MistralForCausalLM cannot be exported.*more often"):
        observe.read_layers(build(BY_NAME["mistral"], num_hidden_layers=1), ["input_ids"])


def test_a_live_model_is_exported_as_its_folder(tmp_path: Path, localattn: Command) -> None:
    from localattn import export_module

    model = build(BY_NAME["mistral"])
    inputs = {"input_ids": np.ones((2, 60), np.int64), "attention_mask": np.ones((2, 60), np.int64)}
    report = export_module(model, inputs, tmp_path / "fixed.onnx")
    assert [x.describe() for x in report.sidecar.inputs] == ["input_ids int64 [2, 60]", "attention_mask int64 [2, 60]"]
    assert {check.status for check in report.checks} == {"passed"}
    window = next(check.detail for check in report.checks if check.name == "window")
    assert "depends on tokens 29–59 and on nothing earlier" in window
    with pytest.raises(UsageError, match="labels"):
        export_module(model, {**inputs, "labels": inputs["input_ids"]}, tmp_path / "other.onnx")
    with pytest.raises(UsageError, match="attention_mask do not fit"):
        export_module(model, {**inputs, "attention_mask": inputs["input_ids"][:, 1:]}, tmp_path / "other.onnx")


def test_the_plan_for_a_live_model_refuses_what_its_export_would(tmp_path: Path) -> None:
    model, options = build(BY_NAME["mistral"]), ModuleOptions()
    plan = plan_module(model, ["input_ids:int64:[2,60]"], tmp_path / "m.onnx", options)
    live = open_live(model)
    assert live is not None
    assert [layer.geometry for layer in plan.replaced] == live.source(ShapeRequest()).layers
    with pytest.raises(UsageError, match="labels do not fit"):
        plan_module(model, ["labels:int64:[2,60]"], tmp_path / "m.onnx", options)
    (tmp_path / "m.onnx").write_bytes(b"")
    with pytest.raises(UsageError, match="exists"):
        plan_module(model, ["input_ids:int64:[2,60]"], tmp_path / "m.onnx", options)


def test_a_live_model_that_was_changed_is_refused() -> None:
    """A hook, or a value in one of its modules, is in neither its configuration nor its weights."""
    model = build(BY_NAME["mistral"], num_hidden_layers=1)
    model.train()
    assert open_live(model) is not None and model.training
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, given, output: output * 1.1)
    with pytest.raises(UsageError, match="something else than its configuration"):
        open_live(model)
    hook.remove()
    model.model.layers[0].self_attn.scaling *= 1.1
    with pytest.raises(UsageError, match="something else than its configuration"):
        open_live(model)


def test_longer_sequences_that_a_live_model_has_seen_leave_no_trace() -> None:
    """Its rotary embedding, of the type dynamic, has the frequencies of the longest sequence so far."""
    model = build(BY_NAME["mistral"], num_hidden_layers=1, max_position_embeddings=48, rope_parameters=GROWING)
    fresh = open_live(model)
    with torch.no_grad():
        model(input_ids=torch.ones(1, 200, dtype=torch.int64))
    grown = model.model.rotary_emb.inv_freq.clone()
    used = open_live(model)
    assert fresh is not None and used is not None
    first, second = (opened.loaded.state["model.rotary_emb.inv_freq"] for opened in (fresh, used))
    assert torch.equal(first, second) and not torch.equal(first, grown)


@pytest.mark.slow
def test_a_factory_may_return_a_hugging_face_model(tmp_path: Path, localattn: Command) -> None:
    (tmp_path / "mine.py").write_text(
        "from transformers import MistralConfig, MistralModel\n"
        "def build():\n"
        "    return MistralModel(MistralConfig(vocab_size=64, hidden_size=32, intermediate_size=32, head_dim=8,\n"
        "        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, sliding_window=8)).eval()\n"
    )
    given = (
        "--factory",
        f"{tmp_path / 'mine.py'}:build",
        "--input",
        "input_ids:int64:[1,40]",
        "--dynamic",
        "batch,seq",
    )
    planned = localattn("export", *given, "-o", tmp_path / "mine.onnx", "--dry-run")
    assert "window 7, 1 back" in planned.out and not (tmp_path / "mine.onnx").exists()
    done = localattn("export", *given, "-o", tmp_path / "mine.onnx")
    assert done.code == 0 and "transformers.MistralModel" in done.out, done.err


def _config(folder: Path, change: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in change.items():
        config.pop(name, None)
        if value is not None:
            config[name] = value
    (folder / "config.json").write_text(json.dumps(config))


def _rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, **values}}}


def test_how_pytorch_ran_a_model_is_no_part_of_it(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(folder, mine)
    _config(mine, {"return_dict": False, "_attn_implementation": "flash_attention_2", "output_hidden_states": True})
    assert open_checkpoint(mine).resolved.args.outputs == ("logits",)


def test_large_models_are_compared_at_fewer_sizes() -> None:
    now, window = {"batch": 2, "seq": 34}, WindowGeometry.reaching(15, 0)
    trials = sweep_sizes(("batch", "seq"), now, "seq", [window])
    few = [(x["batch"], x["seq"]) for x in fewer_sizes(trials, {16, 17})]
    assert few == [(2, 34), (2, 16), (2, 17), (1, 17), (3, 17)] and len(trials) == 14


def test_a_file_shorter_than_its_window_is_not_proven(tmp_path: Path) -> None:
    """A lost window would not show in 16 tokens, of which each sees 15 before itself."""
    build(BY_NAME["mistral"], num_hidden_layers=1, max_position_embeddings=WINDOW).save_pretrained(tmp_path)
    report = export(ExportRequest(tmp_path, tmp_path / "model.onnx", checks="quick"))
    parity = next(check for check in report.checks if check.name == "parity")
    assert parity.status == "not proven" and "16 tokens, 16 keys" in parity.detail
    window = WindowGeometry.reaching(WINDOW - 1, 0)
    assert [shows(window, length) for length in (WINDOW, WINDOW + 1)] == [False, True]
    window = WindowGeometry.reaching(2, WINDOW)
    assert [shows(window, length) for length in (WINDOW + 1, WINDOW + 2)] == [False, True]


def test_a_rotation_that_grows_is_exported_for_the_positions_that_the_model_has(tmp_path: Path) -> None:
    """Up to them its frequencies do not change; beyond, plain onnxruntime refuses the sequence."""
    model = build(BY_NAME["mistral"], num_hidden_layers=1, max_position_embeddings=48, rope_parameters=GROWING)
    model.save_pretrained(tmp_path)
    report = export(ExportRequest(tmp_path, tmp_path / "model.onnx", checks="quick"))
    assert any("positions below 48" in note for note in report.notes)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(3, 128, (1, 49))
    with torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(ids[:, :48])).logits.numpy()
    found = session.run(None, {"input_ids": ids[:, :48], "attention_mask": np.ones_like(ids[:, :48])})[0]
    assert np.abs(found - wanted).max() < 5e-5
    with pytest.raises(Exception, match="out of data bounds"):
        session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["MyOwnModel"]}, "MyOwnModel"),
        ({"architectures": None}, "which class"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "mine.Model"}}, "brings code of its own"),
        ({"model_type": "modernbart"}, "modernbart"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised with 'gptq'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "'bitsandbytes'"),
        ({"quantization_config": {}}, "quantised with 'unknown'"),
        ({"hidden_size": 60}, "hidden_size|shape|size"),
        ({"intermediate_size": 32}, "Of another shape: model.layers.0.mlp"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": "wide"}, "cannot be used"),
        ({"local_attention": 10**6}, "window of 1000000"),
        ({"num_attention_heads": 0}, "cannot be used"),
        ({"layer_types": ["full_attention"] * 3}, "has no sliding window"),
        ({"local_attention": -1}, "a query sees no key"),
        ({"architectures": ["BertModel"]}, "BertModel is no class of a modernbert"),
        ({"architectures": ["PreTrainedModel"]}, "PreTrainedModel is no class of a modernbert"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000"),
        ({"hidden_activation": "swoosh"}, "hidden_activation is 'swoosh'"),
        (_rope(rope_type="spiral"), r"rope_parameters\.full_attention\.rope_type is 'spiral'"),
        (_rope(rope_type="linear"), "Missing required keys"),
        (_rope(rope_theta=0), "rope_theta of the rotary embedding is 0"),
        (_rope(rope_theta=float("nan")), "rope_theta of the rotary embedding is nan"),
        (_rope(rope_type="yarn", factor=float("inf")), "factor of the rotary embedding is inf"),
        ({"norm_eps": -2.0}, "norm_eps is -2.0"),
        ({"norm_eps": float("nan")}, "norm_eps is nan"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_broken_configuration_is_one_clear_error(
    change: dict[str, Any], said: str, folder: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    _config(broken, change)
    with pytest.raises(UsageError, match=said):
        export(ExportRequest(broken, tmp_path / "model.onnx"))
    assert not (tmp_path / "model.onnx").exists()


def test_a_factor_that_is_no_rotary_embeddings_may_be_any_number() -> None:
    values = {"model_type": "modernbert", "task_specific_params": {"sampling": {"factor": 0, "rope_theta": -1}}}
    assert made_config(values, "Ours").task_specific_params == values["task_specific_params"]


def test_a_task_whose_class_transformers_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables name classes that it does not have, and raise ValueError when one is asked for."""
    from transformers.models.auto import modeling_auto

    class Broken:
        def get(self, key: object, default: object) -> object:
            raise ValueError("Could not find the class")

    monkeypatch.setattr(modeling_auto, "MODEL_MAPPING", Broken())
    raw = {"model_type": "longformer"}
    made = made_config(raw, "Ours")
    with pytest.raises(
        UsageError, match=r"(?s)no model for text-generation.*some for fill-mask, text-classification, token"
    ):
        choose_class(raw, made, "text-generation", "Ours")
    with pytest.raises(UsageError, match="no model for feature-extraction"):
        choose_class(raw, made, "feature-extraction", "Ours")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gemma2", {"attn_logit_softcapping": -2}, "attn_logit_softcapping is -2"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0"),
        ("gemma2", {"final_logit_softcapping": float("inf")}, "final_logit_softcapping is inf"),
        ("gemma2", {"query_pre_attn_scalar": -2}, "query_pre_attn_scalar is -2"),
        ("granite_swa", {"logits_scaling": 0.0}, "This GraniteSWAForCausalLM computes NaN or infinity"),
        ("granite_swa", {"attention_multiplier": float("inf")}, "This GraniteSWAForCausalLM computes NaN or infinity"),
    ],
    ids=str,
)
def test_numbers_that_make_nan_are_refused_early(
    name: str, change: dict[str, Any], said: str, tmp_path: Path, localattn: Command
) -> None:
    build(BY_NAME[name]).save_pretrained(tmp_path / "model")
    open_checkpoint(tmp_path / "model")
    _config(tmp_path / "model", change)
    done = localattn("export", tmp_path / "model", "-o", tmp_path / "model.onnx")
    assert done.code == 2 and said in done.err and not (tmp_path / "model.onnx").exists(), done.err


def test_numbers_of_a_live_model_that_make_nan_are_refused() -> None:
    model = build(BY_NAME["granite_swa"], logits_scaling=0.0)
    with pytest.raises(UsageError, match="computes NaN or infinity"):
        open_live(model)
    assert open_live(build(BY_NAME["granite_swa"])) is not None


def test_code_of_a_folder_does_not_run(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(folder, mine)
    _config(mine, {"auto_map": {"AutoModel": "modeling.Mine"}})
    (mine / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert any("did not run" in note for note in open_checkpoint(mine).notes)
    assert not (tmp_path / "ran").exists()


def test_shards_are_read_and_damaged_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "sharded"
    build(BY_NAME["modernbert"]).save_pretrained(path, max_shard_size="60KB")
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert len(open_checkpoint(path).loaded.state) > 20
    index = path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    outside = dict.fromkeys(table["weight_map"], "../elsewhere.safetensors")
    index.write_text(json.dumps({**table, "weight_map": outside}))
    with pytest.raises(UsageError, match="elsewhere"):
        open_checkpoint(path)
    index.write_text(json.dumps(table))
    shards[0].write_bytes(shards[0].read_bytes()[:-100])
    with pytest.raises(UsageError, match="cannot be loaded"):
        open_checkpoint(path)
    shards[0].unlink()
    with pytest.raises(UsageError, match=shards[0].name):
        open_checkpoint(path)


def test_missing_and_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    state = load_file(broken / "model.safetensors")
    state.pop("model.layers.1.attn.Wqkv.weight")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="lacks 1 tensors"):
        open_checkpoint(broken)
    (broken / "model.safetensors").unlink()
    torch.save(state, broken / "pytorch_model.bin")
    with pytest.raises(UsageError, match="pickles are never opened"):
        open_checkpoint(broken)


def test_a_hub_name_is_not_downloaded(localattn: Command) -> None:
    done = localattn("export", "answerdotai/ModernBERT-base", "-o", "model.onnx")
    assert done.code != 0 and "hf download answerdotai/ModernBERT-base" in done.err


def test_lengths_beyond_the_model_and_foreign_files_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="256 positions"):
        export(ExportRequest(folder, tmp_path / "model.onnx", shapes=ShapeRequest(seq_len=512)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"config\.json is not replaced"):
        export(ExportRequest(folder, tmp_path / "model.onnx", overwrite=True))
    assert (tmp_path / "config.json").read_text() == "{}" and WINDOW == 16
