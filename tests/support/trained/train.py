"""Train small causal language models with outliers and a massive first token, and measure what they have.

    python -m tests.support.trained.train [name ...]

writes the folders `gemma3` and `qwen2` beside this file. Random weights have nothing of what makes trained ones hard to
round: these predict text, and have

- a massive first token: from its first layer on `<bos>` alone has one channel of some thousands in the residual stream
  (M. Sun et al., Massive Activations in Large Language Models, 2024). Two channels are kept for it while the model is
  trained, so that all weights are learned around it: of the first only `<bos>` has a number, and one neuron of the
  first layer reads it and writes the second.
- outliers: the inputs of linear layers have four channels 16 times larger than trained. Norms are multiplied by that,
  and the columns of the matrices behind them divided, which changes no output.

The text is what ships for calibration, and the topics of Python's own help; nothing is judged on either. Each takes
about a processor minute. Measured on the judged part of the shipped text, 8 rows of 96 tokens:

| | gemma3 | qwen2 |
|---|---|---|
| parameters | 406,944 | 240,480 |
| perplexity; 768 by chance | 105 | 113 |
| largest activation of `<bos>`, of any other token | 1,293; 11 | 5,894; 20 |
| kurtosis of what linear layers read (3 is normal) | 59 | 84 |
| largest weight of the sharpest head, mean over queries | 0.86 | 0.83 |
| weight on `<bos>` of the head that looks there most | 0.60 | 0.53 |
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
VOCABULARY, BOS = 768, 0
SPECIAL = ("<bos>", "<eos>", "<pad>")
# The channel that only `<bos>` has, and the massive one; the channels of outliers, and by how much they are larger.
FIRST, MASSIVE = 0, 1
OUTLIERS, LARGER = (7, 21, 40, 58), 16.0
_LENGTH, _ROWS, _STEPS = 96, 8, 800

COMMON = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "rms_norm_eps": 1e-6,
          "max_position_embeddings": 512, "tie_word_embeddings": True}  # fmt: skip


def models() -> dict[str, Any]:
    """Return the configuration of each model by the name of its folder."""
    from transformers import Gemma3TextConfig, Qwen2Config

    gemma = Gemma3TextConfig(
        **COMMON, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32, sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )  # fmt: skip
    qwen = Qwen2Config(
        **COMMON, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=24, max_window_layers=1,
    )  # fmt: skip
    return {"gemma3": gemma, "qwen2": qwen}


def texts() -> list[str]:
    """Return the texts to train on."""
    from pydoc_data.topics import topics

    from localattn.core.text.read import passages

    return [passage.text for passage in passages("calibration")] + list(topics.values())


def make_tokenizer(folder: Path) -> Any:
    """Train a tokenizer of bytes and pairs, and write it into a model's folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(name, special=True) for name in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return tokenizer


def keep_channels(model: Any) -> dict[Tensor, Tensor]:
    """Give `<bos>` a massive channel, and return masks of the parameters that training must leave in parts.

    Each mask has the shape of its parameter, and is 0 where the number stays.
    """
    inner, free = model.model, {}
    with torch.no_grad():

        def keep(weight: Tensor, *places: Any) -> None:
            mask = free.setdefault(weight, torch.ones_like(weight))
            for place in places:
                weight[place] = 0
                mask[place] = 0

        table = inner.embed_tokens.weight
        keep(table, (slice(None), FIRST), (slice(None), MASSIVE))
        table[BOS, FIRST] = 3.0
        for layer in inner.layers:
            keep(layer.self_attn.o_proj.weight, FIRST, MASSIVE)
            keep(layer.mlp.down_proj.weight, FIRST, MASSIVE)
        mlp = inner.layers[0].mlp
        for part in (mlp.gate_proj, mlp.up_proj):
            keep(part.weight, 0)
            part.weight[0, FIRST] = 4.0
        normed = hasattr(inner.layers[0], "post_feedforward_layernorm")
        read = inner.layers[0].pre_feedforward_layernorm if normed else inner.layers[0].post_attention_layernorm
        keep(read.weight, FIRST)
        read.weight[FIRST] = 0.0 if normed else 1.0  # multiplies by 1, in either form of a norm
        if normed:
            gain = inner.layers[0].post_feedforward_layernorm.weight
            keep(gain, MASSIVE)
            gain[MASSIVE] = 300.0
        mlp.down_proj.weight[MASSIVE, 0] = 20.0 if normed else 4.0
    return free


