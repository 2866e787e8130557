"""`localattn plugin`: building, finding, listing, checking and rewriting, with its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from localattn.core.extras import as_installed
from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.attention import VARIANTS, NodeAttributes, NodeVariant
from localattn.core.nodes.gpu import SERVED, SERVED_OP_TYPES
from localattn.core.storage.library_store import LibraryKind
from localattn.plugins.kernel.spec import full_set
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.library.build import up_to_date
from localattn.plugins.library.selection import default_targets, needed_by
from localattn.plugins.library.sidecar import find_library, host_arch
from localattn.plugins.library.tensorrt_provider import rewrite_for_provider
from localattn.runtime import load
from localattn.runtime.backends.onnxruntime.session import open_bytes

from ..conftest import Finished
from ..support.models import node_model
from ..support.models.engine_models import NODES, small_model
from ..support.native.plugin_build import failing_compiler, without_zig

Call = Callable[..., Finished]
MASKED = NodeVariant(has_mask=True, has_bias=False, has_xpos=False)
XPOS = NodeVariant(has_mask=False, has_bias=False, has_xpos=True)
WINDOW = NodeAttributes(WindowGeometry(32, 1, 0, causal=True), 0.25, query_block=32)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no settings of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CXX", "TENSORRT_ROOT", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One attention node with a key mask, heads of 32, in fp16."""
    monkeypatch.setattr(node_model, "HEAD_DIM", 32)
    path = tmp_path / "masked.onnx"
    onnx.save(node_model.one_node(MASKED, WINDOW, 64, dtype="fp16"), str(path))
    return path


def test_from_model_to_library_and_back(localattn: Call, model: Path, own_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton compiles the kernels")
    built = localattn("plugin", "build", model, "--target", "8.6", "--format", "json")
    assert built.code == 0, built.err
    sidecar = json.loads(built.out)
    path = Path(sidecar["path"])
    assert path.is_relative_to(own_cache) and path.is_file()
    [kernel] = sidecar["kernels"]
    assert (kernel["op_type"], kernel["dtype"], kernel["head_dim"]) == ("WindowedAttentionMask", "fp16", 32)
    assert (kernel["machine_code"], kernel["ptx"]) == (["sm_86"], ["sm_86"])

    # The same again is there already; other targets are not.
    again = localattn("plugin", "build", model, "--target", "sm_86")
    assert again.code == 0 and "up to date" in again.err
    assert up_to_date(path, needed_by(model), default_targets(host_arch()), host_arch()) is None

    assert localattn("plugin", "path").out == f"{path}\n"
    assert json.loads(localattn("plugin", "path", "--format", "json").out)["sha256"] == sidecar["sha256"]
    listed = localattn("plugin", "list")
    assert str(path) in listed.out and "WindowedAttentionMask" in listed.out and "sm_86" in listed.out
    assert json.loads(localattn("plugin", "list", "--format", "json").out) == [sidecar]

    # A file at a path that the user chose is kept without --force.
    output = tmp_path / "mine.so"
    shutil.copy(path, output)
    refused = localattn("plugin", "build", model, "--target", "sm_86", "-o", output)
    assert refused.code == 2 and "--force" in refused.err
    output.write_text("mine")
    refused = localattn("plugin", "build", model, "--target", "sm_86", "-o", output, "--force")
    assert refused.code == 2 and "It is a text" in refused.err and output.read_text() == "mine"
    shutil.copy(path, output)
    assert localattn("plugin", "build", model, "--target", "sm_86", "-o", output, "--force").code == 0
    assert localattn("plugin", "path").out == f"{path}\n", "one that lies elsewhere is used when it is named"

    specs, gpu = needed_by(model), TARGETS["sm_89"]
    found = find_library(host_arch(), specs, [gpu])
    assert found is not None and found.path == path, "PTX of 8.6 runs there"
    assert find_library(host_arch(), specs, [TARGETS["sm_80"]]) is None
    assert find_library(host_arch(), full_set(["fp16"], [64]), [gpu]) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LibraryKind, "fingerprint", lambda _: "another release")
        assert find_library(host_arch(), specs, [gpu]) is None

    path.write_bytes(path.read_bytes() + b"!")
    changed = localattn("plugin", "path")
    assert changed.code == 1 and "changed after it was built" in changed.err


def test_check_shows_what_tensorrt_sees(localattn: Call, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is the TensorRT of these tests")
    pytest.importorskip("triton", reason="triton compiles the kernels")
    assert localattn("plugin", "build", model, "--target", "sm_86").code == 0
    import localattn as package

    (tmp_path / "import").mkdir()
    (tmp_path / "import" / "localattn").symlink_to(Path(package.__file__).parent)
    command = [sys.executable, "-m", "localattn.cli", "plugin", "check", "--backend", "tensorrt-rtx"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "import")}
    for options in ([], ["--format", "json"]):
        finished = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        if options:
            found = json.loads(finished.stdout)
            assert [creator["name"] for creator in found["creators"]] == sorted(SERVED_OP_TYPES)
        else:
            assert "WindowedAttentionMaskBias  version 1, namespace localattn" in finished.stdout
            assert "window_size INT32" in finished.stdout and "perm INT32[4]" in finished.stdout
            assert "softcap FLOAT32" in finished.stdout and "xpos_scale_base FLOAT32" in finished.stdout


