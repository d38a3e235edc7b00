"""Checkpoints of a training run: written whole or not at all, and restored to the very numbers of a run that was never interrupted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated.guide import AutoTruncated
from pyro_truncated.parameters import absolute_names, relative_names, replaced_parameters

_FORMAT = "pyro_truncated checkpoint 2"


def save_checkpoint(path: str | Path, svi: SVI, *, history: Any = None, settings: Mapping[str, Any] | None = None) -> None:
    """Writes all that a run needs to go on: model, guide, optimiser, annealing step, random generators.

    The file appears under its name only once it is complete, so a process killed in the middle of writing leaves the last checkpoint
    intact. It holds tensors and plain Python values and loads with ``torch.load(path, weights_only=True)``.

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
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": _FORMAT,
        "settings": dict(settings or {}),
        "history": history,
        "modules": {name: module.state_dict() for name, module in _modules(svi).items()},
        "params": relative_names({name: value.detach() for name, value in _loose_params(svi).items()}, svi.model, svi.guide),
        "optim": relative_names(svi.optim.get_state(), svi.model, svi.guide),
        "num_evaluations": getattr(_elbo(svi), "num_evaluations", 0),
        "generators": {name: generator.get_state() for name, generator in _generators(svi)},
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: str | Path, svi: SVI, *, settings: Mapping[str, Any] | None = None) -> Any:
    """Restores a run saved by :func:`save_checkpoint` into freshly made model, guide, optimiser and ELBO.

    Nothing changes if the checkpoint is refused.

    Args:
        path: the file.
        svi: the run to restore. An ``AutoTruncated`` takes its populations before it was ever called; modules and functions that make
            parameters when they are first called must have been called.
        settings: compared with those saved, if given.

    Returns:
        The history saved.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is no checkpoint, one of other settings (the message names the settings that differ) or of another model
            (parameters of other shapes, populations of other sizes), or Pyro's parameter store still holds parameters of an earlier model
            under the same names, which would take the place of those restored.
        KeyError: if a parameter of a plain function does not exist yet.
    """
    content = _read(path)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a checkpoint written by save_checkpoint, or of another version")
    if settings is not None:
        _compare(content["settings"], dict(settings), path)
    _refuse_stale(svi)
    content |= {key: absolute_names(content[key], svi.model, svi.guide) for key in ("params", "optim")}
    params = _loose_params(svi)
    if missing := content["params"].keys() - params.keys():
        raise KeyError(f"the parameters {sorted(missing)} do not exist yet; call svi.evaluate_loss(...) once before load_checkpoint")
    _refuse_other_models(content, svi, params, path)
    for name, module in _modules(svi).items():
        module.load_state_dict(content["modules"][name])
    with torch.no_grad():
        for name, value in content["params"].items():
            params[name].copy_(value)
    svi.optim.set_state(content["optim"])
    if hasattr(elbo := _elbo(svi), "num_evaluations"):
        elbo.num_evaluations = content["num_evaluations"]
    for name, generator in _generators(svi):
        if name in content["generators"]:
            generator.set_state(content["generators"][name])
    return content["history"]


def _read(path: str | Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        # Of a file that torch did not write, it says so in as many ways as there are files.
        raise ValueError(f"{path} is not a checkpoint written by save_checkpoint: torch cannot read it ({error})") from error


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
    """Names that either state has alone, but for those of parts that decide themselves what they load."""
    standard = torch.nn.Module._load_from_state_dict
    own = tuple(prefix for prefix, part in module.named_modules() if type(part)._load_from_state_dict is not standard)
    if "" in own:
        return []
    here = module.state_dict()
    alone = sorted(key for key in state.keys() ^ here.keys() if not key.startswith(tuple(f"{prefix}." for prefix in own)))
    places = ("here" if key in here else "in the checkpoint" for key in alone)
    return [f"{name}.{key} is only {place}" for key, place in zip(alone, places, strict=True)]


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
    return {name: part for name, part in (("model", svi.model), ("guide", svi.guide)) if isinstance(part, torch.nn.Module)}


def _loose_params(svi: SVI) -> dict[str, Tensor]:
    """Unconstrained parameters of the store that belong to no module of the run."""
    owned = {id(param) for module in _modules(svi).values() for param in module.parameters()}
    return {name: param for name, param in pyro.get_param_store().named_parameters() if id(param) not in owned}


def _elbo(svi: SVI) -> Any:
    return getattr(svi.loss, "__self__", None)


def _generators(svi: SVI) -> Iterator[tuple[str, torch.Generator]]:
    """Torch's global generators, and the one that the search was given."""
    yield "cpu", torch.default_generator
    if torch.cuda.is_available():
        torch.cuda.init()
        for index, generator in enumerate(torch.cuda.default_generators):
            yield f"cuda:{index}", generator
    search = getattr(_elbo(svi), "search", None)
    for index, part in enumerate(getattr(search, "searches", (search,))):
        own: torch.Generator | None = getattr(part, "generator", None)
        if own is not None:
            yield f"search {index}", own
