"""Profile a run by onnxruntime, by module, operator and node.

Profiling slows a run, so it is done in a process of its own, after the timing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.at_work import temporary_folder
from ...core.documents.bench_report import NodeTime, Profile, Share
from ...core.errors import CheckFailed
from ..backends.onnxruntime.tuned import OPTIMIZED
from .attribution import UNKNOWN, Origin, origins, pattern
from .process import WorkerProcess
from .request import Candidate

# At least this many runs and seconds.
_RUNS, _SECONDS = 10, 0.5
_SUFFIX = "_kernel_time"

Event = dict[str, Any]


def profile_candidate(candidate: Candidate, label: str, inputs: Path, top: int) -> Profile:
    """Profile an ONNX file.

    Args:
        candidate: what to run.
        label: its name in the report.
        inputs: an `.npz` that fits it.
        top: rows of each table.

    Raises:
        UsageError: no ONNX file.
        CheckFailed: onnxruntime wrote no profile, or the process died.
    """
    with temporary_folder("localattn-profile-") as folder, WorkerProcess(label) as process:
        process.open(candidate, profile=str(folder))
        process.ask("bind", inputs=str(inputs), cuda_graph=False, warmup_ms=0.0)
        answer = process.ask("profile", seconds=_SECONDS, calls=_RUNS)
        process.ask("end")
        events = json.loads(Path(answer["file"]).read_text(encoding="utf-8"))
        known = origins(candidate.model, Path(folder) / OPTIMIZED)
    return summarise(label, events, answer["runs"], known, top)


def summarise(label: str, events: Iterable[Event], runs: int, known: Mapping[str, Origin], top: int) -> Profile:
    """Sum up the last `runs` runs of a profile; earlier ones are warm-up.

    Args:
        label: of the candidate.
        events: of onnxruntime's trace.
        runs: how many of the runs count.
        known: origin of each node.
        top: rows of each table; the rest is summed in one more row, "others".

    Raises:
        CheckFailed: the trace does not contain these runs.
    """
    listed = [event for event in events if event.get("ph") == "X"]
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in listed if e["cat"] == "Session" and e["name"] == "model_run")
    if len(spans) < runs:
        raise CheckFailed(f"The profile of {label} has {len(spans)} runs instead of {runs}.")
    spans = spans[-runs:]
    microseconds: dict[tuple[str, str], int] = {}
    for event in _outermost(e for e in listed if e["cat"] == "Node" and e["name"].endswith(_SUFFIX)):
        if event["ts"] >= spans[0][0]:
            key = (event["name"].removesuffix(_SUFFIX), event["args"].get("op_name", ""))
            microseconds[key] = microseconds.get(key, 0) + event["dur"]
    total = sum(microseconds.values())
    if not total:
        raise CheckFailed(f"The profile of {label} has no nodes.")
    nodes = [
        NodeTime(
            name=name,
            operator=operator,
            module=known[name].module if name in known else UNKNOWN,
            ms=spent / runs / 1e3,
            share=spent / total,
        )
        for (name, operator), spent in sorted(microseconds.items(), key=lambda item: -item[1])
    ]
    return Profile(
        label=label,
        runs=runs,
        run_ms=sum(end - begin for begin, end in spans) / runs / 1e3,
        node_ms=total / runs / 1e3,
        modules=_shares(((node.module, node) for node in nodes), top),
        patterns=_shares(((pattern(node.module), node) for node in nodes), top),
        operators=_shares(((node.operator, node) for node in nodes), top),
        nodes=nodes[:top],
        named=sum(node.share for node in nodes if node.module != UNKNOWN),
    )


def _outermost(events: Iterable[Event]) -> list[Event]:
    """List the outermost events: the time of a Loop or Scan already includes that of its subgraph."""
    kept: list[Event] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if not kept or event["ts"] + event["dur"] > kept[-1]["ts"] + kept[-1]["dur"]:
            kept.append(event)
    return kept


def _shares(named: Iterable[tuple[str, NodeTime]], top: int) -> list[Share]:
    """Sum times by name, largest first, the rest as one row."""
    groups: dict[str, list[NodeTime]] = {}
    for name, node in named:
        groups.setdefault(name, []).append(node)
    listed = [_share(name, nodes) for name, nodes in groups.items()]
    listed.sort(key=lambda share: -share.ms)
    if len(listed) > top:
        rest = [node for share in listed[top:] for node in groups[share.name]]
        listed = [*listed[:top], _share(f"{len(listed) - top} others", rest)]
    return listed


def _share(name: str, nodes: list[NodeTime]) -> Share:
    return Share(
        name=name, ms=sum(node.ms for node in nodes), share=sum(node.share for node in nodes), nodes=len(nodes)
    )
