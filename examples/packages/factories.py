"""Small models out of published packages, one function each, for `localattn export --factory`.

Nothing of these packages is here: every function imports its package, builds the package's own class at
a small size with random weights, and sets it to inference. Where a package needs more than that, the
function says so.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

TOKENS = 64
WINDOW = 32
LENGTH = 4 * WINDOW


def _language_model(package: str, name: str, **options: object) -> nn.Module:
    """One of a package's language models, with two layers of four heads."""
    kind = getattr(importlib.import_module(package), name)
    torch.manual_seed(0)
    return kind(num_tokens=TOKENS, dim=64, depth=2, heads=4, max_seq_len=LENGTH, **options).eval()


def performer(**options: object) -> nn.Module:
    """performer-pytorch: half of the heads local, both directions, with rotary positions."""
    local = {"dim_head": 16, "local_attn_heads": 2, "local_window_size": WINDOW}
    return _language_model("performer_pytorch", "PerformerLM", **local, **options)


def performer_causal() -> nn.Module:
    """performer-pytorch: the same, causal."""
    return performer(causal=True)


class _Masked(nn.Module):
    """A language model with its padding mask as an input."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(ids, **{self.name: mask})


def performer_masked() -> nn.Module:
    """performer-pytorch: with a padding mask."""
    return _Masked(performer(), "mask")


def linear_attention_transformer() -> nn.Module:
    """linear-attention-transformer: causal, half of the heads local, no positions inside the attention."""
    local = {"n_local_attn_heads": 2, "local_attn_window_size": WINDOW}
    return _language_model(
        "linear_attention_transformer", "LinearAttentionTransformerLM", dim_head=16, causal=True, **local
    )


def linear_attention_transformer_masked() -> nn.Module:
    """linear-attention-transformer: with a padding mask."""
    return _Masked(linear_attention_transformer(), "input_mask")


def routing_transformer() -> nn.Module:
    """routing-transformer: the first layer all local, the second half local and half routed (k-means).

    The routed layer sets its means at its first call. A trained model has done so; here one call does it,
    and then the function that would ask again, which no exporter can follow, is taken out.
    """
    from routing_transformer.routing_transformer import Kmeans

    model = _routing(causal=True, n_local_attn_heads=(4, 2), local_attn_window_size=WINDOW)
    with torch.no_grad():
        model(torch.randint(0, TOKENS, (1, LENGTH)))
    for module in model.modules():
        if isinstance(module, Kmeans):
            module.init = lambda x: None
    return model


def routing_transformer_local() -> nn.Module:
    """routing-transformer: every head local, the window reaching two blocks back and two ahead."""
    return _routing(n_local_attn_heads=4, local_attn_window_size=16, local_attn_radius_blocks=2)


def _routing(**options: object) -> nn.Module:
    return _language_model("routing_transformer", "RoutingTransformerLM", dim_head=16, window_size=WINDOW, **options)


def reformer() -> nn.Module:
    """reformer-pytorch: half of the heads local with shared queries and keys, the others full attention.

    Full instead of hashed attention, because the hashes are drawn anew at every call. `reverse_thres`
    picks the plain layers instead of the ones that save memory in training.
    """
    return reformer_hashed(use_full_attn=True)


def reformer_hashed(**options: object) -> nn.Module:
    """reformer-pytorch as its documentation sets it up: local heads beside hashed ones (LSH)."""
    hashed = {"bucket_size": WINDOW // 2, "ff_chunks": 1, "reverse_thres": LENGTH}
    return _language_model(
        "reformer_pytorch", "ReformerLM", dim_head=16, causal=True, n_local_attn_heads=2, **hashed, **options
    )


def sinkhorn_transformer(causal: bool = True) -> nn.Module:
    """sinkhorn-transformer: half of the heads local, the others sorted in blocks, causal."""
    sorted_ = {"bucket_size": WINDOW, "n_local_attn_heads": 2, "n_top_buckets": 1}
    return _language_model("sinkhorn_transformer", "SinkhornTransformerLM", causal=causal, **sorted_)


def sinkhorn_transformer_both() -> nn.Module:
    """sinkhorn-transformer: the same, both directions."""
    return sinkhorn_transformer(causal=False)


def hierarchical_transformer() -> nn.Module:
    """simple-hierarchical-transformer: two levels, a local attention with a window of its own in each."""
    from simple_hierarchical_transformer import HierarchicalTransformer

    torch.manual_seed(0)
    return HierarchicalTransformer(
        num_tokens=TOKENS,
        dim=(64, 32),
        depth=2,
        seq_len=LENGTH,
        dim_head=16,
        heads=4,
        hierarchies=(1, 2),
        window_sizes=(WINDOW, 16),
    ).eval()


def _colt5(**router: object) -> nn.Module:
    from colt5_attention import ConditionalRoutedTransformerBlock

    torch.manual_seed(0)
    return ConditionalRoutedTransformerBlock(
        64,
        num_heavy_attn_tokens_q=24,
        num_heavy_attn_tokens_kv=24,
        num_heavy_ff_tokens=24,
        light_dim_head=16,
        light_heads=4,
        light_window_size=2 * WINDOW,
        heavy_dim_head=16,
        heavy_heads=4,
        router_kwargs=router,
    ).eval()


def colt5() -> nn.Module:
    """colt5-attention: one block, the light branch of its attention is local, the heavy one routed.

    With the router's cosine scores, and as many tokens scored as are picked. See `colt5_ties`.
    """
    return _colt5(cosine_sim_routing=True, fetch_k_ratio=1.0)


def colt5_ties() -> nn.Module:
    """colt5-attention: the same with the router's defaults, by which too many tokens score exactly 1.

    Which of the equal ones are picked is then up to `topk`, and every engine has its own.
    """
    return _colt5()


class _Reconstruct(nn.Module):
    """SoundStream from sound to sound: its `forward` chooses by a flag."""

    def __init__(self, soundstream: nn.Module) -> None:
        super().__init__()
        self.soundstream = soundstream

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        return self.soundstream(audio, return_recons_only=True)


class _Decode(nn.Module):
    """SoundStream from codes to sound."""

    def __init__(self, soundstream: nn.Module) -> None:
        super().__init__()
        self.soundstream = soundstream

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.soundstream.decode_from_codebook_indices(codes)


def _soundstream(dynamic_pos_bias: bool = False) -> nn.Module:
    soundstream = isolated("audiolm_pytorch", "soundstream", without=("torchaudio",)).SoundStream
    torch.manual_seed(0)
    model = soundstream(
        channels=4,
        strides=(2, 4),
        channel_mults=(2, 4),
        codebook_dim=64,
        codebook_size=32,
        rq_num_quantizers=2,
        attn_window_size=WINDOW,
        attn_dim_head=16,
        attn_heads=4,
        attn_depth=2,
        attn_dynamic_pos_bias=dynamic_pos_bias,
        multi_spectral_window_powers_of_two=(),
    ).eval()
    for module in model.modules():
        # The codebooks are empty until the first batch of a training; a trained model asks all the same.
        if hasattr(module, "init_embed_"):
            nn.init.normal_(module.embed)
            module.initted.fill_(True)
            module.init_embed_ = lambda *args, **kwargs: None
    return model


def soundstream() -> nn.Module:
    """audiolm-pytorch: a SoundStream with local attention on, from sound to sound."""
    return _Reconstruct(_soundstream())


def soundstream_decoder() -> nn.Module:
    """audiolm-pytorch: the SoundStream that turns codes into sound, which is what is shipped."""
    return _Decode(_soundstream())


def soundstream_bias() -> nn.Module:
    """audiolm-pytorch: from sound to sound, with the dynamic position bias instead of rotary positions."""
    return _Reconstruct(_soundstream(dynamic_pos_bias=True))


class _Mesh(nn.Module):
    """A mesh decoder from quantized faces to the logits of their coordinates."""

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, quantized: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.autoencoder.to_coor_logits(self.autoencoder.decode(quantized, face_mask=mask))


def meshgpt_decoder() -> nn.Module:
    """meshgpt-pytorch: the decoder of its mesh autoencoder, local attention with a mask in both layers.

    The encoder is out of reach of any exporter: it gathers a variable number of faces and edges by masks.
    """
    source = isolated(
        "meshgpt_pytorch", "meshgpt_pytorch", without=("classifier_free_guidance_pytorch",), until="MeshTransformer"
    )
    torch.manual_seed(0)
    autoencoder = source.MeshAutoencoder(
        num_discrete_coors=16,
        encoder_dims_through_depth=(16, 16),
        decoder_dims_through_depth=(32, 32),
        dim_codebook=24,
        codebook_size=64,
        attn_decoder_depth=2,
        local_attn_kwargs={"dim_head": 16, "heads": 4},
        local_attn_window_size=WINDOW,
        linear_attn_kwargs={"dim_head": 8, "heads": 4},
    )
    return _Mesh(autoencoder.eval())


def isolated(package: str, module: str, without: tuple[str, ...], until: str | None = None) -> ModuleType:
    """One source file of an installed package, without running the package's `__init__`.

    Where packages in `without` are not installed, their imports are left out, and so is everything from the
    class `until` on. The rest of the file runs as it is.
    """
    name = f"{package}.{module}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)
    if package not in sys.modules:
        # A package whose modules can be imported, and whose __init__ has not been run.
        sys.modules[package] = importlib.util.module_from_spec(spec)
    missing = {other for other in without if importlib.util.find_spec(other) is None}
    if not missing:
        return importlib.import_module(name)
    path = Path(spec.submodule_search_locations[0], f"{module}.py")
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    body = itertools.takewhile(lambda x: not (isinstance(x, ast.ClassDef) and x.name == until), tree.body)
    tree.body = [statement for statement in body if not (_imported(statement) & missing)]
    loaded = ModuleType(name)
    loaded.__file__ = str(path)
    sys.modules[name] = loaded
    try:
        exec(compile(tree, str(path), "exec"), loaded.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return loaded


def _imported(statement: ast.stmt) -> set[str]:
    """The packages that a statement imports."""
    if isinstance(statement, ast.Import):
        return {alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.ImportFrom) and statement.module is not None:
        return {statement.module.partition(".")[0]}
    return set()
