"""Convert a checkpoint's tensors to plain ones (dense, on the CPU, floating point in float32), or refuse them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ...core.error_texts import argument
from ...core.errors import UsageError
from ..models.inference import bounded

SAVE_STATE_DICT = "Where the model was made, run: torch.save(model.state_dict(), 'weights.pt')"
# Element types that are converted to float32 or kept as they are. As names, because some releases of torch lack some.
_KNOWN = frozenset(
    {
        *("float64", "float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    }
)

# By library, the ends of names of its packed numbers and scales.
_QUANTIZED = {
    "bitsandbytes": (".absmax", ".quant_map", ".SCB", ".nested_absmax", ".quant_state.bitsandbytes__nf4"),
    "GPTQ or AWQ": (".qweight", ".qzeros", ".g_idx"),
    "compressed-tensors": (".weight_packed", ".weight_shape", ".weight_zero_point"),
    "torch.ao": ("._packed_params._packed_params", "._packed_params.dtype"),
}


def plain_tensor(name: str, tensor: torch.Tensor, file_size: int) -> torch.Tensor:
    """Return a tensor detached from autograd, in float32 if it is floating point.

    Args:
        name: name of the tensor.
        tensor: the tensor as the file holds it.
        file_size: size of the file in bytes; no tensor's data may exceed it.

    Raises:
        UsageError: a tensor that is nested, sparse, quantized or without data (meta); of complex or sub-byte numbers;
            or that claims more data than the whole file holds (a broadcast view: copying it could take any amount of
            memory).
    """
    kind = _unusual(tensor)
    if kind:
        raise UsageError(f"{name} is not a dense tensor.", why=f"It is {kind}.", fix=SAVE_STATE_DICT)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _KNOWN:
        raise foreign_numbers(name, dtype)
    if tensor.numel() * tensor.element_size() > file_size:
        raise UsageError(
            f"{name} claims the shape {list(tensor.shape)}.",
            why="That is more data than the whole file contains.",
            fix=SAVE_STATE_DICT,
        )
    tensor = tensor.detach()
    return (tensor.to(torch.float32) if tensor.is_floating_point() else tensor).contiguous()


def _unusual(tensor: torch.Tensor) -> str:
    """Describe what is unusual about a tensor; "" for a dense tensor on the CPU."""
    if tensor.is_nested:
        return "nested: rows of several lengths"
    if tensor.is_quantized:
        return f"quantized ({str(tensor.dtype).removeprefix('torch.')})"
    if tensor.layout is not torch.strided:
        return f"sparse ({str(tensor.layout).removeprefix('torch.')})"
    return "" if tensor.device.type == "cpu" else f"on {tensor.device}, without data in this file"


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; (-1,) for nested tensors, which have several lengths."""
    return (-1,) if tensor.is_nested else tuple(tensor.shape)


def refuse_quantized(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Refuse weights that a library quantised, by the names that it gives to packed numbers and scales.

    Raises:
        UsageError: they are quantised.
    """
    for library, endings in _QUANTIZED.items():
        found = [name for name in state if name.endswith(endings)]
        if found:
            raise UsageError(
                f"{path} contains weights that {library} quantised: {bounded(found, 3)}.",
                why="These are packed numbers and scales; an export needs the original weights to compare with.",
                fix="Give the weights from before the quantisation. For 8 or 4 bits use "
                f"{argument('weight_dtype', 'int8')} or {argument('weight_dtype', 'int4')}.",
            )


def foreign_numbers(name: str, dtype: str) -> UsageError:
    """Make the error for a tensor with an element type that weights of these models never have."""
    kind = "complex numbers" if dtype.startswith(("complex", "C64")) else "packed or unsupported numbers"
    return UsageError(
        f"{name} contains {dtype} numbers.",
        why=f"These are {kind}; the weights of the supported classes are real numbers of 8 bits or more.",
        fix="Save the weights as float32, float16 or bfloat16; unpack quantized ones first.",
    )


def conversions(state: Mapping[str, torch.Tensor]) -> list[str]:
    """Write a note for every floating point type that becomes float32."""
    kinds = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in state.values() if tensor.is_floating_point())
    del kinds["float32"]
    return [f"{count} tensors converted from {kind} to float32" for kind, count in sorted(kinds.items())]


def not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Name the tensors with NaN or infinite numbers, and count them; "" if there are none."""
    found = []
    for name, tensor in named:
        bad = tensor.numel() - int(tensor.isfinite().sum())
        if bad:
            kind = "NaN" if bool(tensor.isnan().any()) else "infinite"
            found.append(f"{name} ({kind}, {bad} of {tensor.numel()})")
    return bounded(found, 3)


def check_finite(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse weights that are NaN or infinite.

    Raises:
        UsageError: some weights are; the error names them.
    """
    found = not_finite(named)
    if found:
        raise UsageError(
            f"Weights are NaN or infinite: {found}.",
            why="Results of such weights cannot be compared.",
            fix="Use a checkpoint from before the training diverged.",
        )
