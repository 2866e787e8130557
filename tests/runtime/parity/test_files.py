"""`parity` against another exported file: equal ones pass, planted faults do not, and no torch is needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localattn.core.documents.sidecar import sidecar_path
from localattn.core.storage.publishing import SEAL
from localattn.core.tolerance import TOLERANCES
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest
from localattn.onnx_graph.onnx_file import OnnxFile
from localattn.runtime import load
from localattn.runtime.parity.files import check_built_engine

from ...conftest import TINY, Finished, save_upstream
from ...support.models.parity_faults import (
    alter,
    forgetful,
    longest_only,
    mask_ignored,
    not_a_number,
    one_weight,
    renamed_output,
    second_output,
    wider_window,
)
from ...support.models.parity_folder import open_and_steps

Command = Callable[..., Finished]
LENGTH = 37  # no multiple of the window
MHA = {"dim": 16, "window_size": 4, "heads": 2, "dim_head": 8, "causal": False}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of one small transformer: static in two precisions, open, and step by step."""
    folder = tmp_path_factory.mktemp("made")
    checkpoint, shapes = open_and_steps(folder), ShapeRequest(LENGTH)
    export(ExportRequest(checkpoint, folder / "model.onnx", shapes=shapes, seeds=(0,)))
    export(ExportRequest(checkpoint, folder / "half.onnx", shapes=shapes, seeds=(0,), dtype="fp16"))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """The same, to be altered."""
    return Path(shutil.copytree(made, tmp_path / "files"))


def document(finished: Finished, code: int = 0) -> dict[str, Any]:
    assert finished.code == code, finished.err + finished.out
    found: dict[str, Any] = json.loads(finished.out)
    return found


def test_a_copy_is_equal_and_the_judges_own_check_is_told(folder: Path, localattn: Command) -> None:
    shutil.copy(folder / "model.onnx", folder / "copy.onnx")
    finished = localattn("parity", folder / "copy.onnx", "--against", folder / "model.onnx")
    assert finished.code == 0, finished.err
    detail = next(
        x["detail"]
        for x in json.loads(sidecar_path(folder / "model.onnx").read_text())["checks"]
        if x["name"] == "parity"
    )
    assert "against the float64 reference" in detail
    flat = " ".join(finished.out.split())
    assert "model.onnx (cpu, onnxruntime) are equal within 0.0001 + 0.0001·|x|, relative rms at most 0.01." in flat
    assert f"model.onnx was checked when it was exported: {detail}." in flat
    assert "Note" not in finished.err


def test_the_figures_are_those_of_the_two_files(folder: Path, localattn: Command) -> None:
    """Half precision beside single: the coarser's tolerance, and numbers that numpy finds too."""
    half, full = folder / "half.onnx", folder / "model.onnx"
    saved = ("--save-inputs", folder / "in.npz", "--save-outputs", folder / "out.npz")
    shown = document(localattn("parity", half, "--against", full, *saved, "--format", "json"))
    assert shown["dtype"] == "fp16" and shown["tolerance"]["atol"] == TOLERANCES["fp16"].atol
    assert shown["reference"]["dtype"] == "fp32" and shown["against"] == str(full)
    assert [row["inputs"] for row in shown["comparisons"]] == ["seed 0", "seed 1", "seed 2"]
    inputs, outputs = dict(np.load(folder / "in.npz")), dict(np.load(folder / "out.npz"))
    assert inputs["tokens"].max() < TINY["num_tokens"]
    plain, e = (load(x, "cpu").run(inputs)["logits"].astype(np.float64) for x in (half, full))
    a = outputs["logits"].astype(np.float64)  # rounded as a GPU rounds, which this CPU does not
    assert np.array_equal(e, outputs["logits.reference"])
    assert not np.array_equal(a, plain) and np.allclose(a, plain, atol=5e-3)
    assert np.abs(a - e).max() > 0 and np.abs(a - e).max() in [row["max_abs"] for row in shown["comparisons"]]
    assert shown["windows"][0]["length"] == LENGTH and shown["windows"][0]["layers"]
    assert shown["errors"]["logits"]["positions"] == list(range(LENGTH))
    again = document(
        localattn("parity", half, "--against", full, "--load-inputs", folder / "in.npz", "--format", "json")
    )
    (row,) = again["comparisons"]
    assert row["max_abs"] == np.abs(a - e).max()
    strict = localattn("parity", half, "--against", full, "--atol", 1e-6, "--rtol", 0)
    assert strict.code == 1 and "NOT equal" in strict.out
    other_way = document(localattn("parity", full, "--against", half, "--seeds", 1, "--format", "json"))
    assert other_way["dtype"] == "fp16"


