"""Golden outputs: a file that is not the user's own model fails, whatever else agrees; bad golden files are refused."""

from __future__ import annotations

import importlib.util
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_attention import LocalTransformer
from local_attention.transformer import LocalMHA
from numpy.typing import NDArray
from torch import Tensor, nn

import localattn as package
from localattn import CheckFailed, UsageError, export, export_module, parity, record
from localattn.exporter.user_module.factory import module_from_factory

from ..conftest import Finished
from ..support.own_module import tagger

Command = Callable[..., Finished]
# Sequences of 40 are five times as long as the longest window sees.
LENGTH = 40
TRUE = {"num_tokens": 23, "max_seq_len": LENGTH, "dim": 16, "depth": 1, "dim_head": 8, "heads": 2, "causal": True}
TRUE |= {"local_attn_window_size": 4, "use_xpos": False, "num_residual_streams": 1}
DEFAULTS = {"look_backward": 1, "shared_qk": False, "exact_windowsize": True}
CHUNK = {"full": None, "step": 1}
WRONG = {
    "window": {"local_attn_window_size": 5},
    "look_backward": {"look_backward": 2},
    "causal": {"causal": False},
    "xpos": {"use_xpos": True},
    "exact window": {"exact_windowsize": False},
    "shared_qk": {"shared_qk": True},
}


