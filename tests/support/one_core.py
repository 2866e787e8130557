"""Give each worker a core of its own, and its threads and children with it, as this module is imported.

Two workers with a thread a core each wait for one another. It comes before torch, whose OpenMP counts the cores as it
is loaded: threads of torch beyond one would spin on the worker's core.
"""

from __future__ import annotations

import os

_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if _worker and hasattr(os, "sched_setaffinity"):
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(_worker.removeprefix("gw")) % len(_cores)]})
