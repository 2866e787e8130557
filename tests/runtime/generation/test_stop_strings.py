"""Strings that end a text, against transformers' `StopStringCriteria`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localattn.core.errors import UsageError
from localattn.runtime.generation.stop_strings import StopStrings
from localattn.runtime.generation.tokenizer import FolderTokenizer

from ...support import tokenizer_folder

pytest.importorskip("tokenizers")


def byte_level(folder: Path) -> None:
    tokenizer_folder.write(folder)


def byte_fallback(folder: Path) -> None:
    """Write a tokenizer of words, with bytes for what they lack, as SentencePiece's."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefgh", "▁ab", "▁", "cd", "a▁c", "é"]
    found = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    found.normalizer = normalizers.Replace(" ", "▁")
    found.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    found.add_special_tokens(["<s>"])
    found.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("write", [byte_level, byte_fallback])
def test_a_text_ends_where_it_ends_in_transformers(write: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    write(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokenizer = FolderTokenizer.open(tmp_path)
    assert tokenizer is not None
    rng, seen = np.random.default_rng(0), 0
    common = [id for text in ("ab cdé<s>", "aab") for id in tokenizer.encode(text, special=False)]
    for strings in (["ab"], "b c", ["dé", "aaa"], ["<s>a"], ["a", "zzz"], ["abab"]):
        criteria = transformers.StopStringCriteria(theirs, strings)
        for _ in range(40):
            text = rng.choice(common, 12)
            if write is byte_fallback:
                text = np.where(rng.random(12) < 0.3, rng.integers(2, tokenizer.size, 12), text)
            stops = StopStrings(strings, tokenizer.text_of)
            stops.begin(text[:4], 1)
            for count in range(5, 13):
                wanted = bool(criteria(torch.from_numpy(text[None, :count]), None)[0])
                assert stops.add(0, int(text[count - 1])) == wanted, (strings, text[:count])
                seen += wanted
    assert seen > 20


def test_a_string_counts_where_it_ends_in_the_newest_token() -> None:
    texts = [b"a", b"b", b"abc", b"\xc3", b"\xa9"]
    stops = StopStrings(["ab", "é"], texts.__getitem__)
    stops.begin([[1, 0], [0, 0]], 2)
    assert [stops.add(row, token) for row, token in ((0, 1), (1, 3), (1, 4), (0, 2), (0, 0), (1, 1))] == [
        *(True, False, True, True, False, False)
    ], "begun in the prompt, in bytes, within a token, not again"
    with pytest.raises(UsageError, match="stop_strings"):
        StopStrings([""], texts.__getitem__)
    with pytest.raises(UsageError, match="stop_strings"):
        StopStrings([], texts.__getitem__)
