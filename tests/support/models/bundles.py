"""Bundles for the tests: made once a run, and copied by who alters them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from localattn.demo import checkpoint_path, config_path
from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest
from localattn.runtime.bundle.create import BundleRequest, create_bundle

from ...conftest import TINY, save_upstream
from .. import run_folder

WIDTH = 64  # of `save_branches`


def once(name: str, make: Callable[[Path], object]) -> Path:
    """What `make` writes to a path of this name, made by the first test of the run that asks for it."""
    return run_folder.once(f"models/{name}", lambda place: make(place / name)) / name


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The shipped model, exported."""
    return once(
        "pybytes.onnx",
        lambda path: export(ExportRequest(checkpoint_path(), path, config=config_path())),
    )


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A model of two layers, exported; a few kilobytes."""

    def make(path: Path) -> None:
        export(ExportRequest(save_upstream(path.parent, "local_attention.LocalTransformer", TINY), path))

    return once("tiny.onnx", make)


@pytest.fixture(scope="session")
def open_model() -> Path:
    """One layer with open batch and sequence."""

    def make(path: Path) -> None:
        checkpoint = save_upstream(path.parent, "local_attention.LocalTransformer", {**TINY, "depth": 1})
        export(ExportRequest(checkpoint, path, shapes=ShapeRequest(seq_len=16), dynamic=("batch", "seq")))

    return once("open.onnx", make)


@pytest.fixture(scope="session")
def tiny_bundle(tiny_model: Path) -> Path:
    """A bundle of the small model, as a folder."""
    return once("tiny", lambda path: create_bundle(BundleRequest(tiny_model, path)))


def run_script(bundle: Path, *arguments: str, python: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """The bundle's own script in a fresh interpreter in which neither localattn nor torch can be imported."""
    blocked = bundle.parent / "blocked"
    for name in ("localattn", "torch"):
        (blocked / name).mkdir(parents=True, exist_ok=True)
        (blocked / name / "__init__.py").write_text("raise ImportError('not on this device')\n")
    command = [*(python or [sys.executable]), str(bundle / "verify.py"), *arguments]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(blocked)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def save_branches(path: Path, data: str) -> None:
    """Write a model whose weights lie in the branches of an If, and their data in another file.

    It computes `x [3, 64]` → `y`: `x` times a matrix of ones where the sum of `x` is above 0, else of twos.
    """

    def branch(number: float) -> onnx.GraphProto:
        weight = numpy_helper.from_array(np.full((WIDTH, WIDTH), number, np.float32), f"weight_{number}")
        made = helper.make_tensor_value_info(f"y_{number}", TensorProto.FLOAT, [3, WIDTH])
        node = helper.make_node("MatMul", ["x", weight.name], [made.name])
        return helper.make_graph([node], f"times_{number}", [], [made], [weight])

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Constant", [], ["zero"], value_float=0.0),
        helper.make_node("Greater", ["sum", "zero"], ["above"]),
        helper.make_node("If", ["above"], ["y"], then_branch=branch(1.0), else_branch=branch(2.0)),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, WIDTH]) for name in ("x", "y"))
    graph = helper.make_graph(nodes, "branches", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path, save_as_external_data=True, location=data, size_threshold=1024)
