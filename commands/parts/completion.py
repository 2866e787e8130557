"""Make completion in zsh work at the first TAB of a shell.

zsh loads a completion file by running it, at the first TAB, in place of the function it defines. Typer's script defines
that function and does not call it, so that TAB offers nothing. The script made here calls it too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

_OPTIONS = frozenset({"--install-completion", "--show-completion"})
_REGISTERS = "compdef %(complete_func)s %(prog_name)s\n"
_CALLS = 'if [[ "$zsh_eval_context[-1]" == loadautofunc ]]; then\n  %(complete_func)s "$@"\nfi\n'


def prepare(arguments: Collection[str]) -> None:
    """Change Typer's script for zsh if these arguments ask for one; an unknown Typer stays as it is."""
    if _OPTIONS.isdisjoint(arguments):
        return
    with contextlib.suppress(ImportError, AttributeError, KeyError):
        from typer import _completion_shared as shared

        scripts = shared._completion_scripts
        scripts["zsh"] = scripts["zsh"].replace(f"\n{_REGISTERS}", f"\n{_REGISTERS}{_CALLS}")