def test_without_a_library(localattn: Call) -> None:
    for verb in ("path", "check"):
        finished = localattn("plugin", verb)
        assert finished.code == 3 and "localattn plugin build --arch" in finished.err
    listed = localattn("plugin", "list")
    assert listed.code == 0 and "no plugin library in your cache" in listed.out
    assert json.loads(localattn("plugin", "list", "--format", "json").out) == []


def test_check_without_tensorrt(localattn: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, None)
    library = tmp_path / "some.so"
    machine = {"x86_64": 62, "aarch64": 183}
    library.write_bytes(b"\x7fELF" + bytes(14) + machine[host_arch()].to_bytes(2, "little"))
    finished = localattn("plugin", "check", library)
    assert finished.code == 3
    for extra in ("tensorrt", "rtx"):
        assert as_installed(f"pip install 'localattn[{extra}]'") in finished.err
    other = next(number for arch, number in machine.items() if arch != host_arch())
    library.write_bytes(b"\x7fELF" + bytes(14) + other.to_bytes(2, "little"))
    foreign = localattn("plugin", "check", library)
    assert foreign.code == 2 and "on the device it was built for" in foreign.err
    library.write_bytes(b"text")
    assert localattn("plugin", "check", library).code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "sm_75"], "Triton cannot use its tensor cores"),
        (["--target", "sm_99"], "There is no GPU target 'sm_99'"),
        (["--arch", "riscv64"], "Unknown processor 'riscv64'"),
        (["--dtype", "int8"], "no attention kernel for element type 'int8'"),
        (["--head-dim", "512"], "no attention kernel for head size 512"),
        (["--head-dim", "wide"], "not a list of numbers"),
        (["--fp32-products", "tf32"], "--fp32-products tf32 needs --output"),
    ],
)
def test_wrong_options(options: list[str], message: str, localattn: Call) -> None:
    finished = localattn("plugin", "build", *options)
    assert finished.code == 2 and message in finished.err


def test_model_and_sizes_exclude_each_other(localattn: Call, model: Path) -> None:
    finished = localattn("plugin", "build", model, "--dtype", "fp16")
    assert finished.code == 2 and "cannot be combined with models" in finished.err


@pytest.mark.parametrize(
    ("variable", "code", "message"),
    [
        ("TENSORRT_ROOT", 3, "TensorRT's C++ headers are missing"),
        ("CUDA_HOME", 3, "CUDA's header cuda_runtime_api.h is missing"),
        ("CXX", 2, "The compiler /nowhere cannot be found"),
        ("PATH", 3, "There is no C++ compiler"),
    ],
)
def test_what_is_missing_is_named(
    variable: str, code: int, message: str, localattn: Call, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "/nowhere")
    without_zig(monkeypatch)
    finished = localattn("plugin", "build", model)
    assert finished.code == code and message in finished.err


def test_a_failed_build_leaves_nothing(
    localattn: Call, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="triton compiles the kernels")
    monkeypatch.setenv("CXX", str(failing_compiler(tmp_path, "plugin.cpp")))
    folder = tmp_path / "out"
    folder.mkdir()
    finished = localattn("plugin", "build", model, "--target", "sm_86", "-o", folder / "library.so")
    assert finished.code == 5 and "this compiler fails" in finished.err and "broken 1" in finished.err
    assert list(folder.iterdir()) == []


