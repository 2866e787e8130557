"""What training on several devices saves: read where it is whole, else named with the command that gathers it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localattn.core.errors import UsageError
from localattn.exporter.checkpoint.distcp import read_distcp
from localattn.exporter.checkpoint.load import find_config, load_state

from ...support import distributed_files
from ...support.run_folder import once

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

STATE = {"to_qkv.weight": torch.arange(24.0).reshape(6, 4), "to_out.weight": torch.ones(4, 2)}
ROOT = Path(distributed_files.__file__).parents[2]


@pytest.fixture(scope="module")
def written() -> Path:
    def make(folder: Path) -> None:
        subprocess.run([sys.executable, distributed_files.__file__, folder], check=True, capture_output=True, cwd=ROOT)

    return once("distributed-files", make)


def expected() -> dict[str, Any]:
    return dict(distributed_files.model().state_dict())


def same(state: dict[str, Any], other: dict[str, Any]) -> bool:
    return sorted(state) == sorted(other) and all(torch.equal(state[name], other[name]) for name in other)


def refusal(path: Path, **options: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_state(path, **options)
    return caught.value


def test_gathered_dtensors_are_read(written: Path) -> None:
    assert same(load_state(written / "whole.pt").state, expected())


def test_the_part_of_one_device_says_how_to_gather(written: Path) -> None:
    error = refusal(written / "part.pt")
    assert "DTensors of FSDP2" in error.what
    assert error.why == "A tensor of [12, 4] is spread over 2 devices; this file has [6, 4] of it."
    assert "get_model_state_dict" in error.fix and "full_state_dict=True" in error.fix


def test_verls_files_name_its_merger(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "model_world_size_2_rank_0.pt"
    shutil.copy(written / "part.pt", path)
    assert "python -m verl.model_merger merge --backend fsdp --local_dir" in refusal(path).fix


def test_folders_of_torch_distributed_checkpoint_are_read(written: Path) -> None:
    flat = load_state(written / "flat")
    assert same(flat.state, expected()) and len(flat.sha256) == 64
    training = load_state(written / "dcp")
    assert same(training.state, expected())
    assert "`entry='ema'`" in training.warnings[0]
    assert torch.equal(load_state(written / "dcp", entry="ema").state["to_out.weight"], expected()["to_out.weight"] + 1)


def test_torch_reads_the_same_of_it(written: Path, tmp_path: Path) -> None:
    """`dcp_to_torch`, the command that messages name, gives the same tensors."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(written / "dcp", tmp_path / "all.pt")
    assert same(load_state(tmp_path / "all.pt").state, load_state(written / "dcp").state)


def test_one_of_its_files_points_at_the_folder(written: Path) -> None:
    error = refusal(written / "dcp" / "__0_0.distcp")
    assert "is one file of a folder of torch.distributed.checkpoint" in error.what
    assert str(written / "dcp") in error.fix


@pytest.mark.parametrize("damage", ["no metadata", "cut", "a file missing", "a path outside", "too large", "noise"])
def test_broken_folders(damage: str, written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(written / "flat", folder)
    metadata, data = folder / ".metadata", folder / "__0_0.distcp"
    if damage == "no metadata":
        metadata.unlink()
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:-2000])
    elif damage == "a file missing":
        data.rename(tmp_path / data.name)
    elif damage == "noise":
        metadata.write_bytes(os.urandom(200))
    else:
        document = pickle.loads(metadata.read_bytes())
        if damage == "a path outside":
            for info in document.storage_data.values():
                object.__setattr__(info, "relative_path", f"../{folder.name}/{data.name}")
        else:
            for stored in document.state_dict_metadata.values():
                stored.size = torch.Size([1 << 40, 4])
        metadata.write_bytes(pickle.dumps(document))
    error = refusal(folder)
    assert "damaged" not in str(error) and error.fix


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("place", ["planner_data", "storage_meta", "the file"])
def test_the_metadata_runs_no_code(place: str, written: Path, tmp_path: Path) -> None:
    folder, sprung = tmp_path / "step", tmp_path / "sprung"
    shutil.copytree(written / "flat", folder)
    document: Any = pickle.loads((folder / ".metadata").read_bytes())
    if place == "the file":
        document = _Runs(sprung)
    else:
        setattr(document, place, _Runs(sprung))
    (folder / ".metadata").write_bytes(pickle.dumps(document))
    error = refusal(folder)
    assert not sprung.exists()
    assert "mkdir" in error.why and "dcp_to_torch" in error.fix


def test_only_tensors_are_read(written: Path) -> None:
    """Other values are pickles in these files: none is opened."""
    nested, files, notes = read_distcp(written / "dcp")
    assert sorted(nested) == ["ema", "model"] and len(files) == 2
    assert "2 tensors of the optimizer are not read" in notes


