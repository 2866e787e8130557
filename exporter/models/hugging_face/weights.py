"""Load a Hugging Face model from a folder, with transformers' own `from_pretrained`, from safetensors alone.

Two loads are made, apart from each other. `load_model` is the exporter's: its tensors go into the file. `original` is
the judge's: transformers reads the user's configuration and weights by itself, and nothing of that model is rebuilt,
patched or tied here. What transformers says while it loads is told.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....core.errors import UsageError
from ....core.storage.unchanged import Unchanged
from ..adapter_names import OF_ADAPTERS
from ..inference import bounded
from .config import broken, grows, raised, read_config
from .folder import HOW_TO_MERGE
from .model_class import named_class
from .sizes_held import Held
from .types import quirks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

# Parts of names that only tensors of quantised weights have.
_OF_QUANTISED = re.compile(
    r"\.(?:qweight|qzeros|g_idx|SCB|weight_format|absmax|quant_map|nested_absmax|weight_scale(?:_inv)?|weight_packed"
    r"|weight_shape|input_scale|weight_zero_point|\w+_blocks|\w+_scales)$|\.quant_state\.|\.absmax$"
)
_REPORT = "LOAD REPORT"
_NOT_TIED = "we will NOT tie them"
_TIE = "If the head is the embedding, set tie_word_embeddings to true in config.json; else copy the folder again."


class Told(logging.Handler):
    """A handler that keeps what transformers warns of.

    Attributes:
        lines: its warnings, each on one line and once.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning; the table of tensors is told by name elsewhere, and only logged here."""
        text = record.getMessage()
        line = " ".join(text.split())
        if _REPORT in text or _NOT_TIED in text:
            _log.info("transformers: %s", line)
        elif line not in self.lines:
            self.lines.append(line)


@contextmanager
def told() -> Iterator[Told]:
    """Collect what transformers warns of during a block, in place of printing it, whatever its verbosity is."""
    from transformers.utils import logging as library

    root, handler = logging.getLogger("transformers"), Told()
    level, handlers, passes_on = root.level, root.handlers, root.propagate
    shows = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    root.handlers, root.propagate = [handler], False
    root.setLevel(min(level or logging.WARNING, logging.WARNING))
    try:
        yield handler
    finally:
        root.handlers, root.propagate = handlers, passes_on
        root.setLevel(level)
        if shows:
            library.enable_progress_bar()


def load_model(
    kind: type[PreTrainedModel], config: Any, folder: Path, found: Held, *, saved: type[PreTrainedModel] | None
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model in fp32 with transformers, from safetensors alone; return it, and notes.

    Args:
        kind: the class.
        config: its configuration.
        folder: the folder.
        found: what its files hold.
        saved: the class that it was saved as, if another one was asked for, which may leave tensors of that one out.

    Raises:
        UsageError: tensors are missing, unexpected, or have other shapes; or a file is damaged.
    """
    quirks = quirks_of(config.model_type)
    names = quirks.encoder_tensors if kind.__name__ == quirks.encoder else None
    with told() as handler:
        model, info = _loaded(kind, folder, config=config, key_mapping=names)
    notes = _check_tensors(model, info, folder, found, saved)
    notes += _untied(model, folder.name)
    notes += [f"transformers: {line[:400]}" for line in handler.lines]
    return model.eval(), notes


def _loaded(kind: Any, folder: Path, **options: Any) -> tuple[PreTrainedModel, dict[str, Collection[Any]]]:
    """Call `from_pretrained` of a class.

    Raises:
        UsageError: it fails, for whatever reason.
    """
    always = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True, "dtype": torch.float32}
    always["ignore_mismatched_sizes"] = True  # they are refused, by name
    # How attention and experts are computed in PyTorch, whatever config.json asks for: plain PyTorch code.
    always["attn_implementation"] = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
    always["experts_implementation"] = "eager"
    try:
        with warnings.catch_warnings():  # a distributed checkpoint is read by this process alone, as it should be
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            model, info = kind.from_pretrained(folder, **always, **options)
    except (TypeError, AttributeError, KeyError) as error:
        raise broken(folder.name, error) from error
    except Exception as error:  # the folder decides what goes wrong, and where
        raise UsageError(f"{folder} cannot be loaded.", why=raised(error), fix="Copy or save it again.") from error
    return model, info


def _check_tensors(
    model: PreTrainedModel,
    info: Mapping[str, Collection[Any]],
    folder: Path,
    found: Held,
    saved: type[PreTrainedModel] | None,
) -> list[str]:
    """Refuse tensors that are missing, unexpected, or of another shape; return notes.

    Raises:
        UsageError: there are some.
    """
    kind = type(model).__name__
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    without_effect = quirks_of(model.config.model_type).tensors_without_effect(kind)
    unread = [name for name in missing if name.startswith(without_effect)]
    missing = [name for name in missing if name not in unread]
    wrong = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"])
    _refuse_foreign(found.names, folder)
    if wrong:
        raise UsageError(
            f"{folder} does not fit its configuration.",
            why=f"Of another shape: {bounded(wrong, 3)}.",
            fix="Correct config.json, or copy the folder again.",
        )
    lost = [] if saved is None else _of_no_part(unexpected, saved, model.config)
    if missing or lost or (unexpected and saved is None):
        names, verb = (missing, "lacks") if missing else (lost or unexpected, "has unexpected")
        owner = saved.__name__ if lost and saved is not None else kind
        raise UsageError(
            f"{folder} {verb} {len(names)} tensors of a {owner}: {bounded(names, 5)}.",
            why="Weights that are missing would be random." if missing else "They would be lost.",
            fix=_TIE if missing and missing == _head(model) else "Check the configuration, and the task.",
        )
    notes = [f"{len(unexpected)} tensors of {folder.name} are no part of {kind}"] if unexpected else []
    if unread:
        notes.append(f"{folder.name} lacks {bounded(unread, 3)}, which no output of the file depends on")
    return notes


