"""Reference, export modules and exported files against the published packages."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from localattn.exporter.checkpoint.infer_config import canonical_state
from localattn.exporter.models import family
from localattn.exporter.options import ShapeRequest
from localattn.exporter.source.source_model import SourceModel

from ...support.reference import rows_without_keys
from ...support.upstream import DIM, HEAD_DIM, HEADS, VOCABULARY, Case, Pair, draw, parse_args, upstream_class

# Both are float64; what remains is upstream's xpos table, rounded to fp32.
REFERENCE_ERROR = 1e-6
MODULE_ERROR = 1e-5

DEFAULT_GRID = {
    "local_attention.LocalAttention": 90,
    "local_attention.LocalMHA": 50,
    "local_attention.LocalTransformer": 60,
    "zeta.LocalAttention": 30,
    "zeta.LocalMHA": 30,
}
SLOW_FACTOR = 8


def grid(first: int, last: int) -> list[Case]:
    """Cases of every class; the bounds count in multiples of the default grid."""
    return [draw(name, index) for name, count in DEFAULT_GRID.items() for index in range(first * count, last * count)]


CASES = grid(0, 1)


def check(case: Case) -> None:
    pair = Pair(case)
    expected = pair.expected()
    reference, module = pair.reference_output(), pair.module_output()
    assert np.isfinite(reference).all() and np.isfinite(module).all()
    assert module.dtype == np.float32
    assert pair.error(reference, expected) < REFERENCE_ERROR
    assert pair.error(module, expected) < MODULE_ERROR
    if "mask" in pair.inputs and pair.source.depth == 1:
        dead = rows_without_keys(case.geometry, pair.inputs["mask"])
        assert not pair.rows(reference)[dead].any()
        assert not pair.rows(module)[dead].any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_upstream(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", grid(1, SLOW_FACTOR), ids=lambda case: case.name)
def test_equals_upstream_on_the_large_grid(case: Case) -> None:
    check(case)


def test_references_import_nothing_of_what_they_judge() -> None:
    """A shared mistake would be invisible; of Hugging Face models both are transformers' own module."""
    shared = {"arguments", "float64", "reference", "attention", "resident_memory"}
    models = Path(family.__file__).parent
    files = [models / "parts" / "float64.py", *models.glob("local_*/reference.py"), *models.glob("aft_*/reference.py")]
    assert len(files) == 5
    for path in files:
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        imported = {str(node.module).rsplit(".", 1)[-1] for node in nodes if node.level}
        assert imported <= shared, (path, imported)


def test_the_grid_reaches_every_option() -> None:
    seen: dict[str, set[object]] = {}
    for case in CASES:
        properties = dict(case.kwargs) | {"mask": case.mask, "bias": case.attn_bias, "batch": case.batch}
        properties |= {"phase": case.length % case.geometry.window_size, "mixes": case.mixes_residuals}
        for name, value in properties.items():
            seen.setdefault(name, set()).add(value)
    assert len(CASES) >= 220
    assert seen["look_backward"] == {0, 1, 2, 3}
    assert seen["look_forward"] == {None, 0, 1, 2}
    assert seen["num_residual_streams"] == {1, 2, 4}
    assert seen["mask"] == {"", "padding", "some", "few", "all"}
    assert len(seen["xpos_scale_base"]) == 3 and len(seen["phase"]) >= 6
    flags = (
        "causal exact_windowsize shared_qk use_xpos autopad use_rotary_pos_emb qk_rmsnorm prenorm bias mixes "
        "gate_values_per_head use_dynamic_pos_bias"
    )
    for name in flags.split():
        assert {True, False} <= seen[name], name
    for name in ("scale", "qk_scale", "num_tokens", "batch"):
        assert len(seen[name]) == 2, name


def test_the_grid_has_rows_without_keys_and_keys_in_the_padding() -> None:
    dead = padded = 0
    for case in CASES:
        geometry = case.geometry
        if case.mask:
            pair = Pair(case)
            dead += rows_without_keys(geometry, pair.inputs["mask"]).any()
        elif not geometry.causal:
            padded += case.length % geometry.window_size > 0
    assert dead >= 10 and padded >= 10


