"""Text of a step file's folder: its tokenizer, streaming, stop tokens, sampling and chat template."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from localattn.core.errors import MissingDependency, UsageError
from localattn.runtime.generation.chat import render_chat
from localattn.runtime.generation.defaults import FolderDefaults, read_defaults
from localattn.runtime.generation.sampler import Sampler
from localattn.runtime.generation.sampling import Sampling
from localattn.runtime.generation.tokenizer import FolderTokenizer, TextStream

from ...support import tokenizer_folder
from ...support.tokenizer_folder import BOS, EOS

pytest.importorskip("tokenizers")
TEXT = "naïve π – 漢字 🙂🏳️‍🌈\n end"


@pytest.fixture
def tokenizer(tmp_path: Path) -> FolderTokenizer:
    tokenizer_folder.write(tmp_path, {"eos_token_id": [EOS, 259]})
    found = FolderTokenizer.open(tmp_path)
    assert found is not None
    return found


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert FolderTokenizer.open(tmp_path) is None
    assert read_defaults(tmp_path, None) == FolderDefaults()


def test_text_goes_there_and_back(tokenizer: FolderTokenizer) -> None:
    assert tokenizer.encode(TEXT) == [BOS, *TEXT.encode()] and tokenizer.encode("a<end>", special=False) == [97, 259]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT and tokenizer.size == 260
    assert tokenizer.token("</s>") == EOS and tokenizer.token("no such") is None


def test_characters_appear_when_their_last_byte_has_come(tokenizer: FolderTokenizer) -> None:
    stream, shown = TextStream(tokenizer), ""
    for count, byte in enumerate(TEXT.encode(), start=1):
        shown += stream.add(byte)
        whole = TEXT.encode()[:count].decode("utf-8", "ignore")
        assert shown == whole, "neither late nor half"
    assert shown + stream.end() == TEXT


def test_special_tokens_add_nothing_and_broken_bytes_are_shown_in_the_end(tokenizer: FolderTokenizer) -> None:
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in (97, BOS, 98, EOS)] == ["a", "", "b", ""]
    assert stream.add(0xE6) == "" and "�" in stream.end()
    endless = TextStream(tokenizer)
    shown = [endless.add(0x80) for _ in range(40)]
    assert any("�" in part for part in shown), "bytes that never become a character are not held for ever"
    assert len(endless._tokens) < 40


def test_words_with_spaces_stream_as_they_read_whole(tmp_path: Path) -> None:
    """A tokenizer whose decoder puts spaces between words: a word alone reads differently than after another."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "▁one": 1, "▁two": 2, "▁three": 3, ".": 4}, unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words.save(str(tmp_path / "tokenizer.json"))
    found = FolderTokenizer.open(tmp_path)
    assert found is not None
    tokens = [1, 2, 3, 4, 1, 3]
    stream = TextStream(found)
    parts = [stream.add(token) for token in tokens]
    assert "".join(parts) + stream.end() == found.decode(tokens) and parts[1] == " two"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": 1}', b"\xff\xfe", b"{}" + b" " * 100])
def test_a_broken_tokenizer_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        FolderTokenizer.open(tmp_path)


