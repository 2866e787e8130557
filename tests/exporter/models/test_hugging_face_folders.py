"""A Hugging Face folder is examined before it is loaded: its files, what lies beside them, counts, and the release."""

from __future__ import annotations

import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localattn.core.errors import UsageError
from localattn.exporter.checkpoint.load import load_state
from localattn.exporter.checkpoint.open_checkpoint import open_checkpoint
from localattn.exporter.models.hugging_face import weights
from localattn.exporter.models.hugging_face.changed_meaning import warnings_of
from localattn.exporter.models.hugging_face.folder import files
from localattn.exporter.models.hugging_face.types import known, quirks_of
from localattn.exporter.options import ShapeRequest

from ...conftest import Finished
from ...support import run_folder
from ...support.models.hugging_face import CASES, build, update_config

transformers = pytest.importorskip("transformers")
Command = Callable[..., Finished]
BY_NAME = {case.name: case for case in CASES}
INDEX = "model.safetensors.index.json"


def _config(folder: Path, values: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def mistral(tmp_path: Path) -> Path:
    """A Mistral in a folder that the test may change."""
    made = run_folder.once("folders-mistral", lambda place: build(BY_NAME["mistral"]).save_pretrained(place / "model"))
    shutil.copytree(made / "model", tmp_path / "in")
    return tmp_path / "in"


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})


# --- The files that are hashed are the files that are read ----------------------------------------------------------


def _index(folder: Path, name: str, shard: str) -> None:
    table = {"metadata": {}, "weight_map": dict.fromkeys(_tensors(folder), shard)}
    (folder / name).write_text(json.dumps(table))


def _other_index(folder: Path) -> None:
    _save({name: x * 0 + 0.01 for name, x in _tensors(folder).items()}, folder.parent / "secret" / "s.safetensors")
    _index(folder, "x.safetensors.index.json", "../secret/s.safetensors")
    _config(folder, {"transformers_weights": "x.safetensors.index.json"})


def _fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        if name != "model.safetensors":
            _config(folder, {"transformers_weights": name})

    return make


def _fifo_in_folder(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


def _fifo_shard(folder: Path) -> None:
    _index(folder, INDEX, "shard.safetensors")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "shard.safetensors")


def _fifo_next_to_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "shard-00000-model-00001-of-00001.safetensors")


def _twice(folder: Path) -> None:
    _save(_tensors(folder), folder / "shard-00000-model-00001-of-00001.safetensors")
    _save({"x": torch.ones(2)}, folder / "model.safetensors")


