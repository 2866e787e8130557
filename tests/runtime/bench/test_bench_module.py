"""`bench` of a module of the user's own: PyTorch's module as one more candidate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import localattn as package

from ...support.own_module import cache, tagger

QUICK = {"duration": 0.0, "iterations": 2, "rounds": 1, "warmup": 0.0}


def test_pytorchs_module_is_one_more_candidate(localattn) -> None:
    folder = tagger()
    model, weights = folder / "model.onnx", folder / "epoch.ckpt"
    quick = [word for name, value in QUICK.items() for word in (f"--{name}", value)]
    with cache(folder):
        done = localattn("bench", model, "--against", weights, "--seq-len", "8", *quick, "--format", "json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    names = ["model.onnx", "epoch.ckpt (PyTorch)"]
    assert [row["label"] for row in report["rows"]] == names
    assert [row["backend"] for row in report["rows"]] == ["onnxruntime", "torch"]
    assert report["rows"][1]["ratio"]["against"] == names[0] and report["rows"][1]["seq_len"] == 8
    assert "torch" in report["versions"]


def test_the_function_is_named_where_no_cache_knows_it(tmp_path: Path) -> None:
    folder = tagger()
    with cache(tmp_path):
        with pytest.raises(package.UsageError, match="not known here") as refused:
            package.bench(folder / "model.onnx", folder / "epoch.ckpt", **QUICK)
        assert "--factory" not in refused.value.fix and "`factory=" in refused.value.fix
        made = package.bench(folder / "model.onnx", factory=f"{folder}/tagger.py:build", threads=(1,), **QUICK)
    assert made.rows[1].label.endswith("tagger.py:build (PyTorch)") and made.rows[1].threads == 1
    assert "no weights are given" in str(made)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"against": ["epoch.ckpt", "other.ckpt"]}, "One checkpoint"),
        ({"against": "none.ckpt"}, "Cannot read"),
        ({"factory_args": "{}"}, "need `factory`"),
    ],
)
def test_what_is_refused(arguments: dict, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("epoch.ckpt", "other.ckpt"):
        Path(name).write_bytes((tagger() / "epoch.ckpt").read_bytes())
    with pytest.raises(package.UsageError, match=said):
        package.bench(tagger() / "model.onnx", **arguments)
