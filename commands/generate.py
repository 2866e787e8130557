"""Define `localattn generate`: continue a prompt with an exported step file."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import LocalAttnError, MissingDependency, UsageError
from ..core.limits import LARGEST_SIZE
from .parts.console import note, print_json, say, say_text, suggest, warn
from .parts.declared import from_fields
from .parts.flags import in_flags
from .parts.options import (
    FormatOption,
    ProviderOption,
    RuntimeOption,
    ThreadsOption,
    finite,
    number_option,
    seed_option,
    size_option,
)
from .parts.paths import INPUT
from .parts.plugins.options import PluginLibraryOption, PluginOption, plugin_asked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..runtime.generation.defaults import FolderDefaults
    from ..runtime.generation.generator import Generator
    from ..runtime.generation.tokenizer import FolderTokenizer, OpeningTokenizer

# Exit code that shells report for a program that Ctrl-C ended: 128 + SIGINT.
INTERRUPTED = 130

# Longer files and streams are refused.
MOST_PROMPT_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What `localattn generate` continues, and how."""

    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file."), INPUT] = None
    prompt_ids: Annotated[str | None, typer.Option(help="Tokens to continue, such as 1,2,3.")] = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Format the prompt as a chat message with the model's chat template. On a terminal, without a prompt: "
            "a conversation, until Ctrl-D.",
        ),
    ] = False
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=-1,
            max=LARGEST_SIZE,
            help="Tokens to generate; -1: until Ctrl-C or its last position. (Default: as generation_config.json says; "
            "else 256.)",
        ),
    ] = None
    do_sample: Annotated[
        bool | None,
        typer.Option(
            "--do-sample/--no-do-sample",
            help="Draw tokens; --no-do-sample: take the likeliest. (Default: as generation_config.json says; else "
            "draw.)",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        number_option(
            "Divides the logits; 0 takes the likeliest token. (Default: as generation_config.json says; else 1.)"
        ),
    ] = None
    top_k: Annotated[int | None, size_option("Choose among this many of the likeliest tokens.", least=1)] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, callback=finite, help="Choose among the likeliest tokens whose probabilities add up to this."
        ),
    ] = None
    repetition_penalty: Annotated[float | None, number_option("Above 1, earlier tokens become less likely.")] = None
    seed: Annotated[int, seed_option("Seed of the sampling.")] = 0
    batch: Annotated[int, size_option("Number of continuations, each with its own random numbers.", least=1)] = 1
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt too.")] = False
    provider: ProviderOption = "auto"
    threads: ThreadsOption = None
    plugin: PluginOption = "auto"
    plugin_library: PluginLibraryOption = None
    runtime: RuntimeOption = "auto"
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Record the step as a CUDA graph and replay it (engines).")
    ] = False