def randomised(module: nn.Module, scale: float = 0.3) -> nn.Module:
    for parameter in module.parameters():
        if parameter.is_floating_point():  # labml keeps a mask among its parameters
            parameter.data += scale * torch.randn_like(parameter)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a configuration, golden outputs of its live model, and its file and step files."""
    folder = tmp_path_factory.mktemp("golden")
    random.seed(0)
    torch.manual_seed(0)
    module = randomised(LocalTransformer(**TRUE))
    torch.save(module.state_dict(), folder / "model.pt")
    configure(folder / "right.json", {})
    samples = [{"tokens": torch.randint(0, 23, (1, LENGTH))} for _ in range(2)]
    record(module, samples, folder / "golden.npz")
    record(module, samples[0], folder / "one.npz")
    right = {"config": folder / "right.json"}
    export(folder / "model.pt", folder / "model.onnx", **right, golden=folder / "golden.npz")
    export(folder / "model.pt", folder / "unproven.onnx", **right)
    export(folder / "model.pt", folder / "step.onnx", **right, mode="step", chunk=8, golden=folder / "golden.npz")
    return folder


def configure(path: Path, change: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"class": "local_attention.LocalTransformer", "kwargs": {**TRUE, **change}}))
    return path


@pytest.mark.parametrize(
    ("argument", "mode"), [*((name, "full") for name in WRONG), ("window", "step"), ("xpos", "step")]
)
def test_a_wrong_argument_fails(made: Path, tmp_path: Path, argument: str, mode: Any) -> None:
    config = configure(tmp_path / "wrong.json", WRONG[argument])
    with pytest.raises(CheckFailed, match="does not compute what your model computed") as failed:
        export(
            made / "model.pt",
            tmp_path / "m.onnx",
            config=config,
            golden=made / "golden.npz",
            mode=mode,
            chunk=CHUNK[mode],
        )
    assert failed.value.exit_code == 1
    ((name, wrong),) = WRONG[argument].items()
    right = {**DEFAULTS, **TRUE}[name]
    assert failed.value.fix.startswith("Tried: ") and f"{name} {right} (not {wrong})" in failed.value.fix
    assert not (tmp_path / "m.onnx").exists()


def test_the_right_ones_pass_and_stand_first(made: Path) -> None:
    for name in ("model.onnx", "step.onnx", "step.prefill.onnx"):
        sidecar = json.loads((made / f"{name}.json").read_text())
        assert sidecar["checks"][0]["name"] == "golden outputs" and sidecar["checks"][0]["status"] == "passed"
        assert "2 sample(s)" in sidecar["checks"][0]["detail"] and sidecar["unproven"] == []
        report = parity(made / name, made / "model.pt", config=made / "right.json")
        assert report.passed and report.warnings == []  # its export has proven it


@pytest.mark.parametrize("name", ["unproven.onnx", "step.onnx"])
def test_parity_with_golden_outputs_alone(made: Path, name: str) -> None:
    report = parity(made / name, golden=made / "golden.npz")
    assert report.passed and report.warnings == [] and [check.name for check in report.checks] == ["golden outputs"]
    assert {source for source, _ in report.comparisons} >= {"golden.npz, sample 0", "golden.npz, sample 1"}


def test_parity_compares_golden_outputs_first(made: Path) -> None:
    report = parity(made / "unproven.onnx", made / "model.pt", config=made / "right.json", golden=made / "golden.npz")
    assert [check.name for check in report.checks] == ["golden outputs", "parity"] and report.passed
    assert report.comparisons[0][0].startswith("golden.npz") and not report.comparisons[-1][0].startswith("golden")


def test_a_wrong_file_fails_parity(made: Path, tmp_path: Path, localattn: Command) -> None:
    """Every other check passes: file and reference have the same wrong window."""
    config = configure(tmp_path / "wrong.json", WRONG["window"])
    wrong = export(made / "model.pt", tmp_path / "wrong.onnx", config=config)
    assert {check.status for check in wrong.checks} == {"passed"} and len(wrong.checks) >= 5
    assert parity(wrong.path, made / "model.pt", config=config).passed
    report = parity(wrong.path, golden=made / "golden.npz")
    assert not report.passed and report.checks[0].status == "failed"
    assert "local_attn_window_size" in report.warnings[0] and "Likely wrong" in str(report)
    ended = localattn("parity", wrong.path, "--golden", made / "golden.npz")
    assert ended.code == 1 and "FAILED" in ended.out and "Likely wrong" in ended.err and "With --against" in ended.err
    ended = localattn("export", made / "model.pt", "--config", config, "--golden", made / "one.npz", "-o", "m.onnx")
    assert ended.code == 1 and "Likely wrong" in ended.err


def test_short_sequences_prove_nothing_of_the_window(made: Path, tmp_path: Path) -> None:
    module = LocalTransformer(**TRUE)
    module.load_state_dict(torch.load(made / "model.pt"))
    record(module, {"tokens": torch.randint(0, 23, (1, 8))}, tmp_path / "short.npz")
    options = {"config": made / "right.json", "golden": tmp_path / "short.npz"}
    report = export(made / "model.pt", tmp_path / "m.onnx", seq_len=8, **options)
    assert report.checks[0].status == "not proven" and "8 keys" in report.checks[0].detail
    assert "not proven against your own model" in report.warnings[0]


def test_without_golden_outputs_the_report_ends_with_a_warning(made: Path, tmp_path: Path, localattn: Command) -> None:
    report = export(made / "model.pt", tmp_path / "m.onnx", config=made / "right.json")
    for name in ("local_attn_window_size", "causal", "look_backward", "look_forward", "use_xpos", "exact_windowsize"):
        assert name in report.sidecar.unproven
    assert "dim" not in report.sidecar.unproven and "qk_scale" not in report.sidecar.unproven
    assert str(report).splitlines()[-1].startswith("Warning: not proven against your own model")
    assert f"localattn parity {tmp_path / 'm.onnx'} --golden" in report.warnings[0]
    ended = localattn("export", made / "model.pt", "--config", made / "right.json", "-o", tmp_path / "n.onnx")
    assert ended.code == 0 and ended.err.splitlines()[-1].startswith("Warning: not proven against your own model")
    arguments = (report.path, "--against", made / "model.pt", "--config", made / "right.json")
    assert "Warning: not proven" in localattn("parity", *arguments).err
    assert "Warning: not proven" in localattn("inspect", report.path).err
    for suffix in ("json", "md", "html"):
        page = tmp_path / f"parity.{suffix}"
        assert localattn("parity", *arguments, "-o", page).code == 0
        assert "not proven against your own model" in page.read_text()
        page = tmp_path / f"inspect.{suffix}"
        assert localattn("inspect", report.path, "-o", page).code == 0
        assert ("not proven against your own model" in page.read_text()) or suffix == "json"
    assert json.loads((tmp_path / "inspect.json").read_text())["sidecar"]["unproven"] == report.sidecar.unproven
    proven = parity(report.path, made / "model.onnx")  # equal to a file that golden outputs have proven
    assert proven.passed and proven.warnings == []


def test_a_report_page_shows_golden_outputs(made: Path, tmp_path: Path, localattn: Command) -> None:
    page = tmp_path / "p.html"
    assert localattn("parity", made / "unproven.onnx", "--golden", made / "one.npz", "-o", page).code == 0
    text = page.read_text().replace("0 not proven", "")  # of the counts
    for part in ("Checks made now", "golden outputs", "your own model"):
        assert part in text, part
    assert "not proven" not in text


Arrays = dict[str, NDArray[Any]]


def spoilt(kind: str) -> Arrays:
    tokens = np.zeros((1, LENGTH), np.int64)
    logits = np.zeros((1, LENGTH, 23), np.float32)
    other = {
        "sizes": {"tokens": tokens[:, :10], "logits": logits[:, :10]},
        "batch": {"tokens": tokens.repeat(2, 0), "logits": logits.repeat(2, 0)},
        "missing output": {"tokens": tokens},
        "missing input": {"logits": logits},
        "unknown": {"tokens": tokens, "logits": logits, "hidden": logits},
        "dtype": {"tokens": tokens.astype(np.float32), "logits": logits},
        "whole numbers": {"tokens": tokens, "logits": logits.astype(np.int32)},
        "NaN": {"tokens": tokens, "logits": np.full_like(logits, np.nan)},
        "complex": {"tokens": tokens, "logits": logits.astype(np.complex64)},
        "vocabulary": {"tokens": tokens + 23, "logits": logits},
        "mixed": {"tokens": tokens, "0/tokens": tokens, "logits": logits},
        "nothing": {},
    }
    return other[kind]


REASONS = {
    "sizes": r"\[1, 10\]",
    "batch": r"\[2, 40\]",
    "missing output": "lacks 'logits'",
    "missing input": "lacks 'tokens'",
    "unknown": "does not know 'hidden'",
    "dtype": "float32",
    "whole numbers": "int32",
    "NaN": "contains NaN",
    "complex": "complex64",
    "vocabulary": "vocabulary",
    "mixed": "belong together",
    "nothing": "no arrays",
}


@pytest.mark.parametrize("kind", REASONS)
def test_golden_files_that_do_not_fit_are_one_error(made: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "g.npz"
    np.savez(path, **spoilt(kind))
    with pytest.raises(UsageError, match=REASONS[kind]):
        parity(made / "unproven.onnx", golden=path)
    if kind != "whole numbers":  # that only the written file shows
        with pytest.raises(UsageError, match=REASONS[kind]):
            export(made / "model.pt", tmp_path / "m.onnx", config=made / "right.json", golden=path)
    assert not (tmp_path / "m.onnx").exists()


class Trap:
    """An object whose unpickling would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(made: Path, tmp_path: Path) -> None:
    trace, path = tmp_path / "trace", tmp_path / "g.npz"
    stream = io.BytesIO()
    np.savez(stream, tokens=np.array([Trap(trace)], dtype=object))
    path.write_bytes(stream.getvalue())
    for content, reason in ((path.read_bytes(), "not numbers"), (b"tokens", "not a readable")):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=reason):
            parity(made / "unproven.onnx", golden=path)
    assert not trace.exists()


