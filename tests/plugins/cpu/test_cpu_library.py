"""The library of compiled CPU kernels: what it links and exports, its sidecar, its commands, and fallbacks."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from localattn.core.errors import CheckFailed, MissingDependency, UsageError
from localattn.core.machine.processor import ARCHITECTURES, Arch, host_arch
from localattn.core.storage.library_store import (
    CPU_KERNELS,
    candidates,
    find,
    prepare_cache,
    read_library_sidecar,
    read_named,
)
from localattn.plugins.cpu.build import up_to_date
from localattn.plugins.cpu.check import check_library
from localattn.plugins.cpu.sidecar import parse_sidecar
from localattn.runtime.backends.onnxruntime import custom_ops

from ...conftest import Finished
from ...support.models.engine_models import small_model
from ...support.native.cpu_build import built, library, put_into_cache
from ...support.native.plugin_build import failing_compiler, without_zig

Call = Callable[..., Finished]
NODES = [("localattn", "WindowedAttention")]
EVERY_KERNEL = {
    "WindowedAttention": ["fp32", "fp16"],
    "WindowedAttentionMask": ["fp32", "fp16"],
    "WindowedAttentionBias": ["fp32", "fp16"],
    "WindowedAttentionMaskBias": ["fp32", "fp16"],
    "WindowedAttentionXpos": ["fp32", "fp16"],
    "WindowedAttentionMaskXpos": ["fp32", "fp16"],
    "WindowedAttentionBiasXpos": ["fp32", "fp16"],
    "WindowedAttentionMaskBiasXpos": ["fp32", "fp16"],
    **{
        f"{base}{mask}{cap}{sinks}": ["fp32", "fp16"]
        for base in ("GroupedWindowedAttention", "GlobalAttention")
        for mask in ("", "Mask")
        for cap in ("", "Softcap")
        for sinks in ("", "Sinks")
    },
    **{f"WindowedAttention{kind}{xpos}": ["fp32", "fp16"] for kind in ("Step", "Chunk") for xpos in ("", "Xpos")},
    **{
        f"GroupedWindowedAttention{kind}{cap}{sinks}": ["fp32", "fp16"]
        for kind in ("Step", "Chunk")
        for cap in ("", "Softcap")
        for sinks in ("", "Sinks")
    },
    "AFTLocal": ["fp32"],
    "AFTLocalMask": ["fp32"],
    "AFTLocalCausal": ["fp32"],
    "AFTLocalCausalMask": ["fp32"],
    "ReadStreams": ["fp32"],
    "ReadStreamsNorm": ["fp32"],
    "MixStreams": ["fp32"],
    "MixReadStreamsNorm": ["fp32"],
    "AddToStreams": ["fp32"],
    "BeginStreams": ["fp32"],
    "EndStreams": ["fp32"],
    "RotateHeads": ["fp32", "fp16"],
    "RotatePairs": ["fp32", "fp16"],
    "GatedGelu": ["fp32", "fp16"],
    "GatedGeluTanh": ["fp32", "fp16"],
    "GatedSilu": ["fp32", "fp16"],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, no compiler of the user's, and every warning is new."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(custom_ops, "_said", set())
    return tmp_path / "cache"


@pytest.fixture
def copy() -> Path:
    """A copy of this machine's library with its sidecar, in the cache."""
    return put_into_cache()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_links_the_system_only_and_exports_two_functions(arch: Arch) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf (package binutils) reads the library")
    path = str(built(arch).path)

    def readelf(*options: str) -> str:
        return subprocess.run(["readelf", "-W", *options, path], capture_output=True, text=True, check=True).stdout

    needed = set(re.findall(r"NEEDED\).*\[(.+)\]", readelf("-d")))
    assert {name for name in needed if not name.startswith("ld-linux")} <= {"libc.so.6", "libgcc_s.so.1", "libm.so.6"}
    symbols = [line.split() for line in readelf("--dyn-syms").splitlines() if re.match(r"\s*\d+:", line)]
    exported = {row[7] for row in symbols if row[4] in ("GLOBAL", "WEAK") and row[6] != "UND"}
    assert exported == {"RegisterCustomOps", "localattn_instruction_set"}
    assert {"x86_64": "X86-64", "aarch64": "AArch64"}[arch] in readelf("-h")


def test_the_sidecar_says_what_was_built() -> None:
    sidecar = built(host_arch())
    assert parse_sidecar(read_library_sidecar(CPU_KERNELS, sidecar.path), sidecar.path) == sidecar
    assert sidecar.bytes == sidecar.path.stat().st_size and re.fullmatch(r"\d+\.\d+", sidecar.glibc)
    assert sidecar.kernels == EVERY_KERNEL
    assert up_to_date(sidecar.path, host_arch()) is None, "only what is built in the cache is built again there"
    kept = put_into_cache()
    assert up_to_date(kept, host_arch()) == replace(sidecar, path=kept)
    assert up_to_date(kept, next(arch for arch in ARCHITECTURES if arch != host_arch())) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "localattn-plugin"}', '{"format": "localattn-onnxruntime"}']
)
def test_a_sidecar_that_is_none(text: str, copy: Path) -> None:
    copy.with_name(copy.name + ".json").write_text(text)
    with pytest.raises(UsageError, match="does not describe a library"):
        read_named(CPU_KERNELS, copy)
    found = find(CPU_KERNELS)
    assert found is not None and found.path == copy, "the index says what is in the cache"