def _head(model: PreTrainedModel) -> list[str]:
    """List the name of the weight of a model's head, if it has one."""
    head = model.get_output_embeddings()
    return [f"{path}.weight" for path, part in model.named_modules() if part is head]


def _refuse_foreign(names: Collection[str], folder: Path) -> None:
    """Refuse tensors of adapters and of quantised weights, for whatever class the folder is loaded.

    Raises:
        UsageError: there are some.
    """
    for pattern, what, fix in (
        (OF_ADAPTERS, "of an adapter (LoRA or another kind of PEFT)", HOW_TO_MERGE),
        (_OF_QUANTISED, "of quantised weights", "Export the original weights."),
    ):
        found = sorted(name for name in names if pattern.search(name))
        if found and not (pattern is _OF_QUANTISED and _is_plain(found, names)):
            why = "What the model adds or multiplies by them would be lost."
            raise UsageError(f"{folder} has {len(found)} tensors {what}: {bounded(found, 3)}.", why=why, fix=fix)


def _is_plain(found: Collection[str], names: Collection[str]) -> bool:
    """Return whether names that look like those of quantised weights have no partner, as plain weights have none."""
    blocks = {name.removesuffix("_blocks") for name in names if name.endswith("_blocks")}
    scales = {name.removesuffix("_scales") for name in names if name.endswith("_scales")}
    return all(name.endswith(("_blocks", "_scales")) for name in found) and not blocks & scales


def _of_no_part(names: Collection[str], saved: type[PreTrainedModel], config: Any) -> list[str]:
    """List the tensors that the class which a folder was saved as does not have either."""
    from transformers import PreTrainedModel

    from .module import EAGER, made_model

    if saved is PreTrainedModel:  # the folder does not say its class
        return []
    try:
        whole = made_model(saved, copy.deepcopy(config), "meta", EAGER)
    except (
        Exception
    ):  # the class takes another configuration, and raises in its own way: nothing can be told from a lost one
        _log.info("%s cannot be made from this configuration", saved.__name__, exc_info=True)
        return []
    known, modules = whole.state_dict().keys(), {path for path, _ in whole.named_modules()}
    prefix = f"{whole.base_model_prefix}."

    def belongs(name: str) -> bool:
        owner = name.rpartition(".")[0]
        return any(x in known for x in (name, prefix + name)) or any(x in modules for x in (owner, prefix + owner))

    return [name for name in names if not belongs(name)]


def _untied(model: PreTrainedModel, where: str) -> list[str]:
    """Say that a head which the configuration ties to the embedding has weights of its own."""
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return []
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    weights = [getattr(part, "weight", None) for part in (head, embedding)]
    if any(weight is None for weight in weights) or weights[0] is weights[1]:
        return []
    paths = {id(part): path for path, part in model.named_modules()}
    names = [f"{paths.get(id(part), '?')}.weight" for part in (head, embedding)]
    return [
        f"{names[0]} is not {names[1]} in the weights of {where}, although config.json says tie_word_embeddings: the "
        "file has both, as transformers loads them"
    ]


def original(kind: type[PreTrainedModel], folder: Path, files: Unchanged) -> Callable[[], nn.Module]:
    """Return a function that loads what transformers makes of a folder, in fp32: the reference of its file.

    Configuration and weights are read again, by transformers alone. An encoder that is exported alone is taken out of
    the model that the folder was saved as.

    Args:
        kind: the class that is exported.
        folder: the folder.
        files: its files, as they were when the exporter read them.
    """

    def load() -> nn.Module:
        from transformers import AutoConfig

        files.check()
        # No code of the folder; and outputs by name, without what only other arguments of forward would show.
        given = {"trust_remote_code": False, "local_files_only": True, "attn_implementation": "eager"}
        given |= {"output_attentions": False, "output_hidden_states": False, "return_dict": True}
        with told():
            config = AutoConfig.from_pretrained(folder, **given)
            owner = _owner(kind, folder)
            model: Any = _loaded(owner, folder, config=config)[0]
        files.check()
        module: nn.Module = (model if owner is kind else model.get_encoder()).eval()
        return module.requires_grad_(False)

    return load


def _owner(kind: type[PreTrainedModel], folder: Path) -> Any:
    """Return the class to load: an encoder alone is loaded inside the class that the folder was saved as."""
    raw = read_config(folder)
    names = raw.get("architectures")
    quirks = quirks_of(raw.get("model_type"))
    if kind.__name__ != quirks.encoder or not isinstance(names, list) or kind.__name__ in names:
        return kind
    return named_class(str(names[0]), raw) or kind


def whole_state(model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Return the weights and all buffers of a model by name, floating point ones in float32.

    Tied weights are one tensor under several names.
    """
    state = {**dict(model.named_buffers()), **model.state_dict()}
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [("", kinds)]:
            if grows(kind):  # longer sequences that a live model has seen are no part of it
                own = path + "." * bool(path) + layer + "_" * bool(layer)
                state[f"{own}inv_freq"] = state[f"{own}original_inv_freq"]
    converted: dict[Any, Tensor] = {}  # so that tied weights in half precision stay one tensor
    for name, x in state.items():
        where = (x.data_ptr(), x.shape, x.stride(), x.dtype)
        if where not in converted or not x.numel():
            converted[where] = x.detach().float() if x.is_floating_point() else x.detach()
        state[name] = converted[where]
    return state