@from_fields
def generate(
    *,
    model: Annotated[
        Path,
        typer.Argument(help="The step file (model_step.onnx), or the engine built from it.", show_default=False),
        INPUT,
    ],
    options: GenerateOptions,
    output_format: FormatOption = "console",
) -> None:
    """Continue a prompt, token by token, at constant memory.

    The prompt is --prompt, --prompt-file, --prompt-ids or what is read from stdin. A model with a tokenizer.json in
    its folder reads and writes text, and generation_config.json says when it stops and how it samples. Without, a
    vocabulary of 256 is bytes: text on a terminal, the bytes themselves in a pipe. Any other model has numbers.
    Ctrl-C ends it and keeps what was written, with exit code 130.
    """
    from ..runtime.generation.defaults import read_defaults
    from ..runtime.generation.generator import Generator
    from ..runtime.generation.text import check_rows, default_limit, encoded
    from ..runtime.generation.tokenizer import OpeningTokenizer

    if options.system is not None and not options.chat:
        raise typer.BadParameter("it needs --chat", param_hint="--system")
    opening = OpeningTokenizer.start(model.parent)
    plugin = plugin_asked(options.plugin, options.plugin_library)
    generator = Generator.open(model, options.provider, options.threads, plugin=plugin, runtime=options.runtime)
    if options.cuda_graph:
        generator.session.use_cuda_graph()
    _prepare(generator)
    tokenizer = _tokenizer(opening, required=options.prompt_ids is None)
    folder = read_defaults(model.parent, tokenizer)
    settings = _settings(folder, options)
    sources = (options.prompt, options.prompt_file, options.prompt_ids)
    converses = options.chat and sources == (None, None, None) and sys.stdin.isatty() and output_format == "console"
    if converses and tokenizer is not None:
        _warn(generator, model, folder.notes)
        settings |= {"seed": options.seed, **folder.ending(tokenizer)}
        try:
            _converse(generator, tokenizer, folder, settings, options)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        return
    given = _read_prompt(generator.vocabulary, *sources, is_text=tokenizer is not None)
    if options.chat and isinstance(given, list):
        raise typer.BadParameter(
            "it needs a text prompt, and a tokenizer.json in the model's folder", param_hint="--chat"
        )
    if isinstance(given, list):
        ids = given
    else:
        assert tokenizer is not None
        ids = encoded(_as_text(given), tokenizer, folder, options.system, chat=options.chat)
    if not ids and folder.bos is not None:
        ids = [folder.bos]  # as transformers begins a text without a prompt
    if tokenizer is not None:
        check_rows(ids, tokenizer, generator.vocabulary)
    _warn(generator, model, folder.notes)
    limit = default_limit(generator, folder, len(ids)) if options.max_tokens is None else options.max_tokens
    settings |= {"seed": options.seed, **folder.ending(tokenizer)}
    shown = options.echo and output_format == "console"
    run = _Run(generator, ids, None if limit < 0 else limit, settings, shown, tokenizer)
    try:
        run.all(options.batch, show=output_format == "console")
    except KeyboardInterrupt:
        run.finish = "interrupted"
    if output_format == "json":
        print_json({"model": str(model), **run.report(options.seed)})
    else:
        note(run.summary())
        suggest("localattn", "bench", model)
    if run.finish == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _converse(
    generator: Generator,
    tokenizer: FolderTokenizer,
    folder: FolderDefaults,
    settings: dict[str, Any],
    options: GenerateOptions,
) -> None:
    """Read messages from the terminal until Ctrl-D, and answer each, knowing all before.

    Raises:
        UsageError: there is no chat template, or the conversation has no room left in the model.
    """
    from ..runtime.generation.chat import render_chat
    from ..runtime.generation.text import check_rows, default_limit, encoded

    with suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and a history in `input`
    if options.batch > 1:
        raise typer.BadParameter("a conversation has one answer", param_hint="--batch")
    messages = [] if options.system is None else [{"role": "system", "content": options.system}]
    render_chat(folder, [*messages, {"role": "user", "content": ""}])  # refuse what cannot be formatted, at once
    note("Ctrl-D ends the conversation.")
    while True:
        try:
            message = input("> ")
        except EOFError:
            say_text("\n")
            return
        if not message.strip():
            continue
        messages.append({"role": "user", "content": message})
        ids = encoded(messages, tokenizer, folder, chat=True)
        check_rows(ids, tokenizer, generator.vocabulary)
        limit = default_limit(generator, folder, len(ids)) if options.max_tokens is None else options.max_tokens
        run = _Run(generator, ids, None if limit < 0 else limit, settings, False, tokenizer)
        run.all(1, show=True)
        messages.append({"role": "assistant", "content": tokenizer.decode(run.shown(run.rows[0]))})


def _settings(folder: FolderDefaults, options: GenerateOptions) -> dict[str, Any]:
    """Return how tokens are sampled: as the options say, else as the model's folder does."""
    return folder.settings(
        options.do_sample,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        repetition_penalty=options.repetition_penalty,
    )


def _warn(generator: Generator, model: Path, notes: Sequence[str]) -> None:
    """Warn of a prefill file that is not there, and of what the folder and the session say."""
    missing = generator.session.missing_prefill
    if missing:
        warn(f"{missing} is missing in the folder of {model.name}: the prompt is read token by token.")
    for line in (*generator.session.notes, *notes):
        warn(f"{in_flags(line)}.")


