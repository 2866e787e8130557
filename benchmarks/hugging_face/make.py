"""Make one file of a Hugging Face model, by this package or by another; each is run in a process of its own.

python make.py NAME FOLDER OUTPUT

It imports only what its exporter needs, because optimum-onnx has an environment of its own, with an older transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Tokens of the example that others trace with; their files leave batch and length open.
TRACED = 512


def ours(folder: Path, output: Path) -> None:
    """`localattn export FOLDER`, with parity checked on one set of inputs."""
    from localattn import export

    export(folder, output, quick=True)


def torch_onnx(folder: Path, output: Path) -> None:
    """`torch.onnx.export(dynamo=True)` of the model as it is."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    ids = torch.zeros(2, TRACED, dtype=torch.long)
    sizes = {0: torch.export.Dim("batch", min=1, max=1024), 1: torch.export.Dim("seq", min=2, max=8192)}

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    with torch.no_grad():
        program = torch.onnx.export(
            Hidden(),
            (ids, torch.ones_like(ids)),
            dynamo=True,
            opset_version=20,
            input_names=["input_ids", "attention_mask"],
            output_names=["last_hidden_state"],
            dynamic_shapes=(sizes, sizes),
            verbose=False,
        )
    assert program is not None
    program.save(str(output), external_data=True)


def transformers_onnx(folder: Path, output: Path) -> None:
    """transformers' own `OnnxExporter`."""
    _transformers(folder, output, None)


def transformers_fused(folder: Path, output: Path) -> None:
    """The same with its fusions for the CPU."""
    _transformers(folder, output, "cpu")


def _transformers(folder: Path, output: Path, fusions: str | None) -> None:
    import torch
    from transformers import AutoModel
    from transformers.exporters import OnnxConfig, OnnxExporter

    ids = torch.zeros(2, TRACED, dtype=torch.long)
    exporter, config = OnnxExporter(), OnnxConfig(dynamic=True, opset_version=20, ort_fusions=fusions)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    exporter.export(AutoModel.from_pretrained(folder).eval(), inputs, config=config).save_pretrained(str(output.parent))


def optimum(folder: Path, output: Path) -> None:
    """optimum-onnx."""
    from optimum.exporters.onnx import onnx_export_from_model
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    onnx_export_from_model(model, output.parent, task="feature-extraction", opset=18, do_validation=False)


def optimum_decoder(folder: Path, output: Path) -> None:
    """optimum-onnx, with inputs and outputs for its cache."""
    from optimum.exporters.onnx import onnx_export_from_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    onnx_export_from_model(model, output.parent, task="text-generation-with-past", opset=18, do_validation=False)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
