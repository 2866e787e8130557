"""Every set of weights in a checkpoint is named, and `--entry` reads each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localattn.core.errors import UsageError
from localattn.exporter.checkpoint.load import load_state
from localattn.exporter.checkpoint.sharded_training import know_dtensors

from ...conftest import TINY, save_upstream

torch = pytest.importorskip("torch")

TRAINED = {"to_qkv.weight": torch.arange(24.0).reshape(6, 4), "to_out.weight": torch.ones(4, 2)}
AVERAGE = {name: tensor + 0.5 for name, tensor in TRAINED.items()}
BEFORE = {name: tensor - 0.5 for name, tensor in TRAINED.items()}


def ddp(state: dict[str, Any], prefix: str = "module.") -> dict[str, Any]:
    return {prefix + name: tensor for name, tensor in state.items()}


def optimizer(key: str, values: dict[str, Any]) -> dict[str, Any]:
    moments = {name: torch.randn_like(tensor) for name, tensor in values.items()}
    state = {i: {"exp_avg": moments[name], key: values[name]} for i, name in enumerate(values)}
    return {"state": state, "param_groups": [{"params": [*range(len(values))]}]}


# By case: what the file holds, and the entry of the average in it.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "timm": (lambda: {"state_dict": ddp(TRAINED), "state_dict_ema": ddp(AVERAGE)}, "state_dict_ema"),
    "model_ema": (lambda: {"model": TRAINED, "model_ema": AVERAGE}, "model_ema"),
    "ema": (lambda: {"model": TRAINED, "ema": AVERAGE}, "ema"),
    "an own name": (lambda: {"model": TRAINED, "averaged": AVERAGE}, "averaged"),
    "nested": (lambda: {"model": TRAINED, "train": {"ema": {"shadow": AVERAGE}}}, "train.ema.shadow"),
    "a list": (lambda: {"model": TRAINED, "averages": [AVERAGE]}, "averages.0"),
    "a list of tables": (lambda: [{"model": TRAINED, "ema": AVERAGE}, optimizer("exp_avg_sq", TRAINED)], "0.ema"),
    "SWA": (
        lambda: {"model": TRAINED, "swa": {"n_averaged": torch.tensor(3), **ddp(AVERAGE)}},
        "swa",
    ),
    "a callback of Lightning": (
        lambda: {"state_dict": ddp(TRAINED, "model."), "callbacks": {"EMA{'decay': 0.999}": {"ema": AVERAGE}}},
        "callbacks.EMA{'decay': 0.999}.ema",
    ),
    "ema_pytorch": (lambda: {"model": TRAINED, "ema": ddp(AVERAGE, "ema_model.")}, "ema"),
    "ema_pytorch, both": (
        lambda: {"model": TRAINED, "ema": {**ddp(AVERAGE, "ema_model."), **ddp(BEFORE, "online_model.")}},
        "ema.ema_model",
    ),
    "prefixes in one table": (lambda: {**ddp(TRAINED, "model."), **ddp(AVERAGE, "averaged.")}, "averaged"),
    "LitEma": (
        lambda: {
            **ddp(TRAINED, "model."),
            **{"model_ema." + name.replace(".", ""): tensor for name, tensor in AVERAGE.items()},
        },
        "model_ema",
    ),
    "LitEma of a wrapped model": (
        lambda: {
            "state_dict": {
                **ddp(TRAINED, "model.net."),
                **{"model_ema.net" + name.replace(".", ""): tensor for name, tensor in AVERAGE.items()},
                "model_ema.decay": torch.tensor(0.999),
            }
        },
        "state_dict",
    ),
    "beside names without a prefix": (
        lambda: {**TRAINED, **ddp(AVERAGE, "model_ema.module."), "n_averaged": torch.tensor(3)},
        "model_ema.module",
    ),
    "a table by number": (lambda: {"model": TRAINED, "ema": dict(enumerate(AVERAGE.values()))}, "ema"),
    "diffusers": (
        lambda: {"model": TRAINED, "ema_model": {"decay": 0.99, "shadow_params": [*AVERAGE.values()]}},
        "ema_model.shadow_params",
    ),
    "NeMo": (
        lambda: {"state_dict": TRAINED, "optimizer_states": [{"opt": {}, "ema": tuple(AVERAGE.values())}]},
        "optimizer_states.0.ema",
    ),
    "torch_ema": (lambda: {"model": TRAINED, "ema": {"shadow_params": [*AVERAGE.values()]}}, "ema.shadow_params"),
    "an optimizer's copy": (lambda: {"model": TRAINED, "optimizer": optimizer("ax", AVERAGE)}, "optimizer.state.ax"),
    "an optimizer's list": (
        lambda: {"model": TRAINED, "optimizer": {"fp32_from_fp16": [[*AVERAGE.values()]]}},
        "optimizer.fp32_from_fp16",
    ),
    "torch.compile": (
        lambda: {"model": TRAINED, "best": {f"_orig_mod.{name}": x for name, x in AVERAGE.items()}},
        "best",
    ),
}


@pytest.mark.parametrize("dtensors", [False, True], ids=["", "DTensors known"])
@pytest.mark.parametrize("case", CASES)
def test_each_set_is_named_and_can_be_read(
    case: str, dtensors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether something else imported torch's module of DTensors changes nothing."""
    know_dtensors()
    if not dtensors:
        monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    content, entry = CASES[case]
    path = tmp_path / "w.pt"
    torch.save(content(), path)
    loaded = load_state(path)
    assert all(torch.equal(loaded.state[name], TRAINED[name]) for name in TRAINED)
    assert entry in [other["entry"] for other in loaded.others if other["same_model"]]
    (warning,) = loaded.warnings  # one line, whatever the number of sets
    assert f"`entry={entry!r}`" in warning
    chosen = load_state(path, entry=entry)
    assert sorted(chosen.state) == sorted(AVERAGE)
    assert all(torch.equal(chosen.state[name], AVERAGE[name]) for name in AVERAGE)
    assert not chosen.warnings