def test_a_build_compares_what_it_built_with_its_file(folder: Path) -> None:
    """The check takes whatever runs: here a second file stands where an engine would, which needs a GPU."""
    model = folder / "model.onnx"
    same = check_built_engine(Path(shutil.copy(model, folder / "built.onnx")), model)
    assert (same.name, same.status) == ("parity", "passed") and "max error 0.0e+00 against model.onnx" in same.detail
    other = check_built_engine(alter(Path(shutil.copy(model, folder / "wrong.onnx")), wider_window), model)
    assert other.status == "failed" and float(other.figures["max_abs"]) > 1e-3
    absent = check_built_engine(model, folder / "nowhere.onnx")
    assert absent.status == "skipped" and "could not be compared" in absent.detail


@pytest.mark.parametrize("option", ["weight_dtype", "attention_dtype"])
@pytest.mark.parametrize("value", [None, 8, [["int8"]], {"int8": 1}, "int7"], ids=str)
def test_a_precision_that_is_none_is_refused(folder: Path, option: str, value: Any, localattn: Command) -> None:
    model = folder / "model.onnx"
    sidecar = {name: x for name, x in json.loads(sidecar_path(model).read_text()).items() if name != SEAL}
    sidecar["options"][option] = value
    sidecar_path(model).write_text(json.dumps(sidecar))
    finished = localattn("parity", model, "--against", folder / "half.onnx")
    assert finished.code == 2 and f"options.{option} must be one of fp32, fp16, bf16" in " ".join(finished.err.split())
    assert localattn("run", model).code == 0


@pytest.mark.parametrize("fault", [one_weight, wider_window, not_a_number])
def test_planted_faults_are_found(folder: Path, fault: Any, localattn: Command) -> None:
    bad = alter(Path(shutil.copy(folder / "model.onnx", folder / "bad.onnx")), fault)
    for model, judge in ((bad, "model.onnx"), (folder / "model.onnx", "bad.onnx")):
        finished = localattn("parity", model, "--against", folder / judge, "--seeds", 1)
        assert finished.code == 1 and "NOT equal" in " ".join(finished.out.split()), finished


def test_a_mask_that_is_ignored_is_found(tmp_path: Path, localattn: Command) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", MHA)
    masked = tmp_path / "masked.onnx"
    for path, mask in ((masked, True), (tmp_path / "plain.onnx", False)):
        export(ExportRequest(checkpoint, path, shapes=ShapeRequest(12, batch=2, mask=mask), seeds=(0,)))
    deaf = alter(Path(shutil.copy(masked, tmp_path / "deaf.onnx")), mask_ignored)
    assert localattn("parity", masked, "--against", masked, "--seeds", 1).code == 0
    assert localattn("parity", deaf, "--against", masked, "--seeds", 1).code == 1
    other = localattn("parity", masked, "--against", tmp_path / "plain.onnx")
    assert other.code == 2 and "Only masked.onnx has the input mask bool [2, 12]." in " ".join(other.err.split())