def changed(folder: Path, **entries: object) -> None:
    """Write the tokenizer with other entries."""
    tokenizer_folder.write(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_truncation_and_padding_for_training_leave_prompts_alone(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    changed(
        tmp_path,
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            **{"strategy": {"Fixed": 2000}, "direction": "Left", "pad_to_multiple_of": None},
            **{"pad_id": 3, "pad_type_id": 0, "pad_token": "x"},
        },
    )
    stored = FolderTokenizer.open(tmp_path)
    assert stored is not None and stored.encode("a long prompt") == tokenizer.encode("a long prompt")


def test_without_the_package_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer_folder.write(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependency, match="transformers"):
        FolderTokenizer.open(tmp_path)


def defaults(folder: Path, tokenizer: FolderTokenizer | None, **files: object) -> FolderDefaults:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_defaults(folder, tokenizer)


def test_stop_tokens_come_from_the_first_file_that_has_some(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    assert read_defaults(tmp_path, tokenizer).stop == (EOS, 259)
    assert defaults(tmp_path, tokenizer, generation_config={}, config={"eos_token_id": 3}).stop == (3,)
    (tmp_path / "config.json").unlink()
    assert read_defaults(tmp_path, tokenizer).stop == (EOS,), "the tokenizer's own"


def test_settings_of_the_folder_and_options_over_them(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    """As transformers reads the file: greedy unless do_sample, 50 tokens where top_k is not stated, 0 for all."""
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2}
    found = defaults(tmp_path, tokenizer, generation_config=config)
    assert found.settings() == {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2, "top_k": 50}
    assert found.settings(top_p=0.5, temperature=None)["top_p"] == 0.5
    assert found.settings(do_sample=False) == {"temperature": 0.0, "repetition_penalty": 1.2}
    found = defaults(tmp_path, tokenizer, generation_config={"temperature": 0.6, "top_k": 0})
    assert found.settings() == {"temperature": 0.0}
    assert found.settings(do_sample=True) == {"temperature": 0.6}
    assert found.settings(top_k=7) == {"temperature": 0.6, "top_k": 7}, "a value for drawing asks for it"
    assert FolderDefaults().settings() == {} and FolderDefaults().settings(top_k=3) == {"top_k": 3}


@pytest.mark.parametrize(
    "config",
    [
        [],
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"top_k": 1.5},
        {"top_k": True},
        {"eos_token_id": "</s>"},
        {"eos_token_id": [-1]},
        {"eos_token_id": list(range(5000))},
        {"repetition_penalty": float("inf")},
        {"max_new_tokens": 0},
        {"max_length": 20.0},
        {"do_sample": "yes"},
        {"num_beams": "3"},
        {"length_penalty": []},
        {"stop_strings": [1]},
        {"stop_strings": ""},
        {"max_time": float("nan")},
        {"suppress_tokens": [1, None]},
        {"watermarking_config": 3},
    ],
)
def test_wrong_values_in_the_folder_are_said(tmp_path: Path, tokenizer: FolderTokenizer, config: object) -> None:
    with pytest.raises(UsageError, match="generation_config"):
        defaults(tmp_path, tokenizer, generation_config=config)


def test_the_folder_says_how_many_tokens(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    found = defaults(tmp_path, tokenizer, generation_config={"max_length": 20, "max_new_tokens": 7})
    assert found.most_tokens(100) == 7, "the prompt does not count, and it is the first to be asked, as in transformers"
    found = defaults(tmp_path, tokenizer, generation_config={"max_length": 20})
    assert (found.most_tokens(5), found.most_tokens(19)) == (15, 1)
    with pytest.raises(UsageError, match="allows 20"):
        found.most_tokens(20)
    assert defaults(tmp_path, tokenizer, generation_config={}).most_tokens(5) is None


def test_what_was_chosen_counts_from_then_on() -> None:
    tied = np.zeros((2, 20), np.float32)
    tied[:, 3], tied[:, 5] = 1.0, 0.9
    fresh = Sampler(Sampling(temperature=0, repetition_penalty=1.3), 0, range(2))
    fresh.see(np.array([[0], [0]]), 20)
    assert [fresh.choose(tied).tolist() for _ in range(2)] == [[3, 3], [5, 5]]
    with pytest.raises(UsageError, match="repetition_penalty"):
        Sampling(repetition_penalty=0)


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate(texts)]


def test_a_chat_reads_as_transformers_writes_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer_folder.write(tmp_path)
    found = read_defaults(tmp_path, FolderTokenizer.open(tmp_path))
    asked = messages(" Hello ", "Hi.", "ünïcode <end> {{ 7 * 7 }}")
    other = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    wanted = other.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert render_chat(found, asked) == wanted and "{{ 7 * 7 }}" in wanted


def test_templates_come_from_their_own_file_first(tmp_path: Path, tokenizer: FolderTokenizer) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }}{% generation %}!{% endgeneration %}")
    assert render_chat(read_defaults(tmp_path, tokenizer), messages("a", "b")) == "2!"
    (tmp_path / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert (
        render_chat(defaults(tmp_path, tokenizer, tokenizer_config={"chat_template": several}), messages("a")) == "yes"
    )
    with pytest.raises(UsageError, match="no chat template"):
        render_chat(defaults(tmp_path, tokenizer, tokenizer_config={}), messages("a"))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
        ("{% include 'x' %}", "no loader"),
        ("{{ 'a' * 10 ** 12 }}", "MemoryError"),
        ("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "16777216 characters"),
    ],
)
def test_a_template_has_no_way_out(template: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        render_chat(FolderDefaults(template=template), messages("a"))
    assert says in caught.value.why, caught.value.why


def test_a_template_that_never_ends_is_stopped() -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UsageError, match="seconds"):
        render_chat(FolderDefaults(template=endless), messages("a"), seconds=1.5)
