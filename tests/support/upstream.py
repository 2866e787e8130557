"""The published packages as references, and seeded random cases to run through them and through ours.

Upstream runs in float64, on weights that are all random, hyper-connections and rotary frequencies included.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import math
import random
import sys
import types
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor, nn

from localattn.core.geometry import WindowGeometry
from localattn.exporter.checkpoint.config import check_names, resolve_class
from localattn.exporter.models.arguments import Arguments
from localattn.exporter.options import ShapeRequest
from localattn.exporter.source.source_model import SourceModel

from .reference import rows_without_keys, upstream_visibility

DIM, HEADS, HEAD_DIM, VOCABULARY, DEPTH = 16, 2, 8, 11, 2
Arrays = dict[str, NDArray[Any]]

torch.set_num_threads(1)  # threads over tensors this small only wait for each other: half the run


def parse_args(class_name: str, kwargs: Mapping[str, Any]) -> Arguments:
    """Check the arguments of a class and fill in upstream's defaults."""
    entry = resolve_class(class_name)
    return entry.args(**check_names(entry, kwargs))


@dataclass(frozen=True)
class Case:
    """One model, its shapes and its optional inputs.

    Args:
        name: for pytest.
        class_name: a key of `exporter.models.registry.CLASSES`.
        kwargs: constructor arguments.
        batch: batch size.
        length: sequence length.
        mask: "", "padding", "some", "few" (rows without any key occur) or "all" (keeps everything).
        attn_bias: whether a bias goes in.
        mixes_residuals: False is hyper-connections before 0.3.10.
    """

    name: str
    class_name: str
    kwargs: Mapping[str, Any]
    batch: int
    length: int
    mask: str = ""
    attn_bias: bool = False
    mixes_residuals: bool = True

    @property
    def kind(self) -> str:
        """The last part of the class's name."""
        return self.class_name.rsplit(".", 1)[1]

    @property
    def geometry(self) -> WindowGeometry:
        """The window."""
        return parse_args(self.class_name, self.kwargs).geometry()


@functools.cache
def upstream_class(class_name: str) -> type[nn.Module]:
    """The published class."""
    package, kind = class_name.split(".")
    if package == "local_attention":
        reason = "local-attention is the reference of this test: pip install local-attention"
        return getattr(pytest.importorskip("local_attention", reason=reason), kind)
    return _zeta_classes()[kind]


def _zeta_classes() -> dict[str, type[nn.Module]]:
    """zeta's two classes from their own files; the package itself imports dozens of heavy ones."""
    try:
        distribution = importlib.metadata.distribution("zetascale")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("zetascale is the reference of this test: `python -m tests` adds it")

    def path_of(module: str) -> Path:
        return Path(str(distribution.locate_file(module.replace(".", "/") + ".py")))

    helpers = types.ModuleType("zeta.utils.main")
    _define_helpers(helpers, path_of("zeta.utils.main"))
    with _temporarily({"zeta.utils.main": helpers}):
        loaded: dict[str, types.ModuleType] = {}
        for name in ("embeddings.sinusoidal", "attention.local_attention", "attention.local_attention_mha"):
            full = f"zeta.nn.{name}"
            spec = importlib.util.spec_from_file_location(full, path_of(full))
            assert spec is not None and spec.loader is not None
            sys.modules[full] = loaded[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[name])
    attention = loaded["attention.local_attention"]
    # As published it returns a tensor where masked_fill wants a number, and raises.
    attention.max_neg_values = lambda x: -torch.finfo(x.dtype).max  # type: ignore[attr-defined]
    mha = loaded["attention.local_attention_mha"]
    return {"LocalAttention": attention.LocalAttention, "LocalMHA": mha.LocalMHA}


def _define_helpers(module: types.ModuleType, path: Path) -> None:
    """The few functions of zeta's utilities that attention calls, without the file's imports."""
    wanted = {"default", "exists", "l2norm", "look_around", "max_neg_values", "pad_to_multiple"}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name in wanted]
    vars(module).update(torch=torch, F=F, math=math, rearrange=rearrange)
    exec(compile(tree, str(path), "exec"), vars(module))  # the installed package's own source


