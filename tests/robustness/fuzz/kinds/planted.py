"""Cases about what others left: batches that look like interrupted writes, libraries in caches, engines and bundles."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath
from random import Random

from ..case import Case, Content, Folder, HardLink, Pipe
from ..command_line import CALLS, Call
from ..groups import Files, gather
from ..seeds import Seeds
from .mutate import json_bytes
from .outputs import case_of

_NOBODY = 65534


def draw_batch(random: Random, seeds: Seeds) -> Case:
    """Any command, in a folder with what looks like interrupted writes: it moves nothing of them."""
    found = [(command, call) for command, calls in CALLS.items() for call in calls if call.files and call.seconds < 3]
    command, call = random.choices(found, [1 / (0.3 + call.seconds) for _, call in found])[0]
    files = gather(seeds, call.files)
    planted: Files = {"thesis.txt": b"years of work", "private/key": b"secret", "private/model.onnx": b"mine"}
    names = [name for name in files if "/" not in name]
    for _ in range(random.choice((1, 1, 2))):
        batch = f".localattn.next.{random.choice((*names, 'x', 'y.onnx', ''))}"
        if any(name.startswith(batch) for name in planted):
            continue
        planted |= _batch(random, batch, names)
    return case_of(command, call, {**files, **planted})


def _batch(random: Random, batch: str, names: list[str]) -> Files:
    kind = random.randrange(6)
    if kind == 0:
        return {batch: random.choice(("private", "{}/private", ".", "..", "nothing"))}
    if kind == 1:
        return {batch: random.choice((b"a file", Pipe(), Folder()))}
    content: Content = random.choice(
        (b"planted", "{}/private/key", HardLink("private/key"), Pipe(), Folder(), "/etc/passwd")
    )
    inner = random.choice((*names, "thesis.txt", "private", "new.onnx", "new.onnx.json", ".bashrc"))
    return {f"{batch}/{inner}": content, f"{batch}/a": b"a"}


# --- libraries --------------------------------------------------------------------------------------------------------

_RUNS = ("run", "parity", "bench", "bundle create", "plugin list", "plugin path", "plugin check", "doctor", "generate")


def _swapped(files: dict[str, bytes], seeds: Seeds, *, index: bool) -> Files:
    """The library with other bytes; the digests beside it, and with `index` those everywhere, are made right."""
    name = next(name for name in files if name.endswith(".so"))
    changed = files[name] + b"\0"
    old, new = (hashlib.sha256(content).hexdigest().encode() for content in (files[name], changed))
    found: Files = {}
    for path, content in files.items():
        beside = path.startswith(name) or index
        found[path] = changed if path == name else content.replace(old, new) if beside else content
    return found


def _relative_cache(random: Random, seeds: Seeds) -> Case:
    return Case(
        {**seeds.cache}, (), environment={"XDG_CACHE_HOME": random.choice(("cache", "./cache", "../here/cache"))}
    )


def _open_cache(random: Random, seeds: Seeds) -> Case:
    """A cache, or a folder above the library, that others can write to."""
    library = next(name for name in seeds.cache if name.endswith(".so"))
    places = [str(path) for path in PurePosixPath(library).parents if str(path) != "."] + [library]
    files: Files = dict(seeds.cache)
    where = {"XDG_CACHE_HOME": "{}/cache"}
    if random.random() < 0.3:
        files = {name.replace("cache/", "home/.cache/", 1): _rebased(content) for name, content in seeds.cache.items()}
        places = [place.replace("cache", "home/.cache", 1) for place in places]
        where = {"HOME": "{}/home", "XDG_CACHE_HOME": ""}
    place = random.choice(places)
    return Case(files, (), environment=where, modes={place: random.choice((0o777, 0o775, 0o772))})


def _rebased(content: bytes) -> bytes:
    return content.replace(b"@HERE@/cache/", b"@HERE@/home/.cache/")


def _others_cache(random: Random, seeds: Seeds) -> Case:
    """A cache of which a part belongs to somebody else."""
    trusted = [name for name in seeds.cache if not name.endswith(".so.json")]
    owned = random.choice(sorted({*trusted, *(str(PurePosixPath(name).parent) for name in trusted)}))
    return Case({**seeds.cache}, (), environment={"XDG_CACHE_HOME": "{}/cache"}, owners={owned: _NOBODY})


def _swapped_in_cache(random: Random, seeds: Seeds) -> Case:
    files = _swapped(seeds.cache, seeds, index=False)
    return Case(files, (), environment={"XDG_CACHE_HOME": "{}/cache"})


def _elsewhere(random: Random, seeds: Seeds) -> Case:
    """A library that was built into a folder of others, and made again by one of them."""
    files = _swapped(seeds.built, seeds, index=False)
    return Case(
        files, (), environment={"XDG_CACHE_HOME": "{}/cache"}, owners={"lib.so": _NOBODY, "lib.so.json": _NOBODY}
    )


def _batch_in_folder(random: Random, seeds: Seeds) -> Case:
    """A library built into a shared folder, and a batch with another one beside it."""
    files = _swapped(seeds.built, seeds, index=False)
    batch = f".localattn.next.{random.choice(('z', 'lib.so'))}"
    moved: Files = {
        f"{batch}/{name}" if name.startswith("lib.so") else name: content for name, content in files.items()
    }
    sound: Files = {name: content for name, content in seeds.built.items() if name.startswith("lib.so")}
    return Case({**moved, **sound}, (), environment={"XDG_CACHE_HOME": "{}/cache"})


def _linked(random: Random, seeds: Seeds) -> Case:
    """The library of a cache is a link."""
    name = next(name for name in seeds.cache if name.endswith(".so"))
    files: Files = {**seeds.cache, "elsewhere/lib.so": seeds.cache[name]}
    files[name] = "{}/elsewhere/lib.so"
    return Case(files, (), environment={"XDG_CACHE_HOME": "{}/cache"}, modes={"elsewhere": 0o777})


_CACHES: tuple[Callable[[Random, Seeds], Case], ...] = (
    _relative_cache, _open_cache, _open_cache, _others_cache, _swapped_in_cache, _elsewhere, _batch_in_folder, _linked,
)  # fmt: skip


def draw_library(random: Random, seeds: Seeds) -> Case:
    """A planted library: in what is taken for the user's cache, named by an engine's sidecar, or in a bundle."""
    kind = random.random()
    if kind < 0.15:
        return _engine(random, seeds)
    if kind < 0.35:
        return _bundle(random, seeds)
    planted = random.choice(_CACHES)(random, seeds)
    commands = [name for name in _RUNS if CALLS[name][0].seconds < 3 or random.random() < 0.1]
    command = random.choice(commands)
    call = random.choice([call for call in CALLS[command] if "library" not in call.files])
    return _joined(command, call, seeds, planted)


def with_cache(seeds: Seeds) -> Case:
    """`run`, where the library lies in a cache that is the user's own: it is loaded by itself."""
    return _joined("run", CALLS["run"][1], seeds, Case({**seeds.cache}, (), environment={"XDG_CACHE_HOME": "{}/cache"}))


