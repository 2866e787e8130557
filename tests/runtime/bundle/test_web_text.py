"""Text in and out on the page for browsers: tokens are those of Python, texts those of `localattn generate`."""

from __future__ import annotations

# ruff: noqa: F811 - the fixtures are imported
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import localattn as package
from localattn.core.errors import UsageError
from localattn.runtime.bundle.create import BundleRequest, create_bundle
from localattn.runtime.bundle.web_text import FILES, page_text

from ...support import tokenizer_folder
from ...support.browser import needs_browser
from ...support.chromium import Page
from ...support.onnxruntime_web import onnxruntime_web  # noqa: F401
from ...support.tokenizer_folder import VOCABULARY
from .test_web_page import STATE, page, served, small, written  # noqa: F401

tokenizers = pytest.importorskip("tokenizers")
WRITTEN = "document.getElementById('written').textContent"
TEXTS = [
    *("Größe: naïve café, 日本語 🙂", "don't, WE'LL  see\n\n\tdef f(x):\n    return x", "a<s>b</s> 1,234.5", " x", "…"),
    *("Hello world, this is a sentence.", "ＦＵＬＬ width ﬁ", "The year 2024!!", "tabs\tand\u00a0spaces"),
]


def printable(text: str) -> str:
    """What the page shows of a text: no control characters."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def folder(path: Path, change: Callable[[dict[str, Any]], None] = lambda document: None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    model = small(path, vocabulary=VOCABULARY)
    tokenizer_folder.write(path, {"do_sample": False})
    document = json.loads((path / "tokenizer.json").read_text())
    change(document)
    (path / "tokenizer.json").write_text(json.dumps(document))
    return model


@needs_browser
def test_the_page_reads_and_writes_text(onnxruntime_web: Path, page: Page, tmp_path: Path) -> None:
    """A text, a chat, and both again when the server is gone."""
    model = folder(tmp_path / "model")
    create_bundle(BundleRequest(model, tmp_path / "bundle", onnxruntime_web=onnxruntime_web, samples=0))
    settings: dict[str, Any] = {"text": "π? Größe 🙂", "temperature": 0, "count": 12}
    plain = package.generate(model, settings["text"], max_tokens=12, temperature=0)
    asked = package.generate(model, settings["text"], chat=True, max_tokens=12, temperature=0)
    off = "(document.getElementById('chat').checked = false, document.getElementById('write').click())"
    with served(tmp_path / "bundle" / "web") as address:
        chat = written(page, address, **settings)
        assert (chat["error"], chat["prompt"], chat["tokens"]) == ("", asked.prompt, asked.tokens)
        assert page.value(WRITTEN) == printable(asked.text) and "--chat" in page.value(
            "document.getElementById('command').textContent"
        )
        page.value(off)
        text = page.wait_for(
            f"{STATE}.then(state => !state.writing && state.prompt.length === {len(plain.prompt)} && state)"
        )
        assert (text["prompt"], text["tokens"]) == (plain.prompt, plain.tokens)
        assert page.value(WRITTEN) == printable(plain.text)
        page.wait_for("import('./page.js').then(({ state }) => state.offline)")
    offline = written(page, address, **settings)
    assert (offline["error"], offline["tokens"]) == ("", asked.tokens)


@needs_browser
def test_a_text_ends_with_its_token(onnxruntime_web: Path, page: Page, tmp_path: Path) -> None:
    model = folder(tmp_path / "model")
    free = package.generate(model, "a", max_tokens=30, temperature=0).tokens
    place = next(n for n, token in enumerate(free) if n > 3 and token not in free[:n])
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": free[place]}))
    (tmp_path / "model/tokenizer_config.json").unlink()
    create_bundle(BundleRequest(model, tmp_path / "bundle", onnxruntime_web=onnxruntime_web, samples=0))
    with served(tmp_path / "bundle" / "web") as address:
        ended = written(page, address, text="a", temperature=0, count=30)
        assert ended["tokens"] == free[: place + 1]
        assert page.value("document.getElementById('status').textContent") == "The model ended the text."
        assert page.value(WRITTEN) == printable(package.generate(model, "a", max_tokens=30, temperature=0).text)


def trained(kind: str) -> Any:
    """A tokenizer of a kind that real models have, trained on this repository's documentation."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["<unk>", "<s>", "</s>"]
    if kind == "byte-level BPE":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=2000, special_tokens=special, initial_alphabet=alphabet)
    elif kind == "BPE with byte fallback":  # Llama 2, Gemma
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(parts)
        every = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=2500, special_tokens=every)
    elif kind == "WordPiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=special)
    else:
        made = Tokenizer(models.Unigram())
        made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=1000, special_tokens=special, unk_token="<unk>")
    pages = sorted((Path(package.__file__).parent / "docs").glob("*.md"))
    made.train([str(path) for path in pages], trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


@needs_browser
@pytest.mark.parametrize("kind", ["byte-level BPE", "BPE with byte fallback", "WordPiece", "Unigram"])
def test_tokens_are_those_of_python(kind: str, page: Page, tmp_path: Path) -> None:
    made = trained(kind)
    for path in FILES.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "index.html").write_text("<!doctype html><title>x</title>")
    ids = [made.encode(text).ids for text in TEXTS]
    settings = {"tokenizer": "tokenizer.json", "config": None, "template": None, "stop": [], "checks": []}
    opened = f"import('./text.js').then(({{ Text }}) => Text.open({json.dumps(settings)}, location.href))"
    with served(tmp_path) as address:
        page.open(address)
        found = page.value(f"{opened}.then(text => {json.dumps(TEXTS)}.map(typed => text.tokens(typed, false)))")
        assert found == ids
        told = f"{opened}.then(text => {json.dumps(ids)}.map(all => {{ const add = text.stream(); "
        told += "return all.map(add).join('') + add() }))"
        assert page.value(told) == [made.decode(all_, skip_special_tokens=True) for all_ in ids]
        wrong = {**settings, "checks": [{"text": "abc", "ids": [1]}]}
        refused = f"import('./text.js').then(({{ Text }}) => Text.open({json.dumps(wrong)}, location.href))"
        assert "otherwise than the model's own" in page.value(f"{refused}.catch(error => error.message)")


