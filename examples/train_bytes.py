"""Train a byte-level LocalTransformer on this interpreter's own standard library.

Needs `pip install torch local-attention safetensors`. A CPU is enough:

    python train_bytes.py --output pybytes.safetensors --minutes 15

writes three files: `pybytes.safetensors` (the weights; `.pt` works too), `pybytes.json` (the class, its
arguments and the measured bits per byte) and `pybytes_val.bin` (the held-out bytes of that measurement).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
import time
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from local_attention import LocalTransformer
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F

# Not library code: installed packages, tests, and tables that would flatter the measurement.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
HELD_OUT_ONE_IN = 40
VALIDATION_ROWS = 64


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("pybytes.safetensors"), help="weights; .safetensors or .pt")
    add("--half", action="store_true", help="store the weights as float16")
    add("--dim", type=int, default=128, help="width of the model")
    add("--depth", type=int, default=3, help="number of layers")
    add("--heads", type=int, default=4, help="attention heads per layer")
    add("--dim-head", type=int, default=32, help="width of a head")
    add("--window", type=int, default=64, help="bytes that attention looks back")
    add("--max-seq-len", type=int, default=512, help="positions the model has embeddings for")
    add("--seq-len", type=int, default=512, help="bytes per training row")
    add("--batch", type=int, default=4, help="rows per step")
    add("--steps", type=int, default=4000, help="steps to train for")
    add("--minutes", type=float, default=math.inf, help="stop after this time, if that comes before --steps")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--seed", type=int, default=0, help="seed of the first weights and of the training rows")
    add("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    if options.output.suffix not in {".safetensors", ".pt"}:
        parser.error(f"--output must end in .safetensors or .pt, not {options.output.suffix!r}")
    if not 1 < options.seq_len <= options.max_seq_len:
        parser.error("--seq-len must be at least 2 and at most --max-seq-len")
    if min(options.steps, options.batch, options.threads) < 1 or options.minutes <= 0:
        parser.error("--steps, --batch, --threads and --minutes must be positive")
    return options


def read_corpus() -> tuple[Tensor, Tensor]:
    """Return the training and the held-out bytes; the path of a file decides where the whole file goes."""
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        # _sysconfigdata is generated and names directories of the build machine.
        if SKIPPED.intersection(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        hidden = zlib.crc32(name.as_posix().encode()) % HELD_OUT_ONE_IN == 0
        (held_out if hidden else train).extend(path.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def validation_rows(held_out: Tensor, length: int) -> Tensor:
    """Take rows evenly spaced over the held-out bytes."""
    starts = torch.linspace(0, len(held_out) - length, VALIDATION_ROWS).long()
    return torch.stack([held_out[start : start + length] for start in starts.tolist()])


def new_model(kwargs: dict[str, Any]) -> LocalTransformer:
    """Build the model with small embeddings; PyTorch's unit variance would drown the first layers."""
    model = LocalTransformer(**kwargs)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model


def train(model: LocalTransformer, data: Tensor, options: argparse.Namespace) -> int:
    """Train until the steps or the minutes are used up, and return the number of steps taken."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98))
    offsets = torch.arange(options.seq_len + 1)
    limit = options.minutes * 60
    begin, average, step = time.monotonic(), 0.0, 0
    while step < options.steps and (spent := time.monotonic() - begin) < limit:
        progress = max(step / options.steps, spent / limit)
        rate = options.lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * math.cos(progress * math.pi / 2) ** 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(data) - options.seq_len, (options.batch, 1))
        loss = model(data[starts + offsets].long(), return_loss=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bits = loss.item() / math.log(2)
        average = bits if step == 0 else 0.98 * average + 0.02 * bits
        step += 1
        if step % 100 == 0:
            print(f"step {step:5d} {time.monotonic() - begin:4.0f} s  {average:.3f} bits/byte", flush=True)
    return step


@torch.no_grad()
def bits_per_byte(model: LocalTransformer, rows: Tensor) -> float:
    """Mean of -log2 p(next byte) over every row and every position that has a next byte."""
    model.eval()
    losses = [F.cross_entropy(model(row[None])[0, :-1], row[1:]).item() for row in rows.long()]
    return sum(losses) / len(losses) / math.log(2)


def save_weights(model: LocalTransformer, path: Path, half: bool) -> None:
    """Write the state; `half` rounds the parameters only, so the rotary frequencies stay exact."""
    parameters = dict(model.named_parameters())
    state = {k: v.half() if half and k in parameters else v for k, v in model.state_dict().items()}
    if path.suffix == ".pt":
        torch.save(state, path)
    else:
        path.write_bytes(save(state))  # save_file would make it readable by its owner only


def load_weights(kwargs: dict[str, Any], path: Path) -> LocalTransformer:
    """Build the model in float32 from a file that `save_weights` wrote."""
    model = LocalTransformer(**kwargs)
    model.load_state_dict(torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path))
    return model


def main() -> None:
    options = parse_arguments()
    weights: Path = options.output
    weights.parent.mkdir(parents=True, exist_ok=True)  # before the training, so that a bad path fails early
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    kwargs = {
        "num_tokens": 256,
        "max_seq_len": options.max_seq_len,
        "dim": options.dim,
        "depth": options.depth,
        "causal": True,
        "local_attn_window_size": options.window,
        "heads": options.heads,
        "dim_head": options.dim_head,
    }
    data, held_out = read_corpus()
    model = new_model(kwargs)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count:,} parameters, {len(data):,} bytes to train on, {len(held_out):,} held out", flush=True)
    steps = train(model, data, options)

    save_weights(model, weights, options.half)
    rows = validation_rows(held_out, options.seq_len)
    validation = weights.with_name(f"{weights.stem}_val.bin")
    validation.write_bytes(rows.numpy().tobytes())
    score = round(bits_per_byte(load_weights(kwargs, weights), rows), 4)  # of the file, not of the memory
    length = options.seq_len
    packages = ("local-attention", "hyper-connections", "torch")
    config = {
        "class": "local_attention.LocalTransformer",
        "kwargs": kwargs,
        "hyper_connections": version("hyper-connections"),
        "about": {
            "trained_with": ", ".join(f"{name} {version(name)}" for name in packages),
            "corpus": f"Python {platform.python_version()}'s standard library without tests, encodings and "
            "pydoc_data, bytes",
            "steps": steps,
            "train_seq_len": length,
            "bits_per_byte": score,
            "bits_per_byte_is": f"mean over the {len(rows)} rows of {validation.name} ({length} bytes each, "
            f"of files held out of training) and their positions 0..{length - 2} of -log2 p(next byte), full "
            f"forward pass at n={length}, fp32" + (", stored float16 weights" if options.half else ""),
        },
    }
    weights.with_suffix(".json").write_text(json.dumps(config, indent=1) + "\n")
    print(f"{weights}: {score} bits per byte after {steps} steps, {weights.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
