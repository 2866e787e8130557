"""The wheels of a release: what is in them, for which systems, and that they work where there is no compiler."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from localattn.core.machine.processor import ARCHITECTURES, Arch, host_arch
from localattn.core.storage.library_store import CPU_KERNELS, TENSORRT_PLUGIN
from localattn.core.storage.publishing import sidecar_path
from localattn.plugins.kernel.spec import full_set
from localattn.plugins.kernel.targets import TARGETS
from localattn.plugins.library.sidecar import companion_path
from localattn.release import kernels, plugin_library
from localattn.release.__main__ import build_pure
from localattn.release.checks import Wrong, check_library, check_wheel
from localattn.release.examine import examine
from localattn.release.installed import Environment, NotRight, check_kernels, check_plugin_library
from localattn.release.sbom import with_sbom
from localattn.release.source_file import repeatable
from localattn.release.wheel_file import information, metadata, platform_tag, read, write

from ..support.arm_machine import PYTHON, arm_machine
from ..support.native.cpu_build import built
from .test_release import IGNORED, ROOT

EXPORTS = {"RegisterCustomOps", "localattn_instruction_set"}


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without libraries, built as test_release builds it."""
    pytest.importorskip("build", reason="python -m build builds the wheel")
    folder = tmp_path_factory.mktemp("pure")
    shutil.copytree(ROOT, folder / "tree", ignore=IGNORED)
    return build_pure(folder / "tree", folder)[0]


@pytest.fixture(scope="module", autouse=True)
def zigs_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    """Zig's compiler makes its C++ library once for each system and keeps it from run to run."""
    store = request.config.cache
    assert store is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZIG_GLOBAL_CACHE_DIR", str(store.mkdir("zig")))
        patch.setenv("SOURCE_DATE_EPOCH", "1790000000")
        yield


def lend_packages(environment: Environment) -> None:
    """What the package requires comes from this environment, and not from the network."""
    origins = (importlib.util.find_spec(name).origin for name in ("numpy", "torch"))  # type: ignore[union-attr]
    environment.lend(sorted({Path(str(origin)).parents[1] for origin in origins}))


def installed(wheel: Path, folder: Path, name: str = "localattn") -> Environment:
    """A new environment with what pip takes from the wheel's folder."""
    environment = Environment.create(folder)
    environment.install("--no-index", "--no-deps", "--find-links", str(wheel.parent), name)
    lend_packages(environment)
    return environment


