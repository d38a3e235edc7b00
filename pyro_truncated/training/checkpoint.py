"""Checkpoints: atomic files, of one or several processes, restored to equal numbers."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor

from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.launch import AllReduced
from pyro_truncated.distributed.shards import Portion, collect_rows, find_portion, with_rows, without_rows
from pyro_truncated.em.gibbs import GibbsGuide
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.guide.product_store import ProductStore, count_saved_groups
from pyro_truncated.guide.store import PORTION, PopulationStore
from pyro_truncated.guide.whole_model import WholeModelGuide
from pyro_truncated.program.product_layout import ProductLayout
from pyro_truncated.search.base import Search
from pyro_truncated.training import checkpoint_file
from pyro_truncated.training.checkpoint_file import read_rows, remove_others, rows_folder, write_rows
from pyro_truncated.training.fingerprint import describe_run
from pyro_truncated.utils.devices import module_device, to_device
from pyro_truncated.utils.parameter_store import (
    absolute_names,
    empty_store,
    load_snapshot,
    relative_names,
    replaced_parameters,
    snapshot,
    spare_random_numbers,
)

# Raised whenever older files can be read no more: names of modules, buffers or parts have changed.
LAYOUT = 5
_FORMAT = "pyro_truncated checkpoint"
_PARTS = {"format", "run", "settings", "history", "modules", "params", "optim", "counts", "search", "generators"}


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; the run goes on.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> svi = SVI(model, AutoTruncated(model, num_states=16), ClosedForm(model), Truncated_ELBO())
        >>> with warnings.catch_warnings(action="error", category=CheckpointWarning):  # a run that cannot be saved stops here
        ...     training = fit(svi, y, steps=2, checkpoint="run.pt", progress=False)
    """


def save_checkpoint(
    path: str | Path, svi: SVI, *, history: Any = None, settings: Mapping[str, Any] | None = None, run: Mapping[str, str] | None = None
) -> None:
    """Writes the complete state of a run.

    It holds model, guide, optimiser, annealing step, search and random generators.

    The file appears under its name only once it is complete and on the disk. So a process killed while it writes leaves the last
    checkpoint intact. The file holds tensors and plain Python values, loads with ``torch.load(path, weights_only=True)``, and ends in a
    checksum.

    What a search has learned of the data (:class:`~pyro_truncated.GPSelect`) is what its ``state_dict()`` returns. Buffers of modules that
    a function merely calls are not saved.

    Example::

        from pyro_truncated.training.checkpoint import load_checkpoint, save_checkpoint

        history = load_checkpoint("run.pt", svi, settings=settings) if Path("run.pt").exists() else []
        for step in range(len(history), 200):
            history.append(svi.step(y))
            save_checkpoint("run.pt", svi, history=history, settings=settings)

    Args:
        path: file to write; its folder is created.
        svi: the run. Parameters of modules are saved with their module, those of plain functions from Pyro's parameter store.
        history: what the caller records, made of tensors, numbers, strings, lists and dictionaries.
        settings: what :func:`load_checkpoint` compares, so that a run is not continued with other settings.
        run: descriptions by which the run is known again; default: :func:`~pyro_truncated.training.fingerprint.describe_run`.

    Raises:
        OSError: if the file cannot be written, with its path and the cause; the last one is as it was.
    """
    checkpoint_file.write(Path(path), _make_content(svi, history=history, settings=settings, run=run))


def _make_content(svi: SVI, *, history: Any, settings: Mapping[str, Any] | None, run: Mapping[str, str] | None) -> dict[str, Any]:
    return {
        "format": f"{_FORMAT} {LAYOUT}",
        "run": dict(describe_run(svi) if run is None else run),
        "settings": dict(settings or {}),
        "history": history,
        **RunParts(svi).state(),
    }


def load_checkpoint(
    path: str | Path,
    svi: SVI,
    *,
    settings: Mapping[str, Any] | None = None,
    run: Mapping[str, str] | None = None,
    may_differ: Collection[str] = (),
) -> Any:
    """Restores a run into new model, guide, optimiser and ELBO.

    Nothing changes if the checkpoint is refused.

    Args:
        path: the file.
        svi: the run to restore. An ``AutoTruncated`` may be restored before its first call. Modules and functions that make parameters
            in their first call must have been called.
        settings: compared with those saved, if given.
        run: as for :func:`save_checkpoint`.
        may_differ: parts that may differ from those of the saved run: ``"model"``, ``"guide"``, ``"optimizer"`` (it starts anew),
            ``"elbo"``, ``"search"`` (it learns anew), ``"data"``. Shapes must fit in any case.

    Returns:
        The history saved.

    Raises:
        OSError: if the file cannot be read; ``FileNotFoundError`` if there is none.
        ValueError: if the file is no checkpoint, damaged, or of another version, run, setting or model. The message names what differs.
            Also if Pyro's store holds parameters of an earlier model under the same names.
        KeyError: if a parameter of a plain function does not exist yet.
    """
    content = read_checkpoint(path, svi)
    refuse_other_runs(content, describe_run(svi) if run is None else run, settings, may_differ, path)
    return load_state(content, svi, path, may_differ)


