"""Attacks on the choice of libraries: whose code runs is seen from a library that writes a file when it is loaded."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest

from localattn.core.documents.sidecar import sidecar_path
from localattn.core.errors import CheckFailed, UsageError
from localattn.core.geometry import WindowGeometry
from localattn.core.machine.processor import host_arch
from localattn.core.nodes.attention import VARIANTS, NodeAttributes
from localattn.core.storage import library_store
from localattn.core.storage.cpu_library import KERNELS
from localattn.core.storage.exposed import why_exposed
from localattn.core.storage.files import sha256
from localattn.core.storage.library_store import CPU_KERNELS, find, prepare_cache
from localattn.plugins.cpu.build import build_library
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.device import verify as script

from ..gpu.tensorrt.test_engine_sidecar import written
from ..support.library_attacks import Cache, Ended, command, compile_marker, copy_library, fill, run, sidecar_of
from ..support.models import node_model
from ..support.models.bundles import run_script, tiny_model  # noqa: F401
from ..support.models.engine_models import needs_rtx

if os.name != "posix":
    pytest.skip("owners and modes of files are those of POSIX systems", allow_module_level=True)
pytest.importorskip("onnxruntime", reason="onnxruntime opens the library")

NOBODY, SOMEBODY = 65534, 65533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
LOAD = "import sys; from localattn import load; print(load(sys.argv[1]).plugin)"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `mine.so` and `evil.so`."""
    folder = tmp_path_factory.mktemp("libraries")
    for word in ("mine", "evil"):
        compile_marker(folder, word)
    return folder


@pytest.fixture
def evil(libraries: Path) -> Path:
    """A library that nobody asked for."""
    return libraries / "evil.so"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can enter, with a model whose attention node a library would compute."""
    folder = Path(tempfile.mkdtemp(prefix="localattn-trust-"))
    folder.chmod(0o755)
    window = NodeAttributes(WindowGeometry(8, 1, 0, causal=True), 0.35, query_block=8)
    onnx.save(node_model.one_node(VARIANTS[0], window, 50), str(folder / "node.onnx"))
    yield folder
    shutil.rmtree(folder)


def opened(place: Path, cache: Path | str, cwd: Path | None = None, **environment: str) -> Ended:
    """Open the model in a process of its own, with no word about libraries."""
    return run(place, "-c", LOAD, place / "node.onnx", cwd=cwd, XDG_CACHE_HOME=str(cache), **environment)


# Another user may not be able to read this Python: it is loaded, with all that opening a model takes, by a run before.
AS_USER = """
import logging, os, sys
from localattn import load
logging.basicConfig()
from localattn.core.storage import library_store
from localattn.core.errors import CheckFailed, UsageError
from localattn.core.storage.library_store import CPU_KERNELS, prepare_cache
model, home, cache = sys.argv[1:]
os.environ |= {"XDG_CACHE_HOME": os.path.dirname(model) + "/before"}
load(model)
library_store._PACKAGED = library_store.Path(os.path.dirname(model)) / "closed/libraries"
prepare_cache("x86_64")
CPU_KERNELS.fingerprint()
os.setgroups([])
os.setgid(65533)
os.setuid(65533)
for name, value in (("HOME", home), ("XDG_CACHE_HOME", cache)):
    os.environ.pop(name, None)
    os.environ |= {name: value} if value else {}
print(load(model).plugin)
try:
    prepare_cache("x86_64")
except UsageError as error:
    print(error.exit_code, error.why)
