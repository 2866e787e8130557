"""Where and with what a result was measured, and the file it goes to: no names of hosts, users or paths."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"


def _cpu_fields() -> dict[str, str]:
    """What Linux tells of the first processor, by name; nothing elsewhere."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return {}
    lines = info.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _cpu_model() -> str:
    return _cpu_fields().get("model name") or platform.processor() or platform.machine()


def _cpu_generation() -> str:
    """Family and model as x86 processors number them: virtual machines call processors of many years "AMD EPYC"."""
    fields = _cpu_fields()
    parts = [f"{name} {fields[key]}" for name, key in (("family", "cpu family"), ("model", "model")) if key in fields]
    return ", ".join(parts)


def describe_machine() -> dict[str, dict[str, Any]]:
    """This machine and the releases of what takes part."""
    from localattn.core.versions import installed
    from localattn.exporter.artifact.publish import package_versions

    return {
        "machine": {
            "cpu": _cpu_model(),
            "generation": _cpu_generation(),
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "system": platform.system(),
        },
        "versions": package_versions() | installed(["local-attention"]),
    }


def result_path(name: str, suffix: str = "json") -> Path:
    """Where a result of this processor belongs: figures of two processors stand beside each other."""
    return RESULTS / _folder_name(f"{_cpu_model()} {_cpu_generation()}") / f"{name}.{suffix}"


def _folder_name(cpu: str) -> str:
    """ "AMD EPYC(TM) family 26, model 2" → "amd_epyc_family_26_model_2"."""
    return "_".join(re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)", " ", cpu.lower()))) or "unknown"


def write_result(name: str, result: Mapping[str, Any]) -> Path:
    """Write `results/<processor>/<name>.json`, whole or not at all: the machine, then the result."""
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    path = result_path(name)
    write_document(path, {"name": name, "date": date, **describe_machine(), **result})
    return path


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(document_text(document), encoding="utf-8")
    new.replace(path)


def document_text(document: Mapping[str, Any]) -> str:
    """JSON with a line for each entry, and one for each row of an entry that is a list: a measurement is a line."""
    entries = [f" {json.dumps(name)}: {_entry_text(value)}" for name, value in document.items()]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _entry_text(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value, allow_nan=False)
    return "[\n" + ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in value) + "\n ]"


def read_result(name: str) -> dict[str, Any]:
    """The last result of that name, of whatever processor.

    Raises:
        FileNotFoundError: there is none.
    """
    documents = [_read(path) for path in sorted(RESULTS.glob(f"*/{name}.json"))]
    if not documents:
        raise FileNotFoundError(f"no result {name} in {RESULTS}")
    return max(documents, key=lambda document: str(document["date"]))


def own_result(name: str) -> dict[str, Any] | None:
    """The last result of that name of this processor, or None."""
    path = result_path(name)
    return _read(path) if path.exists() else None


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
