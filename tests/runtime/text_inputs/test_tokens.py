"""Rows of tokens look like those of use: special tokens where the tokenizer puts them, text, padding; or ranks."""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localattn.core.tensors import TensorSpec
from localattn.core.text.read import passages
from localattn.runtime.text_inputs.rows import arrays_of_rows, count_tokens, fill, rows_of_use
from localattn.runtime.text_inputs.tally import Tally
from localattn.runtime.text_inputs.tokens import ByteTokens, DrawnTokens, TextTokens, Tokens, open_tokens

from ...support import tokenizer_folder
from ...support.tokenizer_folder import BOS, END, EOS, USER, VOCABULARY

SPECS = [TensorSpec("input_ids", "int64", ("batch", "seq")), TensorSpec("attention_mask", "int64", ("batch", "seq"))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers")
    tokenizer_folder.write(tmp_path)
    return tmp_path


def encoder_folder(path: Path, **names: Any) -> Path:
    """Write a tokenizer that puts [CLS] before a text and [SEP] after it."""
    from tokenizers import processors

    tokenizers = pytest.importorskip("tokenizers")
    tokenizer_folder.write(path, template=None)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"cls_token": "<s>", "sep_token": "</s>", **names}))
    return path


def opened(*folders: Path, limit: int = VOCABULARY, config: dict[str, Any] | None = None) -> Tokens:
    found = open_tokens(folders, limit, config)
    assert found is not None
    return found


def text_of(ids: np.ndarray[Any, Any]) -> str:
    return bytes(int(x) for x in ids if x < 256).decode("utf-8", errors="ignore")


def test_rows_begin_as_the_tokenizer_begins_them(folder: Path) -> None:
    tokens = opened(folder)
    assert isinstance(tokens, TextTokens) and tokens.opening == "<s>"
    assert tokens.row(0, 40)[0] == BOS and len(tokens.row(0, 40)) == 40
    assert text_of(tokens.row(0, 40)).startswith("The ferry left the island")
    assert tokens.describe(12, 4096) == "12 rows of text, 4,096 tokens, <s> first"


def test_a_row_that_is_cut_keeps_what_the_tokenizer_adds_last(tmp_path: Path) -> None:
    tokens = opened(encoder_folder(tmp_path))
    for length in (3, 40, 30_000):
        row = tokens.row(0, length)
        assert (row[0], row[-1], len(row)) == (BOS, EOS, length)
        assert set(row[1:-1].tolist()).isdisjoint({BOS, EOS})


@pytest.mark.parametrize("names, pad, left", [
    ({"pad_token": "<end>"}, END, False),
    ({"pad_token": {"content": "<end>"}, "padding_side": "left"}, END, True),
    ({"eos_token": "</s>"}, 0, False),
])  # fmt: skip
def test_padding_is_the_tokenizers(tmp_path: Path, names: dict[str, Any], pad: int, left: bool) -> None:
    tokens = opened(encoder_folder(tmp_path, **names))
    assert (tokens.pad, tokens.left) == (pad, left)


def test_add_bos_token_of_the_configuration_counts(tmp_path: Path) -> None:
    path = encoder_folder(tmp_path, bos_token="<user>", add_bos_token=True, eos_token="<end>", add_eos_token=True)
    row = opened(path).row(0, 20)
    assert row[:2].tolist() == [USER, BOS] and row[-2:].tolist() == [EOS, END]


def test_other_openings_are_tried(folder: Path) -> None:
    found = {opening.name: opening.ids for opening in opened(folder).openings}
    assert found["<user> first"] == (USER,) and found["<end> first"] == (END,) and found["</s> first"] == (EOS,)
    assert "<s> first" not in found
    if "a chat" in found:  # Jinja is installed
        assert found["a chat"][:2] == (BOS, USER)


def test_masks_stand_behind_what_begins_a_text(tmp_path: Path) -> None:
    tokens = opened(encoder_folder(tmp_path, mask_token="<user>"))
    assert {opening.name: opening.ids for opening in tokens.openings}["<user> second"] == (BOS, USER)


def test_tokens_without_a_row_are_left_out_and_counted(folder: Path) -> None:
    tokens = opened(folder, limit=0xF0)
    assert tokens.is_text and tokens.row(0, 2000).max() < 0xF0
    assert any("are outside the model's vocabulary" in note for note in tokens.notes)


@pytest.mark.parametrize("content, why", [
    ("{", "tokenizer.json is not used"),
    (None, "belongs to another model"),
])  # fmt: skip
def test_a_tokenizer_that_does_not_fit_is_told(folder: Path, content: str | None, why: str) -> None:
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    tokens = opened(folder, limit=100)
    assert isinstance(tokens, DrawnTokens) and why in tokens.why_no_text


