"""Checkpoints that know no number of processes: a small file of what all have in common, and the rows of every data point beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyro.infer import SVI
from torch import Tensor

from pyro_truncated.distributed import world
from pyro_truncated.distributed.shards import Portion, portion_of
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.training.checkpoint import content_of, write_checkpoint
from pyro_truncated.training.row_files import folder_of, read_rows, remove_others, write_rows
from pyro_truncated.training.run_state import search_of

# Where the content of a checkpoint has a row per data point, and under what name it is kept.
_POPULATIONS = {"words": "populations.words", "log_joint": "populations.log_joint"}


def refuse_unsaved(svi: SVI) -> None:
    """Refuses checkpoints that would not hold what every process has.

    Raises:
        NotImplementedError: saying what they would not.
    """
    if not isinstance(svi.guide, AutoTruncated) or svi.guide.siblings is not None:
        raise NotImplementedError(
            f"checkpoints of several processes hold the populations of a guide that is one AutoTruncated; this one is "
            f"{type(svi.guide).__name__}: train without a checkpoint, or in one process"
        )
    search = search_of(svi)
    if search is not None and search.learns:
        raise NotImplementedError(
            f"checkpoints of several processes do not hold what {type(search).__name__} has learned of the data points of each: train "
            "without a checkpoint, or in one process"
        )


def save_shared(path: Path, svi: SVI, number: int, *, history: Any, settings: Mapping[str, Any] | None, run: Mapping[str, str]) -> None:
    """Writes a checkpoint of a run of several processes, all of which call this.

    Each writes the populations of its own data points into a folder beside the file; then the first one writes the file, which says where
    they are and appears under its name last.

    Args:
        path: the file.
        svi: the run.
        number: of this checkpoint; different from that of the last one.
        history: what :func:`~pyro_truncated.training.checkpoint.save_checkpoint` takes, as what follows.
        settings: likewise.
        run: likewise.

    Raises:
        OSError: on all processes, if one of them cannot write; the last checkpoint is as it was.
    """
    guide: AutoTruncated = svi.guide
    portion = guide.populations.portion
    assert portion is not None
    content = content_of(svi, history=history, settings=settings, run=run)
    modules, optim = content["modules"], content["optim"]
    modules["guide"].pop("populations.portion", None)
    rows: dict[str, Tensor] = {short: modules["guide"].pop(name) for short, name in _POPULATIONS.items()}
    if optim.get("visited") is not None:
        rows["visited"] = optim.pop("visited")
    folder = folder_of(path) / str(number)
    written = _by_all(lambda: write_rows(folder, rows, portion))
    content["rows"] = {"folder": folder.name, "written": written, "total": portion.total}
    _by_all(lambda: write_checkpoint(path, content) if world.rank() == 0 else None)
    if world.rank() == 0:
        remove_others(folder.parent, folder.name)


def _by_all(act: Any) -> list[Any]:
    """What the processes' actions return; if one of them cannot write, nobody goes on."""
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
    """What a checkpoint holds for this process, whoever has written it, one process or several.

    Raises:
        ValueError: if files are damaged or missing, or the checkpoint is of another number of data points.
    """
    portion = portion_of(arguments)
    held = content.get("rows")
    if held is None and (portion is None or not portion.is_part or not isinstance(svi.guide, AutoTruncated)):
        return content
    modules = {name: dict(state) for name, state in content["modules"].items()}
    optim = dict(content["optim"])
    if held is None:
        assert portion is not None
        total = len(modules["guide"][_POPULATIONS["words"]])
        portion = _of_populations(portion, total, path)
        every = {short: modules["guide"][name] for short, name in _POPULATIONS.items()} | {"visited": optim.get("visited")}
        rows = {name: None if value is None else value[portion.first : portion.first + portion.size] for name, value in every.items()}
    else:
        total = held["total"]
        portion = _of_populations(portion or Portion(0, total, total), total, path)
        rows = {name: read_rows(folder_of(path) / held["folder"], held["written"], name, portion) for name in held["written"][0]["sums"]}
    modules["guide"] |= {name: rows[short] for short, name in _POPULATIONS.items()}
    if rows.get("visited") is not None:
        optim["visited"] = rows["visited"]
    return {name: value for name, value in content.items() if name != "rows"} | {"modules": modules, "optim": optim}


def _of_populations(portion: Portion, total: int, path: Path) -> Portion:
    if total % portion.total:
        raise ValueError(f"{path} was written by a run of {total} data points, this one has {portion.total}")
    return portion.times(total // portion.total)
