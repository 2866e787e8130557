"""Name what no check of an export can prove: arguments that cannot be read from the weights.

Export and reference are made from the same configuration. A wrong window is wrong in both, and they agree. Only
outputs that the user's own model computed, the golden outputs, show whether the configuration is that model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sidecar import CheckRecord, WindowRecord

# Name of the check that compares a file with what the user's own model computed.
GOLDEN_CHECK = "golden outputs"
# Names of the checks of attention windows and of memory.
WINDOW_CHECK = "window"
MEMORY_CHECK = "linear memory"
# Names of the two checks that prove a file of rounded weights, apart from what rounding costs.
GRAPH_CHECK = "graph before rounding"
ROUNDED_CHECK = "rounded weights"


def proven_by_golden(checks: Sequence[CheckRecord]) -> bool:
    """Check whether the golden outputs are among the checks that passed."""
    return any(check.name == GOLDEN_CHECK and check.status == "passed" for check in checks)


def proven_apart(checks: Sequence[CheckRecord]) -> bool:
    """Check whether an export proved the graph and the stored weights of a file of rounded weights."""
    passed = {check.name for check in checks if check.status == "passed"}
    return {GRAPH_CHECK, ROUNDED_CHECK} <= passed


def not_proven(arguments: Sequence[str], model: str) -> list[str]:
    """Warn of arguments that no check proves; return no warning if there are none.

    Args:
        arguments: of the model's class, that its weights do not show.
        model: path of the exported file.
    """
    if not arguments:
        return []
    return [
        f"not proven against your own model: {', '.join(arguments)} cannot be read from the weights, and a wrong "
        'value passes every check. Prove them: localattn.record(model, inputs, "golden.npz") in Python, then '
        f"localattn parity {model} --golden golden.npz"
    ]


def no_window(windows: Sequence[WindowRecord], checks: Sequence[CheckRecord], model: str) -> list[str]:
    """Warn that a file has no layer with a window, and which checks therefore did not run.

    Args:
        windows: of the file's attention nodes.
        checks: of its export.
        model: path of the file.
    """
    found = {check.name: check for check in checks}
    window = found.get(WINDOW_CHECK)
    if any(not record.sees_all for record in windows) or (window is None and not windows):
        return []
    if window is not None and window.status == "passed":  # of a model whose layers weigh every key, as AFT-local's
        return []
    doubts = [f"{name}: {found[name].status}" for name in (WINDOW_CHECK, MEMORY_CHECK) if name in found]
    doubts = [doubt for doubt in doubts if not doubt.endswith("passed")]
    more = f" ({'; '.join(doubts)})" if doubts else ""
    return [f"no attention window was found in {model}, so no window was checked{more}"]


def likely(arguments: Sequence[str]) -> str:
    """Name the likely cause where golden outputs differ."""
    other = "check that weights and golden outputs come from the same model, recorded in evaluation mode"
    if not arguments:
        return f"{other[:1].upper()}{other[1:]}."
    return (
        f"Likely wrong: {', '.join(arguments)}, which cannot be read from the weights. Set them in the configuration "
        "to "
        f"your model's own values; else {other}."
    )
