"""Choose sizes to try for a file with dynamic axes: lengths around the multiples of every window.

Between those multiples upstream pads, so a constant left by tracing would show there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.geometry import WindowGeometry

# Sequences per call if the batch is dynamic and there is no sidecar.
OPEN_BATCH = 2


def sweep(windows: Sequence[WindowGeometry], longest: int) -> list[int]:
    """List lengths around the multiples of every window, up to the longest."""
    lengths = {1, longest - 1, longest}
    for geometry in windows:
        w = geometry.window_size
        for multiple in (1, 2, 3, geometry.keys_per_window // w + 1):
            lengths |= {multiple * w - 1, multiple * w, multiple * w + 1}
        if geometry.exact_windowsize:  # the number of keys a query sees, and the first longer length
            span = geometry.backward_reach + geometry.forward_reach + 1
            lengths |= {span, span + 1}
    return sorted(n for n in lengths if 1 <= n <= longest)


def sweep_sizes(
    dynamic_axes: Sequence[str], sizes: Mapping[str, int], sequence: str, windows: Sequence[WindowGeometry]
) -> list[dict[str, int]]:
    """List sizes of the dynamic axes to try: each length of the sweep, then other batch sizes."""
    trials = [dict(sizes)]
    if sequence in dynamic_axes:
        trials += [{**sizes, sequence: n} for n in sweep(windows, sizes[sequence])]
    for axis in dynamic_axes:
        if axis != sequence:
            trials += [{**trial, axis: n} for n in (1, 3) for trial in (trials[0], trials[len(trials) // 2])]
    return [dict(x) for x in dict.fromkeys(tuple(sorted(trial.items())) for trial in trials)]
