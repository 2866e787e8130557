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
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a copy of the tree answers to which the recipes were applied."""
    pytest.importorskip("local_attention")
    folder = tmp_path_factory.mktemp("recipes")
    copy = folder / "localattn"
    shutil.copytree(ROOT, copy, ignore=_NOT_COPIED)
    _add_check(copy)
    _add_option(copy)
    ran = subprocess.run(
        [sys.executable, "-c", _DRIVER + _OPTION, str(folder), str(ROOT / "docs" / "generate.py")],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def _add_check(copy: Path) -> None:
    file, row = recipe("Adding a check")
    (copy / "exporter/checks/node_names.py").write_text(file)
    table = copy / "exporter/checks/table.py"
    insert(table, r"from \.loads .*", "from .node_names import check_node_names")
    insert(table, r"CHECKS: .*= \(", row)


def _add_option(copy: Path) -> None:
    field, use = recipe("Adding an option of export")
    insert(copy / "exporter/options.py", r'    """What a file to write is asked to be."""', f"\n{field}")
    form = copy / "exporter/artifact/form.py"
    text = form.read_text()
    form.write_text(text.replace("    windows = [_window_facts", f"{use}    windows = [_window_facts", 1))
    assert form.read_text() != text


def test_a_check_of_every_export_is_a_file_and_a_row(answers: list[Any]) -> None:
    answer = answers[0]
    assert [kind for kind, checks in answer["found"].items() if checks["node names"] == "passed"] == [*answer["found"]]
    assert len(answer["faults"]) == 4
    for what, why in answer["faults"].values():
        assert "node names" in what and "1 node(s) have no name" in why


def test_an_option_of_export_is_a_field_and_its_use(answers: list[Any]) -> None:
    answer = answers[1]
    assert answer["told"].pop("checkpoint") == ["localattn", None]
    mine = ["mine", "mine"]
    assert answer["told"] == {"step": mine, "step.prefill": mine, "own": mine, "typed": mine}
    assert answer["annotations"] == ["str", "str"] and answer["help"]
    assert "- `--producer-name` TEXT: Name of the program that wrote the file" in answer["docs"]