"""


def replaced_by_link(path: Path) -> None:
    """The same file, behind a link."""
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def sticky_with_others_folder(cache: Cache) -> None:
    """As in /tmp, where another user was first to make the folder."""
    cache.base.chmod(0o1777)
    os.chown(cache.folder.parent, NOBODY, NOBODY)


def others_link(cache: Cache) -> None:
    """The folder belongs to the user, the link to it in a folder like /tmp does not."""
    private = cache.base.parent / "private"
    cache.folder.parent.rename(private)
    cache.base.chmod(0o1777)
    cache.folder.parent.symlink_to(private)
    os.lchown(cache.folder.parent, NOBODY, NOBODY)


def sidecar_rewritten(cache: Cache) -> None:
    """The library was changed, and the file beside it, which any who can write one can write, agrees with it."""
    data = cache.library.read_bytes() + b"!"
    cache.library.write_bytes(data)
    sidecar_path(cache.library).write_text(sidecar_of(cache.library).to_json())


def index_leads_out(cache: Cache) -> None:
    outside = cache.base.parent / "outside.so"
    shutil.copy(cache.library, outside)
    cache.write_index("../../../outside.so", sidecar_of(outside))


def index_is_absolute(cache: Cache) -> None:
    cache.write_index(f"/{cache.library}", sidecar_of(cache.library))


ATTACKS: dict[str, Callable[[Cache], object]] = {
    "folder of mode 0777": lambda cache: cache.folder.chmod(0o777),
    "sticky folder of mode 1777": lambda cache: cache.library.parent.chmod(0o1777),
    "folder writable by the group": lambda cache: cache.library.parent.chmod(0o770),
    "parent of mode 0777": lambda cache: cache.base.chmod(0o777),
    "library of mode 0666": lambda cache: cache.library.chmod(0o666),
    "library writable by the group": lambda cache: cache.library.chmod(0o660),
    "index of mode 0666": lambda cache: cache.index.chmod(0o666),
    "linked library": lambda cache: replaced_by_link(cache.library),
    "linked index": lambda cache: replaced_by_link(cache.index),
    "pipe as a library": lambda cache: replaced_by_pipe(cache.library),
    "pipe as an index": lambda cache: replaced_by_pipe(cache.index),
    "changed library with new sidecar beside it": sidecar_rewritten,
    "index that leads out": index_leads_out,
    "index with an absolute path": index_is_absolute,
}
OWNED: dict[str, Callable[[Cache], object]] = {
    "library of another user": lambda cache: os.chown(cache.library, NOBODY, NOBODY),
    "index of another user": lambda cache: os.chown(cache.index, NOBODY, NOBODY),
    "folder of another user": lambda cache: os.chown(cache.folder, NOBODY, NOBODY),
    "parent of another user": lambda cache: os.chown(cache.base, NOBODY, NOBODY),
    "sticky folder, folder of another user in it": sticky_with_others_folder,
    "sticky folder, link of another user in it": others_link,
}


@pytest.mark.parametrize("name", [*ATTACKS, *(pytest.param(name, marks=as_root) for name in OWNED)])
def test_a_cache_that_others_could_have_written_is_not_used(name: str, place: Path, evil: Path) -> None:
    cache = fill(place / "cache", evil)
    (ATTACKS | OWNED)[name](cache)
    ended = opened(place, cache.base)
    assert (ended.code, ended.out, ended.loaded) == (0, "None\n", []), ended.err


def sticky_parent(cache: Cache) -> None:
    cache.base.chmod(0o1777)


def own_link(cache: Cache) -> None:
    """As where the home folder has little room."""
    large = cache.base.parent / "large"
    cache.folder.parent.rename(large)
    cache.folder.parent.symlink_to("../large")


@pytest.mark.parametrize("change", [lambda cache: None, sticky_parent, own_link], ids=["private", "sticky", "link"])
def test_the_users_own_cache_is_used(change: Callable[[Cache], None], place: Path, evil: Path) -> None:
    """The counterpart of the attacks: without one, this very library is loaded."""
    cache = fill(place / "cache", evil)
    change(cache)
    ended = opened(place, cache.base)
    assert (ended.code, ended.out, ended.loaded) == (0, f"{cache.library}\n", ["evil"]), ended.err


@as_root
@pytest.mark.parametrize(("owner", "loaded"), [(SOMEBODY, ["evil"]), (0, ["evil"]), (NOBODY, [])])
def test_a_user_trusts_root_and_nobody_else(owner: int, loaded: list[str], place: Path, evil: Path) -> None:
    cache = fill(place / "cache", evil)
    for path in cache.everything():
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.chown(path, owner, owner)
    ended = run(place, "-c", AS_USER, place / "node.onnx", "", cache.base)
    assert (ended.code, ended.loaded) == (0, loaded), ended.err
    assert ("belongs to another user (uid 65534)" in ended.err) is (owner == NOBODY)


@pytest.mark.parametrize("attack", ["batch", "made again"])
def test_a_library_built_elsewhere_is_not_loaded_by_itself(attack: str, place: Path, evil: Path) -> None:
    """Built with a path in a folder like /tmp, which the user's builds are no longer remembered from."""
    folder = place / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    shutil.move(place / "node.onnx", folder / "node.onnx")
    output = folder / CPU_KERNELS.file_name
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        build_library(output, arch=host_arch())
    assert opened(folder, place / "cache").out == "None\n"
    if attack == "batch":
        batch = folder / ".localattn.next.z"
        batch.mkdir()
        copy_library(evil, batch / output.name)
    else:
        output.unlink()
        copy_library(evil, output)
    ended = opened(folder, place / "cache")
    assert (ended.out, ended.loaded) == ("None\n", []), ended.err


