"""Bundles: what is in them, that they prove themselves on a device, and that they appear whole or not at all."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from localattn.core import closeness
from localattn.core.documents.sidecar import read_sidecar, sidecar_path
from localattn.core.errors import CheckFailed, MissingDependency, UsageError
from localattn.core.machine.processor import ARCHITECTURES, host_arch
from localattn.core.storage.files import sha256
from localattn.core.storage.library_store import CPU_KERNELS
from localattn.core.tolerance import Tolerance
from localattn.runtime import load
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.device import results, run_engine
from localattn.runtime.bundle.device import verify as script
from localattn.runtime.bundle.triton import Serving
from localattn.runtime.bundle.verify import verify_bundle
from localattn.runtime.parity.comparison import compare_arrays

from ...conftest import Finished
from ...support import tokenizer_folder
from ...support.models import step_model
from ...support.models.bundles import (  # noqa: F401
    WIDTH,
    demo_model,
    open_model,
    run_script,
    save_branches,
    tiny_bundle,
    tiny_model,
)
from ...support.models.engine_models import small_model
from ...support.native.cpu_build import built

Command = Callable[..., Finished]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_demo_bundle_proves_itself(demo_model: Path, tmp_path: Path, localattn: Command) -> None:
    bundle = tmp_path / "bundle"
    made = localattn("bundle", demo_model, "-o", bundle, "--json")
    assert made.code == 0, made.err
    manifest = json.loads(made.out)
    for entry in manifest["files"]:
        content = (bundle / entry["path"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["size"], entry["sha256"])
    assert {entry["path"] for entry in manifest["files"]} | {"manifest.json"} == set(files_of(bundle))
    assert manifest["manifest_sha256"] == hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    assert [model["tolerance"] for model in manifest["models"]] == [{"atol": 1e-4, "rtol": 1e-4, "cosine": None}]

    finished = run_script(bundle, "--format", "json", "--manifest-sha256", manifest["manifest_sha256"])
    assert finished.returncode == 0, finished.stderr
    rows = json.loads(finished.stdout)["rows"]
    assert [row["passed"] for row in rows] == [True, True]
    # The script compares with what the file really gives, not with itself.
    sample = {name: array.copy() for name, array in np.load(bundle / "samples/pybytes.1.inputs.npz").items()}
    logits = load(demo_model, provider="cpu").run(sample)["logits"]
    np.testing.assert_array_equal(np.load(bundle / "samples/pybytes.1.outputs.npz")["logits"], logits)

    verified = localattn("bundle", "verify", bundle)
    assert verified.code == 0
    assert verified.out.count("ok   model/pybytes.onnx on cpu") == 2


def test_readme_commands_work_as_written(tiny_bundle: Path, tmp_path: Path, localattn: Command, monkeypatch) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    commands = [line.split("  #")[0].split() for line in (bundle / "README.md").read_text().splitlines()]
    ours = [words[1:] for words in commands if words[:1] == ["localattn"]]
    scripts = [words[2:] for words in commands if words[:2] == ["python3", "verify.py"] and "cuda" not in words]
    assert len(ours) == 2
    assert len(scripts) == 3
    monkeypatch.chdir(bundle)
    assert [localattn(*words).code for words in ours] == [0, 0]
    assert [run_script(bundle, *words).returncode for words in scripts] == [0, 0, 0]  # running it left no unlisted file


def on_a_device(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """A line in plain sh, with a `python3` that has onnxruntime and neither this package nor torch."""
    programs = folder / "programs"
    for name in ("localattn", "torch"):
        (programs / name).mkdir(parents=True, exist_ok=True)
        (programs / name / "__init__.py").write_text("raise ImportError('not on this device')\n")
    python = programs / "python3"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    here = folder / "here"
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(programs)}
    return subprocess.run(["/bin/sh", "-c", line], cwd=here, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["a bundle", "it's [1].tar"])
def test_what_is_printed_for_the_device_works_there(
    name: str, tiny_model: Path, tmp_path: Path, localattn: Command
) -> None:
    """In a folder that has nothing but the bundle; and again, as `bundle verify` prints it."""
    model, place = tmp_path / "my model.onnx", tmp_path / "here"
    shutil.copy(tiny_model, model)
    shutil.copy(sidecar_path(tiny_model), sidecar_path(model))
    made = localattn("bundle", model, "-o", tmp_path / name)
    assert made.code == 0, made.err
    (line,) = re.findall(r"^On the device: (.*)$", made.out, re.MULTILINE)
    assert f"On the device: {line}" in localattn("bundle", "verify", tmp_path / name).out
    place.mkdir()
    (tmp_path / name).rename(place / name)
    ended = on_a_device(tmp_path, line)
    assert ended.returncode == 0 and ended.stdout.count("ok ") == 2, ended.stderr
    written = (next(place.rglob("README.md"))).read_text()
    assert "localattn run 'model/my model.onnx'" in written
    if name.endswith(".tar"):
        return
    inside = next(place.rglob("verify.py")).parent
    for command in re.findall(r"^(python3 verify\.py(?! --provider).*?)  #", written, re.MULTILINE):
        ended = on_a_device(tmp_path, f"cd {shlex.quote(str(inside))} && {command}")
        assert ended.returncode == 0, f"{command}: {ended.stderr}"


def test_tar_is_deterministic_and_verifies(tiny_model: Path, tmp_path: Path, localattn: Command) -> None:
    first, second = tmp_path / "a.tar", tmp_path / "b.tar"
    assert localattn("bundle", "create", tiny_model, "-o", first).code == 0
    os.utime(tiny_model, (1, 1))
    assert localattn("bundle", tiny_model, "-o", second, "--format", "tar").code == 0
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        entries = archive.getmembers()
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since 3.11.4
        archive.extractall(tmp_path / "out", **safely)  # type: ignore[arg-type]
    assert [entry.name for entry in entries] == sorted(entry.name for entry in entries)
    assert {(entry.mtime, entry.uid, entry.uname, entry.mode) for entry in entries} == {(0, 0, "", 0o644)}
    assert run_script(tmp_path / "out/tiny").returncode == 0
    verified = localattn("bundle", "verify", first, "--format", "json")
    assert verified.code == 0
    assert [row["passed"] for row in json.loads(verified.out)["rows"]] == [True, True]


def test_folder_is_deterministic(tiny_bundle: Path, tiny_model: Path, tmp_path: Path) -> None:
    create_bundle(BundleRequest(tiny_model, tmp_path / "again"))
    assert files_of(tmp_path / "again") == files_of(tiny_bundle)


def test_a_tar_made_by_another_program_verifies(tiny_bundle: Path, tmp_path: Path, localattn: Command) -> None:
    tar = shutil.which("tar")
    if tar is None:
        pytest.skip("needs the program tar")
    subprocess.run([tar, "cf", tmp_path / "t.tar", "-C", tiny_bundle.parent, tiny_bundle.name], check=True)
    assert localattn("bundle", "verify", tmp_path / "t.tar").code == 0


def test_shorthand_and_words(localattn: Command, tiny_model: Path, tmp_path: Path) -> None:
    assert localattn("bundle", "-o", tmp_path / "b", tiny_model, "--samples", "0").code == 0  # options may come first
    assert "intact" in localattn("bundle", "verify", tmp_path / "b").out
    assert "no samples" in run_script(tmp_path / "b").stdout
    assert localattn("bundle", "--help").code == 0
    assert localattn("bundle", "no.onnx", "-o", tmp_path / "c").code == 2
    assert localattn("bundle", tiny_model, "-o", tmp_path / "c", "--samples", "-1").code == 2
    assert localattn("bundle", "verify", tmp_path / "nowhere").code == 2
    assert not (tmp_path / "c").exists()


def test_own_inputs_become_samples(tiny_model: Path, tmp_path: Path, localattn: Command) -> None:
    tokens = np.arange(64, dtype=np.int64).reshape(1, 64) % 23
    np.savez(tmp_path / "mine.npz", tokens=tokens)
    made = localattn("bundle", tiny_model, "-o", tmp_path / "b", "--load-inputs", tmp_path / "mine.npz", "--json")
    assert [sample["source"] for sample in json.loads(made.out)["samples"]] == ["mine.npz"]
    np.testing.assert_array_equal(np.load(tmp_path / "b/samples/tiny.0.inputs.npz")["tokens"], tokens)
    np.savez(tmp_path / "bad.npz", tokens=tokens - 1)
    bad = localattn("bundle", tiny_model, "-o", tmp_path / "c", "--load-inputs", tmp_path / "bad.npz")
    assert bad.code == 2
    assert "outside the vocabulary" in bad.err


def test_dynamic_axes_are_sampled_at_two_lengths(open_model: Path, tmp_path: Path) -> None:
    create_bundle(BundleRequest(open_model, tmp_path / "b"))
    shapes = [np.load(tmp_path / f"b/samples/open.{index}.inputs.npz")["tokens"].shape for index in (0, 1)]
    assert len(set(shapes)) == 2
    assert verify_bundle(tmp_path / "b").report["code"] == 0


def test_external_data_travels(tiny_model: Path, tmp_path: Path) -> None:
    model = onnx.load(tiny_model)
    # Smaller ones may be shapes, which onnxruntime reads in the model alone.
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1 << 14, np.float32), "a large weight"))
    source = tmp_path / "big.onnx"
    onnx.save(model, source, save_as_external_data=True, location="big.weights", size_threshold=1024)
    with pytest.raises(UsageError, match="drawn at random"):  # no sidecar: the vocabulary is not known
        create_bundle(BundleRequest(source, tmp_path / "none"))
    np.savez(tmp_path / "in.npz", tokens=np.zeros((1, 64), np.int64))
    created = create_bundle(BundleRequest(source, tmp_path / "b.tar", as_tar=True, load_inputs=(tmp_path / "in.npz",)))
    assert [entry["role"] for entry in created.manifest["files"] if "big" in entry["path"]][:2] == ["model", "data"]
    assert verify_bundle(tmp_path / "b.tar").report["code"] == 0
    (tmp_path / "big.weights").unlink()
    with pytest.raises(UsageError, match="is incomplete"):
        create_bundle(BundleRequest(source, tmp_path / "none", load_inputs=(tmp_path / "in.npz",)))
    for tensor in model.graph.initializer:
        if tensor.HasField("raw_data") and len(tensor.raw_data) > 64:
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="../../etc/passwd")
            break
    (tmp_path / "evil.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UsageError, match="Cannot bundle"):
        create_bundle(BundleRequest(tmp_path / "evil.onnx", tmp_path / "none"))


def test_external_data_of_branches_travels(tmp_path: Path, localattn: Command) -> None:
    """In a bundle, and into a file that this package writes."""
    save_branches(tmp_path / "if.onnx", "if.weights")
    created = create_bundle(BundleRequest(tmp_path / "if.onnx", tmp_path / "b"))
    assert [entry["role"] for entry in created.manifest["files"] if "if" in entry["path"]][:2] == ["model", "data"]
    assert verify_bundle(tmp_path / "b").report["code"] == 0
    assert localattn("convert", tmp_path / "if.onnx", "-o", tmp_path / "plain.onnx", "--standard-ops").code == 0
    (tmp_path / "if.weights").unlink()
    written = load(tmp_path / "plain.onnx", plugin="none")
    for sign, number in ((1, 1), (-1, 2)):
        found = written.run({"x": np.full((3, WIDTH), sign, np.float32)})["y"]
        assert np.array_equal(found, np.full((3, WIDTH), sign * number * WIDTH, np.float32))
    with pytest.raises(UsageError, match="is incomplete"):
        create_bundle(BundleRequest(tmp_path / "if.onnx", tmp_path / "none"))


def test_an_altered_model_is_not_bundled(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "tiny.onnx"
    shutil.copy(sidecar_path(tiny_model), sidecar_path(model))
    model.write_bytes(tiny_model.read_bytes() + b"\x00")
    with pytest.raises((CheckFailed, UsageError)):
        create_bundle(BundleRequest(model, tmp_path / "b"))
    proto = onnx.load(tiny_model)
    proto.producer_name = "someone else"
    model.write_bytes(proto.SerializeToString())
    with pytest.raises(CheckFailed, match="sidecar"):
        create_bundle(BundleRequest(model, tmp_path / "b"))


def test_nothing_but_a_bundle_is_replaced(tiny_model: Path, tmp_path: Path, localattn: Command) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    refused = localattn("bundle", tiny_model, "-o", home, "--force")
    assert refused.code == 2
    assert "but not a bundle" in refused.err
    assert files_of(home) == {"letter.txt": b"dear"}
    (tmp_path / "link").symlink_to(home)
    linked = localattn("bundle", tiny_model, "-o", tmp_path / "link", "--force")
    assert linked.code == 2 and "symbolic link" in linked.err

    (tmp_path / "empty").mkdir()
    assert localattn("bundle", tiny_model, "-o", tmp_path / "empty").code == 0
    again = localattn("bundle", tiny_model, "-o", tmp_path / "empty", "--seed", "7")
    assert again.code == 2
    assert "--force" in again.err
    before = files_of(tmp_path / "empty")
    assert localattn("bundle", tiny_model, "-o", tmp_path / "empty", "--seed", "7", "--force").code == 0
    assert files_of(tmp_path / "empty") != before
    assert verify_bundle(tmp_path / "empty").report["code"] == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    (tmp_path / "empty/notes.txt").write_text("my own")
    kept = localattn("bundle", tiny_model, "-o", tmp_path / "empty", "--force")
    assert kept.code == 2 and "notes.txt" in kept.err
    assert (tmp_path / "empty/notes.txt").read_text() == "my own"


# Runs in a process without torch: each child is killed at its nth file operation.
KILLER = """
import itertools, json, os, pathlib, shutil, sys
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.verify import verify_bundle
from localattn.runtime.parity.comparison import compare_arrays

