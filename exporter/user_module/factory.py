"""Build the user's own module by calling a function by its name, and load weights from a file.

`package.module:function` is imported with the current folder on the path, as `python -m` would;
`folder/file.py:function` is run from its file, with its own folder on the path. Errors of the user's code are reported
as one clear error.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...core.error_texts import argument, close_match, first_line, named_line, shown
from ...core.errors import UsageError
from ...core.storage.files import sha256
from ...core.storage.reading import check_plain
from ...core.storage.unchanged import unchanged
from ..checkpoint.documents import read_json
from ..checkpoint.load import LoadedCheckpoint, load_state, read_state
from ..checkpoint.settings import differing
from ..checkpoint.weight_sets import as_table, at_entry
from ..models.inference import INV_FREQ, bounded
from .origin import Origin

_HOW = "Write package.module:function, or path/to/file.py:function."


def module_from_factory(
    reference: str,
    args: str | Mapping[str, Any] | None,
    weights: Path | None,
    *,
    allow_pickle: bool = False,
    entry: str | None = None,
    folder: Path | None = None,
) -> tuple[nn.Module, Origin]:
    """Call the function and load the weights.

    Args:
        reference: the function, as `package.module:function` or `folder/file.py:function`.
        args: its keyword arguments, as a dict or as a JSON object.
        weights: a checkpoint; None keeps the weights that the function made.
        allow_pickle: whether the checkpoint may hold pickled objects, whose code is then run.
        entry: the set of weights to load, where the checkpoint holds several; None chooses.
        folder: where packages are looked for first; None for the current folder.

    Raises:
        UsageError: the function is not found, does not make a module, or the weights do not fit it.
    """
    kwargs = _arguments(args)
    if entry is not None and weights is None:
        raise UsageError(f"{argument('entry')} goes with {argument('weights')}.", why="No checkpoint is read.")
    function = _load_function(reference, folder)
    with _as_users_fault(f"{reference} failed."):
        module = function if isinstance(function, nn.Module) and not kwargs else function(**kwargs)
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"{reference} returned a {type(module).__name__}.",
            why="It has to return a torch.nn.Module.",
            fix="Return the model itself, without its weights or optimizer.",
        )
    code = _code_of(reference, function)
    if weights is None:
        warning = f"no weights are given: the file has those that {reference} made. Give trained ones with "
        return module, Origin(reference, kwargs, warnings=(f"{warning}{argument('weights')}",), **code)
    files = [] if weights.is_dir() else [weights]
    with unchanged(files):
        loaded = _load_weights(module, weights, allow_pickle, entry)
    notes = tuple(loaded.notes)
    warnings = (*loaded.warnings, *_other_arguments(loaded, reference, function, kwargs, weights))
    beside = weights if weights.is_dir() else weights.parent
    return module, Origin(reference, kwargs, weights.name, loaded.sha256, notes, warnings, entry, (beside,), **code)


_PLAIN = (bool, int, float, str, list, tuple)


def _other_arguments(
    loaded: LoadedCheckpoint, reference: str, function: Callable[..., Any], kwargs: Mapping[str, Any], weights: Path
) -> list[str]:
    """Return a warning for each argument, given or by default, that the checkpoint says otherwise."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C
        return []
    defaults = {x.name: x.default for x in parameters if x.default is not inspect.Parameter.empty}
    called = {name: value for name, value in (defaults | dict(kwargs)).items() if isinstance(value, _PLAIN)}
    return [
        f"{reference} is called with {x.name} {shown(called[x.name])}, and {weights.name} was trained with "
        f"{shown(x.value)} by its {x.source}; set it with {argument('factory_args')}"
        for x in differing(loaded.settings, called)
        if isinstance(x.value, _PLAIN)
    ]


