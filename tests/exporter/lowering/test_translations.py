"""PyTorch's table of translations is made once, and each export may change its own copy."""

from __future__ import annotations

import pytest
import torch

from localattn.exporter.lowering.translations import translations_made_once

registration = pytest.importorskip("torch.onnx._internal.exporter._registration")


def test_each_export_gets_a_copy_of_one_table() -> None:
    own = vars(registration.ONNXRegistry)["from_torchlib"]
    whole = registration.ONNXRegistry.from_torchlib()
    with translations_made_once():
        first = registration.ONNXRegistry.from_torchlib()
        assert first.functions.keys() == whole.functions.keys() and first.opset_version == whole.opset_version
        first.register_op(torch.ops.aten.add.Tensor, lambda x, y: x)
        second = registration.ONNXRegistry.from_torchlib()
    assert second.functions.keys() == whole.functions.keys()
    for target, entries in whole.functions.items():
        assert [entry.onnx_function for entry in second.functions[target]] == [x.onnx_function for x in entries], target
    assert len(first.functions["aten::add.Tensor"]) == len(second.functions["aten::add.Tensor"]) + 1
    assert vars(registration.ONNXRegistry)["from_torchlib"] is own