def test_models_say_what_they_need(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [spec] = needed_by(model)
    assert (spec.dtype, spec.head_dim) == ("fp16", 32) and "WindowedAttentionMask" in spec.op_types
    monkeypatch.setattr(node_model, "HEAD_DIM", 64)
    dynamic_sizes = tmp_path / "open.onnx"
    onnx.save(node_model.one_node(VARIANTS[0], WINDOW, "n", "b"), str(dynamic_sizes))
    [spec] = needed_by(dynamic_sizes)
    assert (spec.dtype, spec.head_dim, spec.has_mask, spec.has_bias) == ("fp32", 64, False, False)


def test_xpos_needs_a_kernel_of_its_own(localattn: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_model, "HEAD_DIM", 64)
    attributes = NodeAttributes(WindowGeometry(32, 1, 0, causal=True), 0.25, query_block=32, xpos_scale_base=16)
    path = tmp_path / "xpos.onnx"
    onnx.save(node_model.one_node(XPOS, attributes, 64), str(path))
    assert [spec.name for spec in needed_by(path)] == ["localattn_fp32_d64_xpos"]
    small = tmp_path / "small.onnx"
    onnx.save(node_model.one_node(XPOS, replace(attributes, xpos_scale_base=0.5), 64), str(small))
    finished = localattn("plugin", "build", small)
    assert finished.code == 2 and "its xpos base is 0.5" in finished.err


def test_rewrite_keeps_what_no_kernel_computes(
    localattn: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_model, "HEAD_DIM", 64)
    small, both, output = tmp_path / "small.onnx", tmp_path / "both.onnx", tmp_path / "provider.onnx"
    attributes = NodeAttributes(WindowGeometry(32, 1, 0, causal=True), 0.25, query_block=32, xpos_scale_base=0.5)
    proto = node_model.one_node(XPOS, attributes, 64)
    onnx.save(proto, str(small))
    refused = localattn("plugin", "rewrite", small, "-o", output)
    assert refused.code == 2 and "its xpos base is 0.5" in refused.err

    [first] = proto.graph.node
    second = proto.graph.node.add()
    second.CopyFrom(first)
    first.name, second.name, second.output[0] = "too_small", "served", "second"
    [base] = [attribute for attribute in second.attribute if attribute.name == "xpos_scale_base"]
    base.f = 16
    proto.graph.output.add().CopyFrom(proto.graph.output[0])
    proto.graph.output[1].name = "second"
    onnx.save(proto, str(both))
    shown = localattn("plugin", "rewrite", both, "-o", output)
    assert (
        shown.code == 0
        and "kept    too_small as an ONNX function: no kernel computes it: its xpos base is 0.5" in shown.out
    )
    after = onnx.load(str(output))
    assert [node.name for node in after.graph.node if node.domain] == ["served"] and not after.functions

    monkeypatch.setattr(node_model, "HEAD_DIM", 300)
    onnx.save(node_model.one_node(VARIANTS[0], WINDOW, 64), str(small))
    for command in (("rewrite", small, "-o", tmp_path / "wide.onnx"), ("build", small)):
        assert localattn("plugin", *command).code == 2
    assert "its head size is 300; kernels support 16 to 256" in localattn("plugin", "build", small).err


def test_full_set() -> None:
    specs = full_set()
    assert len(specs) == len(set(specs)) == 102
    served = {name for spec in full_set(["bf16"], [80]) for name in spec.op_types}
    assert served == {node.op_type for node in SERVED}


def test_rewrite_for_onnxruntimes_provider(localattn: Call, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "provider.onnx"
    finished = localattn("plugin", "rewrite", model, "-o", output, "--format", "json")
    assert finished.code == 0, finished.err
    answer = json.loads(finished.out)
    before, after = onnx.load(str(model)), onnx.load(str(output))
    [old], [new] = before.graph.node, after.graph.node
    assert answer["nodes"] == [new.name or new.output[0]] and answer["kept"] == {}
    assert (new.domain, new.op_type) == ("trt.plugins", old.op_type)
    assert list(new.input) == list(old.input) and list(new.attribute) == list(old.attribute)
    assert len(before.functions) == 1 and not after.functions
    assert {entry.domain for entry in after.opset_import} == {"", "trt.plugins"}
    assert localattn("plugin", "rewrite", model, "-o", output).code == 2
    shown = localattn("plugin", "rewrite", model, "-o", output, "--force")
    assert shown.code == 0 and "load_library" in shown.out
    assert localattn("plugin", "rewrite", output, "-o", tmp_path / "twice.onnx").code == 2


def test_rewrite_leaves_no_function(tmp_path: Path) -> None:
    """The provider takes none. Given its body again, the file computes what it did."""
    model, output = small_model(), tmp_path / "provider.onnx"
    moved = rewrite_for_provider(model, output)
    before, after = onnx.load(str(model)), onnx.load(str(output))
    assert {body.domain for body in before.functions} == {"localattn", "localattn.fused"} and not after.functions
    assert sorted({node.domain for node in after.graph.node}) == ["", "trt.plugins"]
    assert {entry.domain for entry in after.opset_import} == {"", "trt.plugins"}
    assert moved.nodes == [node.name for node in after.graph.node if node.domain] and len(moved.nodes) == NODES
    for node in after.graph.node:
        node.domain = node.domain and "localattn"
    after.functions.extend(before.functions)
    del after.opset_import[:]
    after.opset_import.extend(before.opset_import)
    tokens = {"tokens": np.random.default_rng(0).integers(0, 23, (1, 64))}
    expected = load(model, "cpu", plugin="none").run(tokens)
    actual = open_bytes(after.SerializeToString(), "cpu").run(tokens)
    np.testing.assert_array_equal(actual["logits"], expected["logits"])


def test_rewrite_keeps_weights_findable(localattn: Call, model: Path, tmp_path: Path) -> None:
    proto = onnx.load(str(model))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(4096, np.float32), "w"))
    outside = tmp_path / "outside.onnx"
    onnx.save(proto, str(outside), save_as_external_data=True, location="outside.data", size_threshold=0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    finished = localattn("plugin", "rewrite", outside, "-o", elsewhere / "out.onnx")
    assert finished.code == 2 and "would not find the weights" in finished.err
    assert localattn("plugin", "rewrite", outside, "-o", tmp_path / "out.onnx").code == 0
    assert onnx.load(str(tmp_path / "out.onnx")).graph.initializer[0].name == "w"