def test_real_inputs_are_drawn_once_in_the_coarser_type(tmp_path: Path, localattn: Command) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalMHA", MHA)
    for dtype in ("fp32", "fp16", "bf16"):
        export(ExportRequest(checkpoint, tmp_path / f"{dtype}.onnx", dtype=dtype, shapes=ShapeRequest(12), seeds=(0,)))
    for first, second in (("fp16", "fp32"), ("fp32", "fp16")):
        saved = tmp_path / f"{first}.npz"
        files = (tmp_path / f"{first}.onnx", "--against", tmp_path / f"{second}.onnx")
        assert localattn("parity", *files, "--save-inputs", saved).code == 0
        assert np.load(saved)["x"].dtype == np.float16
        assert localattn("parity", *files, "--load-inputs", saved).code == 0
    shown = document(
        localattn("parity", tmp_path / "bf16.onnx", "--against", tmp_path / "fp16.onnx", "--format", "json")
    )
    assert shown["dtype"] == "bf16" and any("emulated" in note for note in shown["notes"])


def test_other_sizes_are_refused_by_name(folder: Path, localattn: Command) -> None:
    checkpoint = folder / "model.pt"
    export(ExportRequest(checkpoint, folder / "short.onnx", shapes=ShapeRequest(20), seeds=(0,)))
    finished = localattn("parity", folder / "short.onnx", "--against", folder / "model.onnx")
    assert finished.code == 2 and finished.out == ""
    why = f"Input 'tokens' is int64 [1, 20] in short.onnx and int64 [1, {LENGTH}] in model.onnx."
    assert why in " ".join(finished.err.split())


def test_tokens_have_to_be_in_the_vocabulary(folder: Path, localattn: Command) -> None:
    np.savez(folder / "in.npz", tokens=np.full((1, LENGTH), TINY["num_tokens"], np.int64))
    pair = (folder / "half.onnx", "--against", folder / "model.onnx")
    finished = localattn("parity", *pair, "--load-inputs", folder / "in.npz")
    assert finished.code == 2 and "outside the vocabulary" in finished.err
    np.savez(folder / "in.npz", tokens=np.zeros((1, LENGTH - 1), np.int64))
    assert localattn("parity", *pair, "--load-inputs", folder / "in.npz").code == 2


def test_options_that_do_not_apply(folder: Path, localattn: Command) -> None:
    pair = (folder / "half.onnx", "--against", folder / "model.onnx")
    for option in (("--config", folder / "model.json"), ("--causal",), ("--seq-len", 8)):
        assert localattn("parity", *pair, *option).code == 2
    missing = localattn("parity", folder / "half.onnx", "--against", folder / "none.onnx")
    assert missing.code == 2 and "There is no such file" in missing.err
    (folder / "other.txt").write_text("this is not a checkpoint")
    other = localattn("parity", folder / "half.onnx", "--against", folder / "other.txt")
    assert other.code == 2 and "is not a checkpoint" in other.err and ".safetensors file" in other.err


def test_outputs_are_matched_by_name(folder: Path, localattn: Command) -> None:
    lacking = alter(Path(shutil.copy(folder / "model.onnx", folder / "lacking.onnx")), renamed_output)
    finished = localattn("parity", lacking, "--against", folder / "model.onnx")
    assert finished.code == 1 and "lacking.onnx has no output 'logits'" in finished.err
    more = alter(Path(shutil.copy(folder / "model.onnx", folder / "more.onnx")), second_output)
    finished = localattn("parity", more, "--against", folder / "model.onnx", "--seeds", 1)
    assert finished.code == 0 and "output 'negated' is in more.onnx only" in finished.err
    assert localattn("parity", folder / "model.onnx", "--against", more).code == 1
    finished = localattn("parity", more, "--against", folder / "model.pt", "--seeds", 1)
    assert finished.code == 0 and "output 'negated' is in more.onnx only" in finished.err


