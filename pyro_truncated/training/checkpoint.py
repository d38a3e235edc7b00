"""Checkpoints of a training run: written whole or not at all, and restored to the very numbers of a run that was never interrupted."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.training import checkpoint_file
from pyro_truncated.training.identity import describe_run
from pyro_truncated.utils.parameters import absolute_names, relative_names
from pyro_truncated.utils.shadowing import replaced_parameters

_FORMAT = "pyro_truncated checkpoint 2"
_PARTS = {"format", "run", "settings", "history", "modules", "params", "optim", "counts", "generators"}
_COUNTS = ("num_evaluations", "num_steps")
MAY_DIFFER = ("model", "guide", "optimizer", "elbo", "search", "data")


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the run goes on."""


def save_checkpoint(
    path: str | Path, svi: SVI, *, history: Any = None, settings: Mapping[str, Any] | None = None, run: Mapping[str, str] | None = None
) -> None:
    """Writes all that a run needs to go on: model, guide, optimiser, annealing step, random generators.

    The file appears under its name only once it is complete and on the disk, so a process killed in the middle of writing leaves the last
    checkpoint intact. It holds tensors and plain Python values, loads with ``torch.load(path, weights_only=True)``, and ends in a checksum.

    What a search has learned of the data (:class:`~pyro_truncated.GPSelect`) is not saved: it learns anew, and the run does not go on to
    the very numbers. Nor are buffers of modules that a function merely calls.

    Example::

        history = load_checkpoint("run.pt", svi, settings=settings) if Path("run.pt").exists() else []
        for step in range(len(history), 200):
            history.append(svi.step(y))
            save_checkpoint("run.pt", svi, history=history, settings=settings)

    Args:
        path: file to write; its folder is created.
        svi: the run. Parameters of modules are saved with their module, those of plain functions from Pyro's parameter store.
        history: what the caller records, made of tensors, numbers, strings, lists and dictionaries.
        settings: what :func:`load_checkpoint` compares, so that a run is not continued with other settings.
        run: descriptions by which the run is known again; default: :func:`~pyro_truncated.training.identity.describe_run`.

    Raises:
        OSError: if the file cannot be written, with its path and the cause; the last one is as it was.
    """
    content = {
        "format": _FORMAT,
        "run": dict(describe_run(svi) if run is None else run),
        "settings": dict(settings or {}),
        "history": history,
        "modules": {name: module.state_dict() for name, module in _modules(svi).items()},
        "params": relative_names({name: value.detach() for name, value in _loose_params(svi).items()}, svi.model, svi.guide),
        "optim": relative_names(svi.optim.get_state(), svi.model, svi.guide),
        "counts": {name: getattr(_elbo(svi), name) for name in _COUNTS if hasattr(_elbo(svi), name)},
        "generators": {name: generator.get_state() for name, generator in _generators(svi)},
    }
    checkpoint_file.write(Path(path), content)


def load_checkpoint(
    path: str | Path,
    svi: SVI,
    *,
    settings: Mapping[str, Any] | None = None,
    run: Mapping[str, str] | None = None,
    may_differ: Collection[str] = (),
) -> Any:
    """Restores a run saved by :func:`save_checkpoint` into freshly made model, guide, optimiser and ELBO.

    Nothing changes if the checkpoint is refused.

    Args:
        path: the file.
        svi: the run to restore. An ``AutoTruncated`` takes its populations before it was ever called; modules and functions that make
            parameters when they are first called must have been called.
        settings: compared with those saved, if given.
        run: as for :func:`save_checkpoint`.
        may_differ: parts that may be others than those of the run that was saved: ``"model"``, ``"guide"``, ``"optimizer"`` (it starts
            anew), ``"elbo"``, ``"search"``, ``"data"``. Shapes must fit whatever is said here.

    Returns:
        The history saved.

    Raises:
        OSError: if the file cannot be read; ``FileNotFoundError`` if there is none.
        ValueError: if the file is no checkpoint, damaged, of another run or other settings (the message names what differs) or of another
            model (parameters of other shapes, populations of other sizes), or Pyro's parameter store still holds parameters of an earlier
            model under the same names, which would take the place of those restored.
        KeyError: if a parameter of a plain function does not exist yet.
    """
    content = read_checkpoint(path, svi)
    refuse_other_runs(content, describe_run(svi) if run is None else run, settings, may_differ, path)
    return restore(content, svi, path, keeps_optimizer="optimizer" in may_differ)


def read_checkpoint(path: str | Path, svi: SVI) -> dict[str, Any]:
    """What a file holds, unchanged since it was written, but for names of parameters, which are those of this run.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no checkpoint, of another version, or damaged.
    """
    content = checkpoint_file.read(Path(path))
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.keys() != _PARTS:
        raise ValueError(f"{path} is not a checkpoint written by save_checkpoint, or of another version")
    return content | {key: absolute_names(content[key], svi.model, svi.guide) for key in ("params", "optim")}


