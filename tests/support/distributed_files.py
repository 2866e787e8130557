"""Write what training on several devices saves, in a process of its own: `python distributed_files.py FOLDER`.

- `whole.pt`: DTensors of FSDP2 on one device; `part.pt`: those of the first of two devices.
- `dcp/`, `flat/`: folders of torch.distributed.checkpoint, of a training state and of a state dict.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def model() -> nn.Module:
    """A module with the names of a supported class, and numbers that are always the same."""
    torch.manual_seed(0)
    made = nn.Module()
    made.to_qkv, made.to_out = nn.Linear(4, 12, bias=False), nn.Linear(4, 4, bias=False)
    return made


def main(folder: Path) -> None:
    """Write the files."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    state = model().state_dict()
    averaged = {name: tensor + 1 for name, tensor in state.items()}
    moments = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    training = {"model": state, "ema": averaged, "optim": {"state": moments}, "step": 3}
    dcp.save(training, checkpoint_id=folder / "dcp", no_dist=True)
    dcp.save(dict(state), checkpoint_id=folder / "flat", no_dist=True)
    for name, world in (("whole.pt", 1), ("part.pt", 2)):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        mesh = init_device_mesh("cpu", (world,))
        sharded = {key: distribute_tensor(tensor, mesh, [Shard(0)]) for key, tensor in state.items()}
        torch.save({"model": sharded}, folder / name)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
