"""Make one file of a Hugging Face model, by this package or by another; each is run in a process of its own.

python make.py NAME FOLDER OUTPUT

It imports only what its exporter needs, because optimum-onnx has an environment of its own, with an older transformers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# The variable that names the sources of llama.cpp, with its converter.
LLAMA_SOURCE = "LOCALATTN_BENCHMARKS_LLAMA_SOURCE"
# Tokens of the example that others trace with; their files leave batch and length open.
TRACED = 512


def ours(folder: Path, output: Path) -> None:
    """`localattn export FOLDER`, with parity checked on one set of inputs."""
    from localattn import export

    export(folder, output, checks="quick")


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


def transformers_decoder(folder: Path, output: Path) -> None:
    """transformers' own `OnnxExporter`: one graph with a cache, for prompts and for tokens."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.exporters import OnnxConfig, OnnxExporter

    ids = torch.zeros(2, TRACED, dtype=torch.long)
    inputs, config = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, OnnxConfig(dynamic=True)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    made = OnnxExporter().export_for_generation(model, inputs, config, multi_token_decode=True)
    del made.components["prefill"]  # the other one takes a prompt too, and each brings its weights
    made.save_pretrained(output.parent)


def genai_decoder(folder: Path, output: Path) -> None:
    """onnxruntime-genai's builder, for the CPU."""
    _genai(folder, output, "fp32")


def genai_int4_decoder(folder: Path, output: Path) -> None:
    """The same with weights in 4 bits."""
    _genai(folder, output, "int4")


def _genai(folder: Path, output: Path, precision: str) -> None:
    from onnxruntime_genai.models import builder
    from onnxruntime_genai.models.builders import base
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained

    def flat(*args: Any, **options: Any) -> Any:
        """Read a configuration as transformers 4 wrote it: the builder of 0.18 takes no other of Gemma 3."""
        config = read(*args, **options)
        kinds = getattr(config, "rope_parameters", {})  # transformers itself asks for a pair
        if "sliding_attention" in kinds:
            config.rope_local_base_freq = kinds["sliding_attention"]["rope_theta"]
            config.rope_parameters = kinds["full_attention"]
        return config

    AutoConfig.from_pretrained = flat
    base.Model.save_processing = lambda *args: None  # the folder has no tokenizer
    with tempfile.TemporaryDirectory() as cache:
        asked = (None, str(folder), str(output.parent), precision, "cpu", cache)
        # Logits of a whole prompt would be gigabytes, and nobody reads them.
        builder.create_model(*asked, **builder.parse_extra_options(*asked, ["prune_lm_head=true"]))


def llama_decoder(folder: Path, output: Path) -> None:
    """llama.cpp's own converter, weights in fp32."""
    _llama(folder, output, None)


def llama_int4_decoder(folder: Path, output: Path) -> None:
    """The same, every matrix in Q4_0: 4 bits, a scale for 32."""
    _llama(folder, output, "Q4_0")


def _llama(folder: Path, output: Path, matrices: str | None) -> None:
    source = Path(os.environ[LLAMA_SOURCE])
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import gguf
    from conversion import get_model_class

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = get_model_class(config["architectures"][0])

    class Converted(kind):  # type: ignore[misc, valid-type]
        model_arch = kind.model_arch

        def set_vocab(self) -> None:
            """Write names that stand for tokens, the least that llama.cpp opens: the folder has none."""
            count, byte = config["vocab_size"], gguf.TokenType.BYTE
            known = {3 + i: f"<0x{i:02X}>" for i in range(256)}
            self.gguf_writer.add_tokenizer_model("llama")
            self.gguf_writer.add_token_list([known.get(i, f"t{i}") for i in range(count)])
            self.gguf_writer.add_token_scores([0.0] * count)
            self.gguf_writer.add_token_types([byte if i in known else gguf.TokenType.NORMAL for i in range(count)])

        def tensor_force_quant(self, name: str, new_name: str, bid: int | None, n_dims: int) -> Any:
            """Choose the type of a tensor."""
            matrix = matrices is not None and n_dims == 2
            return gguf.GGMLQuantizationType[matrices] if matrix else gguf.GGMLQuantizationType.F32

    with tempfile.TemporaryDirectory() as beside:
        for path in folder.iterdir():
            if path.name != "tokenizer.json":
                (Path(beside) / path.name).symlink_to(path.resolve())
        # Gemma's converter counts the tokens there, and cuts the table of embeddings to them.
        names = {"model": {"vocab": dict.fromkeys(map(str, range(config["vocab_size"])), 0)}, "added_tokens": []}
        (Path(beside) / "tokenizer.json").write_text(json.dumps(names), encoding="utf-8")
        Converted(Path(beside), gguf.LlamaFileType.ALL_F32, output).write()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
