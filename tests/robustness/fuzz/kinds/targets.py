"""Every kind of case of a campaign: mutated files of each format here, all else in the modules beside."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from ....support.hostile_models import HOSTILE, SOUND
from ..case import Case, Content, Folder
from ..groups import tar_of
from ..seeds import Seeds
from .deaths import draw_death
from .forged import draw_forged
from .mutate import (
    json_bytes,
    mutate_bytes,
    mutate_config,
    mutate_document,
    mutate_json,
    mutate_npy,
    mutate_pickle,
    mutate_safetensors,
    mutate_zip,
)
from .mutate_onnx import mutate_onnx
from .neighbours import draw_neighbours
from .options import draw_option
from .outputs import draw_output
from .planted import draw_batch, draw_library
from .requests import draw_request
from .servers import draw_server
from .surroundings import draw_environment, draw_streams
from .training import draw_training
from .wrong_inputs import draw_wrong_input

Make = Callable[[Random, Seeds], Case]


@dataclass(frozen=True)
class Target:
    """One kind of input.

    Args:
        make: draws a case.
        weight: its share of a campaign; 0 for one that takes seconds and is run when named.
        sample: how many cases the default tests run.
        with_bytes: the case of one file's content, for coverage-guided fuzzing; None where there is no one file.
        start: that file, sound.
        change: a mutation of it that keeps to the format.
    """

    make: Make
    weight: int = 1
    with_bytes: Callable[[bytes, Seeds], Case] | None = None
    start: Callable[[Seeds], bytes] | None = None
    change: Callable[[Random, bytes], bytes] | None = None
    sample: int = 20


def _config_file(seeds: Seeds) -> bytes:
    return json_bytes(seeds.config)


def _inspect_checkpoint(name: str) -> Callable[[bytes, Seeds], Case]:
    def case(content: bytes, seeds: Seeds) -> Case:
        return Case({name: content, "config.json": _config_file(seeds)}, ("inspect", "{}/" + name))

    return case


def _dry_export(random: Random, name: str, content: bytes, seeds: Seeds) -> Case:
    """Mostly inspect; else the export's own reading, which stops before it traces."""
    if random.random() < 0.6:
        return _inspect_checkpoint(name)(content, seeds)
    files: dict[str, Content] = {name: content, "config.json": _config_file(seeds)}
    return Case(files, ("export", "{}/" + name, "-o", "{}/out.onnx", "--dry-run"))


def _torch_zip(random: Random, seeds: Seeds) -> Case:
    return _dry_export(random, "m.pt", mutate_zip(random, seeds.checkpoint.read_bytes(), mutate_pickle), seeds)


def _legacy(random: Random, seeds: Seeds) -> Case:
    return _dry_export(random, "m.pt", mutate_pickle(random, "data.pkl", seeds.legacy), seeds)


def _safetensors(random: Random, seeds: Seeds) -> Case:
    return _dry_export(random, "m.safetensors", mutate_safetensors(random, seeds.safetensors), seeds)


def _config(random: Random, seeds: Seeds) -> Case:
    suffix = random.choice((".json", ".toml", ".yaml"))
    files: dict[str, Content] = {"m.pt": seeds.checkpoint.read_bytes()}
    files["c" + suffix] = mutate_config(random, seeds.config, suffix)
    command = ("inspect",) if random.random() < 0.6 else ("export", "-o", "{}/out.onnx", "--dry-run")
    return Case(files, (*command, "{}/m.pt", "--config", "{}/c" + suffix))


_RUN = ("run", "{}/model.onnx", "--provider", "cpu", "--threads", "1")


def _npz_case(content: bytes, seeds: Seeds) -> Case:
    arguments = (*_RUN, "--load-inputs", "{}/in.npz", "--save-outputs", "{}/out.npz")
    return Case(
        {"model.onnx": seeds.model.read_bytes(), "model.onnx.json": seeds.sidecar, "in.npz": content},
        arguments,
        ("out.npz",),
    )


def _npz(random: Random, seeds: Seeds) -> Case:
    return _npz_case(mutate_zip(random, seeds.npz, mutate_npy), seeds)


def _resealed(document: Any) -> bytes:
    """A sidecar whose seal is right again, as someone who alters it on purpose would write it."""
    from localattn.core.storage import publishing

    if not isinstance(document, dict):
        return json_bytes(document)
    try:
        return publishing.sealed(json.dumps(document)).encode("utf-8", "surrogatepass")
    except ValueError:
        return json_bytes(document)


def _mutated_sidecar(random: Random, content: bytes) -> bytes:
    if random.random() < 0.3:
        return mutate_json(random, content)
    return _resealed(mutate_document(random, json.loads(content)))


def _sidecar_case(content: bytes, seeds: Seeds, command: tuple[str, ...] = ("inspect", "{}/model.onnx")) -> Case:
    return Case({"model.onnx": seeds.model.read_bytes(), "model.onnx.json": content}, command)


def _sidecar(random: Random, seeds: Seeds) -> Case:
    command = random.choice((("inspect", "{}/model.onnx"), _RUN, (*_RUN, "--format", "json")))
    return _sidecar_case(_mutated_sidecar(random, seeds.sidecar), seeds, command)