def test_check_runs_every_kernel() -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime opens the library")
    checked = check_library(read_named(CPU_KERNELS, Path(library())))
    assert checked.kernels == EVERY_KERNEL
    assert checked.instruction_set in ("avx512", "avx2", "neon", "baseline")


def test_from_build_to_check(localattn: Call, own_cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime opens the library")
    for verb in ("path", "check"):
        missing = localattn("plugin", verb, "--backend", "onnxruntime")
        assert missing.code == 3 and "plugin build --backend onnxruntime" in missing.err
    # What is there already, as this release makes it, is not built again.
    there = put_into_cache()
    assert there == prepare_cache(host_arch()) / CPU_KERNELS.file_name and there.is_relative_to(own_cache)
    again = localattn("plugin", "build", "--backend", "onnxruntime", "--format", "json")
    assert again.code == 0 and "up to date" in again.err
    sidecar = json.loads(again.out)
    assert sidecar["path"] == str(there) and sidecar["format"] == "localattn-onnxruntime"

    assert localattn("plugin", "path", "--backend", "onnxruntime").out == f"{there}\n"
    listed = localattn("plugin", "list")
    assert str(there) in listed.out and "OLD" not in listed.out
    assert all(op_type in listed.out for op_type in EVERY_KERNEL)
    assert json.loads(localattn("plugin", "list", "--format", "json").out) == [sidecar]
    for arguments in (["--backend", "onnxruntime"], [there]):
        shown = localattn("plugin", "check", *arguments)
        assert shown.code == 0 and "WindowedAttentionMask  ran in fp32, fp16" in shown.out
        assert "EndStreams  ran in fp32\n" in shown.out and "GatedGelu  ran in fp32, fp16\n" in shown.out
    answer = json.loads(localattn("plugin", "check", there, "--format", "json").out)
    assert answer["backend"] == "onnxruntime" and answer["kernels"] == EVERY_KERNEL

    with mock.patch.object(type(CPU_KERNELS), "fingerprint", lambda _: "another release"):
        assert find(CPU_KERNELS) is None, "sessions take this release's only"
        assert "OLD" in localattn("plugin", "list").out
    altered = there.read_bytes() + b"!"
    there.unlink()  # the one that is loaded here stays as it is
    there.write_bytes(altered)
    for verb in ("path", "check"):
        changed = localattn("plugin", verb, "--backend", "onnxruntime")
        assert changed.code == 1 and "changed after it was built" in changed.err

    output = tmp_path / "mine.so"
    output.write_text("mine")
    refused = localattn("plugin", "build", "--backend", "onnxruntime", "-o", output)
    assert refused.code == 2 and "--force" in refused.err and output.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--target", "sm_86"], 2, "--target cannot be combined with --backend onnxruntime"),
        (["model.onnx", "--dtype", "fp16"], 2, "Models and --dtype cannot be combined"),
        (["--arch", "riscv64"], 2, "Unknown processor 'riscv64'"),
    ],
)
def test_wrong_options(arguments: list[str], code: int, message: str, localattn: Call) -> None:
    finished = localattn("plugin", "build", "--backend", "onnxruntime", *arguments)
    assert finished.code == code and message in finished.err
    unknown = localattn("plugin", "build", "--backend", "openvino")
    assert unknown.code == 2 and "'openvino' is not one of" in " ".join(unknown.err.split())


def test_a_failed_build_leaves_nothing(localattn: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(failing_compiler(tmp_path, "operators.cpp")))
    folder = tmp_path / "out"
    folder.mkdir()
    finished = localattn("plugin", "build", "--backend", "onnxruntime", "-o", folder / "library.so")
    assert finished.code == 5 and "this compiler fails" in finished.err and "broken 1" in finished.err
    assert list(folder.iterdir()) == []
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX")
    without_zig(monkeypatch)
    assert localattn("plugin", "build", "--backend", "onnxruntime").code == 3


