"""Embeddings and products with constant matrices: each position by itself."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..along import Along, CannotStep
from ..plan import At, Execute

_ATTENDS = "it combines each position with all positions"


def embedding(at: At) -> tuple[Any, Execute]:
    """Look up the rows of tokens."""
    indices = at.given["indices"]
    along = at.along(indices)
    if along is None:
        raise CannotStep("its table depends on the inputs")
    operands = {"weight": at.operand(at.given["weight"], 0), "indices": lambda call: call.values[indices]}
    return at.result(along.pre), at.run(operands)


def linear(at: At) -> tuple[Any, Execute]:
    """Multiply by a matrix, and add a bias."""
    x = at.given["input"]
    along = _of_rows(at, x)
    operands = {name: at.operand(at.given[name], 0) for name in ("weight", "bias")}
    return at.result(along.pre), at.run({"input": lambda call: call.values[x], **operands})


def _of_rows(at: At, x: fx.Node) -> Along:
    along = at.along(x)
    if along is None:
        raise CannotStep("its matrix depends on the inputs")
    if along.axis == at.rank(x) - 1:
        raise CannotStep("it multiplies along the sequence")
    return along


def matmul(at: At) -> tuple[Any, Execute]:
    """Multiply a value and a constant matrix, on either side."""
    names = [name for name in ("self", "other", "mat1", "mat2", "vec", "batch1", "batch2") if name in at.given]
    first, second = (at.given[name] for name in names[-2:])
    moving = [x for x, _ in at.moving() if x in (first, second)]
    if len(moving) != 1 or first is second:
        raise CannotStep(_ATTENDS)
    (x,) = moving
    along = at.along(x)
    assert along is not None
    contracted = at.rank(x) - 1 if x is first else max(0, at.rank(x) - 2)
    if along.axis == contracted:
        raise CannotStep("it multiplies along the sequence")
    result = at.result(along.pre)
    operands = {name: at.operand(value, along.pre) for name, value in at.given.items() if isinstance(value, fx.Node)}
    return result, at.run(operands)


def einsum(at: At) -> tuple[Any, Execute]:
    """Multiply and sum over letters, none of them the letter of time."""
    left, _, right = str(at.given["equation"]).replace(" ", "").partition("->")
    parts = list(at.given["tensors"])
    terms = [_whole(term, at.rank(x)) for x, term in zip(parts, left.split(","), strict=True)]
    right = _whole(right, at.rank(at.node))
    letters = set()
    pres = set()
    for x, term in zip(parts, terms, strict=True):
        along = at.along(x)
        if along is not None:
            letters.add(term[along.axis])
            pres.add(along.pre)
    if len(letters) != 1 or len(pres) != 1:
        raise CannotStep(_ATTENDS)
    (letter,) = letters
    fixed = [term for x, term in zip(parts, terms, strict=True) if at.along(x) is None]
    if letter not in right or any(letter in term for term in fixed):
        raise CannotStep("it multiplies along the sequence")
    (pre,) = pres
    operands = [at.operand(x, pre) for x in parts]
    target: Any = at.node.target
    equation = at.given["equation"]
    return at.result(pre), lambda call: target(equation, [operand(call) for operand in operands])


def _whole(term: str, rank: int) -> str:
    """Return a term with a capital letter for each axis that `...` stands for, counted from the last one."""
    before, dots, after = term.partition("...")
    missing = rank - len(before) - len(after)
    return before + "".join(chr(ord("A") + missing - 1 - n) for n in range(missing)) + after if dots else term
