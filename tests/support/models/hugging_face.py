"""Tiny Hugging Face models of random weights, one for each type that is exported: the ratios of the real ones."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

WINDOW = 16
_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Of types that do not scale their scores: a saturated softmax would show no window, and double every rounding.
_NORM = {"gemma4_text": 0.5, "gemma4_text shared keys": 0.5, "embedding_gemma2": 0.3}
_MIXED = ["sliding_attention", "full_attention"]


class Case(NamedTuple):
    """A type of model.

    Args:
        name: of the type, as `model_type` or a variant of it.
        config: name of its configuration class.
        model: name of its model class.
        values: of the configuration, besides the base; None takes one out of the base.
        windows: in words, for each of its attention layers.
        task: that it is exported for; None as the class it is.
    """

    name: str
    config: str
    model: str
    values: Mapping[str, Any]
    windows: tuple[str, ...]
    task: str | None = None


def initialised(case: Case, seed: int = 0, **others: Any) -> Any:
    """Build the model with random weights as transformers draws them."""
    import transformers

    values = {name: value for name, value in {**_BASE, **case.values, **others}.items() if value is not None}
    torch.manual_seed(seed)
    return getattr(transformers, case.model)(getattr(transformers, case.config)(**values)).eval()


def build(case: Case, seed: int = 0, **others: Any) -> Any:
    """Build the model with random weights large enough for attention to matter."""
    model = initialised(case, seed, **others)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(_NORM.get(case.name, 1))
    return model


# How the head and the embedding of a folder may stand to each other; "retied" is a head that training untied while
# config.json still says that it is tied.
HEADS = ("untied", "tied", "retied")


def save(folder: Path, case: Case, head: str = "untied", **values: Any) -> Any:
    """Save a model whose head is one of `HEADS`, and return the model as it is in memory."""
    model = build(case, **({} if head == "untied" else {"tie_word_embeddings": True}), **values)
    layer = model.get_output_embeddings()
    if head == "retied" and layer is not None:
        generator = torch.Generator().manual_seed(3)
        changed = layer.weight.detach() + torch.randn(layer.weight.shape, generator=generator)
        layer.weight = torch.nn.Parameter(changed)
        model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    if head == "retied":
        update_config(folder, {"tie_word_embeddings": True})
    return model


def update_config(folder: Path, values: Mapping[str, Any], without: Collection[str] = ()) -> None:
    """Change entries of a folder's config.json, and take some out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in without}))


_BACK = f"{WINDOW - 1} back"
_MIX = (_BACK, "all keys before")
_SPECIAL = {"cls_token_id": 1, "sep_token_id": 2}

