"""Checkpoints for any number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor

from pyro_truncated.distributed import world
from pyro_truncated.distributed.launch import local_names
from pyro_truncated.distributed.shards import Portion, portion_of, rows_of, with_rows, without_rows
from pyro_truncated.em.gibbs import GibbsGuide
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.guide.saved_portion import PORTION
from pyro_truncated.training.checkpoint import content_of, write_checkpoint
from pyro_truncated.training.checkpoint_file import folder_of, read_rows, remove_others, write_rows

# Prefix of files with per-data-point values of the search.
_SEARCH = "search"


def refuse_unsaved(svi: SVI) -> None:
    """Refuses checkpoints that would not hold what every process has.

    Raises:
        NotImplementedError: saying what they would not.
    """
    if not isinstance(svi.guide, (AutoTruncated, AutoGuideList, GibbsGuide)) or getattr(svi.guide, "siblings", None) is not None:
        raise NotImplementedError(
            "checkpoints of several processes need an AutoTruncated, an AutoGuideList or a GibbsGuide; "
            f"got {type(svi.guide).__name__}. Train without a checkpoint, or in one process"
        )
    if local := sorted(local_names()):
        raise NotImplementedError(
            f"checkpoints of several processes do not hold parameters that are left to every process, {local}: train without a checkpoint, "
            "or in one process"
        )


def save_shared(
    path: Path, svi: SVI, number: int, portion: Portion, *, history: Any, settings: Mapping[str, Any] | None, run: Mapping[str, str]
) -> None:
    """Writes a checkpoint of several processes; all call it.

    Each process writes its populations, and what the search has learned of them, into a folder beside the file. Then the first one
    writes the file, which appears under its name last.

    Args:
        path: the file.
        svi: the run.
        number: of this checkpoint; different from that of the last one.
        portion: the data points of this process.
        history: what :func:`~pyro_truncated.training.checkpoint.save_checkpoint` takes, as what follows.
        settings: likewise.
        run: likewise.

    Raises:
        OSError: on all processes, if one of them cannot write; the last checkpoint is as it was.
    """
    content = content_of(svi, history=history, settings=settings, run=run)
    modules, optim = content["modules"], content["optim"]
    modules["guide"] = {name: value for name, value in modules["guide"].items() if not name.endswith(f"populations.{PORTION}")}
    rows: dict[str, Tensor] = {_short(name): modules["guide"].pop(name) for name in _row_names(svi.guide)}
    portion = portion.times(len(next(iter(rows.values()))) // portion.size)
    if optim.get("visited") is not None:
        rows["visited"] = optim.pop("visited")
    rows |= {_SEARCH + name: _padded(value, portion.size) for name, value in rows_of(content["search"]).items()}
    content["search"] = without_rows(content["search"])
    folder = folder_of(path) / str(number)
    written = _by_all(lambda: write_rows(folder, rows, portion))
    content["rows"] = {"folder": folder.name, "written": written, "total": portion.total}
    _by_all(lambda: write_checkpoint(path, content) if world.rank() == 0 else None)
    if world.rank() == 0:
        remove_others(folder.parent, folder.name)


def _by_all(act: Any) -> list[Any]:
    """Returns all processes' results, or fails together."""
    error, found = None, None
    try:
        found = act()
    except OSError as problem:
        error = problem
    results = world.gather((found, None if error is None else (error.errno, str(error))))
    told = next((problem for _, problem in results if problem is not None), None)
    if told is not None:
        raise error or OSError(told[0], told[1])
    return [value for value, _ in results]


def for_this_process(content: dict[str, Any], path: Path, svi: SVI, arguments: Any) -> dict[str, Any]:
    """Returns a checkpoint's part for this process, whoever wrote it.

    Raises:
        ValueError: if files are damaged or missing, or the checkpoint is of another number of data points.
    """
    portion = portion_of(arguments)
    held = content.get("rows")
    if held is None and (portion is None or not portion.is_part):
        return content
    modules = {name: dict(state) for name, state in content["modules"].items()}
    optim = dict(content["optim"])
    names = [name for name in _row_names(svi.guide) if held is not None or name in modules.get("guide", {})]
    if held is None:
        if not names:
            return content
        assert portion is not None
        every = {_short(name): modules["guide"][name] for name in names} | {"visited": optim.get("visited")}
        total = len(next(iter(every.values())))
        every |= {_SEARCH + name: value for name, value in rows_of(content["search"]).items()}
        portion = _of_populations(portion, total, path)
        rows = {name: None if value is None else value[portion.first : portion.first + portion.size] for name, value in every.items()}
    else:
        total = held["total"]
        portion = _of_populations(portion or Portion(0, total, total), total, path)
        rows = {name: read_rows(folder_of(path) / held["folder"], held["written"], name, portion) for name in held["written"][0]["sums"]}
    modules["guide"] |= {name: rows[_short(name)] for name in names if _short(name) in rows}
    if rows.get("visited") is not None:
        optim["visited"] = rows["visited"]
    learned = {name.removeprefix(_SEARCH): value for name, value in rows.items() if value is not None}
    search = with_rows(content["search"], learned, portion)
    return {name: value for name, value in content.items() if name != "rows"} | {"modules": modules, "optim": optim, "search": search}


def _row_names(guide: torch.nn.Module) -> list[str]:
    """Returns names of per-data-point values in a guide's ``state_dict``."""
    parts = ((prefix, getattr(part, "ROWS", ())) for prefix, part in guide.named_modules())
    return [f"{prefix}.{name}" if prefix else name for prefix, names in parts for name in names]


def _short(name: str) -> str:
    return name.removeprefix("populations.")


def _padded(values: Tensor, size: int) -> Tensor:
    """Zeros for data points that the search has not met."""
    return torch.cat([values, values.new_zeros(size - len(values), *values.shape[1:])])


def _of_populations(portion: Portion, total: int, path: Path) -> Portion:
    if total % portion.total:
        raise ValueError(f"{path} was written by a run of {total} data points, this one has {portion.total}")
    return portion.times(total // portion.total)
