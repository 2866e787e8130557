"""`bundle --web`: the page in headless Chromium writes what `localattn generate` writes, and says what it cannot do."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import importlib.util
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from localattn.core.documents.sidecar import sidecar_path
from localattn.core.errors import UsageError
from localattn.core.storage.files import sha256
from localattn.core.tensors import TensorSpec
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.parts import read_model_part
from localattn.runtime.bundle.web_page import check_web_model
from localattn.runtime.generation.generator import Generator

from ...conftest import Finished
from ...support import chromium
from ...support.browser import PHONE, needs_browser
from ...support.chromium import Page
from ...support.models import step_model
from ...support.onnxruntime_web import onnxruntime_web  # noqa: F401

ROOT = Path(__file__).resolve().parents[3]
# 98 bytes: one chunk of 64, then one by one. The window is 64, the model has 512 positions.
TEXT = 'import os\nfrom pathlib import Path\n\n\ndef read_lines(path):\n    """Return the lines of a text file.'
STATE = "import('./page.js').then(({ state }) => state)"
SETTLED = "import('./page.js').then(({ state }) => (state.ready && !state.writing) || state.error !== '')"
Command = Callable[..., Finished]


class Quiet(SimpleHTTPRequestHandler):
    """A static server, as `python -m http.server` is, that logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Demo(NamedTuple):
    """The example: its step file, and the page made of it."""

    model: Path
    web: Path


@pytest.fixture(scope="module")
def demo(onnxruntime_web: Path, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """What `examples/browser/make.py` makes."""
    spec = importlib.util.spec_from_file_location("make_browser", ROOT / "examples" / "browser" / "make.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    folder = tmp_path_factory.mktemp("browser")
    return Demo(folder / "pybytes_step.onnx", example.make(folder, onnxruntime_web) / "web")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium.page(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def written(page: Page, address: str, **settings: object) -> dict[str, Any]:
    """What the page has when it has ended, opened with a text and settings."""
    page.open(f"{address}#{urlencode(settings)}")
    page.wait_for(SETTLED)
    return dict(page.value(STATE))


def generated(model: Path, prompt: object, count: int, **settings: Any) -> list[int]:
    generator = Generator.open(model, "cpu", plugin="none")
    return [int(token[0]) for token in generator.generate(prompt, count, **settings)]


@needs_browser
def test_the_page_writes_the_tokens_of_generate(demo: Demo, page: Page) -> None:
    """Sampled and greedy, six windows long, to the last position; also offline, when the server is gone."""
    settings: dict[str, Any] = {"text": TEXT, "temperature": 0.7, "seed": 3, "count": 260}
    wanted = generated(demo.model, list(TEXT.encode()), 260, temperature=0.7, seed=3)
    likeliest = generated(demo.model, list(TEXT.encode()), None, temperature=0)
    assert len(likeliest) == 415 and likeliest[:260] != wanted
    with served(demo.web) as address:
        online = written(page, address, **settings)
        assert (online["error"], online["tokens"]) == ("", wanted)
        assert page.value("document.getElementById('cache').textContent") == "199.7 kB"
        assert float(page.value("document.getElementById('rate').textContent.replace(',', '')")) > 0
        assert page.value("document.getElementById('written').textContent") == bytes(wanted).decode("utf-8", "replace")

        to_the_end = written(page, address, text=TEXT, temperature=0, count=1000)
        assert to_the_end["tokens"] == likeliest
        assert "has only 512 positions" in page.value("document.getElementById('status').textContent")
        page.wait_for("import('./page.js').then(({ state }) => state.offline)")
    offline = written(page, address, **settings)
    assert (offline["error"], offline["tokens"]) == ("", wanted)


@needs_browser
def test_another_bundle_at_the_same_address_takes_the_place_of_the_first(
    numbers: Path, onnxruntime_web: Path, page: Page, tmp_path: Path
) -> None:
    """The browser then keeps the second alone: online and offline its tokens, and no file of the first in any cache."""
    bundles = [(numbers, tmp_path / "first"), (small(tmp_path / "new", vocabulary=19, chunk=1), tmp_path / "second")]
    wanted = []
    for model, folder in bundles:
        create_bundle(BundleRequest(model, folder, onnxruntime_web=onnxruntime_web, samples=0))
        wanted.append(generated(model, [1, 2, 3], 20, temperature=0.9, seed=1))
    assert wanted[0] != wanted[1]
    settings = {"text": "1, 2, 3", "temperature": 0.9, "seed": 1, "count": 20}
    (tmp_path / "served").symlink_to(tmp_path / "first" / "web")
    with served(tmp_path / "served") as address:
        for (_, folder), tokens in zip(bundles, wanted, strict=True):
            (tmp_path / "served").unlink()
            (tmp_path / "served").symlink_to(folder / "web")
            online = written(page, address, **settings)
            assert (online["error"], online["tokens"]) == ("", tokens)
            page.wait_for("import('./page.js').then(({ state }) => state.offline)")
        kept = "caches.keys().then(all => all.filter(name => name.includes(location.origin)))"
        assert len(page.value(kept)) == 1
        listed = f"{kept}.then(([name]) => caches.open(name)).then(cache => cache.keys())"
        addresses = page.value(f"{listed}.then(all => all.map(({{ url }}) => url))")
        names = json.loads((tmp_path / "second/web/page.json").read_text())["files"]
        assert sorted(addresses) == sorted([address, address + "page.json", *(address + name for name in names)])
    offline = written(page, address, **settings)
    assert (offline["error"], offline["tokens"]) == ("", wanted[1])


@needs_browser
def test_it_follows_what_is_typed_and_stops(demo: Demo, page: Page) -> None:
    with served(demo.web) as address:
        written(page, address, text=TEXT, temperature=0, count=20)
        # What is typed goes on from the caches that are kept; the tokens are those of the whole text.
        page.value("document.getElementById('text').focus()")
        page.call("Input.insertText", text='"""\n    é')
        longer = page.wait_for(f"{STATE}.then(state => !state.writing && state.prompt.length > 98 && state)")
        assert bytes(longer["prompt"]).decode() == TEXT + '"""\n    é'
        assert longer["tokens"] == generated(demo.model, longer["prompt"], 20, temperature=0)

        # Keep makes the model's text one's own, and goes on.
        page.value("document.getElementById('keep').click()")
        kept = page.wait_for(f"{STATE}.then(state => !state.writing && state.prompt.length > 110 && state)")
        assert kept["prompt"] == longer["prompt"] + longer["tokens"]

        page.value("document.getElementById('count').value = 1000")
        page.value("document.getElementById('write').click()")
        page.wait_for(f"{STATE}.then(state => state.tokens.length > 5)")
        assert page.value("document.getElementById('write').textContent") == "Stop"
        page.value("document.getElementById('write').click()")
        stopped = page.value(STATE)
        assert not stopped["writing"] and 5 < len(stopped["tokens"]) < 380
        page.value("new Promise(resume => setTimeout(resume, 100))")
        assert page.value(STATE)["tokens"] == stopped["tokens"]

        page.value("document.getElementById('seed').value = 'three'")
        page.value("document.getElementById('seed').dispatchEvent(new Event('input'))")
        assert page.value("document.getElementById('status').textContent") == "Seed and tokens must be whole numbers."
        page.value("document.getElementById('seed').value = '3'")

        # A text longer than the model has positions for.
        page.value("document.getElementById('text').value = 'x'.repeat(513)")
        page.value("document.getElementById('text').dispatchEvent(new Event('input'))")
        said = page.value("document.getElementById('status').textContent")
        assert said == "The text has 513 tokens, but the model has only 512 positions: shorten the text."