CASES = [
    Case(
        "modernbert",
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {"num_key_value_heads": None, "head_dim": None, "num_hidden_layers": 3, "local_attention": WINDOW, **_SPECIAL},
        ("all keys", "±8", "±8"),
    ),
    Case(
        "modernbert-decoder",
        "ModernBertDecoderConfig",
        "ModernBertDecoderForCausalLM",
        {"num_key_value_heads": None, "head_dim": None, "num_hidden_layers": 3, "local_attention": WINDOW, **_SPECIAL},
        ("all keys before", "7 back", "7 back"),
    ),
    Case(
        "gemma3_text bidirectional",
        "Gemma3TextConfig",
        "Gemma3TextModel",
        {"sliding_window": WINDOW, "layer_types": _MIXED, "use_bidirectional_attention": True},
        ("±8", "all keys"),
    ),
    Case(
        "gemma3_text", "Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": WINDOW, "layer_types": _MIXED}, _MIX
    ),
    Case("mistral", "MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}, (_BACK, _BACK)),
    Case(
        "ministral", "MinistralConfig", "MinistralForCausalLM", {"sliding_window": WINDOW, "layer_types": _MIXED}, _MIX
    ),
    Case(
        "qwen2",
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"head_dim": None, "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
        _MIX[::-1],
    ),
    Case(
        "qwen3",
        "Qwen3Config",
        "Qwen3ForCausalLM",
        {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
        _MIX[::-1],
    ),
    Case("phi3", "Phi3Config", "Phi3ForCausalLM", {"head_dim": None, "sliding_window": WINDOW}, (_BACK, _BACK)),
    Case("gemma2", "Gemma2Config", "Gemma2ForCausalLM", {"sliding_window": WINDOW}, _MIX),
    Case(
        "gemma3n_text",
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0, 0.0],
        },
        _MIX,
    ),
    Case(
        "gemma4_text",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 16,
            "global_head_dim": 32,
        },
        _MIX,
    ),
    Case(
        "gemma4_text shared keys",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            "sliding_window": WINDOW,
            "layer_types": [*_MIXED, *_MIXED],
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 16,
            "global_head_dim": 32,
        },
        (*_MIX, *_MIX),
    ),
    Case(
        "embedding_gemma2",
        "EmbeddingGemma2TextConfig",
        "EmbeddingGemma2TextModel",
        {"sliding_window": WINDOW, "layer_types": _MIXED},
        ("±16", "all keys"),
    ),
    Case(
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {"sliding_window": WINDOW, "layer_types": _MIXED, "num_local_experts": 2, "num_experts_per_tok": 1},
        _MIX,
    ),
    Case(
        "starcoder2",
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        {"head_dim": None, "sliding_window": WINDOW},
        (_BACK, _BACK),
    ),
    Case(
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        {"sliding_window": WINDOW, "num_local_experts": 2},
        (_BACK, _BACK),
    ),
    Case("cohere2", "Cohere2Config", "Cohere2ForCausalLM", {"sliding_window": WINDOW, "layer_types": _MIXED}, _MIX),
    Case(
        "olmo3",
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {"head_dim": None, "sliding_window": WINDOW, "layer_types": _MIXED},
        _MIX,
    ),
    Case("exaone4", "Exaone4Config", "Exaone4ForCausalLM", {"sliding_window": WINDOW, "layer_types": _MIXED}, _MIX),
    Case(
        "smollm3",
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {"head_dim": None, "sliding_window": WINDOW, "use_sliding_window": True, "layer_types": _MIXED},
        _MIX,
    ),
    Case(
        "granite_swa",
        "GraniteSWAConfig",
        "GraniteSWAForCausalLM",
        {"head_dim": None, "sliding_window": WINDOW, "layer_types": _MIXED},
        _MIX,
    ),
    Case(
        "ultrabert",
        "UltrabertConfig",
        "UltrabertModel",
        {"sliding_window": WINDOW, "layer_types": _MIXED},
        ("±16", "all keys"),
    ),
    Case(
        "openai_privacy_filter",
        "OpenAIPrivacyFilterConfig",
        "OpenAIPrivacyFilterModel",
        {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
        ("±16", "±16"),
    ),
    Case("lfm3", "Lfm3Config", "Lfm3ForCausalLM", {"sliding_window": WINDOW, "layer_types": _MIXED}, _MIX),
    Case(
        "llama4_text",
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"num_hidden_layers": 4, "attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 64},
        (f"causal chunks of {WINDOW}",) * 3 + ("all keys before",),
    ),
    Case(
        "recurrent_gemma",
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {"num_hidden_layers": 3, "attention_window_size": WINDOW, "lru_width": 64},
        (_BACK,),
    ),
    Case(
        "longformer",
        "LongformerConfig",
        "LongformerForMaskedLM",
        {"num_key_value_heads": None, "head_dim": None, "attention_window": [WINDOW, WINDOW // 2]},
        ("±8", "±4"),
    ),
    Case(
        "led",
        "LEDConfig",
        "LEDForConditionalGeneration",
        {
            **dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings")),
            **{"attention_window": [WINDOW, WINDOW // 2], "max_encoder_position_embeddings": 250},
            **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_layers": 1, "decoder_attention_heads": 4},
        },
        ("±8", "±4"),
        "feature-extraction",
    ),
    Case("mellum", "MellumConfig", "MellumForCausalLM", {"sliding_window": WINDOW, "layer_types": _MIXED}, _MIX),
]

_NOT_CAUSAL = (
    "modernbert",
    "longformer",
    "led",
    "gemma3_text bidirectional",
    "embedding_gemma2",
    "ultrabert",
    "openai_privacy_filter",
)
# Types that take a token at a time too.
STEPS = [case for case in CASES if case.name not in (*_NOT_CAUSAL, "llama4_text", "recurrent_gemma")]

# What the attention of a type has besides windows.
_NEEDS = {
    "gemma2": "softcap",
    "gpt_oss": "sinks, experts",
    "granite_swa": "sinks",
    "openai_privacy_filter": "sinks, experts",
    "mixtral": "experts",
    "mellum": "experts",
    "llama4_text": "chunks, experts",
    "gemma4_text shared keys": "layers share keys",
    "lfm3": "convolutions between",
    "recurrent_gemma": "recurrences between",
}
# Types that are not exported, or with a limit.
_LIMITS = {
    "recurrent_gemma": "refused: its recurrence is written for one length",
    "llama4_text": "equal, without `attention_mask`",
    "longformer": "equal, without global tokens",
    "led": "equal, its encoder, without global tokens",
}


def table() -> str:
    """The table of docs/models.md."""
    rows = ["| type | class tried | its layers see | besides | result | by steps |", "|---|---|---|---|---|---|"]
    for case in CASES:
        seen = ", ".join(dict.fromkeys(case.windows))
        values = {**_BASE, **case.values}
        shared = values["num_key_value_heads"] not in (None, values["num_attention_heads"])
        needs = ", ".join(filter(None, ("shared heads" if shared else "", _NEEDS.get(case.name, "")))) or "–"
        by_steps = "equal" if case in STEPS else "–"
        rows.append(
            f"| {case.name} | `{case.model}` | {seen} | {needs} | {_LIMITS.get(case.name, 'equal')} | {by_steps} |"
        )
    return "\n".join(rows)
