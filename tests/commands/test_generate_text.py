"""`localattn generate` with a tokenizer in the folder: text, stop tokens, chat, and options over the folder's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from localattn.commands.parts.token_output import printable
from localattn.runtime.generation.generator import Generator

from ..support import tokenizer_folder
from ..support.generate_terminal import Terminal
from ..support.models import step_model
from ..support.tokenizer_folder import BOS, END, EOS, USER, VOCABULARY

pytest.importorskip("tokenizers")
COMMAND = [sys.executable, "-m", "localattn.cli", "generate"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path: Path = step_model.write(tmp_path, vocabulary=VOCABULARY)
    tokenizer_folder.write(tmp_path, {"do_sample": False})
    return path


def greedy(model: Path, prompt: list[int], count: int) -> list[int]:
    return [int(t[0]) for t in Generator.open(model, "cpu").generate(prompt, count, temperature=0)]


def written(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


def test_text_goes_in_and_comes_out(model: Path, localattn) -> None:
    wanted = greedy(model, [BOS, *"π?".encode()], 40)
    done = localattn("generate", model, "--prompt", "π?", "--max-new-tokens", 40, "--format", "json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["prompt"] == [BOS, *"π?".encode()] and document["tokens"] == [wanted]
    assert document["text"] == [written(wanted)] and document["finish"] == "length"
    piped = subprocess.run(
        [*COMMAND, model, "--max-tokens", "40", "-q"], input="π?".encode(), capture_output=True, check=False
    )
    assert piped.returncode == 0 and piped.stdout.decode() == written(wanted), piped.stderr
    several = localattn("generate", model, "--prompt", "π?", "--max-tokens", 3, "--batch", 2)
    assert several.out.count(" of 2\n") == 2


def test_the_folder_says_how_and_options_say_otherwise(model: Path, localattn) -> None:
    def tokens(*options: object) -> list[int]:
        done = localattn("generate", model, "--prompt", "a", "--max-tokens", 12, "--format", "json", *options)
        assert done.code == 0, done.err
        return json.loads(done.out)["tokens"][0]

    prompt = [BOS, 97]
    assert tokens() == greedy(model, prompt, 12)
    generator = Generator.open(model, "cpu")

    def drawn(**settings: float) -> list[int]:
        return [int(t[0]) for t in generator.generate(prompt, 12, **settings)]

    assert tokens("--do-sample", "--seed", 3) == drawn(seed=3, top_k=50)
    assert tokens("--temperature", 2, "--top-k", 9) == drawn(temperature=2.0, top_k=9)
    penalised = tokens("--repetition-penalty", 9)
    assert penalised == drawn(temperature=0, repetition_penalty=9.0) != tokens() and len(set(penalised)) == 12
    (model.parent / "generation_config.json").write_text('{"do_sample": true, "temperature": 3.0, "top_p": 0.8}')
    assert tokens("--seed", 5) == drawn(temperature=3.0, top_k=50, top_p=0.8, seed=5) != tokens("--seed", 6)
    assert tokens("--no-do-sample") == greedy(model, prompt, 12)


def test_the_folder_says_how_many_tokens(model: Path, localattn) -> None:
    def count(*options: object) -> int:
        done = localattn("generate", model, "--prompt", "ab", "--format", "json", *options)
        assert done.code == 0, done.err
        return len(json.loads(done.out)["tokens"][0])

    (model.parent / "generation_config.json").write_text('{"max_length": 10}')
    assert (count(), count("--max-tokens", 12)) == (7, 12)
    (model.parent / "generation_config.json").write_text('{"max_length": 10, "max_new_tokens": 5}')
    assert count() == 5
    (model.parent / "generation_config.json").write_text('{"max_length": 2}')
    refused = localattn("generate", model, "--prompt", "ab")
    assert refused.code == 2 and "--max-tokens" in refused.err


def test_a_text_ends_with_its_stop_token(model: Path, localattn) -> None:
    free = greedy(model, [BOS, 97], 60)
    place = next(n for n, token in enumerate(free) if n > 3 and token not in free[:n])
    (model.parent / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, free[place]]}))
    done = localattn("generate", model, "--prompt", "a", "--max-tokens", 60, "--format", "json")
    document = json.loads(done.out)
    assert document["finish"] == "stop" and document["tokens"] == [free[: place + 1]]
    assert document["text"] == [written(free[:place])]
    shown = localattn("generate", model, "--prompt", "a", "--max-tokens", 60)
    assert "the model ended the text" in shown.err
    many = localattn(
        *("generate", model, "--prompt", "a", "--batch", 3, "--max-tokens", 60, "--format", "json"),
        *("--do-sample", "--temperature", 4),
    )
    for row in json.loads(many.out)["tokens"]:
        stops = [n for n, token in enumerate(row) if token in (EOS, free[place])]
        assert stops in ([], [len(row) - 1])


def test_a_chat_goes_through_the_template(model: Path, localattn) -> None:
    done = localattn(
        *("generate", model, "--prompt", "Hi", "--chat", "--system", "Be brief", "--max-tokens", 4, "--format", "json")
    )
    assert done.code == 0, done.err
    document = json.loads(done.out)
    system, user = (b"system: Be brief", b"Hi")
    assert document["prompt"] == [BOS, 258, *system, 259, 10, 258, *user, 259, 10, ord(">")]
    assert document["tokens"] == [greedy(model, document["prompt"], 4)]


def test_on_a_terminal_a_chat_is_a_conversation(model: Path) -> None:
    terminal = Terminal(model, "--chat", "--max-tokens", 4, "--temperature", 0, "-q")
    try:
        messages, shown = b"", b""
        for said in ("Hi", "And?"):
            shown += terminal.read_until(lambda text: text.endswith(b"> "))
            terminal.type(f"{said}\n")
            terminal.shown = b""
            messages += b"<user>" + said.encode() + b"<end>\n"
            ids = [BOS]
            for part in re.split(b"(<user>|<end>)", messages):
                ids += {b"<user>": [USER], b"<end>": [END]}.get(part, list(part))
            answer = written(greedy(model, [*ids, ord(">")], 4))
            messages += b"<user>" + answer.strip().encode() + b"<end>\n"
            seen = terminal.read_until(lambda text: text.endswith(b"> "))
            assert printable(answer) in seen.decode().replace("\r\n", "\n")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt-ids", "1,2", "--chat"], "--chat"),
        (["--prompt", "a", "--system", "b"], "--system"),
        (["--prompt", "a", "--repetition-penalty", "0"], "--repetition-penalty is 0"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature"),
    ],
)
def test_wrong_options_are_said(model: Path, localattn, options: list[str], says: str) -> None:
    done = localattn("generate", model, *options)
    assert done.code == 2 and says in done.err, done.err


def test_a_prompt_that_is_no_text_and_a_folder_that_is_not_the_models(model: Path, localattn, tmp_path: Path) -> None:
    (tmp_path / "prompt.bin").write_bytes(b"\xff\xfe")
    done = localattn("generate", model, "--prompt-file", tmp_path / "prompt.bin")
    assert done.code == 2 and "not UTF-8" in done.err


def test_a_tokenizer_may_have_more_tokens_than_the_model(tmp_path: Path, localattn) -> None:
    """As Gemma 3's text models: only a token that occurs and has no row is an error."""
    model = step_model.write(tmp_path, vocabulary=258)  # without the last two, <user> and <end>
    tokenizer_folder.write(tmp_path, {"do_sample": False})
    done = localattn("generate", model, "--prompt", "ab", "--max-tokens", 5, "--format", "json")
    assert done.code == 0 and not done.err, done.err
    assert json.loads(done.out)["tokens"] == [greedy(model, [BOS, 97, 98], 5)]
    refused = localattn("generate", model, "--prompt", "a<user>b")
    assert refused.code == 2 and "258 ('<user>')" in refused.err and "no tokenizer.json" not in refused.err
    chat = localattn("generate", model, "--prompt", "a", "--chat")
    assert chat.code == 2 and "'<user>'" in chat.err