@pytest.fixture(scope="module")
def with_kernels(pure: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the library that this machine's own compiler makes, beside the one without."""
    arch, path = host_arch(), built(host_arch()).path
    folder = tmp_path_factory.mktemp("wheels")
    shutil.copy(pure, folder)
    library = {f"localattn/libraries/{arch}/{file.name}": file.read_bytes() for file in (path, sidecar_path(path))}
    return write(with_sbom({**read(pure), **library}, ()), folder, platform_tag(arch))


def test_a_wheel_lists_its_files_and_is_written_the_same_twice(with_kernels: Path, pure: Path, tmp_path: Path) -> None:
    files = read(with_kernels)
    again = write(dict(reversed(files.items())), tmp_path, platform_tag(host_arch()))
    assert again.name == with_kernels.name and again.read_bytes() == with_kernels.read_bytes()
    with zipfile.ZipFile(with_kernels) as wheel:
        (record,) = (name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
        rows = {row[0]: row for row in csv.reader(wheel.read(record).decode().splitlines())}
        assert set(rows) == set(wheel.namelist())
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert rows[name][1:] == [f"sha256={digest}", str(len(data))], name
    head = files[f"{information(files)}/WHEEL"].decode()
    assert "Root-Is-Purelib: false" in head and f"Tag: py3-none-manylinux2014_{host_arch()}\n" in head
    assert set(read(pure)) < set(files) and metadata(files, "Name") == "localattn"


def test_a_source_distribution_is_written_the_same_twice() -> None:
    def archive(names: list[str], moment: int) -> bytes:
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w:gz") as made:
            for name in names:
                member = tarfile.TarInfo(f"localattn-0/{name}")
                member.size, member.mtime, member.uname = len(name), moment, "somebody"
                made.addfile(member, io.BytesIO(name.encode()))
        return written.getvalue()

    first, second = archive(["a", "b.py"], 1_700_000_000), archive(["b.py", "a"], 1_800_000_000)
    assert first != second and repeatable(first) == repeatable(second)
    with tarfile.open(fileobj=io.BytesIO(repeatable(first))) as read_again:
        found = {member.name: read_again.extractfile(member).read() for member in read_again.getmembers()}  # type: ignore[union-attr]
    assert found == {"localattn-0/a": b"a", "localattn-0/b.py": b"b.py"}


def test_the_document_of_a_wheel_names_what_it_carries(with_kernels: Path) -> None:
    files = read(with_kernels)
    document = json.loads(files[f"{information(files)}/sboms/localattn.cdx.json"])
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["version"] == metadata(files, "Version")
    hashes = {part["name"]: part["hashes"][0]["content"] for part in document["components"] if part["type"] == "file"}
    library = f"localattn/libraries/{host_arch()}/{CPU_KERNELS.file_name}"
    assert {library, "localattn/demo/pybytes_w64.safetensors"} < set(hashes)
    assert all(hashlib.sha256(files[name]).hexdigest() == digest for name, digest in hashes.items())


def test_an_installed_wheel_uses_its_kernels_without_a_compiler(with_kernels: Path, tmp_path: Path) -> None:
    environment = installed(with_kernels, tmp_path / "venv")
    with pytest.raises(OSError):
        environment.run("g++", "--version")
    found = check_kernels(environment)
    library = f"site-packages/localattn/libraries/{host_arch()}/{CPU_KERNELS.file_name}"
    assert found["run"]["plugin"].endswith(library)
    assert found["demo"]["plugin"] == found["run"]["plugin"] == found["checked"]["path"]
    assert [row["plugin"] for row in found["bench"]["rows"]] == [None, CPU_KERNELS.file_name]


@pytest.mark.slow
def test_a_package_without_a_library_is_found_out(pure: Path, tmp_path: Path) -> None:
    environment = installed(pure, tmp_path / "venv")
    with pytest.raises(NotRight, match="There is no library of CPU kernels"):
        check_kernels(environment)
    with pytest.raises(NotRight, match="There is no plugin library"):
        check_plugin_library(environment)
    said = environment.run("localattn", "demo", "--rows", "2", "--max-tokens", "0")
    assert "Kernels: none" in said and "localattn plugin build --backend onnxruntime" in said.splitlines()[-1]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_library_is_read_as_readelf_reads_it(arch: Arch) -> None:
    path = built(arch).path
    found = examine(path.read_bytes())
    assert (found.machine, found.exports) == (arch, EXPORTS)
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    read = subprocess.run(["readelf", "-dW", str(path)], capture_output=True, text=True, check=True).stdout
    assert found.needs == {line.split("[")[1].rstrip("]") for line in read.splitlines() if "(NEEDED)" in line}
    with pytest.raises(ValueError, match="no shared library"):
        examine(b"text")


# ------------------------------------------------------------------------------------ what Zig's compiler makes


@pytest.fixture(scope="module")
def released(pure: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Arch, Path]:
    """The wheels for both processors, beside the pure one."""
    pytest.importorskip("ziglang", reason="the package with Zig's compiler")
    folder = tmp_path_factory.mktemp("released")
    shutil.copy(pure, folder)
    return dict(zip(ARCHITECTURES, kernels.wheels(pure, folder), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_released_wheel_runs_on_every_linux_of_ten_years(released: dict[Arch, Path], arch: Arch) -> None:
    pytest.importorskip("auditwheel", reason="auditwheel checks wheels")
    assert check_wheel(released[arch]) == f"auditwheel: manylinux_2_17_{arch}"
    files = read(released[arch])
    sidecar = json.loads(files[f"localattn/libraries/{arch}/{CPU_KERNELS.file_name}.json"])
    assert sidecar["glibc"] == "2.17" or (arch == "x86_64" and sidecar["glibc"] == "2.16")
    licences = {name.split("/")[-1] for name in files if "/licenses/" in name}
    assert licences == {"LICENSE", "libcxx.txt", "libcxxabi.txt", "libunwind.txt", "zig-compiler-rt.txt"}


@pytest.mark.slow
def test_a_released_wheel_is_built_the_same_twice(
    released: dict[Arch, Path], pure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZIG_LOCAL_CACHE_DIR", str(tmp_path / "nothing compiled yet"))
    (again,) = kernels.wheels(pure, tmp_path, (host_arch(),))
    assert again.read_bytes() == released[host_arch()].read_bytes()


@pytest.mark.slow
def test_a_released_wheel_uses_its_kernels(released: dict[Arch, Path], tmp_path: Path) -> None:
    found = check_kernels(installed(released[host_arch()], tmp_path / "venv"))
    fastest = {"x86_64": {"avx512", "avx2", "baseline"}, "aarch64": {"neon"}}[host_arch()]
    assert found["checked"]["instruction_set"] in fastest
    flags = Path("/proc/cpuinfo").read_text()
    for name, flag in (("avx512", "avx512vl"), ("avx2", "avx2")):
        if f" {flag}" in flags:
            assert found["checked"]["instruction_set"] == name
            break


@pytest.mark.slow
def test_the_wheel_for_arm_uses_its_kernels_on_an_arm_machine(
    released: dict[Arch, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = request.config.cache
    assert store is not None
    (tmp_path / "arm").mkdir()
    arm = arm_machine(store.mkdir("arm"), tmp_path / "arm")
    site = tmp_path / "installed"
    pip = Environment.create(tmp_path / "venv")
    pip.install(
        *("--no-index", "--no-deps", "--only-binary=:all:", "--platform", "manylinux2014_aarch64"),
        *("--implementation", "cp", "--python-version", PYTHON.removeprefix("python")),
        *("--find-links", str(released["aarch64"].parent), "--target", str(site), "localattn"),
    )
    arm.environment["PYTHONPATH"] = f"{site}{os.pathsep}{arm.environment['PYTHONPATH']}"
    answer = arm.localattn("plugin", "check", "--backend", "onnxruntime", "--format", "json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert Path(found["path"]).is_relative_to(site) and found["instruction_set"] == "neon"
    from ..support.models.engine_models import small_model

    run = arm.localattn("run", small_model("fp32"), "--format", "json")
    assert run.code == 0 and json.loads(run.out)["plugin"] == found["path"], run.err


@pytest.mark.slow
def test_libraries_for_other_systems_need_nothing_but_the_system(tmp_path: Path) -> None:
    """Nobody has run them."""
    pytest.importorskip("ziglang", reason="the package with Zig's compiler")
    found = {path.suffix: check_library(path.read_bytes()) for path in kernels.untested(tmp_path)}
    assert found[".dylib"].machine == "aarch64" and found[".dylib"].needs == {"/usr/lib/libSystem.B.dylib"}
    assert found[".dll"].machine == "x86_64" and "KERNEL32.dll" in found[".dll"].needs
    assert found[".dll"].exports == EXPORTS


@pytest.mark.slow
def test_the_plugin_library_is_built_the_same_twice_and_found(
    pure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels of one element type and head size, for two GPUs."""
    for package in ("ziglang", "triton"):
        pytest.importorskip(package, reason="compiles the library")
    targets = [TARGETS[name] for name in ("sm_86", "sm_90")]
    made = []
    for name in ("first", "second"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton" / name))
        monkeypatch.setenv("ZIG_LOCAL_CACHE_DIR", str(tmp_path / "zig" / name))
        (tmp_path / name).mkdir()
        specs = full_set(["fp16"], [64])
        made.append(plugin_library.wheels(pure, tmp_path / name, specs=specs, targets=targets))
    assert [wheel.read_bytes() for wheel in made[0]] == [wheel.read_bytes() for wheel in made[1]]
    for wheel, arch in zip(made[0], ARCHITECTURES, strict=True):
        assert check_wheel(wheel) == f"auditwheel: manylinux_2_17_{arch}"
        _names_what_kernels_are_made_with(read(wheel), arch)
    shutil.copy(pure, made[0][0].parent)
    environment = installed(made[0][0], tmp_path / "venv")
    environment.install("--no-index", "--no-deps", "--find-links", str(made[0][0].parent), plugin_library.NAME)
    found = check_plugin_library(environment)
    with zipfile.ZipFile(made[0][ARCHITECTURES.index(host_arch())]) as wheel:
        data = wheel.read(f"{plugin_library.PACKAGE}/{host_arch()}/{TENSORRT_PLUGIN.file_name}")
    assert found["sha256"] == hashlib.sha256(data).hexdigest()


def _names_what_kernels_are_made_with(files: dict[str, bytes], arch: Arch) -> None:
    info = information(files)
    document = json.loads(files[f"{info}/sboms/localattn.cdx.json"])
    listed = {part["name"]: part for part in document["components"] if part["type"] == "library"}
    assert listed.keys() > {"triton", "libdevice", "tensorrt-headers", "cuda-headers", "libcxx"}
    assert listed["triton"]["version"] == importlib.metadata.version("triton")
    for name in listed:
        assert files[f"{info}/licenses/{name}.txt"].strip(), name
    notice = files[f"{info}/licenses/tensorrt-headers.txt"]
    assert b"Apache-2.0" in notice and notice.count(b"*/") == 1
    library = PurePosixPath(f"{plugin_library.PACKAGE}/{arch}/{TENSORRT_PLUGIN.file_name}")
    needs = {row["ref"]: {name.split("@")[0] for name in row["dependsOn"]} for row in document["dependencies"]}
    assert needs[str(library)] == listed.keys()
    companion = str(companion_path(Path(library)))
    assert needs[companion] == {name for name in listed if name.startswith(("lib", "zig"))} - {"libdevice"}


def test_a_library_that_shows_more_than_it_must_is_refused() -> None:
    data = built(host_arch()).path.read_bytes()
    with pytest.raises(Wrong, match="it exports"):
        check_library(data, {"RegisterCustomOps"})
    if any("libgcc_s" in name for name in examine(data).needs):  # what GCC makes is for this machine alone
        with pytest.raises(Wrong, match=r"it needs libgcc_s"):
            check_library(data)
