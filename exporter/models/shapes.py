"""Every tensor of every supported class: the one table of shapes.

Names are those of local-attention 1.11.2 and labml-nn 0.5.1.
"""

from __future__ import annotations

from ..checkpoint.config import AnyArgs, LocalAttentionArgs, LocalMHAArgs, LocalTransformerArgs
from .aft_local.arguments import AFTLocalArgs

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

INV_FREQ = "rel_pos.inv_freq"


def expected_shapes(class_name: str, args: AnyArgs) -> Shapes:
    """The shape of every entry of the state dict of `class_name` built with `args`.

    zeta's classes have the same entries, so `class_name` decides nothing today; it is what a class
    with other names would be told apart by.
    """
    if isinstance(args, AFTLocalArgs):
        return _aft(args)
    if isinstance(args, LocalTransformerArgs):
        return _transformer(args)
    return _mha(args) if isinstance(args, LocalMHAArgs) else _attention(args)


def _aft(args: AFTLocalArgs) -> Shapes:
    square, table = (args.d_model, args.d_model), (args.seq_len, args.seq_len)
    shapes: Shapes = {"pos_bias": table, "local_mask": table, "output.weight": square, "output.bias": square[:1]}
    for name in ("query", "key", "value"):
        shapes |= {f"{name}.weight": square} | ({f"{name}.bias": square[:1]} if args.bias else {})
    return shapes


def _attention(args: LocalAttentionArgs) -> Shapes:
    return {} if args.rotary_dim is None else {INV_FREQ: (args.rotary_dim // 2,)}


def _mha(args: LocalMHAArgs) -> Shapes:
    shapes: Shapes = {}
    if args.prenorm:
        shapes |= {"norm.weight": (args.dim,), "norm.bias": (args.dim,)}
    if args.qk_rmsnorm:
        shapes |= {"q_scale": (args.dim_head,), "k_scale": (args.dim_head,)}
    if args.gate_values_per_head:
        shapes |= {"to_v_gate.0.weight": (args.heads, args.dim), "to_v_gate.0.bias": (args.heads,)}
    shapes |= {f"attn_fn.{name}": shape for name, shape in _attention(args.attention_args()).items()}
    return shapes | {
        "to_qkv.weight": (3 * args.inner_dim, args.dim),
        "to_out.weight": (args.dim, args.inner_dim),
    }


def _transformer(args: LocalTransformerArgs) -> Shapes:
    shapes = _embeddings(args)
    if args.use_dynamic_pos_bias:
        shapes |= {f"dynamic_pos_bias.{name}": shape for name, shape in _position_bias(args).items()}
    connection = _hyper_connection(args)
    branches = (_mha(args.mha_args()), _feed_forward(args))
    for layer in range(args.depth):
        for index, branch in enumerate(branches):
            prefix = f"layers.{layer}.{index}."
            shapes |= {prefix + name: shape for name, shape in connection.items()}
            shapes |= {f"{prefix}branch.{name}": shape for name, shape in branch.items()}
    return shapes


def _embeddings(args: LocalTransformerArgs) -> Shapes:
    if args.num_tokens is None or args.max_seq_len is None:
        return {}
    return {
        "token_emb.weight": (args.num_tokens, args.dim),
        "pos_emb.weight": (args.max_seq_len, args.dim),
        "to_logits.0.weight": (args.dim,),
        "to_logits.0.bias": (args.dim,),
        "to_logits.1.weight": (args.num_tokens, args.dim),
    }


def _position_bias(args: LocalTransformerArgs) -> Shapes:
    width = args.position_bias_dim
    return {
        "mlp.0.weight": (width, 1),
        "mlp.0.bias": (width,),
        "mlp.2.weight": (width, width),
        "mlp.2.bias": (width,),
        "mlp.4.weight": (args.heads, width),
        "mlp.4.bias": (args.heads,),
    }


def _hyper_connection(args: LocalTransformerArgs) -> Shapes:
    """One residual stream is a plain residual: it has no parameters."""
    streams = args.num_residual_streams
    if streams == 1:
        return {}
    return {
        "static_alpha": (streams, streams + 1),
        "dynamic_alpha_fn": (args.dim, streams + 1),
        "dynamic_alpha_scale": (),
        "static_beta": (streams,),
        "dynamic_beta_fn": (args.dim,),
        "dynamic_beta_scale": (),
        "norm.gamma": (args.dim,),
    }


def _feed_forward(args: LocalTransformerArgs) -> Shapes:
    return {
        "0.weight": (args.dim,),
        "0.bias": (args.dim,),
        "1.weight": (2 * args.ff_inner, args.dim),
        "4.weight": (args.dim, args.ff_inner),
    }
