"""The plugin library: what it links and exports, what it launches, what it says; on both processors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import localattn
from localattn.core.errors import CheckFailed
from localattn.core.nodes.attention import SEQUENCE_FIRST
from localattn.core.storage.library_store import TENSORRT_PLUGIN, read_library_sidecar, read_named
from localattn.plugins.kernel.compile import compile_kernel
from localattn.plugins.kernel.spec import KernelSpec, grid, pack_scalars
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.library.sidecar import ARCHITECTURES, Arch, host_arch, parse_sidecar
from localattn.runtime.backends.tensorrt.kernels import RING_KERNELS

from ...support.native.plugin_build import (
    DTYPE,
    FP8,
    HEAD_DIM,
    RINGS,
    compiler,
    library,
    program,
    stand_in_driver,
)
from ...support.native.plugin_drive import (
    AFT_OP_TYPES,
    BATCH,
    CASES,
    GROUP,
    GROUPED,
    HEADS,
    INPUT_GAP,
    LENGTH,
    OP_TYPES,
    OUTPUT,
    WINDOW,
    attributes_for,
    drive,
    fields_of,
    spec_of,
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_links_no_nvidia_library_and_exports_its_functions_alone(arch: Arch) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf (package binutils) reads the library")
    sidecar = library(arch)

    def readelf(*options: str) -> str:
        return subprocess.run(
            ["readelf", "-W", *options, str(sidecar.path)], capture_output=True, text=True, check=True
        ).stdout

    needed = set(re.findall(r"NEEDED\).*\[(.+)\]", readelf("-d")))
    assert needed <= {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "libdl.so.2"} | {
        name for name in needed if name.startswith("ld-linux")
    }
    symbols = [line.split() for line in readelf("--dyn-syms").splitlines() if re.match(r"\s*\d+:", line)]
    exported = {row[7] for row in symbols if row[4] in ("GLOBAL", "WEAK") and row[6] != "UND"}
    own = {"localattn_registrations", "localattn_loaded_kernels", "localattn_load_kernel_with"}
    assert exported == {"getCreators", "setLoggerFinder", *own}
    machine = {"x86_64": "X86-64", "aarch64": "AArch64"}[arch]
    assert machine in readelf("-h")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_sidecar_tells_what_is_inside(arch: Arch) -> None:
    sidecar = library(arch)
    assert sidecar.path is not None
    assert parse_sidecar(read_library_sidecar(TENSORRT_PLUGIN, sidecar.path), sidecar.path) == sidecar
    (fp8,) = (kernel for kernel in sidecar.kernels if kernel.dtype == "fp8")
    assert fp8.is_of(FP8) and (fp8.machine_code, fp8.ptx) == ([], ["sm_89"]) and not fp8.runs_on(87)
    wider = [kernel for kernel in sidecar.kernels if kernel is not fp8]
    ordinary = [kernel for kernel in wider if not kernel.has_shared_qk and kernel.node not in RING_KERNELS]
    assert sorted(name for kernel in ordinary for name in kernel.op_types) == sorted([*OP_TYPES, *AFT_OP_TYPES])
    assert [(k.node, k.head_dim) for k in sidecar.kernels if k.node in RING_KERNELS] == [
        (spec.node, spec.head_dim) for spec in RINGS
    ]
    for kernel in wider:
        aft, ring = kernel.node == "gated_mean", kernel.node in RING_KERNELS
        widths = ("fp32", 0) if aft else (DTYPE, 0 if kernel.node == "join" else HEAD_DIM)
        assert (kernel.dtype, kernel.head_dim) == widths
        rare = aft or ring or kernel.has_xpos or kernel.has_softcap or kernel.has_sinks or kernel.has_shared_qk
        assert (kernel.machine_code, kernel.ptx) == (["sm_86"] if rare else ["sm_86", "sm_90"], ["sm_86"])
        assert kernel.runs_on(87) and kernel.runs_on(90) and kernel.runs_on(121) and not kernel.runs_on(80)
    # Ubuntu 22.04, which JetPack 6 is, has 2.35.
    assert tuple(map(int, sidecar.glibc.split("."))) <= (2, 35)
    wanted = KernelSpec("bf16", HEAD_DIM)
    assert sidecar.missing([wanted], [TARGETS["sm_86"]]) == [wanted.name]
    here = KernelSpec(DTYPE, HEAD_DIM)
    assert sidecar.missing([here], [TARGETS["sm_80"], TARGETS["sm_120"]]) == [f"{here.name} on sm_80"]


def test_a_changed_library_is_noticed(tmp_path: Path) -> None:
    sidecar = library(host_arch())
    assert sidecar.path is not None
    copy = tmp_path / "copy.so"
    copy.write_bytes(sidecar.path.read_bytes() + b"!")
    copy.with_name("copy.so.json").write_text(sidecar.to_json())
    with pytest.raises(CheckFailed, match="changed after it was built"):
        read_named(TENSORRT_PLUGIN, copy)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("op_type", "case"),
    [(name, case) for name in OP_TYPES[:4] for case in CASES]
    + [(name, list(CASES)[index % len(CASES)]) for index, name in enumerate(OP_TYPES[4:])],
)
def test_launch_has_the_arguments_of_the_contract(case: str, op_type: str, arch: Arch, tmp_path: Path) -> None:
    attributes = attributes_for(op_type, CASES[case])
    sequence_first = attributes.perm == SEQUENCE_FIRST
    shape = (BATCH, LENGTH, HEADS, HEAD_DIM) if sequence_first else (BATCH, HEADS, LENGTH, HEAD_DIM)
    kv_heads = HEADS // GROUP if op_type in GROUPED else HEADS
    driven = drive(tmp_path, op_type, fields_of(attributes), arch=arch, shape=shape, drive_kv_heads=str(kv_heads))
    spec = spec_of(op_type, attributes)
    compiled = compile_kernel(spec, TARGETS["sm_86"])
    expected = {
        "call": "launch",
        "entry": spec.name,
        "ptx": False,
        "grid": list(grid(compiled.tile, LENGTH, BATCH * HEADS)),
        "block": [compiled.threads, 1, 1],
        "shared": compiled.shared_bytes,
        "stream": 0x55,
        "extra": False,
        "inputs": [INPUT_GAP * (i + 1) for i in range(len(spec.inputs))],
        "scalars": list(pack_scalars(attributes, LENGTH, HEADS, kv_heads)),
        "output": OUTPUT,
        "context": 0x1000,
        "capture_mode": 0,
    }
    assert driven.launches == [expected, expected]
    assert len(driven.loads) == 1, "the second launch uses the loaded kernel"
    assert driven.shown["enqueue"] == [0, 0]
    assert all(driven.shown["supported"]) and driven.shown["configure"] == 0


def test_aft_local_refuses_shapes_that_do_not_fit(tmp_path: Path) -> None:
    for bias, why in (("75,12", "with an odd number of columns"), ("74,13", r"it must be \[length, columns\] of gate")):
        driven = drive(tmp_path, "AFTLocal", [], dtype="fp32", shape=(75, 2, 37), drive_bias=bias)
        assert driven.shown["configure"] == -1 and driven.shown["shape_change"] == -1
        assert re.search(f"AFTLocal: position_bias is .*{why}", driven.messages)
    driven = drive(tmp_path, "AFTLocal", [], dtype="fp16", shape=(75, 2, 37), drive_bias="75,13")
    assert not driven.shown["supported"][0]
    assert "no kernel for fp16, AFT-local in this plugin library" in driven.messages


def test_attributes_survive_serialisation(tmp_path: Path) -> None:
    attributes = CASES["block-local"]
    fields = drive(tmp_path, fields=fields_of(attributes), shape=(1, 2, 50, HEAD_DIM)).shown["fields"]
    expected = {name: value if isinstance(value, list) else [value] for name, value in attributes.as_onnx().items()}
    assert set(expected) - set(fields) == {"query_block", "xpos_scale_base", "plugin_namespace", "plugin_version"}
    for name, values in fields.items():
        assert values == pytest.approx(expected[name])


@pytest.mark.parametrize(
    ("capability", "refuse", "loads"),
    [
        (86, "", [False]),
        (90, "", [False]),
        (89, "", [True]),  # no machine code: PTX of 8.6
        (121, "", [True]),
        (86, "cubin", [False, True]),  # the driver does not take the machine code
    ],
)
def test_kernel_fits_the_gpu(capability: int, refuse: str, loads: list[bool], tmp_path: Path) -> None:
    driven = drive(tmp_path, capability=capability, refuse=refuse)
    assert [load["ptx"] for load in driven.loads] == loads
    assert [launch["ptx"] for launch in driven.launches] == loads[-1:] * 2
    assert driven.shown["enqueue"] == [0, 0]


def test_older_gpu_is_told_how_to_build(tmp_path: Path) -> None:
    driven = drive(tmp_path, capability=80)
    assert driven.shown["enqueue"] == [-1, -1] and not driven.launches
    assert "compute capability 8.0" in driven.messages
    assert "localattn plugin build --target sm_80 --dtype fp16 --head-dim 64" in driven.messages


def test_driver_that_takes_nothing_is_quoted(tmp_path: Path) -> None:
    driven = drive(tmp_path, refuse="all")
    assert driven.shown["enqueue"] == [-1, -1] and not driven.launches
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU (209): no kernel image is available" in driven.messages


def test_without_a_driver_it_loads_and_says_so_when_it_runs(tmp_path: Path) -> None:
    driven = drive(tmp_path, driver=False)
    if driven.shown["enqueue"] == [0, 0]:
        pytest.skip("this machine has a CUDA driver")
    assert driven.shown["created"] and driven.shown["shape_change"] == 0
    assert driven.shown["enqueue"] == [-1, -1]
    assert "libcuda.so.1" in driven.messages or "CUDA" in driven.messages


@pytest.mark.parametrize(("tensor", "place"), [("query", 0), ("value", 2), ("output", 3)])
def test_unaligned_tensor_is_copied(tensor: str, place: int, tmp_path: Path) -> None:
    """The kernels read whole vectors: what does not start at one goes through memory in the order of the stream."""
    driven = drive(tmp_path, drive_shift=f"{tensor}=8")
    assert driven.shown["shifted"] == 0
    before, launched = driven.launches[-2:]
    own, used = ([*call["inputs"], call["output"]] for call in (before, launched))
    size = 2 * BATCH * LENGTH * HEADS * HEAD_DIM
    (allocated,) = [call for call in driven.calls if call["call"] == "allocate"]
    (copied,) = [call for call in driven.calls if call["call"] == "copy"]
    (freed,) = [call for call in driven.calls if call["call"] == "free"]
    assert allocated["bytes"] == copied["bytes"] == size
    assert {call["stream"] for call in (allocated, copied, freed)} == {launched["stream"]}
    assert used[place] == allocated["address"] == freed["address"] and used[place] % 16 == 0
    assert used[:place] + used[place + 1 :] == own[:place] + own[place + 1 :]
    there = {"from": own[place] + 8, "to": used[place]} if tensor != "output" else {
        "from": used[place], "to": own[place] + 8}  # fmt: skip
    assert {name: copied[name] for name in ("from", "to")} == there
    order = [call["call"] for call in driven.calls][-4:]
    middle = ["copy", "launch"] if tensor != "output" else ["launch", "copy"]
    assert order == ["allocate", *middle, "free"]
    assert f"{tensor} does not start at a multiple of 16 bytes: it is copied at every call" in driven.messages


def test_unaligned_tensor_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    driven = drive(tmp_path, drive_shift="key=4", fake_cuda_memory="none")
    assert driven.shown["enqueue"] == [0, 0] and driven.shown["shifted"] == -1 and len(driven.launches) == 2
    assert "key does not start at a multiple of 16 bytes, and it cannot be copied: CUDA_ERROR_NOT_" in driven.messages


def test_a_kernel_is_loaded_while_a_graph_is_recorded(tmp_path: Path) -> None:
    driven = drive(tmp_path, fake_cuda_capturing="1")
    assert driven.shown["enqueue"] == [0, 0] and len(driven.loads) == 1
    assert [call["call"] for call in driven.calls if call["call"] == "function_load"] == ["function_load"]
    assert [launch["capture_mode"] for launch in driven.launches] == [0, 0], "as the host left it"


def test_a_thread_without_a_context_takes_that_of_the_stream(tmp_path: Path) -> None:
    driven = drive(tmp_path, fake_cuda_context="none", drive_thread="1")
    assert driven.shown["shape_change"] == 0 and driven.shown["enqueue"] == [0, 0]
    assert "no kernel is loaded yet: no CUDA context is current on this thread" in driven.messages
    assert [launch["context"] for launch in driven.launches] == [0x2000, 0x2000]
    assert [call["call"] for call in driven.calls if call["call"] in ("push", "load", "launch", "pop")] == [
        *("push", "load", "launch", "pop"),
        *("push", "launch", "pop"),
    ]
    assert [call["left"] for call in driven.calls if call["call"] == "pop"] == [0, 0]


def test_a_thread_and_a_stream_without_a_context_are_told(tmp_path: Path) -> None:
    driven = drive(tmp_path, fake_cuda_context="lost")
    assert driven.shown["enqueue"] == [-1, -1] and not driven.launches
    assert "WindowedAttention: asking for the CUDA context: CUDA_ERROR_INVALID_CONTEXT (201)" in driven.messages


def test_sizes_beyond_the_grid_are_refused_with_the_profile(tmp_path: Path) -> None:
    driven = drive(tmp_path, drive_profile=f"40000,{LENGTH},{HEADS},{HEAD_DIM}")
    assert driven.shown["configure"] == -1 and driven.shown["enqueue"] == [0, 0]
    assert "batch times heads is 120000, above 65535" in driven.messages


@pytest.mark.parametrize(
    ("capability", "refuse", "code", "why"),
    [
        (86, "", "machine code of sm_86", ""),
        (89, "", "PTX of sm_86, compiled by the driver for compute capability 8.9", "no machine code of sm_89"),
        (86, "cubin", "PTX of sm_86, compiled by the driver for compute capability 8.6", "CUDA_ERROR_NO_BINARY"),
    ],
)
def test_what_was_loaded_is_told(capability: int, refuse: str, code: str, why: str, tmp_path: Path) -> None:
    driven = drive(tmp_path, capability=capability, refuse=refuse)
    (line,) = driven.shown["kernels"].splitlines()
    assert line.startswith(f"fp16, head size 64: {code}") and why in line
    warned = [text for text in driven.messages.splitlines() if "PTX of sm_86, compiled" in text]
    assert len(warned) == bool(why), "a fall back to PTX is a warning, said once"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window_size": ""}, "attribute window_size is missing"),
        ({"window_size": "0"}, "attribute window_size is 0; it must lie in [1, 2147483647]"),
        ({"look_backward": "-1"}, "attribute look_backward is -1"),
        ({"look_forward": "1"}, "attribute look_forward is 1; a causal window sees no later key"),
        ({"causal": "2"}, "attribute causal is 2"),
        ({"scale": "1"}, "attribute scale must be one float"),
        ({"scale": "nanf"}, "attribute scale is not finite"),
        ({"perm": "0,2,1"}, "attribute perm must be 4 integer(s)"),
        ({"perm": "0,1,3,2"}, "attribute perm must be [0, 2, 1, 3]"),
        ({"window_size": "2000000000"}, "the window has 4000000000 keys; positions are 32 bits wide"),
    ],
)
def test_wrong_attribute_is_named(changed: dict[str, str], message: str, tmp_path: Path) -> None:
    driven = drive(tmp_path, fields=fields_of(WINDOW, **changed))
    assert driven.shown["created"] is False
    assert f"WindowedAttention of node node: {message}" in driven.messages


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("version", "versioned", "logged"),
    [
        (100300, False, True),
        (101601, False, True),
        (110100, True, True),
        (10701, True, True),  # TensorRT-RTX
        (10100, False, False),  # a TensorRT-RTX of which nothing is known: stderr
    ],
)
def test_logger_of_every_release(version: int, versioned: bool, logged: bool, arch: Arch, tmp_path: Path) -> None:
    flags = ["-shared", "-fPIC", f"-DVERSION={version}", f"-Wl,-soname=libtensorrt_{version}.so"]
    tensorrt = program(arch, "fake_tensorrt.cpp", *flags, *["-DVERSIONED"] * versioned)
    driven = drive(tmp_path, fields=fields_of(WINDOW, window_size="0"), arch=arch, tensorrt=tensorrt)
    text = "localattn: WindowedAttention of node node: attribute window_size is 0; it must lie in [1, 2147483647]\n"
    assert driven.messages == ("[logger 1] " if logged else "") + text


def test_missing_kernel_is_named_with_the_command(tmp_path: Path) -> None:
    driven = drive(tmp_path, "WindowedAttentionMask", dtype="bf16")
    assert driven.shown["supported"][0] is False
    assert "no kernel for bf16, head size 64, key mask in this plugin library" in driven.messages
    assert "localattn plugin build --dtype bf16 --head-dim 64" in driven.messages
    # While an engine is built, the head size may not be known yet.
    driven = drive(tmp_path, "WindowedAttentionMask", dtype="bf16", shape=(BATCH, LENGTH, HEADS, -1))
    assert driven.shown["supported"][0] is False
    assert "no kernel for bf16, any head size, key mask in this plugin library" in driven.messages
    assert "localattn plugin build --dtype bf16\n" in driven.messages


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((70000, 8, 1, HEAD_DIM), "batch times heads is 70000, above 65535"),
        ((1, 2**31 - 65, 1, HEAD_DIM), "overflow 32-bit positions"),
        ((1, 8, HEAD_DIM), "query is [1, 8, 64]; it must have 4 dimensions"),
        ((1, 8, 3, HEAD_DIM), "key is [1, 8, 2, 64] and query [1, 8, 3, 64]; they must be equal"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    driven = drive(tmp_path, shape=shape, drive_kv_heads="2" if shape[2] == 3 else str(shape[2]))
    assert driven.shown["shape_change"] == -1
    assert message in driven.messages


@pytest.mark.parametrize(
    ("op_type", "kv_heads", "changed", "message"),
    [
        ("GroupedWindowedAttention", 2, {}, "3 heads of queries cannot share 2 of keys"),
        ("GlobalAttentionSoftcap", 1, {"softcap": "0.0f"}, "attribute softcap is 0.000000; it must be above 0"),
        ("GlobalAttentionSoftcap", 1, {"softcap": ""}, "attribute softcap is missing"),
        ("WindowedAttentionXpos", 3, {"xpos_scale_base": "0.5f"}, "attribute xpos_scale_base is 0.500000; the kernels"),
        ("WindowedAttentionBias", 3, {"window_size": "65536"}, "attn_bias has 8589934592 numbers a head"),
    ],
)
def test_what_only_some_op_types_refuse(
    op_type: str, kv_heads: int, changed: dict[str, str], message: str, tmp_path: Path
) -> None:
    fields = fields_of(attributes_for(op_type, WINDOW), **changed)
    driven = drive(tmp_path, op_type, fields, drive_kv_heads=str(kv_heads))
    assert driven.shown["shape_change"] == -1 if driven.shown["created"] else changed
    assert message in driven.messages


@pytest.mark.parametrize("op_type", ["WindowedAttentionMaskXpos", "GlobalAttentionSoftcap", "GlobalAttentionMaskSinks"])
def test_attributes_of_every_kind_survive_serialisation(op_type: str, tmp_path: Path) -> None:
    attributes = attributes_for(op_type, WINDOW)
    fields = drive(tmp_path, op_type, fields_of(attributes), drive_kv_heads="3").shown["fields"]
    expected = {name: value if isinstance(value, list) else [value] for name, value in attributes.as_onnx().items()}
    omitted = {"query_block", "plugin_namespace", "plugin_version"}
    assert set(expected) - set(fields) == omitted
    for name, values in fields.items():
        assert values == pytest.approx(expected[name])


def test_clean_under_valgrind(tmp_path: Path) -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind watches the memory")
    arch = host_arch()
    sidecar = library(arch)
    environment = os.environ | {"LD_LIBRARY_PATH": str(stand_in_driver(arch)), "FAKE_CUDA_LOG": os.devnull}
    command = ["valgrind", "-q", "--error-exitcode=9", program(arch, "drive.cpp"), sidecar.path]
    command += ["WindowedAttentionMaskBias", DTYPE, f"{BATCH},{LENGTH},{HEADS},{HEAD_DIM}", *fields_of(WINDOW)]
    finished = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("headers", os.environ.get("LOCALATTN_TEST_TENSORRT_HEADERS", "").split(":"))
def test_compiles_with_other_releases(headers: str, arch: Arch, tmp_path: Path) -> None:
    if not headers:
        pytest.skip("LOCALATTN_TEST_TENSORRT_HEADERS lists include folders of further TensorRT releases, with ':'")
    from localattn.plugins.library.headers import find_cuda_headers

    folder = Path(localattn.__path__[0], "plugins/library/source")
    command = [*compiler(arch).command, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    command += ["-Wno-deprecated-declarations", "-fsyntax-only", "-isystem", headers]
    command += ["-isystem", str(find_cuda_headers(arch).folder), f"-I{folder}", *map(str, folder.rglob("*.cpp"))]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