def _onnx_case(content: bytes, seeds: Seeds, command: tuple[str, ...] = _RUN) -> Case:
    inputs = ("--load-inputs", "{}/in.npz") if command[0] == "run" else ()
    return Case({"model.onnx": content, "in.npz": seeds.npz}, (*command, *inputs))


def _onnx(random: Random, seeds: Seeds) -> Case:
    content = mutate_onnx(random, seeds.model.read_bytes())
    if random.random() < 0.2:
        document = seeds.document | {"model_sha256": hashlib.sha256(content).hexdigest()}
        return Case({"model.onnx": content, "model.onnx.json": _resealed(document)}, _RUN)
    return _onnx_case(content, seeds, ("inspect", "{}/model.onnx") if random.random() < 0.25 else _RUN)


# Every verb that opens an ONNX file, and what it may leave.
_VERBS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("convert", "{}/model.onnx", "-o", "{}/out/c.onnx", "--standard-ops"): ("out/c.onnx*",),
    ("run", "{}/model.onnx", "--runtime", "openvino"): (),
    ("plugin", "rewrite", "{}/model.onnx", "-o", "{}/out/r.onnx"): ("out/r.onnx*",),
    ("bundle", "{}/model.onnx", "-o", "{}/out/b"): ("out/b", "out/b/*"),
    ("inspect", "{}/model.onnx", "--format", "html"): (),
    ("inspect", "{}/model.onnx", "--format", "json"): (),
    ("bench", "{}/model.onnx", "--rounds", "1"): (),
    ("parity", "{}/model.onnx", "--against", "{}/other.onnx"): (),
}


def _onnx_verbs(random: Random, seeds: Seeds) -> Case:
    """A mutated model, or one of the hostile models that tests know, in every verb that opens one."""
    if random.random() < 0.3:
        content = random.choice([*HOSTILE.values(), *SOUND.values()])()
    else:
        content = mutate_onnx(random, seeds.model.read_bytes())
    command = random.choice(list(_VERBS))
    files: dict[str, Content] = {"model.onnx": content, "other.onnx": seeds.model.read_bytes(), "out": Folder()}
    return Case(files, command, _VERBS[command])


def _external_data(random: Random, seeds: Seeds) -> Case:
    files: dict[str, Content] = {**seeds.external, "in.npz": seeds.npz, "folder/x": b"", "link.bin": "/etc/passwd"}
    name = random.choice(("model.onnx", "model.onnx", "weights.bin"))
    content = seeds.external[name]
    files[name] = mutate_onnx(random, content) if name == "model.onnx" else mutate_bytes(random, content)
    if random.random() < 0.15:
        del files["weights.bin"]
    command = ("inspect", "{}/model.onnx") if random.random() < 0.25 else (*_RUN, "--load-inputs", "{}/in.npz")
    return Case(files, command)


def _step(random: Random, seeds: Seeds) -> Case:
    """A step file, its sidecar or its prefill file changed; where the file is, its sidecar follows it."""
    files: dict[str, Content] = {path.name: path.read_bytes() for path in seeds.step.parent.iterdir()}
    name = random.choice(sorted(files))
    content = files[name]
    assert isinstance(content, bytes)
    if name.endswith(".json"):
        files[name] = _mutated_sidecar(random, content)
    elif name.endswith(".onnx"):
        files[name] = changed = mutate_onnx(random, content)
        beside = files[name + ".json"]
        assert isinstance(beside, bytes)
        files[name + ".json"] = _resealed(json.loads(beside) | {"model_sha256": hashlib.sha256(changed).hexdigest()})
    else:
        files[name] = mutate_bytes(random, content)
    prompt = ("--prompt-ids", "1,2,3,4,5,6", "--max-tokens", "3", "--provider", "cpu", "--threads", "1")
    return Case(files, ("generate", "{}/step.onnx", *prompt))


def _relisted(files: dict[str, bytes], change: dict[str, bytes]) -> dict[str, Content]:
    """A bundle with changed files whose manifest agrees with them."""
    files = files | change
    manifest = json.loads(files["manifest.json"])
    for entry in manifest["files"]:
        if entry["path"] in change:
            content = change[entry["path"]]
            entry |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {**files, "manifest.json": json_bytes(manifest)}


def _bundle_folder(random: Random, seeds: Seeds) -> Case:
    files: dict[str, Content] = dict(seeds.bundle)
    kind = random.randrange(4)
    name = random.choice(sorted(seeds.bundle))
    if kind == 0:
        files["manifest.json"] = mutate_json(random, seeds.bundle["manifest.json"])
    elif kind == 1:
        files[name] = mutate_bytes(random, seeds.bundle[name])
    elif kind == 2:
        sample = random.choice(sorted(path for path in seeds.bundle if path.endswith(".npz")))
        files = _relisted(seeds.bundle, {sample: mutate_zip(random, seeds.bundle[sample], mutate_npy)})
    else:
        files = _relisted(seeds.bundle, {"model/model.onnx": mutate_onnx(random, seeds.bundle["model/model.onnx"])})
    below: dict[str, Content] = {f"b/{path}": content for path, content in files.items()}
    return Case(below, ("bundle", "verify", "{}/b"))


