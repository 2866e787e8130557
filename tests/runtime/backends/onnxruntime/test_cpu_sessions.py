"""Sessions with the compiled CPU kernels: the operator runs, not the body; same numbers, same refusals, less memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from localattn.core.errors import CheckFailed, MissingDependency, UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import (
    DOMAIN,
    HEADS_FIRST,
    SEQUENCE_FIRST,
    VARIANTS,
    NodeAttributes,
    NodeVariant,
)
from localattn.core.nodes.grouped import GROUPED_VARIANTS, GroupedVariant
from localattn.core.storage import cpu_library
from localattn.runtime.backends.onnxruntime import custom_ops
from localattn.runtime.backends.onnxruntime.session import EMULATED, open_bytes
from localattn.runtime.session import Session, load

from ....conftest import TINY, Finished, save_upstream
from ....support import reference
from ....support.models import node_model
from ....support.models.grouped_model import LAYOUTS, GroupedCase
from ....support.native.cpu_build import library, operators_run, put_into_cache

pytest.importorskip("onnxruntime", reason="onnxruntime opens the library")

Call = Callable[..., Finished]
PLAIN, MASKED, BIASED = VARIANTS[0], VARIANTS[1], NodeVariant(has_mask=False, has_bias=True, has_xpos=False)
XPOS = NodeVariant(has_mask=False, has_bias=False, has_xpos=True)
WINDOW = NodeAttributes(WindowGeometry(8, 1, 0, causal=True), 0.35, query_block=8)
ATTRIBUTES = {
    "causal": WINDOW,
    "exact, heads first": NodeAttributes(
        WindowGeometry(6, 1, 2, exact_windowsize=True), 0.35, perm=HEADS_FIRST, query_block=6
    ),
    "shared_qk": NodeAttributes(WindowGeometry(8, 2, 0, causal=True), 0.35, shared_qk=True, query_block=8),
}
TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3}


def for_variant(variant: NodeVariant, attributes: NodeAttributes) -> NodeAttributes:
    """The attributes with a base if the op type scales by xpos."""
    return replace(attributes, xpos_scale_base=6.0 if variant.has_xpos else 0.0)


def without_body(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same file as `--no-function-body` writes it."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.functions[:]
    return bare


def opened(model: onnx.ModelProto, plugin: str, threads: int = 2) -> Session:
    return open_bytes(model.SerializeToString(), "cpu", threads, plugin)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("case", ATTRIBUTES)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.op_type)
def test_kernel_equals_reference_and_body(variant: NodeVariant, case: str, dtype: str) -> None:
    attributes = for_variant(variant, ATTRIBUTES[case])
    for length in (50, "n"):
        model = node_model.one_node(variant, attributes, length, dtype=dtype)
        with_kernel, with_body = opened(model, library()), opened(model, "none")
        assert (with_kernel.plugin, with_kernel.runs_on) == (library(), "cpu, compiled kernel")
        assert (with_kernel.provider, with_body.plugin, with_body.runs_on) == ("cpu", None, "cpu")
        for tokens in (50,) if length == 50 else (1, 8, 50):
            feed = node_model.feed_for(variant, attributes, tokens, dtype=dtype)
            output = with_kernel.run(feed)["out"]
            tolerance = TOLERANCE[dtype]
            exact = reference.windowed_attention(attributes, **feed)
            np.testing.assert_allclose(output, exact, atol=tolerance, rtol=tolerance)
            np.testing.assert_allclose(output, with_body.run(feed)["out"], atol=tolerance, rtol=tolerance)
            assert np.array_equal(output, opened(without_body(model), library()).run(feed)["out"])


def rounded(array: NDArray[Any]) -> NDArray[Any]:
    """The nearest bf16 numbers, in float32."""
    return array.astype(ml_dtypes.bfloat16).astype(np.float32) if array.dtype == np.float32 else array


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.op_type)
def test_a_bf16_node_is_computed_in_fp32_and_rounded_once(variant: NodeVariant) -> None:
    attributes = for_variant(variant, WINDOW)
    model = node_model.one_node(variant, attributes, "n", dtype="bf16")
    with_kernel, with_body = opened(model, library()), opened(model, "none")
    assert (with_kernel.plugin, with_body.plugin) == (library(), None)
    assert with_kernel.notes == with_body.notes == (EMULATED,)
    for tokens in (1, 8, 50):
        given = node_model.feed_for(variant, attributes, tokens, dtype="bf16")
        output, by_function = (session.run(given)["out"] for session in (with_kernel, with_body))
        exact = reference.windowed_attention(attributes, **{name: rounded(array) for name, array in given.items()})
        assert np.array_equal(output, rounded(output))
        np.testing.assert_allclose(output, exact, rtol=2**-8, atol=1e-5)  # half a place, and the sums' own rounding
        np.testing.assert_allclose(by_function, exact, rtol=0.05, atol=0.05)


def test_a_bf16_node_without_a_function_needs_the_kernel() -> None:
    model = without_body(node_model.one_node(PLAIN, WINDOW, 50, dtype="bf16"))
    feed = node_model.feed_for(PLAIN, WINDOW, 50, dtype="bf16")
    assert np.array_equal(
        opened(model, library()).run(feed)["out"],
        opened(node_model.one_node(PLAIN, WINDOW, 50, dtype="bf16"), library()).run(feed)["out"],
    )
    with pytest.raises(MissingDependency, match="needs the compiled attention kernel"):
        opened(model, "none")


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("length", [50, "n"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.op_type)
def test_the_operator_runs_and_not_the_body(
    variant: NodeVariant, length: int | str, dtype: str, tmp_path: Path
) -> None:
    model = node_model.one_node(variant, for_variant(variant, WINDOW), length, dtype=dtype)
    feed = node_model.feed_for(variant, WINDOW, 50, dtype=dtype)
    assert operators_run(model.SerializeToString(), tmp_path, feed) == [variant.op_type]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("variant", GROUPED_VARIANTS, ids=lambda variant: variant.op_type)
def test_grouped_kernel_equals_reference_and_function(variant: GroupedVariant, dtype: str, tmp_path: Path) -> None:
    windows = (WindowGeometry.reaching(9, 4), WindowGeometry(8, 0, 0, causal=True))
    everything = (WindowGeometry.all_keys(causal=True), WindowGeometry.all_keys(causal=False))
    for geometry, perm in zip(everything if variant.sees_all else windows, LAYOUTS, strict=True):
        case = GroupedCase(
            geometry,
            45,
            heads=6,
            kv_heads=2,
            mask=variant.has_mask,
            softcap=3.0 if variant.has_softcap else 0.0,
            sinks=variant.has_sinks,
            perm=perm,
            dtype=dtype,
        )
        model, feed, tolerance = case.model(), case.feed(), TOLERANCE[dtype]
        assert operators_run(model.SerializeToString(), tmp_path, feed) == [variant.op_type]
        output = opened(model, library()).run(feed)["out"]
        np.testing.assert_allclose(output, case.expected(feed), atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(output, opened(model, "none").run(feed)["out"], atol=tolerance, rtol=tolerance)
        assert np.array_equal(output, opened(case.model(body=False), library()).run(feed)["out"])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("key", (2, 45, 4, 8), "key has 4 heads; they must divide the 6 of query"),
        ("key", (2, 45, 0, 8), "key has 0 heads; they must divide the 6 of query"),
        ("key", (2, 44, 2, 8), "key has shape [2, 44, 2, 8]; it must be [2, 45, 2, 8]"),
        ("value", (2, 45, 3, 8), "value has shape [2, 45, 3, 8]; it must be [2, 45, 2, 8]"),
        ("key_mask", (2, 44), "key_mask has shape [2, 44]; it must be [2, 45]"),
        ("sinks", (2,), "sinks has shape [2]; it must be [6]"),
        ("sinks", (), "sinks has shape []"),
    ],
)
def test_grouped_inputs_that_do_not_fit_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    import onnxruntime as ort

    case = GroupedCase(WindowGeometry.all_keys(causal=True), 45, heads=6, kv_heads=2, mask=True, sinks=True)
    model = case.model(body=False)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(library())
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = case.feed()
    assert session.run(None, feed)[0].shape == (2, 45, 6, 8)
    if name == "key" and shape[2] != 2:
        feed["value"] = np.zeros(shape, np.float32)
    with pytest.raises(Exception, match="GlobalAttentionMaskSinks") as caught:
        session.run(None, {**feed, name: np.zeros(shape, feed[name].dtype)})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("softcap", 0.0, "attribute softcap is 0; it must be above 0"),
        ("softcap", float("inf"), "attribute softcap is not finite"),
        ("causal", 2, "attribute causal is 2"),
    ],
)
def test_grouped_attributes_that_are_none_of_ours_are_refused(name: str, value: Any, message: str) -> None:
    model = GroupedCase(WindowGeometry.all_keys(causal=True), 45, softcap=3.0).model(body=False)
    for change in (changed(name, value), dropped(name)):
        broken_one = onnx.ModelProto()
        broken_one.CopyFrom(model)
        change(broken_one.graph.node[0])
        with pytest.raises(UsageError, match="cannot be loaded") as caught:
            opened(broken_one, library())
        assert f"attribute {name} is missing" in caught.value.why or message in caught.value.why


def test_xpos_without_a_base_is_refused() -> None:
    model = without_body(node_model.one_node(XPOS, for_variant(XPOS, WINDOW), "n"))
    changed("xpos_scale_base", 0.0)(model.graph.node[0])
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        opened(model, library())
    assert "xpos_scale_base is 0" in caught.value.why


@pytest.mark.parametrize("perm", [SEQUENCE_FIRST, HEADS_FIRST])
def test_threads_change_no_bit(perm: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_model, "HEAD_DIM", 32)
    attributes = NodeAttributes(WindowGeometry(64, 1, 0, causal=True, exact_windowsize=True), 0.2, perm=perm)
    model = node_model.one_node(MASKED, attributes, 1000)
    feed = node_model.feed_for(MASKED, attributes, 1000)
    outputs = [opened(model, library(), threads).run(feed)["out"] for threads in (1, 2, 3)]
    assert np.array_equal(outputs[0], outputs[1]) and np.array_equal(outputs[0], outputs[2])


def broken(change: Callable[[onnx.NodeProto], None], variant: NodeVariant = PLAIN) -> onnx.ModelProto:
    model = without_body(node_model.one_node(variant, WINDOW, "n"))
    change(model.graph.node[0])
    return model


def dropped(name: str) -> Callable[[onnx.NodeProto], None]:
    def change(node: onnx.NodeProto) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)

    return change


def changed(name: str, value: Any) -> Callable[[onnx.NodeProto], None]:
    def change(node: onnx.NodeProto) -> None:
        dropped(name)(node)
        node.attribute.append(onnx.helper.make_attribute(name, value))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((dropped(name), name) for name in ("window_size", "look_backward", "causal", "scale", "shared_qk", "perm")),
        (changed("window_size", 0), "attribute window_size is 0; it must lie in [1,"),
        (changed("look_forward", -1), "attribute look_forward is -1"),
        (changed("look_backward", 1 << 40), "attribute look_backward is 1099511627776"),
        (changed("causal", 2), "attribute causal is 2"),
        (changed("scale", float("nan")), "attribute scale is not finite"),
        (changed("perm", [0, 3, 1, 2]), "attribute perm is neither"),
        (changed("perm", [0]), "attribute perm is neither"),
    ],
)
def test_a_node_that_is_none_of_ours_is_refused(change: Callable[[onnx.NodeProto], None], message: str) -> None:
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        opened(broken(change), library())
    assert message in caught.value.why


def unshaped(variant: NodeVariant) -> bytes:
    """A bare node whose inputs may have any shape."""
    model = without_body(node_model.one_node(variant, WINDOW, "n"))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    return model.SerializeToString()


@pytest.mark.parametrize(
    ("variant", "name", "shape", "message"),
    [
        (PLAIN, "key", (2, 15, 2, 8), "key has shape [2, 15, 2, 8]; it must be [2, 16, 2, 8]"),
        (PLAIN, "value", (2, 16, 2, 7), "value has shape"),
        (PLAIN, "query", (16, 2, 8), "query has shape [16, 2, 8]; it has 4 dimensions"),
        (MASKED, "key_mask", (2, 15), "key_mask has shape [2, 15]; it must be [2, 16]"),
        (MASKED, "key_mask", (1, 16), "key_mask has shape [1, 16]"),
        (BIASED, "attn_bias", (2, 8, 15), "attn_bias has shape [2, 8, 15]; it must be [2, 8, 16]"),
        (BIASED, "attn_bias", (), "attn_bias has shape []"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    variant: NodeVariant, name: str, shape: tuple[int, ...], message: str
) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(library())
    session = ort.InferenceSession(unshaped(variant), options, providers=["CPUExecutionProvider"])
    feed = node_model.feed_for(variant, WINDOW, 16)
    assert session.run(None, feed)[0].shape == (2, 16, 2, 8)
    with pytest.raises(Exception, match="WindowedAttention") as caught:
        session.run(None, {**feed, name: np.zeros(shape, feed[name].dtype)})
    assert message in str(caught.value)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0)])
def test_nothing_to_compute(shape: tuple[int, int]) -> None:
    batch, length = shape
    feed = node_model.feed_for(MASKED, WINDOW, length, batch)
    model = node_model.one_node(MASKED, WINDOW, "n", "b")
    assert opened(model, library()).run(feed)["out"].shape == (batch, length, 2, 8)


@pytest.fixture
def in_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's library as the one that `auto` finds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(custom_ops, "_said", set())
    return put_into_cache()


def test_auto_falls_back_and_says_so_once(
    in_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "node.onnx"
    onnx.save(node_model.one_node(PLAIN, WINDOW, 50), str(path))
    feed = node_model.feed_for(PLAIN, WINDOW, 50)
    session = load(path)
    assert session.plugin == str(in_cache) and caplog.text == ""
    assert load(path, plugin="none").plugin is None

    def refuse(self: Any, ort: Any, options: Any) -> None:
        raise MissingDependency("it cannot be loaded.", why="some library is missing.")

    monkeypatch.setattr(custom_ops.CompiledKernel, "register", refuse)
    fallen = [load(path) for _ in range(2)]
    assert all(other.plugin is None for other in fallen)
    assert caplog.text.count("the compiled attention kernel is not used: some library is missing.") == 1
    np.testing.assert_allclose(fallen[0].run(feed)["out"], session.run(feed)["out"], atol=1e-5)
    with pytest.raises(MissingDependency, match="it cannot be loaded"):
        load(path, plugin=in_cache)


def test_a_changed_library_is_refused(tmp_path: Path, localattn: Call) -> None:
    path, other = tmp_path / "node.onnx", tmp_path / "other.so"
    onnx.save(node_model.one_node(PLAIN, WINDOW, 50), str(path))
    other.write_bytes(Path(library()).read_bytes() + b"!")
    other.with_name("other.so.json").write_bytes(Path(library() + ".json").read_bytes())
    with pytest.raises(CheckFailed, match="changed after it was built"):
        load(path, plugin=other)
    finished = localattn("run", path, "--plugin-library", other)
    assert finished.code == 1 and "changed after it was built" in finished.err
    gone = localattn("run", path, "--plugin-library", tmp_path / "gone.so")
    assert gone.code == 2 and "cannot be read" in gone.err
    elsewhere = localattn("run", path, "--plugin-library", library(), "--provider", "cuda")
    assert elsewhere.code == 2 and "on the CPU" in elsewhere.err


def test_a_file_without_body_needs_the_kernel(tmp_path: Path, localattn: Call) -> None:
    path = tmp_path / "bare.onnx"
    onnx.save(without_body(node_model.one_node(PLAIN, WINDOW, 50)), str(path))
    refused = localattn("run", path)
    assert refused.code == 3 and "localattn plugin build --backend onnxruntime" in refused.err
    ran = localattn("run", path, "--plugin-library", library())
    assert ran.code == 0 and "ran on cpu, compiled kernel (onnxruntime)" in ran.out


def test_commands_use_it_and_say_so(in_cache: Path, tiny: Path, localattn: Call, tmp_path: Path) -> None:
    model = tmp_path / "tiny.onnx"
    exported = localattn("export", tiny, "-o", model, "--mask")
    assert exported.code == 0 and "provider cpu\n" in exported.out, "the export judges the function definition"
    ways = ((("--plugin", "auto"), str(in_cache)), (("--plugin", "none"), None))
    for plugin, expected in (*ways, (("--plugin-library", in_cache), str(in_cache))):
        answer = json.loads(localattn("run", model, *plugin, "--format", "json").out)
        assert (answer["provider"], answer["plugin"]) == ("cpu", expected)
        judged = json.loads(localattn("parity", model, "--against", tiny, *plugin, "--format", "json").out)
        assert (judged["passed"], judged["provider"], judged["plugin"]) == (True, "cpu", expected)
    assert "tiny.onnx (compiled kernel) and" in localattn("parity", model, "--against", tiny).out
    page = tmp_path / "parity.md"
    assert localattn("parity", model, "--against", tiny, "-o", page).code == 0
    assert "cpu, compiled kernel" in page.read_text()

    quick = ["--duration", "0", "--iterations", "2", "--rounds", "2", "--warmup", "0", "--top", "200", "--profile"]
    measured = localattn("bench", model, "--plugin", "none,auto", "--threads", "1", "--format", "json", *quick)
    assert measured.code == 0, measured.err
    answer = json.loads(measured.out)
    assert [(row["label"], row["plugin"]) for row in answer["rows"]] == [
        ("tiny.onnx, plugin none", None),
        ("tiny.onnx, plugin auto", in_cache.name),
    ]
    assert answer["rows"][1]["ratio"]["against"] == "tiny.onnx, plugin none"
    body, kernel = ({row["name"]: row for row in profile["operators"]} for profile in answer["profiles"])
    assert "WindowedAttentionMask" not in body and kernel["WindowedAttentionMask"]["nodes"] == TINY["depth"]
    nodes = [node for node in answer["profiles"][1]["nodes"] if node["operator"] == "WindowedAttentionMask"]
    assert {node["module"] for node in nodes} == {f"layers.{i}.0.branch.attn_fn" for i in range(TINY["depth"])}
    shown = localattn("bench", model, "--threads", "1", *quick[:-1])
    assert "onnxruntime cpu, compiled kernel" in shown.out


@pytest.mark.parametrize(
    ("options", "plugin"),
    [
        (["--dtype", "fp16"], True),
        (["--dtype", "bf16"], True),
        (["--weight-dtype", "int8"], True),
        (["--dynamic", "batch,seq"], True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_other_kinds_of_files(
    options: list[str], plugin: bool, in_cache: Path, tmp_path: Path, localattn: Call
) -> None:
    checkpoint = save_upstream(tmp_path, "local_attention.LocalTransformer", TINY | {"dim": 64, "heads": 4})
    model = tmp_path / "model.onnx"
    assert localattn("export", checkpoint, "-o", model, *options).code == 0
    tokens = np.random.default_rng(0).integers(0, TINY["num_tokens"], (1, TINY["max_seq_len"]))
    outputs: list[NDArray[Any]] = []
    for choice in ("auto", "none"):
        session = load(model, plugin=choice)
        assert (session.plugin is not None) == (plugin and choice == "auto")
        outputs.append(session.run({"tokens": tokens})["logits"])
    atol = next((x for name, x in {"int8": 0.3, "fp16": 5e-3, "bf16": 0.1}.items() if name in options), 1e-4)
    np.testing.assert_allclose(*outputs, atol=atol)


# Peak of a call on buffers that exist, beyond them, at two lengths; printed as JSON.
MEMORY = """
import json, sys
sys.path.insert(0, sys.argv[1])
import ml_dtypes
import numpy as np
import onnxruntime as ort
from localattn.runtime.bench.resources import forget_peak, peak_resident, resident

