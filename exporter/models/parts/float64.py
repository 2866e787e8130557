"""Compute references in float64, a few rows at a time: the parts that the families' `reference.py` share.

A reference is the formula of its upstream class on the state dict, written to be read. It shares only the definition of
visibility with the exported module. Attention is dense. Long sequences are computed a few rows at a time, and only
values that are needed later stay in memory as a whole. Rows without visible keys give zeros (the packages give the mean
of all gathered values, including padding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....core.machine.resident_memory import release_memory_around

State = Mapping[str, Tensor]
ROWS = 128  # positions per step; memory only
_READ = 32 << 20  # bytes of weights that are read before their pages are released
_LARGE = 1 << 20  # bytes of a tensor whose pages may lie in a mapped file
_SPLIT = 64 << 20  # bytes of a matrix that is converted in parts, such as the head of a large vocabulary
_DTYPE = vars(torch._C.TensorBase)["dtype"].__get__  # the getter of Tensor.dtype
# What only looks at a tensor's shape or place: converting a weight for it would be for nothing.
_OF_SHAPE = {Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride}
_OF_SHAPE |= {Tensor.data_ptr, Tensor.is_floating_point, Tensor.is_contiguous, Tensor.element_size}


class Float64State(Mapping[str, Tensor]):
    """A state dict whose tensors become float64 on access, so that only one layer at a time is in float64.

    If it is mapped from a file, the pages that were read are released again.

    Args:
        state: the tensors.
        original: loads upstream's own module from the user's files, apart from these tensors; None in a family whose
            reference is a formula.
    """

    def __init__(self, state: State, original: Callable[[], nn.Module] | None = None) -> None:
        self._state, self._read, self._load = state, 0, original
        self._module: nn.Module | None = None

    def module(
        self, build: Callable[[], nn.Module], load: Callable[[nn.Module, State], None] | None = None
    ) -> nn.Module:
        """Return upstream's own module with these weights in float64, for a family without a formula; built only once.

        Args:
            build: makes the module, with any weights.
            load: loads them, where a state dict alone does not.
        """
        if self._module is None:
            module = build()
            if load is None:
                module.double().load_state_dict(dict(self._state), strict=True)
            else:
                load(module, self._state)
            self._module = module.double().requires_grad_(False).eval()
        return self._module

    def original(self) -> nn.Module:
        """Return upstream's own module as it is loaded from the user's files, to run `InFloat64`; loaded only once."""
        if self._module is None:
            assert self._load is not None
            self._module = self._load().requires_grad_(False).eval()
        return self._module

    def __getitem__(self, name: str) -> Tensor:
        found = self._state[name]
        double = found.double()
        self._read += found.nbytes
        if self._read >= _READ:
            self._read = 0
            release_memory_around(tensor.data_ptr() for tensor in self._state.values())
        return double

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __contains__(self, name: object) -> bool:
        return name in self._state


class InFloat64(TorchFunctionMode):
    """A torch mode in which modules compute in float64, whatever the types of their weights and of their casts.

    Each function of PyTorch takes its floating-point tensors in float64. Weights stay as they are stored and are
    converted, which is exact, where a function uses them: only the weights in use take memory in float64.

    Attributes:
        choices: scores and how many of them were taken, for each choice of the largest along the last axis.
    """

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[tuple[Tensor, int]] = []
        self._default, self._read = torch.float32, 0
        self._addresses: set[int] = set()

    def __enter__(self) -> InFloat64:
        """Begin: tensors that are made without a type are of float64."""
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End, and return the pages of weights that are mapped from a file."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)
        self._release()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch with float64 in place of every other floating-point type among its arguments."""
        if func is Tensor.float:
            return self._widened(args[0])
        if func == _DTYPE:
            return torch.float64 if _is_narrow(func(*args)) else func(*args)
        name = getattr(func, "__name__", "")
        if name == "__get__" or func in _OF_SHAPE:
            return func(*args, **(kwargs or {}))
        if (
            func is F.linear
            and len(args) == 2
            and not kwargs
            and args[1].nbytes >= _SPLIT
            and _is_narrow(args[1].dtype)
        ):
            rows = max(1, len(args[1]) * _SPLIT // args[1].nbytes)
            return torch.cat([F.linear(*map(self._widened, (args[0], part))) for part in args[1].split(rows)], dim=-1)
        if func is F.embedding:  # its table may be the largest weight: only the rows that were taken are converted
            return self._widened(func(*args, **(kwargs or {})))
        given = {key: value if key == "out" else self._widened(value) for key, value in (kwargs or {}).items()}
        # A method that changes its tensor needs that tensor, not a copy.
        own = 1 if (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__") else 0
        widened = [*args[:own], *map(self._widened, args[own:])]
        if func in (torch.topk, Tensor.topk):
            self._note(*widened, **given)
        return func(*widened, **given)

    def _widened(self, value: Any) -> Any:
        """Return a type, a tensor, or those in a list or tuple, in float64 if they are of another floating-point type.

        A list or tuple without any is returned as it is.
        """
        if isinstance(value, torch.dtype):
            return torch.float64 if _is_narrow(value) else value
        if isinstance(value, Tensor):
            return self._converted(value)
        if type(value) in (list, tuple) and any(isinstance(x, Tensor | list | tuple) for x in value):
            return type(value)(map(self._widened, value))
        return value

    def _converted(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            if not _is_narrow(tensor.dtype):
                return tensor
            double = tensor.double()
            if tensor.nbytes >= _LARGE:
                self._addresses.add(tensor.data_ptr())
                self._read += tensor.nbytes
                if self._read >= _READ:
                    self._release()
            return double

    def _release(self) -> None:
        if self._addresses:
            release_memory_around(self._addresses)
        self._read, self._addresses = 0, set()

    def _note(self, input: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> None:
        """Note a choice among the last axis."""
        if dim in (-1, input.ndim - 1):
            self.choices.append((input, k))


def _is_narrow(dtype: torch.dtype) -> bool:
    """Return whether a type is a floating-point type narrower than float64."""
    return dtype.is_floating_point and dtype != torch.float64


@dataclass(frozen=True)
class SequenceSlice:
    """A part of a sequence: keys at the positions `[first, end)` of `length`, queries at `[query_first, query_end)`."""

    length: int
    first: int
    end: int
    query_first: int
    query_end: int

    @classmethod
    def whole(cls, length: int) -> SequenceSlice:
        """Return the slice that is the whole sequence."""
        return cls(length, 0, length, 0, length)

    def queries(self, x: Tensor, axis: int) -> Tensor:
        """Return the rows of the queries, from a tensor with a row for every key."""
        return x.narrow(axis, self.query_first - self.first, self.query_end - self.query_first)


def layer_norm(x: Tensor, state: State, prefix: str) -> Tensor:
    """Normalise with the weight and bias under a prefix."""
    return F.layer_norm(x, x.shape[-1:], state[prefix + "weight"], state[prefix + "bias"])


def by_rows(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function that treats every position separately to `[B, N, …]`, a few positions at a time."""
    out = torch.empty(0)
    for start in range(0, x.shape[1], ROWS):
        rows = compute(x[:, start : start + ROWS])
        if start == 0:
            out = rows.new_empty((rows.shape[0], x.shape[1], *rows.shape[2:]))
        out[:, start : start + ROWS] = rows
    return out


def below(state: State, prefix: str) -> State:
    """Return the part of a state dict under a prefix, without the prefix."""
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
