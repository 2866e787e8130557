"""The fused nodes: body, eager function, compiled kernel and numpy agree, the kernel is what runs, and wrong shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx import TensorProto, helper

from localattn.core.errors import CheckFailed
from localattn.core.machine.processor import host_arch
from localattn.core.nodes.fused import FUSED_BY_OP_TYPE, FUSED_DOMAIN, FUSED_NODES, FUSED_VERSION, GATES, ROTATIONS
from localattn.core.storage.library_store import CPU_KERNELS, read_named
from localattn.exporter.lowering.functions import attach_functions
from localattn.exporter.lowering.fused_functions import build_fused
from localattn.exporter.models.parts import fused_calls
from localattn.plugins.cpu import build
from localattn.plugins.cpu.check import check_library
from localattn.plugins.cpu.probes import probes
from localattn.runtime.backends.onnxruntime.session import open_bytes

from ...support.models.opsets import when_run
from ...support.native.cpu_build import library, operators_run
from ...support.native.cpu_program import mutated
from ...support.native.fuse_program import FAULTS
from ...support.native.fused_reference import Array, expected, output_shapes, random_inputs, shapes

pytest.importorskip("onnxruntime", reason="onnxruntime opens the library")

OPSETS = (18, 20, 24)
ELEMENT = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16}
NUMPY: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16}
# Bodies and eager functions round after every operator in fp16: three times numbers of size 8.
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-2}
KERNEL_TOLERANCE = {"fp32": 5e-6, "fp16": 1e-3}
EVERY = [(node.op_type, dtype) for node in FUSED_NODES for dtype in node.dtypes]
EAGER: dict[str, Callable[..., Any]] = {
    "ReadStreams": fused_calls.read_streams,
    "ReadStreamsNorm": lambda *reading: normalized(reading),
    "MixStreams": fused_calls.write_streams,
    "MixReadStreamsNorm": lambda *inputs: mixed(inputs[:4], inputs[4:]),
    "AddToStreams": lambda streams, beta, output: fused_calls.write_streams(streams, None, beta, output),
    "BeginStreams": fused_calls.begin_streams,
    "EndStreams": fused_calls.end_streams,
    "RotateHeads": fused_calls.rotate,
    "RotatePairs": lambda x, cosine, sine: pairs_turned(x, cosine, sine),
    "GatedGelu": fused_calls.gated_gelu,
    "GatedGeluTanh": lambda value, gate: value * F.gelu(gate, approximate="tanh"),
    "GatedSilu": lambda value, gate: value * F.silu(gate),
}

Sizes = dict[str, list[Any]]


def one_node(
    op_type: str, sizes: Sizes, dtype: str = "fp32", opset: int = 20, *, body: bool = True, shaped: bool = True
) -> onnx.ModelProto:
    """A checked model of one node; without shapes its inputs may have any."""

    def described(of: Sizes) -> list[Any]:
        return [helper.make_tensor_value_info(name, ELEMENT[dtype], shape) for name, shape in of.items()]

    outputs = output_shapes(op_type, sizes)
    node = helper.make_node(op_type, [*sizes], [*outputs], domain=FUSED_DOMAIN)
    graph = helper.make_graph([node], "one_node", described(sizes), described(outputs))
    functions = [ir.serde.serialize_function(build_fused(op_type, opset))] if body else []
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(FUSED_DOMAIN, FUSED_VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)
    onnx.checker.check_model(model, full_check=body)
    for value in () if shaped else (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    return model


def normalized(reading: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    *inputs, scale, shift = reading
    x, *weights = fused_calls.read_streams(*inputs)
    return F.layer_norm(x, scale.shape, scale, shift), *weights


def mixed(writing: Sequence[torch.Tensor], reading: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    written = fused_calls.write_streams(*writing)
    return written, *normalized([written, *reading])


def pairs_turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    pairs = x.unflatten(-1, (-1, 2))
    return (pairs * cosine + pairs.flip(-1) * sine).flatten(-2)


def answer(model: onnx.ModelProto, plugin: str, feed: dict[str, Array], threads: int = 2) -> dict[str, Array]:
    session = open_bytes(model.SerializeToString(), "cpu", threads, plugin)
    assert session.plugin == (None if plugin == "none" else plugin)
    return session.run(feed)


def eager(op_type: str, feed: dict[str, Array]) -> dict[str, Array]:
    made = EAGER[op_type](*(torch.from_numpy(array) for array in feed.values()))
    outputs = [made] if isinstance(made, torch.Tensor) else made
    return {n: x.numpy() for n, x in zip(FUSED_BY_OP_TYPE[op_type].outputs, outputs, strict=True)}


def close(found: dict[str, Array], right: dict[str, NDArray[np.float64]], tolerance: float) -> None:
    assert [*found] == [*right]
    for name, array in right.items():
        wide = found[name].astype(np.float64)
        assert wide.shape == array.shape
        np.testing.assert_allclose(wide, array, atol=tolerance, rtol=tolerance, err_msg=name)


def kinds(op_type: str) -> Iterator[dict[str, Any]]:
    """Sizes besides batch and length."""
    if op_type in ROTATIONS:
        yield from (
            {"streams": 0, "dim": d, "heads": h, "heads_first": f, "own_positions": own}
            for d, h, f, own in ((6, 3, False, False), (16, 2, True, False), (6, 3, False, True), (16, 2, True, True))
        )
    else:
        yield from ({"streams": streams, "dim": dim} for streams, dim in ((4, 16), (2, 5)))


@pytest.mark.parametrize("opset", [when_run(number) for number in OPSETS])
@pytest.mark.parametrize(("op_type", "dtype"), EVERY)
def test_all_that_compute_it_agree(op_type: str, dtype: str, opset: int) -> None:
    for kind in kinds(op_type):
        for sizes in ((2, 11), ("batch", "length")):
            model = one_node(op_type, shapes(op_type, *sizes, **kind), dtype, opset)
            bare = one_node(op_type, shapes(op_type, *sizes, **kind), dtype, opset, body=False)
            for batch, length in (sizes,) if sizes == (2, 11) else ((1, 1), (3, 40)):
                feed = random_inputs(shapes(op_type, batch, length, **kind), NUMPY[dtype])
                right = expected(op_type, feed)
                close(eager(op_type, feed), right, TOLERANCE[dtype])
                close(answer(model, "none", feed), right, TOLERANCE[dtype])
                made = answer(model, library(), feed)
                close(made, right, KERNEL_TOLERANCE[dtype])
                assert all(array.dtype == NUMPY[dtype] for array in made.values())
                alone = answer(bare, library(), feed)
                assert all(np.array_equal(made[name], alone[name]) for name in made)


@pytest.mark.parametrize(
    "op_type", ["ReadStreams", "ReadStreamsNorm", "MixStreams", "MixReadStreamsNorm", "AddToStreams"]
)
def test_one_token_may_have_no_axes_but_its_streams(op_type: str) -> None:
    """Kernel, eager function and a body of its own, of fewer operators."""
    feed = random_inputs(shapes(op_type, 1, 1, 4, 16), np.float32)
    right = {name: array[0] if array.ndim == 3 else array[0, 0] for name, array in expected(op_type, feed).items()}
    bare = {name: array[0] if array.ndim == 3 else array.reshape(array.shape[-2:]) for name, array in feed.items()}
    close(eager(op_type, bare), right, 1e-5)
    made = one_node(op_type, {name: list(array.shape) for name, array in bare.items()}, body=False)
    for value in made.graph.output:
        value.type.tensor_type.ClearField("shape")
    close(answer(made, library(), bare), right, 1e-5)
    model = ir.from_proto(made)
    attach_functions(model)
    general = build_fused(op_type, 20)
    assert sum(1 for _ in next(iter(model.functions.values()))) < sum(1 for _ in general)
    close(answer(ir.to_proto(model), "none", bare), right, 1e-5)


@pytest.mark.parametrize("op_type", FUSED_BY_OP_TYPE)
def test_bodies_have_the_contract_s_names(op_type: str) -> None:
    node = FUSED_BY_OP_TYPE[op_type]
    for opset in OPSETS:
        function = ir.serde.serialize_function(build_fused(op_type, opset))
        assert (function.domain, function.name) == (FUSED_DOMAIN, op_type)
        assert tuple(function.input) == node.inputs and len(function.output) == len(node.outputs)
        assert [(x.domain, x.version) for x in function.opset_import] == [("", opset)] and not function.attribute
        assert all(not inner.domain for inner in function.node), "standard operators"


@pytest.mark.parametrize("tokens", [(2, 11), ("batch", "length")], ids=["fixed", "open"])
@pytest.mark.parametrize(("op_type", "dtype"), EVERY)
def test_the_kernel_runs_and_not_the_body(op_type: str, dtype: str, tokens: tuple[Any, Any], tmp_path: Path) -> None:
    kind = next(kinds(op_type))
    model = one_node(op_type, shapes(op_type, *tokens, **kind), dtype)
    feed = random_inputs(shapes(op_type, 2, 11, **kind), NUMPY[dtype])
    assert operators_run(model.SerializeToString(), tmp_path, feed) == [op_type]


@pytest.mark.parametrize("op_type", FUSED_BY_OP_TYPE)
def test_threads_change_no_bit(op_type: str) -> None:
    """So many elements that they are several tasks."""
    kind = {"streams": 4, "dim": 96, "heads": 4}
    sizes = shapes(op_type, 2, 501, **kind)
    feed, model = random_inputs(sizes, np.float32), one_node(op_type, sizes)
    first, *others = [answer(model, library(), feed, threads) for threads in (1, 2, 3)]
    close(first, expected(op_type, feed), 1e-5)
    for other in others:
        assert all(np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("tokens", [(0, 5), (2, 0)], ids=["batch", "length"])
@pytest.mark.parametrize("op_type", FUSED_BY_OP_TYPE)
def test_no_tokens(op_type: str, tokens: tuple[int, int]) -> None:
    for kind in kinds(op_type):
        model = one_node(op_type, shapes(op_type, "batch", "length", **kind))
        feed = random_inputs(shapes(op_type, *tokens, **kind), np.float32)
        right = expected(op_type, feed)
        found = answer(model, library(), feed)
        assert {name: array.shape for name, array in found.items()} == {n: a.shape for n, a in right.items()}


def test_norm_of_a_token_of_zeros() -> None:
    """Everywhere 1e-12 at least: its weights are the constant ones, and not NaN."""
    sizes = shapes("ReadStreams", 1, 3, 4, 16)
    feed = random_inputs(sizes, np.float32)
    feed["streams"][0, 1] = 0
    model, right = one_node("ReadStreams", sizes), expected("ReadStreams", feed)
    for found in (answer(model, library(), feed), answer(model, "none", feed), eager("ReadStreams", feed)):
        close(found, right, 1e-5)
        assert np.array_equal(found["mix"][0, 1], feed["constant"][:, 1:-1])


def test_more_positions_than_streams_may_be_wide() -> None:
    """The length is the third size of heads first."""
    sizes = shapes("RotateHeads", 1, (1 << 20) + 1, 0, 2, 1, heads_first=True)
    feed = random_inputs(sizes, np.float16)
    found = answer(one_node("RotateHeads", sizes, "fp16"), library(), feed)
    close(found, expected("RotateHeads", feed), KERNEL_TOLERANCE["fp16"])


REFUSED = [
    ("ReadStreams", "streams", (2, 7, 8), "the first input has shape [2, 7, 8]; it must have 4 dimensions"),
    ("ReadStreams", "weight", (8, 5), "weight has shape [8, 5]; it must be [8, 6]"),
    ("ReadStreams", "weight", (7, 6), "weight has shape [7, 6]; it must be [8, 6]"),
    ("ReadStreams", "gain", (6,), "gain has shape [6]; it must be [4, 6]"),
    ("ReadStreams", "gain", (), "gain has shape []; it must be [4, 6]"),
    ("ReadStreams", "constant", (6, 4), "constant has shape [6, 4]; it must be [4, 6]"),
    ("ReadStreams", "streams", (2, 7, 0, 8), "the first input has shape [2, 7, 0, 8]; streams and width must lie in"),
    ("EndStreams", "streams", (2, 7, 4, 0), "the first input has shape [2, 7, 4, 0]; streams and width must lie in"),
    ("ReadStreams", "streams", (2, 7, 3, 8), "weight has shape [8, 6]; it must be [8, 5]"),
    ("ReadStreamsNorm", "streams", (2, 7, 8), "the first input has shape [2, 7, 8]; it must have 4 dimensions"),
    ("ReadStreamsNorm", "weight", (8, 5), "weight has shape [8, 5]; it must be [8, 6]"),
    ("ReadStreamsNorm", "gain", (6,), "gain has shape [6]; it must be [4, 6]"),
    ("ReadStreamsNorm", "constant", (6, 4), "constant has shape [6, 4]; it must be [4, 6]"),
    ("ReadStreamsNorm", "scale", (9,), "scale has shape [9]; it must be [8]"),
    ("ReadStreamsNorm", "shift", (1, 8), "shift has shape [1, 8]; it must be [8]"),
    ("MixReadStreamsNorm", "streams", (2, 7, 8), "the first input has shape [2, 7, 8]; it must have 4 dimensions"),
    ("MixReadStreamsNorm", "mix", (2, 7, 4, 3), "mix has shape [2, 7, 4, 3]; it must be [2, 7, 4, 4]"),
    ("MixReadStreamsNorm", "beta", (2, 7, 4), "beta has shape [2, 7, 4]; it must be [2, 7, 4, 1]"),
    ("MixReadStreamsNorm", "output", (2, 6, 8), "output has shape [2, 6, 8]; it must be [2, 7, 8]"),
    ("MixReadStreamsNorm", "weight", (7, 6), "weight has shape [7, 6]; it must be [8, 6]"),
    ("MixReadStreamsNorm", "gain", (), "gain has shape []; it must be [4, 6]"),
    ("MixReadStreamsNorm", "constant", (6, 4), "constant has shape [6, 4]; it must be [4, 6]"),
    ("MixReadStreamsNorm", "scale", (4,), "scale has shape [4]; it must be [8]"),
    ("MixReadStreamsNorm", "shift", (0,), "shift has shape [0]; it must be [8]"),
    ("MixStreams", "streams", (2, 7, 8), "the first input has shape [2, 7, 8]; it must have 4 dimensions"),
    ("MixStreams", "mix", (2, 7, 4, 3), "mix has shape [2, 7, 4, 3]; it must be [2, 7, 4, 4]"),
    ("MixStreams", "mix", (1, 7, 4, 4), "mix has shape [1, 7, 4, 4]"),
    ("MixStreams", "beta", (2, 7, 4), "beta has shape [2, 7, 4]; it must be [2, 7, 4, 1]"),
    ("MixStreams", "output", (2, 7, 9), "output has shape [2, 7, 9]; it must be [2, 7, 8]"),
    ("MixStreams", "output", (2, 6, 8), "output has shape [2, 6, 8]; it must be [2, 7, 8]"),
    ("AddToStreams", "streams", (2, 7, 8), "the first input has shape [2, 7, 8]; it must have 4 dimensions"),
    ("AddToStreams", "beta", (2, 7, 1, 1), "beta has shape [2, 7, 1, 1]; it must be [2, 7, 4, 1]"),
    ("AddToStreams", "output", (2, 7, 1), "output has shape [2, 7, 1]; it must be [2, 7, 8]"),
    ("BeginStreams", "x", (2, 7, 1, 8), "the first input has shape [2, 7, 1, 8]; it must have 3 dimensions"),
    ("BeginStreams", "mix", (2, 7, 4), "mix has shape [2, 7, 4]; it must be"),
    ("BeginStreams", "mix", (2, 7, 4, 4), "mix has shape [2, 7, 4, 4]; it must be [2, 7, 4, 1]"),
    ("BeginStreams", "beta", (2, 7, 3, 1), "beta has shape [2, 7, 3, 1]; it must be [2, 7, 4, 1]"),
    ("BeginStreams", "output", (2, 8, 7), "output has shape [2, 8, 7]; it must be [2, 7, 8]"),
    ("EndStreams", "mix", (2, 7, 4, 1), "mix has shape [2, 7, 4, 1]; it must be [2, 7, 4, 4]"),
    ("EndStreams", "beta", (2, 7, 5, 1), "beta has shape [2, 7, 5, 1]; it must be [2, 7, 4, 1]"),
    ("EndStreams", "output", (2, 7), "output has shape [2, 7]; it must be [2, 7, 8]"),
    ("RotateHeads", "x", (2, 7, 8), "the first input has shape [2, 7, 8]; it must have 4 dimensions"),
    ("RotateHeads", "x", (2, 7, 2, 9), "heads are 9 wide; they must be even"),
    ("RotateHeads", "cosine", (8, 1, 2, 4), "cosine has shape [8, 1, 2, 4]; it must be [7, 1, 2, 4]"),
    ("RotateHeads", "cosine", (7, 8), "cosine has shape [7, 8]; it must be [7, 1, 2, 4]"),
    ("RotateHeads", "sine", (7, 2, 4), "sine has shape [7, 2, 4]; it must be [7, 1, 2, 4]"),
    ("RotateHeads", "cosine", (2, 8, 1, 2, 4), "cosine has shape [2, 8, 1, 2, 4]; it must be [2, 7, 1, 2, 4]"),
    ("RotateHeads", "cosine", (1, 7, 1, 2, 4), "cosine has shape [1, 7, 1, 2, 4]; it must be [2, 7, 1, 2, 4]"),
    ("RotateHeads", "cosine", (2, 1, 7, 2, 4), "cosine has shape [2, 1, 7, 2, 4]; it must be [2, 1, 2, 2, 4]"),
    ("RotatePairs", "x", (2, 7, 2, 9), "heads are 9 wide; they must be even"),
    ("RotatePairs", "cosine", (7, 1, 2, 4), "cosine has shape [7, 1, 2, 4]; it must be [7, 1, 4, 2]"),
    ("RotatePairs", "sine", (7, 4, 2), "sine has shape [7, 4, 2]; it must be [7, 1, 4, 2]"),
    ("RotatePairs", "cosine", (2, 1, 7, 4, 2), "cosine has shape [2, 1, 7, 4, 2]; it must be [2, 1, 2, 4, 2]"),
    ("GatedGelu", "gate", (2, 7, 1), "gate has shape [2, 7, 1]; it must be [2, 7, 8]"),
    ("GatedGeluTanh", "gate", (2, 8, 7), "gate has shape [2, 8, 7]; it must be [2, 7, 8]"),
    ("GatedSilu", "gate", (1, 7, 8), "gate has shape [1, 7, 8]; it must be [2, 7, 8]"),
    ("GatedGelu", "gate", (112,), "gate has shape [112]; it must be [2, 7, 8]"),
]


@pytest.mark.parametrize(("op_type", "name", "shape", "message"), REFUSED)
def test_inputs_that_do_not_fit_are_refused(op_type: str, name: str, shape: tuple[int, ...], message: str) -> None:
    import onnxruntime as ort

    sizes = shapes(op_type, 2, 7, 4, 8)
    feed = random_inputs(sizes, np.float32)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(library())
    model = one_node(op_type, sizes, body=False, shaped=False)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    close(
        dict(zip(FUSED_BY_OP_TYPE[op_type].outputs, session.run(None, feed), strict=True)),
        expected(op_type, feed),
        1e-5,
    )
    with pytest.raises(Exception, match=op_type) as caught:
        session.run(None, {**feed, name: np.zeros(shape, np.float32)})
    assert f"{op_type}: {message}" in str(caught.value)


def test_the_refusals_cover_every_input() -> None:
    """But one that may have any shape."""
    every = {(node.op_type, name) for node in FUSED_NODES for name in node.inputs}
    assert every - {(op_type, name) for op_type, name, *_ in REFUSED} == {(op_type, "value") for op_type in GATES}


def test_what_a_check_of_a_library_expects() -> None:
    """Its calls, one for every kernel, say what the formulas say."""
    ours = [probe for probe in probes() if probe.domain == FUSED_DOMAIN]
    assert [(probe.op_type, probe.dtype) for probe in ours] == EVERY
    for probe in ours:
        assert {array.dtype for array in probe.feed.values()} == {np.dtype(NUMPY[probe.dtype])}
        close(probe.expected, expected(probe.op_type, probe.feed), 1e-6)


@pytest.mark.slow
def test_a_library_with_a_fault_does_not_pass_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "SOURCES", mutated(tmp_path, "fused.inl", *FAULTS["gelu"][:2]))
    built = build.build_library(tmp_path / "faulty.so", arch=host_arch())
    with pytest.raises(CheckFailed, match="GatedGelu in fp32 computes something else"):
        check_library(read_named(CPU_KERNELS, built.path))