def test_the_golden_file_is_no_output(made: Path, tmp_path: Path, localattn: Command) -> None:
    golden = tmp_path / "g.npz"
    golden.write_bytes((made / "one.npz").read_bytes())
    arguments = ("--golden", golden, "--save-outputs", golden, "--force")
    assert localattn("parity", made / "unproven.onnx", *arguments).code == 2
    assert golden.read_bytes() == (made / "one.npz").read_bytes()
    assert localattn("parity", made / "unproven.onnx").code == 2  # nothing to compare with


def test_sizes_may_be_dynamic(made: Path, tmp_path: Path) -> None:
    module = LocalTransformer(**TRUE)
    module.load_state_dict(torch.load(made / "model.pt"))
    samples = [{"tokens": torch.randint(0, 23, shape)} for shape in ((1, 13), (3, 30))]
    record(module, samples, tmp_path / "g.npz")
    options: dict[str, Any] = {"config": made / "right.json", "golden": tmp_path / "g.npz", "dynamic": ("batch", "seq")}
    assert export(made / "model.pt", tmp_path / "m.onnx", **options).checks[0].status == "passed"
    with pytest.raises(UsageError, match="30 on its axis 'seq'"):
        export(made / "model.pt", tmp_path / "n.onnx", seq_len=20, **options)


