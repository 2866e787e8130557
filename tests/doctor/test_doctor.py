"""`localattn doctor`: that it tells the truth of this machine, whatever is broken, and survives all of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest

from localattn.cli import command_line
from localattn.doctor import install_hints, probe_process, run_probes
from localattn.doctor.abilities import ABILITIES, Ability, judge
from localattn.doctor.probes import PROBES, Finding, Probe, driver_command, gpu_runtime_command
from localattn.doctor.report import as_dict, as_markdown

from ..conftest import Finished

Command = Callable[..., Finished]


@pytest.fixture(scope="module")
def report() -> dict[str, dict[str, object]]:
    """What doctor finds here, in a fresh process."""
    command = [sys.executable, "-m", "localattn.cli", "doctor", "--format", "json", "-q"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    return dict(json.loads(finished.stdout))


def finding(report, name: str):
    return next(entry for entry in report["findings"] if entry["name"] == name)


def command(report, name: str):
    return next(entry for entry in report["commands"] if entry["command"] == name)


def test_versions_are_the_installed_ones(report) -> None:
    assert finding(report, "python")["version"] == platform.python_version()
    for name, package in (("torch", "torch"), ("onnx", "onnx"), ("onnxruntime", "onnxruntime"), ("einops", "einops")):
        entry = finding(report, name)
        assert entry["status"] == "ok"
        assert entry["version"].split("+")[0] == importlib.metadata.version(package).split("+")[0]
        assert entry["add"] == ""


def test_providers_are_those_that_start(report) -> None:
    available = onnxruntime.get_available_providers()
    assert finding(report, "onnxruntime")["items"] == available
    assert finding(report, "cpu")["status"] == "ok"
    titles = [entry["title"] for entry in report["findings"]]
    for name in set(available) - {"CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"}:
        title = f"onnxruntime on {name.removesuffix('ExecutionProvider')}"
        assert (title in titles) is (name != "AzureExecutionProvider")  # which calls models on a server
    if "CUDAExecutionProvider" not in available:
        assert finding(report, "cuda")["status"] == "missing"
        assert command(report, "run --provider cuda")["lacks"] == ["onnxruntime on the GPU"]
        assert "onnxruntime-gpu[cuda,cudnn]" in command(report, "run --provider cuda")["add"][0]


def test_a_driver_is_not_invented(report) -> None:
    entry = finding(report, "driver")
    here = Path("/dev/nvidiactl").exists() or Path("/dev/nvhost-ctrl").exists() or Path("/dev/nvmap").exists()
    assert (entry["status"] == "ok") is here
    assert command(report, "run model.engine")["able"] is here


def test_commands_agree_with_findings(report) -> None:
    works = {entry["name"]: entry["status"] in ("ok", "limited") for entry in report["findings"]}
    for ability in ABILITIES:
        able = all(any(works[name] for name in choice) for choice in ability.needs)
        entry = next((entry for entry in report["commands"] if entry["command"] == ability.command), None)
        if entry is not None:
            assert entry["able"] is able
            assert bool(entry["lacks"]) is not able
    assert command(report, "export")["able"]  # the tests export, so it must be


def test_every_command_has_a_row_and_every_need_a_probe(report) -> None:
    registered = {entry.name or entry.callback.__name__ for entry in command_line().registered_commands}
    registered |= {group.typer_instance.info.name for group in command_line().registered_groups}
    assert registered == {entry["command"].split()[0] for entry in report["commands"]}
    names = {entry["name"] for entry in report["findings"]}
    assert {name for ability in ABILITIES for choice in ability.needs for name in choice} <= names


def test_markdown_says_the_same_and_is_a_table(localattn: Command) -> None:
    finished = localattn("doctor", "--format", "md")
    assert finished.code == 0
    rows = [line for line in finished.out.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {5, 6}
    assert "| ✓ | onnxruntime on the CPU |" in finished.out


def test_require(localattn: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    ok = [Finding(p.name, p.title, p.area, p.serves, "ok") for p in PROBES]
    without = [Finding("tensorrt", "TensorRT", "engines", "", "missing", add="install it") if f.name == "tensorrt" else f for f in ok]  # fmt: skip  # noqa: E501
    monkeypatch.setattr("localattn.doctor.run_probes.run_probes", lambda probes: without)
    assert localattn("doctor", "--require", "export,build").code == 0  # the other way of build works
    missing = localattn("doctor", "--require", "build --backend tensorrt")
    assert missing.code == 3
    assert "lacks TensorRT" in missing.err
    assert "install it" in missing.err
    assert localattn("doctor", "--require", "dance").code == 2
    assert localattn("doctor").code == 0


# --- what may go wrong while looking ---

BROKEN = {
    "a crash": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "broken", "SIGSEGV"),
    "an abort": ("import os\nos.abort()", "broken", "SIGABRT"),
    "an exit": ("import os\nos._exit(7)", "broken", "exit code 7"),
    "a quiet exit": ("import sys\nsys.exit(0)", "broken", "exit code 0"),
    "an error": ("raise OSError('libfoo.so: cannot open shared object file')", "broken", "libfoo.so"),
    "a missing dependency": ("import no_such_module_anywhere", "broken", "no_such_module_anywhere"),
    "a hang": ("import time\ntime.sleep(600)", "broken", "did not answer"),
    "noise on stdout": ("import os\nprint('{}')\nos.write(1, b'noise')\n__version__ = '1.2'", "ok", ""),
    "a strange version": ("__version__ = ['1', {'2': 3}]", "ok", ""),
    "no version": ("", "ok", ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_packages_cost_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, status, words = BROKEN[name]
    (tmp_path / "stand_in.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = Probe("p", "P", "python", "tests", ("package", "stand_in"), add="mend it")
    found = run_probes.look_at(probe, timeout_s=2 if name == "a hang" else 120)
    assert found.status == status
    assert words in found.detail
    assert "\n" not in found.detail
    assert found.add == ("" if status == "ok" else "mend it")
    if name == "noise on stdout":
        assert found.version == "1.2"


def test_one_broken_package_leaves_the_others(tmp_path: Path) -> None:
    (tmp_path / "einops.py").write_text("import os\nos.abort()")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command_line = [sys.executable, "-m", "localattn.cli", "doctor", "--format", "json", "-q"]
    finished = subprocess.run(command_line, capture_output=True, text=True, timeout=300, env=environment, check=False)
    report = json.loads(finished.stdout)
    assert finished.returncode == 0
    assert finding(report, "einops")["status"] == "broken"
    assert "pip install" in finding(report, "einops")["add"]
    assert finding(report, "safetensors")["status"] == "ok"
    assert not command(report, "export")["able"]
    assert command(report, "run model.onnx")["able"]


def test_a_look_that_raises_is_a_finding() -> None:
    def look_in_vain():
        raise PermissionError("not yours")

    found = run_probes.look_at(Probe("p", "P", "system", "tests", look=look_in_vain))
    assert (found.status, found.detail) == ("broken", "PermissionError: not yours")


def test_the_small_model_is_what_its_comment_says() -> None:
    model = onnx.load_model_from_string(probe_process.MODEL)
    onnx.checker.check_model(model, full_check=True)
    assert [(node.op_type, list(node.input)) for node in model.graph.node] == [("MatMul", ["x", "x"])]


def test_the_child_needs_only_the_standard_library() -> None:
    import ast

    tree = ast.parse(Path(probe_process.__file__).read_text(), feature_version=(3, 10))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name.split(".")[0] for node in top if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module).split(".")[0] for node in top if isinstance(node, ast.ImportFrom)}
    assert names <= set(sys.stdlib_module_names)


# --- what would add it ---


def test_commands_are_of_this_interpreter_and_release() -> None:
    words = shlex.split(install_hints.pip_install("onnxruntime"))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert len(words) == 5
    stated = importlib.metadata.requires("localattn") or []
    assert any(line.split(";")[0].strip() == words[4] for line in stated)
    assert install_hints.pip_install("some-other-package").endswith(" some-other-package")


def test_a_release_it_was_not_made_for_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("packaging")
    install_hints._requirements.cache_clear()
    monkeypatch.setattr(install_hints.metadata, "requires", lambda name: ['torch<2.14,>=2.13; extra == "exporter"'])
    try:
        probe = Probe("torch", "PyTorch", "python", "exporting", ("package", "torch"), package="torch")
        old = run_probes._judged(probe, {"status": "ok", "version": "2.4.0"})
        assert (old.status, old.works) == ("limited", True)
        assert "torch<2.14,>=2.13" in old.detail
        assert "torch<2.14,>=2.13" in old.add
        assert run_probes._judged(probe, {"status": "ok", "version": "2.13.0+cpu"}).status == "ok"
    finally:
        install_hints._requirements.cache_clear()


def test_without_metadata_the_bare_name_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_metadata(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    install_hints._requirements.cache_clear()
    monkeypatch.setattr(install_hints.metadata, "requires", no_metadata)
    try:
        assert install_hints.requirement("torch") == "torch"
        assert install_hints.allowed("torch", "1.0")
    finally:
        install_hints._requirements.cache_clear()


def test_driver_command_knows_whether_there_is_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "os-release").write_text("ID=ubuntu\n")
    assert "this machine has none" in driver_command(tmp_path / "none", tmp_path / "os-release")
    (tmp_path / "devices/0000:01").mkdir(parents=True)
    (tmp_path / "devices/0000:01/vendor").write_text("0x10de\n")
    assert driver_command(tmp_path / "devices", tmp_path / "os-release") == "sudo ubuntu-drivers install"
    assert driver_command(tmp_path / "devices", tmp_path / "no") == "sudo apt-get install nvidia-driver"


def test_pypis_gpu_runtime_is_not_for_a_jetson(tmp_path: Path) -> None:
    assert "onnxruntime-gpu[cuda,cudnn]" in gpu_runtime_command(tmp_path / "nv_tegra_release")
    (tmp_path / "nv_tegra_release").touch()
    assert gpu_runtime_command(tmp_path / "nv_tegra_release").startswith("localattn build")


def test_alternatives_and_repeats() -> None:
    missing = [Finding(name, name.upper(), "engines", "", "missing", add=f"add {name}") for name in ("a", "b", "c")]
    abilities = [Ability("one", "", (("a", "b"), ("c",))), Ability("two", "", (("d",),)), Ability("three", "")]
    one, two, three = judge(missing, abilities)
    assert (one.able, one.lacks, one.add) == (False, ("A or B", "C"), ("add a", "add c"))
    assert (two.able, two.lacks, two.add) == (False, ("d",), ())
    assert three.able
    there = [Finding("b", "B", "engines", "", "ok"), *missing]
    assert judge(there[:1] + missing[2:], abilities)[0].lacks == ("C",)
    text = as_markdown([Finding("a", "A|B", "engines", "x\ny", "broken", detail="p|q")], [one])
    shown = as_dict([Finding("a", "A", "engines", "", "ok", items=("x", "y"))], [one])
    assert json.loads(json.dumps(shown)) == shown, "JSON types alone"
    assert "A\\|B" in text
    assert "p\\|q" in text
    assert text.count("add a") == 1


def test_it_starts_without_the_heavy_packages() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch','onnx','onnxruntime','triton','numpy'), None));"
        "import localattn.doctor.run_probes, localattn.doctor.report, localattn.commands.doctor"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
