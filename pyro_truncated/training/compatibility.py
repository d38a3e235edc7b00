"""Compatibility of a run with a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.training.run_state import modules_of_run
from pyro_truncated.utils.parameter_store import replaced_parameters

MAY_DIFFER = ("model", "guide", "optimizer", "elbo", "search", "data")


def refuse_other_runs(
    content: dict[str, Any], run: Mapping[str, str], settings: Mapping[str, Any] | None, may_differ: Collection[str], path: str | Path
) -> None:
    """Compares a run and its settings with the saved ones.

    Raises:
        ValueError: naming what differs.
    """
    if unknown := sorted(set(may_differ) - set(MAY_DIFFER)):
        raise ValueError(f"may_differ names {unknown}; the parts of a run are {list(MAY_DIFFER)}")
    if settings is not None:
        refuse_other_settings(content["settings"], dict(settings), path)
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
    """Returns where two descriptions differ, shortened around the first difference."""
    same = next((i for i, (a, b) in enumerate(zip(saved, now, strict=False)) if a != b), min(len(saved), len(now)))
    start = max(0, same - 40) if max(len(saved), len(now)) > 160 else 0
    cut = ["..." * bool(start) + text[start : start + 160] + "..." * (len(text) > start + 160) for text in (saved, now)]
    return f"{name}: {cut[0]} in the checkpoint, {cut[1]} now"


def refuse_other_settings(saved: dict[str, Any], wanted: dict[str, Any], path: str | Path) -> None:
    """Compares settings with those saved.

    Raises:
        ValueError: naming what differs.
    """
    differing = sorted(
        name for name in saved.keys() | wanted.keys() if name not in saved or name not in wanted or saved[name] != wanted[name]
    )
    if differing:
        lines = "; ".join(f"{name}: {saved.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} now" for name in differing)
        raise ValueError(f"{path} was written by a run with other settings ({lines}). Use those, another file, or start over without it.")


def refuse_stale(svi: SVI) -> None:
    """Refuses modules whose parameters are shadowed in Pyro's store."""
    stale = sorted(parameter.name for parameter, _ in replaced_parameters(*modules_of_run(svi).values()))
    if stale:
        raise ValueError(
            f"Pyro's parameter store holds other parameters {stale} from an earlier model; "
            "call pyro.clear_param_store() before making the model and the guide"
        )


def refuse_other_models(content: dict[str, Any], svi: SVI, params: Mapping[str, Tensor], path: str | Path) -> None:
    """Refuses states that do not fit the modules, before loading any."""
    modules, saved = modules_of_run(svi), content["modules"]
    problems = [f"it holds the state of {sorted(saved)}, the run has {sorted(modules)}"] if saved.keys() != modules.keys() else []
    pairs = {name: (value, params[name]) for name, value in content["params"].items()}
    for name in saved.keys() & modules.keys():
        state = saved[name]
        pairs |= {f"{name}.{key}": (state[key], value) for key, value in modules[name].named_parameters() if key in state}
        problems += _other_names(modules[name], state, name)
        for prefix, part in modules[name].named_modules():
            if isinstance(part, AutoTruncated):
                problems += filter(None, [part.mismatch(state, f"{prefix}." if prefix else "")])
    problems += [f"{name} has the shape {tuple(a.shape)}, here {tuple(b.shape)}" for name, (a, b) in pairs.items() if a.shape != b.shape]
    if problems:
        raise ValueError(f"{path} was written by a run of another model or guide: {'; '.join(problems)}")


def _other_names(module: torch.nn.Module, state: Mapping[str, Any], name: str) -> list[str]:
    return [f"{name}.{key} is only {'in the checkpoint' if key in state else 'here'}" for key in names_alone(module, state)]


def names_alone(module: torch.nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Returns names that only one of two states has.

    Parts that decide themselves what they load do not count.
    """
    standard = torch.nn.Module._load_from_state_dict
    own = tuple(prefix for prefix, part in module.named_modules() if type(part)._load_from_state_dict is not standard)
    if "" in own:
        return []
    return sorted(key for key in state.keys() ^ module.state_dict().keys() if not key.startswith(tuple(f"{prefix}." for prefix in own)))
