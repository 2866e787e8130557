"""Export of the user's own module: what is written, what is compared, and that planted faults are found."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from local_attention import LocalAttention, LocalMHA, LocalTransformer
from torch import Tensor, nn

import localattn
from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed, ExportFailed, UsageError
from localattn.exporter.checks.layers import check_layer_memory, check_layer_windows
from localattn.exporter.jobs.module import ModuleExportReport, ModuleOptions, export_module
from localattn.exporter.lowering import attention_function, function_properties, functions, trace
from localattn.exporter.models.local_attention import module
from localattn.exporter.user_module.inputs import parse_input
from localattn.exporter.user_module.opened_module import listed_inputs
from localattn.runtime import load
from localattn.runtime.inputs.example_inputs import check_call, draw_call
from localattn.runtime.inputs.size_sweep import sweep

from .test_replace import AFT, Mixer, Packed, Twice, randomised

OPEN = ModuleOptions(dynamic=("batch", "seq"))
WHOLE_WINDOWS = ["x:float32:[2,32,16]"]


def statuses(report: ModuleExportReport) -> dict[str, str]:
    return {check.name: check.status for check in report.sidecar.checks}


def assert_equals(report: ModuleExportReport, model: nn.Module, **inputs: Tensor) -> None:
    """The file's first output is the model's."""
    expected = model(**inputs)
    session = load(report.path)
    actual = session.run({name: x.numpy() for name, x in inputs.items()})
    np.testing.assert_allclose(next(iter(actual.values())), expected.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Mixer(causal=True, prenorm=True), ["x:float32:[2,18,16]"]),
        (Mixer(causal=False), ["x:float32:[1,17,16]", "mask:bool:[1,17]"]),
        (Packed(), ["x:float32:[2,18,16]"]),
        (Packed(), ["x:float32:[2,18,16]", "mask:bool:[2,18]", "attn_bias:float32:[2,4,12]"]),
        (Twice(), ["x:float32:[2,24,16]"]),
        (LocalMHA(dim=16, window_size=4, dim_head=8, heads=2), ["x:float32:[2,18,16]"]),
    ],
    ids=["mixer", "mixer, mask", "packed", "packed, mask, bias", "twice", "the layer itself"],
)
def test_a_model_passes_its_checks(tmp_path: Path, model: nn.Module, inputs: list[str]) -> None:
    report = export_module(randomised(model), inputs, tmp_path / "m.onnx")
    assert set(statuses(report).values()) == {"passed"}
    drawn = {x.name: torch.from_numpy(x.draw(5, {})) for x in map(parse_input, inputs)}
    assert_equals(report, model, **drawn)
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "m.onnx.json"}


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Mixer(causal=True), ["x:float32:[2,30,16]"]),
        (Mixer(causal=False, exact_windowsize=False), ["x:float32:[2,30,16]"]),
        (Mixer(causal=False), ["x:float32:[2,30,16]", "mask:bool:[2,30]"]),
        (Packed(causal=True), ["x:float32:[2,30,16]"]),
        (Packed(autopad=False), WHOLE_WINDOWS),
        (Twice(), ["x:float32:[2,30,16]"]),
    ],
    ids=["causal", "padded", "mask", "packed", "whole windows only", "twice"],
)
def test_open_sizes(tmp_path: Path, model: nn.Module, inputs: list[str]) -> None:
    report = export_module(randomised(model), inputs, tmp_path / "m.onnx", OPEN)
    parity = report.sidecar.checks[2]
    assert {check.status for check in report.sidecar.checks if check is not parity} == {"passed"}
    if inputs == WHOLE_WINDOWS:  # lengths that the module itself refuses are no tick
        assert parity.status == "not proven" and "batch=2 seq=8" in parity.detail.partition("; not compared at ")[0]
        assert "batch=2 seq=3" in parity.detail.partition("; not compared at ")[2]
    else:
        assert parity.status == "passed"
    specs = list(map(parse_input, inputs))
    assert load(report.path).inputs[0].shape == ("batch", "seq", 16)
    for batch, length in ((1, 4), (3, 16), (1, 28)):
        shapes = {x.name: (batch, length, *x.shape[2:]) for x in specs}
        drawn = {x.name: dataclasses.replace(x, shape=shapes[x.name]) for x in specs}
        assert_equals(report, model, **{name: torch.from_numpy(x.draw(1, {})) for name, x in drawn.items()})


def test_a_transformer_inside_with_open_sizes(tmp_path: Path) -> None:
    kwargs = {"num_tokens": 11, "max_seq_len": 32, "dim": 16, "depth": 1, "dim_head": 8, "heads": 2}
    model = randomised(nn.Sequential(LocalTransformer(**kwargs, local_attn_window_size=5, causal=False)))
    report = export_module(model, ["input:int64:[1,32]"], tmp_path / "m.onnx", OPEN)
    assert set(statuses(report).values()) == {"passed"}
    parity = report.sidecar.checks[2]
    assert parity.figures["trials"] > 12
    assert (report.sidecar.seq_len, report.sidecar.dynamic) == (32, ["batch", "seq"])
    assert [spec.shape for spec in report.sidecar.outputs] == [("batch", "seq", 11)]


def test_sequence_axes_may_be_named(tmp_path: Path) -> None:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = LocalMHA(dim=16, window_size=4, dim_head=8, heads=2, causal=True)

        def forward(self, x: Tensor) -> dict[str, Tensor | None]:
            y = self.attention(x.transpose(1, 2)).transpose(1, 2)
            return {"y": y, "nothing": None, "mean": y.mean(-1)}

    model = randomised(Channels())
    report = export_module(model, ["x:float32:[2,16,seq=20]"], tmp_path / "m.onnx", ModuleOptions(dynamic=("seq",)))
    assert [(spec.name, spec.shape) for spec in report.sidecar.outputs] == [("y", (2, 16, "seq")), ("mean", (2, 16))]
    x = torch.randn(2, 16, 7)
    np.testing.assert_allclose(load(report.path).run({"x": x.numpy()})["y"], model(x)["y"].numpy(), atol=1e-5)


def test_the_users_own_numbers_are_compared(tmp_path: Path) -> None:
    x = torch.randn(2, 18, 16)
    report = export_module(randomised(Mixer()), {"x": x}, tmp_path / "m.onnx")
    assert report.sidecar.checks[2].figures["trials"] == 3
    report = export_module(Mixer(), {"x": x}, tmp_path / "n.onnx", dataclasses.replace(OPEN, seq_len=40))
    assert report.sidecar.seq_len == 40


def test_aft_local_inside(tmp_path: Path) -> None:
    model = randomised(AFT(torch.ones(17, 17).tril().bool()[:, :, None]))
    report = export_module(model, ["x:float32:[2,17,16]"], tmp_path / "m.onnx")
    assert {"parity": "passed", "linear memory": "passed"}.items() <= statuses(report).items()
    assert_equals(report, model, x=torch.randn(2, 17, 16))


def test_the_sidecar_lists_every_layer(tmp_path: Path) -> None:
    export_module(randomised(Twice()), ["x:float32:[2,24,16]"], tmp_path / "m.onnx")
    sidecar = read_sidecar(tmp_path / "m.onnx")
    assert sidecar is not None
    assert [(layer.path, layer.replaced) for layer in sidecar.layers] == [("first", True)]
    assert "causal exact, window 4" in sidecar.layers[0].detail
    assert [window.name for window in sidecar.windows] == [
        "first/WindowedAttentionXpos",
        "again/WindowedAttentionXpos",
    ]
    assert sidecar.class_name.endswith("test_replace.Twice")


def test_a_module_in_training_and_half_precision(tmp_path: Path) -> None:
    model = randomised(Mixer(dropout=0.5)).half().train()
    report = export_module(model, ["x:float32:[2,18,16]"], tmp_path / "m.onnx")
    assert set(statuses(report).values()) == {"passed"}
    assert model.training
    assert model.out.weight.dtype == torch.float16


# Planted faults: each has to be found.


def test_a_lost_window_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_function, "HIDDEN_SCORE", 0.0)
    with pytest.raises(CheckFailed, match="parity"):
        export_module(randomised(Mixer()), ["x:float32:[2,18,16]"], tmp_path / "m.onnx")
    # The layer's own check finds it too, where the outputs would not tell.
    with pytest.raises(CheckFailed, match="window"):
        loose = ModuleOptions(atol=1e3)
        export_module(randomised(Mixer()), ["x:float32:[2,18,16]"], tmp_path / "m.onnx", loose)
    assert not list(tmp_path.iterdir())


def test_wrong_padding_of_an_open_length_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right at every multiple of the window, wrong between: only the sweep sees it."""
    monkeypatch.setattr(module.LocalAttention, "_padding", lambda self, length, batch, mask: (0, mask))
    with pytest.raises(CheckFailed, match="parity") as failure:
        export_module(randomised(Mixer()), ["x:float32:[2,32,16]"], tmp_path / "m.onnx", OPEN)
    assert "seq=7" in failure.value.why
    assert "seq=8" not in failure.value.why.split(";")[0]