def test_a_tokenizer_may_have_fewer_tokens_than_the_model(tmp_path: Path, localattn) -> None:
    model = step_model.write(tmp_path, vocabulary=VOCABULARY + 100)
    tokenizer_folder.write(tmp_path, {"do_sample": True, "temperature": 1000.0, "top_k": 0})
    done = localattn("generate", model, "--prompt", "ab", "--max-tokens", 60, "--format", "json")
    assert done.code == 0, done.err
    assert max(json.loads(done.out)["tokens"][0]) >= VOCABULARY, "a token without a name came, and reads as nothing"


def test_generation_config_counts_without_a_tokenizer(model: Path, localattn) -> None:
    (model.parent / "tokenizer.json").unlink()
    prompt = [BOS, 97]
    free = greedy(model, prompt, 20)
    end = next(n for n, token in enumerate(free) if n > 1 and token not in free[:n])
    settings = {"do_sample": False, "eos_token_id": free[end], "max_new_tokens": 15, "stop_strings": "x"}
    (model.parent / "generation_config.json").write_text(json.dumps(settings))
    done = localattn("generate", model, "--prompt-ids", "256,97", "--format", "json")
    document = json.loads(done.out)
    assert document["tokens"] == [free[: end + 1]] and document["finish"] == "stop"
    assert "stop_strings is not applied" in done.err and done.err.count("Warning") == 1


