"""Define `localattn.generate`: text that a step file writes after a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...runtime.generation.text import Generated


def generate(
    model: str | Path,
    prompt: str | Sequence[int] | Sequence[Mapping[str, str]],
    *,
    chat: bool = False,
    system: str | None = None,
    max_tokens: int | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    provider: str = "auto",
    threads: int | None = None,
    plugin: str | Path = "auto",
    runtime: str = "auto",
) -> Generated:
    """Continue a prompt with a step file: text in, text out. Each call opens the file; `Generator` keeps it open.

    Args:
        model: the step file, or an engine that was built from it.
        prompt: text, for a model with a tokenizer.json in its folder or a vocabulary of bytes; tokens; or the messages
            of a conversation, `[{"role": "user", "content": …}]`.
        chat: format the prompt as a message, with the model's chat template.
        system: the system message of a conversation.
        max_tokens: the most tokens to generate; by default as generation_config.json says, else 256.
        do_sample: draw tokens, or take the likeliest; by default as generation_config.json says, else draw.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: choose among this many of the likeliest tokens.
        top_p: choose among the likeliest tokens whose probabilities add up to this.
        repetition_penalty: above 1, earlier tokens become less likely.
        seed: of the sampling.
        provider: where to run: "auto", "cpu", "cuda" or "tensorrt".
        threads: CPU threads for one operator; None leaves it to the runtime.
        plugin: compiled kernels: "auto", "none", or the path of a library.
        runtime: what runs ONNX files: "auto" (onnxruntime) or "openvino".

    Returns:
        The text, its tokens, the prompt's tokens, and why it ended; `str()` of it is the text.

    Raises:
        UsageError: no step file, or a prompt that does not fit it.
        MissingDependency: a runtime, or the tokenizer's package, is not installed.

    Examples:
        >>> written = localattn.generate("step.onnx", "def ", max_tokens=8, temperature=0)
        >>> len(written.tokens)
        8
    """
    from ...runtime.generation.generator import Generator
    from ...runtime.generation.text import generate_text

    path = Path(model)
    return generate_text(
        path,
        prompt,
        Generator.open(path, provider, threads, plugin=str(plugin), runtime=runtime),
        chat=chat,
        system=system,
        max_tokens=max_tokens,
        do_sample=do_sample,
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
    )
