"""Every way people save weights, and every way a file can be something else."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest

from localattn.core.errors import ExitCode, UsageError
from localattn.core.storage.files import sha256
from localattn.exporter.checkpoint.load import find_config, load_state

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

STATE = {"to_qkv.weight": torch.arange(24.0).reshape(6, 4), "to_out.weight": torch.ones(4, 2)}
OTHER = {name: tensor + 100 for name, tensor in STATE.items()}


def saved(path: Path, content: object, **options: object) -> Path:
    torch.save(content, path, **options)
    return path


def check(path: Path, expected: dict = STATE) -> list[str]:
    """The file loads to `expected`; its notes."""
    loaded = load_state(path)
    assert list(loaded.state) == list(expected)
    for name, tensor in expected.items():
        assert loaded.state[name].dtype == torch.float32
        assert torch.equal(loaded.state[name], tensor), name
    assert loaded.sha256 == sha256(path)
    assert loaded.path == path
    return loaded.notes


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ""])
@pytest.mark.parametrize("zip_format", [True, False])
def test_torch_files(tmp_path, suffix, zip_format):
    path = saved(tmp_path / f"w{suffix}", STATE, _use_new_zipfile_serialization=zip_format)
    assert check(path) == []


def test_safetensors(tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors_torch.save_file(STATE, path)
    expected = dict(sorted(STATE.items()))
    loaded = load_state(path)
    assert loaded.notes == []
    assert all(torch.equal(loaded.state[name], expected[name]) for name in expected)


def test_a_wrong_suffix_is_noted_not_fatal(tmp_path):
    path = tmp_path / "w.pt"
    safetensors_torch.save_file({"a": torch.ones(1)}, path)
    assert "safetensors file" in load_state(path).notes[0]
    for zip_format in (True, False):
        path = saved(tmp_path / "w.safetensors", STATE, _use_new_zipfile_serialization=zip_format)
        assert "torch" in check(path)[0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: OrderedDict(s),
        lambda s: {"model": s, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "epoch": 3},
        lambda s: {"state_dict": s, "step": torch.tensor(3)},
        lambda s: {"model_state_dict": s, "loss": torch.tensor(0.5), "args": {"lr": 0.1}},
        lambda s: {"checkpoint": {"model": {"module": s}}},
        lambda s: {"my_model": s, "optimizer": {"a": torch.ones(2)}},
        lambda s: {"ema": s},
        lambda s: {f"module.{k}": v for k, v in s.items()},
        lambda s: {f"_orig_mod.module.{k}": v for k, v in s.items()},
        lambda s: {f"module._orig_mod.{k}": v for k, v in s.items()},
        lambda s: {k.replace(".weight", "._orig_mod.weight"): v for k, v in s.items()},
        lambda s: {"state_dict": {f"model.net.{k}": v for k, v in s.items()}},
        lambda s: {"state_dict": {**{f"model.{k}": v for k, v in s.items()}, "criterion.weight": torch.ones(2)}},
        lambda s: {**s, "epoch": 3},
        lambda s: {k: torch.nn.Parameter(v) for k, v in s.items()},
    ],
)
def test_wrappings(tmp_path, wrap):
    check(saved(tmp_path / "w.pt", wrap(STATE)))


def test_the_model_comes_before_its_average(tmp_path):
    path = saved(tmp_path / "w.pt", {"ema": OTHER, "model": STATE})
    assert "'model'; the file also contains ema" in check(path)[0]


def test_an_ema_pytorch_state_gives_the_average(tmp_path):
    content = {
        **{f"online_model.{k}": v for k, v in STATE.items()},
        **{f"ema_model.{k}": v for k, v in OTHER.items()},
        "initted": torch.tensor(True),
        "step": torch.tensor(7),
    }
    path = saved(tmp_path / "w.pt", content)
    (note,) = check(path, OTHER)
    assert "'ema_model.'" in note and "online_model.to_qkv.weight" in note


def test_several_unnamed_sets_are_not_guessed(tmp_path):
    with pytest.raises(UsageError, match="several sets of weights: generator_a, generator_b"):
        load_state(saved(tmp_path / "w.pt", {"generator_a": STATE, "generator_b": OTHER}))


@pytest.mark.parametrize("part", ["attn", "transformer"])
def test_a_part_beside_other_modules_is_refused(tmp_path, part):
    """Its file would be a part of the model; what a wrapper counts beside it is noted."""
    state = {f"{part}.{name}": tensor for name, tensor in STATE.items()}
    path = saved(tmp_path / "w.pt", {**state, "mlp.0.weight": torch.ones(3, 4)})
    with pytest.raises(UsageError, match=f"contains '{part}' and other modules: mlp.0.weight"):
        load_state(path)
    counted = saved(tmp_path / "w.pt", {**state, "steps": torch.tensor(7)})
    assert "dropped: steps" in check(counted)[0]
    wrapped = {f"model.{name}": tensor for name, tensor in STATE.items()}
    assert "dropped: loss.weight" in check(saved(tmp_path / "w.pt", {**wrapped, "loss.weight": torch.ones(3)}))[0]


def test_names_that_collide_without_their_wrapper_are_refused(tmp_path):
    content = {"to_out.weight": torch.ones(1), "_orig_mod.to_out.weight": torch.zeros(1)}
    with pytest.raises(UsageError, match="twice"):
        load_state(saved(tmp_path / "w.pt", content))


def test_an_empty_state_is_legitimate(tmp_path):
    for content in ({}, OrderedDict(), {"model": {}}, {"state_dict": {}, "epoch": 1}):
        assert load_state(saved(tmp_path / "w.pt", content)).state == {}
    path = tmp_path / "w.safetensors"
    safetensors_torch.save_file({}, path)
    assert load_state(path).state == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_become_float32(tmp_path, dtype):
    path = saved(tmp_path / "w.pt", {name: tensor.to(dtype) for name, tensor in STATE.items()})
    assert check(path) == [f"2 tensors converted from {str(dtype)[6:]} to float32"]


def test_integers_stay_and_strides_go(tmp_path):
    content = {"norm.steps": torch.arange(3), "to_out.weight": torch.arange(6.0).reshape(2, 3).T}
    state = load_state(saved(tmp_path / "w.pt", content)).state
    assert state["norm.steps"].dtype == torch.int64
    assert state["to_out.weight"].is_contiguous()
    assert torch.equal(state["to_out.weight"], content["to_out.weight"])


@pytest.mark.parametrize(
    ("value", "kind"), [(float("nan"), "NaN"), (-float("inf"), "infinite"), (1e300, "infinite")]
)  # the last one in float32
def test_weights_that_are_not_finite_are_noted_first(tmp_path, value, kind):
    content = {
        "to_out.weight": torch.tensor([1.0, value], dtype=torch.float64),
        "to_qkv.weight": torch.ones(1, dtype=torch.float16),
    }
    notes = load_state(saved(tmp_path / "w.pt", {"model": content})).notes
    assert notes[0] == f"weights are NaN or infinite: to_out.weight ({kind}, 1 of 2)"
    safetensors_torch.save_file(content, tmp_path / "w.safetensors")
    assert load_state(tmp_path / "w.safetensors").notes[0] == notes[0]


class Trap:
    """Writes a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_objects_are_never_unpickled(tmp_path):
    sprung = tmp_path / "sprung"
    trap = Trap(sprung)
    files = [
        saved(tmp_path / "zip.pt", {"model": trap}),
        saved(tmp_path / "old.pt", {"model": trap}, _use_new_zipfile_serialization=False),
        tmp_path / "plain.bin",
        tmp_path / "plain.safetensors",
    ]
    for path in files[2:]:
        path.write_bytes(pickle.dumps(trap, protocol=2))
    for path in files:
        with pytest.raises(UsageError):
            load_state(path)
    assert not sprung.exists()
    with pytest.raises(UsageError, match="Python object") as caught:
        load_state(files[0])
    assert "state_dict()" in caught.value.fix


