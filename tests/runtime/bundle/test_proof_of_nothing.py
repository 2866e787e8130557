"""Bundles whose samples prove nothing: said so, and exit code 1, by every way to verify one."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from localattn.core.storage.files import sha256
from localattn.core.tolerance import TOLERANCES
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.device.results import USUAL
from localattn.runtime.inputs.arrays import load_arrays
from localattn.runtime.session import load

from ...conftest import Finished
from ...support.models.bundles import tiny_bundle, tiny_model  # noqa: F401

Arrays = Mapping[str, np.ndarray[Any, Any]]
Command = Callable[..., Finished]


def changed(
    bundle: Path,
    to: Path,
    outputs: Callable[[Arrays], Arrays] = dict,
    manifest: Callable[[dict[str, Any]], object] = bool,
) -> Path:
    """A copy of a bundle with other expected outputs and another manifest, sealed again."""
    shutil.copytree(bundle, to)
    document = json.loads((to / "manifest.json").read_text())
    for sample in document["samples"]:
        np.savez(to / sample["outputs"], **outputs(load_arrays(to / sample["outputs"])))
    manifest(document)
    for entry in document["files"]:
        path = to / entry["path"]
        entry |= {"size": path.stat().st_size, "sha256": sha256(path)}
    (to / "manifest.json").write_text(json.dumps(document))
    return to


def widened(atol: float) -> Callable[[dict[str, Any]], object]:
    return lambda document: [model["tolerance"].update(atol=atol, cosine=None) for model in document["models"]]


def nothing(arrays: Arrays) -> Arrays:
    return {}


def huge(arrays: Arrays) -> Arrays:
    return {name: np.linspace(1e30, 2e30, x.size, dtype=x.dtype).reshape(x.shape) for name, x in arrays.items()}


CASES = {
    "no outputs": (nothing, bool, "no expected outputs, so nothing was compared"),
    "endless": (dict, widened(1e300), "an output of zeros would pass"),
    "endless and wrong": (huge, widened(1e300), "an output of zeros would pass"),
    "wide": (dict, widened(1e3), "an output of zeros would pass"),
}


@contextmanager
def served_by(bundle: Path) -> Iterator[str]:
    """The address of a small server of the protocol, which runs the bundle's model in onnxruntime."""
    (path,) = bundle.glob("model/*.onnx")
    session = load(path, provider="cpu", plugin="none")
    types = {"int64": "INT64", "float32": "FP32", "bool": "BOOL"}

    class Handler(BaseHTTPRequestHandler):
        def answer(self, document: object) -> None:
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            inputs = [{"name": x.name, "datatype": types[x.dtype], "shape": list(x.shape)} for x in session.inputs]
            self.answer({"name": "small", "extensions": [], "inputs": inputs})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            names = {name: dtype for dtype, name in types.items()}
            inputs = {x["name"]: np.array(x["data"], names[x["datatype"]]).reshape(x["shape"]) for x in asked["inputs"]}
            found = session.run(inputs)
            outputs = [
                {"name": name, "datatype": types[str(x.dtype)], "shape": x.shape, "data": x.ravel().tolist()}
                for name, x in found.items()
            ]
            self.answer({"outputs": outputs})

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("case", CASES)
def test_a_bundle_that_proves_nothing(case: str, tiny_bundle: Path, tmp_path: Path, localattn: Command) -> None:
    outputs, manifest, told = CASES[case]
    bundle = changed(tiny_bundle, tmp_path / "b", outputs, manifest)
    by_script = subprocess.run([sys.executable, bundle / "verify.py"], capture_output=True, text=True, check=False)
    by_command = localattn("bundle", "verify", bundle)
    for code, text in ((by_script.returncode, by_script.stdout), (by_command.code, by_command.out)):
        assert code == 1 and told in text and "ok " not in text, text
        assert ("1e+300" in text) == (case.startswith("endless")) or "1000" in text
    document = json.loads(localattn("bundle", "verify", bundle, "--format", "json").out)
    assert document["code"] == 1 and document["passed"] is False
    assert not any(row["passed"] for row in document["rows"])


@pytest.mark.parametrize("case", CASES)
def test_a_server_that_is_asked_for_nothing(case: str, tiny_bundle: Path, tmp_path: Path, localattn: Command) -> None:
    outputs, manifest, told = CASES[case]
    bundle = changed(tiny_bundle, tmp_path / "b", outputs, manifest)
    with served_by(tiny_bundle) as address:
        found = localattn("bundle", "verify", bundle, "--server", address, "--model", "tiny")
        good = localattn("bundle", "verify", tiny_bundle, "--server", address, "--model", "tiny")
    assert found.code == 1 and told in found.out, found
    assert good.code == 0, good


def test_a_tolerance_that_is_not_the_usual_one_is_shown(tiny_bundle: Path, tmp_path: Path, localattn: Command) -> None:
    usual = localattn("bundle", "verify", tiny_bundle)
    assert usual.code == 0 and "within atol" not in usual.out
    bundle = changed(tiny_bundle, tmp_path / "b", manifest=widened(2e-4))
    found = localattn("bundle", "verify", bundle)
    assert found.code == 0 and "within atol 0.0002 + rtol 0.0001" in found.out


def test_the_usual_tolerances_are_those_of_the_package() -> None:
    for name, precision in (("float32", "fp32"), ("float16", "fp16"), ("bfloat16", "bf16")):
        table = TOLERANCES[precision]
        assert USUAL[name] == {"atol": table.atol, "rtol": table.rtol, "cosine": table.cosine}


def test_a_model_without_samples_is_named(tiny_bundle: Path, tmp_path: Path, localattn: Command) -> None:
    def without(document: dict[str, Any]) -> None:
        document["samples"] = []

    bundle = changed(tiny_bundle, tmp_path / "b", manifest=without)
    found = localattn("bundle", "verify", bundle)
    assert found.code == 0 and "has no samples, so no model was run" in found.out


def test_outputs_below_the_absolute_tolerance_are_bounded_otherwise(tmp_path: Path, localattn: Command) -> None:
    """Probabilities over a large vocabulary: all below 1e-4, so zeros would pass without a bound of the cosine."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 500_000])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 500_000])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Softmax", ["x"], ["y"])], "g", [x], [y])
    path = tmp_path / "m.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=9), path)
    created = create_bundle(BundleRequest(path, tmp_path / "b", as_tar=False, samples=1))
    assert created.manifest["models"][0]["tolerance"]["cosine"] == 0.999
    assert localattn("bundle", "verify", tmp_path / "b").code == 0
    zeros = changed(tmp_path / "b", tmp_path / "c", lambda arrays: {name: x * 0 for name, x in arrays.items()})
    assert localattn("bundle", "verify", zeros).code == 1