def test_a_wrong_weight_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = functions.attach_functions

    def spoil(model: ir.Model) -> None:
        original(model)
        weight = next(x for name, x in model.graph.initializers.items() if name.endswith("out.bias"))
        weight.const_value = ir.tensor(weight.const_value.numpy() + 0.01, name=weight.name)

    monkeypatch.setattr(functions, "attach_functions", spoil)
    with pytest.raises(CheckFailed, match="parity"):
        export_module(randomised(Mixer()), ["x:float32:[2,18,16]"], tmp_path / "m.onnx")


@pytest.mark.parametrize(("attribute", "value"), [("window_size", 3), ("exact_windowsize", 0)])
def test_a_wrong_window_is_found(tmp_path: Path, attribute: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = functions.attach_functions

    def spoil(model: ir.Model) -> None:
        original(model)
        for node in trace.attention_nodes(model):
            node.attributes[attribute] = ir.AttrInt64(attribute, value)

    monkeypatch.setattr(functions, "attach_functions", spoil)
    with pytest.raises(CheckFailed, match="parity"):
        export_module(randomised(Mixer(causal=True)), ["x:float32:[2,18,16]"], tmp_path / "m.onnx", OPEN)


def test_a_square_tensor_of_the_rest_is_found(tmp_path: Path) -> None:
    class Global(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.local = LocalMHA(dim=16, window_size=4, dim_head=8, heads=2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.local(x)
            return (x @ x.transpose(1, 2)).softmax(-1) @ x

    for name, options in (("m", ModuleOptions()), ("n", OPEN)):
        with pytest.raises(CheckFailed, match="linear memory"):
            export_module(randomised(Global()), ["x:float32:[2,18,16]"], tmp_path / f"{name}.onnx", options)
        options = dataclasses.replace(options, allow_quadratic=True)
        report = export_module(randomised(Global()), ["x:float32:[2,18,16]"], tmp_path / f"{name}.onnx", options)
        assert statuses(report)["linear memory"] == "skipped"


def test_scalars_are_scalars_in_the_reference_too(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
            return x * scale, scale + 1

    report = export_module(Scaled(), {"x": np.ones((2, 3), np.float32), "scale": np.float32(2)}, tmp_path / "m.onnx")
    assert statuses(report)["parity"] == "passed"
    assert [x.shape for x in report.sidecar.outputs] == [(2, 3), ()]


def test_a_square_tensor_in_a_branch_is_found() -> None:
    value, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    square = value("square", onnx.TensorProto.FLOAT, ["seq", "seq"])
    branch = onnx.helper.make_graph([node("MatMul", ["column", "row"], ["square"])], "branch", [], [square])
    choice = node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)
    graph = onnx.helper.make_graph([choice], "g", [value("flag", onnx.TensorProto.BOOL, [])], [])
    record = check_layer_memory(onnx.helper.make_model(graph), set(), ["seq"], lambda _: None)
    assert record.status == "failed" and "square" in record.detail


def in_parts(path: Path) -> list[onnx.FunctionProto]:
    """The bodies of a file that compute some blocks at a time."""
    return [body for body in onnx.load(path).functions if any(node.op_type == "Split" for node in body.node)]


@pytest.mark.parametrize("length", [64, 118])  # whole blocks, and a last one that is not
@pytest.mark.parametrize("inputs", ["", "mask:bool:[2,{}]"], ids=["", "mask"])
def test_a_long_sequence_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: str, length: int) -> None:
    """Its body is for that length alone: no check may try it at another."""
    monkeypatch.setattr(function_properties, "PART_BYTES", 4096)
    model = randomised(Mixer(causal=not inputs))
    given = [f"x:float32:[2,{length},16]", *([inputs.format(length)] if inputs else [])]
    report = export_module(model, given, tmp_path / "m.onnx")
    assert set(statuses(report).values()) == {"passed"}
    assert len(in_parts(report.path)) == 1
    assert_equals(report, model, **{x.name: torch.from_numpy(x.draw(5, {})) for x in map(parse_input, given)})


def test_a_quadratic_body_in_parts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_properties, "PART_BYTES", 65536)
    report = export_module(randomised(Mixer()), ["x:float32:[1,512,16]"], tmp_path / "m.onnx")
    assert len(in_parts(report.path)) == 1
    model = onnx.load(report.path)
    assert check_layer_memory(model, {512}, (), lambda _: None).status == "passed"
    # Queries by keys of the whole sequence, which nothing uses.
    rows = onnx.helper.make_node("Transpose", ["query"], ["rows"], perm=[0, 2, 1, 3])
    columns = onnx.helper.make_node("Transpose", ["key"], ["columns"], perm=[0, 2, 3, 1])
    model.functions[0].node.extend([rows, columns, onnx.helper.make_node("MatMul", ["rows", "columns"], ["square"])])
    record = check_layer_memory(model, {512}, (), lambda _: None)
    assert record.status == "failed" and "square" in record.detail


def test_a_module_as_wide_as_the_sequence_is_no_fault(tmp_path: Path) -> None:
    report = export_module(randomised(Mixer()), ["x:float32:[1,16,16]"], tmp_path / "m.onnx")
    assert statuses(report)["linear memory"] == "passed"


def test_another_length_is_no_other_size_of_the_module(tmp_path: Path) -> None:
    """Four heads over four tokens; two tokens fewer are as many as the batch, in the same tensors."""
    model = randomised(LocalMHA(dim=16, window_size=2, dim_head=8, heads=4))
    report = export_module(model, ["x:float32:[2,4,16]"], tmp_path / "m.onnx")
    assert statuses(report)["linear memory"] == "passed"


def test_a_weight_as_wide_as_the_sequence_is_no_fault_whatever_its_number(tmp_path: Path) -> None:
    """The exporter numbers transposed weights, and another length shifts the numbers."""
    model = randomised(nn.Sequential(LocalTransformer(
        num_tokens=17, max_seq_len=16, dim=16, depth=2, dim_head=4, heads=4, local_attn_window_size=3, causal=True,
        use_dynamic_pos_bias=True, num_residual_streams=1,
    )))  # fmt: skip
    report = export_module(model, ["input:int64:[1,16]"], tmp_path / "m.onnx")
    assert statuses(report)["linear memory"] == "passed"


class Wide(nn.Module):
    """Heads of 16 over 8 tokens: half a head is as wide as the sequence is long, as the halves that rotary turns."""

    def __init__(self, *, fixed: bool = False, dense: bool = False) -> None:
        super().__init__()
        self.attention, self.dense = LocalAttention(window_size=4, causal=True, dim=16, autopad=True), dense
        # A table of one length: no other can be traced.
        self.positions = nn.Parameter(torch.randn(8, 16)) if fixed else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.positions is not None:
            q = q + self.positions
        out: Tensor = self.attention(q, k, v)
        return (out @ out.transpose(-1, -2)).softmax(-1) @ v if self.dense else out


@pytest.mark.parametrize("shape", ["1,2,8,16", "1,2,seq=8,16", "1,heads=2,n=8,16"])
def test_half_a_head_as_wide_as_the_sequence_is_no_fault(tmp_path: Path, shape: str) -> None:
    """Whatever the axes are called: the one that changes the lengths of the layers is the sequence."""
    inputs = [f"{name}:float32:[{shape}]" for name in "qkv"]
    report = export_module(Wide(), inputs, tmp_path / "m.onnx")
    assert statuses(report)["linear memory"] == "passed"
    with pytest.raises(
        CheckFailed, match=r"2 tensor\(s\) outside the windowed layers are n × n"
    ):  # the product and its softmax
        export_module(Wide(dense=True), inputs, tmp_path / "n.onnx")


def test_a_module_for_one_length_is_checked_at_that(tmp_path: Path) -> None:
    inputs = [f"{name}:float32:[1,2,8,16]" for name in "qkv"]
    report = export_module(Wide(fixed=True), inputs, tmp_path / "m.onnx")
    record = next(check for check in report.sidecar.checks if check.name == "linear memory")
    assert record.status == "not proven" and "two equal sizes by chance" in record.detail
    with pytest.raises(CheckFailed, match=r"1 tensor\(s\) outside the windowed layers are n × n"):
        export_module(Wide(fixed=True, dense=True), inputs, tmp_path / "n.onnx")


def test_layers_without_a_node_are_named(tmp_path: Path) -> None:
    report = export_module(randomised(Mixer()), ["x:float32:[2,18,16]"], tmp_path / "m.onnx")
    record = check_layer_windows(onnx.load(report.path), ["encoder.attention"])
    assert record.status == "not proven"
    assert "encoder.attention" in record.detail


def test_one_window_proves_nothing_and_says_so(tmp_path: Path) -> None:
    report = export_module(randomised(Mixer()), ["x:float32:[2,4,16]"], tmp_path / "m.onnx")
    assert statuses(report)["window"] == "not proven"


def test_modules_that_cannot_be_compared(tmp_path: Path) -> None:
    class Random(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> int:
            return 3

    for model, words in ((Random(), "two answers"), (Nothing(), "without tensors"), (3, "no torch.nn.Module")):
        with pytest.raises(UsageError, match=words):
            export_module(model, ["x:float32:[2,8]"], tmp_path / "m.onnx")  # type: ignore[arg-type]


def test_what_pytorch_cannot_export_is_one_error(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ExportFailed, match="PyTorch could not export"):
        export_module(Branching(), ["x:float32:[2,8]"], tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tokens", "cannot be read"),
        ("x:float32", "cannot be read"),
        ("x:float16:[1]", "dtype"),
        ("x:int64:[1,-2]", "shape"),
        ("x:int64:[0]", "shape"),
        ("x:int64:[a]", "shape"),
    ],
)
def test_inputs_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_input(text)


def test_an_axis_that_is_a_name_alone_gets_its_size_from_the_options(tmp_path: Path) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.kinds = nn.Embedding(50, 8), nn.Embedding(2, 8)

        def forward(self, tokens, kinds):
            return self.tokens(tokens) + self.kinds(kinds)

    given, output = ["tokens:int64:[batch,seq]", "kinds:int64:[1,seq]"], tmp_path / "m.onnx"
    with pytest.raises(UsageError, match="how long seq is"):
        export_module(Embedded(), given, output)
    report = export_module(Embedded(), given, output, ModuleOptions(seq_len=12, checks="quick"))
    assert [spec.shape for spec in report.sidecar.inputs] == [(1, 12)] * 2
    sized = parse_input("kinds:int64:[batch,seq=7]")
    assert [x.shape for x in listed_inputs([given[0], sized], ModuleOptions())] == [(1, 7)] * 2
    # The sidecar keeps how many rows each table has, so tokens can be drawn, and be compared with recorded ones.
    assert report.sidecar.token_limits == {"tokens": 50, "kinds": 2}
    tokens, kinds = np.full((1, 12), 49), np.ones((1, 12), np.int64)
    localattn.record(Embedded(), {"tokens": tokens, "kinds": kinds}, tmp_path / "g.npz")
    assert not localattn.parity(output, golden=tmp_path / "g.npz").passed  # other weights, the same tokens
    check_call({"tokens": tokens, "kinds": kinds}, report.sidecar)
    with pytest.raises(UsageError, match="from 0 to 1"):
        check_call({"tokens": tokens, "kinds": 2 * kinds}, report.sidecar)
    drawn = draw_call(report.sidecar.inputs, 0, report.sidecar)
    check_call(drawn, report.sidecar)


def test_the_sweep_goes_around_every_multiple() -> None:
    from localattn.core.geometry import WindowGeometry

    lengths = sweep([WindowGeometry(8, 1, 0, causal=True)], 40)
    assert {1, 7, 8, 9, 15, 16, 17, 23, 24, 25, 39, 40} <= set(lengths)
    assert max(lengths) == 40


@pytest.mark.parametrize("length", [33, 96, 97, 100])
def test_memory_is_checked_whatever_divides_the_length(tmp_path: Path, length: int) -> None:
    layer = LocalMHA(dim=16, window_size=16, dim_head=8, heads=2, causal=True)  # 100 goes in blocks of 25
    report = export_module(randomised(layer), [f"x:float32:[1,{length},16]"], tmp_path / "m.onnx")
    assert set(statuses(report).values()) == {"passed"}


def test_a_large_scale_hides_no_key_from_the_window_check(tmp_path: Path) -> None:
    layer = LocalMHA(dim=64, heads=2, dim_head=16, window_size=32, causal=True, qk_rmsnorm=True)  # scores up to 8
    report = export_module(randomised(layer), ["x:float32:[1,128,64]"], tmp_path / "m.onnx")
    assert statuses(report)["window"] == "passed"


class OwnMask(nn.Module):
    """Adds something that was built for one length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LocalMHA(dim=16, window_size=4, dim_head=8, heads=2, causal=True)
        self.register_buffer("table", torch.ones(24, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.table


def test_an_axis_that_the_module_closes_is_named(tmp_path: Path) -> None:
    with pytest.raises((ExportFailed, UsageError), match=r"cannot stay open|24") as failure:
        export_module(OwnMask(), ["x:float32:[2,24,16]"], tmp_path / "m.onnx", OPEN)
    assert "Input 'x' does not fit" not in str(failure.value)
    assert not list(tmp_path.iterdir())


class Fp32Only(nn.Module):
    """Makes fp32 numbers itself, so that it does not run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = LocalMHA(dim=16, window_size=4, dim_head=8, heads=2, causal=True)
        self.product = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.attention(x).float())


