"""Define the errors that a user sees, and the command line's exit code for each.

Every error says three things: what happened, why, and what to do about it. The command line prints
those three lines and nothing else; a traceback appears only under `-v`.
"""

from __future__ import annotations

from enum import IntEnum

from .extras import as_installed


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    OK = 0
    CHECK_FAILED = 1
    USAGE = 2
    MISSING = 3
    EXPORT_FAILED = 4
    BUILD_FAILED = 5
    INTERNAL = 70  # sysexits' EX_SOFTWARE: a bug in this program


class LocalAttnError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        what: one line, what happened.
        why: one line, the cause; may be empty.
        fix: one line, what the user can do; may be empty.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = as_installed(why)
        self.fix = as_installed(fix)

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.why, self.fix) if line)


class CheckFailed(LocalAttnError):
    """A check ran and found a difference: parity, window, memory, a changed file."""

    exit_code = ExitCode.CHECK_FAILED


class UsageError(LocalAttnError):
    """The input is wrong: an unknown option, a broken file, a shape that does not fit."""

    exit_code = ExitCode.USAGE


class MissingDependency(LocalAttnError):
    """Something the command needs is not installed or not present on this machine."""

    exit_code = ExitCode.MISSING


class ExportFailed(LocalAttnError):
    """The exporter could not produce a file."""

    exit_code = ExitCode.EXPORT_FAILED


class BuildFailed(LocalAttnError):
    """An engine or a plugin library could not be built."""

    exit_code = ExitCode.BUILD_FAILED