def _dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../blobs/gone")


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "an index elsewhere by transformers_weights": (_other_index, "secret/s.safetensors"),
    "transformers_weights elsewhere": (
        lambda f: _config(f, {"transformers_weights": "../s.safetensors"}),
        "same folder",
    ),
    "transformers_weights absolute": (lambda f: _config(f, {"transformers_weights": "/s.safetensors"}), "same folder"),
    "transformers_weights a pickle": (
        lambda f: _config(f, {"transformers_weights": "adapter_model.bin"}),
        "same folder",
    ),
    "transformers_weights a number": (lambda f: _config(f, {"transformers_weights": 3}), "names 3"),
    "transformers_weights a list": (lambda f: _config(f, {"transformers_weights": ["a.safetensors"]}), "same folder"),
    "a FIFO by transformers_weights": (_fifo("f.safetensors"), "pipe"),
    "a FIFO as index": (_fifo("f.safetensors.index.json"), "pipe"),
    "a FIFO as weights": (_fifo("model.safetensors"), "pipe"),
    "a FIFO as shard": (_fifo_shard, "pipe"),
    "a FIFO as distributed shard": (_fifo_next_to_shards, "pipe"),
    "distributed shards beside other weights": (_twice, "weights twice"),
    "a FIFO that transformers reads besides": (lambda f: _fifo_in_folder(f, "generation_config.json"), "pipe"),
    "a link to nothing": (_dangling, r"link to \.\./blobs/gone, which does not exist"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_elsewhere_or_not_plain_are_refused_at_once(name: str, mistral: Path) -> None:
    spoil, said = REFUSED[name]
    spoil(mistral)
    began = time.monotonic()
    with pytest.raises(UsageError, match=said):
        open_checkpoint(mistral)
    assert time.monotonic() - began < 5


def test_the_weights_that_transformers_weights_names_are_read_and_hashed(mistral: Path) -> None:
    before = open_checkpoint(mistral)
    _save({name: x * 2 for name, x in _tensors(mistral).items()}, mistral / "x.safetensors")
    _config(mistral, {"transformers_weights": "x.safetensors"})
    assert [path.name for path in files(mistral)] == ["config.json", "x.safetensors"]
    after = open_checkpoint(mistral)
    name = "model.embed_tokens.weight"
    assert torch.equal(after.loaded.state[name], 2 * before.loaded.state[name])
    assert after.loaded.sha256 != before.loaded.sha256
    assert any("does not read model.safetensors" in note for note in after.notes)


def test_shards_of_a_distributed_checkpoint_are_read_and_hashed(mistral: Path) -> None:
    before = open_checkpoint(mistral)
    shard = mistral / "shard-00000-model-00001-of-00001.safetensors"
    (mistral / "model.safetensors").rename(shard)
    assert [path.name for path in files(mistral)] == ["config.json", shard.name]
    after = open_checkpoint(mistral)
    assert all(torch.equal(x, after.loaded.state[name]) for name, x in before.loaded.state.items())


def test_weights_may_be_links_as_in_the_cache_of_the_hub(mistral: Path) -> None:
    blobs = mistral.parent / "blobs"
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (mistral / name).rename(blobs / name)
        (mistral / name).symlink_to(f"../blobs/{name}")
    assert len(open_checkpoint(mistral).loaded.state) > 10


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="becomes another user: root only")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", ".", ".."])
def test_a_file_that_may_not_be_read_is_told_so(name: str, mistral: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to(tempfile.gettempdir()) and folder.stat().st_mode & 0o55 != 0o55:
            folder.chmod(0o755)
    (mistral / name).chmod(0)
    os.seteuid(65534)  # a user who is nobody
    try:
        with pytest.raises(UsageError) as refused:
            open_checkpoint(mistral)
    finally:
        os.seteuid(0)
        (mistral / name).chmod(0o755)
    assert "Permission denied" in str(refused.value)


# --- Counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"num_labels": 30_000_000},
        {"num_labels": 10**12},
        {"num_hidden_layers": 4000},
        {"vocab_size": 10**9},
        {"hidden_size": 2**24},
        {"intermediate_size": 2**34},
        {"num_attention_heads": 10**7},
        {"num_key_value_heads": 10**9},
        {"num_local_experts": 10**8},
        {"text_config": {"num_hidden_layers": 10**6}},
        {"head_dim": 2**26},
    ],
    ids=str,
)
def test_counts_that_the_weights_do_not_hold_cost_nothing(values: dict[str, Any], mistral: Path) -> None:
    _config(mistral, values)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(UsageError, match=r"num_|n_|does not fit|window|cannot be used|shape"):
        open_checkpoint(mistral)
    assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # kB


@pytest.mark.parametrize("labels", [1, 7, 200])
def test_labels_that_are_there_are_taken(labels: int, tmp_path: Path) -> None:
    config = BY_NAME["modernbert"]
    values = {**config.values, "num_labels": labels}
    case = config._replace(model="ModernBertForSequenceClassification", values=values)
    build(case).save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).loaded.state["classifier.weight"].shape[0] == labels


# --- What was read is what was hashed ---------------------------------------------------------------------------------