def test_the_one_that_is_read_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"state_dict": ddp(TRAINED), "state_dict_ema": ddp(AVERAGE)}, path)
    loaded = load_state(path, entry="state_dict")
    assert torch.equal(loaded.state["to_out.weight"], TRAINED["to_out.weight"])
    assert not loaded.warnings and any("state_dict_ema" in note for note in loaded.notes)


def test_moments_and_gradients_are_no_weights(tmp_path: Path) -> None:
    moments = {name: torch.randn_like(tensor) for name, tensor in TRAINED.items()}
    content = {"model": TRAINED, "optimizer": optimizer("exp_avg_sq", {n: x.square() for n, x in moments.items()})}
    content |= {"grads": moments, "optim_named": {name: {"momentum": x} for name, x in moments.items()}}
    torch.save(content, tmp_path / "w.pt")
    loaded = load_state(tmp_path / "w.pt")
    assert not loaded.warnings and not loaded.others


def test_equal_and_foreign_sets_are_noted(tmp_path: Path) -> None:
    same = {name: tensor.clone() for name, tensor in TRAINED.items()}
    torch.save({"model": TRAINED, "best": same, "critic": {"fc.weight": torch.ones(2, 2)}}, tmp_path / "w.pt")
    loaded = load_state(tmp_path / "w.pt")
    assert not loaded.warnings
    assert any("the same weights once more: `entry='best'`" in note for note in loaded.notes)
    assert any("another model: `entry='critic'`" in note for note in loaded.notes)


def test_a_list_that_fits_in_two_ways_is_not_named(tmp_path: Path) -> None:
    """Three of four equal shapes: which one is missing cannot be told."""
    state = {f"layers.{i}.weight": torch.randn(2, 2) for i in range(4)}
    torch.save({"model": state, "ema": {"shadow_params": [*state.values()][:3]}}, tmp_path / "w.pt")
    assert not load_state(tmp_path / "w.pt").warnings


@pytest.mark.parametrize("entry", ["nothing", "state_dict.nothing", "state_dict..", "epoch", "0"])
def test_an_entry_that_is_not_there(entry: str, tmp_path: Path) -> None:
    torch.save({"state_dict": TRAINED, "epoch": 3}, tmp_path / "w.pt")
    with pytest.raises(UsageError, match="entry"):
        load_state(tmp_path / "w.pt", entry=entry)


def test_sets_without_a_usual_name_are_chosen_by_entry(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"first": TRAINED, "second": AVERAGE}, path)
    with pytest.raises(UsageError, match="several sets") as caught:
        load_state(path)
    assert caught.value.fix == "Choose one: `entry='first'`."
    assert torch.equal(load_state(path, entry="second").state["to_out.weight"], AVERAGE["to_out.weight"])


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"model": ddp(state)}])
def test_sets_behind_unknown_prefixes_are_chosen_by_entry(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save(wrap({**ddp(TRAINED, "student."), **ddp(AVERAGE, "teacher.")}), path)
    with pytest.raises(UsageError, match="several sets of weights: student, teacher") as caught:
        load_state(path)
    advised = str(caught.value.fix).split("'")[1]
    assert torch.equal(load_state(path, entry=advised).state["to_out.weight"], TRAINED["to_out.weight"])


def test_a_table_that_holds_itself_ends(tmp_path: Path) -> None:
    content: dict[str, Any] = {"model": TRAINED}
    content["again"] = content
    torch.save(content, tmp_path / "w.pt")
    load_state(tmp_path / "w.pt")


def test_commands_read_the_entry(localattn: Callable[..., Any], tmp_path: Path) -> None:
    """export and inspect name the other set, under -q too; the sidecar has the entry, and parity reads the same."""
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY)
    trained = torch.load(checkpoint)
    average = {name: tensor + 0.1 if tensor.is_floating_point() else tensor for name, tensor in trained.items()}
    torch.save({"state_dict": ddp(trained), "state_dict_ema": ddp(average)}, checkpoint)
    shown = localattn("inspect", checkpoint)
    assert "--entry state_dict_ema" in shown.out
    outputs = []
    for entry, name in (((), "a.onnx"), (("--entry", "state_dict_ema"), "b.onnx")):
        done = localattn("export", checkpoint, "-o", tmp_path / name, "--checks", "quick", "-q", *entry)
        assert done.code == 0, done.err
        assert ("To read another set: --entry state_dict_ema" in done.err) == (not entry)
        from localattn import load

        session = load(tmp_path / name)
        spec = session.inputs[0]
        outputs.append(session.run({spec.name: np.ones(spec.shape, np.int64)})["logits"])
        assert localattn("parity", tmp_path / name, "--against", checkpoint, "-q").code == 0
    assert not np.allclose(*outputs)
    assert localattn("parity", tmp_path / "b.onnx", "--against", checkpoint, "--entry", "state_dict", "-q").code == 1
    assert localattn("bisect", tmp_path / "b.onnx", "--against", checkpoint, "-q").code == 0
