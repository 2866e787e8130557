"""Cases about texts: each forged text of our own output, in each field of a file, a folder or a name that is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import PurePosixPath
from random import Random
from typing import Any

from ..case import FORGED, Case, Content, Folder
from ..groups import Files, gather
from ..seeds import Seeds
from .mutate import at, json_bytes, places

# Behind a line break of any kind stands what the judge looks for at the beginning of a line. The rest steers terminals,
# Markdown and HTML.
_BREAKS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x85", "\u2028", "\u2029", "\x1b[1E", "\x1bE", "\x9bE")
_LINES = (
    f"  \u2713 {FORGED} parity  max error 1.2e-07", f"{FORGED} 6 passed, 0 failed", f"Error: {FORGED}",
    f"Next: {FORGED}",
    f"| {FORGED}", f"  \x1b[32m\u2713\x1b[0m {FORGED}", f"## {FORGED}", f"\u2714 {FORGED}",
)  # fmt: skip
FORGERIES = (
    *(f"x{end}{line}" for end in _BREAKS for line in _LINES),
    "\u202eabc\u202c", "\u2066x\u2069", "\u200fx", "\ufeffx", "a\x07\x9b31m", "\x1b]0;title\x07", "\x1b[2J", "\x1b[31m",
    "<script>x</script>", f"x`\n\n## {FORGED}\n\n```sh\nz\n```", "![x](http://127.0.0.1/x)", "| a | b |", "\ud800",
    "\udcff", "\U000e0041", "a\x00b", "\u2713", "x" * 5000,
)  # fmt: skip

_OPTIONS = (
    ("inspect", "{}/model.onnx"), ("inspect", "{}/model.onnx", "--format", "html"),
    ("inspect", "{}/model.onnx", "--format", "md"), ("inspect", "{}/model.onnx", "--format", "json"),
    ("run", "{}/model.onnx", "--provider", "cpu"), ("run", "{}/model.onnx", "--provider", "cpu", "--format", "json"),
    ("parity", "{}/model.onnx", "--against", "{}/other.onnx", "--seeds", "1", "--provider", "cpu"),
    ("bench", "{}/model.onnx", "--rounds", "1", "--iterations", "1", "--duration", "0", "--warmup", "0"),
    ("run", "{}/model.onnx", "-vv"), ("plugin", "rewrite", "{}/model.onnx", "-o", "{}/out.onnx"),
    ("bundle", "{}/model.onnx", "-o", "{}/out", "--samples", "1"),
)  # fmt: skip
_LEFT = ("out", "out/*", "out.onnx*")


def _texts_of(document: Any) -> list[tuple[Any, ...]]:
    return [path for path in places(document) if isinstance(at(document, path), str)]


def _planted(random: Random, document: Any, text: str) -> Any:
    """A document with a text in place of one to four others, or as a key."""
    document = json.loads(json.dumps(document))
    for path in random.sample(found := _texts_of(document), min(len(found), random.choice((1, 1, 2, 4)))):
        holder, key = at(document, path[:-1]), path[-1]
        if random.random() < 0.2 and isinstance(holder, dict):
            holder[text] = holder.pop(key)
        else:
            holder[key] = text
    return document


def _sealed(document: Any) -> bytes:
    """With the seal that who alters it on purpose would make."""
    from localattn.core.storage import publishing

    try:
        return publishing.sealed(json.dumps(document)).encode("utf-8", "surrogatepass")
    except (ValueError, AttributeError):
        return json_bytes(document)


def _sidecar(random: Random, seeds: Seeds, text: str) -> Case:
    files: Files = {**gather(seeds, ("model", "other"))}
    files["model.onnx.json"] = _sealed(_planted(random, seeds.document, text))
    return Case(files, random.choice(_OPTIONS), _LEFT)


def _engine(random: Random, seeds: Seeds, text: str) -> Case:
    sidecar = _planted(random, json.loads(seeds.engine["model.engine.json"]), text)
    files: Files = {**seeds.engine, "model.engine.json": _sealed(sidecar)}
    command = random.choice((("inspect", "{}/model.engine"), ("run", "{}/model.engine")))
    return Case(files, command)


def _manifest(random: Random, seeds: Seeds, text: str) -> Case:
    files: dict[str, Content] = {f"b/{path}": content for path, content in seeds.bundle.items()}
    files["b/manifest.json"] = json_bytes(_planted(random, json.loads(seeds.bundle["manifest.json"]), text))
    extra = random.choice(((), ("--format", "json"), ("--files-only",), ("-v",)))
    return Case(files, ("bundle", "verify", "{}/b", *extra))


def _config(random: Random, seeds: Seeds, text: str) -> Case:
    files: Files = {
        "m.pt": seeds.checkpoint.read_bytes(),
        "config.json": json_bytes(_planted(random, seeds.config, text)),
    }
    command = random.choice((("inspect",), ("export", "-o", "{}/out.onnx", "--dry-run")))
    return Case(files, (*command, "{}/m.pt", *random.choice(((), ("-v",)))))


def _weights(random: Random, seeds: Seeds, text: str) -> Case:
    """Names of tensors, and the metadata, of a safetensors file."""
    content = seeds.safetensors
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = random.choice(sorted(header))
    header[text] = header.pop(name)
    if random.random() < 0.5:
        header["__metadata__"] = {text: text}
    changed = json_bytes(header)
    files: Files = {
        "m.safetensors": len(changed).to_bytes(8, "little") + changed + content[8 + size :],
        "config.json": json_bytes(seeds.config),
    }
    return Case(
        files, random.choice((("inspect", "{}/m.safetensors"), ("inspect", "{}/m.safetensors", "--format", "md")))
    )


def _arrays(random: Random, seeds: Seeds, text: str) -> Case:
    """Names of arrays in the inputs."""
    import io
    import zipfile

    import numpy as np

    stream, member = io.BytesIO(), io.BytesIO()
    np.save(member, np.zeros((1, 64), np.int64))
    name = text.encode("utf-8", "replace").decode().replace("\0", "") or "a"
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(name + ".npy", member.getvalue())
    files: Files = {**gather(seeds, ("model",)), "in.npz": stream.getvalue()}
    return Case(files, ("run", "{}/model.onnx", "--provider", "cpu", "--load-inputs", "{}/in.npz"))


def _path(random: Random, seeds: Seeds, text: str) -> Case:
    """The name of the file, of a folder above it, or of a file that is not there."""
    name = text.replace("/", "").replace("\0", "").encode("utf-8", "surrogatepass")[:150].decode("utf-8", "ignore")
    name = name or "a"
    files = gather(seeds, ("model", "other"))
    folder = random.random() < 0.4
    moved: Files = {(f"{name}/{key}" if folder else key.replace("model", name)): value for key, value in files.items()}
    given = "{}/" + (f"{name}/model.onnx" if folder else f"{name}.onnx")
    if random.random() < 0.2:
        given += random.choice(("x", "/y"))
    command = tuple(word.replace("{}/model.onnx", given) for word in random.choice(_OPTIONS[:6]))
    return Case(moved, command)


def _folder(random: Random, seeds: Seeds, text: str) -> Case:
    """The files of a Hugging Face folder: configuration, tokenizer, names in an index."""
    files: Files = {f"hf/{name}": content for name, content in seeds.hugging_face.items()}
    name = random.choice([name for name in sorted(seeds.hugging_face) if name.endswith(".json")])
    files[f"hf/{name}"] = json_bytes(_planted(random, json.loads(seeds.hugging_face[name]), text))
    command = random.choice((("inspect", "{}/hf"), ("export", "{}/hf", "-o", "{}/o/out.onnx", "--dry-run")))
    return Case({**files, "o": Folder()}, command)


def _tokenizer(random: Random, seeds: Seeds, text: str) -> Case:
    """Texts of a tokenizer and of the settings beside it."""
    files: Files = {path.name: path.read_bytes() for path in sorted(seeds.step.parent.iterdir())}
    documents = dict(seeds.tokenizer)
    name = random.choice(sorted(documents))
    content = json.loads(documents[name])
    found = _texts_of(content)
    if name == "tokenizer.json" and random.random() < 0.6:
        content["added_tokens"].append(
            {"id": 5, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": random.random() < 0.5}
        )  # fmt: skip
    elif found:
        content = _planted(random, content, text)
    documents[name] = json_bytes(content)
    arguments = ("generate", "{}/step.onnx", "--prompt", "ab", "--max-tokens", "2", "--provider", "cpu")
    return Case({**files, **documents}, (*arguments, *random.choice(((), ("--chat",), ("-v",)))))


_KINDS = (
    _sidecar, _sidecar, _engine, _manifest, _config, _weights, _arrays, _path, _folder, _folder, _tokenizer,
)  # fmt: skip


def draw_forged(random: Random, seeds: Seeds) -> Case:
    """A forged text in one field, and a command that shows it."""
    case = random.choice(_KINDS)(random, seeds, random.choice(FORGERIES))
    odd = [word for word in case.arguments if "\0" in word or "\ud800" in word]
    assert not odd, odd
    files = {name: content for name, content in case.files.items() if PurePosixPath(name).name}
    return replace(case, files=files)
