"""Quantize a traced model's linear layers to dynamic int8 with onnxruntime's own quantizer.

Matrices become int8 with one scale per column; their input activations are rounded to 8 bits while the file runs, with
one scale per tensor. Attention, norms, residual streams, embeddings, and matrices too narrow to be worth it are not
quantized.

The scale of an activation is that of its largest element anywhere in the sequence, so a token outside a query's window
can change the query's output through rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ....core.at_work import temporary_folder
from ....core.errors import ExportFailed, MissingDependency
from ....onnx_graph.graph_values import add_constant
from ....onnx_graph.standard_ops.names import MODULE
from .linear_layers import is_transposed, linear_layers

_log = logging.getLogger(__name__)

# The mark that onnxruntime's preprocessing writes into a file; without it the quantizer recommends preprocessing on
# Python's root logger. A traced model needs no preprocessing.
_PREPARED = {"onnx.quant.pre_process": "onnxruntime.quant"}


def quantize(model: ir.Model) -> ir.Model:
    """Quantize the model's linear layers to int8, and return the new model.

    Args:
        model: traced, fp32, with or without ONNX functions; it is not changed.

    Raises:
        MissingDependency: onnxruntime is not installed.
        ExportFailed: the quantizer gave up, or found no linear layer.
    """
    try:
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        raise MissingDependency(
            "onnxruntime is not installed.",
            why="onnxruntime's quantizer makes the int8 matrices.",
            fix="pip install onnxruntime",
        ) from error
    layers = linear_layers(model)
    names = [node.name or "" for node in layers]
    _log.info("quantizing %d linear layers", len(layers))
    with temporary_folder() as folder:
        given, made = folder / "given.onnx", folder / "int8.onnx"
        # The quantizer does not support functions, so they are removed first.
        bodies, model_functions = dict(model.functions), model.functions
        model_functions.clear()
        model.metadata_props.update(_PREPARED)
        try:
            ir.save(model, given, external_data="given.data")
        finally:
            model_functions.update(bodies)
            for key in _PREPARED:
                del model.metadata_props[key]
        if any(node.op_type == "Gemm" for node in layers):
            _multiply_plainly(given, names)
        _forget_shapes_of_constants(given)
        silent = logging.NullHandler()
        logging.root.addHandler(silent)  # otherwise the quantizer's first message adds a handler that stays and prints
        try:
            quantize_dynamic(
                given,
                made,
                op_types_to_quantize=["MatMul"],
                nodes_to_quantize=names,
                per_channel=True,
                weight_type=QuantType.QInt8,
                extra_options={"MatMulConstBOnly": True},
            )
        except Exception as error:  # its own exceptions have no common type
            raise ExportFailed("onnxruntime could not quantize the model.", why=str(error).split("\n")[0]) from error
        finally:
            logging.root.removeHandler(silent)
        quantized = ir.load(made)
        ir.external_data.load_to_model(quantized)
    for key in _PREPARED:
        quantized.metadata_props.pop(key, None)
    quantized.functions.update(bodies)
    modules = {f"{node.name}_quant": path for node in model.graph if (path := node.metadata_props.get(MODULE))}
    for node in quantized.graph:
        if node.name in modules:
            node.metadata_props[MODULE] = modules[node.name]
    quantized.ir_version = model.ir_version
    quantized.producer_name, quantized.producer_version = model.producer_name, model.producer_version
    quantized.opset_imports.update(model.opset_imports)
    return quantized


def _multiply_plainly(path: Path, names: Collection[str]) -> None:
    """Rewrite Gemms as MatMuls with the transposed matrix, because the quantizer only supports MatMul.

    A matrix that another node reads too, such as a table of embeddings, stays, and its transpose is added.
    """
    model = ir.load(path)
    ir.external_data.load_to_model(model)
    gemms = [node for node in model.graph if node.name in names and node.op_type == "Gemm"]
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in gemms:
        if is_transposed(node):
            readers.setdefault(_matrix_of(node), []).append(node)
    for matrix, nodes in readers.items():
        assert matrix.const_value is not None
        turned = np.ascontiguousarray(matrix.const_value.numpy().T)
        if len(matrix.uses()) == len(nodes):
            matrix.const_value = ir.tensor(turned, name=matrix.name)
            matrix.shape = matrix.const_value.shape  # type: ignore[assignment]
        else:
            added = add_constant(model.graph, f"{matrix.name}.turned", turned)
            for node in nodes:
                node.replace_input_with(1, added)
    for node in gemms:
        node.op_type = "MatMul"
        node.attributes.clear()
    ir.save(model, path, external_data="turned.data")


def _matrix_of(node: ir.Node) -> ir.Value:
    matrix = node.inputs[1]
    assert matrix is not None
    return matrix


def _forget_shapes_of_constants(path: Path) -> None:
    """Remove the recorded shapes of constants, which the constants themselves show.

    Before 1.32 the quantizer turns the matrix of every Gemm, those that it does not quantize too, and leaves the shape
    that the file records for it: its own shape inference then fails.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    constants = {tensor.name for tensor in model.graph.initializer}
    recorded = [value for value in model.graph.value_info if value.name not in constants]
    del model.graph.value_info[:]
    model.graph.value_info.extend(recorded)
    path.write_bytes(model.SerializeToString())