class Wrapped(nn.Module):
    """A module of the user's own: keyword inputs, several outputs, dropout."""

    def __init__(self, result: type) -> None:
        super().__init__()
        self.attention = LocalMHA(dim=16, window_size=4, dim_head=8, heads=2, causal=True, dropout=0.5)
        self.result = result

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        y = self.attention(x, mask=mask)
        return {"y": y, "mean": y.mean(-1)} if self.result is dict else (y, [y.mean(-1)])


@pytest.mark.parametrize(("result", "names"), [(tuple, ["out_0", "out_1_0"]), (dict, ["y", "mean"])])
def test_names_are_those_of_the_export(tmp_path: Path, result: type, names: list[str]) -> None:
    module = randomised(Wrapped(result))
    inputs = {"x": torch.randn(2, 24, 16), "mask": torch.arange(24).expand(2, -1) < torch.tensor([[24], [17]])}
    recorded = record(module, inputs, tmp_path / "g.npz")
    assert list(recorded.samples[0]) == ["x", "mask", *names]
    report = export_module(module, inputs, tmp_path / "m.onnx", golden=tmp_path / "g.npz")
    assert report.checks[0].name == "golden outputs" and report.passed
    assert report.warnings == [] and report.sidecar.unproven == []  # its reference is the live module
    assert parity(report.path, golden=tmp_path / "g.npz").passed
    with torch.no_grad():
        module.attention.to_out.weight[0] += 1
    with pytest.raises(CheckFailed, match="your model computed"):
        export_module(module, inputs, tmp_path / "n.onnx", golden=tmp_path / "g.npz")


def test_recording_leaves_the_module_as_it_was(tmp_path: Path) -> None:
    module = randomised(Wrapped(dict)).train()
    module.attention.eval()
    modes = [part.training for part in module.modules()]
    inputs = {"x": torch.randn(1, 9, 16, requires_grad=True), "mask": torch.ones(1, 9, dtype=torch.bool)}
    state = torch.get_rng_state()
    first = record(module, inputs, tmp_path / "g.npz").samples[0]
    assert torch.equal(state, torch.get_rng_state()) and torch.is_grad_enabled()
    assert [part.training for part in module.modules()] == modes and all(x.grad is None for x in module.parameters())
    with torch.no_grad():
        expected = module.eval()(**inputs)["y"].numpy()
    np.testing.assert_array_equal(first["y"], expected)  # without dropout
    with pytest.raises(UsageError, match="exists"):  # before the module runs
        record(module, {"z": inputs["x"]}, tmp_path / "g.npz")
    with pytest.raises(UsageError, match="does not take the inputs"):
        record(module, {"z": inputs["x"]}, tmp_path / "h.npz")
    with pytest.raises(UsageError, match="Two arrays would be named 'x'"):
        record(module, inputs, tmp_path / "h.npz", names={"y": "x"})
    with pytest.raises(UsageError, match="contains NaN"):
        record(module, {**inputs, "x": torch.full((1, 9, 16), torch.nan)}, tmp_path / "h.npz")
    assert not (tmp_path / "h.npz").exists()


def test_half_precision_is_recorded_in_fp32(tmp_path: Path) -> None:
    module = randomised(LocalTransformer(**TRUE)).bfloat16()
    report = record(module, {"x": torch.randint(0, 23, (1, LENGTH))}, tmp_path / "g.npz")
    assert next(module.parameters()).dtype is torch.bfloat16
    assert "half precision" in report.notes[0] and report.samples[0]["logits"].dtype == np.float32
    torch.save(module.state_dict(), tmp_path / "model.pt")
    configure(tmp_path / "model.json", {})
    assert export(tmp_path / "model.pt", golden=tmp_path / "g.npz").checks[0].status == "passed"