def test_a_tokenizer_that_knows_no_word_of_the_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    unknown = tokenizers.models.WordLevel({"?": 0, "w": 1}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(unknown)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = opened(tmp_path, limit=500)
    assert not tokens.is_text and "become one token" in tokens.why_no_text


def test_a_missing_package_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokens = opened(folder, config={"bos_token_id": 3})
    assert not tokens.is_text and tokens.row(0, 5)[0] == 3
    assert "the package tokenizers is not installed" in tokens.describe(1, 5) and "pip install" in tokens.describe(1, 5)


def test_models_of_bytes_read_text_as_bytes(tmp_path: Path) -> None:
    tokens = opened(tmp_path, limit=256)
    assert isinstance(tokens, ByteTokens) and text_of(tokens.row(0, 30)) == "The ferry left the island at s"


def test_drawn_tokens_have_ranks_behind_a_special_one() -> None:
    tokens = opened(limit=1000, config={"bos_token_id": 5, "eos_token_id": [7, 8], "pad_token_id": 9})
    row = tokens.row(0, 100_000)
    assert row[0] == 5 and row.max() < 1000 and tokens.pad == 9
    assert {opening.ids for opening in tokens.openings} == {(7,), (8,)}
    counts = np.bincount(row, minlength=1000)
    # The weight of the first hundred is the sum of 1 / (id + 10) over them, of that over all.
    weights = 1 / (np.arange(1000) + 10)
    assert abs(counts[:100].sum() / counts.sum() - weights[:100].sum() / weights.sum()) < 0.01
    assert (tokens.row(1, 50) != tokens.row(2, 50)).any() and (tokens.row(1, 50) == tokens.row(1, 50)).all()


def test_tokens_that_only_the_generation_configuration_states_are_tried(tmp_path: Path) -> None:
    """Chat models end a turn with one that `config.json` does not name; folders without tokenizer.json have it too."""
    stated = {"bos_token_id": 6, "eos_token_id": [7, 9], "decoder_start_token_id": 11}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    tokens = opened(tmp_path, limit=1000, config={"bos_token_id": 5, "eos_token_id": 7})
    assert tokens.opening == "bos_token_id 5"
    assert {opening.ids for opening in tokens.openings} == {(6,), (7,), (9,), (11,)}


def test_no_tokens_without_a_vocabulary(tmp_path: Path) -> None:
    assert open_tokens([tmp_path], None) is None


@pytest.mark.parametrize("pads", [True, False])
def test_rows_of_use(folder: Path, pads: bool) -> None:
    tokens = opened(folder)
    rows = rows_of_use(tokens, 4096, 1024, 4096, pads=pads)
    assert rows[0].length == 1025  # longer than two windows of 512
    assert sum(row.length for row in rows) <= 4096 + 200
    assert {(row.before > 0, row.after > 0) for row in rows} == (
        {(False, False), (True, False), (False, True)} if pads else {(False, False)}
    )
    assert all(row.ids[0] == BOS for row in rows if not row.opened)
    text = "".join(text_of(row.ids) for row in rows)
    scripts = {unicodedata.name(letter, "").split(" ")[0] for letter in text}
    assert {"CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "HIRAGANA", "HANGUL", "THAI"} <= scripts
    assert {row.ids[0] for row in rows if row.opened} >= {USER, END, EOS}


@pytest.mark.parametrize("longest", [1, 2, 7, 33])
def test_rows_fit_the_model(folder: Path, longest: int) -> None:
    for row in rows_of_use(opened(folder), longest, 1024, 4096, pads=True):
        assert 1 <= row.length <= longest and len(row.ids)


def test_rows_become_arrays(folder: Path) -> None:
    tokens = opened(folder)
    rows = [row for row in rows_of_use(tokens, 256, 64, 4096, pads=True) if row.before][:1]
    drawn = {spec.name: np.zeros((3, rows[0].length), np.int64) for spec in SPECS}
    arrays = arrays_of_rows(rows, SPECS, drawn, tokens.pad)
    before = rows[0].before
    assert (arrays["attention_mask"][:, :before] == 0).all() and (arrays["attention_mask"][:, before:] == 1).all()
    assert (arrays["input_ids"][:, :before] == tokens.pad).all() and (arrays["input_ids"][:, before] == BOS).all()
    assert count_tokens(arrays, SPECS) == (3, 3 * len(rows[0].ids))


def test_drawn_inputs_are_filled_where_their_mask_keeps_tokens(folder: Path) -> None:
    tokens = opened(folder)
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    filled = fill({"input_ids": np.full((2, 5), 99), "attention_mask": mask}, SPECS, tokens, 0)["input_ids"]
    assert filled[0, 2] == BOS and filled[1, 0] == BOS
    assert (filled[mask == 0] == tokens.pad).all() and 99 not in filled


# Sentences of scripts of which the text has one line or none.
RARE = {
    "Georgian": "თბილისი საქართველოს დედაქალაქია. ბავშვები სკოლაში დადიან და ქართულ ენას სწავლობენ.",
    "Amharic": "አዲስ አበባ የኢትዮጵያ ዋና ከተማ ናት። ልጆች በየቀኑ ወደ ትምህርት ቤት ይሄዳሉ። ውሃ ለሕይወት አስፈላጊ ነው።",
    "Khmer": "ភ្នំពេញ គឺជារាជធានីនៃប្រទេសកម្ពុជា។ កុមារទៅសាលារៀនរាល់ថ្ងៃ។",
}


@pytest.mark.parametrize("script", [*RARE, "many"])
def test_a_tokenizer_of_a_rare_script_has_a_row_of_its_own_words(script: str, tmp_path: Path) -> None:
    """The shipped text becomes bytes there, and tokens of use would never be compared."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=made.pre_tokenizer.alphabet(), special_tokens=["<s>"], show_progress=False
    )
    texts = [RARE[script]] if script in RARE else [passage.text for passage in passages("calibration")]
    made.train_from_iterator(texts, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
    tokens = opened(tmp_path, limit=2000)
    rows = rows_of_use(tokens, 512, 64, 4096, pads=True)
    own = [row for row in rows if row.name == "words of its tokenizer first"]
    assert rows[0].length == 65  # longer than two windows of 32, whatever the script is
    if script == "many":
        assert not own and not tokens.notes
        return
    (row,) = own
    assert row.ids[0] == rows[0].ids[0] == made.token_to_id("<s>")
    letters = [unicodedata.name(x, "") for x in made.decode(row.ids[1:161].tolist()) if x.isalpha()]
    assert letters and {name.split(" ")[0] for name in letters} == {script.upper().replace("AMHARIC", "ETHIOPIC")}
    assert "the tokenizer knows few words of the text" in Tally(tokens).describe()
