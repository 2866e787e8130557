"""The configuration to complete: every argument that no tensor shows, and nothing that can be pasted by accident."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localattn.core.errors import UsageError
from localattn.exporter.checkpoint.config import load_config, parse_config
from localattn.exporter.checkpoint.describe import describe_checkpoint
from localattn.exporter.checkpoint.hidden_arguments import (
    MEANINGS,
    NO_EFFECT,
    default_in_words,
    hidden_arguments,
    placeholders,
)
from localattn.exporter.checkpoint.open_checkpoint import open_checkpoint
from localattn.exporter.models.registry import CLASSES, detect_family

torch = pytest.importorskip("torch")
local_attention = pytest.importorskip("local_attention")

KWARGS = {"num_tokens": 11, "max_seq_len": 24, "dim": 20, "depth": 2, "heads": 2, "dim_head": 8}
# One state of each family that shows as much as a state can.
STATES = {
    "local_attention.LocalTransformer": lambda: local_attention.LocalTransformer(**KWARGS, local_attn_window_size=4),
    "local_attention.LocalMHA": lambda: local_attention.LocalMHA(dim=20, heads=2, dim_head=8, window_size=4),
    "local_attention.LocalAttention": lambda: local_attention.LocalAttention(window_size=4, dim=8),
}


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    path = tmp_path / "model.pt"
    torch.save(STATES["local_attention.LocalTransformer"]().state_dict(), path)
    return path


@pytest.mark.parametrize("name", STATES)
def test_every_argument_is_shown_by_the_weights_or_asked_for(name):
    entry = CLASSES[name]
    shapes = {key: tuple(tensor.shape) for key, tensor in STATES[name]().state_dict().items()}
    shown = set(detect_family(shapes).infer_arguments(shapes, {}))
    asked = set(hidden_arguments(entry, {"qk_rmsnorm": True, "use_xpos": True}))
    unknown = set(entry.args.model_fields) - shown - asked - NO_EFFECT
    assert unknown == set()
    assert all(MEANINGS[argument] and (default_in_words(entry, argument) or argument == "window_size" or "dim" in shown)
               for argument in asked - shown)  # fmt: skip


def test_the_template_lists_what_no_tensor_shows(checkpoint):
    description = describe_checkpoint(checkpoint)
    template = description["template"]
    assert list(template["kwargs"]) == [
        *("local_attn_window_size", "causal", "exact_windowsize", "look_backward", "look_forward"),
        *("shared_qk", "use_xpos", "xpos_scale_base"),
    ]
    assert set(placeholders(template)) == {*template["kwargs"], "hyper_connections"}
    assert template["kwargs"]["local_attn_window_size"] == "<fill in: tokens in a window>"
    assert "remove this entry for 1>" in template["kwargs"]["look_backward"]
    assert description["save_as"] == str(checkpoint.with_suffix(".json"))


def test_qk_scale_is_asked_for_where_it_counts(tmp_path):
    module = local_attention.LocalTransformer(**KWARGS, local_attn_window_size=4, qk_rmsnorm=True)
    torch.save(module.state_dict(), tmp_path / "model.pt")
    assert "qk_scale" in describe_checkpoint(tmp_path / "model.pt")["template"]["kwargs"]


@pytest.mark.parametrize("name", ["local_attn_window_size", "causal", "xpos_scale_base", "hyper_connections"])
def test_a_placeholder_left_in_is_named(checkpoint, name):
    template = describe_checkpoint(checkpoint)["template"]
    left = {**template["kwargs"], "hyper_connections": template["hyper_connections"]}[name]
    document = {"class": template["class"], "kwargs": {"local_attn_window_size": 4}}
    document = {**document, name: left} if name == "hyper_connections" else {**document, "kwargs": {name: left}}
    with pytest.raises(UsageError, match=f"incomplete: {name}\\.") as caught:
        parse_config(document, "model.json")
    assert "fill in" in caught.value.why


def test_the_template_completed_is_a_configuration(checkpoint):
    template = describe_checkpoint(checkpoint)["template"]
    kwargs = {**dict.fromkeys(template["kwargs"]), "local_attn_window_size": 4, "causal": False}
    document = {**template, "kwargs": {k: v for k, v in kwargs.items() if v is not None}, "hyper_connections": "0.3.2"}
    checkpoint.with_suffix(".json").write_text(json.dumps(document))
    resolved = open_checkpoint(checkpoint).resolved
    assert (resolved.args.local_attn_window_size, resolved.args.causal) == (4, False)
    assert resolved.hyper_connections == "0.3.2"


def test_inspect_writes_it_and_never_replaces(checkpoint, localattn):
    result = localattn("inspect", checkpoint)
    assert result.code == 0 and "--write-config" in result.out and '"<fill in: tokens in a window>"' in result.out
    result = localattn("inspect", checkpoint, "--write-config")
    written = checkpoint.with_suffix(".json")
    assert result.code == 0 and str(written) in result.err and "local_attn_window_size" in result.err
    assert json.loads(written.read_text()) == describe_or_template(checkpoint, written)
    before = written.read_bytes()
    for words in (("export", checkpoint), ("inspect", checkpoint)):
        result = localattn(*words)
        assert result.code == 2 and "incomplete: local_attn_window_size" in result.err
    written.write_text('{"kwargs": {"local_attn_window_size": 4}}')
    before = written.read_bytes()
    result = localattn("inspect", checkpoint, "--write-config", "--force")
    assert result.code == 2 and "never overwritten" in result.err and written.read_bytes() == before


def describe_or_template(checkpoint: Path, written: Path) -> dict:
    """The template of a checkpoint, seen without the file that was written of it."""
    aside = written.rename(written.with_suffix(".aside"))
    try:
        return dict(describe_checkpoint(checkpoint)["template"])
    finally:
        aside.rename(written)


def test_a_link_where_it_would_be_written_stays(checkpoint, tmp_path, localattn):
    checkpoint.with_suffix(".json").symlink_to(tmp_path / "elsewhere")
    assert localattn("inspect", checkpoint, "--write-config").code == 2
    assert not (tmp_path / "elsewhere").exists()


def test_what_the_checkpoint_says_itself_is_in_it(tmp_path, localattn):
    path = tmp_path / "model.pt"
    state = STATES["local_attention.LocalTransformer"]().state_dict()
    torch.save({"state_dict": state, "hyper_parameters": {"window_size": 4, "causal": True}}, path)
    assert localattn("inspect", path, "--write-config").code == 0
    with pytest.raises(UsageError, match="incomplete: exact_windowsize"):
        load_config(path.with_suffix(".json"))
    kwargs = json.loads(path.with_suffix(".json").read_text())["kwargs"]
    assert (kwargs["local_attn_window_size"], kwargs["causal"]) == (4, True)


def test_it_goes_with_checkpoints_alone(tmp_path, localattn):
    (tmp_path / "model.onnx").write_bytes(b"")
    assert localattn("inspect", tmp_path / "model.onnx", "--write-config").code == 2
