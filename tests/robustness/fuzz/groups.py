"""Files that belong together, by the name of the group: a model with its sidecar, a checkpoint with its config, …"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable

from .case import Content
from .kinds.mutate import json_bytes
from .seeds import Seeds

Files = dict[str, Content]


def tar_of(files: dict[str, bytes]) -> bytes:
    """The tar of a bundle whose folder is named `b`."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(f"b/{name}")
            entry.size = len(files[name])
            archive.addfile(entry, io.BytesIO(files[name]))
    return stream.getvalue()


def _checkpoint(seeds: Seeds) -> Files:
    return {"m.pt": seeds.checkpoint.read_bytes(), "config.json": json_bytes(seeds.config)}


def _model(name: str) -> Callable[[Seeds], Files]:
    return lambda seeds: {name: seeds.model.read_bytes(), f"{name}.json": seeds.sidecar}


def _engine(seeds: Seeds) -> Files:
    """An engine that needs no plugin library."""
    entries = json.loads(seeds.engine["model.engine.json"]) | {"plugin": None}
    entries.pop("facts_sha256", None)
    return {**seeds.engine, "model.engine.json": json_bytes(entries)}


def _factory(seeds: Seeds) -> Files:
    made = f"LocalTransformer(**{seeds.config['kwargs']!r})"
    source = f"from local_attention import LocalTransformer\n\n\ndef make():\n    return {made}\n"
    return {"factory.py": source.encode(), "w.pt": seeds.checkpoint.read_bytes()}


# The first file of each group is the one that a command names.
GROUPS: dict[str, Callable[[Seeds], Files]] = {
    "checkpoint": _checkpoint,
    "factory": _factory,
    "model": _model("model.onnx"),
    "other": _model("other.onnx"),
    "steps": lambda seeds: {path.name: path.read_bytes() for path in sorted(seeds.step.parent.iterdir())},
    "golden": lambda seeds: {"golden.npz": seeds.golden},
    "npm": lambda seeds: {"npm/package.json": b'{"name": "onnxruntime-web", "version": "1.30.0"}'},  # without its files
    "npz": lambda seeds: {"in.npz": seeds.npz},
    "engine": _engine,
    "library": lambda seeds: dict(seeds.library),
    "compiler": lambda seeds: {"compiler": seeds.compiler},
    "bundle": lambda seeds: {f"b/{path}": content for path, content in seeds.bundle.items()},
    "tar": lambda seeds: {"b.tar": tar_of(seeds.bundle)},
    "text": lambda seeds: {"prompt.txt": b"1,2,3"},
    "report": lambda seeds: {"r.md": b"# An earlier report\n"},
}


def gather(seeds: Seeds, names: tuple[str, ...]) -> Files:
    """The files of several groups."""
    return {name: content for group in names for name, content in GROUPS[group](seeds).items()}
