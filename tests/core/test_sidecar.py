"""The sidecar: round trip, what is kept, and broken files named with their first problem."""

from __future__ import annotations

import json

import pytest

from localattn.core.documents.engine_sidecar import read_engine_sidecar
from localattn.core.documents.sidecar import CheckRecord, Sidecar, WindowRecord, read_sidecar, sidecar_path
from localattn.core.errors import UsageError
from localattn.core.tensors import TensorSpec


def sidecar(**changes) -> Sidecar:
    sidecar = {
        "class_name": "local_attention.LocalTransformer",
        "kwargs": {"num_tokens": 16, "dim": 32, "causal": True, "scale": None},
        "inputs": [TensorSpec("tokens", "int64", (1, 64))],
        "outputs": [TensorSpec("logits", "float32", (1, "N", 16))],
        "seq_len": 64,
        "batch": 1,
        "dtype": "fp32",
        "opset": 20,
        "windows": [
            WindowRecord(
                name="layers.0", op_type="WindowedAttention", window_size=8, look_backward=1,
                look_forward=0, causal=True, exact_windowsize=False,
            )
        ],
        "function_body": True,
        "checkpoint_sha256": "0" * 64,
        "checkpoint_name": "model.pt",
        "model_sha256": "1" * 64,
        "created": "2026-01-01T00:00:00+00:00",
        "checks": [CheckRecord(name="parity", status="passed", figures={"max_abs": 1e-6, "worst": "[0]"})],
    }  # fmt: skip
    return Sidecar(**{**sidecar, **changes})


def written(folder, text: str):
    model = folder / "model.onnx"
    sidecar_path(model).write_text(text, encoding="utf-8")
    return model


def changed(**values) -> str:
    return json.dumps({**json.loads(sidecar().to_json()), **values})


def test_the_file_round_trips_under_the_documented_names(tmp_path):
    model = written(tmp_path, sidecar().to_json())
    assert sidecar_path(model).name == "model.onnx.json"
    assert read_sidecar(model) == sidecar()
    text = json.loads(sidecar_path(model).read_text(encoding="utf-8"))
    assert text["format"] == "localattn-sidecar" and text["format_version"] == 1
    assert text["class"] == "local_attention.LocalTransformer" and "class_name" not in text
    assert text["outputs"] == [{"name": "logits", "dtype": "float32", "shape": [1, "N", 16]}]
    assert text == sidecar().to_dict()


def test_entries_of_a_newer_release_survive(tmp_path):
    model = written(tmp_path, changed(quantization={"bits": 8}))
    again = json.loads(read_sidecar(model).to_json())
    assert again["quantization"] == {"bits": 8}


def test_figures_that_are_not_finite_stay_valid_json(tmp_path):
    record = CheckRecord(name="parity", status="failed", figures={"max_abs": float("nan")})
    text = sidecar(checks=[record]).to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read_sidecar(written(tmp_path, text)).checks[0].figures == {"max_abs": "NaN"}


def test_no_sidecar_is_none(tmp_path):
    assert read_sidecar(tmp_path / "model.onnx") is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("[]", "object"),
        ("null", "object"),
        ("[" * 100_000, "JSON"),
        ("{}", "class"),
        (changed(format="other"), "format"),
        (changed(format_version=2), "format_version"),
        (changed(batch=0), "batch"),
        (changed(dtype="int8"), "dtype"),
        (changed(inputs=[{"name": "x"}]), "inputs.0.dtype"),
        (changed(checks=[{"name": "x", "status": "fine"}]), "checks.0.status"),
    ],
)
def test_a_broken_sidecar_is_named_with_its_first_problem(tmp_path, text, problem):
    with pytest.raises(UsageError) as caught:
        read_sidecar(written(tmp_path, text))
    assert "model.onnx.json" in caught.value.what
    assert problem in caught.value.why


def test_a_sidecar_that_is_no_text_file(tmp_path):
    model = tmp_path / "model.onnx"
    sidecar_path(model).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError):
        read_sidecar(model)
    sidecar_path(model).unlink()
    sidecar_path(model).mkdir()
    with pytest.raises(UsageError, match="folder"):
        read_sidecar(model)
    for name, read in (("big.onnx", read_sidecar), ("big.engine", read_engine_sidecar)):
        with sidecar_path(tmp_path / name).open("wb") as stream:
            stream.truncate(1 << 30)
        with pytest.raises(UsageError, match="larger"):
            read(tmp_path / name)
