"""`record` takes outputs of any release of transformers: those before 5 register them without their keys."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from localattn.exporter.user_module.module_runner import named_tensors
from localattn.exporter.user_module.record import record


class OldOutput(OrderedDict):  # type: ignore[type-arg]
    """An output as transformers 4.5x registers it."""


_pytree.register_pytree_node(
    OldOutput,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: OldOutput(zip(keys, values, strict=True)),
)


class Model(nn.Module):
    """A model that returns such an output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        """Return an output by name, others in a list."""
        return OldOutput(logits=self.linear(x), hidden=(x + 1, x + 2), cache=None)


def test_outputs_of_older_releases_are_named_by_their_keys(tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match="flatten"):  # what PyTorch says of it
        _pytree.tree_flatten_with_path(OldOutput(x=x))
    report = record(Model().eval(), {"x": x}, tmp_path / "golden.npz")
    assert list(report.samples[0]) == ["x", "logits", "hidden_0", "hidden_1"]
    with np.load(tmp_path / "golden.npz") as found:
        assert np.array_equal(found["hidden_1"], x.numpy() + 2)


def test_names_of_other_results_are_as_before() -> None:
    pair = namedtuple("pair", "left right")
    x = torch.ones(1)
    assert list(named_tensors(x)) == ["out"]
    assert list(named_tensors((x, {"a": x, "b": [x, x]}))) == ["out_0", "out_1_a", "out_1_b_0", "out_1_b_1"]
    assert list(named_tensors(pair(x, x))) == ["left", "right"]


def test_caches_are_no_outputs() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    assert list(named_tensors({"logits": torch.ones(1), "past_key_values": cache})) == ["logits"]
