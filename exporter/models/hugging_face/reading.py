"""Read a Hugging Face model, from its folder or live: what its file takes and gives, its weights, and its reference."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ....core.error_texts import argument
from ....core.errors import UsageError
from ....core.storage.unchanged import Unchanged
from ....core.tensors import POSITION_IDS
from ...options import ShapeRequest, Sizes
from ..family import sequence_length
from ..forms import FolderContents, FolderRequest
from ..inference import bounded
from . import weights
from .arguments import HuggingFaceArgs
from .changed_meaning import warnings_of
from .config import broken, made_config, read_config, require_transformers, rotation_grows
from .folder import HOW_TO_MERGE, SAFETENSORS, adapters_below, files, refuse_sentence_transformers, unread
from .model_class import FEATURES, choose_class, named_class, refuse_decoder
from .module import BATCHED, MASK, made_model, parameters
from .reference import check_live, check_numbers, copied
from .sizes_held import Held, check_counts, check_size, held
from .step_module import step_arguments
from .types import quirks_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CLASS = "transformers.PreTrainedModel"
# Outputs that a file has, of all that a model may return.
_OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state")


def describe(
    kind: type[PreTrainedModel],
    raw: Mapping[str, Any],
    config: PreTrainedConfig,
    where: str,
    found: Held | None = None,
) -> HuggingFaceArgs:
    """Read everything about a model that does not need its weights.

    Args:
        kind: its class.
        raw: the values of `config.json`.
        config: the configuration that `made_config` makes of them; it stays as it is.
        where: the folder's name, for errors.
        found: what its files of weights hold; None for a live model.

    Raises:
        UsageError: the configuration cannot be used, or a layer of the model cannot be exported.
    """
    refuse_decoder(kind, config)
    model = _made(kind, config, where, "meta")
    if found is not None:
        check_size(model, found, where)
    if "input_ids" not in parameters(model):
        inner = f"A torch.nn.Module of your own, whose forward calls the {kind.__name__}, exports as it is"
        raise UsageError(
            f"{kind.__name__} cannot be exported with its windows.",
            why=f"It takes {model.main_input_name}; windows are read off models of text, which take input_ids.",
            fix=f"{inner}, without windows as nodes: {argument('factory')}, or localattn.export_module.",
        )
    text = config.get_text_config()
    # Chunks begin after each sequence's padding, and those of the node at the first position: no padding then.
    chunked = bool(getattr(text, "attention_chunk_size", None))
    names = ["input_ids", *([MASK] if MASK in parameters(model) and not chunked else [])]
    quirks = quirks_of(config.model_type)
    quirks.refuse(model)
    layers, run = quirks.read_layers(_made(kind, config, where, "cpu") if chunked else model, names)
    outputs = [name for name in _OUTPUTS if name in run.outputs]
    if not outputs:
        raise UsageError(
            f"{kind.__name__} returns {', '.join(run.outputs) or 'nothing'}.", why=f"Known: {', '.join(_OUTPUTS)}."
        )
    shape = run.outputs[outputs[0]]
    return HuggingFaceArgs(
        architecture=kind.__name__,
        config=dict(raw),
        inputs=tuple(names),
        outputs=tuple(outputs),
        per_token=len(shape) > 1 and shape[1] == run.length,
        layers=tuple(layers),
        vocab_size=text.vocab_size,
        longest=quirks.positions(config, where),
    )


def _made(kind: type[PreTrainedModel], config: PreTrainedConfig, where: str, device: str) -> PreTrainedModel:
    """Build a model from a copy of its configuration.

    Raises:
        UsageError: the configuration cannot be used.
    """
    try:
        return made_model(kind, copy.deepcopy(config), device, BATCHED)
    except UsageError:
        raise
    except Exception as error:  # each class refuses values in its own way
        raise broken(where, error, config.to_dict()) from error


def read_folder(folder: Path, request: FolderRequest) -> FolderContents:
    """Read a folder: its configuration, what that makes of the model, and its weights.

    Raises:
        UsageError: the model cannot be exported, or not as it is asked for.
        MissingDependency: transformers is not installed, or is too old.
    """
    require_transformers()
    raw, task, known = read_config(folder), request.task, request.known
    alone = task == FEATURES or "architecture" in known
    notes = refuse_sentence_transformers(folder, alone=alone)
    paths = files(folder)
    state = Unchanged(paths)
    found = held([path for path in paths if path.suffix == SAFETENSORS], folder.name)
    check_counts(raw, found, folder.name)
    with weights.told() as said:
        config = made_config(raw, folder.name)
    _refuse_extra_files(config, folder.name)
    kind = choose_class(raw, config, task, folder.name, known.get("architecture"))
    args = describe(kind, raw, config, folder.name, found)
    # Sizes that the model does not have are refused before its weights are read.
    shapes = request.shapes
    if shapes is not None and request.steps:
        step_arguments(args, shapes.batch, shapes.max_length)
    elif shapes is not None:
        decided_sizes(args, shapes)
    model, told = weights.load_model(kind, config, folder, found, saved=_saved(kind, raw))
    check_numbers(model, args)
    notes += [*told, *_said(args), *(f"transformers: {line[:400]}" for line in said.lines)]
    left = unread(folder)
    if left:
        notes.append(f"transformers does not read {bounded(left, 3)} of {folder.name}, and neither does the export")
    if raw.get("auto_map"):
        notes.append(f"code of {folder.name} (auto_map) did not run; the model is transformers' own {kind.__name__}")
    if known.get("max_length") is not None:  # the arguments of a step file
        args = HuggingFaceArgs(**{**args.model_dump(), "inputs": known["inputs"], "max_length": known["max_length"]})
    original = weights.original(kind, folder, state)
    doubts = warnings_of(quirks_of(config.model_type).changed_meanings, raw)
    below = adapters_below(folder)
    if below:
        doubts.append(
            f"{folder.name} has adapters in folders of their own ({bounded(below, 3)}), which transformers does not "
            f"apply to its weights, and neither does the export. If they belong to the model: {HOW_TO_MERGE}"
        )
    return FolderContents(CLASS, args.model_dump(), weights.whole_state(model), notes, doubts, original)


def _refuse_extra_files(config: PreTrainedConfig, where: str) -> None:
    """Refuse a type of which transformers reads weights from files that no index lists.

    Raises:
        UsageError: it is one.
    """
    extra = list(getattr(type(config), "extra_files", ()))
    if extra:
        raise UsageError(
            f"{where} is of the type {config.model_type}, which cannot be exported.",
            why=f"It keeps weights in files of their own: {bounded(extra, 3)}.",
        )


def _saved(kind: type[PreTrainedModel], raw: Mapping[str, Any]) -> type[PreTrainedModel] | None:
    """Return the class that a folder was saved as, if it is another one than is exported; without a name, any model."""
    names = raw.get("architectures")
    if isinstance(names, list) and kind.__name__ in names:
        return None
    from transformers import PreTrainedModel

    saved = named_class(str(names[0]), raw) if isinstance(names, list) and names else None
    return saved if isinstance(saved, type) and issubclass(saved, PreTrainedModel) else PreTrainedModel


def read_live(module: nn.Module) -> FolderContents | None:
    """Read a live model; transformers is not imported to see that a module is none."""
    bases = {(owner.__module__, owner.__name__) for owner in type(module).__mro__}
    if ("transformers.modeling_utils", "PreTrainedModel") not in bases:
        return None
    model: Any = module
    raw, name = json.loads(model.config.to_json_string()), type(model).__name__
    args = describe(type(model), raw, made_config(raw, name), name)
    state = {name: tensor.cpu() for name, tensor in weights.whole_state(model).items()}
    check_live(model, args, state)
    return FolderContents(CLASS, args.model_dump(), state, _said(args), original=copied(model))


def _said(args: HuggingFaceArgs) -> list[str]:
    """Say what was read off the model."""
    quirks = quirks_of(args.config.get("model_type"))
    notes = [f"{args.architecture}: {args.describe()}, read off its own {quirks.windows_shown_by}", *quirks.notes]
    if rotation_grows(args.config):
        changes = "its rotary embedding is of the type 'dynamic', and changes beyond them"
        notes.append(f"a file of whole sequences takes positions below {args.longest}: {changes}")
    return notes


def decided_sizes(args: HuggingFaceArgs, request: ShapeRequest) -> Sizes:
    """Decide the sizes that a request leaves open.

    Raises:
        UsageError: the model does not have so many positions, or takes none as an input.
    """
    length = sequence_length(request, args.longest)
    if length > args.longest:
        raise UsageError(f"The sequence length is {length}.", why=f"{args.architecture} has {args.longest} positions.")
    if request.position_ids:
        _check_positions(args)
    return Sizes(length, request.batch, 1, 1, mask=False, attn_bias=False, position_ids=request.position_ids)


def _check_positions(args: HuggingFaceArgs) -> None:
    """Refuse positions as an input of a model that does not take them as one.

    Raises:
        UsageError: it has no such argument, or takes positions that begin again for packed sequences.
    """
    kind = named_class(args.architecture, args.config)
    if POSITION_IDS not in inspect.signature(kind.forward).parameters:
        why = f"{args.architecture} takes {', '.join(args.inputs)}."
    elif MASK not in args.inputs:
        why = "Without the mask of padding it would take positions that begin again for packed sequences."
    else:
        return
    raise UsageError(
        f"{argument('position_ids', True)} does not apply.", why=why, fix=f"Leave {argument('position_ids')} out."
    )
