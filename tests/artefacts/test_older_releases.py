"""Files of older releases run, compare and convert as they did: file and sidecar, step files, a bundle.

`0.1/expected.npz` has the inputs and what 0.1 computed from them.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from localattn import load, open_step
from localattn.core.documents.sidecar import read_sidecar

from ..conftest import Finished

OLD = Path(__file__).with_name("0.1")
AFT = ("query", "key", "value")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the files, that of the bundle's model among them."""
    shutil.copytree(OLD, tmp_path / "0.1")
    with tarfile.open(OLD / "bundle.tar") as bundle:
        bundle.extractall(tmp_path / "0.1", filter="data")
    return tmp_path / "0.1"


def test_they_run(old: Path) -> None:
    expected = np.load(OLD / "expected.npz")
    tokens = {"tokens": expected["tokens"]}
    calls = {"full/model/full": tokens, "int8": tokens, "aft": {name: expected[name] for name in AFT}}
    for name, inputs in calls.items():
        (output,) = load(old / f"{name}.onnx", provider="cpu", plugin="none").run(inputs).values()
        np.testing.assert_allclose(output, expected[name.rpartition("/")[2]], atol=1e-5)
    step = open_step(old / "step.onnx", provider="cpu", plugin="none")
    np.testing.assert_allclose(step.consume(tokens), expected["step"], atol=1e-5)
    assert step.position == 16


def test_sidecars_have_todays_names(old: Path) -> None:
    options = {name: read_sidecar(old / f"{name}.onnx").options for name in ("int8", "aft", "step")}  # type: ignore[union-attr]
    assert options == {"int8": {"weight_dtype": "int8"}, "aft": {"causal": True}, "step": {}}


@pytest.mark.parametrize(
    ("name", "checkpoint"), [("int8", "wide"), ("aft", "aft"), ("step", "model"), ("full/model/full", "model")]
)
def test_they_compare_with_their_checkpoints(
    name: str, checkpoint: str, old: Path, localattn: Callable[..., Finished]
) -> None:
    shown = localattn("parity", old / f"{name}.onnx", "--against", old / f"{checkpoint}.pt", "--seeds", 1, "-q")
    assert shown.code == 0, shown.err


def test_they_are_described_and_verified(old: Path, localattn: Callable[..., Finished]) -> None:
    assert "LocalTransformer" in localattn("inspect", old / "int8.onnx").out
    assert "AFTLocal" in localattn("inspect", old / "aft.onnx").out
    assert localattn("bundle", "verify", old / "bundle.tar").code == 0


def test_they_are_converted(old: Path, localattn: Callable[..., Finished]) -> None:
    for name in ("int8", "step"):
        ended = localattn("convert", old / f"{name}.onnx", "--standard-ops", "-o", old / f"{name}-plain.onnx", "-q")
        assert ended.code == 0, ended.err
    sidecar = read_sidecar(old / "int8-plain.onnx")
    assert sidecar is not None and sidecar.options == {"weight_dtype": "int8"}