def test_commands_say_in_one_line_which_kernels_are_in_use(localattn: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime opens the library")
    model = small_model()

    def said(*command: object) -> str:
        finished = localattn(*command)
        assert finished.code == 0, finished.err
        (line,) = (line for line in (finished.out + finished.err).splitlines() if line.startswith("Kernels: "))
        return line

    adding = "Kernels: none, ONNX functions compute the attention. To add them: "
    assert said("run", model) == f"{adding}localattn plugin build --backend onnxruntime"
    with monkeypatch.context() as bare:
        bare.setenv("PATH", "/nowhere")
        without_zig(bare)
        line = said("run", model)
        assert "[compiler]" in line and line.endswith("&& localattn plugin build --backend onnxruntime")
    there = put_into_cache()
    assert said("run", model) == f"Kernels: compiled, {there}"
    quickly = ("--iterations", 2, "--rounds", 3, "--duration", 0, "--warmup", 1)
    assert said("bench", model, *quickly) == f"Kernels: compiled, {there.name}"


def test_a_compiler_that_makes_nothing(localattn: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lazy = failing_compiler(tmp_path, "operators.cpp")
    lazy.write_text(lazy.read_text().replace("exit 1", "exit 0"))
    monkeypatch.setenv("CXX", str(lazy))
    finished = localattn("plugin", "build", "--backend", "onnxruntime", "-o", tmp_path / "library.so")
    assert finished.code == 5 and "produced no library" in finished.err
    monkeypatch.setenv("CXX", "'")
    finished = localattn("plugin", "build", "--backend", "onnxruntime", "-o", tmp_path / "library.so")
    assert finished.code == 2 and "CXX is not a valid command" in finished.err


def test_auto_takes_a_sound_library_only(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = custom_ops.choose("auto", NODES)
    assert chosen is not None and chosen.library.path == copy and not chosen.asked
    assert custom_ops.choose("none", NODES) is None
    for foreign in (("localattn", "AFTLocalStep"), ("", "WindowedAttention"), ("localattn", "RotateHeads")):
        assert custom_ops.choose("auto", [foreign]) is None
    assert custom_ops.choose("auto", []) is None
    assert custom_ops.choose("auto", [("localattn.fused", "RotateHeads")]) == chosen, "one without attention nodes"
    copy.write_bytes(copy.read_bytes()[:-1])
    assert custom_ops.choose("auto", NODES) is None and custom_ops.choose("auto", NODES) is None
    assert capsys.readouterr().err.count("was changed after it was built") == 1, "said once"
    with pytest.raises(CheckFailed, match="changed after it was built"):
        custom_ops.choose(str(copy), NODES)


def test_paths_that_lead_to_no_library(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime opens the library")
    import onnxruntime as ort

    other = next(arch for arch in ARCHITECTURES if arch != host_arch())
    foreign, text, empty = tmp_path / "foreign.so", tmp_path / "text.so", tmp_path / "empty.so"
    machine = {"x86_64": 62, "aarch64": 183}
    foreign.write_bytes(b"\x7fELF" + bytes(14) + machine[other].to_bytes(2, "little"))
    text.write_text("text")
    for path, message in (
        (tmp_path / "gone.so", "cannot be read"),
        (text, "is no shared library|is not a shared library"),
        (foreign, f"is for {other} processors"),
    ):
        with pytest.raises(UsageError, match=message):
            custom_ops.choose(str(path), NODES)
    empty.write_bytes(b"\x7fELF" + bytes(14) + machine[host_arch()].to_bytes(2, "little"))
    chosen = custom_ops.choose(str(empty), NODES)
    assert chosen is not None and chosen.asked
    with pytest.raises(MissingDependency, match="cannot be loaded into onnxruntime") as caught:
        chosen.register(ort, ort.SessionOptions())
    assert "plugin build --backend onnxruntime" in caught.value.fix
    assert str(empty) in caught.value.why and "/proc/" not in caught.value.why


def test_doctor_shows_it(copy: Path) -> None:
    from localattn.commands.doctor import _cpu_library_probe
    from localattn.doctor.run_probes import look_at

    found = look_at(_cpu_library_probe())
    assert found.status == "ok" and str(copy) in found.detail
    copy.write_bytes(b"other")
    changed = look_at(_cpu_library_probe())
    assert changed.status == "broken" and "changed after it was built" in changed.detail
    assert changed.add == "localattn plugin build --backend onnxruntime"
    copy.unlink()
    missing = look_at(_cpu_library_probe())
    assert missing.detail.endswith("To add them: localattn plugin build --backend onnxruntime")
    assert missing.status == "missing" and "only when named" in missing.detail
    assert list(candidates(CPU_KERNELS)) == []


def test_an_onnxruntime_that_is_too_old_is_told_so() -> None:
    said: list[bytes] = []
    Status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    GetApi = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    GetVersion = ctypes.CFUNCTYPE(ctypes.c_void_p)

    class Base(ctypes.Structure):
        _fields_ = (("get_api", GetApi), ("get_version", GetVersion))

    create_status = Status(lambda code, message: said.append(message) or 1)  # type: ignore[func-returns-value]
    oldest = (ctypes.c_void_p * 102)(ctypes.cast(create_status, ctypes.c_void_p))
    version = ctypes.create_string_buffer(b"1.16.3")
    base = Base(
        GetApi(lambda wanted: ctypes.addressof(oldest) if wanted <= 16 else None),
        GetVersion(lambda: ctypes.addressof(version)),
    )
    register = ctypes.CDLL(library()).RegisterCustomOps
    register.restype, register.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_void_p)
    assert register(None, ctypes.byref(base)) == 1
    assert said == [b"onnxruntime 1.16.3 is too old for the kernels of localattn: they need 1.17"]