def test_a_relative_cache_is_ignored(place: Path, evil: Path) -> None:
    """It would be found in whatever folder the process runs in: a clone, a download."""
    cache = fill(place / "clone" / "cache", evil)
    for relative in ("cache", "./cache", "../clone/cache"):
        ended = opened(place, relative, cwd=place / "clone")
        assert (ended.out, ended.loaded) == ("None\n", []), ended.err
    assert opened(place, cache.base, cwd=place / "clone").loaded == ["evil"]
    (place / "home").mkdir()
    fill(place / "home" / ".cache", evil)
    for unset in ("", "cache"):
        assert opened(place, unset, cwd=place / "clone", HOME=str(place / "home")).loaded == ["evil"]


@as_root
def test_without_a_home_nothing_is_found_and_nothing_is_written(place: Path) -> None:
    """A user that the system does not know, without HOME; and one whose HOME cannot be written.

    Neither can read the folder of the package itself.
    """
    (place / "closed").mkdir(mode=0o700)
    home = place / "home"
    home.mkdir(mode=0o555)
    for given, why in (("", "HOME and XDG_CACHE_HOME are not set."), (home, f"{home}/.cache: Permission denied.")):
        ended = run(place, "-c", AS_USER, place / "node.onnx", given, "")
        assert (ended.code, ended.out) == (0, f"None\n2 {why}\n"), ended.err


def test_a_new_cache_is_private_and_an_exposed_one_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a" / "b"))
    before = os.umask(0o002)
    try:
        (tmp_path / "a").mkdir(mode=0o755)
        folder = prepare_cache(host_arch())
    finally:
        os.umask(before)
    for made in (folder, folder.parent, folder.parent.parent, tmp_path / "a" / "b"):
        assert made.stat().st_mode & 0o777 == 0o700
    folder.parent.chmod(0o777)
    assert prepare_cache(host_arch()) == folder and folder.parent.stat().st_mode & 0o777 == 0o700
    (tmp_path / "a").chmod(0o777)
    with pytest.raises(UsageError, match="Libraries cannot be kept") as caught:
        prepare_cache(host_arch())
    assert f"{tmp_path}/a can be written by others (mode 0777)" in caught.value.why


def test_the_installed_package_may_bring_libraries(
    tmp_path: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a wheel would: in a folder for each processor, with the sidecars next to them; after what the user built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library_store, "_PACKAGED", tmp_path / "libraries")
    packaged = tmp_path / "libraries" / host_arch() / CPU_KERNELS.file_name
    packaged.parent.mkdir(parents=True)
    assert find(CPU_KERNELS) is None
    copy_library(libraries / "mine.so", packaged)
    found = find(CPU_KERNELS)
    assert found is not None and (found.path, found.sha256) == (packaged, sha256(libraries / "mine.so"))
    own = fill(tmp_path / "cache", libraries / "evil.so")
    found = find(CPU_KERNELS)
    assert found is not None and found.path == own.library
    own.library.write_bytes(b"changed")
    found = find(CPU_KERNELS)
    assert found is not None and found.path == packaged, "the next that verifies"
    packaged.write_bytes(b"changed")
    with pytest.raises(CheckFailed, match="was changed after it was built"):
        find(CPU_KERNELS)


# Verified, then replaced on the disk, then registered; what runs is what was verified.
SWAP = """
import os, pathlib, shutil, sys
import onnxruntime as ort
from localattn.core.storage.library_store import CPU_KERNELS, find, read_named
from localattn.runtime.backends.onnxruntime.custom_ops import CompiledKernel
path, other, how = map(pathlib.Path, sys.argv[1:4])
library = read_named(CPU_KERNELS, path) if sys.argv[4] == "named" else find(CPU_KERNELS)
assert library.path == path
if str(how) == "renamed":
    shutil.copy(other, str(path) + ".new")
    os.replace(str(path) + ".new", path)
else:
    path.write_bytes(other.read_bytes())
CompiledKernel(library, asked=True, used=True).register(ort, ort.SessionOptions())
"""


@pytest.mark.parametrize("how", ["renamed", "overwritten"])
@pytest.mark.parametrize("entrance", ["by itself", "named"])
def test_what_was_verified_is_what_is_loaded(how: str, entrance: str, place: Path, libraries: Path) -> None:
    cache = fill(place / "cache", libraries / "mine.so")
    arguments = (cache.library, libraries / "evil.so", how, entrance)
    ended = run(place, "-c", SWAP, *arguments, XDG_CACHE_HOME=str(cache.base))
    assert (ended.code, ended.loaded) == (0, ["mine"]), ended.err
    assert cache.library.read_bytes() == (libraries / "evil.so").read_bytes()


