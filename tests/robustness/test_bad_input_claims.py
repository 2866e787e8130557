"""Files whose headers claim huge sizes do not make anything allocate them."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import json
import os
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnxscript.optimizer import _constant_folding

from localattn.core.storage.publishing import sealed, sidecar_path
from localattn.onnx_graph.standard_ops import rewrite

from ..conftest import Finished
from ..support.models.damaged import ONE_LAYER, folder, made, worker  # noqa: F401
from .fuzz.runner import Worker

Command = Callable[..., Finished]


def huge_safetensors(folder: Path) -> list[str]:
    header = json.dumps({"to_qkv.weight": {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}})
    (folder / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    return ["inspect", str(folder / "m.safetensors")]


def huge_header(folder: Path) -> list[str]:
    (folder / "m.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{" + b" " * 100)
    return ["inspect", str(folder / "m.safetensors")]


def huge_storage(folder: Path) -> list[str]:
    """A torch file whose pickle claims a storage of 2^31 - 1 numbers."""
    source = folder / "model.pt"
    with zipfile.ZipFile(source) as archive:
        members = {item.filename: archive.read(item) for item in archive.infolist()}
    name = next(name for name in members if name.endswith("data.pkl"))
    content = members[name]
    at = content.index(b"cpuq") + 5  # the number of elements follows the device
    size = {ord("K"): 2, ord("M"): 3, ord("J"): 5}[content[at]]
    members[name] = content[:at] + b"J\xff\xff\xff\x7f" + content[at + size :]
    with zipfile.ZipFile(folder / "m.pt", "w") as archive:
        for inner, data in members.items():
            archive.writestr(inner, data)
    return ["inspect", str(folder / "m.pt")]


def expanded_tensor(folder: Path) -> list[str]:
    import torch

    torch.save({"to_qkv.weight": torch.zeros(1).expand(1 << 20, 1 << 20)}, folder / "m.pt")
    return ["inspect", str(folder / "m.pt")]


def huge_npz(folder: Path) -> list[str]:
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1, 1099511627776)}\n"
    with zipfile.ZipFile(folder / "in.npz", "w") as archive:
        archive.writestr("tokens.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"12345678")
    return ["run", str(folder / "model.onnx"), "--load-inputs", str(folder / "in.npz")]


def bomb_npz(folder: Path) -> list[str]:
    with zipfile.ZipFile(folder / "in.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1, 33554432)}\n"
        head = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
        archive.writestr("tokens.npy", head + bytes((1 << 28) - 8))
    return ["run", str(folder / "model.onnx"), "--load-inputs", str(folder / "in.npz")]


def onnx_with(folder: Path, change: Callable[[Any], None], *arguments: str) -> list[str]:
    model = onnx.load(folder / "model.onnx")
    change(model)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return [*arguments, str(folder / "m.onnx")]


def huge_input(folder: Path) -> list[str]:
    def change(model: Any) -> None:
        model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1 << 40
        del model.graph.node[:]
        model.graph.node.add(op_type="Identity", input=["tokens"], output=["logits"])
        model.graph.output[0].CopyFrom(model.graph.input[0])
        model.graph.output[0].name = "logits"
        del model.graph.value_info[:]

    return onnx_with(folder, change, "run")


def huge_weights(command: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        def change(model: Any) -> None:
            model.graph.initializer[0].dims[:] = [1 << 40]

        return onnx_with(folder, change, command)

    return make


def huge_cache(folder: Path) -> list[str]:
    path = folder / "steps/step.onnx"
    document = json.loads(sidecar_path(path).read_bytes())
    for cache in document["step"]["caches"]:
        cache["shape"][0] = 1 << 40
    sidecar_path(path).write_text(sealed(json.dumps(document)))
    return ["generate", str(path), "--prompt-ids", "1", "--max-tokens", "1"]


def huge_sidecar(folder: Path) -> list[str]:
    os.truncate(sidecar_path(folder / "model.onnx"), 1 << 36)
    return ["run", str(folder / "model.onnx")]


def huge_config(folder: Path) -> list[str]:
    document = {"class": "local_attention.LocalTransformer", "kwargs": {**ONE_LAYER, "max_seq_len": 1 << 40}}
    (folder / "c.json").write_text(json.dumps(document))
    return [
        "export",
        str(folder / "model.pt"),
        "--config",
        str(folder / "c.json"),
        "--dry-run",
        "-o",
        str(folder / "x.onnx"),
    ]


def yaml_bomb(folder: Path) -> list[str]:
    lines = ["kwargs: {a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (folder / "c.yaml").write_text(",\n".join(lines) + "}\n")
    return ["inspect", str(folder / "model.pt"), "--config", str(folder / "c.yaml")]


CLAIMS: dict[str, Callable[[Path], list[str]]] = {
    "safetensors": huge_safetensors,
    "safetensors header": huge_header,
    "torch storage": huge_storage,
    "expanded tensor": expanded_tensor,
    "npz": huge_npz,
    "npz bomb": bomb_npz,
    "onnx input": huge_input,
    "onnx weights": huge_weights("run"),
    "onnx weights, inspected": huge_weights("inspect"),
    "cache of a step file": huge_cache,
    "sidecar": huge_sidecar,
    "config": huge_config,
    "aliases in yaml": yaml_bomb,
}


# Read without an error: sizes are only told, or the claim is not what decides.
HARMLESS = ("onnx weights, inspected", "torch storage")


@pytest.mark.parametrize("name", CLAIMS)
def test_claimed_sizes_are_not_allocated(name: str, folder: Path, worker: Worker) -> None:
    for command in ("run", "inspect"):  # what is imported once does not count
        worker.ask([command, str(folder / ("model.onnx" if command == "run" else "model.pt"))], folder, {})
    answer = worker.ask(CLAIMS[name](folder), folder, {})
    assert answer.get("escaped") == "", answer
    assert answer["grown"] < (600 << 20 if name == "npz bomb" else 64 << 20)  # a bomb's bytes are all there
    if name not in HARMLESS:
        assert answer["code"] == (3 if name == "onnx input" else answer["code"]), answer
        assert answer["code"] in (1, 2, 3), answer
        # The stages of a command may stand before it.
        assert [line[:7] for line in answer["err"].splitlines()].count("Error: ") == 1


# Constants whose values say how many numbers follow from them.
GROWING = {
    "a Range": "r = Range (zero, many, one)  y = Cast <to = 1> (r)",
    "an Expand": "s = Unsqueeze (many, first)  e = Expand (one, s)  y = Cast <to = 1> (e)",
    "a Tile": "s = Unsqueeze (many, first)  t = Tile (first, s)  y = Cast <to = 1> (t)",
    "two axes": "s = Unsqueeze (row, second)  p = Add (row, s)  y = Cast <to = 1> (p)",
    "texts": "t0 = StringConcat (text, text)"
    + "".join(f"  t{index} = StringConcat (t{index - 1}, t{index - 1})" for index in range(1, 22))
    + "  s = Size (t21)  y = Cast <to = 1> (s)",
    "joined": "j0 = Concat <axis = 0> (row, row)"
    + "".join(f"  j{index} = Concat <axis = 0> (j{index - 1}, j{index - 1})" for index in range(1, 12))
    + "  y = Cast <to = 1> (j11)",
}


@pytest.mark.parametrize("kind", GROWING)
def test_constants_that_grow_are_not_computed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does shape inference make an object of each number: 2^24 of them took gigabytes."""
    row = ", ".join(map(str, range(4096)))
    text = f"""<ir_version: 10, opset_import: ["": 20]> g (float x) => (float y)
        <int64 zero = {{0}}, int64 many = {{16777216}}, int64 one = {{1}}, string[1] text = {{"text"}},
        int64[1] first = {{0}}, int64[1] second = {{1}}, int64[4096] row = {{{row}}}> {{ {GROWING[kind]} }}"""
    model = onnx.parser.parse_model(text)
    largest = 0
    evaluate = _constant_folding._reference_evaluator.evaluate

    def measured(domain: str, kind: str, version: int, *inputs: Any, **attributes: Any) -> Any:
        nonlocal largest
        found = evaluate(domain, kind, version, *inputs, **attributes)
        largest = max([largest, *(len(str(each)) if each.dtype == object else each.size for each in [found])])
        return found

    monkeypatch.setattr(_constant_folding._reference_evaluator, "evaluate", measured)
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rewrite.apply(ir.serde.deserialize_model(model))
    assert largest <= 1 << 20
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - started) >> 10 < 500  # MiB


def test_an_engine_without_memory_is_exit_code_3(tmp_path: Path, worker: Worker) -> None:
    text = """<ir_version: 10, opset_import: ["": 20]> g (float x) => (float y) <int64[1] many = {274877906944}>
        { c = ConstantOfShape (many)  r = ReduceSum <keepdims = 0> (c)  y = Add (x, r) }"""
    (tmp_path / "m.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
    answer = worker.ask(["run", str(tmp_path / "m.onnx")], tmp_path, {})
    assert answer["code"] == 3 and "not enough memory" in answer["err"], answer


def test_no_memory_is_a_clear_error(folder: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 8.00 TiB")

    monkeypatch.setattr("localattn.runtime.inputs.example_inputs.random_inputs", fail)
    finished = localattn("run", folder / "model.onnx")
    assert finished.code == 3 and "not enough memory" in finished.err and "8.00 TiB" in finished.err