@pytest.mark.parametrize("class_name", DEFAULT_GRID)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_attended_only_without_a_mask(class_name: str, causal: bool) -> None:
    """Zero padding has weight e^0 in a non-causal model without a mask; an all-true mask removes it."""
    sizes: dict[str, object] = {"window_size": 4, "causal": causal, "exact_windowsize": False}
    if class_name.endswith("LocalAttention"):
        sizes |= {"dim": HEAD_DIM, "autopad": True}
    else:
        sizes |= {"dim": DIM, "heads": HEADS, "dim_head": HEAD_DIM}
    if class_name.endswith("LocalTransformer"):
        sizes["local_attn_window_size"] = sizes.pop("window_size")
        sizes |= {"num_tokens": None, "max_seq_len": None, "depth": 1}
    bare, masked = (Pair(Case(f"padding-{class_name}", class_name, sizes, 1, 13, mask)) for mask in ("", "all"))
    assert all((bare.inputs[name] == masked.inputs[name]).all() for name in bare.inputs)
    outputs = []
    for pair in (bare, masked):
        expected = pair.expected()
        assert pair.error(pair.reference_output(), expected) < REFERENCE_ERROR
        assert pair.error(pair.module_output(), expected) < MODULE_ERROR
        outputs.append(pair.rows(expected)[0])
    difference = np.abs(outputs[0] - outputs[1]).reshape(13, -1).max(-1)
    if causal:
        assert difference.max() < 1e-12
    else:  # window 2 looks one window ahead, into the padded one; windows 0 and 1 do not
        assert difference[:8].max() < 1e-12
        assert difference[8:].min() > 1e-3


OLD_TRANSFORMER = {
    "num_tokens": VOCABULARY,
    "max_seq_len": 32,
    "dim": DIM,
    "depth": 2,
    "heads": HEADS,
    "dim_head": HEAD_DIM,
    "local_attn_window_size": 4,
    "num_residual_streams": 1,
}


def test_names_from_before_branches() -> None:
    """local-attention before 1.10 saved `layers.0.0.to_qkv.weight`."""
    pair = Pair(Case("old-names", "local_attention.LocalTransformer", OLD_TRANSFORMER, 2, 11))
    old = {name.replace(".branch.", "."): tensor for name, tensor in pair.source.state.items()}
    assert old.keys() != pair.source.state.keys()
    renamed, notes = canonical_state(old)
    assert renamed.keys() == pair.source.state.keys() and len(notes) == 1
    pair.source.state = renamed
    expected = pair.expected()
    assert pair.error(pair.reference_output(), expected) < REFERENCE_ERROR
    assert pair.error(pair.module_output(), expected) < MODULE_ERROR
    assert canonical_state(renamed) == (renamed, [])


def test_rotary_frequencies_that_were_never_saved() -> None:
    pair = Pair(Case("no-inv-freq", "local_attention.LocalTransformer", OLD_TRANSFORMER, 1, 19))
    frequencies = 1.0 / 10000 ** (torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    for name, buffer in pair.model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(frequencies)
    own = pair.source
    state = {n: x for n, x in own.state.items() if not n.endswith("inv_freq")}
    pair.source = SourceModel(own.class_name, own.args, state, own.mixes_residuals, ShapeRequest(19))
    expected = pair.expected()
    assert pair.error(pair.reference_output(), expected) < REFERENCE_ERROR
    assert pair.error(pair.module_output(), expected) < MODULE_ERROR


def test_the_hyper_connections_release_matters() -> None:
    """Same weights, other numbers: the choice is not lost on the way."""
    kwargs = OLD_TRANSFORMER | {"num_residual_streams": 2}
    name = "local_attention.LocalTransformer"
    outputs = []
    for mixes in (True, False):
        pair = Pair(Case("streams", name, kwargs, 1, 9, mixes_residuals=mixes))
        outputs.append(pair.expected())
        assert pair.error(pair.module_output(), outputs[-1]) < MODULE_ERROR
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-2


CHECKPOINT = Path(__file__).parents[4] / "shared" / "checkpoints" / "pystdlib_w128.pt"


@pytest.mark.skipif(not CHECKPOINT.is_file(), reason=f"the trained checkpoint {CHECKPOINT} is not here")
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300, 512])
def test_trained_checkpoint(length: int) -> None:
    config = json.loads(CHECKPOINT.with_suffix(".json").read_text(encoding="utf-8"))
    state = torch.load(CHECKPOINT, weights_only=True)
    model = upstream_class(config["class"])(**config["kwargs"])
    model.load_state_dict(state, strict=True)
    model.double().eval().requires_grad_(False)
    args = parse_args(config["class"], config["kwargs"])
    source = SourceModel(config["class"], args, state, True, ShapeRequest(length))
    text = np.frombuffer(CHECKPOINT.with_name("pystdlib_val.bin").read_bytes()[:length], np.uint8)
    tokens = text.astype(np.int64)[None]
    expected = model(torch.from_numpy(tokens)).numpy()
    scale = np.abs(expected).max()
    reference = source.reference({"tokens": tokens})[source.outputs[0]]
    assert np.abs(reference - expected).max() < REFERENCE_ERROR * scale
    module = source.module("fp32")(torch.from_numpy(tokens)).numpy()
    assert np.abs(module - expected).max() < MODULE_ERROR * scale
