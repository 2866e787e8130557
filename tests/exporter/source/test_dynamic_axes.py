"""Checkpoints exported with open batch and sequence axes: every length between windows, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed, UsageError
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.models.local_attention import module
from localattn.exporter.models.parts.rotary import RotaryTable
from localattn.exporter.options import ShapeRequest
from localattn.runtime import load

from ...conftest import TINY, Finished, save_upstream

MHA = {"dim": 16, "window_size": 4, "dim_head": 8, "heads": 2}
ATTENTION = {"window_size": 4, "dim": 8}
WHOLE_WINDOWS = ATTENTION | {"shared_qk": True}
BOTH = ("batch", "seq")


@pytest.mark.parametrize(
    ("kind", "kwargs", "shapes"),
    [
        ("LocalTransformer", TINY | {"max_seq_len": 24}, ShapeRequest()),
        ("LocalTransformer", TINY | {"causal": False, "exact_windowsize": False}, ShapeRequest(21, mask=True)),
        ("LocalTransformer", TINY | {"num_tokens": None, "causal": False, "depth": 1}, ShapeRequest(21)),
        ("LocalTransformer", TINY | {"use_dynamic_pos_bias": True, "depth": 1}, ShapeRequest(21)),
        ("LocalMHA", MHA | {"causal": True, "use_xpos": True}, ShapeRequest(21, attn_bias=True)),
        ("LocalAttention", ATTENTION | {"autopad": True}, ShapeRequest(18, heads=3, mask=True, attn_bias=True)),
        ("LocalAttention", WHOLE_WINDOWS, ShapeRequest(20, heads=3)),
    ],
    ids=["causal", "mask", "padded", "position bias", "xpos, bias", "attention", "whole windows only"],
)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_every_class(tmp_path: Path, kind: str, kwargs: dict[str, Any], shapes: ShapeRequest, dtype: str) -> None:
    checkpoint = save_upstream(tmp_path, f"local_attention.{kind}", kwargs)
    request = ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=shapes, dtype=dtype, dynamic=BOTH)
    report = export(request)
    parity = report.sidecar.checks[2]
    assert {check.status for check in report.sidecar.checks if check is not parity} == {"passed"}
    if kwargs is WHOLE_WINDOWS:  # what the class refuses cannot be compared, and is no tick
        assert parity.status == "not proven" and parity.figures["refused"] >= 6
        assert parity.detail.startswith("equal at batch=2 seq=20, batch=2 seq=4, batch=2 seq=8")
        assert "not known at batch=2 seq=1, batch=2 seq=3" in parity.detail
        assert "no multiple of the window size 4" in parity.detail
    else:
        assert parity.status == "passed" and parity.figures["trials"] >= 6
    assert load(report.path).inputs == report.sidecar.inputs
    assert load(report.path).outputs == report.sidecar.outputs


@pytest.mark.parametrize("causal", [True, False])
def test_open_sizes_equal_upstream(tmp_path: Path, causal: bool) -> None:
    from local_attention import LocalTransformer

    kwargs = TINY | {"causal": causal}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", kwargs)
    upstream = LocalTransformer(**kwargs).eval()
    upstream.load_state_dict(torch.load(checkpoint))
    session = load(export(ExportRequest(checkpoint, tmp_path / "m.onnx", dynamic=BOTH)).path)
    for batch, length in [(1, n) for n in (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 33, 63, 64)] + [(5, 6)]:
        tokens = torch.randint(0, 23, (batch, length))
        with torch.no_grad():
            expected = upstream(tokens).numpy()
        np.testing.assert_allclose(session.run({"tokens": tokens.numpy()})["logits"], expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(UsageError):
        session.run({"tokens": np.zeros((1, 65), np.int64)})


@pytest.mark.parametrize("axes", [("batch",), ("seq",)])
def test_one_dynamic_axis(tiny: Path, axes: tuple[str, ...]) -> None:
    report = export(ExportRequest(tiny, tiny.with_name("m.onnx"), dynamic=axes))
    assert report.sidecar.inputs[0].shape == (("batch", 64) if axes == ("batch",) else (1, "seq"))
    assert report.sidecar.dynamic == list(axes)


def test_wrong_padding_between_the_windows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", MHA)
    monkeypatch.setattr(module.LocalAttention, "_padding", lambda self, length, batch, mask: (0, mask))
    with pytest.raises(CheckFailed, match="parity") as failure:
        export(ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=ShapeRequest(32), dynamic=BOTH))
    assert "seq=7" in failure.value.why
    assert not (tmp_path / "m.onnx").exists()


def test_a_wrong_rotary_table_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = RotaryTable.prepare

    def wrong(self: RotaryTable) -> None:
        original(self)
        self.query_cosine = torch.cat((self.query_cosine[:1] * 1.5, self.query_cosine[1:]))

    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", MHA)
    monkeypatch.setattr(RotaryTable, "prepare", wrong)
    with pytest.raises(CheckFailed, match="parity"):
        export(ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=ShapeRequest(32), dynamic=BOTH))


def test_command_line(tiny: Path, localattn: Callable[..., Finished]) -> None:
    model = tiny.with_name("m.onnx")
    plan = localattn("export", tiny, "-o", model, "--dynamic", "batch,seq", "--dry-run")
    assert "tokens int64 [batch, seq]" in plan.out
    done = localattn("export", tiny, "-o", model, "--dynamic", "batch,seq", "--seq-len", 20)
    assert done.code == 0, done
    assert "open    batch, seq; sequences up to 20" in done.out
    sidecar = read_sidecar(model)
    assert sidecar is not None
    assert (sidecar.seq_len, sidecar.dynamic) == (20, ["batch", "seq"])
    assert localattn("inspect", model).code == 0
    assert localattn("parity", model, "--against", tiny).code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dynamic", "length"], "no such axis"),
        (["--dynamic", ""], "--dynamic"),
        (["--dynamic", "seq", "--seq-len", "65"], "max_seq_len 64"),
        (["--dynamic", "seq", "--seq-len", "1"], "2 or more"),
        (["--max-seq-len", "65"], "max_seq_len 64"),  # the name of older releases
    ],
    ids=" ".join,
)
def test_impossible_requests(tiny: Path, localattn: Callable[..., Finished], options: list[str], words: str) -> None:
    finished = localattn("export", tiny, "-o", tiny.with_name("m.onnx"), *options)
    assert finished.code == 2
    assert words in finished.err
    assert "Traceback" not in finished.err