# Where there are no files in memory, the loader gets a copy in a private folder that is gone with the process.
WITHOUT_MEMORY_FILES = """
import os, stat, sys, pathlib
del os.memfd_create
import localattn
from localattn.core.storage import library_image
session = localattn.load(sys.argv[1])
[image] = library_image._images.values()
folder = pathlib.Path(image).parent
assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and str(image) not in session.plugin
print(folder)
"""


def test_without_memory_files_a_private_copy_is_loaded(place: Path, evil: Path) -> None:
    cache = fill(place / "cache", evil)
    ended = run(place, "-c", WITHOUT_MEMORY_FILES, place / "node.onnx", XDG_CACHE_HOME=str(cache.base))
    assert (ended.code, ended.loaded) == (0, ["evil"]), ended.err
    assert not Path(ended.out.strip()).exists()


# Two libraries, one after the other: the loader must not take the second for the first, whatever their descriptors are.
TWO = """
import sys
import onnxruntime as ort
from localattn.core.storage.library_store import CPU_KERNELS, read_named
from localattn.runtime.backends.onnxruntime.custom_ops import CompiledKernel
import pathlib
for path in sys.argv[1:]:
    library = read_named(CPU_KERNELS, pathlib.Path(path))
    CompiledKernel(library, asked=True, used=True).register(ort, ort.SessionOptions())
    del library
"""


def test_a_second_library_is_not_taken_for_the_first(place: Path, libraries: Path) -> None:
    ended = run(place, "-c", TWO, libraries / "mine.so", libraries / "evil.so")
    assert (ended.code, ended.loaded) == (0, ["mine", "evil"]), ended.err


QUICK = ("--duration", "0", "--iterations", "1", "--rounds", "1", "--warmup", "0")
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "node.onnx"),
    "parity": ("parity", "node.onnx", "--against", "node.onnx"),
    "bench": ("bench", "node.onnx", *QUICK),
    "profile": ("bench", "node.onnx", "--profile", *QUICK),
    "check": ("plugin", "check", "--backend", "onnxruntime"),
    "doctor": ("doctor",),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_goes_through_it(name: str, place: Path, evil: Path) -> None:
    cache = fill(place / "cache", evil)
    assert "evil" in command(place, *COMMANDS[name], XDG_CACHE_HOME=str(cache.base)).loaded, "so it would be seen"
    cache.folder.chmod(0o777)
    ended = command(place, *COMMANDS[name], XDG_CACHE_HOME=str(cache.base))
    assert ended.loaded == []
    # The processes of a benchmark are silent.
    assert name in ("bench", "profile") or "No library is loaded from" in ended.out + ended.err


def test_a_named_library_is_loaded(place: Path, evil: Path) -> None:
    """Wherever it lies and whoever owns it: the user said so."""
    folder = place / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    shutil.copy(evil, folder / "some.so")
    ended = command(place, "run", place / "node.onnx", "--plugin-library", folder / "some.so")
    assert (ended.code, ended.loaded) == (0, ["evil"]), ended.err
    assert command(place, "run", place / "node.onnx").loaded == []


# The engine's way to its library, in TensorRT-RTX; only the GPU is said to be there.
ENGINE = """
import sys
from pathlib import Path
from localattn.runtime.backends.tensorrt import open as engine_open
from localattn.runtime.backends.tensorrt.device import Device
from localattn.core.errors import LocalAttnError
engine_open.find_device = lambda gpu: None
engine_open.check_device = engine_open.use_device = lambda *arguments: None
engine_open.check_library = lambda *arguments: None
engine_open.start_device = lambda device: None
try:
    engine_open.open_engine(Path(sys.argv[1]), *sys.argv[2:])
except LocalAttnError as error:
    print(type(error).__name__, error.what, error.why, error.fix)
"""


def engine_next_to(place: Path, library: Path, path: str) -> Path:
    """An engine whose sidecar names this library at a path."""
    folder = place / "engine"
    folder.mkdir()
    plugin = {"kind": "library", "path": path, "sha256": sha256(library), "layers": ["a"]}
    engine, _ = written(folder, plugin=plugin)
    return engine


