"""Cases about requests to end: Ctrl-C, SIGTERM and others, once or twice, at any moment of any command that writes."""

from __future__ import annotations

import signal
from dataclasses import replace
from random import Random

from ..case import Case, Request
from ..command_line import CALLS, parameters
from ..groups import gather
from ..seeds import Seeds
from .outputs import Target, case_of

_NUMBERS = (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Seconds that a command takes at the most, in a process that was forked with all packages; on a slow machine.
_LONGEST = 6.0


def _moments(random: Random, seconds: float) -> tuple[Request, ...]:
    """One signal, or several."""
    longest = min(_LONGEST, 0.3 + 2 * seconds)
    after = random.choice((random.uniform(0, 0.1), random.uniform(0, longest), random.uniform(0, longest)))
    number, group = random.choice(_NUMBERS), random.random() < 0.5
    first = Request(int(number), after, group)
    if random.random() < 0.75:
        return (first,)
    again = Request(int(random.choice(_NUMBERS)), after + random.choice((0.0, 0.01, 0.1, 0.6)), group)
    return (first, again)


def draw_request(random: Random, seeds: Seeds) -> Case:
    """A command that works, maybe over an earlier output, and a signal at some moment."""
    found = [(command, call) for command, calls in CALLS.items() for call in calls if call.seconds < 3]
    command, call = random.choices(found, [1 / (0.3 + call.seconds) * (3 if call.writes else 1) for _, call in found])[
        0
    ]
    files = gather(seeds, call.files)
    target, force = Target(""), False
    if call.writes and "force" in parameters()[command] and random.random() < 0.3:
        name = next(iter(call.writes))
        value = call.values.get(name)
        if isinstance(value, str) and not value.endswith(("/out", ".tar", ".so")):
            earlier = value.removeprefix("{}/")
            if call.writes[name] in ("model", "npz", "report"):
                files |= _earlier(call.writes[name], earlier, seeds)
                call = replace(call, values={**call.values, "force": True})
                target, force = Target("", same=(earlier, earlier + ".json")), True
    case = case_of(command, call, files, target, force=force)
    return replace(case, own_process=True, requests=_moments(random, call.seconds))


def _earlier(group: str, name: str, seeds: Seeds) -> dict[str, bytes]:
    """What such a command wrote before."""
    if group == "model":
        return {name: seeds.model.read_bytes(), name + ".json": seeds.sidecar}
    return {name: seeds.npz if group == "npz" else b"# An earlier report\n"}