def refuse_other_runs(
    content: dict[str, Any], run: Mapping[str, str], settings: Mapping[str, Any] | None, may_differ: Collection[str], path: str | Path
) -> None:
    """Compares what a run is known by, and its settings, with those saved.

    Raises:
        ValueError: naming what differs.
    """
    if unknown := sorted(set(may_differ) - set(MAY_DIFFER)):
        raise ValueError(f"may_differ names {unknown}; the parts of a run are {list(MAY_DIFFER)}")
    if settings is not None:
        _compare(content["settings"], dict(settings), path)
    compared = {*run, *(content["run"] if any(_group(name) == "data" for name in run) else ())}
    names = sorted(name for name in compared if _group(name) not in may_differ and content["run"].get(name) != run.get(name))
    if names:
        groups = sorted({_group(name) for name in names})
        lines = "; ".join(_difference(name, content["run"].get(name, "absent"), run.get(name, "absent")) for name in names)
        raise ValueError(
            f"{path} was written by another run: {lines}. Give this run another file or remove that one to start over; "
            f"to go on from it nevertheless, pass may_differ={groups}"
        )


def _group(name: str) -> str:
    return "data" if name.startswith("argument") else name


def _difference(name: str, saved: str, now: str) -> str:
    """Where two descriptions differ; of long ones, only what is around the first difference."""
    same = next((i for i, (a, b) in enumerate(zip(saved, now, strict=False)) if a != b), min(len(saved), len(now)))
    start = max(0, same - 40) if max(len(saved), len(now)) > 160 else 0
    cut = ["..." * bool(start) + text[start : start + 160] + "..." * (len(text) > start + 160) for text in (saved, now)]
    return f"{name}: {cut[0]} in the checkpoint, {cut[1]} now"


def restore(content: dict[str, Any], svi: SVI, path: str | Path, *, keeps_optimizer: bool = False) -> Any:
    """Puts what was read into a run, or leaves the run as it was; returns the history."""
    _refuse_stale(svi)
    params = _loose_params(svi)
    if missing := content["params"].keys() - params.keys():
        raise KeyError(f"the parameters {sorted(missing)} do not exist yet; call svi.evaluate_loss(...) once before load_checkpoint")
    _refuse_other_models(content, svi, params, path)
    undo = _remember(svi, params)
    try:
        for name, module in _modules(svi).items():
            module.load_state_dict(content["modules"][name])
        with torch.no_grad():
            for name, value in content["params"].items():
                params[name].copy_(value)
        if not keeps_optimizer:
            _set_optimizer(svi.optim, content["optim"])
        for name, generator in _generators(svi):
            if name in content["generators"]:
                generator.set_state(content["generators"][name])
    except Exception as error:
        undo()
        raise ValueError(f"{path} does not fit this run, which is as it was: {error}") from error
    for name, count in content["counts"].items():
        if hasattr(_elbo(svi), name):
            setattr(_elbo(svi), name, count)
    return content["history"]


def lacks_parameters(content: dict[str, Any], svi: SVI) -> bool:
    """Whether a checkpoint holds parameters that this run makes only when it is first called."""
    if content["params"].keys() - _loose_params(svi).keys():
        return True
    pairs = ((module, content["modules"].get(name, {})) for name, module in _modules(svi).items())
    return any(key in state for module, state in pairs for key in _names_alone(module, state))


def _set_optimizer(optim: Any, state: Any) -> None:
    if hasattr(optim, "optim_objs"):
        # Pyro hands a state to the optimisers that it makes for parameters it has not met yet, and to no others.
        optim.optim_objs.clear()
        optim.grad_clip.clear()
    optim.set_state(copy.deepcopy(state))


def _remember(svi: SVI, params: Mapping[str, Tensor]) -> Callable[[], None]:
    """A function that puts modules, parameters, optimiser and generators back to what they are now."""
    parts = [(part, _snapshot(part)) for module in _modules(svi).values() for part in module.modules()]
    tensors = [*params.values(), *(param for module in _modules(svi).values() for param in module.parameters())]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    optim = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(svi.optim).items()}
    generators = [(generator, generator.get_state()) for _, generator in _generators(svi)]

    def undo() -> None:
        """Puts everything back as it was."""
        for part, held in parts:
            part.__dict__.update(held)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        vars(svi.optim).update(optim)
        for generator, drawn in generators:
            generator.set_state(drawn)

    return undo


def _snapshot(module: torch.nn.Module) -> dict[str, Any]:
    buffers: dict[str, Any] = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    return {**module.__dict__, "_buffers": buffers}