def read_checkpoint(path: str | Path, svi: SVI) -> dict[str, Any]:
    """Reads a file, with parameter names of this run."""
    content = checkpoint_file.read(Path(path))
    kind = content.get("format") if isinstance(content, dict) else None
    if not isinstance(kind, str) or not kind.startswith(_FORMAT):
        raise ValueError(f"{path} is not a checkpoint written by save_checkpoint")
    if kind != f"{_FORMAT} {LAYOUT}":
        raise ValueError(
            f"{path} was written by another version of pyro_truncated: its layout is{kind.removeprefix(_FORMAT)}, this version reads "
            f"layout {LAYOUT}. Finish the run with the version that began it, or remove the file to start over"
        )
    # On several processes it also names the files of rows.
    if content.keys() - {"rows"} != _PARTS:
        raise ValueError(f"{path} is not a checkpoint written by save_checkpoint: it holds {sorted(content)}, not {sorted(_PARTS)}")
    return {**content, **{key: absolute_names(content[key], svi.model, svi.guide) for key in ("params", "optim")}}


def load_state(content: dict[str, Any], svi: SVI, path: str | Path, may_differ: Collection[str] = ()) -> Any:
    """Loads a state and returns its history, or changes nothing."""
    run = RunParts(svi)
    stale = sorted(parameter.name for parameter, _ in replaced_parameters(*run.modules.values()))
    if stale:
        raise ValueError(
            f"Pyro's parameter store holds other parameters {stale} from an earlier model; "
            "call pyro.clear_param_store() before making the model and the guide"
        )
    if missing := content["params"].keys() - run.params.keys():
        raise KeyError(f"the parameters {sorted(missing)} do not exist yet; call svi.evaluate_loss(...) once before load_checkpoint")
    _refuse_other_models(content, run, path)
    undo = run.keep()
    try:
        run.load(content, leaves=may_differ)
    except Exception as error:
        undo()
        raise ValueError(f"{path} does not fit this run, which is unchanged: {error}") from error
    return content["history"]


def lacks_parameters(content: dict[str, Any], svi: SVI) -> bool:
    """Whether a checkpoint holds parameters that this run has yet to create."""
    run = RunParts(svi)
    if content["params"].keys() - run.params.keys():
        return True
    pairs = ((module, content["modules"].get(name, {})) for name, module in run.modules.items())
    return any(key in state for module, state in pairs for key in _unmatched_names(module, state))


MAY_DIFFER = ("model", "guide", "optimizer", "elbo", "search", "data")


def refuse_other_runs(
    content: dict[str, Any], run: Mapping[str, str], settings: Mapping[str, Any] | None, may_differ: Collection[str], path: str | Path
) -> None:
    """Compares a run and its settings with the saved ones."""
    if unknown := sorted(set(may_differ) - set(MAY_DIFFER)):
        raise ValueError(f"may_differ names {unknown}; the parts of a run are {list(MAY_DIFFER)}")
    if settings is not None and (lines := "; ".join(_differences(content["settings"], settings).values())):
        raise ValueError(f"{path} was written by a run with other settings ({lines}). Use those, another file, or start over without it.")
    is_of_data = any(_group(name) == "data" for name in run)
    saved = {name: value for name, value in content["run"].items() if is_of_data or name in run}
    differences = {name: line for name, line in _differences(saved, run).items() if _group(name) not in may_differ}
    if differences:
        groups = sorted({_group(name) for name in differences})
        raise ValueError(
            f"{path} was written by another run: {'; '.join(differences.values())}. Give this run another file or remove that one to start "
            f"over; to go on from it nevertheless, pass may_differ={groups}"
        )


def _group(name: str) -> str:
    return "data" if name.startswith("argument") else name


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, str]:
    """Returns where descriptions differ, 160 characters from 40 before the first difference."""
    lines = {}
    for name in sorted(saved.keys() | current.keys()):
        if name in saved and name in current and saved[name] == current[name]:
            continue
        then, now = (str(values.get(name, "absent")) for values in (saved, current))
        same = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
        start = max(0, same - 40) if max(len(then), len(now)) > 160 else 0
        cut = ["..." * bool(start) + text[start : start + 160] + "..." * (len(text) > start + 160) for text in (then, now)]
        lines[name] = f"{name}: {cut[0]} in the checkpoint, {cut[1]} now"
    return lines


