"""What a user would otherwise take for windowed attention on a CPU, each ready to be timed.

Every one computes the same numbers from the same `[1, H, N, D]` query, key and value; a key mask keeps nine keys of
ten. Whatever a candidate can have ready made is made before it is timed: dense masks, block masks, compiled code, an
exported file, inputs in the layout it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F

from localattn.core.nodes.attention import choose_query_block
from localattn.core.versions import DEFAULT_OPSET

from ..candidates import (
    HEAD_DIM,
    HEADS,
    SCALE,
    THREADS,
    add_mask,
    attention_node,
    dense_graph,
    in_onnxruntime,
    open_session,
    upstream_module,
    value_of,
    without_gradients,
)
from ..cases.compiled import library
from .grid import NUMPY_TYPE, Array, Cell

Run = Callable[[], Array]
ONNX_TYPE = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16}


def _typed(cell: Cell, feed: dict[str, Array]) -> list[ir.Value]:
    kinds = {np.dtype(bool): ir.DataType.BOOL}
    return [value_of(name, list(x.shape), kinds.get(x.dtype, ONNX_TYPE[cell.dtype])) for name, x in feed.items()]


def node(cell: Cell, feed: dict[str, Array], kernels: Path | None = None) -> Run:
    """The exported node, its function definition inlined by onnxruntime."""
    inputs = _typed(cell, feed)
    made = attention_node(inputs, cell.geometry, masked=cell.masked)
    return in_onnxruntime(inputs, [made], feed, opset=DEFAULT_OPSET, kernels=kernels)


def kernel(cell: Cell, feed: dict[str, Array]) -> Run:
    """The same node, computed by the compiled kernel."""
    return node(cell, feed, library())


def _tensors(feed: dict[str, Array]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    torch.set_num_threads(THREADS)
    data = [torch.from_numpy(feed[name]) for name in ("query", "key", "value")]
    return data, torch.from_numpy(feed["key_mask"]) if "key_mask" in feed else None


def upstream(cell: Cell, feed: dict[str, Array]) -> Run:
    """The package the models are trained with, eager; rotary off, so the same mathematics."""
    data, mask = _tensors(feed)
    module = upstream_module(cell.geometry)
    return without_gradients(lambda: module(*data, mask=mask))


def upstream_compiled(cell: Cell, feed: dict[str, Array]) -> Run:
    """The same under `torch.compile`."""
    data, mask = _tensors(feed)
    module = torch.compile(upstream_module(cell.geometry), dynamic=False)
    return without_gradients(lambda: module(*data, mask=mask))


def upstream_exported(cell: Cell, feed: dict[str, Array]) -> Run:
    """The same through `torch.onnx.export`, as it is, in onnxruntime."""
    import io
    import logging
    import warnings

    data, mask = _tensors(feed)
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    names = ["query", "key", "value", *(["key_mask"] if cell.masked else [])]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        arguments = (*data, mask) if cell.masked else tuple(data)
        made = torch.onnx.export(
            upstream_module(cell.geometry), arguments, dynamo=True, input_names=names, verbose=False
        )
    assert made is not None
    buffer = io.BytesIO()
    made.save(buffer)
    session = open_session(buffer.getvalue())
    given = {value.name for value in session.get_inputs()}
    fed = {name: x for name, x in feed.items() if name in given}
    return lambda: np.asarray(session.run(None, fed)[0])


def dense(cell: Cell, feed: dict[str, Array]) -> Run:
    """Scaled dot-product attention with an additive `N×N` mask, as it is exported by other tools."""
    element = NUMPY_TYPE[cell.dtype]
    mask = np.where(cell.visible(feed), element(0), np.finfo(element).min)
    return dense_graph({name: feed[name] for name in ("query", "key", "value")}, mask, add_mask)


def attention_operator(cell: Cell, feed: dict[str, Array]) -> Run:
    """ONNX's Attention operator with a dense boolean mask."""
    mask = cell.visible(feed)
    data = {name: feed[name] for name in ("query", "key", "value")} | {"mask": mask}
    inputs = _typed(cell, data)
    made = ir.node("Attention", inputs, attributes={"scale": SCALE})
    return in_onnxruntime(inputs, [made], data, opset=23)


def group_query(cell: Cell, feed: dict[str, Array]) -> Run:
    """onnxruntime's GroupQueryAttention with its `local_window_size`; its own layout, no past."""
    rows = (1, cell.length, HEADS * HEAD_DIM)
    data: dict[str, Array] = {
        name: np.ascontiguousarray(feed[name].transpose(0, 2, 1, 3)).reshape(rows) for name in ("query", "key", "value")
    }
    inputs = _typed(cell, data)
    lengths = {"seqlens_k": np.array([cell.length - 1], np.int32), "total": np.array(cell.length, np.int32)}
    inputs += [value_of(name, list(x.shape), ir.DataType.INT32) for name, x in lengths.items()]
    window = cell.geometry.backward_reach + 1
    attributes = {"num_heads": HEADS, "kv_num_heads": HEADS, "scale": SCALE, "local_window_size": window}
    made = ir.node(
        "GroupQueryAttention",
        [*inputs[:3], None, None, *inputs[3:]],
        attributes=attributes,
        domain="com.microsoft",
        num_outputs=3,
    )
    for place, value in enumerate(made.outputs):
        value.name = ("", "present_key", "present_value")[place] or None
    # The table shows what the operator takes; turning its output round is for the comparison only.
    return in_onnxruntime(inputs, [made], {**data, **lengths}, opset=DEFAULT_OPSET)


def sdpa_blocks(cell: Cell, feed: dict[str, Array]) -> Run:
    """PyTorch's fused attention over blocks of queries and views of their spans of keys, with a mask a block."""
    data, kept = _tensors(feed)
    geometry, length = cell.geometry, cell.length
    block = choose_query_block(geometry, length, has_bias=False)
    before, after = geometry.backward_reach, geometry.forward_reach
    span, blocks = before + after + block, -(-length // block)
    query_at = np.arange(blocks * block).reshape(blocks, block, 1)
    first, end = geometry.visible_interval(query_at, length)
    position = (np.arange(blocks) * block)[:, None, None] + np.arange(span) - before
    seen = (position >= first) & (position < end)
    if kept is not None:
        seen &= feed["key_mask"][0][position.clip(0, length - 1)]
    mask = torch.from_numpy(seen)[:, None]

    def compute() -> torch.Tensor:
        query, key, value = data
        extra = blocks * block - length
        query = F.pad(query, (0, 0, 0, extra)) if extra else query
        key, value = (F.pad(x, (0, 0, before, after + extra)).unfold(2, span, block) for x in (key, value))
        key, value = (x.permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (key, value))
        query = query.unflatten(2, (blocks, block)).transpose(1, 2).flatten(0, 1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return out.unflatten(0, (1, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]

    return without_gradients(compute)


def flex(cell: Cell, feed: dict[str, Array]) -> Run:
    """FlexAttention with a block mask, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    data, kept = _tensors(feed)
    geometry = cell.geometry
    window, before, after = geometry.window_size, geometry.backward_reach, geometry.forward_reach

    def visible(_b: Any, _h: Any, q: Any, k: Any) -> Any:
        origin = q if geometry.exact_windowsize else q // window * window
        last = q if geometry.causal else origin + after + (0 if geometry.exact_windowsize else window - 1)
        seen = (k >= origin - before) & (k <= last)
        return seen if kept is None else seen & kept[0, k]

    mask = create_block_mask(visible, None, None, cell.length, cell.length, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    return without_gradients(lambda: compiled(*data, block_mask=mask))