def _joined(command: str, call: Call, seeds: Seeds, planted: Case) -> Case:
    values = {name: value for name, value in call.values.items() if name != "plugin"}
    case = case_of(command, replace(call, values=values), {**gather(seeds, call.files), **planted.files})
    return replace(
        case,
        environment={**case.environment, **planted.environment},
        modes={name: 0o700 for name in ("cache", "home") if any(path.startswith(f"{name}/") for path in planted.files)}
        | planted.modes,
        owners=planted.owners,
        outputs=tuple(pattern for pattern in case.outputs if not pattern.startswith("cache")),
    )


def _engine(random: Random, seeds: Seeds) -> Case:
    """An engine whose sidecar names the library next to it, or anywhere."""
    document = json.loads(seeds.engine["model.engine.json"])
    digest = hashlib.sha256(seeds.foreign).hexdigest()
    document["plugin"] |= {
        "path": random.choice(("@HERE@/lib.so", "lib.so", "./lib.so", "../here/lib.so")),
        "sha256": digest,
    }
    document.pop("facts_sha256", None)
    files: Files = {**seeds.engine, "model.engine.json": json_bytes(document), **seeds.library}
    command = random.choice(("run", "inspect", "bench"))
    parameter = "file" if command == "inspect" else "model"
    return case_of(command, Call({parameter: "{}/model.engine"}), files)


def _bundle(random: Random, seeds: Seeds) -> Case:
    """A bundle that carries the library, and lists it as one of kernels."""
    files: Files = {f"b/{name}": content for name, content in seeds.armed_bundle.items()}
    options = {"files_only": True} if random.random() < 0.2 else {"provider": "cpu"}
    return case_of("bundle verify", Call({"bundle": "{}/b", **options}), files)