options = ort.SessionOptions()
options.intra_op_num_threads = 2
options.register_custom_ops_library(sys.argv[2])
session = ort.InferenceSession(sys.argv[3], options, providers=["CPUExecutionProvider"])

def call(length):
    rng = np.random.default_rng(0)
    arrays = {name: rng.random((1, length, 8, 64), np.float32) for name in ("query", "key", "value", "out")}
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    for name in ("query", "key", "value"):
        binding.bind_ortvalue_input(name, values[name])
    binding.bind_ortvalue_output("out", values["out"])
    forget_peak()
    before = resident()
    session.run_with_iobinding(binding)
    return peak_resident() - before

call(1024)
print(json.dumps({length: call(length) for length in (4096, 16384)}))
"""


def test_memory_is_that_of_inputs_and_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("/proc/self/clear_refs (Linux) lets a peak begin anew")
    import localattn as package

    monkeypatch.setattr(node_model, "HEADS", 8)
    monkeypatch.setattr(node_model, "HEAD_DIM", 64)
    attributes = NodeAttributes(WindowGeometry(256, 1, 0, causal=True, exact_windowsize=True), 0.125)
    model = tmp_path / "node.onnx"
    onnx.save(node_model.one_node(PLAIN, attributes, "n", 1), str(model))
    (tmp_path / "import").mkdir()
    (tmp_path / "import" / "localattn").symlink_to(Path(package.__file__).parent)
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "import"), library(), str(model)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    for length, extra in json.loads(finished.stdout).items():
        own = 4 * 4 * int(length) * 8 * 64
        # Scratch does not grow with the length: it is far below the half of them that is allowed.
        assert extra + own < 1.5 * own and extra < 16 << 20, (length, extra)


def test_domain_of_the_nodes() -> None:
    assert cpu_library.computes(DOMAIN, "WindowedAttention") and not cpu_library.computes("", "WindowedAttention")