def train(model: Any, tokenizer: Any) -> None:
    """Train a model on rows of the texts that begin with `<bos>`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more wait for one another in products this small
    ids = torch.tensor([x for text in texts() for x in tokenizer.encode(text, add_special_tokens=False).ids])
    free = keep_channels(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=_STEPS)
    for _ in range(_STEPS):
        starts = torch.randint(len(ids) - _LENGTH, (_ROWS,))
        rows = torch.stack([ids[start : start + _LENGTH] for start in starts.tolist()])
        rows[:, 0] = BOS
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        for weight, mask in free.items():
            assert weight.grad is not None
            weight.grad *= mask
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        plan.step()


def add_outliers(model: Any) -> None:
    """Make four channels of what linear layers read larger, and their matrices smaller there: no output changes."""
    plus = 1.0 if "gemma3" in model.config.model_type else 0.0
    with torch.no_grad():
        for layer in model.model.layers:
            before_mlp = getattr(layer, "pre_feedforward_layernorm", layer.post_attention_layernorm)
            attention = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
            for norm, readers in (
                (layer.input_layernorm, attention),
                (before_mlp, [layer.mlp.gate_proj, layer.mlp.up_proj]),
            ):
                for channel in OUTLIERS:
                    norm.weight[channel] = (norm.weight[channel] + plus) * LARGER - plus
                    for reader in readers:
                        reader.weight[:, channel] /= LARGER


def measure(folder: Path) -> dict[str, float]:
    """Return perplexity on the judged text, and how large and how uneven the values of a model are."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from localattn.core.text.read import passages

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    text = "\n\n".join(passage.text for passage in passages("judgement"))
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids)
    rows = ids[: 8 * (_LENGTH - 1)].reshape(8, -1)
    rows = torch.cat([torch.full((8, 1), BOS), rows], dim=1)
    read: list[Tensor] = []
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.mlp.gate_proj):
            linear.register_forward_pre_hook(lambda _, given: read.append(given[0].detach()))
    with torch.no_grad():
        found = model(input_ids=rows, labels=rows, output_hidden_states=True, output_attentions=True)
    inputs = torch.cat([x[:, 1:].reshape(-1, x.shape[-1]) for x in read])
    centred = inputs - inputs.mean()
    states = found.hidden_states[1:-1]
    heads = [
        weights[:, :, 16:].amax(-1).mean((0, 2)) for weights in found.attentions
    ]  # of each head, its largest weight, in the mean over queries
    return {
        "parameters": sum(x.numel() for x in model.parameters()),
        "perplexity": float(found.loss.exp()),
        "massive": float(max(x[:, 0].abs().max() for x in states)),
        "others": float(max(x[:, 1:].abs().max() for x in states)),
        "kurtosis": float((centred**4).mean() / (centred**2).mean() ** 2),
        "sharpest head": float(torch.cat(heads).max()),
        "on bos": float(max(weights[:, :, 1:16, 0].mean((0, 2)).max() for weights in found.attentions)),
    }


def make(name: str) -> Path:
    """Train one model and write its folder, in fp16."""
    from transformers import AutoModelForCausalLM

    folder = HERE / name
    folder.mkdir(exist_ok=True)
    tokenizer = make_tokenizer(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(models()[name], attn_implementation="sdpa")
    train(model, tokenizer)
    add_outliers(model)
    model.half().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    for chosen in sys.argv[1:] or models():
        print(chosen, {name: round(value, 3) for name, value in measure(make(chosen)).items()})