def test_a_judge_that_nothing_proves_is_called_so(folder: Path, localattn: Command) -> None:
    judge, model = folder / "model.onnx", folder / "half.onnx"
    sidecar = sidecar_path(judge)
    original = json.loads(sidecar.read_text())
    named = [check for check in original["checks"] if check["name"] != "parity"]
    doubtful = [{**x, "status": "not proven"} if x["name"] == "parity" else x for x in original["checks"]]
    for changed, why in (
        ({"checks": named}, "no record of a comparison"),
        ({"checks": doubtful}, "is recorded as not proven"),
        ({"model_sha256": "0" * 64}, "is not the file that model.onnx.json was written for"),
        ({"model_sha256": ""}, "does not record for which file"),
        (None, "it has no sidecar"),
    ):
        if changed is None:
            sidecar.unlink()
        else:
            kept = {name: value for name, value in {**original, **changed}.items() if name != SEAL}
            sidecar.write_text(json.dumps(kept))
        finished = localattn("parity", model, "--against", judge, "--seeds", 1, "--format", "json")
        shown = document(finished)
        assert shown["reference"]["checked"] is None
        assert any("is not proven" in line and why in line for line in shown["notes"]), shown["notes"]
        assert "is not proven" in finished.err
    assert shown["dtype"] == "fp16", "without a sidecar the weights tell the precision"


def test_files_of_different_checkpoints_are_told(folder: Path, tmp_path: Path, localattn: Command) -> None:
    (tmp_path / "other").mkdir()
    other = save_upstream(tmp_path / "other", "local_attention.LocalTransformer", {**TINY, "num_tokens": 29})
    export(ExportRequest(other, tmp_path / "other.onnx", shapes=ShapeRequest(LENGTH), seeds=(0,)))
    finished = localattn("parity", tmp_path / "other.onnx", "--against", folder / "model.onnx")
    assert finished.code == 1 and "has another shape than its reference" in finished.err


def test_a_judge_without_a_function_body_is_refused(folder: Path, localattn: Command) -> None:
    request = ExportRequest(
        folder / "model.pt", folder / "bare.onnx", shapes=ShapeRequest(LENGTH), seeds=(0,), function_body=False
    )
    export(request)
    finished = localattn("parity", folder / "half.onnx", "--against", folder / "bare.onnx")
    assert finished.code == 2 and "without the attention node's ONNX function" in finished.err