def test_masks_and_names_of_a_checkpoint(tmp_path: Path) -> None:
    kwargs = {"dim": 16, "window_size": 4, "dim_head": 8, "heads": 2, "causal": True}
    module = randomised(LocalMHA(**kwargs))
    torch.save(module.state_dict(), tmp_path / "model.pt")
    document = {"class": "local_attention.LocalMHA", "kwargs": kwargs}
    (tmp_path / "model.json").write_text(json.dumps(document))
    inputs = {"x": torch.randn(2, 20, 16), "mask": torch.arange(20).expand(2, -1) < torch.tensor([[20], [11]])}
    record(module, inputs, tmp_path / "g.npz")
    options: dict[str, Any] = {"batch": 2, "seq_len": 20, "golden": tmp_path / "g.npz"}
    with pytest.raises(UsageError, match="does not know 'mask'"):
        export(tmp_path / "model.pt", **options)
    # Rows from 16 on of the second sequence see no key: upstream's mean there is an accident, and masked by the user.
    assert export(tmp_path / "model.pt", mask=True, **options).checks[0].status == "passed"
    assert parity(tmp_path / "model.onnx", golden=tmp_path / "g.npz").passed
    spoilt = dict(np.load(tmp_path / "g.npz"))
    spoilt["out"][1, 10] += 1  # the last row that the mask keeps
    np.savez(tmp_path / "spoilt.npz", **spoilt)
    assert not parity(tmp_path / "model.onnx", golden=tmp_path / "spoilt.npz").passed
    renamed = record(module, inputs, tmp_path / "h.npz", names={"out": "hidden"})
    assert list(renamed.samples[0]) == ["x", "mask", "hidden"]


def labml_class() -> Any:
    """labml's AFTLocal from its one file, under the name that it has there."""
    package = importlib.util.find_spec("labml_nn")
    if package is None or package.origin is None:
        pytest.skip("labml-nn is not installed")
    path = Path(package.origin).parent / "transformers" / "aft" / "__init__.py"
    spec = importlib.util.spec_from_file_location("labml_nn.transformers.aft", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AFTLocal


def test_a_causal_aft_is_told_from_one_that_is_not(tmp_path: Path) -> None:
    module = randomised(labml_class()(8, 12, 3))
    torch.save(module.state_dict(), tmp_path / "model.pt")
    x = {name: torch.randn(12, 1, 8) for name in ("query", "key", "value")}
    record(module, {**x, "mask": torch.ones(12, 12).tril().bool()[:, :, None]}, tmp_path / "causal.npz")
    record(module, {**x, "mask": torch.ones(12, 12, 1, dtype=torch.bool)}, tmp_path / "open.npz")
    for causal in (True, False):
        for name in ("causal", "open"):
            options: dict[str, Any] = {"causal": causal, "golden": tmp_path / f"{name}.npz", "overwrite": True}
            if causal == (name == "causal"):
                assert export(tmp_path / "model.pt", **options).checks[0].status == "passed"
            else:
                with pytest.raises(CheckFailed, match="causal"):
                    export(tmp_path / "model.pt", **options)


def test_the_root_has_them_all() -> None:
    assert {"record", "parity", "export", "export_module", "build", "load", "open_step"} <= set(package.__all__)


def test_weights_that_were_rounded_to_bf16_are_not_the_model_that_was_recorded(
    localattn: Command, made: Path, tmp_path: Path
) -> None:
    """As DeepSpeed's ZeRO-2 saves them, in an entry `module`."""
    state = torch.load(made / "model.pt", weights_only=True)
    torch.save({"module": {name: x.bfloat16() for name, x in state.items()}}, tmp_path / "model.pt")
    options = ("--config", made / "right.json", "--golden", made / "golden.npz", "-o", tmp_path / "m.onnx")
    finished = localattn("export", tmp_path / "model.pt", *options)
    assert finished.code == 1 and "golden outputs" in finished.err, finished.err
    assert "weights and golden outputs come from the same model" in finished.err and not (tmp_path / "m.onnx").exists()


def test_another_window_of_an_own_module_is_found(tmp_path: Path) -> None:
    folder = tagger()
    module, _ = module_from_factory(f"{folder}/tagger.py:build", {"window": 6}, folder / "epoch.ckpt")
    record(module, {"frames": torch.randn(1, 24, 6)}, tmp_path / "g.npz")
    report = parity(
        folder / "model.onnx", folder / "epoch.ckpt", golden=tmp_path / "g.npz", factory=f"{folder}/tagger.py:build"
    )
    assert not report.passed and "window_size 6 (not 4)" in report.warnings[0]
