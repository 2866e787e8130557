"""The functions of Python: text in and out, steps in notebooks, one line for each object, true examples."""

from __future__ import annotations

import doctest
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from local_attention import LocalTransformer

import localattn
from localattn.runtime.generation.generator import Generator

from ..support import tokenizer_folder
from ..support.models import step_model
from ..support.tokenizer_folder import BOS, END, USER, VOCABULARY


def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    model: Path = step_model.write(tmp_path, vocabulary=VOCABULARY)
    tokenizer_folder.write(tmp_path, {"do_sample": False})

    def greedy(prompt: list[int]) -> list[int]:
        return [int(t[0]) for t in Generator.open(model, "cpu").generate(prompt, 9, temperature=0)]

    made = localattn.generate(model, "π?", max_tokens=9)
    assert made.prompt == [BOS, *"π?".encode()] and made.tokens == greedy(made.prompt) and made.finish == "length"
    assert str(made) == made.text == bytes(x for x in made.tokens if x < 256).decode("utf-8", "replace")
    assert localattn.generate(model, made.prompt, max_tokens=9).tokens == made.tokens
    asked = localattn.generate(model, "Hi", chat=True, max_tokens=9)
    assert asked.prompt == [BOS, USER, *b"Hi", END, 10, ord(">")] and "\n" not in repr(asked)
    assert localattn.generate(model, [{"role": "user", "content": "Hi"}], max_tokens=9).tokens == asked.tokens
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(localattn.UsageError, match="does not read bytes"):
        localattn.generate(model, "Hi")


def test_steps_are_lines_in_a_notebook_and_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = step_model.write(tmp_path)
    localattn.convert(model, tmp_path / "a_step.onnx", standard_ops=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: object()))
    localattn.convert(model, tmp_path / "b_step.onnx", standard_ops=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and all(line.startswith("localattn: ") for line in lines)
    assert "\x1b" not in "".join(lines) and "\r" not in "".join(lines)


def test_every_public_object_is_one_line(tmp_path: Path) -> None:
    model = step_model.write(tmp_path)
    shown = [localattn.load(model), localattn.open_step(model), Generator.open(model)]
    shown.append(localattn.bench(model, duration=0.01, iterations=2, rounds=1))
    for each in shown:
        assert "\n" not in repr(each) and "object at" not in repr(each) and len(repr(each)) < 300
    for name in localattn.__all__:
        if inspect.isfunction(function := getattr(localattn, name)):
            assert "0x" not in str(inspect.signature(function))


# In an order in which each finds what the one before wrote.
EXAMPLES = (
    *("record", "export", "export_module", "inspect", "parity", "bisect", "convert", "bundle", "load", "open_step"),
    *("generate", "bench"),
)


def test_examples_in_docstrings_are_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = {"num_tokens": 256, "max_seq_len": 64, "dim": 32, "depth": 1, "dim_head": 16, "heads": 2}
    arguments |= {"local_attn_window_size": 16, "causal": True}
    torch.manual_seed(0)
    module = LocalTransformer(**arguments)
    torch.save(module.state_dict(), "model.pt")
    config = {"class": "local_attention.LocalTransformer", "kwargs": arguments}
    Path("model.json").write_text(json.dumps(config))
    localattn.export("model.pt", "step.onnx", mode="step", chunk=1, checks="quick")
    world = {"localattn": localattn, "module": module, "tokens": torch.randint(0, 256, (1, 64))}
    runner = doctest.DocTestRunner()
    for name in EXAMPLES:
        function = getattr(localattn, name)
        test = doctest.DocTestParser().get_doctest(function.__doc__, world, name, None, 0)
        assert test.examples, name
        runner.run(test, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0
    others = {name for name in localattn.__all__ if inspect.isfunction(getattr(localattn, name))} - {*EXAMPLES}
    assert others == {"build", "replace_local_attention"}  # need TensorRT, and are shown in the docs