model, target, as_tar = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3] == "tar"

def make(seed):
    request = BundleRequest(model, target, as_tar=as_tar, samples=0, atol=1e-4 * (1 + seed), overwrite=True)
    return create_bundle(request).manifest_sha256

def state():
    return verify_bundle(target, files_only=True).manifest_sha256 if target.exists() else "none"

new = make(1)
shutil.rmtree(target) if target.is_dir() else target.unlink()
seen = {"none": set(), "old": set()}
for start in seen:
    for nth in itertools.count():
        if start == "none":
            before = "none"
            if target.exists():
                shutil.rmtree(target) if target.is_dir() else target.unlink()
        elif nth == 0 or after != before:
            before = make(0)
        child = os.fork()
        if child == 0:
            count = 0
            def hook(event, arguments):
                global count
                if event in ("open", "os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir", "ctypes.dlsym"):
                    count += 1
                    if count > nth:
                        os.kill(os.getpid(), 9)
            sys.addaudithook(hook)
            make(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        after = state()
        assert after in (before, new), (start, nth, after)
        seen[start].add("new" if after == new else start)
        for left in target.parent.glob(".localattn-*"):
            shutil.rmtree(left)
        if status == 0:
            assert after == new
            break
    assert nth > 20, nth
print(json.dumps({start: sorted(states) for start, states in seen.items()}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork and signals of Linux")
@pytest.mark.parametrize("shape", ["dir", "tar"])
def test_kill_at_any_moment_leaves_old_or_new(tiny_model: Path, tmp_path: Path, shape: str) -> None:
    target = tmp_path / ("bundle.tar" if shape == "tar" else "bundle")
    command = [sys.executable, "-c", KILLER, str(tiny_model), str(target), shape]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert json.loads(finished.stdout) == {"none": ["new", "none"], "old": ["new", "old"]}


def empty_library(path: Path) -> Path:
    """A shared library in which nothing is."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-nostdlib", "-x", "c", "/dev/null", "-o", str(path)], check=True)
    return path


def test_a_plugin_library_travels_by_processor(tiny_model: Path, tmp_path: Path) -> None:
    library = empty_library(tmp_path / "libx.so")
    arch = os.uname().machine
    created = create_bundle(BundleRequest(tiny_model, tmp_path / "b", samples=0, plugins=(library,)))
    assert f"plugins/{arch}/libx.so" in {
        entry["path"] for entry in created.manifest["files"] if entry["role"] == "plugin"
    }
    assert f"--dynamicPlugins=plugins/{arch}/libx.so" in (tmp_path / "b/README.md").read_text()
    sidecar_path(library).write_text(json.dumps({"sha256": "0" * 64}))
    with pytest.raises(CheckFailed, match="was changed"):
        create_bundle(BundleRequest(tiny_model, tmp_path / "c", samples=0, plugins=(library,)))
    with pytest.raises(UsageError, match="not a plugin library"):
        create_bundle(BundleRequest(tiny_model, tmp_path / "c", samples=0, plugins=(tiny_model,)))


def test_a_name_for_one_file_system_is_refused_by_what_is_wrong_with_it(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model, tmp_path / "a:b.onnx")
    with pytest.raises(UsageError, match=r"a character that some file systems refuse[^A-Z]*Rename the file"):
        create_bundle(BundleRequest(tmp_path / "a:b.onnx", tmp_path / "b"))


@pytest.mark.parametrize("name", ["x..onnx", f"{'y' * 225}.onnx"])
def test_a_name_that_a_device_would_refuse_is_refused_here(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """Of the folder in a tar, and of the files of samples."""
    shutil.copy(tiny_model, tmp_path / name)
    with pytest.raises(UsageError, match="A device would refuse"):
        create_bundle(BundleRequest(tmp_path / name, tmp_path / "b", load_inputs=(_tokens(tmp_path),)))
    assert not (tmp_path / "b").exists()


def _tokens(folder: Path) -> Path:
    """Inputs for a file without its sidecar, from which none are drawn."""
    np.savez(folder / "in.npz", tokens=np.zeros((1, 64), np.int64))
    return folder / "in.npz"


def test_compiled_kernels_for_the_cpu_travel_and_are_tried(tiny_model: Path, tmp_path: Path) -> None:
    """Those of this processor; TensorRT is not given them."""
    libraries = [built(arch).path for arch in ARCHITECTURES]
    created = create_bundle(BundleRequest(tiny_model, tmp_path / "b", samples=1, plugins=tuple(libraries)))
    homes = {arch: f"kernels/{arch}/{CPU_KERNELS.file_name}" for arch in ARCHITECTURES}
    roles = {entry["path"]: entry["role"] for entry in created.manifest["files"]}
    assert {path for path, role in roles.items() if role == "kernels"} == {*homes.values()}
    assert all(roles[f"{home}.json"] == "sidecar" for home in homes.values())
    readme = (tmp_path / "b/README.md").read_text()
    assert "dynamicPlugins" not in readme
    for home in homes.values():
        assert f"--plugin-library {home}" in readme
    here = homes[host_arch()]
    alone = run_script(tmp_path / "b")
    assert alone.returncode == 0, alone.stdout
    assert "ok   model/tiny.onnx on cpu, samples" in alone.stdout and "by ONNX functions" in alone.stdout
    assert alone.stdout.count("ok  ") == 1
    assert f"not run: {here}. A bundle's libraries are code" in alone.stdout
    for allowed in (["--run-libraries"], ["--manifest-sha256", created.manifest_sha256]):
        finished = run_script(tmp_path / "b", *allowed)
        assert finished.returncode == 0, finished.stdout
        assert f"ok   model/tiny.onnx on cpu, {here}, samples" in finished.stdout
        assert "by WindowedAttention, ReadStreams" in finished.stdout
        assert finished.stdout.count("ok  ") == 2 and "not run" not in finished.stdout
    plain, compiled = verify_bundle(tmp_path / "b", run_libraries=True).report["rows"]
    assert plain["kernels"] == {"source": "ONNX functions", "sha256": "", "ops": []}
    assert (compiled["kernels"]["source"], compiled["kernels"]["sha256"]) == (here, sha256(tmp_path / "b" / here))
    assert "GatedGelu" in compiled["kernels"]["ops"]
    assert verify_bundle(tmp_path / "b").report["libraries_not_run"] == [here]
    code = readme.split("```python\n")[1].split("```")[0].replace(min(homes.values()), homes[host_arch()])
    code = "import onnxruntime\n" + code
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "b", check=True)


def test_kernels_that_do_not_load_take_nothing_else_along(tiny_model: Path, tmp_path: Path) -> None:
    library = empty_library(tmp_path / CPU_KERNELS.file_name)
    sidecar_path(library).write_text(json.dumps({"format": "localattn-onnxruntime"}))
    create_bundle(BundleRequest(tiny_model, tmp_path / "b", samples=1, plugins=(library,)))
    assert verify_bundle(tmp_path / "b").report["code"] == 0
    report = verify_bundle(tmp_path / "b", run_libraries=True).report
    assert report["code"] == 3 and [row["passed"] for row in report["rows"]] == [True]
    assert f"does not load tiny.onnx with {CPU_KERNELS.file_name}" in report["not_run"][0]["why"]


def engine_sidecar(engine: Path, model: Path, **changes: object) -> None:
    """The sidecar of a file that stands for an engine."""
    sidecar = read_sidecar(model)
    assert sidecar is not None
    created = {
        "backend": "tensorrt-rtx",
        "library_version": "1.7.1.116",
        "targets": ["sm_86"],
        "platform": "linux-x86_64",
        "dtype": "fp32",
        "inputs": [{"name": "tokens", "dtype": "int64", "shape": [1, 64]}],
        "outputs": [{"name": "logits", "dtype": "float32", "shape": [1, 64, 23]}],
        "options": {"plugin": "none"},
        "onnx_name": model.name,
        "onnx_sha256": sidecar.model_sha256,
        "engine_sha256": hashlib.sha256(engine.read_bytes()).hexdigest(),
        "engine_bytes": engine.stat().st_size,
        "created": "2026-01-01T00:00:00Z",
    }
    sidecar_path(engine).write_text(json.dumps(created | changes))


def test_an_engine_borrows_the_samples_and_says_what_is_missing(tiny_model: Path, tmp_path: Path) -> None:
    engine = tmp_path / "tiny.engine"
    engine.write_bytes(b"an engine" * 100)
    engine_sidecar(engine, tiny_model)
    created = create_bundle(BundleRequest(tiny_model, tmp_path / "b", engines=(engine,)))
    entry = created.manifest["models"][1]
    assert (entry["path"], entry["samples_of"]) == ("engines/tiny.engine", "model/tiny.onnx")
    assert (entry["backend"], entry["compute_capability"]) == ("tensorrt-rtx", "8.6")
    report = verify_bundle(tmp_path / "b").report
    if report["code"] != 3:
        pytest.skip("a GPU is here")
    assert [row["passed"] for row in report["rows"]] == [True, True]  # the ONNX file's samples ran all the same
    assert "tiny.engine" in report["not_run"][0]["why"]
    assert run_script(tmp_path / "b").returncode == 3
    assert verify_bundle(tmp_path / "b", model="tiny.onnx").report["code"] == 0


def test_what_decides_for_an_engine_of_another_element_type(tiny_model: Path, tmp_path: Path) -> None:
    """Bounds for single elements, which every device can check."""
    engine = tmp_path / "tiny.engine"
    engine.write_bytes(b"an engine")
    engine_sidecar(engine, tiny_model, dtype="int8")
    created = create_bundle(BundleRequest(tiny_model, tmp_path / "b", samples=0, engines=(engine,)))
    assert created.manifest["models"][1]["tolerance"] == {"atol": 1e-4, "rtol": 1e-4, "cosine": None}


def test_engines_whose_folders_would_have_one_name_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    engines = (tmp_path / "on a.engine", tmp_path / "on_a.engine")
    for engine in engines:
        engine.write_bytes(b"an engine")
        engine_sidecar(engine, tiny_model, backend="tensorrt")
    with pytest.raises(UsageError, match=r"would have the name triton/tiny_on_a_tensorrt/config\.pbtxt"):
        create_bundle(BundleRequest(tiny_model, tmp_path / "b", samples=0, engines=engines, triton=Serving()))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"engine_sha256": "0" * 64}, CheckFailed, "was changed"),
        ({"onnx_sha256": "0" * 64}, UsageError, "not an engine of"),
        ({"plugin": {"kind": "library", "path": "x.so", "sha256": "1" * 64}}, UsageError, "plugin library"),
    ],
)
def test_engines_that_do_not_belong_are_refused(
    tiny_model: Path, tmp_path: Path, changes: dict[str, object], error: type[Exception], words: str
) -> None:
    engine = tmp_path / "tiny.engine"
    engine.write_bytes(b"an engine")
    engine_sidecar(engine, tiny_model, **changes)
    with pytest.raises(error, match=words):
        create_bundle(BundleRequest(tiny_model, tmp_path / "b", engines=(engine,)))
    assert not (tmp_path / "b").exists()


def test_engine_of_another_release_or_gpu_is_named() -> None:
    with pytest.raises(run_engine.NotHere, match=r"10\.3\.0.*10\.16\.1"):
        run_engine._same_release("10.3.0.30", "10.16.1.4")
    run_engine._same_release("1.7.1.116", "1.7.1.116")
    with pytest.raises(run_engine.NotHere, match="another GPU"):
        run_engine._same_gpu("8.6,8.9", "8.7")
    run_engine._same_gpu("8.6,8.9", "8.9")


@pytest.mark.parametrize(("here", "code"), [({"b.engine"}, 0), (set(), script.MISSING)])
def test_one_engine_that_runs_is_enough(here: set[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle may hold an engine for each kind of GPU."""

    def run(folder: Path, manifest: Any, model: Any, *options: Any) -> list[dict[str, Any]]:
        if model["path"] not in here:
            raise script.Fault(script.MISSING, "It does not run here.", "It was built for another GPU: …")
        return [{"model": model["path"], "passed": True, "kernels": {"source": "engine", "sha256": "", "ops": []}}]

    monkeypatch.setattr(script, "run_model", run)
    paths = ("a.engine", "b.engine")
    models = [{"path": path, "kind": "engine", "plugins": [], "samples_of": path} for path in paths]
    report = script.run_bundle(Path(), {"models": models, "samples": [{"model": path} for path in paths]})
    assert report["code"] == code and [entry["model"] for entry in report["not_run"]][:1] == ["a.engine"]


@pytest.mark.parametrize(
    ("actual", "passed"),
    [
        ([1.0, 2.0, 3.0], True),
        ([1.0001, 2.0002, 3.0003], True),
        ([1.0, 2.0, 3.001], False),
        ([1.0, 2.0, np.nan], False),
        ([1.0, 2.0, np.inf], False),
        ([1.0, 2.0], False),
    ],
)
def test_comparison(actual: list[float], passed: bool) -> None:
    tolerance = {"atol": 1e-4, "rtol": 1e-4, "cosine": None}
    assert script.compare(np.array(actual), np.array([1.0, 2.0, 3.0]), tolerance)["passed"] is passed


def _travelling(folder: Path) -> types.ModuleType:
    """The script of a bundle, run as on a device: without the package."""
    source = folder / "verify.py"
    module = types.ModuleType("verify")
    module.__dict__["__file__"] = str(source)
    exec(compile(source.read_text(), str(source), "exec"), module.__dict__)
    return module


def test_the_script_of_a_bundle_and_the_package_cannot_judge_differently(tiny_bundle: Path) -> None:
    assert (tiny_bundle / "closeness.py").read_bytes() == Path(closeness.__file__).read_bytes()
    script_alone, generator = _travelling(tiny_bundle), np.random.default_rng(5)
    verdicts = []
    for case in range(300):
        shape = (3, 7) if case else (300_000,)  # beyond one chunk
        expected = generator.standard_normal(shape) * 10.0 ** generator.integers(-6, 3)
        # Errors around the tolerance, where a different rounding would show.
        atol, rtol = 10.0 ** generator.uniform(-6, -2, 2)
        share = generator.choice([0.1, 0.5, 1 - 1e-9, 1.0, 1 + 1e-15, 1.5])
        actual = expected + share * (atol + rtol * np.abs(expected)) * generator.choice([-1, 0, 1], shape)
        if case % 10 == 9:
            actual.flat[case % actual.size] = generator.choice([np.nan, np.inf, -np.inf])
        floor = float(generator.choice([0.9, 0.999])) if case % 2 else None
        dtype = generator.choice(["float16", "float32", "float64"])
        actual, expected = actual.astype(dtype), expected.astype("float64" if case % 3 else dtype)
        here = compare_arrays("out", actual, expected, Tolerance(atol, rtol, floor))
        row = script_alone.compare(actual, expected, {"atol": atol, "rtol": rtol, "cosine": floor})
        assert row["passed"] is here.passed
        if "max_abs" in row:
            assert (row["max_abs"], row["cosine"]) == (here.max_abs, here.cosine)
        verdicts.append(here.passed)
    assert 30 < sum(verdicts) < 270


def test_cosine_floor_is_judged() -> None:
    expected = np.full(100, 1e-3)
    tolerance = {"atol": 1e-2, "rtol": 1e-2, "cosine": 0.999}
    assert script.compare(expected, expected, tolerance)["passed"]
    failed = script.compare(-expected, expected, tolerance)
    assert not failed["passed"] and failed["why"] == "above atol 0.01 + rtol 0.01, or cosine below 0.999"
    without = script.compare(expected, expected + 1, tolerance | {"cosine": None})
    assert not without["passed"] and without["why"] == "above atol 0.01 + rtol 0.01"


def test_a_bundle_that_cannot_be_read_is_no_altered_one(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(folder: Path, manifest: object) -> None:
        raise PermissionError(13, "Permission denied", "closeness.py")

    script_alone = _travelling(tiny_bundle)
    monkeypatch.setattr(script_alone.check_files, "check_folder", refuse)
    monkeypatch.setattr(sys, "argv", ["verify.py"])
    assert script_alone.main() == 2
    assert "cannot be read" in (told := capsys.readouterr().err) and "Permission denied" in told


@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_fp16_on_an_arm_cpu_is_explained_where_it_fails(
    machine: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    row = {"model": "m", "provider": "cpu", "sample": "s", "output": "y", "dtype": dtype, "passed": False, "why": "w"}
    row["kernels"] = {"source": "ONNX functions", "sha256": "", "ops": []}
    report = {"rows": [row], "not_run": [], "samples": 1}
    assert (results.SUMMED_IN_FP16 in results.report_lines(report)) is ((machine, dtype) == ("aarch64", "float16"))
    for change in ({"passed": True, "max_abs": 0.0}, {"provider": "cuda"}):
        assert results.SUMMED_IN_FP16 not in results.report_lines({**report, "rows": [row | change]})


def test_a_wrong_provider_is_missing_not_replaced(tiny_bundle: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("needs an onnxruntime without CUDA")
    assert verify_bundle(tiny_bundle, provider="cuda").report["code"] == 3
    assert run_script(tiny_bundle, "--provider", "cuda").returncode == 3
    with pytest.raises(UsageError, match="provider"):
        verify_bundle(tiny_bundle, provider="tpu")


def test_the_script_runs_on_python_310(tiny_bundle: Path) -> None:
    python = shutil.which("python3.10")
    check = "import sys; assert sys.version_info[:2] == (3, 10)"
    if python is None or subprocess.run([python, "-c", check], capture_output=True, check=False).returncode:
        pytest.skip("needs a Python 3.10")
    finished = run_script(tiny_bundle, python=[python])
    has = subprocess.run([python, "-c", "import numpy, onnxruntime"], capture_output=True, check=False).returncode == 0
    assert finished.returncode == (0 if has else 3), finished.stderr
    assert "Traceback" not in finished.stderr


def test_bf16_needs_a_gpu(tmp_path: Path) -> None:
    """onnxruntime has no such kernels on the CPU: the bundle is not at fault."""
    create_bundle(BundleRequest(small_model("bf16"), tmp_path / "bundle"))
    report = verify_bundle(tmp_path / "bundle").report
    assert report["code"] == 3 and report["rows"] == []
    assert "A bf16 model needs a GPU" in report["not_run"][0]["why"]
    finished = run_script(tmp_path / "bundle", "--provider", "cpu")
    assert finished.returncode == 3 and "A bf16 model needs a GPU" in finished.stdout


def test_missing_onnxruntime_is_said(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    report = verify_bundle(tiny_bundle).report
    assert report["code"] == 3
    assert "onnxruntime cannot be imported" in report["not_run"][0]["why"]
    with pytest.raises(MissingDependency):
        create_bundle(BundleRequest(tiny_bundle / "model/tiny.onnx", tiny_bundle.parent / "new"))


class DeviceMemory:
    """A stand-in for the CUDA driver: memory is a dict of bytes."""

    def __init__(self) -> None:
        self.memory: dict[int, bytearray] = {}
        self.waited = 0

    def allocate(self, size: int) -> int:
        address = 1000 + len(self.memory)
        self.memory[address] = bytearray(size)
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def upload(self, address: int, array: np.ndarray) -> None:
        self.memory[address][:] = array.tobytes()

    def download(self, array: np.ndarray, address: int) -> None:
        array[...] = np.frombuffer(bytes(self.memory[address]), array.dtype).reshape(array.shape)

    def synchronize(self) -> None:
        self.waited += 1


class DoublingEngine:
    """A stand-in for an engine and its context: y = 2·x, as TensorRT's interface has it."""

    num_io_tensors = 2

    def __init__(self, cuda: DeviceMemory, works: bool = True) -> None:
        self.cuda, self.works = cuda, works
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> str:
        return {"x": "input", "y": "output"}[name]

    def get_tensor_dtype(self, name: str) -> type:
        return np.float32

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        return len(shape) == 2

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes["x"]

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        x = np.frombuffer(bytes(self.cuda.memory[self.addresses["x"]]), np.float32)
        self.cuda.memory[self.addresses["y"]][:] = (2 * x).tobytes()
        return self.works


def test_engine_runs_copy_in_run_wait_copy_out_and_free() -> None:
    class Trt:
        class TensorIOMode:
            INPUT = "input"

        nptype = staticmethod(lambda dtype: dtype)

    cuda = DeviceMemory()
    engine = DoublingEngine(cuda)
    x = np.arange(12, dtype=np.float32).reshape(4, 3).T  # not contiguous
    np.testing.assert_array_equal(run_engine._run(Trt, cuda, engine, engine, {"x": x})["y"], 2 * x)
    assert (cuda.waited, cuda.memory) == (1, {})
    for inputs, words in (({"x": x[0]}, "shape"), ({"x": x.astype(np.float64)}, "float64"), ({}, "needs")):
        with pytest.raises(run_engine.Refused, match=words):
            run_engine._run(Trt, cuda, engine, engine, inputs)
    with pytest.raises(run_engine.Refused, match="execute"):
        run_engine._run(Trt, cuda, DoublingEngine(cuda, works=False), DoublingEngine(cuda, works=False), {"x": x})
    assert cuda.memory == {}


@pytest.mark.parametrize("shape", ["dir", "tar"])
def test_a_full_disk_leaves_nothing(tiny_model: Path, tmp_path: Path, shape: str) -> None:
    pytest.importorskip("resource", reason="needs limits on the size of files")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "from localattn.cli import main; sys.argv[0] = 'localattn'; main()"
    )
    command = [sys.executable, "-c", code, "bundle", tiny_model, "-o", tmp_path / "b", "--format", shape]
    finished = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert finished.returncode == 2, finished.stderr
    assert "Cannot write" in finished.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_tar_is_not_replaced_unasked(tiny_model: Path, tmp_path: Path, localattn: Command) -> None:
    target = tmp_path / "b.tar"
    for options in ([], ["--force"]):
        target.write_text("mine")
        assert localattn("bundle", tiny_model, "-o", target, "--samples", "0", *options).code == 2
        assert target.read_text() == "mine"
    with tarfile.open(target, "w") as archive:
        archive.add(tiny_model, "backup/model.onnx")
    backup = localattn("bundle", tiny_model, "-o", target, "--samples", "0", "--force")
    assert backup.code == 2 and "a tar, but not a bundle" in backup.err
    target.unlink()
    assert localattn("bundle", tiny_model, "-o", target, "--samples", "0").code == 0
    assert localattn("bundle", tiny_model, "-o", target, "--samples", "0").code == 2
    assert localattn("bundle", tiny_model, "-o", target, "--samples", "0", "--force").code == 0
    assert localattn("bundle", "verify", target).code == 0


@pytest.mark.parametrize("threshold", [0, 8])
def test_small_external_data_travels_in_the_model(threshold: int, tmp_path: Path) -> None:
    """onnxruntime by itself reads a shape in no other file; the bundle's own check gives it the model's path."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    weights = [
        numpy_helper.from_array(np.arange(4, dtype=np.float32).reshape(1, 4), "w"),
        numpy_helper.from_array(np.array([1, 4], np.int64), "shape"),
    ]
    nodes = [helper.make_node("Add", ["x", "w"], ["a"]), helper.make_node("Reshape", ["a", "shape"], ["y"])]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, str(tmp_path / "m.onnx"), save_as_external_data=True, location="w.bin", size_threshold=threshold)
    create_bundle(BundleRequest(tmp_path / "m.onnx", tmp_path / "b", samples=1))
    assert not (tmp_path / "b/model/w.bin").exists()
    rows = verify_bundle(tmp_path / "b").report["rows"]
    assert [row["passed"] for row in rows] == [True]


def test_a_model_of_text_takes_its_tokenizer_along(tmp_path: Path, localattn) -> None:
    """Unpacked elsewhere, it writes text."""
    pytest.importorskip("tokenizers")
    chat, elsewhere = tmp_path / "chat", tmp_path / "elsewhere"
    chat.mkdir()
    model = step_model.write(chat, vocabulary=tokenizer_folder.VOCABULARY)
    tokenizer_folder.write(chat, {"max_new_tokens": 5})
    for path in chat.glob("*.onnx"):
        sidecar = json.loads(sidecar_path(path).read_text())
        sidecar_path(path).write_text(json.dumps(sidecar | {"model_sha256": sha256(path)}))
    (chat / "unrelated.txt").write_text("private")
    made = create_bundle(BundleRequest(model, tmp_path / "chat.tar", as_tar=True, samples=1))
    assert made.manifest["name"] == "chat" and "files, manifest" in repr(made)
    with tarfile.open(made.path) as tar:
        tar.extractall(elsewhere, filter="data")
    beside = {path.name for path in (elsewhere / "chat" / "model").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= beside
    assert "unrelated.txt" not in beside
    unpacked = elsewhere / "chat" / "model" / model.name
    done = localattn("generate", unpacked, "--prompt", "ab", "--chat", "--format", "json")
    assert done.code == 0 and len(json.loads(done.out)["tokens"][0]) <= 5, done.err
