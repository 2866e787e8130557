"""The check for integers beyond 32 bits: what it finds, what it lets pass, and that its intervals hold."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from localattn.core.documents.sidecar import CheckRecord
from localattn.core.errors import CheckFailed
from localattn.exporter.checks.integer_ranges import IntegerRanges
from localattn.exporter.checks.wide_integers import check_wide_integers
from localattn.exporter.jobs.module import ModuleOptions, export_module
from localattn.onnx_graph.without_weights import read_message

LAST = 2**31 - 1
OPSET = helper.make_opsetid("", 20)


def model(nodes: Sequence[onnx.NodeProto], shape: Sequence[int | str] = (1,), **constants: object) -> onnx.ModelProto:
    """`position` int64 and `x` fp32 `[4]` in, what the last node gives out."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [
            helper.make_tensor_value_info("position", TensorProto.INT64, shape),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]),
        ],
        [helper.make_empty_tensor_value_info(nodes[-1].output[0])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[OPSET, helper.make_opsetid("own", 1)], ir_version=10)


def judged(folder: Path, found: onnx.ModelProto, limit: int | None = 2**31, **sizes: int) -> CheckRecord:
    return check_wide_integers(found, folder, {"position": limit}, sizes)


def node(op_type: str, *inputs: str, **attributes: object) -> onnx.NodeProto:
    """A node that is called as its operator and gives the same name in small letters."""
    return helper.make_node(op_type, inputs, [op_type.lower()], name=f"the {op_type}", **attributes)