@needs_rtx
@pytest.mark.parametrize("where", ["beside", "absolute"])
def test_an_engine_does_not_bring_its_library(where: str, place: Path, libraries: Path) -> None:
    evil = libraries / "evil.so"
    far = place / "far" / "plugin.so"
    far.parent.mkdir()
    shutil.copy(evil, far)
    engine = engine_next_to(place, evil, str(far) if where == "absolute" else "plugin.so")
    if where == "beside":
        shutil.copy(evil, engine.parent / "plugin.so")
    ended = run(place, "-c", ENGINE, engine, cwd=engine.parent)
    assert ended.loaded == [] and ended.code == 0, ended.err
    for said in ("MissingDependency", "needs the plugin library plugin.so", sha256(evil), "plugin='PATH'"):
        assert said in ended.out
    assert str(far) not in ended.out
    shown = command(place, "inspect", engine)
    assert shown.loaded == [] and "needs the plugin library plugin.so" in shown.out
    # Named in this very command it is loaded, if it is the one; here TensorRT then finds no plugins in it.
    ended = run(place, "-c", ENGINE, engine, far)
    assert ended.loaded[:1] == ["evil"] and f"cannot load {far}" in ended.out, ended.err
    other = run(place, "-c", ENGINE, engine, libraries / "mine.so")
    assert other.loaded == [] and "CheckFailed" in other.out


@needs_rtx
def test_an_engine_finds_its_library_in_the_users_cache(place: Path, libraries: Path) -> None:
    engine = engine_next_to(place, libraries / "mine.so", "plugin.so")
    cache = fill(place / "cache", libraries / "mine.so")
    document = json.loads(cache.index.read_text())
    document["libraries"][0]["kind"] = "plugin"
    document["libraries"][0]["facts"] |= {"format": "localattn-plugin", "fingerprint": "of an earlier release"}
    cache.index.write_text(json.dumps(document))
    ended = run(place, "-c", ENGINE, engine, XDG_CACHE_HOME=str(cache.base))
    assert ended.loaded[:1] == ["mine"], (ended.out, ended.err)
    cache.folder.chmod(0o777)
    ended = run(place, "-c", ENGINE, engine, XDG_CACHE_HOME=str(cache.base))
    assert ended.loaded == [] and "can be written by others" in ended.out


def test_a_bundle_does_not_run_its_libraries_unasked(
    tiny_model: Path,  # noqa: F811
    place: Path,
    evil: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = place / CPU_KERNELS.file_name
    copy_library(evil, library)
    created = create_bundle(BundleRequest(tiny_model, place / "b", samples=1, plugins=(library,)))
    create_bundle(BundleRequest(tiny_model, place / "b.tar", as_tar=True, samples=1, plugins=(library,)))
    home = f"kernels/{host_arch()}/{library.name}"
    for bundle in (place / "b", place / "b.tar"):
        ended = command(place, "bundle", "verify", bundle)
        assert (ended.code, ended.loaded) == (0, []), ended.err
        assert f"not run: {home}. A bundle's libraries are code" in ended.out and "by ONNX functions" in ended.out
        ended = command(place, "bundle", "verify", bundle, "--run-libraries", "--format", "json")
        assert (ended.code, ended.loaded) == (1, ["evil"]), ended.err
        report = json.loads(ended.out)
        assert report["rows"][1]["kernels"] == {"source": home, "sha256": sha256(evil), "ops": []}
        assert report["not_run"][0]["model"] == home and "has no kernel" in report["not_run"][0]["why"]
    pinned = command(place, "bundle", "verify", place / "b", "--manifest-sha256", created.manifest_sha256)
    assert pinned.loaded == ["evil"]
    wrong = command(place, "bundle", "verify", place / "b", "--manifest-sha256", "0" * 64)
    assert (wrong.code, wrong.loaded) == (1, [])
    for options, loaded in (([], []), (["--run-libraries"], ["evil"])):
        ended = run(place, place / "b" / "verify.py", *options)
        assert ended.loaded == loaded and ended.code == len(loaded), ended.out
    assert run_script(place / "b").returncode == 0


def test_the_device_script_knows_every_kernel() -> None:
    assert sorted(script.KERNELS) == sorted(op_type for _, op_type in KERNELS)


def test_exposed_says_what_and_whom(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    path.chmod(0o600)
    assert why_exposed(path) == ""
    path.chmod(0o620)
    assert why_exposed(path) == f"{path} can be written by others (mode 0620)."
    (tmp_path / "link").symlink_to(path)
    assert why_exposed(tmp_path / "link") == f"{tmp_path / 'link'} is a symbolic link."
    (tmp_path / "loop").symlink_to("loop")
    assert "is a symbolic link" in why_exposed(tmp_path / "loop" / "file")
    with pytest.raises(FileNotFoundError):
        why_exposed(tmp_path / "gone")