def _code_of(reference: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the file that defines a function, its digest, and the function's name from any folder."""
    place, _, name = reference.rpartition(":")
    module = sys.modules.get(getattr(function, "__module__", ""))
    path = place if place.endswith(".py") else getattr(module, "__file__", None)
    if path is None or not Path(path).is_file():
        return {}
    code = Path(path).resolve()
    return {
        "code": code,
        "code_sha256": sha256(code),
        "factory": f"{code}:{name}" if place.endswith(".py") else reference,
    }


def module_from_pickle(path: Path, entry: str | None = None) -> tuple[nn.Module, Origin]:
    """Load a whole pickled module, or one inside of a table.

    This runs code from the file: call it only if the user asked for it.

    Args:
        path: the file.
        entry: where in the file's table the module lies; None chooses.

    Raises:
        UsageError: the file cannot be opened, or holds something else.
    """
    check_plain(path)
    with unchanged([path]):
        loaded, notes = _unpickled(path), list[str]()
        digest = sha256(path)
    if entry is not None:
        _, loaded = at_entry(loaded, entry)
    elif as_table(loaded) is not None:
        modules = _modules_in(loaded)
        if len(modules) > 1:
            raise UsageError(
                f"{path} holds several modules: {bounded([*modules])}.",
                fix=f"Choose one: {argument('entry', next(iter(modules)))}.",
            )
        if modules:
            ((name, loaded),) = modules.items()
            notes.append(f"module read from the entry '{name}'")
    if not isinstance(loaded, nn.Module):
        raise UsageError(
            f"{path} holds a {type(loaded).__name__}, not a module.",
            why=f"{argument('allow_pickle')} alone is for a whole module saved with torch.save(model, path).",
            fix=f"Give it as {argument('weights')} of a {argument('factory')}, with {argument('allow_pickle')}.",
        )
    name = f"{type(loaded).__module__}.{type(loaded).__qualname__}"
    return loaded, Origin(name, {}, path.name, digest, tuple(notes), entry=entry)


def _arguments(args: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if args is None or isinstance(args, Mapping):
        return dict(args or {})
    try:
        read = read_json(args)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{argument('factory_args')} is not JSON: {args[:60]!r}.",
            why=f"{error}.",
            fix="""Write '{"name": value}'.""",
        ) from error
    if not isinstance(read, dict):
        raise UsageError(
            f"{argument('factory_args')} is a {type(read).__name__}.", why="It has to be a JSON object of arguments."
        )
    return read


def _load_function(reference: str, folder: Path | None = None) -> Callable[..., Any]:
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UsageError(f"{argument('factory')} {reference!r} names no function.", why=_HOW)
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place, folder)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            functions = sorted(x for x, value in vars(module).items() if callable(value) and not x.startswith("_"))
            raise UsageError(f"{place} has no {name}.", why=f"It has {bounded(functions) or 'no functions'}.")
        function = getattr(function, part)
    if not callable(function):
        raise UsageError(f"{reference} is a {type(function).__name__}.", why="It has to be a function, or a class.")
    result: Callable[..., Any] = function
    return result


def _from_package(name: str, folder: Path | None = None) -> ModuleType:
    folder = _importable(Path.cwd() if folder is None else folder)
    with _as_users_fault(f"Importing {name} failed."):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            why = f"Looked in {folder} and in what is installed."
            raise UsageError(f"There is no module {name}.", why=why, fix=_HOW) from error