@pytest.mark.parametrize("marked", [False, True])
def test_empty_parameters_of_zero_3(marked: bool, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    content: dict[str, Any] = {"module": STATE | {"to_out.weight": torch.empty(0)}}
    torch.save(content | ({"ds_version": "0.14", "param_shapes": [{}]} if marked else {}), path)
    error = refusal(path)
    assert error.what == f"1 of the 2 tensors of {path} are empty: to_out.weight."
    assert "ZeRO-3" in error.why and "zero_to_fp32.py" in error.fix
    assert load_state(path, empty={"to_out.weight"}).state["to_out.weight"].numel() == 0


def test_flat_parameters_of_fsdp(tmp_path: Path) -> None:
    torch.save(
        {"_fsdp_wrapped_module._flat_param": torch.ones(9), "to_out.weight": torch.ones(2, 2)}, tmp_path / "w.pt"
    )
    assert "flat parameters of FSDP" in refusal(tmp_path / "w.pt").what


def shards(folder: Path, kind: str, *, index: bool = True) -> Path:
    folder.mkdir()
    stem, suffix = ("model", ".safetensors") if kind == "safetensors" else ("pytorch_model", ".bin")
    places = {}
    for number, (name, tensor) in enumerate(STATE.items(), start=1):
        file = f"{stem}-{number:05}-of-00002{suffix}"
        save = safetensors_torch.save_file if kind == "safetensors" else torch.save
        save({name: tensor}, folder / file)
        places[name] = file
    if index:
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("index", [True, False])
def test_shards_are_read(kind: str, index: bool, tmp_path: Path) -> None:
    folder = shards(tmp_path / "saved", kind, index=index)
    loaded = load_state(folder)
    assert same(loaded.state, STATE) and any("2 shard(s)" in note for note in loaded.notes)
    if index:
        assert same(load_state(next(folder.glob("*.index.json"))).state, STATE)
    one = refusal(sorted(folder.glob("*-00001-of-*"))[0])
    assert "is one of 2 shards" in one.what and one.fix == f"Give the folder: {folder}"


@pytest.mark.parametrize("damage", ["a shard missing", "a name missing", "outside", "no map", "twice"])
def test_broken_indices(damage: str, tmp_path: Path) -> None:
    folder = shards(tmp_path / "saved", "safetensors")
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    if damage == "a shard missing":
        (folder / "model-00002-of-00002.safetensors").unlink()
    elif damage == "a name missing":
        document["weight_map"]["norm.weight"] = "model-00001-of-00002.safetensors"
    elif damage == "outside":
        document["weight_map"]["to_out.weight"] = "../saved/model-00002-of-00002.safetensors"
    elif damage == "twice":
        safetensors_torch.save_file(STATE, folder / "model-00002-of-00002.safetensors")
    else:
        document = {"weight_map": []}
    index.write_text(json.dumps(document))
    assert refusal(folder).why


def test_a_lone_shard_says_that_others_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "model-00002-of-00004.safetensors"
    safetensors_torch.save_file(STATE, path)
    assert refusal(path).fix == "Copy all 4 into one folder, and give the folder."
    assert "1 of the 4 shards" in refusal(tmp_path).what


def test_the_configuration_of_shards_is_found(tmp_path: Path) -> None:
    folder = shards(tmp_path / "saved", "safetensors")
    (folder / "model.json").write_text("{}")
    assert find_config(folder) == folder / "model.json"
    assert find_config(folder / "model.safetensors.index.json") == folder / "model.json"


def test_the_folder_of_accelerate_is_read(tmp_path: Path) -> None:
    safetensors_torch.save_file(STATE, tmp_path / "model.safetensors")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.bin")
    (tmp_path / "random_states_0.pkl").write_bytes(pickle.dumps(1))
    assert same(load_state(tmp_path).state, STATE)
    error = refusal(tmp_path / "optimizer.bin")
    assert "is the state of an optimizer" in error.what


def test_the_sharded_folder_of_accelerate_is_read(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "dcp", tmp_path / "pytorch_model_fsdp_0")
    shutil.copytree(written / "flat", tmp_path / "optimizer_0")
    assert same(load_state(tmp_path).state, expected())


@pytest.mark.parametrize("form", ["top", "step"])
def test_folders_of_deepspeed_name_their_script(form: str, tmp_path: Path) -> None:
    step = tmp_path / "global_step7"
    step.mkdir()
    (tmp_path / "latest").write_text("global_step7")
    (tmp_path / "zero_to_fp32.py").write_text("")
    torch.save({"module": STATE}, step / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": {}}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    error = refusal(tmp_path if form == "top" else step)
    assert f"cd {tmp_path} && python zero_to_fp32.py . fp32" in error.fix
    assert same(load_state(step / "mp_rank_00_model_states.pt").state, STATE)
    assert "DeepSpeed" in refusal(step / "zero_pp_rank_0_mp_rank_00_optim_states.pt").what


def test_parts_of_tensor_parallelism(tmp_path: Path) -> None:
    for rank in range(2):
        place = tmp_path / "iter_0000100" / f"mp_rank_{rank:02}"
        place.mkdir(parents=True)
        torch.save({"model": STATE}, place / "model_optim_rng.pt")
        torch.save(STATE, tmp_path / f"mp_rank_{rank:02}_model_states.pt")
        torch.save(STATE, tmp_path / f"consolidated.{rank:02}.pth")
    assert "one of 2 parts of a checkpoint of Megatron-LM" in refusal(place / "model_optim_rng.pt").what
    assert "in 2 parts" in refusal(tmp_path / "iter_0000100").what
    for name in ("mp_rank_01_model_states.pt", "consolidated.00.pth"):
        assert "one of 2 parts of tensor parallelism" in refusal(tmp_path / name).what