def _tar_case(content: bytes, seeds: Seeds) -> Case:
    return Case({"b.tar": content}, ("bundle", "verify", "{}/b.tar", "--files-only"))


def _changed_tar(random: Random, sound: bytes) -> bytes:
    """Header blocks changed, most with their checksums made right; now and then any bytes."""
    content = bytearray(sound)
    headers = [place for place in range(0, len(content), 512) if content[place + 257 : place + 262] == b"ustar"]
    for _ in range(random.choice((1, 1, 2, 3))):
        start = random.choice(headers)
        header = bytearray(content[start : start + 512])
        place = random.randrange(500)
        piece = random.choice(
            (random.randbytes(3), b"\xff" * 12, b"../..", b"\0" * 8, bytes([random.randrange(0x30, 0x7B)]))
        )
        header[place : place + len(piece)] = piece
        header = header[:512]
        if random.random() < 0.8:
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
        content[start : start + 512] = header
    if random.random() < 0.3:
        return mutate_bytes(random, bytes(content))
    return bytes(content)


def _bundle_tar(random: Random, seeds: Seeds) -> Case:
    return _tar_case(_changed_tar(random, tar_of(seeds.bundle)), seeds)


def _engine(random: Random, seeds: Seeds) -> Case:
    files: dict[str, Content] = dict(seeds.engine)
    files["model.engine.json"] = _mutated_sidecar(random, seeds.engine["model.engine.json"])
    if random.random() < 0.1:
        files["model.engine"] = mutate_bytes(random, seeds.engine["model.engine"])
    return Case(files, random.choice((("inspect", "{}/model.engine"), ("run", "{}/model.engine"))))


def _export(random: Random, seeds: Seeds) -> Case:
    """A whole export, of a changed checkpoint or config, over an older file: it stays, or the new one is whole."""
    files: dict[str, Content] = {"m.pt": seeds.checkpoint.read_bytes(), "config.json": _config_file(seeds)}
    if random.random() < 0.5:
        files["config.json"] = json_bytes(mutate_document(random, seeds.config))
    else:
        files["m.pt"] = mutate_zip(random, seeds.checkpoint.read_bytes(), mutate_pickle)
    files |= {"model.onnx": seeds.model.read_bytes(), "model.onnx.json": seeds.sidecar}
    replaced = ("model.onnx", "model.onnx.json")
    return Case(files, ("export", "{}/m.pt", "-o", "{}/model.onnx", "--force"), replaced=replaced)


TARGETS: dict[str, Target] = {
    "checkpoint-zip": Target(
        _torch_zip,
        3,
        _inspect_checkpoint("m.pt"),
        lambda s: s.checkpoint.read_bytes(),
        lambda random, content: mutate_zip(random, content, mutate_pickle),
    ),
    "checkpoint-legacy": Target(
        _legacy,
        2,
        _inspect_checkpoint("m.pt"),
        lambda s: s.legacy,
        lambda random, content: mutate_pickle(random, "data.pkl", content),
    ),
    "checkpoint-safetensors": Target(
        _safetensors, 2, _inspect_checkpoint("m.safetensors"), lambda s: s.safetensors, mutate_safetensors
    ),
    "checkpoint-training": Target(draw_training, 3),
    "config": Target(_config, 2),
    "inputs-npz": Target(
        _npz, 3, _npz_case, lambda s: s.npz, lambda random, content: mutate_zip(random, content, mutate_npy)
    ),
    "sidecar": Target(_sidecar, 2, _sidecar_case, lambda s: s.sidecar, _mutated_sidecar),
    "onnx": Target(_onnx, 4, _onnx_case, lambda s: s.model.read_bytes(), mutate_onnx),
    "onnx-verbs": Target(_onnx_verbs, 4, sample=15),
    "onnx-external-data": Target(_external_data, 3),
    "step-files": Target(_step, 3),
    "bundle-folder": Target(_bundle_folder, 3),
    "bundle-tar": Target(_bundle_tar, 2, _tar_case, lambda s: tar_of(s.bundle), _changed_tar),
    "engine-sidecar": Target(_engine, 2),
    "export": Target(_export, 0),
    "outputs": Target(draw_output, 8, sample=40),
    "wrong-inputs": Target(draw_wrong_input, 5, sample=25),
    "options": Target(draw_option, 4, sample=20),
    "environment": Target(draw_environment, 2, sample=10),
    "streams": Target(draw_streams, 1, sample=4),
    "planted-batch": Target(draw_batch, 3, sample=15),
    "planted-library": Target(draw_library, 3, sample=15),
    "servers": Target(draw_server, 5, sample=8),
    "neighbours": Target(draw_neighbours, 5, sample=6),
    "forged-text": Target(draw_forged, 4, sample=8),
    "deaths": Target(draw_death, 5, sample=3),
    "requests-to-end": Target(draw_request, 5, sample=2),
}