@needs_browser
@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("model/pybytes_step.onnx", "pybytes_step.onnx was not found (the server answers 404)"),
        ("page.json", "page.json is missing or damaged"),
    ],
)
def test_a_missing_file_is_named(demo: Demo, page: Page, tmp_path: Path, missing: str, said: str) -> None:
    shutil.copytree(demo.web, tmp_path / "web", ignore=lambda folder, names: ["onnxruntime-web"])
    (tmp_path / "web" / "onnxruntime-web").symlink_to(demo.web / "onnxruntime-web")
    (tmp_path / "web" / missing).unlink()
    with served(tmp_path / "web") as address:
        assert said in written(page, address, text="x")["error"]
        assert said in page.value("document.querySelector('#status.bad').textContent")


@needs_browser
def test_opened_as_a_file_it_says_what_to_do(page: Page) -> None:
    page.open((ROOT / "runtime" / "bundle" / "web" / "index.html").as_uri())
    status = "document.getElementById('status')"
    page.wait_for(f"{status} && getComputedStyle({status}).visibility === 'visible' && {status}.innerText !== ''")
    assert "This page has to be served: run python3 -m http.server" in page.value(f"{status}.innerText")


@needs_browser
def test_a_browser_without_webassembly_is_told(demo: Demo, tmp_path: Path) -> None:
    with served(demo.web) as address, chromium.page(tmp_path, "--js-flags=--jitless") as tab:
        assert written(tab, address, text="x")["error"].startswith("This browser refuses WebAssembly")


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_phone(demo: Demo, page: Page, dark: bool) -> None:
    with served(demo.web) as address:
        page.resize(PHONE, 844, phone=True, dark=dark)
        written(page, address, text=TEXT, temperature=0, count=300)
        assert page.value("document.documentElement.scrollWidth") == PHONE
        background = page.value("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(21, 24, 28)" if dark else "rgb(244, 245, 247)")
        # The text that is typed lies exactly over its copy, which the model's text goes on from.
        boxes = "['text', 'mirror'].map(id => JSON.stringify(document.getElementById(id).getBoundingClientRect()))"
        assert len(set(page.value(boxes))) == 1
        # It follows what the model writes, but leaves the text in view while somebody types.
        paper = "document.querySelector('.paper')"
        assert page.value(f"{paper}.scrollTop") > 100
        page.value(f"document.getElementById('text').focus({{ preventScroll: true }}); {paper}.scrollTop = 0")
        page.value("document.getElementById('text').dispatchEvent(new Event('input'))")
        page.wait_for(SETTLED)
        assert page.value(f"{paper}.scrollTop") == 0
        page.call("Emulation.clearDeviceMetricsOverride")