def _prepare(generator: Generator) -> None:
    """Open the prefill file while tokenizer and template are read; the prompt reports any error."""

    def open_prefill() -> None:
        with suppress(LocalAttnError):
            generator.session.prepare()

    Thread(target=open_prefill, name="prefill").start()


@dataclass
class _Run:
    """The continuations of one prompt, and the time they took.

    Args:
        generator: the generator, at any position.
        prompt: token ids.
        max_tokens: most tokens of each continuation; None for no limit.
        settings: sampling arguments of `Generator.generate`.
        echo: whether to write the prompt before each continuation.
        tokenizer: of the model's folder, where it has one.
    """

    generator: Generator
    prompt: list[int]
    max_tokens: int | None
    settings: dict[str, Any]
    echo: bool
    tokenizer: FolderTokenizer | None = None
    rows: list[list[int]] = field(default_factory=list)
    finish: str = "length"
    prefill_seconds: float = 0.0
    generate_seconds: float = 0.0

    @property
    def is_bytes(self) -> bool:
        """Whether the tokens are bytes."""
        from ..runtime.generation.text import BYTES

        return self.generator.vocabulary == BYTES

    def shown(self, row: Sequence[int]) -> Sequence[int]:
        """Return the tokens of a continuation without the one that ended it."""
        return row[:-1] if row and row[-1] in self.settings["stop"] else row

    def all(self, count: int, show: bool) -> None:
        """Generate `count` continuations, as many at a time as the batch holds; show a single one as it comes."""
        for first in range(0, count, self.generator.batch):
            wanted = min(self.generator.batch, count - first)
            rows: list[list[int]] = [[] for _ in range(wanted)]
            self.rows += rows
            try:
                self._round(first, rows, live=show and count == 1)
            finally:
                for number, row in enumerate(rows, start=first + 1) if show and count > 1 else ():
                    say(f"--- {number} of {count}")
                    self._show(row)

    def _round(self, first: int, rows: list[list[int]], *, live: bool) -> None:
        """Fill the rows; further rows of the file's batch are generated and dropped."""
        from ..runtime.generation.generator import ENDED
        from .parts.token_output import writer_for

        begin = time.perf_counter()
        stream = self.generator.generate(self.prompt, self.max_tokens, first_row=first, **self.settings)
        ready = time.perf_counter()
        self.prefill_seconds += ready - begin
        writer = writer_for(bytes_model=self.is_bytes, tokenizer=self.tokenizer) if live else None
        try:
            if writer and self.echo:
                for token in self.prompt:
                    writer.write(token)
            for tokens in stream:
                for row, token in zip(rows, tokens.tolist(), strict=False):
                    if token != ENDED:
                        row.append(token)
                if writer and self.shown(rows[0]) is rows[0]:
                    writer.write(rows[0][-1])
                reasons = stream.finish[: len(rows)]
                if all(reasons):
                    self.finish = next((reason for reason in reasons if reason != "stop"), "stop") or "stop"
                    break
        finally:
            self.generate_seconds += time.perf_counter() - ready
            if writer:
                writer.end()
        if self.finish == "length" and len(rows[0]) == self.generator.room(len(self.prompt)):
            self.finish = "positions"

    def _show(self, row: Sequence[int]) -> None:
        from .parts.token_output import writer_for

        writer = writer_for(bytes_model=self.is_bytes, tokenizer=self.tokenizer)
        for token in [*(self.prompt if self.echo else ()), *self.shown(row)]:
            writer.write(token)
        writer.end()
        if not (writer.ends_line or sys.stdout.isatty()):
            say("")

    def report(self, seed: int) -> dict[str, Any]:
        """Return the document that `--format json` prints."""
        session = self.generator.session
        texts = None
        if self.tokenizer is not None:
            texts = [self.tokenizer.decode(self.shown(row)) for row in self.rows]
        elif self.is_bytes:
            texts = [bytes(row).decode("utf-8", "replace") for row in self.rows]
        return {
            "backend": session.backend,
            "provider": session.provider,
            "seed": seed,
            "prompt": self.prompt,
            "tokens": self.rows,
            "text": texts,
            "finish": self.finish,
            "seconds": {"prefill": self.prefill_seconds, "generate": self.generate_seconds},
            "tokens_per_second": self._rate(),
        }

    def _rate(self) -> float | None:
        made = sum(map(len, self.rows))
        return made / self.generate_seconds if made and self.generate_seconds else None

    def summary(self) -> str:
        """Return the summary line."""
        made, rate = sum(map(len, self.rows)), self._rate()
        speed = "" if rate is None else f", {rate:,.0f} a second"
        ending = {
            "positions": "; the model has no more positions",
            "interrupted": "; interrupted",
            "stop": "; the model ended the text",
            "time": "; the time limit was reached (max_time of generation_config.json)",
        }
        return (
            f"{made} tokens{speed} on {self.generator.session.provider}; prompt of {len(self.prompt)} in "
            f"{1e3 * self.prefill_seconds:.0f} ms{ending.get(self.finish, '')}"
        )