def test_a_pickled_module_says_what_to_do(tmp_path):
    for zip_format in (True, False):
        path = saved(tmp_path / "m.pt", torch.nn.Linear(2, 2), _use_new_zipfile_serialization=zip_format)
        with pytest.raises(UsageError, match="Python object") as caught:
            load_state(path)
        assert "Linear" in caught.value.what
        assert caught.value.fix.startswith(
            "Where the model was made, run: torch.save(model.state_dict(), 'weights.pt')"
        )
        assert f"localattn export {path} --allow-pickle --input" in caught.value.fix
        assert caught.value.exit_code == ExitCode.USAGE


def header(claim: int, text: bytes) -> bytes:
    return claim.to_bytes(8, "little") + text


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".safetensors"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"PK",
        b"PK\x03\x04" + bytes(100),
        bytes(range(256)) * 4,
        b"just some text\n",
        b'{"a": 1}',
        pickle.dumps({"a": 1}, protocol=5),
        pickle.dumps([1, 2], protocol=2),
        header(2**63, b"{}"),
        header(10**9, b'{"a":{}}'),
        header(2, b"[]"),
        header(8, b'{"a": 1}'),
        header(59, b'{"a":{"dtype":"F32","shape":[99999],"data_offsets":[0,9]}} '),
    ],
)
def test_foreign_files(tmp_path, suffix, content):
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_state(path)
    assert str(path) in caught.value.what
    assert all(len(line) < 400 for line in str(caught.value).splitlines())