def small(folder: Path, entries: Mapping[str, object] = MappingProxyType({}), **options: int) -> Path:
    """A step file of a few numbers, with other entries in its sidecar where they are given."""
    folder.mkdir(exist_ok=True)
    path = step_model.write(folder, **options)
    for file in folder.glob("*.onnx"):
        document = json.loads(sidecar_path(file).read_text())
        document |= {"model_sha256": sha256(file), **entries}
        sidecar_path(file).write_text(json.dumps(document))
    return path


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """A step file of 23 tokens, which are no bytes, without an end and without a file for chunks."""
    path = small(tmp_path, vocabulary=23, chunk=1)
    sidecar_path(path).rename(tmp_path / "it's 23_step.onnx.json")
    return path.rename(tmp_path / "it's 23_step.onnx")


@needs_browser
def test_tokens_without_text_are_numbers(numbers: Path, onnxruntime_web: Path, page: Page, tmp_path: Path) -> None:
    create_bundle(BundleRequest(numbers, tmp_path / "bundle", onnxruntime_web=onnxruntime_web, samples=0))
    wanted = generated(numbers, [1, 2, 3], 50, temperature=1.5, seed=2**62)
    with served(tmp_path / "bundle" / "web") as address:
        shown = written(page, address, text="1, 2\n3", temperature=1.5, seed=2**62, count=50)
        assert shown["tokens"] == wanted
        assert page.value("document.getElementById('written').textContent") == "".join(f", {t}" for t in wanted)
        page.value("document.getElementById('text').value = '1, 23'")
        page.value("document.getElementById('text').dispatchEvent(new Event('input'))")
        said = page.value("document.getElementById('status').textContent")
        assert said == "23 is not a token: tokens are numbers from 0 to 22."
        # Broken logits choose nothing.
        choices = "[[NaN, 1, 2], [1, NaN, 2], [-Infinity, -Infinity], [Infinity, 1], [-Infinity, 1]]"
        choose = "logits => { try { return choose(logits, 1, 0.5) } catch (error) { return error.message } }"
        chosen = page.value(f"import('./sampling.js').then(({{ choose }}) => {choices}.map({choose}))")
        assert chosen[4] == 1 and all("not finite" in message for message in chosen[:4])


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder that looks like npm's package."""
    folder = tmp_path / "node_modules" / "onnxruntime-web"
    (folder / "dist").mkdir(parents=True)
    (folder / "package.json").write_text('{"name": "onnxruntime-web", "version": "1.2.3"}')
    for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"):
        (folder / "dist" / name).write_text(f"// {name}")
    return folder


