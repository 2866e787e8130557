"""The recipes of CONTRIBUTING.md, tried as patches on a copy of the tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_NOT_COPIED = shutil.ignore_patterns(".*", "tests", "benchmarks", "docs", "examples", "release", "__pycache__", "*.png")
# Exports a checkpoint, steps, a module and a conversion; then again with a writer that forgets the name of a node.
_DRIVER = """
import json, sys
from pathlib import Path
import onnx, torch
from local_attention import LocalMHA, LocalTransformer
from localattn import export, export_module
from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import CheckFailed
from localattn.exporter.jobs import convert
from localattn.exporter import pipeline

folder = Path(sys.argv[1])
sizes = {"num_tokens": 17, "max_seq_len": 16, "dim": 16, "depth": 1, "dim_head": 8, "heads": 2}
sizes |= {"local_attn_window_size": 4, "causal": True}
torch.save(LocalTransformer(**sizes).state_dict(), folder / "m.pt")
known = {"class": "local_attention.LocalTransformer", "kwargs": sizes, "hyper_connections": "0.4.11"}
(folder / "m.json").write_text(json.dumps(known))
module = LocalMHA(dim=16, window_size=4, causal=True, dim_head=8, heads=2).eval()
quick = {"checks": "quick", "overwrite": True}

def checks(kind):
    path = folder / f"{kind}.onnx"
    if kind == "checkpoint":
        export(folder / "m.pt", path, **quick)
    elif kind == "steps":
        export(folder / "m.pt", path, mode="step", **quick)
    elif kind == "module":
        export_module(module, ["x:float32:[1,16,16]"], path, **quick)
    else:
        convert.to_standard_ops(folder / "checkpoint.onnx", path, overwrite=True, checks="quick")
    return {check.name: check.status for check in read_sidecar(path).checks}

def forgetful(model, path, *rest, save=pipeline.save_model):
    data = save(model, path, *rest)
    written = onnx.load(path, load_external_data=False)
    written.graph.node[0].name = ""
    onnx.save(written, path)
    return data

KINDS = ("checkpoint", "steps", "module", "convert")
found = {kind: checks(kind) for kind in KINDS}
pipeline.save_model = forgetful
faults = {}
for kind in KINDS:
    try:
        checks(kind)
    except CheckFailed as error:
        faults[kind] = [error.what, error.why]
print(json.dumps({"found": found, "faults": faults}))
"""

# Exports with the option that the recipe adds, in every way that there is.
_OPTION = """
import importlib.util, inspect, localattn
from localattn.cli import command_line

pipeline.save_model = forgetful.__kwdefaults__["save"]

def told(name):
    sidecar = read_sidecar(folder / name)
    return [onnx.load(folder / name, load_external_data=False).producer_name, sidecar.options.get("producer_name")]

export(folder / "m.pt", folder / "step.onnx", mode="step", producer_name="mine", **quick)
export_module(module, ["x:float32:[1,16,16]"], folder / "own.onnx", producer_name="mine", **quick)
typed = ["export", folder / "m.pt", "-o", folder / "typed.onnx", "--producer-name", "mine", "--checks", "quick"]
command_line(("export",))([str(word) for word in typed], standalone_mode=False)
spec = importlib.util.spec_from_file_location("generate", sys.argv[2])
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)
names = ("step", "step.prefill", "own", "typed", "checkpoint")
parameters = [inspect.signature(function).parameters for function in (localattn.export, localattn.export_module)]
print(json.dumps({
    "told": {name: told(f"{name}.onnx") for name in names},
    "annotations": [found["producer_name"].annotation for found in parameters],
    "help": "producer_name: Name of the program" in localattn.export.__doc__,
    "docs": " ".join(generate.page().split()),
}))
"""


# Runs a file in the runtime that the recipe adds, by the library and by commands, and asks the doctor for it.
_RUNTIME_DRIVER = """
import contextlib, io, json, sys
import numpy as np
import onnx.parser
from localattn import load
from localattn.cli import in_this_process
from localattn.core.errors import LocalAttnError
from localattn.doctor.abilities import judge
from localattn.doctor.probes import PROBES
from localattn.doctor.run_probes import run_probes