def _from_file(path: Path) -> ModuleType:
    check_plain(path)
    if not path.is_file():
        near = close_match(path.name, [x.name for x in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        raise UsageError(f"There is no file {path}.", why=near, fix=_HOW)
    _importable(path.resolve().parent)
    name = path.stem if path.stem not in sys.modules else f"localattn_factory_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their own module
    try:
        with _as_users_fault(f"Running {path} failed."):
            spec.loader.exec_module(module)
    except UsageError:
        del sys.modules[name]
        raise
    return module


def _importable(folder: Path) -> Path:
    """Put a folder on the import path for good, because imported code may import more when it is called."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return folder


@contextmanager
def _as_users_fault(what: str) -> Iterator[None]:
    """Turn any error of the user's code into one UsageError."""
    try:
        yield
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(what, why=f"It needs {error.name}.", fix=f"pip install {error.name}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(what, why=named_line(error), fix="Run again with -v for the traceback.") from error


def _load_weights(module: nn.Module, path: Path, allow_pickle: bool, entry: str | None) -> LoadedCheckpoint:
    """Load the weights into the module, and return the checkpoint with notes on what was chosen.

    Raises:
        UsageError: names are missing or unexpected, or shapes differ.
    """
    wanted = {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}
    roots = {name.partition(".")[0] for name in wanted}
    empty = {name for name, tensor in wanted.items() if 0 in tensor.shape}
    if allow_pickle and not path.is_dir() and _is_pickled_module(path):
        loaded = _pickled_weights(path, roots, entry)
    else:
        loaded = load_state(path, roots=roots, entry=entry, empty=empty)
    state, notes = loaded.state, loaded.notes
    missing = [name for name in wanted if name not in state]
    if any(name.endswith(INV_FREQ) for name in missing):  # a buffer that old releases did not save
        missing = [name for name in missing if not name.endswith(INV_FREQ)]
        notes.append("rotary frequencies are not in the checkpoint: those the function made are used")
    missing = _without_shared(wanted, missing, state, notes)
    unexpected = [name for name in state if name not in wanted]
    for names, verb in ((missing, "lacks"), (unexpected, "has unexpected")):
        if names:
            tied = [name for name in names if name in loaded.tied]
            raise UsageError(
                f"{path} {verb} {len(names)} tensor{'s' * (len(names) != 1)}: {bounded(names)}.",
                why=f"When it was saved, {tied[0]} was the same tensor as {loaded.tied[tied[0]]}; in the "
                f"{type(module).__name__} that the function made the two are separate."
                if tied and verb == "lacks"
                else f"They do not fit the {type(module).__name__} that the function made.",
                fix="Let the function tie them, as the model that was saved does."
                if tied and verb == "lacks"
                else f"Check {argument('factory_args')}, and that the whole state dict of this model was saved.",
            )
    wrong = [name for name, tensor in state.items() if wanted[name].shape != tensor.shape]
    if wrong:
        found, expected = list(state[wrong[0]].shape), list(wanted[wrong[0]].shape)
        raise UsageError(
            f"{wrong[0]}: found {found}, expected {expected}.",
            why=f"{len(wrong)} tensors do not fit the {type(module).__name__} that the function made.",
            fix=f"Check {argument('factory_args')}.",
        )
    _refuse_untied(wanted, state, path, type(module).__name__)
    module.load_state_dict(state, strict=False)
    return loaded


def _pickled_weights(path: Path, roots: Collection[str], entry: str | None) -> LoadedCheckpoint:
    """Return the weights of a file with pickled objects: of a module, or a table with other objects in it."""
    held = _unpickled(path)
    if entry is None and isinstance(held, nn.Module):
        notes = ["weights read from a pickled module"]
        return LoadedCheckpoint(dict(held.state_dict()), sha256(path), path, notes)
    return read_state(_with_states(held), path, [], roots, entry)


def _modules_in(value: object, path: tuple[str, ...] = ()) -> dict[str, nn.Module]:
    """Return the modules in the tables and lists of a checkpoint by their entries."""
    if isinstance(value, nn.Module):
        return {".".join(path): value}
    table = as_table(value) if len(path) < 4 else None
    return {
        entry: module
        for name, inner in (table or {}).items()
        for entry, module in _modules_in(inner, (*path, str(name))).items()
    }


def _with_states(value: object, depth: int = 0) -> object:
    """Replace the modules in a table by their state dicts."""
    if isinstance(value, nn.Module):
        return dict(value.state_dict())
    if isinstance(value, Mapping) and depth < 4:
        return {name: _with_states(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple) and depth < 4:
        return [_with_states(inner, depth + 1) for inner in value]
    return value


def _storage(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return what two names of one tensor have in common; None for a tensor without data."""
    if not tensor.numel() or tensor.device.type == "meta":
        return None
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _without_shared(
    wanted: Mapping[str, torch.Tensor], missing: list[str], state: dict[str, torch.Tensor], notes: list[str]
) -> list[str]:
    """Give names that share a tensor of the module with a name in the file that one's values, as `load_model` does."""
    present: dict[object, str] = {}
    for name, tensor in wanted.items():
        if name in state and (place := _storage(tensor)) is not None:
            present.setdefault(place, name)
    shared = {name: present[place] for name in missing if (place := _storage(wanted[name])) in present}
    for name, other in shared.items():
        state[name] = state[other]
    if shared:
        pairs = [f"{name} is {other}" for name, other in shared.items()]
        notes.append(f"tensors that the module shares are in the file once: {bounded(pairs, 3)}")
    return [name for name in missing if name not in shared]


def _refuse_untied(
    wanted: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], path: Path, title: str
) -> None:
    """Refuse a file that has several values for one tensor of the module, of which the last would win.

    Raises:
        UsageError: there are such tensors.
    """
    first: dict[object, str] = {}
    for name, tensor in wanted.items():
        place = _storage(tensor)
        if place is None or name not in state:
            continue
        other = first.setdefault(place, name)
        if other != name and not torch.equal(state[other], state[name]):
            raise UsageError(
                f"{other} and {name} are one tensor of the {title} that the function made; in {path} they differ.",
                why="The file is of a model that does not share them; only one of the two could be loaded.",
                fix=f"Check {argument('factory_args')}: the function has to leave them apart.",
            )


def _is_pickled_module(path: Path) -> bool:
    """Return whether a file holds Python objects besides tensors, which can only be read by building them."""
    check_plain(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"Cannot read {path}.", why=f"{error.strerror or error}.", fix="Check the path.") from error
    except Exception:
        return path.suffix.lower() != ".safetensors"
    return False


def _unpickled(path: Path) -> Any:
    """Load what a file holds, which runs code from the file."""
    check_plain(path)
    _importable(Path.cwd())  # its classes may be there
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except OSError as error:
        raise UsageError(f"Cannot read {path}.", why=f"{error.strerror or error}.", fix="Check the path.") from error
    except Exception as error:
        raise UsageError(
            f"{path} cannot be unpickled.",
            why=first_line(error, 200),
            fix="Its classes have to be importable from here.",
        ) from error
