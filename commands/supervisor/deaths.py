"""Turn the death of a command into one error with its documented exit code."""

from __future__ import annotations

import re
import signal

from ...core.at_work import Notes
from ...core.errors import LocalAttnError, MissingDependency, UsageError
from ...core.spelling import spelled

# What libraries print before they end a process for lack of memory.
_NO_MEMORY = re.compile(
    r"memory allocation of \d+ bytes failed|bad_alloc|bad_array_new_length|out of memory|cannot allocate memory"
    r"|not enough memory|can't allocate|MemoryError",
    re.IGNORECASE,
)
_MEMORY_FIX = "Check that the sizes are right; else free memory, or use a machine with more."
_LONGEST_LINE = 300


def error_of(status: int, notes: Notes, last_lines: list[str], peak_bytes: int) -> LocalAttnError:
    """Return the error for a command that was killed or crashed.

    Args:
        status: of the process, as `os.wait4` returns it.
        notes: what the process was working on.
        last_lines: the last output of its libraries.
        peak_bytes: the most memory that it held.
    """
    import os

    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    files = " and ".join(spelled(name) for name in notes.inputs[:3])
    said = next((line for line in last_lines if _NO_MEMORY.search(line)), "")
    if number == signal.SIGKILL or said:
        what = "There is not enough memory" + (f" for {files}." if files else ".")
        why = f"The system ended the process ({_name(number)}), which held {peak_bytes / 1e9:.1f} GB."
        if said:
            why = f"A library stopped: {_cut(said)}."
        return MissingDependency(what, why=why, fix=_MEMORY_FIX)
    if number == getattr(signal, "SIGXCPU", None):
        return MissingDependency(
            "The limit of processor time was reached" + (f" with {files}." if files else "."),
            why="The system ended the process (SIGXCPU).",
            fix="Raise the limit (ulimit -t), or use smaller inputs.",
        )
    how = f"was ended by {_name(number)}" if number else f"ended with code {os.WEXITSTATUS(status)} without a result"
    last = next((line for line in reversed(last_lines) if line.strip()), "")
    printed = f" It printed: {_cut(last)}." if last else ""
    return UsageError(
        f"{files} cannot be used: a library's own code failed on {'it' if len(notes.inputs) == 1 else 'them'}."
        if files
        else "A library's own code failed.",
        why=f"The process {how}.{printed}",
        fix="The file may be damaged or malicious. Try another runtime, or another release of the library.",
    )


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cut(line: str) -> str:
    line = line.strip().rstrip(".")
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…"
