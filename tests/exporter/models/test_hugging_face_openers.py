"""Exported Hugging Face folders, opened by optimum and by transformers.js, in environments of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localattn.exporter.export import ExportRequest, export
from localattn.exporter.options import ShapeRequest

from ...runtimes.environments import Absent, Environment, made
from ...support.models.hugging_face import CASES, build

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

# optimum-onnx takes transformers before 5; what else it needs is in the environment of the tests.
_OPTIMUM = ("optimum==2.3.0", "optimum-onnx==0.1.0", "transformers==4.57.6", "huggingface_hub==0.36.2")
_OPTIMUM += ("tokenizers==0.22.2", "requests==2.34.2", "charset-normalizer==3.5.2", "certifi")
_TASKS = {
    "feature-extraction": ("modernbert", "ModernBertModel", "ORTModelForFeatureExtraction", "last_hidden_state"),
    "fill-mask": ("modernbert", "ModernBertForMaskedLM", "ORTModelForMaskedLM", "logits"),
    "text-classification": (
        *("modernbert", "ModernBertForSequenceClassification"),
        *("ORTModelForSequenceClassification", "logits"),
    ),
    "token-classification": (
        *("modernbert", "ModernBertForTokenClassification"),
        *("ORTModelForTokenClassification", "logits"),
    ),
    "text-generation": ("gemma3_text", "Gemma3ForCausalLM", "ORTModelForCausalLM", "logits"),
}
_IN_JAVASCRIPT = {
    "feature-extraction": "AutoModel",
    "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "text-generation": "AutoModelForCausalLM",
}
_IN_PYTHON = """
import json, sys
import numpy as np
import torch
import optimum.onnxruntime
folder, kind, output, inputs, saved = sys.argv[1:]
options = {"use_cache": False} if kind == "ORTModelForCausalLM" else {}
model = getattr(optimum.onnxruntime, kind).from_pretrained(folder, local_files_only=True, **options)
given = {name: torch.from_numpy(x) for name, x in np.load(inputs).items()}
np.save(saved, model(**given)[output].numpy())
"""
_IN_NODE = """
import * as transformers from '@huggingface/transformers';
const [folder, name, kind, output, text] = process.argv.slice(2);
transformers.env.allowRemoteModels = false;
transformers.env.localModelPath = folder + '/';
const options = { dtype: 'fp32', local_files_only: true };
const tokenizer = await transformers.AutoTokenizer.from_pretrained(name, options);
const model = await transformers[kind].from_pretrained(name, options);
const inputs = await tokenizer(text);
const found = (await model(inputs))[output];
const written = model.generate({ ...inputs, max_new_tokens: 3 }).then(() => true, () => false);
console.log(JSON.stringify([found.dims, Array.from(found.data), model.can_generate && await written]));
"""
_TEXT = " ".join(f"w{3 + n}" for n in range(60))


def _exported(task: str, folder: Path, *, positions: bool = False) -> tuple[Path, Any]:
    """Save a model with a tokenizer, export it, and return the folder of the file, and the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    case, kind, *_ = _TASKS[task]
    whole = build(next(x for x in CASES if x.name == case))
    model = getattr(transformers, kind)(whole.config).eval()
    model.load_state_dict({**model.state_dict(), **whole.state_dict()}, strict=False)
    model.save_pretrained(folder / "model")
    words = {"[PAD]": 0, "[UNK]": 1, **{f"w{n}": n for n in range(2, 128)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(
        folder / "model"
    )
    output = folder / "file" / "onnx" / "model.onnx"
    output.parent.mkdir(parents=True)
    export(ExportRequest(folder / "model", output, shapes=ShapeRequest(position_ids=positions), checks="quick"))
    for beside in [path for path in output.parent.iterdir() if not path.name.startswith("model.")]:
        shutil.copy(beside, folder / "file")
    return folder / "file", model


@pytest.fixture(scope="module")
def optimum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with optimum's packages."""
    folder = tmp_path_factory.mktemp("optimum")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, *_OPTIMUM], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"optimum cannot be installed: {done.stderr[-200:]}")
    return folder


@pytest.mark.parametrize(("task", "positions"), [*((task, False) for task in _TASKS), ("text-generation", True)])
def test_optimum_opens_the_folder(task: str, positions: bool, optimum: Path, tmp_path: Path) -> None:
    """With the input `position_ids`, which it makes of the mask, for rows that are padded on the left."""
    folder, model = _exported(task, tmp_path, positions=positions)
    _, _, kind, output = _TASKS[task]
    rng = np.random.default_rng(0)
    mask = np.arange(60)[None, :] < np.array([[60], [23]])
    mask = mask[:, ::-1].copy() if positions else mask
    inputs = {"input_ids": rng.integers(3, 128, (2, 60)), "attention_mask": mask.astype(np.int64)}
    np.savez(tmp_path / "in.npz", **inputs)
    command = [sys.executable, "-c", _IN_PYTHON, str(folder / "onnx"), kind, output]
    command += [str(tmp_path / "in.npz"), str(tmp_path / "out.npy")]
    environment = {**os.environ, "PYTHONPATH": str(optimum)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    if positions:
        assert "legacy ONNX model" not in done.stderr
        inputs["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)
    with torch.no_grad():
        wanted = model(**{name: torch.from_numpy(x) for name, x in inputs.items()})[output].numpy()
    found = np.load(tmp_path / "out.npy")
    kept = mask if found.ndim == 3 else slice(None)
    assert np.abs(found - wanted)[kept].max() < 5e-5 and np.abs(wanted).max() > 0.1


@pytest.mark.parametrize("task", list(_TASKS))
def test_transformers_js_opens_the_folder(task: str, tmp_path: Path) -> None:
    """Every class computes; a decoder generates no text, because that needs inputs for caches."""
    folder, model = _exported(task, tmp_path)
    output = _TASKS[task][-1]
    try:
        node = made(Environment("transformers.js", ("@huggingface/transformers@4.3.1",), (), program="node"))
    except Absent as absent:
        pytest.skip(str(absent))
    script = node / "open_folder.mjs"
    script.write_text(_IN_NODE)
    command = ["node", str(script), str(folder.parent), folder.name, _IN_JAVASCRIPT[task], output, _TEXT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=node)
    assert done.returncode == 0, done.stderr[-2000:]
    dims, values, generates = json.loads(done.stdout.strip().splitlines()[-1])
    ids = torch.tensor([[3 + n for n in range(60)]])
    with torch.no_grad():
        wanted = model(input_ids=ids)[output].numpy()
    assert np.abs(np.array(values).reshape(dims) - wanted).max() < 5e-5 and generates is False
