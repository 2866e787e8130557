"""List the probes of a machine."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core.machine.execution_providers import short_name
from ..runtime.backends.registry import backends
from .install_hints import pip_install

Status = Literal["ok", "limited", "missing", "broken"]
Area = Literal["system", "python", "engines", "gpu", "plugin"]
# The result of a look: status, version, detail, items.
Looked = tuple[Status, str, str, tuple[str, ...]]


@dataclass(frozen=True)
class Finding:
    """The result of a probe.

    Args:
        name: name of the probe.
        title: its name in reports.
        area: the part of the report it belongs to.
        serves: its purpose.
        status: `ok`; `limited`: present, but not fit for everything; `missing`; `broken`: present, but it fails.
        version: its release; "" where it has none.
        detail: one more line.
        items: several more lines: providers, GPUs, libraries.
        add: the command that adds or repairs it; "" where all is well, or where no command does.
    """

    name: str
    title: str
    area: Area
    serves: str
    status: Status
    version: str = ""
    detail: str = ""
    items: tuple[str, ...] = ()
    add: str = ""

    @property
    def works(self) -> bool:
        """Whether commands can use it."""
        return self.status in ("ok", "limited")


@dataclass(frozen=True)
class Probe:
    """A probe for one package or device.

    Args:
        name: how commands refer to it.
        title: its name in reports.
        area: the part of the report it belongs to.
        serves: its purpose.
        ask: arguments of the child process that looks; empty where `look` does.
        look: a function that looks in this process and cannot crash.
        package: the distribution that brings it, whose release the package's metadata names; "" for none.
        add: the command that adds it, where that is not `pip install` of the package.
    """

    name: str
    title: str
    area: Area
    serves: str
    ask: tuple[str, ...] = ()
    look: Callable[[], Looked] | None = None
    package: str = ""
    add: str = ""

    def command(self) -> str:
        """Return the command that adds it."""
        return self.add or (pip_install(self.package) if self.package else "")

    def found(self, status: Status, version: str = "", detail: str = "", items: tuple[str, ...] = ()) -> Finding:
        """Make the finding of this probe."""
        add = "" if status == "ok" else self.command()
        return Finding(self.name, self.title, self.area, self.serves, status, version, detail, items, add)


_JETSON = Path("/etc/nv_tegra_release")


def _python() -> Looked:
    return "ok", platform.python_version(), sys.executable, ()


def _machine() -> Looked:
    jetson = (_JETSON.read_text(errors="replace").split("\n")[0],) if _JETSON.is_file() else ()
    return "ok", platform.release(), f"{platform.system()} on {platform.machine()}, {os.cpu_count()} CPUs", jetson


def _memory() -> Looked:
    """Measure physical memory, and the space where files are written."""
    items = []
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
        items.append(f"memory {total / 2**30:.1f} GiB, {free / 2**30:.1f} free")
    space = shutil.disk_usage(Path.cwd())
    items.append(f"disk here {space.total / 2**30:.1f} GiB, {space.free / 2**30:.1f} free")
    return ("ok" if space.free > 1 << 30 else "limited"), "", "; ".join(items), ()


def _kernel_lens() -> Looked:
    """Find the package kernel-lens without importing it: only its files are used."""
    from importlib import metadata

    try:
        return "ok", metadata.version("kernel-lens"), "a copy of TensorRT's headers", ()
    except metadata.PackageNotFoundError:
        return "missing", "", "No package kernel-lens.", ()


def driver_command(devices: Path = Path("/sys/bus/pci/devices"), system: Path = Path("/etc/os-release")) -> str:
    """Return the command that would add a CUDA driver, with a remark where there is no NVIDIA GPU."""
    ubuntu = system.is_file() and "ubuntu" in system.read_text(errors="replace")
    command = "sudo ubuntu-drivers install" if ubuntu else "sudo apt-get install nvidia-driver"
    there = any(path.read_text().strip() == "0x10de" for path in devices.glob("*/vendor"))
    return command if there else f"{command}  # and an NVIDIA GPU: this machine has none"


def gpu_runtime_command(jetson: Path = _JETSON) -> str:
    """Return the command that adds onnxruntime for the GPU; PyPI's wheels have no kernels for Jetson."""
    if jetson.is_file():
        return "localattn build model.onnx  # an engine: PyPI's onnxruntime-gpu is not made for Jetson's GPU"
    remove = f"{sys.executable} -m pip uninstall -y onnxruntime onnxruntime-gpu"
    return f"{remove} && {pip_install('onnxruntime-gpu[cuda,cudnn]')}"


def tensorrt_command() -> str:
    """Return the command that adds TensorRT: JetPack's own on a Jetson, elsewhere NVIDIA's packages."""
    if _JETSON.is_file():
        return "sudo apt-get install nvidia-jetpack"
    return pip_install("tensorrt")


# Providers that call models on a server instead of running them here. onnxruntime's own wheel has this one.
REMOTE_PROVIDERS = frozenset({"AzureExecutionProvider"})


def provider_probe(name: str) -> Probe:
    """Make the probe for a provider that this onnxruntime has and localattn does not offer."""
    return _provider(name, short_name(name), name, "not used by localattn")


def _provider(name: str, place: str, provider: str, serves: str, package: str = "", add: str = "") -> Probe:
    return Probe(name, f"onnxruntime on {place}", "engines", serves, ("provider", provider), None, package, add)


def _package(name: str, title: str, area: Area, serves: str, package: str = "", add: str = "") -> Probe:
    return Probe(name, title, area, serves, ask=("package", name), package=package or name, add=add)


# What adds a distribution where that is not its bare name for pip.
_HOW_TO_ADD = {"onnxruntime-gpu": gpu_runtime_command, "tensorrt": tensorrt_command}


def _runtimes() -> list[Probe]:
    """Make the probes of all runtimes; what several need is looked for once, where the last names it."""
    lines = {line.name: line for backend in reversed(backends()) for line in reversed(backend.doctor_lines())}
    return [
        Probe(
            line.name,
            line.title,
            "engines",
            line.serves,
            line.ask,
            package=line.distribution,
            add=_HOW_TO_ADD[line.add]() if line.add else "",
        )
        for line in reversed(lines.values())
    ]


PROBES: tuple[Probe, ...] = (
    Probe("python", "Python", "system", "everything", look=_python),
    Probe("machine", "System", "system", "everything", look=_machine),
    Probe("memory", "Memory and disk", "system", "everything", look=_memory),
    Probe(
        "torch", "PyTorch", "python", "reading checkpoints, exporting", ("package", "torch", "cuda"), package="torch"
    ),
    _package("onnx", "onnx", "python", "reading and checking ONNX files"),
    _package("onnxscript", "onnxscript", "python", "exporting"),
    _package("onnx_ir", "onnx-ir", "python", "exporting", "onnx-ir"),
    _package("einops", "einops", "python", "exporting"),
    _package("safetensors", "safetensors", "python", "reading .safetensors"),
    _package("transformers", "transformers", "python", "Hugging Face models"),
    _package("tokenizers", "tokenizers", "python", "text of models with a tokenizer.json"),
    _package("yaml", "PyYAML", "python", "reading YAML configurations", "pyyaml"),
    _package("jinja2", "Jinja2", "python", "reports as HTML pages"),
    *_runtimes(),
    Probe("driver", "CUDA driver", "gpu", "running on a GPU", ("driver",), add=driver_command()),
    _package("triton", "Triton", "plugin", "compiling the attention kernel"),
    Probe("kernel_lens", "kernel-lens", "plugin", "TensorRT's headers", look=_kernel_lens, package="kernel-lens"),
)