def test_the_judge_runs_on_the_cpu_without_compiled_kernels(
    folder: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def noted(path: Path | OnnxFile, provider: str, **options: Any) -> Any:
        seen.append((Path(path).name, provider, options["plugin"]))
        return load(path, provider, **options)

    monkeypatch.setattr("localattn.runtime.parity.runner.load", noted)
    pair = (folder / "half.onnx", "--against", folder / "model.onnx", "--seeds", 1)
    assert localattn("parity", *pair).code == 0
    assert seen == [("half.onnx", "auto", "auto"), ("model.onnx", "cpu", "none")]


def test_open_sizes_are_swept_and_a_static_file_fixes_them(folder: Path, localattn: Command) -> None:
    other = Path(shutil.copy(folder / "open.onnx", folder / "other.onnx"))
    shutil.copy(sidecar_path(folder / "open.onnx"), sidecar_path(other))
    shown = document(localattn("parity", other, "--against", folder / "open.onnx", "--seeds", 2, "--format", "json"))
    called = {row["inputs"] for row in shown["comparisons"]}
    for length in (1, 3, 4, 5, 63, 64):
        assert f"seed 0, batch=2 seq={length}" in called
    assert {"seed 1, batch=2 seq=64", "seed 0, batch=3 seq=64"} <= called
    assert shown["errors"]["logits"]["positions"] == list(range(64))
    chosen = ("--seq-len", "3,17", "--seeds", 1, "--format", "json")
    shown = document(localattn("parity", other, "--against", folder / "open.onnx", *chosen))
    assert [row["inputs"] for row in shown["comparisons"]] == ["seed 0, batch=2 seq=3", "seed 0, batch=2 seq=17"]
    assert localattn("parity", other, "--against", folder / "open.onnx", "--seq-len", 65).code == 2
    static = document(localattn("parity", other, "--against", folder / "half.onnx", "--seeds", 1, "--format", "json"))
    assert [row["inputs"] for row in static["comparisons"]] == ["seed 0"]
    assert any("has dynamic sizes, and is compared at the sizes of half.onnx only" in note for note in static["notes"])
    for file in (other, folder / "open.onnx"):
        sidecar_path(file).unlink()
    finished = localattn("parity", other, "--against", folder / "open.onnx")
    assert finished.code == 2 and "--seq-len" in finished.err
    np.savez(folder / "in.npz", tokens=np.arange(14).reshape(2, 7))
    assert localattn("parity", other, "--against", folder / "open.onnx", "--load-inputs", folder / "in.npz").code == 0


def test_a_wrong_length_alone_is_found(folder: Path, localattn: Command) -> None:
    """Right at its longest, wrong below: only the sweep sees it."""

    bad = alter(Path(shutil.copy(folder / "open.onnx", folder / "bad.onnx")), longest_only)
    shown = document(
        localattn("parity", bad, "--against", folder / "open.onnx", "--seeds", 1, "--format", "json"), code=1
    )
    passed = {row["inputs"]: row["passed"] for row in shown["comparisons"]}
    assert passed["seed 0, batch=2 seq=64"] and not passed["seed 0, batch=2 seq=63"]


@pytest.mark.parametrize(
    ("model", "judge"),
    [
        ("step.onnx", "copy/step.onnx"),
        ("step.prefill.onnx", "step.onnx"),
        ("step.onnx", "model.onnx"),
        ("model.onnx", "step.onnx"),
        ("step.onnx", "half.onnx"),
        ("step.onnx", "open.onnx"),
    ],
)
def test_step_files_are_fed_call_by_call(folder: Path, made: Path, model: str, judge: str, localattn: Command) -> None:
    shutil.copytree(made, folder / "copy")
    shown = document(localattn("parity", folder / model, "--against", folder / judge, "--seeds", 1, "--format", "json"))
    slots, prefill = 5, "step.prefill.onnx"  # a causal window of 4 with one behind it, exact
    fed = next(note for note in shown["notes"] if "tokens were fed" in note)
    assert int(fed.split()[0]) > 2 * slots and ("8 per call" in fed) == (model == prefill)
    chunked = [row for row in shown["comparisons"] if row["inputs"].endswith(", first 8 per call")]
    assert len(chunked) == (model == "step.onnx")
    assert shown["windows"][0]["length"] == int(fed.split()[0]) == len(shown["errors"]["logits"]["positions"])


def test_a_step_files_faults_are_found(folder: Path, localattn: Command) -> None:
    original = Path(shutil.copytree(folder, folder / "original"))
    alter(folder / "step.onnx", forgetful)
    for judge in ("step.onnx", "model.onnx"):
        finished = localattn("parity", folder / "step.onnx", "--against", original / judge, "--seeds", 1)
        assert finished.code == 1 and "NOT equal" in " ".join(finished.out.split())
    assert "was changed or replaced without the other" in finished.err
    # A prefill file that is wrong while the step file is right: seen where its chunks come first, and only there.
    shutil.copy(original / "step.onnx", folder / "step.onnx")
    alter(folder / "step.prefill.onnx", forgetful)
    sidecar = sidecar_path(folder / "step.prefill.onnx")
    kept = {
        name: value for name, value in json.loads(sidecar.read_text()).items() if name not in (SEAL, "model_sha256")
    }
    sidecar.write_text(json.dumps({**kept, "model_sha256": ""}))
    arguments = ("--seeds", 1, "--format", "json")
    shown = document(localattn("parity", folder / "step.onnx", "--against", original / "step.onnx", *arguments), code=1)
    assert [row["passed"] for row in shown["comparisons"]] == [True, False]


def test_step_files_inputs_and_lengths(folder: Path, localattn: Command) -> None:
    pair = (folder / "step.onnx", "--against", folder / "open.onnx")
    saved = ("--save-inputs", folder / "in.npz", "--save-outputs", folder / "out.npz")
    assert localattn("parity", *pair, "--seeds", 1, *saved, "--seq-len", 19).code == 0
    outputs = dict(np.load(folder / "out.npz"))
    assert outputs["logits"].shape == outputs["logits.reference"].shape == (1, 19, TINY["num_tokens"])
    assert localattn("parity", *pair, "--load-inputs", folder / "in.npz").code == 0
    short = localattn("parity", *pair, "--seq-len", 4)
    assert short.code == 0 and "are too few to test that older ones are dropped" in short.err
    beyond = localattn("parity", *pair, "--seq-len", 65)
    assert beyond.code == 2 and "1 to 64" in beyond.err
    odd = localattn("parity", folder / "step.prefill.onnx", "--against", folder / "step.onnx", "--seq-len", 12)
    assert odd.code == 2 and "8 per call" in odd.err
    whole = localattn("parity", folder / "step.prefill.onnx", "--against", folder / "model.onnx")
    assert whole.code == 2 and f"does not accept {LENGTH} positions" in whole.err
    sidecar = json.loads(sidecar_path(folder / "step.onnx").read_text())
    for wrong in ({"token_input": "words"}, {"sequence_axis": 7}):
        kept = {name: value for name, value in sidecar.items() if name != SEAL}
        sidecar_path(folder / "step.onnx").write_text(json.dumps({**kept, "step": {**sidecar["step"], **wrong}}))
        other = localattn("parity", *pair)
        assert other.code == 2 and "is not the file that its sidecar describes" in other.err
    sidecar_path(folder / "step.onnx").unlink()
    alone = localattn("parity", *pair)
    assert alone.code == 2 and "a step file needs its sidecar" in alone.err


def test_several_models_and_their_page(folder: Path, localattn: Command) -> None:
    bad = alter(Path(shutil.copy(folder / "half.onnx", folder / "bad.onnx")), one_weight)
    arguments = (folder / "half.onnx", folder / "step.onnx", bad, "--against", folder / "model.onnx", "--seeds", 1)
    shown = document(localattn("parity", *arguments, "--format", "json"), code=1)
    assert [file["passed"] for file in shown["files"]] == [True, True, False]
    assert {file["against"] for file in shown["files"]} == {str(folder / "model.onnx")}
    page = folder / "parity.html"
    finished = localattn("parity", *arguments, "-o", page)
    assert finished.code == 1 and finished.out.count("was checked when it was exported") == 1
    text = page.read_text(encoding="utf-8")
    assert "model.onnx, run by onnxruntime on cpu, are equal within" in text and "are NOT equal within" in text
    assert "was checked when it was exported: max error" in text and "the float64 reference of" not in text
    assert "Window" in text and "half.onnx: Errors of logits" in text


def test_a_page_says_when_the_judge_is_not_proven(folder: Path, localattn: Command) -> None:
    sidecar_path(folder / "model.onnx").unlink()
    finished = localattn("parity", folder / "half.onnx", "--against", folder / "model.onnx", "--format", "md")
    assert finished.code == 0
    assert "model.onnx itself is not proven right." in finished.out
    assert "it has no sidecar" in finished.out


WITHOUT_TORCH = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "onnxscript", "onnx_ir", "einops", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from localattn import cli

codes = []
for arguments in (
    ["half.onnx", "--against", "model.onnx", "--seeds", "1", "-o", "page.md"],
    ["step.onnx", "--against", "model.onnx", "--seeds", "1"],
    ["open.onnx", "--against", "model.onnx", "--seeds", "1"],
    ["model.onnx", "--against", "model.pt"],
):
    sys.argv = ["localattn", "parity", *arguments]
    try:
        cli.main()
        codes.append(0)
    except SystemExit as error:
        codes.append(int(error.code or 0))
assert "torch" not in sys.modules
print(codes)
"""


def test_torch_is_not_needed(folder: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "[0, 0, 0, 3]", finished.stdout + finished.stderr
    assert "--against model.onnx" in finished.stderr, "what to do without torch"
