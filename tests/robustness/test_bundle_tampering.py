"""Bundles from an enemy: whatever was altered, added or claimed is refused before anything of it is used."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import copy
import hashlib
import io
import json
import os
import shutil
import socket
import sys
import tarfile
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localattn.core import closeness
from localattn.core.errors import CheckFailed, LocalAttnError, UsageError
from localattn.core.storage import library_image
from localattn.runtime.bundle.device import check_files
from localattn.runtime.bundle.device import verify as script
from localattn.runtime.bundle.verify import verify_bundle
from localattn.runtime.inputs.arrays import load_arrays

from ..conftest import Finished
from ..support.hostile_models import HOSTILE
from ..support.models.bundles import run_script, tiny_bundle, tiny_model  # noqa: F401
from .fuzz.kinds.mutate import places

Command = Callable[..., Finished]
Change = Callable[[Path], None]


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy to alter."""
    shutil.copytree(tiny_bundle, tmp_path / "bundle")
    return tmp_path / "bundle"


def edit_manifest(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def relist(bundle: Path, name: str) -> None:
    """Make the manifest agree with a file that was altered, as an enemy would."""
    content = (bundle / name).read_bytes()

    def change(manifest: dict[str, Any]) -> None:
        for entry in manifest["files"]:
            if entry["path"] == name:
                entry |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    edit_manifest(bundle, change)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def add_path(name: str) -> Change:
    """Name a further file in the manifest."""
    entry = {"path": name, "size": 0, "sha256": hashlib.sha256(b"").hexdigest(), "role": "data"}
    return lambda bundle: edit_manifest(bundle, lambda manifest: manifest["files"].append(entry))


def replace_by_link(bundle: Path) -> None:
    path = bundle / "model/tiny.onnx"
    path.rename(bundle.parent / "elsewhere.onnx")
    path.symlink_to(bundle.parent / "elsewhere.onnx")


def link_folder(bundle: Path) -> None:
    (bundle / "model").rename(bundle.parent / "elsewhere")
    (bundle / "model").symlink_to(bundle.parent / "elsewhere")


def link_manifest(bundle: Path) -> None:
    (bundle / "manifest.json").rename(bundle.parent / "m.json")
    (bundle / "manifest.json").symlink_to(bundle.parent / "m.json")


def add_socket(bundle: Path) -> None:
    here = Path.cwd()
    os.chdir(bundle)  # the path of a socket may be 108 bytes long
    try:
        socket.socket(socket.AF_UNIX).bind("s")
    finally:
        os.chdir(here)


# What is done to a folder, the exit code it must cost, and words of the error.
FOLDERS: dict[str, tuple[Change, int, str]] = {
    "a flipped bit in the model": (lambda b: flip(b / "model/tiny.onnx"), 1, "was changed"),
    "a flipped bit in a sample": (lambda b: flip(b / "samples/tiny.0.outputs.npz"), 1, "was changed"),
    "a flipped bit in a script": (lambda b: flip(b / "run_engine.py"), 1, "was changed"),
    "an altered sidecar": (lambda b: flip(b / "model/tiny.onnx.json"), 1, "was changed"),
    "a cut file": (lambda b: os.truncate(b / "model/tiny.onnx", 100), 1, "bytes"),
    "a missing file": (lambda b: (b / "model/tiny.onnx.json").unlink(), 1, "is missing"),
    "a file that is not listed": (lambda b: (b / "model/more.bin").write_bytes(b"x"), 1, "is not listed"),
    "a library that is not listed": (lambda b: (b / "model/kernels.so").write_bytes(b"\x7fELF"), 1, "is not listed"),
    "a write that seems interrupted": (
        lambda b: ((b / ".localattn.next.tiny.onnx").mkdir(), (b / ".localattn.next.tiny.onnx/x").touch())[1],
        1,
        "is not listed",
    ),
    "a module that would be imported": (lambda b: (b / "numpy.py").write_text("raise SystemExit(0)"), 1, "not listed"),
    "a module of the standard library": (lambda b: (b / "json.py").write_text("raise SystemExit(0)"), 1, "not listed"),
    "a link to a file": (replace_by_link, 2, "not a regular file"),
    "a link to a folder": (link_folder, 2, "not a regular file"),
    "a link for a manifest": (link_manifest, 2, "not a regular file"),
    "a pipe for a manifest": (
        lambda b: ((b / "manifest.json").unlink(), os.mkfifo(b / "manifest.json"))[1],
        2,
        "not a regular file",
    ),
    "a pipe": (lambda b: os.mkfifo(b / "pipe"), 2, "not a regular file"),
    "a socket": (add_socket, 2, "not a regular file"),
    "no manifest": (lambda b: (b / "manifest.json").unlink(), 2, "not a bundle"),
    "an empty manifest": (lambda b: (b / "manifest.json").write_bytes(b""), 2, "not the manifest"),
    "a deep manifest": (lambda b: (b / "manifest.json").write_bytes(b"[" * 200_000), 2, "not the manifest"),
    "a huge manifest": (lambda b: os.truncate(b / "manifest.json", 1 << 40), 2, "larger than"),
    "a path that climbs": (add_path("../outside"), 2, "leaves the folder"),
    "a path that climbs from inside": (add_path("model/../../outside"), 2, "leaves the folder"),
    "an absolute path": (add_path("/etc/passwd"), 2, "leaves the folder"),
    "a Windows path": (add_path("C:\\Windows"), 2, "file systems refuse"),
    "a backslash": (add_path("..\\outside"), 2, "file systems refuse"),
    "a device of Windows": (add_path("model/NUL.txt"), 2, "not the same name"),
    "a name that ends in a dot": (add_path("model/tiny.onnx."), 2, "not the same name"),
    "a file twice": (add_path("model/tiny.onnx"), 2, "occurs twice"),
    "a case clash": (add_path("model/TINY.onnx"), 2, "other capitals"),
    "a case clash of folders": (add_path("Model/x"), 2, "other capitals"),
    "a clash of accents": (lambda b: [add_path(name)(b) for name in ("\u00e9", "e\u0301")][-1], 2, "occurs twice"),
    "a file that is a folder": (add_path("model"), 2, "both a file and a folder"),
    "the manifest in itself": (add_path("manifest.json"), 2, "occurs twice"),
    "a control character": (add_path("a\nb"), 2, "file systems refuse"),
    "a surrogate": (add_path("\ud800"), 2, "file systems refuse"),
    "a listed file that is missing": (add_path("model/none"), 1, "is missing"),
    "another format": (lambda b: edit_manifest(b, lambda m: m.update(format="zip")), 2, "not the manifest"),
    "a later version": (lambda b: edit_manifest(b, lambda m: m.update(format_version=2)), 2, "version 2"),
    "no tolerance": (lambda b: edit_manifest(b, lambda m: m["models"][0].pop("tolerance")), 2, "tolerance"),
    "a negative tolerance": (
        lambda b: edit_manifest(b, lambda m: m["models"][0]["tolerance"].update(atol=-1)),
        2,
        "negative",
    ),
    "a NaN tolerance": (
        lambda b: edit_manifest(b, lambda m: m["models"][0]["tolerance"].update(atol=float("nan"))),
        2,
        "NaN",
    ),
    "a tolerance beyond every float": (
        lambda b: edit_manifest(b, lambda m: m["models"][0]["tolerance"].update(rtol=10**400)),
        2,
        "beyond 64 bits",
    ),
    "a name that steers the terminal": (
        lambda b: edit_manifest(b, lambda m: m.update(name="\x1b[2J")),
        2,
        "not a valid folder name",
    ),
    "a negative size": (lambda b: edit_manifest(b, lambda m: m["files"][0].update(size=-1)), 2, "size"),
    "a huge size": (lambda b: edit_manifest(b, lambda m: m["files"][0].update(size=1 << 62)), 1, "was changed"),
    "a model outside": (lambda b: edit_manifest(b, lambda m: m["models"][0].update(path="../x")), 2, "not listed"),
    "samples outside": (lambda b: edit_manifest(b, lambda m: m["samples"][0].update(inputs="../x")), 2, "not listed"),
    "a plugin outside": (lambda b: edit_manifest(b, lambda m: m["models"][0].update(plugins=["/x"])), 2, "not listed"),
    "an unknown kind": (
        lambda b: edit_manifest(b, lambda m: m["models"][0].update(kind="exe")),
        2,
        "of an unknown kind",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_altered_folders_are_refused(name: str, bundle: Path, localattn: Command) -> None:
    change, code, words = FOLDERS[name]
    change(bundle)
    finished = localattn("bundle", "verify", bundle)
    assert finished.code == code, finished
    assert words in finished.err
    assert finished.out == ""
    assert "Traceback" not in finished.err


@pytest.mark.parametrize(
    "name",
    [
        "a flipped bit in the model",
        "a module that would be imported",
        "a module of the standard library",
        "a pipe",
        "a path that climbs",
        "a link to a file",
        "a deep manifest",
        "a file that is not listed",
    ],
)
def test_the_script_refuses_the_same(name: str, bundle: Path) -> None:
    change, code, words = FOLDERS[name]
    change(bundle)
    finished = run_script(bundle)
    assert finished.returncode == code, finished
    assert words in finished.stderr
    assert finished.stdout == ""


def test_a_pinned_manifest_cannot_be_replaced(bundle: Path, localattn: Command) -> None:
    pin = hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    assert localattn("bundle", "verify", bundle, "--manifest-sha256", pin, "--files-only").code == 0
    flip(bundle / "model/tiny.onnx.json")
    relist(bundle, "model/tiny.onnx.json")
    assert localattn("bundle", "verify", bundle, "--files-only").code == 0  # consistent, and not the one expected
    assert localattn("bundle", "verify", bundle, "--manifest-sha256", pin).code == 1
    assert run_script(bundle, "--manifest-sha256", pin).returncode == 1


def test_wrong_outputs_fail(bundle: Path, localattn: Command) -> None:
    path = bundle / "samples/tiny.0.outputs.npz"
    logits = np.load(path)["logits"]
    np.savez(path, logits=logits + 1e-2)
    relist(bundle, "samples/tiny.0.outputs.npz")
    finished = localattn("bundle", "verify", bundle)
    assert finished.code == 1
    assert "FAIL model/tiny.onnx" in finished.out
    script_run = run_script(bundle)
    assert script_run.returncode == 1
    assert "FAIL" in script_run.stdout


def npz(member: bytes) -> bytes:
    """An archive with one stored array."""
    import zipfile

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("logits.npy", member)
    return stream.getvalue()


def npy(header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


# Python's parser reads a header: what it has no stack for, and what it would warn of, with what we say.
HEADERS = {
    "nested beyond the parser's stack": b"-" * 9000 + b"1",
    "nested beyond Python's": b"1" + b"+1" * 4000,
    "words that Python warns of": b"1if 1 else " * 300 + b"1",
    "a size beyond 64 bits": b"{'descr': '<f4', 'fortran_order': False, 'shape': (0, %d)}" % 10**30,
}

SAMPLES = {
    "a huge claim": npz(npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 1)}\n") + b"1234"),
    "objects": npz(npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n") + b"12345678"),
    "code": npz(npy(b"__import__('os').system('touch pwned')\n")),
    "a cut archive": npz(npy(b""))[:40],
    "no archive": b"hello",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_bad_samples_are_refused_without_allocating(name: str, bundle: Path, localattn: Command) -> None:
    path = bundle / "samples/tiny.0.outputs.npz"
    path.write_bytes(SAMPLES[name])
    relist(bundle, "samples/tiny.0.outputs.npz")
    tracemalloc.start()
    with pytest.raises(script.Fault, match="is not a sample"):
        script.read_arrays(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    finished = localattn("bundle", "verify", bundle)
    assert finished.code == 1
    assert "is not a sample" in finished.out
    assert not Path("pwned").exists()


@pytest.mark.parametrize("name", HEADERS)
def test_headers_beyond_the_parser_are_said_to_be_so(
    name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "in.npz"
    path.write_bytes(npz(npy(HEADERS[name] + b"\n")))
    with pytest.raises(UsageError, match="not a readable"):
        load_arrays(path)
    with pytest.raises(script.Fault, match="is not a sample") as caught:
        script.read_arrays(path)
    assert caught.value.why and not recwarn


# --- tars -------------------------------------------------------------------------------------------------------------


def tar_of(folder: Path, extra: Callable[[tarfile.TarFile], None] | None = None, **options: Any) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=options.get("format", tarfile.USTAR_FORMAT)) as archive:
        for path in sorted(item for item in folder.rglob("*") if item.is_file()):
            archive.add(path, f"tiny/{path.relative_to(folder)}")
        if extra is not None:
            extra(archive)
    return stream.getvalue()


def entry(name: str, content: bytes = b"x", **fields: Any) -> Callable[[tarfile.TarFile], None]:
    def add(archive: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        for field, value in fields.items():
            setattr(info, field, value)
        archive.addfile(info, io.BytesIO(content))

    return add


def link(name: str, target: str, kind: bytes) -> Callable[[tarfile.TarFile], None]:
    return entry(name, b"", type=kind, linkname=target)


TARS: dict[str, tuple[Callable[[tarfile.TarFile], None], str]] = {
    "climbing": (entry("tiny/../../outside"), "leaves the folder"),
    "climbing at the top": (entry("../outside"), "leaves the folder"),
    "absolute": (entry("/tmp/outside"), "leaves the folder"),
    "a symbolic link": (link("tiny/x", "/etc/passwd", tarfile.SYMTYPE), "is a link"),
    "a hard link": (link("tiny/x", "tiny/verify.py", tarfile.LNKTYPE), "is a link"),
    "a device": (entry("tiny/x", b"", type=tarfile.CHRTYPE), "is a link, a device"),
    "a pipe": (entry("tiny/x", b"", type=tarfile.FIFOTYPE), "is a link, a device"),
    "a sparse file": (entry("tiny/x", type=tarfile.GNUTYPE_SPARSE), "is a link, a device"),
    "a long name": (entry("tiny/x", b"tiny/y\0", type=tarfile.GNUTYPE_LONGNAME), "extension header"),
    "a pax header": (entry("tiny/x", b"20 path=../outside\n", type=tarfile.XHDTYPE), "extension header"),
    "a global pax header": (entry("tiny/x", b"20 path=../outside\n", type=tarfile.XGLTYPE), "extension header"),
    "a name twice": (entry("tiny/verify.py"), "occurs twice"),
    "a case clash": (entry("tiny/Verify.py"), "other capitals"),
    "a folder and a file": (entry("tiny/verify.py/x"), "both a file and a folder"),
    "two top folders": (entry("other/x"), "are not in one folder"),
    "no folder": (entry("x"), "are not in one folder"),
}


def verify_bytes(content: bytes, folder: Path, localattn: Command) -> Finished:
    (folder / "b.tar").write_bytes(content)
    return localattn("bundle", "verify", folder / "b.tar")


@pytest.mark.parametrize("name", TARS)
def test_tricks_in_tars_are_refused(
    name: str, tiny_bundle: Path, tmp_path: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    made: list[str] = []
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda *a, **k: made.append("extracted"))
    extra, words = TARS[name]
    finished = verify_bytes(tar_of(tiny_bundle, extra), tmp_path, localattn)
    assert (finished.code, finished.out) == (2, ""), finished
    assert words in finished.err
    assert made == []  # refused before anything was extracted
    assert {path.name for path in tmp_path.iterdir()} == {"scratch", "b.tar"}


def header_with(content: bytes, size: bytes) -> bytes:
    """The first entry's header with another size, its checksum made right."""
    header = bytearray(content[:512])
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content[512:]


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (b"77777777777\0", "states"),  # 8 GiB
        (b"\x80" + b"\0" * 3 + b"\xff" * 8, "states"),  # 2^64 - 1, base 256
        (b"\xff" * 12, "states"),  # negative, base 256
        (b"-0000000001\0", "states"),
    ],
)
def test_claimed_sizes_are_not_believed(
    size: bytes, words: str, tiny_bundle: Path, tmp_path: Path, localattn: Command
) -> None:
    tracemalloc.start()
    finished = verify_bytes(header_with(tar_of(tiny_bundle), size), tmp_path, localattn)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert finished.code == 2, finished
    assert words in finished.err
    assert peak < 64 << 20


@pytest.mark.parametrize("kind", ["a loop without end", "by overload", "functions that double, by overload"])
def test_a_model_that_no_engine_may_open(kind: str, bundle: Path, localattn: Command) -> None:
    """Every digest is right, and the package and the script on the device refuse alike, before onnxruntime opens it."""
    [name] = [str(path.relative_to(bundle)) for path in bundle.rglob("*.onnx")]
    (bundle / name).write_bytes(HOSTILE[kind]())
    relist(bundle, name)
    finished = localattn("bundle", "verify", bundle)
    script = run_script(bundle)
    assert finished.code == script.returncode == 1
    for said in (finished.out + finished.err, script.stdout + script.stderr):
        assert "cannot be loaded" in said and ("loops run" in said or "call each other" in said)


def test_arrays_that_claim_more_than_their_file_together(bundle: Path, localattn: Command) -> None:
    """Four hundred entries of one archive share the bytes of one array."""
    name = next(str(path.relative_to(bundle)) for path in bundle.rglob("*.outputs.npz"))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        content = io.BytesIO()
        np.save(content, np.zeros(1 << 18, np.float32))
        archive.writestr("a0.npy", content.getvalue())
        for index in range(1, 400):
            entry = copy.copy(archive.filelist[0])
            entry.filename = f"a{index}.npy"
            archive.filelist.append(entry)
        archive._didModify = True  # type: ignore[attr-defined]
    (bundle / name).write_bytes(stream.getvalue())
    relist(bundle, name)
    finished = localattn("bundle", "verify", bundle)
    script = run_script(bundle)
    assert finished.code == script.returncode == 1
    assert "state more bytes than the file has" in finished.out + finished.err
    assert "state more bytes than the file has" in script.stdout + script.stderr


@pytest.mark.parametrize("suffix", [b"PK\x03\x04", tar_of(Path(__file__).parent / "no")[:512] + b"x" * 512])
def test_what_follows_the_end_is_refused(suffix: bytes, tiny_bundle: Path, tmp_path: Path, localattn: Command) -> None:
    assert verify_bytes(tar_of(tiny_bundle) + suffix, tmp_path, localattn).code == 2


@pytest.mark.parametrize("cut", [0, 1, 511, 512, 700, 5000, -1024, -10240])
def test_cut_tars_are_refused(cut: int, tiny_bundle: Path, tmp_path: Path, localattn: Command) -> None:
    content = tar_of(tiny_bundle)
    finished = verify_bytes(content[:cut] if cut >= 0 else content[: len(content.rstrip(b"\0"))], tmp_path, localattn)
    assert finished.code == 2, finished


def test_compressed_tars_are_refused(tiny_bundle: Path, tmp_path: Path, localattn: Command) -> None:
    import gzip

    assert verify_bytes(gzip.compress(tar_of(tiny_bundle)), tmp_path, localattn).code == 2


def test_an_altered_file_in_a_tar(bundle: Path, tmp_path: Path, localattn: Command) -> None:
    flip(bundle / "model/tiny.onnx")
    assert verify_bytes(tar_of(bundle), tmp_path, localattn).code == 1
    (bundle / "model/tiny.onnx").unlink()
    assert verify_bytes(tar_of(bundle), tmp_path, localattn).code == 1
    (bundle / "manifest.json").unlink()
    assert verify_bytes(tar_of(bundle), tmp_path, localattn).code == 2


# --- mutations --------------------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["../x", "/x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    document = copy.deepcopy(document)
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return document


def assert_only_clear_errors(act: Callable[[], object]) -> bool:
    """Whether it went well; anything but an error of ours fails the test."""
    try:
        act()
    except LocalAttnError as error:
        assert isinstance(error, UsageError | CheckFailed), error
        assert error.what
        assert "\n" not in error.what
        return False
    return True


FUZZ = settings(
    # LOCALATTN_FUZZ: how many inputs to try in each test, for a long run.
    max_examples=int(os.environ.get("LOCALATTN_FUZZ", "150")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(data=st.data())
def test_mutated_manifests(data: st.DataObject, tiny_bundle: Path) -> None:
    text = (tiny_bundle / "manifest.json").read_bytes()
    manifest = json.loads(text)
    path = data.draw(st.sampled_from(places(manifest)))
    changed = put(manifest, path, data.draw(_JSON))
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "bundle"
        shutil.copytree(tiny_bundle, copied)
        (copied / "manifest.json").write_text(json.dumps(changed))
        well = assert_only_clear_errors(lambda: verify_bundle(copied, files_only=True))
        assert {path.name for path in Path(folder).iterdir()} == {"bundle"}
    if well:  # then nothing that decides what is loaded may have changed
        sound = {entry["path"]: (entry["size"], entry["sha256"]) for entry in manifest["files"]}
        assert {entry["path"]: (entry["size"], entry["sha256"]) for entry in changed["files"]} == sound


@FUZZ
@given(
    text=st.binary(max_size=200) | st.text(max_size=100).map(str.encode) | _JSON.map(lambda v: json.dumps(v).encode())
)
def test_any_bytes_as_a_manifest(text: bytes) -> None:
    with pytest.raises(check_files.Fault):
        check_files.parse_manifest(text)


@FUZZ
@given(data=st.data())
def test_mutated_tars(data: st.DataObject, tiny_bundle: Path) -> None:
    content = bytearray(tar_of(tiny_bundle))
    headers = [place for place in range(0, len(content), 512) if content[place + 257 : place + 262] == b"ustar"]
    fix_checksum = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.sampled_from(headers))
        at = start + data.draw(st.integers(0, 511))
        piece = data.draw(st.binary(min_size=1, max_size=12))
        content[at : at + len(piece)] = piece
        if fix_checksum and start + 512 <= len(content):
            header = content[start : start + 512]
            header[148:156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(header)
    cut = data.draw(st.none() | st.integers(0, len(content)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "b.tar"
        path.write_bytes(bytes(content[:cut]))
        assert_only_clear_errors(lambda: verify_bundle(path, files_only=True))
        assert [item.name for item in Path(folder).iterdir()] == ["b.tar"]


@FUZZ
@given(path=st.text(alphabet=st.sampled_from("ab./\\:CON nul\0é\u202e"), max_size=12) | st.text(max_size=30))
def test_accepted_paths_stay_inside(path: str) -> None:
    try:
        check_files.check_paths([path])
    except ValueError:
        return
    base = Path("/base")
    assert base in (resolved := Path(os.path.normpath(base / path))).parents
    assert resolved.relative_to(base).as_posix() == path


def test_python_version_is_what_the_script_promises() -> None:
    import ast

    device = Path(script.__file__).parent
    for path in (*device.glob("[a-z]*.py"), Path(library_image.__file__), Path(closeness.__file__)):
        source = path.read_text()
        ast.parse(source, feature_version=(3, 10))
        imported = {
            (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else node.names[0].name.split(".")[0]
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
        }
        assert imported - set(sys.stdlib_module_names) <= {"", "numpy", "onnx", "onnxruntime"}
