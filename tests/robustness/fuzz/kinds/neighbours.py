"""Cases about files beside the one that is named: external data, sidecars, shards, tokenizers, templates.

Each becomes a link into a private folder, a FIFO, a folder, a file that nobody may read, another file's bytes; or an
index, a location or an entry names something that lies elsewhere. What is private may be in nothing that comes out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from random import Random
from typing import Any

import onnx

from ..case import SECRET, Case, Content, Folder, Pipe, Socket
from ..groups import Files
from ..seeds import Seeds
from .mutate import ODD_VALUES, json_bytes, mutate_bytes, mutate_document

_PRIVATE: Files = {
    "private/key": SECRET * 20,
    "private/key.json": json.dumps(
        {"a": SECRET.decode(), "eos_token_id": 1, "chat_template": SECRET.decode()}
    ).encode(),
    "private/weights.bin": SECRET * 5000,
}
_NAMES = (
    "../private/key", "../private/key.json", "{}/private/key", "@HERE@/private/key.json", "..", ".", "", "/", "a\0b",
    "../private/weights.bin", "x/../../private/key", "/dev/stdin", "/proc/self/environ", "~/key", "x" * 300, "none",
    "file:///etc/passwd", "..\\private\\key", "./model.safetensors", "config.json",
)  # fmt: skip


def _odd(random: Random, name: str, content: bytes, others: list[str]) -> tuple[Content | None, int]:
    """What lies there instead, and its mode; None for nothing."""
    kind = random.randrange(12)
    private = random.choice([key for key in _PRIVATE if key.endswith(".json") == name.endswith(".json")])
    choices: tuple[Content | None, ...] = (
        "{}/" + private, "../" + private, "{}/private", "nothing", name.rsplit("/", 1)[-1], Pipe(), Socket(), Folder(),
        None, "{}/" + random.choice(others), mutate_bytes(random, content), content,
    )  # fmt: skip
    return choices[kind], 0 if kind == 11 else 0o644


def _case(random: Random, files: Files, name: str, command: tuple[str, ...], outputs: tuple[str, ...] = ()) -> Case:
    """The files with one of them replaced."""
    content = files[name]
    assert isinstance(content, bytes)
    odd, mode = _odd(random, name, content, sorted(files))
    placed: Files = {**_PRIVATE, **{key: value for key, value in files.items() if key != name}}
    if odd is not None:
        placed[name] = odd
    modes = {name: mode} if mode != 0o644 and isinstance(odd, bytes) else {}
    return Case(placed, command, outputs, modes=modes)


_READERS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("run", "{}/m/model.onnx", "--provider", "cpu"), ()),
    (("run", "{}/m/model.onnx", "--runtime", "openvino"), ()),
    (("inspect", "{}/m/model.onnx"), ()),
    (("inspect", "{}/m/model.onnx", "--format", "json"), ()),
    (("convert", "{}/m/model.onnx", "-o", "{}/o/c.onnx", "--standard-ops"), ("o/c.onnx*", "o/*.data")),
    (("plugin", "rewrite", "{}/m/model.onnx", "-o", "{}/o/r.onnx"), ("o/r.onnx*", "o/*.data")),
    (("bundle", "{}/m/model.onnx", "-o", "{}/o/b", "--samples", "1"), ("o/b", "o/b/*")),
)


def _external(random: Random, seeds: Seeds) -> Case:
    """External data that is no file, another one, or one elsewhere; entries that say so."""
    files: Files = {f"m/{name}": content for name, content in seeds.external.items()} | {"o": Folder()}
    command, outputs = random.choice(_READERS)
    if random.random() < 0.5:
        return _case(random, files, "m/weights.bin", command, outputs)
    model = onnx.load_model_from_string(seeds.external["model.onnx"])
    tensors = [tensor for tensor in model.graph.initializer if tensor.external_data]
    for tensor in random.sample(tensors, random.choice((1, len(tensors)))):
        stated = {entry.key: entry for entry in tensor.external_data}
        key = random.choice(("location", "location", "offset", "length", "checksum", "other"))
        entry = stated.get(key) or tensor.external_data.add(key=key)
        if key == "location":
            entry.value = random.choice(_NAMES).replace("{}/", "/nowhere/").replace("@HERE@", "..")
        else:
            entry.value = random.choice(("", "-1", "0", "1", str(1 << 40), str(1 << 64), "x", "1e3", " 1", "0x10"))
        if random.random() < 0.2:
            tensor.external_data.add(key=key, value=random.choice(("", "weights.bin", "0")))
    return Case({**_PRIVATE, **files, "m/model.onnx": model.SerializeToString()}, command, outputs)


def _sidecar(random: Random, seeds: Seeds) -> Case:
    """The sidecar beside a model are no file, or another one."""
    files: Files = {"m/model.onnx": seeds.model.read_bytes(), "m/model.onnx.json": seeds.sidecar, "o": Folder()}
    command, outputs = random.choice(_READERS)
    return _case(random, files, "m/model.onnx.json", command, outputs)


_FOLDER_READERS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("inspect", "{}/hf"), 0.5),
    (("export", "{}/hf", "-o", "{}/o/out.onnx", "--dry-run"), 0.35),
    (("export", "{}/hf", "-o", "{}/o/out.onnx", "--checks", "quick"), 0.15),
)


def _folder_command(random: Random) -> tuple[str, ...]:
    commands, weights = zip(*_FOLDER_READERS, strict=True)
    return tuple(random.choices(commands, weights)[0])


def _folder(seeds: Seeds) -> Files:
    return {f"hf/{name}": content for name, content in seeds.hugging_face.items()} | {"o": Folder()}


def _folder_file(random: Random, seeds: Seeds) -> Case:
    """A file of a Hugging Face folder is no file, or lies elsewhere; or one that it lacks leads elsewhere."""
    files = _folder(seeds)
    added = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt",
             "tokenizer.model", "processor_config.json", "adapter_config.json")  # fmt: skip
    if random.random() < 0.4:
        files[f"hf/{random.choice(added)}"] = b"{}"
    name = random.choice([name for name, content in files.items() if isinstance(content, bytes)])
    return _case(random, files, name, _folder_command(random), ("o/*",))


def _index(random: Random, seeds: Seeds) -> Case:
    """An index of shards whose entries lead elsewhere, claim other sizes, or name what is not there."""
    files = _folder(seeds)
    weights = files.pop("hf/model.safetensors")
    assert isinstance(weights, bytes)
    size = int.from_bytes(weights[:8], "little")
    names = [name for name in json.loads(weights[8 : 8 + size]) if name != "__metadata__"]
    shard = "model-00001-of-00001.safetensors"
    files[f"hf/{shard}"] = weights
    index: Any = {"metadata": {"total_size": len(weights)}, "weight_map": dict.fromkeys(names, shard)}
    kind = random.randrange(4)
    if kind == 0:
        for name in random.sample(names, random.choice((1, len(names)))):
            index["weight_map"][name] = random.choice(_NAMES)
    elif kind == 1:
        index = mutate_document(random, index)
    elif kind == 2:
        index["metadata"] = random.choice(ODD_VALUES)
    else:
        links = (f"../{key}" for key in _PRIVATE)
        files[f"hf/{shard}"] = random.choice((*links, Pipe(), Folder(), mutate_bytes(random, weights), b""))
    files["hf/model.safetensors.index.json"] = json_bytes(index)
    if random.random() < 0.3:  # a second set of weights beside it
        files["hf/model.safetensors"] = random.choice((weights, mutate_bytes(random, weights), "nothing"))
    return Case({**_PRIVATE, **files}, _folder_command(random), ("o/*",))


def _named_weights(random: Random, seeds: Seeds) -> Case:
    """config.json names files: weights, code, another model."""
    files = _folder(seeds)
    config = json.loads(seeds.hugging_face["config.json"])
    key = random.choice(("transformers_weights", "_name_or_path", "auto_map", "custom_generate", "base_model",
                         "quantization_config", "adapter", "num_labels", "id2label", "vocab_size", "num_hidden_layers",
                         "hidden_size", "max_position_embeddings", "sliding_window", "torch_dtype"))  # fmt: skip
    value: Any = random.choice((*_NAMES[:12], *ODD_VALUES, 30_000_000, 1 << 31, {"AutoModel": "code.Model"}))
    config[key] = value
    files |= {"hf/config.json": json_bytes(config), "hf/code.py": b"raise SystemExit(77)\n"}
    return Case({**_PRIVATE, **files}, _folder_command(random), ("o/*",))


def _generation(random: Random, seeds: Seeds) -> Case:
    """Files beside a step file: sidecar, the prefill file, tokenizer, settings of generation, chat template."""
    files: Files = {f"m/{path.name}": path.read_bytes() for path in sorted(seeds.step.parent.iterdir())}
    files |= {f"m/{name}": content for name, content in seeds.tokenizer.items()}
    chat = random.random() < 0.4
    arguments = ("generate", "{}/m/step.onnx", "--prompt", "ab", "--max-tokens", "2", "--provider", "cpu")
    command = (*arguments, *(("--chat",) if chat else ()))
    name = random.choice([name for name in sorted(files) if name != "m/step.onnx"])
    if random.random() < 0.4 and name.endswith("config.json"):
        content = files[name]
        assert isinstance(content, bytes)
        changed = mutate_document(random, json.loads(content))
        return Case({**_PRIVATE, **files, name: json_bytes(changed)}, command)
    if random.random() < 0.3:
        files["m/chat_template.jinja"] = b"{{ messages }}"
        name = "m/chat_template.jinja"
    return _case(random, files, name, command)


def _bundled(random: Random, seeds: Seeds) -> Case:
    """A file of a bundle is no file, or lies elsewhere; the manifest may agree."""
    files: Files = {f"b/{path}": content for path, content in seeds.bundle.items()}
    name = random.choice(sorted(seeds.bundle))
    case = _case(random, files, f"b/{name}", ("bundle", "verify", "{}/b"))
    if random.random() < 0.5 and name != "manifest.json":
        manifest = json.loads(seeds.bundle["manifest.json"])
        content = _PRIVATE["private/key"]
        assert isinstance(content, bytes)
        for entry in manifest["files"]:
            if entry["path"] == name:
                entry |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                if random.random() < 0.4:
                    entry["path"] = random.choice(_NAMES)
        return Case({**case.files, "b/manifest.json": json_bytes(manifest)}, case.arguments, modes=case.modes)
    return case


_KINDS: tuple[Callable[[Random, Seeds], Case], ...] = (
    _external, _external, _sidecar, _folder_file, _folder_file, _index, _named_weights, _generation, _generation,
    _bundled,
)  # fmt: skip


def draw_neighbours(random: Random, seeds: Seeds) -> Case:
    """A file beside the one that a command names is not what it should be."""
    return random.choice(_KINDS)(random, seeds)