def test_weights_that_are_replaced_while_they_are_read_are_refused(
    mistral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = weights.load_model

    def swap_afterwards(*given: Any, **named: Any) -> Any:
        found = load(*given, **named)
        _save({name: x * 1.5 for name, x in _tensors(mistral).items()}, mistral / "new")
        (mistral / "new").replace(mistral / "model.safetensors")
        return found

    monkeypatch.setattr(weights, "load_model", swap_afterwards)
    with pytest.raises(UsageError, match=r"model\.safetensors changed while it was read"):
        open_checkpoint(mistral)


def test_weights_that_are_replaced_before_the_reference_reads_them_are_refused(mistral: Path) -> None:
    source = open_checkpoint(mistral).source(ShapeRequest(seq_len=40))
    _save({name: x * 1.5 for name, x in _tensors(mistral).items()}, mistral / "new")
    (mistral / "new").replace(mistral / "model.safetensors")
    ids = torch.ones(1, 40, dtype=torch.int64).numpy()
    with pytest.raises(UsageError, match="changed while it was read"):
        source.reference({"input_ids": ids, "attention_mask": ids})


def test_a_checkpoint_that_is_written_while_it_is_exported_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localattn.exporter import export as exporter
    from localattn.exporter.jobs import checkpoint

    described = checkpoint.model_entries

    def write_first(*given: Any) -> Any:
        with tiny.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"\0")
        return described(*given)

    monkeypatch.setattr(checkpoint, "model_entries", write_first)
    with pytest.raises(UsageError, match="changed while it was read"):
        exporter.export(exporter.ExportRequest(tiny, tmp_path / "model.onnx", checks="quick"))
    assert not (tmp_path / "model.onnx").exists()


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localattn.exporter.checkpoint import load

    path = tmp_path / "model.pt"
    torch.save({"to_qkv.weight": torch.ones(6, 2)}, path)
    assert load_state(path).state["to_qkv.weight"].shape == (6, 2)
    unwrap = load.unwrap

    def swap_afterwards(*given: Any) -> Any:
        found = unwrap(*given)
        torch.save({"to_qkv.weight": torch.zeros(6, 2)}, tmp_path / "new")
        (tmp_path / "new").replace(path)
        return found

    monkeypatch.setattr(load, "unwrap", swap_afterwards)
    with pytest.raises(UsageError, match="changed while it was read"):
        load_state(path)


