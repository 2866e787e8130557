"""A plugin library driven as TensorRT drives it, by `tests/support/native/sources/hosts/drive.cpp`, on a stand-in for
CUDA."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from localattn.core.geometry import WindowGeometry
from localattn.core.nodes.aft import AFT_VARIANTS
from localattn.core.nodes.attention import HEADS_FIRST, NodeAttributes
from localattn.core.nodes.gpu import RINGS, SERVED, SERVED_BY_OP_TYPE, KernelAttributes
from localattn.core.nodes.grouped import GroupedAttributes
from localattn.plugins.kernel.spec import KernelSpec, spec_for
from localattn.plugins.library.sidecar import Arch, host_arch

from .plugin_build import DTYPE, HEAD_DIM, emulator, library, program, stand_in_driver

OP_TYPES = [node.op_type for node in SERVED]
AFT_OP_TYPES = [variant.op_type for variant in AFT_VARIANTS]
RING_OP_TYPES = [variant.op_type for variant in RINGS]
GROUPED = [name for name in OP_TYPES if name.startswith(("Grouped", "Global"))]
WINDOWED = [name for name in OP_TYPES if name not in GROUPED]
BATCH, LENGTH, HEADS = 2, 100, 3
WINDOW = NodeAttributes(WindowGeometry(32, 1, 0, causal=True, exact_windowsize=True), 0.125)
# Where the program says its inputs and its output lie.
INPUT_GAP, OUTPUT = 0x4000_0000, 0x9_0000_0000
CASES = {
    "causal exact": WINDOW,
    "block-local": NodeAttributes(WindowGeometry(17, 2, 3), 8**-0.5, perm=HEADS_FIRST),
    "shared, negative scale": NodeAttributes(WindowGeometry(8, 0, 0), -1.5, shared_qk=True),
    "exact, both sides": NodeAttributes(WindowGeometry(1024, 1, 1, exact_windowsize=True), 1.0),
}


# Of a grouped node: heads of queries for each of keys.
GROUP = 3


def attributes_for(op_type: str, attributes: NodeAttributes) -> KernelAttributes:
    """The attributes of a node of this op type: its window, scale and layout, and what only this op type has."""
    node = SERVED_BY_OP_TYPE[op_type]
    if op_type in WINDOWED:
        shared_qk = attributes.shared_qk and not node.has_xpos  # the libraries of the tests have no kernel with both
        return replace(attributes, shared_qk=shared_qk, xpos_scale_base=16.0 if node.has_xpos else 0.0)
    geometry = attributes.geometry
    if op_type.startswith("Global"):
        geometry = WindowGeometry.all_keys(causal=geometry.causal)
    return GroupedAttributes(geometry, attributes.scale, 2.5 if "Softcap" in op_type else 0.0, attributes.perm)


def spec_of(op_type: str, attributes: KernelAttributes) -> KernelSpec:
    """The kernel in the library for a node."""
    shared_qk = getattr(attributes, "shared_qk", False)
    return spec_for(SERVED_BY_OP_TYPE[op_type], DTYPE, HEAD_DIM, shared_qk=shared_qk)


def fields_of(attributes: KernelAttributes, **changed: str) -> list[str]:
    """The attributes as `drive` takes them; the empty text leaves one out."""
    values = {
        name: f"{value!r}f" if isinstance(value, float) else ",".join(map(str, value if name == "perm" else [value]))
        for name, value in attributes.as_onnx().items()
        if not name.startswith("plugin_")
    }
    return [f"{name}={value}" for name, value in (values | changed).items() if value]


class Driven:
    """What `drive` printed, what the driver was asked, the PTX it was given last, and the messages."""

    def __init__(self, finished: subprocess.CompletedProcess[str], log: Path) -> None:
        assert finished.returncode == 0, finished.stderr
        self.shown: dict[str, Any] = json.loads(finished.stdout)
        self.messages = finished.stderr
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        self.loads = [call for call in calls if call["call"] == "load"]
        ptx = log.with_name(log.name + ".ptx")
        self.ptx = ptx.read_text() if ptx.exists() else ""
        self._log = log
        self.calls = calls
        self.launches = [call for call in calls if call["call"] == "launch"]

    def ptx_of(self, entry: str) -> str:
        """The PTX that has a kernel."""
        return self._log.with_name(f"{self._log.name}.{entry}").read_text()


def drive(
    tmp_path: Path,
    op_type: str = "WindowedAttention",
    fields: list[str] | None = None,
    *,
    arch: Arch | None = None,
    dtype: str = DTYPE,
    shape: tuple[int, ...] = (BATCH, LENGTH, HEADS, HEAD_DIM),
    capability: int = 86,
    refuse: str = "",
    driver: bool = True,
    tensorrt: Path | None = None,
    **circumstances: str,
) -> Driven:
    """Make a plugin from fields and launch it twice, with the stand-in for the CUDA driver.

    `circumstances` are further variables of `drive` and `fake_cuda`, in lower case.
    """
    arch = arch or host_arch()
    log = tmp_path / "calls"
    for old in tmp_path.glob("calls*"):
        old.unlink()
    environment = {"FAKE_CUDA_LOG": str(log), "FAKE_CUDA_CAPABILITY": str(capability), "FAKE_CUDA_REFUSE": refuse}
    environment |= {name.upper(): value for name, value in circumstances.items()}
    if driver:
        environment["LD_LIBRARY_PATH"] = str(stand_in_driver(arch))
    if tensorrt is not None:
        environment["DRIVE_TENSORRT"] = str(tensorrt)
    command = [*emulator(arch), program(arch, "drive.cpp"), library(arch).path, op_type, dtype]
    finished = subprocess.run(
        [*map(str, command), ",".join(map(str, shape)), *(fields_of(WINDOW) if fields is None else fields)],
        env={key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"} | environment,
        capture_output=True,
        text=True,
    )
    return Driven(finished, log)
