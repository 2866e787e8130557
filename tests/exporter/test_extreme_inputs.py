"""Lengths at which the scales of xpos overflow, and masks that hide everything: the file stays finite, as upstream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from local_attention import LocalMHA

from localattn.core.tolerance import TOLERANCES
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest
from localattn.runtime import load

from ..conftest import save_upstream

MHA = {"dim": 16, "window_size": 16, "dim_head": 16, "heads": 1, "causal": True, "use_xpos": True}


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
def test_xpos_stays_finite_at_long_lengths(dtype: str, tmp_path: Path) -> None:
    """Its scale is a power of the position: 2,048 positions overflow where it is not taken within a window."""
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", MHA)
    shapes = ShapeRequest(seq_len=2048)
    export(ExportRequest(checkpoint, tmp_path / "m.onnx", dtype=dtype, shapes=shapes, seeds=(0,)))
    x = np.random.default_rng(0).standard_normal((1, 2048, 16)).astype(np.float16)
    session = load(tmp_path / "m.onnx", "cpu", plugin="none")
    found = session.run({"x": x.astype(session.inputs[0].dtype)})
    upstream = LocalMHA(**MHA).double().eval()
    upstream.load_state_dict(torch.load(checkpoint))
    with torch.inference_mode():
        expected = upstream(torch.from_numpy(x).double()).numpy()
    (got,) = found.values()
    tolerance = TOLERANCES[dtype]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, expected, tolerance.rtol, tolerance.atol)


def test_masks_that_hide_everything(tmp_path: Path) -> None:
    plain = MHA | {"window_size": 4, "use_xpos": False}
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", plain)
    export(ExportRequest(checkpoint, tmp_path / "m.onnx", shapes=ShapeRequest(seq_len=16, mask=True), seeds=(0,)))
    session = load(tmp_path / "m.onnx", "cpu", plugin="none")
    upstream = LocalMHA(**plain).eval()
    upstream.load_state_dict(torch.load(checkpoint))
    x, whole = torch.randn(1, 16, 16), torch.ones(1, 16, dtype=torch.bool)
    for hidden in (slice(0, 16), slice(0, 6), slice(9, 16), slice(4, 8)):
        mask = whole.clone()
        mask[:, hidden] = False
        (got,) = session.run({"x": x.numpy(), "mask": mask.numpy()}).values()
        with torch.inference_mode():
            expected = upstream(x, mask=mask).numpy()
        assert np.isfinite(got).all()
        sees = [bool(mask[0, max(0, place - 3) : place + 1].any()) for place in range(16)]
        np.testing.assert_allclose(got[:, sees], expected[:, sees], rtol=1e-4, atol=1e-5)
        # Without any key upstream returns a mean that includes padding; the file returns zeros (docs/numerics.md).
        assert not got[:, [not mask[0, : place + 1].any() for place in range(16)]].any()