def _tokenizer(opening: OpeningTokenizer | None, *, required: bool) -> FolderTokenizer | None:
    """Return the tokenizer in the model's folder; None if there is none.

    Args:
        opening: opens it; None if there is none.
        required: the prompt is text.
    """
    try:
        return None if opening is None else opening.wait()
    except MissingDependency:
        if required:
            raise
        return None


def _as_text(raw: bytes) -> str:
    """Decode a prompt.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("The prompt is not text.", why=f"It is not UTF-8: {error.reason}.") from error


def _read_prompt(
    vocabulary: int, text: str | None, file: Path | None, ids: str | None, *, is_text: bool = False
) -> list[int] | bytes:
    """Read the prompt's token ids from the one source that was given, else from stdin; with `is_text` its bytes.

    Raises:
        UsageError: several sources, none, a file that cannot be read, or text for a model that has no bytes.
    """
    from ..runtime.generation.text import BYTES, no_text

    sources = {"--prompt": text, "--prompt-file": file, "--prompt-ids": ids}
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UsageError(
            f"{' and '.join(given)} were given.", why="Only one prompt is allowed.", fix="Give only one of them."
        )
    if ids is not None:
        return _numbers(ids)
    raw = _read_bytes(file) if text is None else os.fsencode(text)
    if is_text:
        return raw
    if vocabulary == BYTES:
        return list(raw)
    if text is not None:
        raise no_text(vocabulary)
    return _numbers(raw.decode("ascii", "replace"))


def _read_bytes(file: Path | None) -> bytes:
    """Read the bytes of a file, or of stdin without one.

    Raises:
        UsageError: the file cannot be read, stdin is a terminal, or there are too many bytes.
    """
    from ..core.storage.reading import read_plain

    if file is not None:
        try:
            raw = read_plain(file, MOST_PROMPT_BYTES)
        except OSError as error:
            raise UsageError(
                f"Cannot read {file}.", why=f"{error.strerror or error}.", fix="Check the path."
            ) from error
    elif sys.stdin.isatty():
        raise UsageError(
            "The prompt is missing.",
            why="The model needs a prompt to continue.",
            fix="Give --prompt, --prompt-file or --prompt-ids, or pipe it in. A chat model with a tokenizer.json "
            "converses with --chat.",
        )
    else:
        raw = _standard_input(MOST_PROMPT_BYTES + 1)
    if len(raw) > MOST_PROMPT_BYTES:
        source = file or "Standard input"
        raise UsageError(f"{source} is not a prompt.", why=f"It is larger than {MOST_PROMPT_BYTES >> 20} MiB.")
    return raw


def _standard_input(count: int) -> bytes:
    """Read stdin up to a number of bytes; a text alone, which other code may have put in its place, as UTF-8."""
    raw = getattr(sys.stdin, "buffer", None)
    read = sys.stdin.read(count).encode("utf-8", "surrogateescape") if raw is None else raw.read(count)
    return read[:count]


def _numbers(text: str) -> list[int]:
    """Read token ids from `1,2,3` or `1 2 3`."""
    words = [word for word in re.split(r"[\s,]+", text) if word]
    for word in words:
        if not re.fullmatch(r"\d{1,18}", word):
            raise UsageError(
                f"{word[:40]!r} is not a token.", why="Tokens are numbers from 0.", fix="Write them as 1,2,3."
            )
    return [int(word) for word in words]
