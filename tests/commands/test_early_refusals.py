"""What is wrong with the words of a command is said before PyTorch is imported, and before weights are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localattn.core.errors import UsageError

# Words of a command, and what it says.
REFUSED = {
    "a missing checkpoint": (["export", "missing.pt"], "Cannot read missing.pt."),
    "a name of the Hub": (["export", "nobody/gemma"], "hf download nobody/gemma --local-dir gemma"),
    "no token a call": (["export", "folder", "--mode", "step", "--chunk", "0"], "--chunk is 0."),
    "no position": (["export", "folder", "--mode", "step", "--seq-len", "0"], "--seq-len is 0."),
    "a chunk of whole sequences": (["export", "folder", "--chunk", "8"], "--chunk needs --mode step"),
    "a missing reference": (["parity", "model.onnx", "--against", "missing.pt"], "Cannot read missing.pt."),
    "nothing to bisect": (["bisect", "model.onnx", "--against", "missing.pt"], "Cannot read missing.pt."),
    "a plugin for none": (
        ["build", "model.onnx", "--plugin", "none", "--plugin-library", "x.so"],
        "--plugin none and --plugin-library exclude each other.",
    ),
    "nothing to inspect": (["inspect", "missing.pt"], "Cannot read missing.pt."),
}
COMMAND = """
import sys
from localattn import cli
sys.argv = ["localattn", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as error:
    print("torch" in sys.modules, error.code)
"""


@pytest.mark.parametrize("name", REFUSED)
def test_no_refusal_waits_for_pytorch(name: str, tmp_path: Path) -> None:
    words, text = REFUSED[name]
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.onnx").touch()
    command = [sys.executable, "-c", COMMAND, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "2"], done.stderr
    assert text in done.stderr
    assert "Loading PyTorch" not in done.stderr


@pytest.mark.parametrize("mode", ["step", "full"])
def test_more_positions_than_the_model_has_are_refused_before_its_weights_are_read(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    import localattn
    from localattn.exporter.models.hugging_face import weights

    from ..support.models.hugging_face import STEPS, build

    case = next(case for case in STEPS if case.name == "gemma3_text")
    folder = tmp_path / "saved"
    build(case, max_position_embeddings=64).save_pretrained(folder)

    def read(*_: object, **__: object) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(weights, "load_model", read)
    with pytest.raises(UsageError, match="has 64 positions"):
        localattn.export(folder, tmp_path / "model.onnx", mode=mode, seq_len=65)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="were read"):
        localattn.export(folder, tmp_path / "model.onnx", mode=mode, seq_len=64)  # type: ignore[arg-type]
