"""`localattn run`, through Typer, on real files."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx.parser
import pytest
import typer
from typer.testing import CliRunner

from localattn.commands.run import run
from localattn.core.documents.sidecar import Sidecar, sidecar_path
from localattn.core.errors import MissingDependency, UsageError

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
g (int64[1, 3] tokens, float[1, 3, 2] x) => (float[1, 3, 2] y, float[1, 3, 2] bad)
<float[4, 2] table = {0, 1, 2, 3, 4, 5, 6, 7}>
{
    embedded = Gather <axis = 0> (table, tokens)
    y = Add(embedded, x)
    zero = Sub(x, x)
    bad = Div(zero, zero)
}
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(MODEL), path)
    sidecar = {
        "class": "local_attention.LocalTransformer", "kwargs": {"num_tokens": 4}, "inputs": [],
        "outputs": [], "seq_len": 3, "batch": 1, "dtype": "fp32", "opset": 20, "function_body": True,
        "checkpoint_sha256": "", "checkpoint_name": "", "model_sha256": "", "created": "",
    }  # fmt: skip
    sidecar_path(path).write_text(Sidecar.model_validate(sidecar).to_json())
    return path


def invoke(*arguments):
    app = typer.Typer()
    app.command()(run)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def saved(path, tokens=((3, 0, 1),), x=0.5):
    np.savez(path, tokens=np.array(tokens), x=np.full((1, 3, 2), x, np.float32))
    return path


def test_given_inputs_run_and_outputs_are_saved(model, tmp_path):
    out = tmp_path / "out.npz"
    result = invoke(
        model, "--load-inputs", saved(tmp_path / "in.npz"), "--save-outputs", out, "--provider", "cpu",
        "--threads", 1, "--iterations", 2, "--format", "json",
    )  # fmt: skip
    np.testing.assert_array_equal(np.load(out)["y"], [[[6.5, 7.5], [0.5, 1.5], [2.5, 3.5]]])
    report = json.loads(result.stdout)
    assert report["provider"] == "cpu" and report["backend"] == "onnxruntime"
    assert report["milliseconds"]["iterations"] == 2 and report["milliseconds"]["median"] > 0
    y, bad = report["outputs"]
    assert y == {
        "name": "y", "dtype": "float32", "shape": [1, 3, 2], "finite": True, "min": 0.5, "max": 7.5
    }  # fmt: skip
    assert bad["finite"] is False and bad["min"] is None
    assert "output 'bad' holds NaN" in result.stderr


def test_random_inputs_are_said_and_repeat(model):
    result = invoke(model, "--seed", 5)
    for piece in ("ran on cpu", "random, seed 5", "tokens  int64 [1, 3]", "NOT FINITE"):
        assert piece in result.stdout
    ranges = [json.loads(invoke(model, "--seed", s, "--format", "json").stdout)["inputs"] for s in (5, 5, 6)]
    assert ranges[0] == ranges[1] != ranges[2]


def test_random_tokens_need_the_vocabulary(model):
    sidecar_path(model).unlink()
    with pytest.raises(UsageError, match="sidecar"):
        invoke(model)


def test_nan_in_the_inputs_is_a_warning(model, tmp_path):
    result = invoke(model, "--load-inputs", saved(tmp_path / "in.npz", x=np.nan), "--format", "json")
    assert "Warning: input 'x' holds NaN" in result.stderr
    assert json.loads(result.stdout)["inputs"][1]["finite"] is False


@pytest.mark.parametrize("token", [-1, 4])
def test_tokens_outside_the_vocabulary_are_refused(model, tmp_path, token):
    with pytest.raises(UsageError, match="outside the vocabulary"):
        invoke(model, "--load-inputs", saved(tmp_path / "in.npz", tokens=((0, token, 1),)))


def test_errors_carry_their_exit_code(model, tmp_path):
    with pytest.raises(MissingDependency):
        invoke(model, "--provider", "tensorrt")
    with pytest.raises(UsageError):
        invoke(model, "--load-inputs", tmp_path / "none.npz")
    with pytest.raises(UsageError):
        invoke(tmp_path / "none.onnx")
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".npz"] == []
