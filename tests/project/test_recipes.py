"""The recipes of CONTRIBUTING.md, tried as patches on a copy of the tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
from localattn.exporter.artifact import publish

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

def forgetful(model, path, *rest, save=publish.save_model):
    data = save(model, path, *rest)
    written = onnx.load(path, load_external_data=False)
    written.graph.node[0].name = ""
    onnx.save(written, path)
    return data

KINDS = ("checkpoint", "steps", "module", "convert")
found = {kind: checks(kind) for kind in KINDS}
publish.save_model = convert.save_model = forgetful
faults = {}
for kind in KINDS:
    try:
        checks(kind)
    except CheckFailed as error:
        faults[kind] = [error.what, error.why]
print(json.dumps({"found": found, "faults": faults}))
"""


def recipe(title: str) -> list[str]:
    """The blocks below a heading of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    return re.findall(r"```(?:python|text)\n(.*?)```", section, re.DOTALL)


def test_a_check_of_every_export_is_a_file_and_a_row(tmp_path: Path) -> None:
    pytest.importorskip("local_attention")
    copy = tmp_path / "localattn"
    shutil.copytree(ROOT, copy, ignore=_NOT_COPIED)
    file, row = recipe("Adding a check")
    (copy / "exporter/checks/node_names.py").write_text(file)
    table = copy / "exporter/checks/table.py"
    text = table.read_text()
    text = text.replace("from .outcome", "from .node_names import check_node_names\nfrom .outcome", 1)
    table.write_text(re.sub(r"(?m)^(CHECKS: .*= \($)", rf"\1\n{row.rstrip()}", text, count=1))
    assert table.read_text().count("check_node_names") == 2
    ran = subprocess.run(
        [sys.executable, "-c", _DRIVER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    answer = json.loads(ran.stdout.splitlines()[-1])
    assert [kind for kind, checks in answer["found"].items() if checks["node names"] == "passed"] == [*answer["found"]]
    assert len(answer["faults"]) == 4
    for what, why in answer["faults"].values():
        assert "node names" in what and "1 node(s) have no name" in why