def _refuse_other_models(content: dict[str, Any], svi: SVI, params: Mapping[str, Tensor], path: str | Path) -> None:
    """Refuses states that do not fit the modules, before any of them is loaded."""
    modules, saved = _modules(svi), content["modules"]
    problems = [f"it holds the state of {sorted(saved)}, the run has {sorted(modules)}"] if saved.keys() != modules.keys() else []
    pairs = {name: (value, params[name]) for name, value in content["params"].items()}
    for name in saved.keys() & modules.keys():
        state = saved[name]
        pairs |= {f"{name}.{key}": (state[key], value) for key, value in modules[name].named_parameters() if key in state}
        problems += _other_names(modules[name], state, name)
        for prefix, part in modules[name].named_modules():
            if isinstance(part, AutoTruncated):
                words, cardinalities = (state.get(".".join(filter(None, (prefix, key)))) for key in ("words", "cardinalities"))
                problems += filter(None, [part._mismatch(words, cardinalities)])
    problems += [f"{name} has the shape {tuple(a.shape)}, here {tuple(b.shape)}" for name, (a, b) in pairs.items() if a.shape != b.shape]
    if problems:
        raise ValueError(f"{path} was written by a run of another model or guide: {'; '.join(problems)}")


def _other_names(module: torch.nn.Module, state: Mapping[str, Any], name: str) -> list[str]:
    return [f"{name}.{key} is only {'in the checkpoint' if key in state else 'here'}" for key in _names_alone(module, state)]


def _names_alone(module: torch.nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Names that either state has alone, but for those of parts that decide themselves what they load."""
    standard = torch.nn.Module._load_from_state_dict
    own = tuple(prefix for prefix, part in module.named_modules() if type(part)._load_from_state_dict is not standard)
    if "" in own:
        return []
    return sorted(key for key in state.keys() ^ module.state_dict().keys() if not key.startswith(tuple(f"{prefix}." for prefix in own)))


def _compare(saved: dict[str, Any], wanted: dict[str, Any], path: str | Path) -> None:
    differing = sorted(
        name for name in saved.keys() | wanted.keys() if name not in saved or name not in wanted or saved[name] != wanted[name]
    )
    if differing:
        lines = "; ".join(f"{name}: {saved.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} now" for name in differing)
        raise ValueError(f"{path} was written by a run with other settings ({lines}). Use those, another file, or start over without it.")


def _refuse_stale(svi: SVI) -> None:
    """Refuses modules whose parameters are shadowed: Pyro looks a parameter up in its store first, by name."""
    stale = sorted(parameter.name for parameter, _ in replaced_parameters(*_modules(svi).values()))
    if stale:
        raise ValueError(
            f"Pyro's parameter store holds other parameters {stale} from an earlier model; "
            "call pyro.clear_param_store() before making the model and the guide"
        )


def _modules(svi: SVI) -> dict[str, torch.nn.Module]:
    """The modules that model and guide are, that they are methods of, or that handlers wrap; one of both is named once."""
    found = {name: module for name, part in (("model", svi.model), ("guide", svi.guide)) if (module := _module_of(part)) is not None}
    if found.get("model") is found.get("guide"):
        found.pop("guide", None)
    return found


def _module_of(part: Any) -> torch.nn.Module | None:
    while isinstance(part, functools.partial):
        part = next((argument for argument in part.args[::-1] if callable(argument)), None)
    owner = getattr(part, "__self__", part)
    return owner if isinstance(owner, torch.nn.Module) else None


def _loose_params(svi: SVI) -> dict[str, Tensor]:
    """Unconstrained parameters of the store that belong to no module of the run."""
    owned = {id(param) for module in _modules(svi).values() for param in module.parameters()}
    return {name: param for name, param in pyro.get_param_store().named_parameters() if id(param) not in owned}


def _elbo(svi: SVI) -> Any:
    return getattr(svi.loss, "__self__", None)


def _generators(svi: SVI) -> Iterator[tuple[str, torch.Generator]]:
    """Torch's global generators, and those that ELBO, searches and affinities were given."""
    yield "cpu", torch.default_generator
    if torch.cuda.is_available():
        torch.cuda.init()
        for index, generator in enumerate(torch.cuda.default_generators):
            yield f"cuda:{index}", generator
    elbo = _elbo(svi)
    search = getattr(elbo, "search", None)
    searches = getattr(search, "searches", (search,))
    owners = {"elbo": elbo} | {f"search {i}": part for i, part in enumerate(searches)}
    owners |= {f"affinity {i}": getattr(part, "affinity", None) for i, part in enumerate(searches)}
    for name, owner in owners.items():
        own: torch.Generator | None = getattr(owner, "generator", None)
        if own is not None:
            yield name, own
