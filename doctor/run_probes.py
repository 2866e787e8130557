"""Run the probes, a few at a time; probes that may crash or hang run in separate processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .install_hints import allowed, requirement
from .probes import PROBES, REMOTE_PROVIDERS, Finding, Probe, provider_probe

CHILD = Path(__file__).with_name("probe_process.py")
# A provider may compile on its first run; a driver that does not answer in this time does not work.
TIMEOUT_S = 120.0
_AT_ONCE = 2


def run_probes(probes: Sequence[Probe] = PROBES, timeout_s: float = TIMEOUT_S) -> list[Finding]:
    """Return every finding, in the order of the probes; a failure in one probe touches no other.

    Args:
        probes: what to look for.
        timeout_s: seconds that one probe may take.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(lambda probe: look_at(probe, timeout_s), probes))
        more = _other_providers(found, probes)
        return found + list(pool.map(lambda probe: look_at(probe, timeout_s), more))


def _other_providers(found: Sequence[Finding], probes: Sequence[Probe]) -> list[Probe]:
    """Make probes for providers that the installed onnxruntime has and the table does not."""
    asked = {probe.ask[1] for probe in probes if probe.ask[:1] == ("provider",)} | REMOTE_PROVIDERS
    listing = {probe.name for probe in probes if "providers" in probe.ask}
    named = [name for finding in found if finding.name in listing for name in finding.items]
    return [provider_probe(name) for name in named if name not in asked]


def look_at(probe: Probe, timeout_s: float = TIMEOUT_S) -> Finding:
    """Run one probe; an exception that it raises becomes the finding."""
    if probe.ask:
        return _judged(probe, _ask(probe.ask, timeout_s))
    try:
        return probe.found(*probe.look()) if probe.look else probe.found("missing")
    except Exception as error:
        return probe.found("broken", detail=f"{type(error).__name__}: {error}".split("\n")[0][:300])


def _ask(arguments: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Return the child process's answer, or how it ended."""
    command = [sys.executable, str(CHILD), *arguments]
    try:
        finished = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"status": "broken", "detail": f"It did not answer in {timeout_s:g} s."}
    except OSError as error:
        return {"status": "broken", "detail": str(error)}
    try:
        answer = json.loads(finished.stdout.splitlines()[-1])
        return {**answer, "status": str(answer["status"])}
    except (IndexError, ValueError, KeyError, TypeError):
        return {"status": "broken", "detail": _how_it_ended(finished)}


def _how_it_ended(finished: subprocess.CompletedProcess[str]) -> str:
    if finished.returncode < 0:
        number = -finished.returncode
        names = {entry.value: entry.name for entry in signal.Signals}
        text = f"It ended the process with {names.get(number, f'signal {number}')}."
    else:
        text = f"It ended the process with exit code {finished.returncode}."
    last = finished.stderr.strip().splitlines()[-1:]
    return " ".join([text, *last])[:300]


def _judged(probe: Probe, answer: dict[str, Any]) -> Finding:
    """Make a finding of an answer; a release that localattn was not made for is `limited`."""
    status, version = answer["status"], str(answer.get("version", ""))
    detail, items = str(answer.get("detail", "")), tuple(map(str, answer.get("items", ())))
    if status == "ok" and probe.package and not allowed(probe.package, version):
        status, detail = "limited", f"made and tested for {requirement(probe.package)}"
    return probe.found(status, version, detail, items)