path = sys.argv[1]
graph = 'g (float[2,3] x) => (float[2,3] y) <float[3,3] w = {2,0,0, 0,2,0, 0,0,2}> { y = MatMul(x, w) }'
onnx.save(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> {graph}'), path)
session = load(path, runtime="toy")
x = np.ones((2, 3), np.float32)
answer = {"backend": session.backend, "sum": float(session.run({"x": x})["y"].sum()), "auto": load(path).backend}

def ran(*arguments):
    sys.argv, out = ["localattn", *arguments], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        in_this_process()
    return out.getvalue()

from localattn.runtime.backends.toy.session import ToySession

calls, execute = [], ToySession._execute
ToySession._execute = lambda session, inputs: calls.append(inputs) or execute(session, inputs)
shown = json.loads(ran("run", path, "--runtime", "toy", "--format", "json"))
compared = json.loads(ran("parity", path, "--against", path, "--runtime", "toy", "--format", "json"))
answer["run"], answer["parity"], answer["calls"] = shown["backend"], compared["passed"], len(calls)
try:
    load(path, "gpu", runtime="toy")
except LocalAttnError as error:
    answer["refused"] = [error.what, error.fix]
try:
    load(path, runtime="no")
except LocalAttnError as error:
    answer["known"] = error.fix
findings = run_probes([probe for probe in PROBES if probe.name == "toy"])
verdict = next(verdict for verdict in judge(findings) if verdict.ability.command == "run --runtime toy")
answer["doctor"] = [findings[0].title, findings[0].status, verdict.able]
print(json.dumps(answer))
"""


# Inspects two types of Hugging Face models, one of which has a file of its own, and exports a model of a new family.
_MODELS_DRIVER = """
import json, sys
from pathlib import Path
import transformers
from safetensors.torch import save_file
from localattn import export
from localattn.core.documents.sidecar import read_sidecar
from localattn.core.errors import UsageError
from localattn.exporter.checkpoint.open_checkpoint import open_checkpoint
from localattn.exporter.options import ShapeRequest
from localattn.exporter.models.toy import family as toy

folder, answers = Path(sys.argv[1]), {}
tiny = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
tiny |= {"num_key_value_heads": 1, "num_hidden_layers": 1, "max_position_embeddings": 256, "sliding_window": 16}
tiny |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "original_max_position_embeddings": 64}
for kind, config, model in (
    ("phi3", transformers.Phi3Config, transformers.Phi3ForCausalLM),
    ("mistral", transformers.MistralConfig, transformers.MistralForCausalLM),
):
    model(config(**tiny)).save_pretrained(folder / kind)
    opened, refused = open_checkpoint(folder / kind), ""
    try:
        opened.source(ShapeRequest(seq_len=100))
    except UsageError as error:
        refused = error.why
    answers[kind] = (opened.notes, opened.resolved.args.longest, refused)

values = {"vocab_size": 31, "width": 16, "heads": 2, "window": 4, "max_length": 29}
(folder / "tagger").mkdir()
weights = toy.Tagger(toy.TaggerArgs(**values)).state_dict()
save_file({name: 2 * tensor for name, tensor in weights.items()}, folder / "tagger" / "model.safetensors")
(folder / "tagger" / "config.json").write_text(json.dumps({"model_type": "toy", **values}))
export(folder / "tagger", folder / "tagger.onnx", dynamic=[], checks="quick")
written = read_sidecar(folder / "tagger.onnx")
answers["toy"] = {
    "class": written.class_name,
    "outputs": [output.name for output in written.outputs],
    "checks": {check.name: check.status for check in written.checks},
}
print(json.dumps(answers))
"""


def recipe(title: str) -> list[str]:
    """The blocks below a heading of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    return re.findall(r"```(?:python|text)\n(.*?)```", section, re.DOTALL)


def insert(path: Path, pattern: str, added: str) -> None:
    """Add lines below the first line that matches a pattern."""
    text = path.read_text()
    changed = re.sub(rf"(?m)^({pattern})$", lambda found: f"{found[1]}\n{added.rstrip()}", text, count=1)
    assert changed != text, (path, pattern)
    path.write_text(changed)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, to which each recipe is added."""
    copy = tmp_path_factory.mktemp("recipes") / "localattn"
    shutil.copytree(ROOT, copy, ignore=_NOT_COPIED)
    return copy


def answers_of(driver: str, argument: Path, tree: Path) -> list[dict[str, Any]]:
    """The JSON that a program prints, run with the changed copy of the package."""
    ran = subprocess.run(
        [sys.executable, "-c", driver, str(argument), str(ROOT / "docs" / "generate.py")],
        env={**os.environ, "PYTHONPATH": str(tree.parent)},
        cwd=tree.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def exports(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What exports answer with one more check and one more option."""
    pytest.importorskip("local_attention")
    file, row = recipe("Adding a check")
    (tree / "exporter/checks/node_names.py").write_text(file)
    table = tree / "exporter/checks/table.py"
    insert(table, r"from \.loads .*", "from .node_names import check_node_names")
    insert(table, r"CHECKS: .*= \(", row)
    field, use = recipe("Adding an option of export")
    insert(tree / "exporter/options.py", r'    """What a file to write is asked to be."""', f"\n{field}")
    form = tree / "exporter/artifact/form.py"
    text = form.read_text()
    form.write_text(text.replace("    windows = [_window_record", f"{use}    windows = [_window_record", 1))
    assert form.read_text() != text
    return answers_of(_DRIVER + _OPTION, tmp_path_factory.mktemp("exports"), tree)


