"""The guides beside a truncated one: what they say of the model's other latents, for the data of the training and for new data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoGuide, AutoGuideList
from pyro.infer.autoguide.guides import AutoCallable
from torch import Tensor

from pyro_truncated.program.sites import latent_nodes, sample_nodes


@dataclasses.dataclass(frozen=True)
class Siblings:
    """The guides beside a truncated one in a guide list.

    Attributes:
        guide_list: the list, whose plates its parts enter.
        earlier: the parts before the truncated one, in order, which it scores states given draws of.
        later: the parts after it.
    """

    guide_list: Any
    earlier: tuple[Any, ...]
    later: tuple[Any, ...]

    @classmethod
    def of(cls, guide: Any) -> Siblings:
        """The siblings of a guide in the list that it has been appended to."""
        guide_list = guide.master()
        parts = list(parts_of(guide_list))
        position = next(i for i, part in enumerate(parts) if part is guide)
        return cls(guide_list, tuple(parts[:position]), tuple(parts[position + 1 :]))

    def run(self, plates: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Runs the earlier parts in the given plates."""
        with self._entering(plates):
            for part in self.earlier:
                part(*args, **kwargs)

    def draw(
        self, names: Sequence[str], plates: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], median: bool = False
    ) -> dict[str, Any]:
        """Draws (or medians, of guides that know theirs) of the named latents, outside of any trace.

        Args:
            names: of the model's other latents.
            plates: the plates to draw in.
            args: the model's positional arguments.
            kwargs: the model's keyword arguments.
            median: whether to take medians.

        Raises:
            ValueError: if some of the latents belong to parts after the truncated guide.
        """
        found: dict[str, Any] = {}
        with poutine.block(), torch.no_grad():
            if median:
                with self._entering(_anew(plates)):
                    for part in self.earlier:
                        found.update(part.median(*args, **kwargs) or {})
            if any(name not in found for name in names):
                with poutine.trace() as recorder:
                    self.run(_anew(plates), args, kwargs)
                found = {name: node["value"] for name, node in sample_nodes(recorder.trace).items()} | found
        self._refuse_late([name for name in names if name not in found])
        return {name: found[name] for name in names if name in found}

    def _refuse_late(self, missing: Sequence[str]) -> None:
        prototypes = [part.prototype_trace for part in self.later]
        late = [name for name in missing if any(trace is None or name in trace.nodes for trace in prototypes)]
        if late:
            raise ValueError(
                f"AutoTruncated scores states given draws of the latents {late}, but the guides of these come after it in the "
                "AutoGuideList; append AutoTruncated last"
            )

    def refuse_unknown(self, new: Any) -> None:
        """Checks that the siblings know the latents of new data.

        Args:
            new: a truncated guide that has been set up on the new data.

        Raises:
            ValueError: if a part has parameters for each data point it was trained on.
        """
        nodes = {node["name"]: node for node in latent_nodes(new.prototype_trace)}
        plates = set(new.layout.plates)
        local = [name for name in new.layout.other_latents if plates & {frame.name for frame in nodes[name]["cond_indep_stack"]}]
        fixed = [part for part in self.guide_list.modules() if _has_parameters_of_its_own(part)]
        unknown = {name for name in local if any(name in part.prototype_trace for part in fixed)}
        if unknown:
            raise ValueError(
                f"infer() cannot know the latents {sorted(unknown)} of the new data points: their guide has parameters for each data point "
                "it was trained on. Give AutoTruncated a conditional=... that samples them given the states, or append to the "
                "AutoGuideList a guide that computes them from the model's arguments (an amortised one)."
            )

    @contextmanager
    def _entering(self, plates: Mapping[str, Any]) -> Iterator[None]:
        """Lets the parts enter these plates; those of the list's own last run are put back afterwards."""
        kept = getattr(self.guide_list, "plates", {})
        self.guide_list.plates = dict(plates)
        try:
            yield
        finally:
            self.guide_list.plates = kept


def refuse_subsampling(guide: Any) -> None:
    """Checks that the model took all data points when a guide was set up.

    Raises:
        ValueError: naming the plate of which it took only some.
    """
    for name in guide.layout.plates:
        frame = guide._prototype_frames[name]
        if frame.size != (frame.full_size or frame.size):
            raise ValueError(
                f"infer() needs all {frame.full_size} data points of plate '{name}' at once; the model subsampled {frame.size} of them"
            )


def refuse_uncovered(guide: Any, values: Mapping[str, Any]) -> None:
    """Checks that every other latent of the model has a value that a guide, or a conditional, gives it.

    Raises:
        ValueError: naming those without.
    """
    uncovered = [name for name in guide.layout.other_latents if name not in values]
    if uncovered and guide.conditional is None:
        raise ValueError(
            f"infer() knows nothing of the latents {uncovered}, which no guide beside AutoTruncated covers: they could only be drawn from "
            "the prior. Train with an AutoGuideList that holds their guide before AutoTruncated, and call infer of that AutoTruncated; "
            "or give it a conditional=... that samples them given the states."
        )


def _anew(plates: Mapping[str, Any]) -> dict[str, Any]:
    """The same plates made once more, for the trace that is being recorded."""
    return {name: pyro.plate(name, plate.size, subsample=plate.indices, dim=plate.dim) for name, plate in plates.items()}


def with_subsamples(plates: Mapping[str, Any], subsamples: Mapping[str, Tensor]) -> dict[str, Any]:
    """The plates, some of them with other subsamples."""
    replaced = {
        name: pyro.plate(name, plate.size, subsample=subsamples[name], dim=plate.dim)
        for name, plate in plates.items()
        if name in subsamples
    }
    return {**plates, **replaced}


def parts_of(guide_list: Any) -> Iterator[Any]:
    """The guides in a list and in the lists in it."""
    for part in guide_list:
        if isinstance(part, AutoGuideList):
            yield from parts_of(part)
        else:
            yield part


def _has_parameters_of_its_own(part: Any) -> bool:
    """Whether a module is one of Pyro's automatic guides, which do not look at the model's arguments, and has been set up."""
    if not isinstance(part, AutoGuide) or part.prototype_trace is None or isinstance(part, (AutoGuideList, AutoCallable)):
        return False
    return type(part).forward.__module__.startswith("pyro.")