def test_cut_files(tmp_path):
    whole = [
        saved(tmp_path / "zip.pt", STATE),
        saved(tmp_path / "old.pt", STATE, _use_new_zipfile_serialization=False),
        tmp_path / "w.safetensors",
    ]
    safetensors_torch.save_file(STATE, whole[2])
    for path in whole:
        content = path.read_bytes()
        for length in (10, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            with pytest.raises(UsageError):
                load_state(path)


def test_values_that_are_no_state_dict(tmp_path):
    for content in (torch.ones(2), [torch.ones(2)], 3, "text", None, {"epoch": 3}, {0: torch.ones(2)}):
        with pytest.raises(UsageError):
            load_state(saved(tmp_path / "w.pt", content))


def test_a_table_that_holds_itself_ends(tmp_path):
    table: dict = {"epoch": 3}
    table["model"] = table
    table["again"] = table
    with pytest.raises(UsageError):
        load_state(saved(tmp_path / "w.pt", table))


def test_a_tensor_larger_than_its_file_is_refused(tmp_path):
    path = saved(tmp_path / "w.pt", {"to_out.weight": torch.zeros(1).expand(10**6, 10**6)})
    with pytest.raises(UsageError, match="more data than the whole file"):
        load_state(path)


def test_tensors_without_dense_data_are_refused(tmp_path):
    for tensor in (torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(UsageError, match="not a dense tensor"):
            load_state(saved(tmp_path / "w.pt", {"to_out.weight": tensor}))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
        (lambda: torch.ones(2, 2).to_sparse(), r"sparse \(sparse_coo\)"),
        (lambda: torch.ones(2, 2).to_sparse_csr(), r"sparse \(sparse_csr\)"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8), r"quantized \(qint8\)"),
        (lambda: torch.ones(2, 2, dtype=torch.complex64), "complex64 numbers"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "float4_e2m1fn_x2 numbers"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu), "float8_e8m0fnu numbers"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "bits8 numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of torch, that these are prototypes
def test_tensors_of_other_kinds_are_refused_by_name(tmp_path, make, kind):
    path = saved(tmp_path / "w.pt", {"to_out.weight": make()})
    with pytest.raises(UsageError, match=rf"(?s)to_out\.weight .*{kind}"):
        load_state(path)


@pytest.mark.parametrize(("dtype", "size"), [("F4", 2), ("F6_E2M3", 3), ("F8_E8M0", 4), ("C64", 32)])
def test_safetensors_of_other_kinds_are_refused_by_name(tmp_path, dtype, size):
    path = tmp_path / "w.safetensors"
    text = json.dumps({"to_out.weight": {"dtype": dtype, "shape": [4], "data_offsets": [0, size]}}).encode()
    path.write_bytes(header(len(text), text) + bytes(size))
    with pytest.raises(UsageError, match=f"to_out.weight contains {dtype} numbers"):
        load_state(path)


def test_settings_in_the_metadata_of_safetensors(tmp_path):
    path = tmp_path / "w.safetensors"
    about = {"config": '{"window_size": 4}', "args": "no JSON", "hparams": "[" * 99_999, "format": "pt"}
    safetensors_torch.save_file(STATE, path, metadata=about)
    assert load_state(path).settings == {"config": {"window_size": 4}}


def test_a_flipped_bit_is_no_other_weight(tmp_path):
    path = saved(tmp_path / "w.pt", STATE)
    sound, value = bytearray(path.read_bytes()), STATE["to_qkv.weight"].numpy().tobytes()
    place = sound.index(value) + 17
    sound[place] ^= 0x10
    path.write_bytes(sound)
    assert not torch.equal(torch.load(path)["to_qkv.weight"], STATE["to_qkv.weight"])  # torch does not notice
    with pytest.raises(UsageError, match="damaged") as caught:
        load_state(path)
    assert "CRC-32" in caught.value.why and "data/" in caught.value.why


def test_a_file_saved_without_checksums_is_read_and_says_so(tmp_path):
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "w.pt", STATE)
    finally:
        torch.serialization.set_crc32_options(computes)
    assert check(path) == ["the file was saved without checksums, so damage cannot be detected"]


def test_archives_torch_did_not_write(tmp_path):
    torch_file = saved(tmp_path / "w.pt", STATE)
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(torch_file) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(UsageError, match="compressed"):
        load_state(packed)
    with zipfile.ZipFile(packed, "w") as target:
        target.writestr("readme.txt", "hello")
    with pytest.raises(UsageError, match="zip file without tensors"):
        load_state(packed)


def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        load_state(tmp_path)
    with pytest.raises(UsageError, match="Cannot read"):
        load_state(tmp_path / "none.pt")


def test_find_config(tmp_path):
    checkpoint = tmp_path / "w.pt"
    assert find_config(checkpoint) is None
    for name in ("config.yaml", "config.json", "w.yml", "w.toml", "w.json"):  # each wins over those before
        (tmp_path / name).touch()
        assert find_config(checkpoint) == tmp_path / name
    assert find_config(checkpoint, tmp_path / "config.yaml") == tmp_path / "config.yaml"
    with pytest.raises(UsageError, match="no config"):
        find_config(checkpoint, tmp_path / "none.json")