def test_a_check_of_every_export_is_a_file_and_a_row(exports: list[dict[str, Any]]) -> None:
    answer = exports[0]
    assert [kind for kind, checks in answer["found"].items() if checks["node names"] == "passed"] == [*answer["found"]]
    assert len(answer["faults"]) == 4
    for what, why in answer["faults"].values():
        assert "node names" in what and "1 node(s) have no name" in why


def test_an_option_of_export_is_a_field_and_its_use(exports: list[dict[str, Any]]) -> None:
    answer = exports[1]
    assert answer["told"].pop("checkpoint") == ["localattn", None]
    mine = ["mine", "mine"]
    assert answer["told"] == {"step": mine, "step.prefill": mine, "own": mine, "typed": mine}
    assert answer["annotations"] == ["str", "str"] and answer["help"]
    assert "- `--producer-name` TEXT: Name of the program that wrote the file" in answer["docs"]


def test_a_runtime_is_a_folder_and_a_row(tree: Path, tmp_path: Path) -> None:
    *files, row = recipe("Adding a runtime")
    folder = tree / "runtime/backends/toy"
    folder.mkdir()
    for name, text in zip(("package.py", "session.py", "backend.py"), files, strict=True):
        (folder / name).write_text(text)
    (folder / "__init__.py").write_text('"""A toy."""\n')
    table = tree / "runtime/backends/registry.py"
    changed = re.sub(r"(?m)^(ROWS = \{\n)((?: .*\n)+)", rf"\1\2{row}", table.read_text(), count=1)
    assert changed != table.read_text()
    table.write_text(changed)
    (answer,) = answers_of(_RUNTIME_DRIVER, tmp_path / "model.onnx", tree)
    assert (answer["backend"], answer["sum"], answer["auto"]) == ("toy", 12.0, "onnxruntime")
    assert (answer["run"], answer["parity"]) == ("toy", True)
    assert answer["calls"] == 1 + 3  # `run` and the three seeds of `parity`, whose reference is onnxruntime
    assert answer["refused"] == ["There is no provider 'gpu' for the toy.", "Known: auto, cpu."]
    assert answer["known"].startswith("Known: auto, onnxruntime, openvino, toy;")
    assert answer["doctor"] == ["the toy", "ok", True]


@pytest.fixture(scope="module")
def models(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a copy of the tree answers that has the type and the family of the recipes."""
    pytest.importorskip("transformers", minversion="5.23")
    _add_type(tree)
    _add_family(tree)
    (answer,) = answers_of(_MODELS_DRIVER, tmp_path_factory.mktemp("models"), tree)
    return answer


def _add_type(copy: Path) -> None:
    (file,) = recipe("Adding a Hugging Face type")
    path = copy / "exporter/models/hugging_face/types/phi3.py"
    assert not path.exists()
    path.write_text(file)


def _add_family(copy: Path) -> None:
    row, imported = recipe("Adding a family of models")
    folder = copy / "exporter/models/toy"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Taggers, an example."""\n')
    shutil.copyfile(ROOT / "examples/toy_family.py", folder / "family.py")
    registry = copy / "exporter/models/registry.py"
    insert(registry, r"FAMILIES: .*= \[", row)
    insert(registry, r"from \.local_transformer\.family .*", imported)


def test_a_hugging_face_type_that_differs_is_a_file(models: dict[str, Any]) -> None:
    """Its notes are told, and its positions refused beyond; a type without the file keeps those of its config.json."""
    told, longest, refused = models["phi3"]
    assert any("its positions end where its first training did" in note for note in told)
    assert longest == 64 and "64 positions" in refused
    told, longest, refused = models["mistral"]
    assert not any("training" in note for note in told) and longest == 256 and refused == ""


def test_a_family_is_a_folder_and_a_row(models: dict[str, Any]) -> None:
    assert models["toy"]["class"] == "toy.Tagger"
    assert models["toy"]["checks"]["parity"] == "passed" and models["toy"]["outputs"] == ["logits", "hidden"]