FAULTS = {
    "a product": ([node("Mul", "position", "two")], {"two": 2}),
    "a sum": ([node("Add", "position", "two")], {"two": 2}),
    "below": ([node("Neg", "position"), node("Sub", "neg", "two")], {"two": 2}),
    "a product between": ([node("Mul", "position", "k"), node("Mod", "mul", "k")], {"k": 1 << 20}),
    "a constant": ([node("Div", "position", "k")], {"k": 1 << 42}),
    "what is constant alone": (
        [node("Mul", "k", "k"), node("Div", "mul", "k"), node("Add", "div", "position")],
        {"k": 1 << 16},
    ),
    "a sum over many": (
        [node("Expand", "position", "many"), node("ReduceSum", "expand", "axis", keepdims=0)],
        {"many": [2], "axis": [0]},
    ),
    "chosen": (
        [node("Less", "position", "one"), node("Where", "less", "position", "one"), node("Add", "where", "one")],
        {"one": 1},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wide_integer_is_found_with_its_node(tmp_path: Path, name: str) -> None:
    nodes, constants = FAULTS[name]
    record = judged(tmp_path, model(nodes, **constants))
    assert record.status == "failed"
    culprit = {"chosen": "Add", "below": "Sub", "a sum over many": "ReduceSum"}.get(name, nodes[0].op_type)
    assert f"{culprit} 'the {culprit}'" in record.detail


NARROW = {
    "the position itself": [node("Identity", "position")],
    "a remainder, then a product": [node("Mod", "position", "k"), node("Mul", "mod", "k")],
    "a quotient, then a product": [node("Div", "position", "k"), node("Mul", "div", "k")],
    "clipped": [node("Clip", "position", "", "k"), node("Mul", "clip", "k")],
    "the least": [node("Min", "position", "k"), node("Mul", "min", "k")],
    "a slice to the end": [node("Slice", "x", "zero", "end")],
    "sizes": [node("Shape", "x"), node("Mul", "shape", "k")],
    "one of a few": [node("Gather", "few", "position"), node("Mul", "gather", "k")],
}

COMPUTES_NOTHING = {"the position itself", "a slice to the end"}


@pytest.mark.parametrize("name", NARROW)
def test_what_32_bits_hold_passes(tmp_path: Path, name: str) -> None:
    constants = {"k": 1 << 15, "zero": [0], "end": [2**63 - 1], "few": [1, 2, 3]}
    record = judged(tmp_path, model(NARROW[name], **constants))
    if name in COMPUTES_NOTHING:
        assert record.status == "skipped" and "no node computes" in record.detail
        return
    assert record.status == "passed", record.detail
    assert record.figures["largest"] <= LAST


def test_functions_are_looked_into(tmp_path: Path) -> None:
    body = [
        helper.make_node("Constant", [], ["k"], value_int=1 << 20),
        helper.make_node("Mul", ["p", "k"], ["q"], name="inside"),
    ]
    found = model([helper.make_node("Wide", ["position"], ["out"], name="call", domain="own")])
    found.functions.append(helper.make_function("own", "Wide", ["p"], ["q"], body, [OPSET]))
    record = judged(tmp_path, found)
    assert record.status == "failed" and "Mul" in record.detail
    assert judged(tmp_path, found, limit=100).status == "passed"


def test_so_are_the_bodies_of_loops(tmp_path: Path) -> None:
    item, twice = (helper.make_tensor_value_info(x, TensorProto.INT64, []) for x in ("item", "twice"))
    body = helper.make_graph(
        [helper.make_node("Mul", ["item", "k"], ["twice"], name="inside")], "body", [item], [twice]
    )
    nodes = [node("Scan", "position", body=body, num_scan_inputs=1)]
    record = judged(tmp_path, model(nodes, k=1 << 20))
    assert record.status == "not proven" and "'inside'" in record.detail


@pytest.mark.parametrize("operator", ["Cast", "BitShift"])
def test_what_is_not_analysed_is_not_ticked(tmp_path: Path, operator: str) -> None:
    nodes = [node("Cast", "x", to=TensorProto.INT64)]
    if operator == "BitShift":
        nodes = [node("Cast", "position", to=TensorProto.UINT64), node("BitShift", "cast", "cast", direction="LEFT")]
    record = judged(tmp_path, model(nodes))
    assert record.status == "not proven" and f"the {operator}" in record.detail


def test_an_input_without_a_limit_is_not_computed_with_in_silence(tmp_path: Path) -> None:
    gathers = model([node("Gather", "x", "position")])
    assert judged(tmp_path, gathers, limit=None).status == "skipped"  # it computes nothing with it
    adds = model([node("Add", "position", "position")])
    assert judged(tmp_path, adds, limit=None).status == "not proven"


def test_dynamic_axes_are_taken_at_their_largest(tmp_path: Path) -> None:
    nodes = [node("Shape", "position"), node("Mul", "shape", "k")]
    found = model(nodes, ("seq",), k=1 << 20)
    assert judged(tmp_path, found, seq=1024).status == "passed"
    assert judged(tmp_path, found, seq=4096).status == "failed"


def test_sizes_of_a_product_with_few_bits_are_known(tmp_path: Path) -> None:
    """ONNX infers nothing of onnxruntime's operator; what follows from its result's shape is analysed all the same."""
    product = node("MatMulNBits", "cast", "table", "scales", domain="com.microsoft", K=32, N=48, bits=4, block_size=32)
    nodes = [node("Cast", "position", to=TensorProto.FLOAT), product, node("Shape", "matmulnbits")]
    nodes.append(node("Mul", "shape", "k"))
    table = {"table": np.zeros((48, 1, 16), np.uint8), "scales": np.ones(48, np.float32)}
    found = model(nodes, ("seq", 32), **table, k=1 << 20)
    assert judged(tmp_path, found, seq=1024).status == "passed"
    assert judged(tmp_path, found, seq=4096).status == "failed"


def test_the_interval_of_a_large_result_is_one(tmp_path: Path) -> None:
    """Rows and columns of indices: each of 9 million sums as an object of Python would take 700 MB."""
    positions = np.arange(3000)
    nodes = [node("Add", "position", "row"), node("Sub", "add", "column")]
    found = model(nodes, row=positions[:, None], column=positions[None])
    tracemalloc.start()
    try:
        record = judged(tmp_path, found, 100)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert (record.status, record.figures["largest"]) == ("passed", 99 + 2999)


def test_large_constants_are_read(tmp_path: Path) -> None:
    nodes = [node("Gather", "table", "position"), node("Add", "gather", "one")]
    found = model(nodes, table=[LAST] * 200, one=1)
    assert judged(tmp_path, found, limit=200).status == "failed"
    onnx.save(found, tmp_path / "beside.onnx", save_as_external_data=True, size_threshold=64)
    beside = read_message(tmp_path / "beside.onnx")
    assert check_wide_integers(beside, tmp_path, {"position": 200}).status == "failed"
    onnx.save(model(nodes, table=[LAST] * 2000, one=1), tmp_path / "inside.onnx")
    inside = read_message(tmp_path / "inside.onnx")
    assert check_wide_integers(inside, tmp_path, {"position": 200}).status == "failed"


@pytest.mark.parametrize("seed", range(8))
def test_every_value_lies_in_its_interval(tmp_path: Path, seed: int) -> None:
    """Random graphs, computed on random positions by ONNX's reference implementation."""
    rng, limit = np.random.default_rng(seed), 1000
    constants = {f"c{i}": rng.integers(-50, 50, size) for i, size in enumerate([(), (3,), (2, 1), (2, 3)])}
    names, nodes = ["position", *constants], []
    for i in range(16):
        first, second = (str(rng.choice(names)) for _ in range(2))
        operands = {
            **{name: [first, second] for name in ("Add", "Sub", "Mul", "Min", "Max")},
            **{"Div": [first, "seven"], "Mod": [first, "seven"], "Clip": [first, "", "seven"]},
            **{"Where": ["flag", first, second], "Neg": [first], "ReduceSum": [first], "Gather": []},
        }
        kind = str(rng.choice(list(operands)))
        if kind == "Gather":
            nodes.append(helper.make_node("Reshape", [first, "all"], [f"flat{i}"]))
            operands[kind] = [f"flat{i}", "zero"]
        nodes.append(helper.make_node(kind, operands[kind], [f"n{i}"]))
        names.append(f"n{i}")
    found = model(nodes, seven=7, zero=0, flag=np.array([True, False, True]), all=[-1], **constants)
    del found.graph.output[:]
    made = [name for x in nodes for name in x.output]
    found.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in made)
    ranges = IntegerRanges(found, tmp_path, {"position": limit}, {})
    assert set(made) <= ranges.known.keys()
    for position in (0, limit - 1, *rng.integers(0, limit, 5)):
        values = ReferenceEvaluator(found).run(None, {"position": np.array([position]), "x": np.zeros(4, np.float32)})
        for name, value in zip(made, values, strict=True):
            low, high = ranges.known[name]
            assert (low <= value).all() and (value <= high).all(), name


class Hashes(nn.Module):
    """An embedding of hashes, as a user's module may compute them."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor, self.table = factor, nn.Embedding(64, 8)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids * self.factor % 64)
        return out


def test_an_export_is_refused_unless_it_is_accepted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs, output = ["ids:int64:[1,8]:1000"], tmp_path / "m.onnx"
    with pytest.raises(CheckFailed, match=r"no wide integers"):
        export_module(Hashes(1 << 40), inputs, output)
    assert not list(tmp_path.iterdir())
    report = export_module(Hashes(1 << 40), inputs, output, ModuleOptions(allow_wide_integers=True))
    assert {x.name: x.status for x in report.sidecar.checks}["no wide integers"] == "skipped"