def test_a_web_bundle_is_a_bundle(
    numbers: Path, package: Path, tmp_path: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked like any other; the page's list names every file it needs; npm's folder is found by itself."""
    monkeypatch.chdir(tmp_path)
    made = localattn("bundle", numbers, "-o", "bundle", "--web")
    assert made.code == 0, made.err
    assert localattn("bundle", "verify", "bundle").code == 0
    listed = json.loads((tmp_path / "bundle/web/page.json").read_text())
    assert (listed["onnxruntime_web"], listed["prefill"]) == ("1.2.3", None)
    found = {path.relative_to(tmp_path / "bundle/web").as_posix() for path in (tmp_path / "bundle/web").rglob("*.*")}
    assert {name.replace("%20", " ") for name in listed["files"]} | {"page.json"} == found
    assert "python3 -m http.server --directory web" in (tmp_path / "bundle/README.md").read_text()
    (tmp_path / "bundle/web/step.js").write_text("changed")
    assert localattn("bundle", "verify", "bundle").code == 1


def test_a_runtime_that_does_not_fit_is_refused(
    numbers: Path, package: Path, tmp_path: Path, localattn: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    def refusal(model: Path, *options: object) -> str:
        given = options or ("--web", "--onnxruntime-web", package)
        finished = localattn("bundle", model, "-o", tmp_path / "bundle", *given)
        assert finished.code == 2 and not (tmp_path / "bundle").exists()
        return " ".join(finished.err.split())

    assert "it needs --web" in refusal(numbers, "--onnxruntime-web", package)
    assert "one for --triton and another for --web" in refusal(numbers, "--web", "--triton")
    assert "onnxruntime-web. It has no readable package.json" in refusal(
        numbers, "--web", "--onnxruntime-web", tmp_path
    )
    (package / "dist" / "ort-wasm-simd-threaded.wasm").unlink()
    assert "It has no dist/ort-wasm-simd-threaded.wasm" in refusal(numbers)
    (package / "package.json").write_text('{"name": "onnxruntime-node", "version": "1"}')
    assert "It is 'onnxruntime-node'" in refusal(numbers)


def test_a_model_that_cannot_go_on_a_page_is_refused(package: Path, tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(UsageError) as refused:
            create_bundle(BundleRequest(path, tmp_path / "bundle", onnxruntime_web=package))
        assert not (tmp_path / "bundle").exists()
        return str(refused.value)

    pair = small(tmp_path / "pair", batch=2)
    assert "It continues 2 sequences at once" in refusal(pair)
    assert "prefill.onnx is a prefill file" in refusal(pair.with_suffix(".prefill.onnx"))
    assert "no bf16 kernels" in refusal(small(tmp_path / "bf16", {"dtype": "bf16"}))
    assert "It needs whole sequences of 1 positions" in refusal(small(tmp_path / "full", {"step": None}, chunk=1))
    alone = small(tmp_path / "alone", chunk=1)
    sidecar_path(alone).unlink()
    assert "which describes its caches" in refusal(alone)
    # As a LocalMHA is: embeddings come in.
    part = read_model_part(small(tmp_path / "embeddings"))
    embeddings = [TensorSpec("x", "float32", (1, 1, 16)) if x.name == "tokens" else x for x in part.inputs]
    with pytest.raises(UsageError, match=r"the file has x float32 \[1, 1, 16\]"):
        check_web_model(replace(part, inputs=embeddings))
