"""Training checkpoints: settings beside the weights that say odd things, and tensors that are no plain ones."""

from __future__ import annotations

import argparse
import io
import warnings
from random import Random
from typing import Any

from localattn.exporter.checkpoint.settings import ENTRIES

from ..case import Case
from ..seeds import Seeds
from .mutate import mutate_document


def _odd_tensor(random: Random, tensor: Any) -> Any:
    """The tensor in another form, or with a number that nothing can be computed with."""
    import torch

    kind = random.randrange(9)
    if kind == 0:
        return tensor.to_sparse()
    if kind == 1:
        return tensor.to(random.choice((torch.complex64, torch.complex128)))
    if kind == 2:
        return torch.nested.nested_tensor([tensor.flatten(), tensor.flatten()[:1]])
    if kind == 3:
        return torch.quantize_per_tensor(tensor, 0.1, 0, random.choice((torch.qint8, torch.quint8, torch.qint32)))
    if kind == 4:
        packed = random.choice((torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.float8_e5m2, torch.bits8))
        return torch.zeros(tensor.shape, dtype=torch.uint8).view(packed)
    if kind == 5:
        return tensor.to("meta")
    if kind == 6:
        return tensor.to(random.choice((torch.int8, torch.bool, torch.float64, torch.bfloat16)))
    changed = tensor.clone()
    changed.view(-1)[0] = random.choice((float("nan"), float("inf"), -float("inf"), 7e4, 3e38, -1e-45))
    return changed


def _settings(random: Random, seeds: Seeds) -> Any:
    """What a script saves, with one to three odd places, as a table or as a Namespace."""
    arguments = dict(seeds.config["kwargs"])
    table = {**arguments, "model": arguments, "data": {"window_size": 8}, "attn.window_size": 4, "lr": 1e-3}
    changed = mutate_document(random, table)
    if isinstance(changed, dict) and random.random() < 0.4:
        namespace = argparse.Namespace()
        vars(namespace).update(changed)
        return namespace
    return changed


def training_bytes(random: Random, seeds: Seeds) -> bytes:
    """A training checkpoint of torch's new or old format."""
    import torch

    state = dict(torch.load(seeds.checkpoint, weights_only=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that some kinds of tensors are prototypes
        if random.random() < 0.5:
            name = random.choice([name for name, tensor in state.items() if tensor.numel() > 1])
            state[name] = _odd_tensor(random, state[name])
        entries = {random.choice(ENTRIES): _settings(random, seeds) for _ in range(random.choice((1, 1, 2, 3)))}
        stream = io.BytesIO()
        content = {"state_dict": state, **entries}
        torch.save(content, stream, _use_new_zipfile_serialization=random.random() < 0.8)
    return stream.getvalue()


def draw_training(random: Random, seeds: Seeds) -> Case:
    """Inspect it, write a configuration beside it, or have the export read it."""
    command, *options = random.choice(
        (
            ("inspect",),
            ("inspect", "--write-config"),
            ("export", "-o", "{}/out.onnx", "--dry-run"),
            ("export", "-o", "{}/out.onnx", "--dry-run", "--dtype", "fp16"),
        )
    )
    files = {"m.pt": training_bytes(random, seeds)}
    return Case(files, (command, "{}/m.pt", *options), outputs=("m.json",))