@contextmanager
def _temporarily(modules: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """Import zeta's files under their names, and leave no trace of it."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "zeta"}
    try:
        for name in ("zeta", "zeta.nn", "zeta.nn.attention", "zeta.nn.embeddings", "zeta.utils"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = []  # type: ignore[attr-defined]
        sys.modules.update(modules)
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "zeta"]:
            del sys.modules[name]
        sys.modules.update(before)


def without_mixing(model: nn.Module) -> None:
    """Make hyper-connections behave as before 0.3.10: the branch adds to the residual as it came in."""
    for part in model.modules():
        width_connection = getattr(part, "width_connection", None)
        if width_connection is None or not hasattr(part, "static_alpha"):
            continue

        def old(residuals: Tensor, today: Any = width_connection) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            branch_input, _, rest = today(residuals)
            return branch_input, residuals, rest

        part.width_connection = old  # type: ignore[assignment]


class Pair:
    """Upstream's model, ours with the same weights, and inputs for both.

    Args:
        case: what to build.
        dtype: what the inputs are rounded to, "fp32" or "fp16".
    """

    def __init__(self, case: Case, dtype: str = "fp32") -> None:
        self.case = case
        torch.manual_seed(zlib.crc32(case.name.encode()))
        random.seed(case.name)  # hyper-connections draw a stream with it
        self.model = upstream_class(case.class_name)(**case.kwargs)
        for parameter in self.model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        for name, buffer in self.model.named_buffers():
            if name.endswith("inv_freq"):
                buffer *= 1 + 0.1 * torch.randn_like(buffer)
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.double().eval().requires_grad_(False)
        if getattr(self.model, "dynamic_pos_bias", None) is not None:  # it makes its input in float32
            self.model.dynamic_pos_bias.mlp.register_forward_pre_hook(lambda _, x: (x[0].double(),))
        if not case.mixes_residuals:
            without_mixing(self.model)
        bare = case.kind == "LocalAttention"
        self.source = SourceModel(
            case.class_name,
            parse_args(case.class_name, case.kwargs),
            state,
            case.mixes_residuals,
            ShapeRequest(
                case.length,
                case.batch,
                heads=HEADS if bare else None,
                dim_head=HEAD_DIM if bare else None,
                mask=bool(case.mask),
                attn_bias=case.attn_bias,
            ),
        )
        self.inputs = {spec.name: self._random(spec.name, spec.shape, spec.dtype) for spec in self.source.inputs(dtype)}

    def _random(self, name: str, shape: tuple[Any, ...], dtype: str) -> NDArray[Any]:
        if name == "tokens":
            return torch.randint(0, VOCABULARY, shape).numpy()
        if name == "mask":
            return mask_of(self.case.mask, *shape)
        return torch.randn(shape).numpy().astype(dtype)

    def expected(self) -> NDArray[np.float64]:
        """Upstream's output."""
        given = {name: torch.from_numpy(array) for name, array in self.inputs.items()}
        given = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
        data = [given.pop(name) for name in ("q", "k", "v", "x", "tokens") if name in given]
        return self.model(*data, **given).numpy()

    def reference_output(self) -> NDArray[np.float64]:
        """The reference's output."""
        return self.source.reference(self.inputs)[self.source.outputs[0]]

    def module_output(self) -> NDArray[Any]:
        """The export-friendly module's output in fp32."""
        given = {name: torch.from_numpy(array) for name, array in self.inputs.items()}
        if "tokens" in given:
            given["x"] = given.pop("tokens")
        return self.source.module("fp32")(**given).numpy()

    def comparable(self) -> NDArray[np.bool_]:
        """`[B, N]`: rows that no row without keys has reached; there upstream answers otherwise."""
        case = self.case
        kept = self.inputs.get("mask", np.ones((case.batch, case.length), dtype=bool))
        dead = rows_without_keys(case.geometry, kept)
        seen = upstream_visibility(case.geometry, case.length)[None] & kept[:, None, :]
        differs = dead.copy()
        for _ in range(self.source.depth - 1):
            differs = differs | dead | (seen & differs[:, None, :]).any(-1)
        return ~differs

    def rows(self, output: NDArray[Any]) -> NDArray[Any]:
        """An output as `[B, N, …]`."""
        return output.transpose(0, 2, 1, 3) if self.case.kind == "LocalAttention" else output

    def error(self, actual: NDArray[Any], expected: NDArray[np.float64]) -> float:
        """Largest difference on comparable rows, relative to the output's scale there."""
        good = self.comparable()
        assert good.any() and actual.shape == expected.shape
        a, e = self.rows(actual)[good], self.rows(expected)[good]
        return float(np.abs(a - e).max() / max(np.abs(e).max(), 1e-3))


def mask_of(kind: str, batch: int, length: int) -> NDArray[np.bool_]:
    """A key mask; at least one key of every row of the batch stays."""
    if kind == "all":
        return np.ones((batch, length), dtype=bool)
    if kind == "padding":
        kept = torch.randint(1, length + 1, (batch, 1))
        return (torch.arange(length) < kept).numpy()
    mask = torch.rand(batch, length) < {"some": 0.75, "few": 0.25}[kind]
    mask[torch.arange(batch), torch.randint(0, length, (batch,))] = True
    return mask.numpy()


def draw(class_name: str, index: int) -> Case:
    """The case of this number, always the same."""
    rng = random.Random(f"{class_name} {index}")
    package, kind = class_name.split(".")
    w = rng.choice([2, 3, 4, 5, 8])
    causal = rng.random() < 0.5
    kwargs: dict[str, Any] = {"causal": causal, "look_backward": rng.choice([0, 1, 1, 2, 3])}
    if not causal:
        kwargs["look_forward"] = rng.choice([None, 0, 1, 2])
    kwargs["shared_qk"] = rng.random() < 0.25
    kwargs["use_xpos"] = rng.random() < 0.35
    if kwargs["use_xpos"]:
        kwargs["xpos_scale_base"] = rng.choice([None, 3, 6.5])
    kwargs["exact_windowsize"] = rng.random() < 0.5
    length = max(1, rng.choice([1, w - 1, w, w + 1, 2 * w, 3 * w + 1, 5 * w - 1, 6 * w]))
    mask, bias = rng.choice(["", "", "", "padding", "some", "few", "all"]), rng.random() < 0.35
    if kind == "LocalAttention":
        kwargs |= {"window_size": w, "scale": rng.choice([None, 0.3]), "autopad": length % w > 0 or rng.random() < 0.5}
        kwargs["use_rotary_pos_emb"] = rng.random() < 0.8
        if rng.random() < 0.85:
            kwargs["dim"] = HEAD_DIM
    else:
        kwargs |= {"dim": DIM, "heads": HEADS, "dim_head": HEAD_DIM, "qk_rmsnorm": rng.random() < 0.4}
        kwargs["exact_windowsize"] = rng.choice([None, True, False])
        if kwargs["qk_rmsnorm"]:
            kwargs["qk_scale"] = rng.choice([8, 3.5])
        if package != "zeta":
            kwargs["gate_values_per_head"] = rng.random() < 0.5
    if kind == "LocalMHA":
        kwargs |= {"window_size": w, "prenorm": rng.random() < 0.5, "use_rotary_pos_emb": rng.random() < 0.8}
    mixes = True
    if kind == "LocalTransformer":
        bias, mixes = False, rng.random() < 0.7
        kwargs |= {"num_tokens": rng.choice([None, VOCABULARY]), "max_seq_len": 64, "depth": DEPTH}
        kwargs |= {
            "local_attn_window_size": w,
            "num_residual_streams": rng.choice([1, 2, 4]),
            "ff_mult": rng.choice([2, 4]),
        }
        kwargs["use_dynamic_pos_bias"] = rng.random() < 0.35
        if kwargs["use_dynamic_pos_bias"]:  # upstream's bias is two windows wide
            kwargs["look_backward"] = 1 if causal else rng.choice([0, 1])
            kwargs |= {} if causal else {"look_forward": 1 - kwargs["look_backward"]}
    name = f"{package}-{kind}-{index:03}"
    return Case(name, class_name, kwargs, rng.choice([1, 2]), length, mask, bias, mixes)