def _refuse_other_models(content: dict[str, Any], run: RunParts, path: str | Path) -> None:
    """Refuses states that do not fit the modules, before loading any."""
    modules, saved = run.modules, content["modules"]
    problems = [f"it holds the state of {sorted(saved)}, the run has {sorted(modules)}"] if saved.keys() != modules.keys() else []
    pairs = {name: (value, run.params[name]) for name, value in content["params"].items()}
    for name in saved.keys() & modules.keys():
        state = saved[name]
        pairs |= {f"{name}.{key}": (state[key], value) for key, value in modules[name].named_parameters() if key in state}
        unmatched = _unmatched_names(modules[name], state)
        problems += [f"{name}.{key} is only {'in the checkpoint' if key in state else 'here'}" for key in unmatched]
        for prefix, part in modules[name].named_modules():
            if isinstance(part, AutoTruncated):
                problems += filter(None, [part.mismatch(state, f"{prefix}." if prefix else "")])
    problems += [f"{name} has the shape {tuple(a.shape)}, here {tuple(b.shape)}" for name, (a, b) in pairs.items() if a.shape != b.shape]
    if problems:
        raise ValueError(f"{path} was written by a run of another model or guide: {'; '.join(problems)}")


def _unmatched_names(module: torch.nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Returns names that only one of two states has.

    Parts that decide themselves what they load do not count.
    """
    standard = torch.nn.Module._load_from_state_dict
    own = tuple(prefix for prefix, part in module.named_modules() if type(part)._load_from_state_dict is not standard)
    if "" in own:
        return []
    return sorted(key for key in state.keys() ^ module.state_dict().keys() if not key.startswith(tuple(f"{prefix}." for prefix in own)))


class RunParts:
    """The parts of a run that hold its state."""

    def __init__(self, svi: SVI) -> None:
        parts = {"model": _unwrap_module(svi.model), "guide": _unwrap_module(svi.guide)}
        if parts["model"] is parts["guide"]:
            del parts["guide"]
        self.modules = {name: module for name, module in parts.items() if module is not None}
        own = {id(param) for module in self.modules.values() for param in module.parameters()}
        # Unconstrained parameters of Pyro's store, without those of modules.
        self.params = {name: param for name, param in pyro.get_param_store().named_parameters() if id(param) not in own}
        self._svi, self._optim = svi, svi.optim.optimizer if isinstance(svi.optim, AllReduced) else svi.optim
        # None where the loss is a function of its own.
        self._elbo: Any = getattr(svi.loss, "__self__", None)
        search = getattr(self._elbo, "search", None)
        self._search = search if isinstance(search, Search) else None

    def state(self) -> dict[str, Any]:
        """The complete state, of tensors and plain values under portable names."""
        svi = self._svi
        return {
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "params": relative_names({name: value.detach() for name, value in self.params.items()}, svi.model, svi.guide),
            "optim": relative_names(svi.optim.get_state(), svi.model, svi.guide),
            "counts": self._counts(),
            "search": {} if self._search is None else self._search.state_dict(),
            "generators": {name: generator.get_state() for name, generator in self._generators()},
        }

    def load(self, state: Mapping[str, Any], leaves: Collection[str] = ()) -> None:
        """Loads a state, perhaps without optimiser or search."""
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        load_snapshot([self.params[name] for name in state["params"]], state["params"].values())
        if "optimizer" not in leaves:
            if hasattr(self._optim, "optim_objs"):
                # Pyro gives a state only to optimisers of parameters that it has not met.
                self._optim.optim_objs.clear()
                self._optim.grad_clip.clear()
            self._optim.set_state(copy.deepcopy(state["optim"]))
        if self._search is not None and "search" not in leaves:
            param = next(iter(self.params.values()), None)
            device = module_device(self.modules.get("model")) if param is None else param.device
            self._search.load_state_dict(to_device(state["search"], device))
        for name, generator in self._generators():
            if name in state["generators"]:
                generator.set_state(state["generators"][name])
        for name in self._counts().keys() & state["counts"].keys():
            setattr(self._elbo, name, state["counts"][name])

    def keep(self) -> Callable[[], None]:
        """Returns a function that restores the present state."""
        parts = [
            (part, {**vars(part), "_buffers": {name: None if value is None else value.clone() for name, value in part._buffers.items()}})
            for module in self.modules.values()
            for part in module.modules()
        ]
        tensors = [*self.params.values(), *(param for module in self.modules.values() for param in module.parameters())]
        values = snapshot(tensors)
        optim = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(self._optim).items()}
        generators = [(generator, generator.get_state()) for _, generator in self._generators()]
        counts, search_state = self._counts(), {} if self._search is None else self._search.state_dict()

        def undo() -> None:
            for part, attributes in parts:
                part.__dict__.update(attributes)
            load_snapshot(tensors, values)
            vars(self._optim).update(optim)
            if self._search is not None:
                self._search.load_state_dict(search_state)
            for generator, state in generators:
                generator.set_state(state)
            for name, count in counts.items():
                setattr(self._elbo, name, count)

        return undo

    def _counts(self) -> dict[str, int]:
        return {name: getattr(self._elbo, name) for name in ("num_evaluations", "num_steps") if hasattr(self._elbo, name)}

    def _generators(self) -> Iterator[tuple[str, torch.Generator]]:
        """Torch's global generators and that of the ELBO; searches save their own."""
        yield "cpu", torch.default_generator
        if torch.cuda.is_available():
            torch.cuda.init()
            for index, generator in enumerate(torch.cuda.default_generators):
                yield f"cuda:{index}", generator
        own: torch.Generator | None = getattr(self._elbo, "generator", None)
        if own is not None:
            yield "elbo", own


def _unwrap_module(part: Any) -> torch.nn.Module | None:
    while isinstance(part, functools.partial):
        part = next((argument for argument in part.args[::-1] if callable(argument)), None)
    owner = getattr(part, "__self__", part)
    return owner if isinstance(owner, torch.nn.Module) else None


# Prefix of files with per-data-point values of the search.
_SEARCH = "search"
# Values by which populations, or those of a group of nodes, say whose they are.
_PORTION_NAME = re.compile(rf"populations\.(groups\.\d+\.)?{PORTION}$")
_POPULATIONS = "populations."


def refuse_partial_checkpoint(svi: SVI) -> None:
    """Refuses checkpoints that would not hold what every process has."""
    if not isinstance(svi.guide, (AutoTruncated, AutoGuideList, GibbsGuide)) or getattr(svi.guide, "companions", None) is not None:
        raise NotImplementedError(
            "checkpoints of several processes need an AutoTruncated, an AutoGuideList or a GibbsGuide; "
            f"got {type(svi.guide).__name__}. Train without a checkpoint, or in one process"
        )
    if local := sorted(svi.optim.local) if isinstance(svi.optim, AllReduced) else []:
        raise NotImplementedError(
            f"checkpoints of several processes do not hold parameters that are left to every process, {local}: train without a checkpoint, "
            "or in one process"
        )


def _count_nodes(part: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """How many nodes each group of a guide will have."""
    reader = WholeModelGuide(part.model, **part.options)
    reader.whole_states, reader.num_states = part.whole_states, part.num_states
    with empty_store(), spare_random_numbers(), poutine.block():
        reader.setup(*args, **kwargs)
    return [len(group.nodes) for group in reader.product.groups] if isinstance(reader.product, ProductLayout) else []


def save_sharded_checkpoint(
    path: Path, svi: SVI, number: int, portion: Portion, *, history: Any, settings: Mapping[str, Any] | None, run: Mapping[str, str]
) -> None:
    """Writes a checkpoint of several processes; all call it.

    Each process writes its populations, and what the search has learned of them, into a folder beside the file. Then the first one
    writes the file, which appears under its name last.

    Numbers of successive checkpoints differ. If one process cannot write, all fail, and the last checkpoint is as it was.
    """
    content = _make_content(svi, history=history, settings=settings, run=run)
    modules, optim = content["modules"], content["optim"]
    modules["guide"] = {name: value for name, value in modules["guide"].items() if not _PORTION_NAME.search(name)}
    rows: dict[str, Tensor] = {name.removeprefix(_POPULATIONS): modules["guide"].pop(name) for name in _row_names(svi.guide)}
    if isinstance(svi.guide, AutoTruncated) and isinstance(svi.guide.populations, ProductStore):
        numbers = [len(store.words) // store.portion.size for store in svi.guide.populations.stores if store.portion is not None]
        rows = _group_by_data_point(rows, numbers, portion.size)
    portion = portion.times(len(next(iter(rows.values()))) // portion.size)
    if optim.get("visited") is not None:
        rows["visited"] = optim.pop("visited")
    for name, value in collect_rows(content["search"]).items():
        # Zeros for data points that the search has not met.
        rows[_SEARCH + name] = torch.cat([value, value.new_zeros(portion.size - len(value), *value.shape[1:])])
    content["search"] = without_rows(content["search"])
    folder = rows_folder(path) / str(number)
    pieces = _run_on_all(lambda: write_rows(folder, rows, portion))
    content["rows"] = {"folder": folder.name, "written": pieces, "total": portion.total}
    _run_on_all(lambda: checkpoint_file.write(path, content) if collectives.rank() == 0 else None)
    if collectives.rank() == 0:
        remove_others(folder.parent, folder.name)


def _run_on_all(act: Any) -> list[Any]:
    """Returns all processes' results, or fails together."""
    error, result = None, None
    try:
        result = act()
    except OSError as problem:
        error = problem
    results = collectives.gather((result, None if error is None else (error.errno, str(error))))
    first_problem = next((problem for _, problem in results if problem is not None), None)
    if first_problem is not None:
        raise error or OSError(first_problem[0], first_problem[1])
    return [value for value, _ in results]


def for_this_process(content: dict[str, Any], path: Path, svi: SVI, arguments: Any) -> dict[str, Any]:
    """Returns a checkpoint's part for this process, whoever wrote it."""
    portion = find_portion(arguments)
    stored_rows = content.get("rows")
    if stored_rows is None and (portion is None or not portion.is_part):
        return content
    modules = {name: dict(state) for name, state in content["modules"].items()}
    optim = dict(content["optim"])
    names = [name for name in _row_names(svi.guide) if stored_rows is not None or name in modules.get("guide", {})]
    if stored_rows is None:
        assert portion is not None
        every = {name.removeprefix(_POPULATIONS): modules["guide"][name] for name in names}
        number = count_saved_groups(modules.get("guide", {}), _POPULATIONS)
        if number and isinstance(svi.guide, AutoTruncated):
            numbers = _count_nodes(svi.guide, *arguments)
            if len(numbers) != number:
                return content  # and named where it is loaded
            store_names = {f"groups.{place}.{name}" for place in range(number) for name in PopulationStore.ROWS}
            every = _group_by_data_point({name: modules["guide"][_POPULATIONS + name] for name in store_names}, numbers, portion.total)
        if not every:
            return content
        every["visited"] = optim.get("visited")
        total = len(next(iter(every.values())))
        every |= {_SEARCH + name: value for name, value in collect_rows(content["search"]).items()}
        portion = _population_portion(portion, total, path)
        rows = {name: None if value is None else value[portion.first : portion.first + portion.size] for name, value in every.items()}
    else:
        total = stored_rows["total"]
        portion = _population_portion(portion or Portion(0, total, total), total, path)
        rows = {
            name: read_rows(rows_folder(path) / stored_rows["folder"], stored_rows["written"], name, portion)
            for name in stored_rows["written"][0]["sums"]
        }
    for name, value in rows.items():
        if name.startswith("groups.") and value is not None:
            names.append(_POPULATIONS + name)
            rows[name] = value.transpose(0, 1).flatten(0, 2)
    modules["guide"] |= {name: rows[short] for name in names if (short := name.removeprefix(_POPULATIONS)) in rows}
    if rows.get("visited") is not None:
        optim["visited"] = rows["visited"]
    search_rows = {name.removeprefix(_SEARCH): value for name, value in rows.items() if value is not None}
    search = with_rows(content["search"], search_rows, portion)
    return {name: value for name, value in content.items() if name != "rows"} | {"modules": modules, "optim": optim, "search": search}


def _row_names(guide: torch.nn.Module) -> list[str]:
    """Returns names of per-data-point values in a guide's ``state_dict``."""
    parts = ((prefix, getattr(part, "ROWS", ())) for prefix, part in guide.named_modules())
    return [f"{prefix}.{name}" if prefix else name for prefix, names in parts for name in names]


def _group_by_data_point(rows: dict[str, Tensor], numbers: list[int], size: int) -> dict[str, Tensor]:
    """Rows of groups with so many nodes, as ``(size, nodes, inner plates, ...)``."""
    result = {}
    for name, value in rows.items():
        number = numbers[int(name.split(".")[1])]
        if len(value) % (number * size):
            raise ValueError(f"the checkpoint holds {len(value)} sets of {number} nodes, which are not of {size} data points")
        result[name] = value.unflatten(0, (number, size, -1)).transpose(0, 1)
    return result


def _population_portion(portion: Portion, total: int, path: Path) -> Portion:
    if total % portion.total:
        raise ValueError(f"{path} was written by a run of {total} data points, this one has {portion.total}")
    return portion.times(total // portion.total)