def _kind(entry: str, kind: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document[entry] = {"type": kind}

    return change


@pytest.mark.parametrize(
    ("entry", "kind", "said"),
    [
        ("pre_tokenizer", "UnicodeScripts", "pre-tokenizer UnicodeScripts"),
        ("normalizer", "Nmt", "normalizer Nmt"),
        ("decoder", "CharDelimiter", "decoder CharDelimiter"),
        ("model", "WordLevel", "model WordLevel"),
    ],
)
def test_what_the_library_does_not_read_is_refused_by_name(entry: str, kind: str, said: str, tmp_path: Path) -> None:
    folder(tmp_path, _kind(entry, kind))
    with pytest.raises(UsageError, match="cannot go on a web page") as refused:
        page_text(tmp_path)
    assert said in refused.value.why


def test_a_template_that_the_library_does_not_read_is_refused(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% include 'other' %}{{ messages[0].content }}")
    with pytest.raises(UsageError, match="chat template") as refused:
        page_text(tmp_path)
    assert "tag 'include'" in refused.value.why


def test_the_libraries_are_those_that_are_recorded() -> None:
    for library in json.loads((FILES / "libraries.json").read_text()):
        assert hashlib.sha256((FILES / library["file"]).read_bytes()).hexdigest() == library["sha256"]
        licence = (FILES / f"LICENSE.{library['name'].rpartition('/')[2]}").read_text()
        assert {"MIT": "Permission is hereby granted", "Apache-2.0": "Apache License"}[library["license"]] in licence