def test_why_the_reference_is_not_float64_is_noted(tmp_path: Path) -> None:
    report = export_module(randomised(Fp32Only()), ["x:float32:[1,18,16]"], tmp_path / "m.onnx")
    assert "against the untouched module in fp32" in report.sidecar.checks[2].detail
    (note,) = (note for note in report.notes if "float64" in note)
    assert note.startswith("the reference is in fp32: the module does not run in float64 (RuntimeError: ")
    assert "dtype" in note, "what PyTorch says"
    other = export_module(randomised(Mixer()), ["x:float32:[1,18,16]"], tmp_path / "n.onnx")
    assert "against the untouched module in float64" in other.sidecar.checks[2].detail
    assert not any("float64" in note for note in other.notes)


class NeedsOnes(nn.Module):
    """Refuses sequences of zeros, with which embeddings are looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.attention = LocalMHA(dim=16, window_size=4, dim_head=8, heads=2, causal=True)

    def forward(self, tokens: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and int(tokens.max()) == 0:
            raise ValueError("nothing but padding\nand more lines")
        return self.attention(self.embedding(tokens))


def test_a_vocabulary_that_is_not_found_is_noted(tmp_path: Path) -> None:
    model = randomised(NeedsOnes())
    report = export_module(model, ["tokens:int64:[1,18]"], tmp_path / "m.onnx")
    (note,) = (note for note in report.notes if "vocabulary" in note)
    assert note.startswith("the vocabulary of tokens is not known") and "(ValueError: nothing but padding)" in note
    known = export_module(model, ["tokens:int64:[1,18]:11"], tmp_path / "n.onnx")
    assert not any("vocabulary" in note for note in known.notes)


class _Autocast(nn.Module):
    """A layer between roundings to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.mix(x)


def test_autocast_is_refused_by_name(tmp_path: Path) -> None:
    """In the module, and around the call; autocast that is off is none."""
    x = {"x": np.ones((2, 16), np.float32)}
    with pytest.raises(UsageError, match="The _Autocast computes under torch"):
        export_module(_Autocast(), x, tmp_path / "model.onnx")
    with torch.autocast("cpu", torch.float16), pytest.raises(UsageError, match="export_module was called under"):
        export_module(nn.Linear(16, 16), x, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
