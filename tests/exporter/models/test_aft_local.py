"""AFT-local: labml's numbers where labml is sound, float64's everywhere, and no T×T tensor in the file."""

from __future__ import annotations

import importlib.util
import itertools
import math
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localattn.core.errors import UsageError
from localattn.exporter.models.aft_local.arguments import AFTLocalArgs
from localattn.onnx_graph import inlining
from localattn.runtime.backends.onnxruntime.session import open_bytes

torch = pytest.importorskip("torch")

from localattn.exporter.lowering.functions import attach_functions  # noqa: E402
from localattn.exporter.models.aft_local.family import AFT_LOCAL  # noqa: E402
from localattn.exporter.models.aft_local.module import AFTLocal  # noqa: E402
from localattn.exporter.models.aft_local.reference import aft_local  # noqa: E402
from localattn.exporter.options import ShapeRequest  # noqa: E402


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def labml():
    """labml's class, from its one file: importing the package needs dozens of others."""
    package = importlib.util.find_spec("labml_nn")
    if package is None:
        pytest.skip("labml-nn is not installed")
    path = Path(package.origin).parent / "transformers/aft/__init__.py"
    spec = importlib.util.spec_from_file_location("labml_aft", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AFTLocal


def checkpoint(args: AFTLocalArgs, seed: int = 0, scale: float = 1.0) -> dict:
    """A state dict as labml saves it, with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    dim, side = args.d_model, args.seq_len
    state = {}
    for name in ("query", "key", "value", "output"):
        state[f"{name}.weight"] = torch.randn(dim, dim, generator=generator) / math.sqrt(dim)
        if args.bias or name == "output":
            state[f"{name}.bias"] = torch.randn(dim, generator=generator)
    state["pos_bias"] = scale * torch.randn(side, side, generator=generator)
    below = torch.ones(side, side, dtype=torch.bool).tril(args.local_window_size - 1)
    state["local_mask"] = below & below.T
    return state


def plain(args: AFTLocalArgs, pos_bias: torch.Tensor) -> dict:
    """A state dict whose matrices change nothing, so that the inputs are q, k and v."""
    state = checkpoint(args) | {"pos_bias": pos_bias}
    for name in ("query", "key", "value", "output"):
        state[f"{name}.weight"] = torch.eye(args.d_model)
        if f"{name}.bias" in state:
            state[f"{name}.bias"] = torch.zeros(args.d_model)
    return state


def build(args: AFTLocalArgs, state: dict, length: int, **options) -> AFTLocal:
    with torch.device("meta"):
        module = AFTLocal(args, length, **options)
    module.load_state_dict(state, strict=True, assign=True)
    module.prepare()
    return module.requires_grad_(False).eval()


def expected(args, state, inputs, **options) -> torch.Tensor:
    inputs = {name: x if x.dtype == torch.bool else x.double() for name, x in inputs.items()}
    return aft_local(args, {name: x.double() for name, x in state.items()}, **inputs, **options)


def agree(output, reference: torch.Tensor, tolerance: float = 1e-5) -> None:
    output = torch.as_tensor(output).double()
    torch.testing.assert_close(output, reference.double(), atol=tolerance, rtol=min(tolerance, 1e-5))


def qkv(length: int, batch: int, dim: int, seed: int = 1) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(length, batch, dim, generator=generator) for name in ("query", "key", "value")}


def labml_output(labml, args, state, inputs, causal) -> torch.Tensor:
    """Upstream fails with a mask that differs over the batch, so it runs one by one."""
    module, outputs = labml(**args.model_dump()), []
    module.load_state_dict(state)
    length, batch, _ = inputs["key"].shape
    for b in range(batch):
        seen = torch.ones(length, length, dtype=torch.bool)
        seen = seen.tril() if causal else seen
        seen = seen & inputs["full_mask"] if "full_mask" in inputs else seen
        seen = seen & inputs["mask"][b] if "mask" in inputs else seen
        one = {name: inputs[name][:, b : b + 1] for name in ("query", "key", "value")}
        outputs.append(module(**one, mask=seen.unsqueeze(-1)))
    return torch.cat(outputs, dim=1)


def exported(module, inputs: dict) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"input_names": list(inputs), "output_names": ["out"], "verbose": False}
        program = torch.onnx.export(module, kwargs=inputs, dynamo=True, opset_version=20, **options)
    attach_functions(program.model)
    return program.model_proto


def run(model: onnx.ModelProto, inputs: dict) -> np.ndarray:
    session = open_bytes(model.SerializeToString(), "cpu", threads=2)
    return session.run({name: x.numpy() for name, x in inputs.items()})["out"]


def tensors(model: onnx.ModelProto):
    """Name and shape of every tensor of the graph and of the bodies of its Scans, inferred by ONNX."""
    graphs = [onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph]
    for graph in graphs:
        for value in (*graph.input, *graph.output, *graph.value_info):
            yield value.name, [d.dim_value for d in value.type.tensor_type.shape.dim]
        for initializer in graph.initializer:
            yield initializer.name, list(initializer.dims)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    graphs.append(attribute.g)
                if attribute.HasField("t"):
                    yield node.name, list(attribute.t.dims)


def with_masks(inputs: dict, kind: str, length: int, batch: int) -> dict:
    """A random mask that leaves every row a key: labml gives NaN without one."""
    generator = torch.Generator().manual_seed(2)
    if kind == "mask":
        inputs["mask"] = torch.rand(batch, length, generator=generator) < 0.6
        inputs["mask"][:, 0] = True
    if kind == "full_mask":
        inputs["full_mask"] = (torch.rand(length, length, generator=generator) < 0.5) | torch.eye(length).bool()
    return inputs


LENGTHS = (1, 2, 3, 7, 16, 17, 33)
GRID = [
    (length, window, causal, kind)
    for length in LENGTHS
    for window in sorted({1, 2, 5, length, length + 3})
    for causal, kind in itertools.product((False, True), ("", "mask", "full_mask"))
]


@pytest.mark.parametrize(("length", "window", "causal", "kind"), GRID)
def test_labmls_numbers(labml, length, window, causal, kind):
    batch, bias = 1 + length % 2, window != 2
    args = AFTLocalArgs(d_model=6, seq_len=length, local_window_size=window, bias=bias)
    state, inputs = checkpoint(args), with_masks(qkv(length, batch, 6), kind, length, batch)
    module = build(args, state, length, causal=causal, full_mask=kind == "full_mask")
    output = module(**inputs)
    agree(output, labml_output(labml, args, state, inputs, causal))
    agree(output, expected(args, state, inputs, causal=causal))


EXPORTED = [
    (1, 1, True, "", 1),
    (2, 1, False, "", 1),
    (17, 1, True, "", 2),
    (24, 5, True, "", 1),
    (24, 5, False, "", 2),
    (24, 5, True, "mask", 2),
    (23, 5, False, "mask", 2),
    (24, 24, True, "", 1),
    (17, 20, False, "mask", 2),
    (22, 5, True, "full_mask", 2),
    (24, 5, False, "full_mask", 1),
]


@pytest.mark.parametrize(("length", "window", "causal", "kind", "batch"), EXPORTED)
def test_the_file_has_labmls_numbers(labml, length, window, causal, kind, batch):
    args = AFTLocalArgs(d_model=6, seq_len=length, local_window_size=window, bias=batch == 1)
    state, inputs = checkpoint(args), with_masks(qkv(length, batch, 6), kind, length, batch)
    model = exported(build(args, state, length, causal=causal, full_mask=kind == "full_mask"), inputs)
    onnx.checker.check_model(model, full_check=True)
    assert bool(model.functions) == (kind != "full_mask")
    agree(run(model, inputs), labml_output(labml, args, state, inputs, causal))


@pytest.mark.parametrize("causal", [False, True])
def test_a_longer_checkpoint_gives_its_top_left_corner(labml, causal):
    args = AFTLocalArgs(d_model=4, seq_len=40, local_window_size=6)
    state, inputs = checkpoint(args), qkv(19, 2, 4)
    output = build(args, state, 19, causal=causal)(**inputs)
    agree(output, labml_output(labml, args, state, inputs, causal))


@pytest.mark.parametrize("options", [{"mask": True}, {"full_mask": True}, {"mask": True, "full_mask": True}])
def test_masks_combine(options):
    torch.manual_seed(4)
    args = AFTLocalArgs(d_model=4, seq_len=20, local_window_size=4)
    state, inputs = checkpoint(args), qkv(20, 2, 4)
    module = build(args, state, 20, causal=True, full_mask="full_mask" in options)
    for density in (0.2, 0.8):
        masks = {name: torch.rand((2, 20) if name == "mask" else (20, 20)) < density for name in options}
        output = module(**inputs, **masks)
        agree(output, expected(args, state, inputs | masks, causal=True))


def _raised(x: torch.Tensor, index, by: float) -> torch.Tensor:
    return x.index_put((torch.tensor(index),), torch.tensor(by), accumulate=True)


# What upstream, or a simpler way to compute it, fails on: changes of the keys `[T, 1, D]` and the biases `[T, T]`.
HARD = {
    "rising keys": lambda k, w: (k + torch.linspace(0, 300, len(k))[:, None, None], w),
    "falling keys": lambda k, w: (k - torch.linspace(0, 300, len(k))[:, None, None], w),
    # More than e^88, all that fp32 has, from one key to the next.
    "steep keys": lambda k, w: (k + 150.0 * torch.arange(len(k))[:, None, None], w),
    "spike under negative biases": lambda k, w: (_raised(k, len(k) // 2, 60.0), w - 20),
    "the window far below what lies outside it": lambda k, w: (k, w - 200),
    # Nothing a row near the spike sees is above e^-120.
    "a suppressed spike": lambda k, w: (_raised(k - 120, len(k) // 2, 120.0), w - 120),
    "biases of +100": lambda k, w: (k, w + 100),
    "one bias of +100 in seven": lambda k, w: (k, w + 100 * (torch.arange(len(k)) % 7 == 0)),
    "a spike per channel": lambda k, w: (k + 200 * torch.eye(len(k))[:, None, 3 : 3 + k.shape[2]], w),
}


def hard_case(case: str, causal: bool, length: int = 96, window: int = 8, dim: int = 5):
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(length, 1, dim, generator=generator)
    keys, bias = HARD[case](keys, 0.3 * torch.randn(length, length, generator=generator))
    args = AFTLocalArgs(d_model=dim, seq_len=length, local_window_size=window)
    state, inputs = plain(args, bias), qkv(length, 1, dim) | {"key": keys}
    # At a logit of a few hundred fp32 itself is only that fine.
    finest = np.spacing(np.float32((keys.abs().max() + bias.abs().max()).item()))
    return args, state, inputs, expected(args, state, inputs, causal=causal), max(1e-5, 4 * finest)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", HARD)
def test_hard_numbers(case, causal):
    args, state, inputs, reference, tolerance = hard_case(case, causal)
    for full_mask in (False, True):
        extra = {"full_mask": torch.ones(96, 96, dtype=torch.bool)} if full_mask else {}
        output = build(args, state, 96, causal=causal, full_mask=full_mask)(**inputs, **extra)
        agree(output, reference, tolerance)


def test_labml_fails_on_them(labml):
    """Else the cases above would prove nothing."""
    args, state, inputs, _, _ = hard_case("rising keys", causal=True)
    assert labml_output(labml, args, state, inputs, True).isnan().any()
    args, state, inputs, _, _ = hard_case("a suppressed spike", causal=False)
    assert labml_output(labml, args, state, inputs, False).isnan().any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", HARD)
def test_hard_numbers_in_the_file(case, causal):
    args, state, inputs, reference, tolerance = hard_case(case, causal, length=40, window=5, dim=3)
    agree(run(exported(build(args, state, 40, causal=causal), inputs), inputs), reference, tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_see_nothing_give_the_output_bias(causal):
    args = AFTLocalArgs(d_model=4, seq_len=21, local_window_size=3)
    state, inputs = checkpoint(args), qkv(21, 3, 4)
    inputs["mask"] = mask = torch.ones(3, 21, dtype=torch.bool)
    mask[0], mask[1, :8] = False, False
    # What nobody sees does not matter.
    inputs["value"][~mask.T], inputs["key"][~mask.T] = torch.nan, torch.inf
    output = torch.from_numpy(run(exported(build(args, state, 21, causal=causal), inputs), inputs))
    for rows in [output[:, 0], *([output[:8, 1]] if causal else [])]:
        torch.testing.assert_close(rows, state["output.bias"].expand_as(rows), atol=0, rtol=0)
    inputs |= {name: inputs[name].nan_to_num(0.0, 0.0) for name in ("key", "value")}
    agree(output, expected(args, state, inputs, causal=causal))


@settings(max_examples=60)
@given(
    length=st.integers(1, 40),
    window=st.integers(1, 45),
    batch=st.integers(1, 3),
    causal=st.booleans(),
    masked=st.booleans(),
    key_scale=st.sampled_from([0.1, 3.0, 60.0]),
    bias_scale=st.sampled_from([0.1, 3.0, 60.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_scale(length, window, batch, causal, masked, key_scale, bias_scale, seed):
    args = AFTLocalArgs(d_model=3, seq_len=length, local_window_size=window)
    generator = torch.Generator().manual_seed(seed)
    state = plain(args, bias_scale * torch.randn(length, length, generator=generator))
    inputs = qkv(length, batch, 3, seed)
    inputs["key"] *= key_scale
    if masked:
        inputs["mask"] = torch.rand(batch, length, generator=generator) < 0.5
    output = build(args, state, length, causal=causal)(**inputs)
    tolerance = 2e-4 if key_scale + bias_scale > 10 else 1e-5  # as fine as fp32 is at such logits
    agree(output, expected(args, state, inputs, causal=causal), tolerance)


def test_half_precision_weights():
    """What the exporter does for --dtype fp16: the matrices only; sums and states stay fp32."""
    args = AFTLocalArgs(d_model=16, seq_len=30, local_window_size=4)
    state = checkpoint(args)
    inputs = {name: x.half() for name, x in qkv(30, 2, 16).items()}
    module = build(args, state, 30, causal=True)
    for part in module.modules():
        if isinstance(part, torch.nn.Linear):
            part.half()
    output = module(**inputs)
    assert output.dtype == torch.float16
    agree(output, expected(args, state, inputs, causal=True), 1e-2)


def test_a_float_local_mask_loads_and_the_table_is_dropped():
    """The exporter turns every tensor of a checkpoint to fp32, this bool one too."""
    args = AFTLocalArgs(d_model=4, seq_len=9, local_window_size=3)
    state = checkpoint(args)
    module = build(args, state | {"local_mask": state["local_mask"].float()}, 9)
    assert set(module.state_dict()) == {name for name in state if "." in name}


@pytest.mark.parametrize("window", [2, 4, 9])
def test_a_checkpoint_of_another_window_is_refused(window):
    args = AFTLocalArgs(d_model=4, seq_len=9, local_window_size=3)
    other = checkpoint(AFTLocalArgs(d_model=4, seq_len=9, local_window_size=window))
    with pytest.raises(UsageError, match="local_mask") as caught:
        build(args, other, 9)
    assert str(window) in caught.value.fix


def test_a_sequence_longer_than_the_biases_is_refused():
    args = AFTLocalArgs(d_model=4, seq_len=8, local_window_size=3)
    with pytest.raises(UsageError, match="seq_len 8"):
        AFT_LOCAL.sizes(args, ShapeRequest(9))
    with pytest.raises(UsageError, match="seq_len 8"):
        AFTLocal(args, 9)


@pytest.mark.parametrize(
    "wrong", [{"seq_len": 0}, {"local_window_size": 0}, {"causal": True}, {"bias": 1}, {"d_model": "4"}]
)
def test_arguments_are_checked(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        AFTLocalArgs(**{"d_model": 4, "seq_len": 8, "local_window_size": 3} | wrong)


@pytest.mark.parametrize(("causal", "masked"), [(True, False), (False, True)])
def test_nothing_is_quadratic(causal, masked):
    length = 331  # prime: no product of other sizes
    args = AFTLocalArgs(d_model=4, seq_len=length, local_window_size=9)
    inputs = qkv(length, 1, 4)
    if masked:
        inputs["mask"] = torch.ones(1, length, dtype=torch.bool)
    model = exported(build(args, checkpoint(args), length, causal=causal), inputs)
    found = list(tensors(inlining.apply(model)))
    assert len(found) > 100
    for name, shape in found:
        assert sum(size >= length for size in shape) <= 1, (name, shape)
        assert math.prod(shape) <= 120 * length, (name, shape)


PEAK = """
import sys, numpy as np, onnxruntime
peak = lambda: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
loaded = peak()
x = np.ones((8192, 1, 64), np.float32)
session.run(None, {"query": x, "key": x, "value": x})
print((peak() - loaded) // 1000)
"""


@pytest.mark.parametrize("causal", [False, True])
def test_eight_thousand_positions_take_megabytes(causal, tmp_path):
    args = AFTLocalArgs(d_model=64, seq_len=8192, local_window_size=32)
    state, inputs = checkpoint(args), qkv(8192, 1, 64)
    model = exported(build(args, state, 8192, causal=causal), inputs)
    output = run(model, inputs)
    assert len(model.graph.node) + len(model.functions[0].node) < 500
    rows = torch.tensor([0, 1, 31, 32, 33, 4095, 4096, 8159, 8160, 8191])
    agree(output[rows], expected(args, state, inputs, causal=causal, rows=rows))

    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    assert path.stat().st_size < (2e6 if causal else 3e6)  # the band is 1 or 2 MB, one [T, T] table 268 MB
    if Path("/proc/self/status").exists():  # all shifted copies of k and v would be 130 or 265 MB
        done = subprocess.run([sys.executable, "-c", PEAK, path], capture_output=True, text=True, check=True)
        assert int(done.stdout) < 4 * 4 * 8192 * 64 * 4 / 1e6  # four times the inputs and outputs