def test_an_empty_prompt_begins_with_the_token_that_begins_texts(model: Path, localattn) -> None:
    file = model.parent / "tokenizer.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps(document | {"post_processor": None}))  # it does not add the token itself
    done = localattn("generate", model, "--prompt", "", "--max-tokens", 6, "--format", "json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["prompt"] == [BOS] and found["tokens"] == [greedy(model, [BOS], 6)]
    (model.parent / "tokenizer_config.json").write_text("{}")
    refused = localattn("generate", model, "--prompt", "")
    assert refused.code == 2 and "Give a prompt" in refused.err
    (model.parent / "generation_config.json").write_text('{"bos_token_id": 7}')
    done = localattn("generate", model, "--prompt-ids", "", "--max-tokens", 1, "--format", "json")
    assert json.loads(done.out)["prompt"] == [7]


def test_strings_and_time_end_a_text(model: Path, localattn) -> None:
    def run(**settings: object) -> dict[str, object]:
        (model.parent / "generation_config.json").write_text(json.dumps({"do_sample": False, **settings}))
        done = localattn("generate", model, "--prompt", "ab", "--max-tokens", 40, "--format", "json")
        assert done.code == 0, done.err
        document = json.loads(done.out)
        return {**document, "tokens": document["tokens"][0]}

    free = greedy(model, [BOS, 97, 98], 40)
    letters = [chr(token) if token < 128 else "\0" for token in free]
    place = next(n for n in range(4, 39) if "\0" not in letters[n : n + 2])
    wanted = "".join(letters[place : place + 2])
    first = next(n for n in range(39) if "".join(letters[n : n + 2]) == wanted) + 2
    found = run(stop_strings=[wanted])
    assert found["tokens"] == free[:first] and found["finish"] == "stop"
    assert found["text"][0].endswith(wanted), "the string stays in the text, as in transformers"
    late = run(max_time=0)
    assert len(late["tokens"]) == 1 and late["finish"] == "time"


def test_what_is_not_applied_is_named_once_each(model: Path, localattn) -> None:
    settings = {
        **{"num_beams": 3, "guidance_scale": 1.5, "num_return_sequences": 2, "length_penalty": 2.0, "use_cache": False},
        **{"my_field\u001b": 1, "other": [], "num_beam_groups": 1, "renormalize_logits": True, "pad_token_id": -1},
    }
    (model.parent / "generation_config.json").write_text(json.dumps(settings))
    done = localattn("generate", model, "--prompt", "ab", "--max-tokens", 2)
    assert done.code == 0, done.err
    lines = [line for line in done.err.splitlines() if line.startswith("Warning")]
    assert len(lines) == 4 and "\x1b" not in done.err
    for name, says in (("num_beams is 3", "beam search"), ("guidance_scale", "twice"), ("my_field", "other")):
        assert any(name in line and says in line for line in lines), lines
    assert any("num_return_sequences" in line and "--batch" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_an_exported_decoder_writes_what_transformers_writes(weights: str | None, tmp_path: Path, localattn) -> None:
    """From the folder to text; with rounded weights as far as the first tokens agree."""
    import torch

    from localattn.exporter.export import ExportRequest

    from ..support.models.hugging_face import CASES, build
    from ..support.steps import export_steps

    model = build(next(case for case in CASES if case.name == "mistral"), vocab_size=VOCABULARY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # layers that add little, as those of trained models do
            parameter.mul_({"embed_tokens": 8.0, "o_proj": 0.3, "down_proj": 0.3}.get(name.split(".")[-2], 1.0))
    folder, output = tmp_path / "hub", tmp_path / "out" / "model_step.onnx"
    model.save_pretrained(folder)
    tokenizer_folder.write(folder, {"do_sample": False, "eos_token_id": EOS})
    output.parent.mkdir()
    export_steps(ExportRequest(folder, output, weight_dtype=weights))
    for options in ([], ["--chat"]):
        done = localattn("generate", output, "--prompt", "Hé", "--max-tokens", 60, "--format", "json", *options)
        assert done.code == 0, done.err
        document = json.loads(done.out)
        ids = torch.tensor([document["prompt"]])
        wanted = model.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=EOS, pad_token_id=0)
        exact = 60 if weights is None else 1
        assert document["tokens"][0][:exact] == wanted[0, ids.shape[1] :].tolist()[:exact]
        assert document["text"] is not None


# Settings of generation_config.json; `first` stands for the token that a plain greedy text begins with.
GRID = (
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [["first"], [1, 2]]},
    {"suppress_tokens": ["first", 500]},
    {"begin_suppress_tokens": ["first"]},
    {"min_new_tokens": 9, "eos_token_id": ["first", EOS]},
    {"min_length": 12, "eos_token_id": ["first"]},
    {"eos_token_id": ["first"]},
    {"repetition_penalty": 1.5, "encoder_repetition_penalty": 1.2},
    {"encoder_no_repeat_ngram_size": 1},
    {"sequence_bias": [[["first"], -3.0], [["first", "first"], 2.0]]},
    {"forced_eos_token_id": 7, "max_new_tokens": 6},
    {"forced_bos_token_id": 9},
    {"exponential_decay_length_penalty": [3, 2.0], "eos_token_id": EOS},
    {"remove_invalid_values": True, "renormalize_logits": True, "max_length": 9},
    {"temperature": 0.2, "top_k": 3, "min_p": 0.5},
)


@pytest.mark.slow
def test_greedy_texts_are_those_of_generate(tmp_path: Path, localattn) -> None:
    """Token by token, up to the first place where the two likeliest are nearer to each other than the tolerance."""
    import torch
    import transformers

    from localattn.exporter.export import ExportRequest

    from ..support.models.hugging_face import CASES, build
    from ..support.steps import export_steps

    model = build(next(case for case in CASES if case.name == "mistral"), vocab_size=VOCABULARY)
    folder, output = tmp_path / "hub", tmp_path / "out" / "model_step.onnx"
    model.save_pretrained(folder)
    output.parent.mkdir()
    export_steps(ExportRequest(folder, output))
    ids = torch.tensor([[5, 9, 100, 40, 9]])
    plain = model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0, eos_token_id=None)
    compared = changed = 0
    usual = None
    for settings in ({}, *GRID):
        text = json.dumps({"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **settings})
        config = json.loads(text.replace('"first"', str(int(plain[0, -1]))))
        (output.parent / "generation_config.json").write_text(json.dumps(config))
        limit = [] if {"max_new_tokens", "max_length"} & settings.keys() else ["--max-tokens", 24]
        done = localattn("generate", output, "--prompt-ids", "5,9,100,40,9", "--format", "json", *limit)
        assert done.code == 0, done.err
        config |= {"max_new_tokens": 24} if limit else {}
        wanted = model.generate(
            ids,
            generation_config=transformers.GenerationConfig(**config),
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens = wanted.sequences[0, ids.shape[1] :].tolist()
        best = [score[0].topk(2).values.tolist() for score in wanted.scores]
        sure = next((n for n, (one, two) in enumerate(best) if one - two < 1e-3), len(tokens))
        got = json.loads(done.out)["tokens"][0]
        assert got[:sure] == tokens[:sure] and (sure < len(tokens) or len(got) == len(tokens)), settings
        compared += sure
        usual = usual or got
        changed += got != usual
    assert compared > 100 and changed > 8, "the settings did nothing, or nothing was sure"
