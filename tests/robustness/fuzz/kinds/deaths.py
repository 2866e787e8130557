"""Cases about native code that panics, aborts, crashes or takes all: in tokenizers, in runtimes, in a named library."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from ....support.hostile_models import HOSTILE, SOUND
from ..case import Case, Folder
from ..groups import Files, gather
from ..seeds import Seeds
from .mutate import json_bytes, mutate_document
from .mutate_onnx import mutate_onnx

_DEATHS = (
    "segv", "noise", "abort", "bus", "ill", "fpe", "terminate", "exit", "exit1", "killed", "rust_memory", "cpu",
    "memory",
    "brood", "prints", "panic",
)  # fmt: skip
_ENDLESS = ("hang", "deaf")
_HARMLESS = ("prints", "panic")

_REGEXES = (
    "(x+x+)+y", "(a|a)*b", "^(([a-z])+.)+[A-Z]([a-z])+$", r"(.*)*\1z", "(?:(?:(?:a?){50}){50}){50}b",
    "a{1,100000}{1,9}",
    "", "(", "[", "(?P<n>a)\\k<n>", "\\p{L}+", "(?<=a*)b", "(?i)\u0130", "\\G", "(?:)*", "a**", "(?R)",
    "\\x{110000}", ".",
    "(?:a|ab|abc)*?$", "\\K", "(?~a)", "\ud800",
)  # fmt: skip
_PROMPTS = ("ab", "a" * 5000 + "!", "x" * 5000, "ab cd\n", "\u0130" * 100, "\u202e\u0301" * 50, "a" * 100_000)


def _charsmap(random: Random) -> str:
    """A precompiled map of characters: any bytes behind a length that may fit."""
    size = random.choice((0, 4, 8, 64, 1 << 31, (1 << 32) - 1))
    content = struct.pack("<I", size) + random.randbytes(random.choice((0, 3, 4, 8, 64, 300)))
    return base64.b64encode(content).decode()


def _pattern(random: Random) -> dict[str, str]:
    return {random.choice(("Regex", "Regex", "String")): random.choice(_REGEXES)}


def _normalizer(random: Random, depth: int = 0) -> Any:
    text = random.choice(("a", "b" * 1000, "", "\u0130", "a" * 100_000))
    if depth < 2 and random.random() < 0.2:
        inner = [_normalizer(random, depth + 1) for _ in range(random.choice((1, 2, 9)))]
        return {"type": "Sequence", "normalizers": inner}
    return random.choice(
        (
            {"type": "Replace", "pattern": _pattern(random), "content": text},
            {"type": "Prepend", "prepend": text},
            {"type": "Precompiled", "precompiled_charsmap": _charsmap(random)},
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
             "lowercase": True},
            {"type": random.choice(("NFC", "NFKD", "Nmt", "Lowercase", "StripAccents", "ByteLevel"))},
            None,
            {"type": random.choice(("", "None", "Sequence"))},
        )
    )  # fmt: skip


def _pre_tokenizer(random: Random) -> Any:
    behavior = random.choice(("Isolated", "Removed", "MergedWithPrevious", "Contiguous", "x"))
    split = {"type": "Split", "pattern": _pattern(random), "behavior": behavior, "invert": random.random() < 0.5}
    return random.choice(
        (
            split, split, split, None, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
            {"type": "Metaspace", "replacement": random.choice(("\u2581", "", "ab")), "prepend_scheme": "always"},
            {"type": "Sequence", "pretokenizers": [split] * random.choice((0, 2, 3000))},
            {"type": "CharDelimiterSplit", "delimiter": random.choice(("a", "", "ab"))}, {"type": "Digits"},
            {"type": "FixedLength", "length": random.choice((0, 1, -1, 1 << 40))}, {"type": "UnicodeScripts"},
        )
    )  # fmt: skip


def _post_processor(random: Random) -> Any:
    sequence = {"Sequence": {"id": random.choice(("A", "A", "B", "C")), "type_id": 0}}
    special = {"SpecialToken": {"id": random.choice(("X", "Y")), "type_id": 0}}
    count = random.choice((0, 1, 2, 3000))
    listed = random.choice(([1], [1] * 3000, [4_000_000_000], [], [-1]))
    template = {
        "type": "TemplateProcessing",
        "single": [special] * count + [sequence] * random.choice((0, 1, 2)),
        "pair": [sequence],
        "special_tokens": {"X": {"id": "X", "ids": listed, "tokens": ["x"] * random.choice((len(listed), 0))}},
    }
    return random.choice(
        (
            template, {"type": "Sequence", "processors": [template] * random.choice((1, 2, 30))},
            {"type": "BertProcessing", "sep": ["x", 1], "cls": ["y", random.choice((2, 4_000_000_000))]},
            {"type": "RobertaProcessing", "sep": ["x", 1], "cls": ["y", 2], "trim_offsets": True,
            "add_prefix_space": True},
            {"type": "ByteLevel", "trim_offsets": True}, None,
        )
    )  # fmt: skip


def _decoder(random: Random) -> Any:
    return random.choice(
        (
            {"type": "Replace", "pattern": _pattern(random), "content": "b" * 1024}, {"type": "ByteFallback"},
            {"type": "CTC", "pad_token": "a", "word_delimiter_token": "", "cleanup": True}, {"type": "Fuse"},
            {"type": "Strip", "content": "a", "start": random.choice((0, 1 << 40)), "stop": 1}, {"type": "ByteLevel"},
            {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}, None,
            {"type": "WordPiece", "prefix": "", "cleanup": True}, {"type": "BPEDecoder", "suffix": ""},
        )
    )  # fmt: skip


def _model(random: Random, vocabulary: dict[str, int]) -> Any:
    scores = [["<unk>", 0.0], *([key, random.choice((-1.0, float("nan"), 1e308))] for key in vocabulary)]
    return random.choice(
        (
            {"type": "BPE", "vocab": vocabulary, "merges": random.choice((["a b"], ["a b", "ab q"], ["a a"] * 9,
            [" "]))},
            {"type": "BPE", "vocab": vocabulary | {"ab": 22}, "merges": [["a", "b"]], "dropout": random.choice((0, 1,
            2))},
            {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True, "unk_token": "<none>"},
            {"type": "Unigram", "vocab": scores, "unk_id": random.choice((0, 77, None, -1))},
            {"type": "Unigram", "vocab": [], "unk_id": None},
            {"type": "WordPiece", "vocab": vocabulary, "unk_token": random.choice(("a", "none")),
             "continuing_subword_prefix": "", "max_input_chars_per_word": random.choice((0, 100, 10**9))},
            {"type": "WordLevel", "vocab": {key: value * 40_000_000 for key, value in vocabulary.items()},
            "unk_token": "a"},
        )
    )  # fmt: skip


def _tokenizer(random: Random, seeds: Seeds) -> Case:
    """A tokenizer that panics, grows or does not end; its text is given or comes from a chat template."""
    document = json.loads(seeds.tokenizer["tokenizer.json"])
    for part in random.sample(("normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "rest"),
                              random.choice((1, 1, 2, 3))):  # fmt: skip
        if part == "normalizer":
            document[part] = _normalizer(random)
        elif part == "pre_tokenizer":
            document[part] = _pre_tokenizer(random)
        elif part == "post_processor":
            document[part] = _post_processor(random)
        elif part == "decoder":
            document[part] = _decoder(random)
        elif part == "model":
            document[part] = _model(random, document["model"].get("vocab") or {"a": 0})
        elif random.random() < 0.5:
            document["padding"] = {
                "strategy": {"Fixed": random.choice((4, 10**6, 10**12))}, "direction": "Right",
                "pad_to_multiple_of": random.choice((None, 0, 8)), "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
            }  # fmt: skip
            document["truncation"] = {"direction": "Left", "max_length": random.choice((0, 1, 10**9)),
                                      "strategy": "LongestFirst", "stride": random.choice((0, 10**9))}  # fmt: skip
        else:
            document = mutate_document(random, document)
            if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
                break
    files: Files = {path.name: path.read_bytes() for path in sorted(seeds.step.parent.iterdir())}
    files |= {**seeds.tokenizer, "tokenizer.json": json_bytes(document), "prompt": random.choice(_PROMPTS).encode()}
    command = ("generate", "{}/step.onnx", "--prompt-file", "{}/prompt", "--max-tokens", "2", "--provider", "cpu")
    return Case(files, command, own_process=random.random() < 0.2)


_TEMPLATES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__ }}", "{{ '\\ud800' }}",
    "{{ ('{0.__class__}').format(messages) }}", "{{ raise_exception.__globals__ }}", "{{ 10**10**8 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 'a'*1000000000 }}",
    "{% for a in range(99999) %}{{ 'a'*100000 }}{% endfor %}", "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ strftime_now('%0999999999d') }}", "\0{{ messages }}",
    "{% include '/etc/passwd' %}", "{{ raise_exception('\x1b[31m red \u202e ') }}", "{{ 'a'|center(999999999) }}",
    "{{ messages|tojson(indent=999999999) }}", "{{ (' '*200000)|wordwrap }}",
    "{% set x = [] %}{% for i in x %}{% endfor %}",
    "{{ messages[99] }}", "{{ messages[0]['content'] * 100000 }}", "{% block a %}{{ self.a() }}{% endblock %}",
    "{% raw %}",
    "{{ namespace(a=1).b.c.d }}", "{{ [1]|sort(attribute='a') }}", "{{ 'x'|attr('__class__') }}", "{{ 1/0 }}", "",
)  # fmt: skip


def _template(random: Random, seeds: Seeds) -> Case:
    """A chat template that escapes, grows or does not end."""
    files: Files = {path.name: path.read_bytes() for path in sorted(seeds.step.parent.iterdir())}
    files |= dict(seeds.tokenizer)
    text = random.choice(_TEMPLATES) + random.choice(("", "", "ab"))
    if random.random() < 0.5:
        files["chat_template.jinja"] = text.encode("utf-8", "surrogatepass")
    else:
        files["tokenizer_config.json"] = json_bytes({"chat_template": text})
    command = ("generate", "{}/step.onnx", "--chat", "--prompt", "ab", "--max-tokens", "2", "--provider", "cpu")
    return Case(files, command)


def _library(random: Random, seeds: Seeds) -> Case:
    """A library of kernels that dies as it is loaded: the user named it, and nothing is left of the command."""
    command, outputs = random.choice(
        (
            (("run", "{}/model.onnx", "--save-outputs", "{}/o/out.npz"), ("o/out.npz*",)),
            (("parity", "{}/model.onnx", "--against", "{}/other.onnx", "--seeds", "1", "-o", "{}/o/r.md"),
            ("o/r.md*",)),
            (("bench", "{}/model.onnx", "--rounds", "1", "--iterations", "1", "--duration", "0"), ()),
        )
    )  # fmt: skip
    death = random.choice(_DEATHS)
    files: Files = {**gather(seeds, ("model", "other")), "dying.so": seeds.dying, "o": Folder()}
    return Case(
        files,
        (*command, "--plugin-library", "{}/dying.so", *random.choice(((), ("-v",)))),
        outputs if death in _HARMLESS else (),
        environment={"LOCALATTN_TEST_DEATH": death, "LOCALATTN_TEST_FOLDER": "/dev/null"},
        own_process=True,
        names_code=True,
        must_fail=death not in _HARMLESS,
    )


def _runtime(random: Random, seeds: Seeds) -> Case:
    """A model that runtimes or their parsers may crash on, where another process answers for it."""
    if random.random() < 0.3:
        content = random.choice([*HOSTILE.values(), *SOUND.values()])()
    else:
        content = mutate_onnx(random, seeds.model.read_bytes())
    command = random.choice(
        (
            ("run", "{}/model.onnx", "--runtime", "openvino"), ("run", "{}/model.onnx", "--runtime", "openvino"),
            ("run", "{}/model.onnx", "--provider", "cpu"), ("inspect", "{}/model.onnx"),
            ("convert", "{}/model.onnx", "-o", "{}/o/c.onnx", "--standard-ops"),
        )
    )  # fmt: skip
    return Case({"model.onnx": content, "o": Folder()}, command, ("o/c.onnx*",), own_process=True)


_KINDS: tuple[Callable[[Random, Seeds], Case], ...] = (
    _tokenizer, _tokenizer, _tokenizer, _tokenizer, _template, _library, _library, _runtime, _runtime, _runtime,
)  # fmt: skip


def draw_death(random: Random, seeds: Seeds) -> Case:
    """Native code that panics, aborts, crashes, or takes all that there is."""
    return random.choice(_KINDS)(random, seeds)
