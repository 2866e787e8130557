"""Turn errors of libraries that read an untrusted model into one error of this package.

onnx, onnx_ir, onnxscript, OpenVINO and TensorRT's parser raise whatever they meet: errors of their own, `ValueError`,
`TypeError`, Rust's panics, which are no `Exception`. All of them say that the file is not one that they can read.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from ..core.errors import LocalAttnError, MissingDependency, UsageError

_NO_MEMORY = re.compile(
    r"std::bad_alloc|bad allocation|[Cc]ould not allocate|[Cc]annot allocate memory|[Ff]ailed to allocate memory"
)
# A Rust panic, by the name of its class: it derives from BaseException alone.
_PANIC = "PanicException"
_LONGEST = 300
_NOT_VALID = "Export the model again; this file was not made by an exporter."


@contextlib.contextmanager
def refused_as(
    what: str,
    fix: str,
    reason: Callable[[BaseException], str] | None = None,
    *,
    of: type[LocalAttnError] = UsageError,
) -> Iterator[None]:
    """Raise an error of this package for any error of a library in the block.

    Args:
        what: what happened, a sentence.
        fix: what to do.
        reason: makes one line of the library's error; by default `first_line`.
        of: class of the error.

    Raises:
        LocalAttnError: as `of`, with the first line of the library's error; one of this package passes as it is.
        MissingDependency: memory ran out.
    """
    try:
        yield
    except LocalAttnError:
        raise
    except MemoryError as error:
        raise out_of_memory(what) from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        if _NO_MEMORY.search(str(error)):
            raise out_of_memory(what) from error
        raise of(what, why=(reason or first_line)(error), fix=fix) from error


def did_not_run(model: str, error: Exception, reason: str) -> LocalAttnError:
    """Return the error for a model that an engine could not run on its inputs.

    Args:
        model: its name.
        error: of the engine.
        reason: the error in one line.
    """
    what = f"{model} did not run on these inputs."
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return MissingDependency(
            what, why=f"There is not enough memory. {reason}", fix="Use smaller inputs, or a machine with more memory."
        )
    return UsageError(
        what, why=reason, fix="Check that the values fit the model: tokens below its vocabulary size, enough memory."
    )


def infer_shapes(model: Any, **options: Any) -> Any:
    """Return the model with the shapes that onnx infers.

    Raises:
        UsageError: onnx cannot, because the model is not valid.
    """
    import onnx

    with refused_as("The shapes of the model cannot be inferred.", _NOT_VALID):
        return onnx.shape_inference.infer_shapes(model, **options)


def out_of_memory(what: str) -> MissingDependency:
    """Return the error for a model that does not fit in this machine's memory."""
    return MissingDependency(
        what,
        why="There is not enough memory.",
        fix="Close other programs, or use a machine with more memory; a broken file may also claim more memory than "
        "it needs.",
    )


def first_line(error: BaseException) -> str:
    """Return an error's text in one line of limited length, or its class if it has no text."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    text = next((line for line in lines if line), "") or type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