def test_a_configuration_is_parsed_once(mistral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the choice of a name, by what recognises the folder, and by what reads it; and again once it changed."""
    from localattn.commands.api.exporting import export_request
    from localattn.exporter.models.hugging_face import config
    from localattn.exporter.options import ExportOptions

    parsed, read_json = [], config.read_json
    monkeypatch.setattr(config, "read_json", lambda path, *rest: parsed.append(path.name) or read_json(path, *rest))
    config._parsed.cache_clear()
    assert export_request(mistral, None, ExportOptions()).output == Path("in-onnx/model.onnx")
    opened = open_checkpoint(mistral)
    assert parsed == ["config.json"] and config.read_config(mistral) is not config.read_config(mistral)
    config.read_config(mistral).clear()
    assert config.read_config(mistral)["architectures"] == [opened.resolved.args.model_dump()["architecture"]]
    update_config(mistral, {"vocab_size": 77})
    assert config.read_config(mistral)["vocab_size"] == 77 and len(parsed) == 2


# --- State beside the weights ----------------------------------------------------------------------------------------

BESIDE = {
    "adapter_config.json": ("{}", "merge_and_unload"),
    "adapter_model.safetensors": ("", "merge_and_unload"),
    "adapter_model.bin": ("", "merge_and_unload"),
    "pytorch_lora_weights.safetensors": ("", "merge_and_unload"),
    "soft_prompt.safetensors": ("", "learned prompts"),
    "value_head.safetensors": ("", "a head in a file of its own"),
    "v_head.bin": ("", "a head in a file of its own"),
    "quantize_config.json": ('{"bits": 4, "group_size": 128}', "GPTQ"),
    "quant_config.json": ('{"w_bit": 4}', "AWQ"),
    "hf_quant_config.json": ('{"quantization": {"quant_algo": "FP8"}}', "ModelOpt"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_state_beside_the_weights_is_refused_by_name(name: str, mistral: Path, localattn: Command) -> None:
    text, said = BESIDE[name]
    (mistral / name).write_text(text)
    done = localattn("export", mistral, "-o", mistral.parent / "model.onnx")
    assert done.code == 2 and said in done.err and name in done.err, done.err
    assert not (mistral.parent / "model.onnx").exists()


def test_an_adapter_without_a_base_is_refused(tmp_path: Path, localattn: Command) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "/base"}')
    (tmp_path / "adapter_model.safetensors").touch()
    done = localattn("export", tmp_path, "-o", tmp_path / "model.onnx")
    assert done.code == 2 and "merge_and_unload" in done.err, done.err


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "ADAPTION_PROMPT"])
def test_adapters_that_nothing_can_merge_are_told_as_such(kind: str, mistral: Path) -> None:
    """PEFT raises on `merge_and_unload` of these, so it would be no advice."""
    (mistral / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    with pytest.raises(UsageError, match="has an adapter") as caught:
        open_checkpoint(mistral)
    assert f"{kind} cannot be merged" in caught.value.fix and "merge_and_unload" not in caught.value.fix


def test_an_adapter_in_a_folder_of_its_own_is_told(mistral: Path, localattn: Command) -> None:
    """transformers does not apply it, so the export warns and goes on; without a model beside it there is none."""
    below = mistral / "checkpoint-500"
    below.mkdir()
    (below / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (warning,) = open_checkpoint(mistral).warnings
    assert "checkpoint-500/adapter_config.json" in warning and "merge_and_unload" in warning
    for path in [path for path in mistral.iterdir() if path.is_file()]:
        path.unlink()
    done = localattn("export", mistral, "-o", mistral.parent / "model.onnx")
    assert done.code == 2 and "checkpoint-500/adapter_config.json" in done.err and "merge_and_unload" in done.err


def test_settings_of_another_programs_quantiser_are_no_state(mistral: Path) -> None:
    (mistral / "quantize_config.json").write_text('{"per_channel": true, "modes": ["q8"]}')  # of transformers.js
    assert open_checkpoint(mistral).loaded.state


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", "of an adapter"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "of an adapter"),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight", "of an adapter"),
        ("prompt_encoder.default.embedding.weight", "of an adapter"),
        ("model.layers.0.mlp.up_proj.ia3_l.default", "of an adapter"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight", "of an adapter"),
        ("model.layers.0.self_attn.q_proj.qweight", "of quantised weights"),
        ("model.layers.0.self_attn.q_proj.weight.absmax", "of quantised weights"),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "of quantised weights"),
        ("model.layers.0.self_attn.q_proj.SCB", "of quantised weights"),
    ],
)
@pytest.mark.parametrize("task", [None, "feature-extraction"])
def test_tensors_of_adapters_and_of_quantised_weights_are_told(
    name: str, said: str, task: str | None, mistral: Path
) -> None:
    _save({**_tensors(mistral), name: torch.ones(2, 2)}, mistral / "model.safetensors")
    with pytest.raises(UsageError, match=said):
        open_checkpoint(mistral, task=task)


def _sentence(folder: Path, parts: list[str], path: str = "") -> None:
    modules = [{"idx": 0, "name": "0", "path": path, "type": "sentence_transformers.models.Transformer"}]
    modules += [
        {"idx": i, "name": str(i), "path": f"{i}_{part}", "type": f"sentence_transformers.models.{part}"}
        for i, part in enumerate(parts, 1)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def test_sentence_transformers_export_their_transformer_alone_and_say_so(mistral: Path, localattn: Command) -> None:
    _sentence(mistral, ["Pooling", "Dense", "Normalize"])
    prompts = {"prompts": {"query": "task: search | query: ", "document": "title: "}}
    (mistral / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    done = localattn("export", mistral, "-o", mistral.parent / "model.onnx", "--dry-run")
    assert done.code == 2 and "--task feature-extraction" in done.err, done.err
    notes = open_checkpoint(mistral, task="feature-extraction").notes
    assert any("does not have: Pooling, Dense, Normalize, prompts (query, document)" in x for x in notes), notes


def test_a_transformer_in_a_folder_of_sentence_transformers_is_named(tmp_path: Path, mistral: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    mistral.rename(outer / "0_Transformer")
    _sentence(outer, ["Pooling"], "0_Transformer")
    with pytest.raises(UsageError, match=r"Give .*0_Transformer"):
        open_checkpoint(outer)


# --- Older releases ---------------------------------------------------------------------------------------------------

_BIDIRECTIONAL = {"model_type": "gemma3_text", "use_bidirectional_attention": True}


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        ({**_BIDIRECTIONAL, "sliding_window": 17, "transformers_version": "4.57.6"}, "sliding_window"),
        ({**_BIDIRECTIONAL, "sliding_window": 257, "transformers_version": "5.10.0"}, "sliding_window"),
        ({**_BIDIRECTIONAL, "sliding_window": 512, "transformers_version": "4.57.0.dev0"}, ""),
        ({**_BIDIRECTIONAL, "sliding_window": 17, "transformers_version": "5.16.0"}, ""),
        ({"model_type": "gemma3_text", "sliding_window": 17, "transformers_version": "4.57.6"}, ""),
        ({"model_type": "olmo3", "rope_theta": 1e4, "transformers_version": "4.57.6"}, "rope_theta"),
        (
            {"model_type": "olmo3", "rope_parameters": {"rope_theta": 1e4}, "transformers_version": "5.10.0"},
            "rope_theta",
        ),
        ({"model_type": "olmo3", "rope_theta": 500000, "transformers_version": "4.57.6"}, ""),
        (
            {
                **{"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
                "transformers_version": "4.51.3",
            },
            "max_window_layers",
        ),
        ({"model_type": "qwen2", "use_sliding_window": True, "transformers_version": "4.51.3"}, ""),
        ({"model_type": "qwen2", "transformers_version": "4.57.6\n✓ parity"}, ""),
        ({"model_type": "qwen2"}, ""),
    ],
    ids=str,
)
def test_fields_whose_meaning_changed_are_warned_of(config: dict[str, Any], warned: str) -> None:
    found = warnings_of(quirks_of(config["model_type"]).changed_meanings, config)
    assert len(found) == bool(warned)
    for line in found:
        assert warned in line and "golden" in line and "\n" not in line
        assert config["transformers_version"] in line and transformers.__version__ in line


def test_every_changed_meaning_names_its_source_and_is_of_a_tested_type() -> None:
    changed = {name: quirks_of(name).changed_meanings for name in known()}
    assert {name for name, rows in changed.items() if rows} <= {case.name.split()[0] for case in CASES}
    rows = [row for rows in changed.values() for row in rows]
    assert len(rows) >= 4 and all(row.source and row.since < row.before for row in rows)


def test_a_warning_is_shown_when_notes_are_not(tmp_path: Path, localattn: Command) -> None:
    build(BY_NAME["gemma3_text bidirectional"]).save_pretrained(tmp_path / "model")
    _config(tmp_path / "model", {"sliding_window": 17, "transformers_version": "4.57.6"})
    done = localattn("export", tmp_path / "model", "-o", tmp_path / "model.onnx", "--checks", "quick", "-q")
    assert done.code == 0 and "4.57.6" in done.err and "sliding_window (17)" in done.err, done.err
    assert "Note:" not in done.err
