"""The guides beside a truncated one.

They give the model's other latents, for the training data and for new data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoContinuous, AutoGaussian, AutoGuide, AutoGuideList, AutoStructured
from pyro.infer.autoguide.guides import AutoCallable
from torch import Tensor

from pyro_truncated.guide.plates import SharedPlates, model_plates, plate_subsamples, recreate_plates
from pyro_truncated.program.call import Call
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.sites import latent_nodes, sample_nodes
from pyro_truncated.program.subsampling import SparseSubsamples


@dataclasses.dataclass(frozen=True)
class Companions:
    """The guides beside a truncated one in a guide list."""

    guide_list: Any  # the list, whose plates its parts enter
    earlier: tuple[Any, ...]  # the parts before the truncated one, in order, which it scores states given draws of
    later: tuple[Any, ...]  # the parts after it
    # Plates of the model on new data, by name, where a guide for these has inherited the
    # companions; None in their own list.
    frames: Mapping[str, Any] | None = None

    @classmethod
    def from_guide(cls, guide: Any) -> Companions:
        """The companions of a guide in its list."""
        guide_list = guide.master()
        parts = list(flatten_guides(guide_list))
        position = next(i for i, part in enumerate(parts) if part is guide)
        return cls(guide_list, tuple(parts[:position]), tuple(parts[position + 1 :]))

    def plates(self, call: Call) -> dict[str, Any]:
        """Returns plates as the list would create them now."""
        if self.frames is not None:
            return model_plates(call, self.frames)
        if self.guide_list.prototype_trace is None:
            self.guide_list._setup_prototype(*call.args, **call.kwargs)
        with self._enter_plates({}):
            return dict(self.guide_list._create_plates(*call.args, **call.kwargs))

    def run(self, plates: Mapping[str, Any], call: Call) -> None:
        """Runs the earlier parts in the given plates."""
        with self._enter_plates(plates):
            for part in self.earlier:
                call.with_program(part)()

    def values(
        self, names: Sequence[str], call: Call, *, median: bool = False, subsamples: Mapping[str, Tensor] | None = None
    ) -> dict[str, Any]:
        """Draws the named latents outside of any trace, or their medians.

        Medians come from guides that know them; the subsamples that values are for come along.
        """
        with poutine.block(), SparseSubsamples():
            plates = self.plates(call)
        values: dict[str, Any] = {}
        with poutine.block(), torch.no_grad():
            plates = recreate_plates(plates, subsamples)
            if median:
                with self._enter_plates(recreate_plates(plates)):
                    for part in self.earlier:
                        values.update(call.with_program(part.median)() or {})
            if any(name not in values for name in names):
                with poutine.trace() as recorder:
                    self.run(recreate_plates(plates), call)
                values = {name: node["value"] for name, node in sample_nodes(recorder.trace).items()} | values
        self._refuse_late([name for name in names if name not in values])
        named_values = {name: values[name] for name in names if name in values}
        return named_values | plate_subsamples(plates) if named_values else {}

    def _refuse_late(self, missing: Sequence[str]) -> None:
        prototypes = [part.prototype_trace for part in self.later]
        late = [name for name in missing if any(trace is None or name in trace.nodes for trace in prototypes)]
        if late:
            raise ValueError(
                f"AutoTruncated scores states given draws of the latents {late}, but the guides of these come after it in the "
                "AutoGuideList; append AutoTruncated last"
            )

    def refuse_unknown_latents(self, layout: Layout, prototype: Any) -> None:
        """Checks that the companions know the latents of new data."""
        nodes = {node["name"]: node for node in latent_nodes(prototype)}
        plates = set(layout.plates)
        local = [name for name in layout.other_latents if plates & {frame.name for frame in nodes[name]["cond_indep_stack"]}]
        guides = (part for part in self.guide_list.modules() if isinstance(part, AutoGuide) and part.prototype_trace is not None)
        # Pyro's automatic guides do not look at the model's arguments.
        own = [part for part in guides if type(part).forward.__module__.startswith("pyro.")]
        automatic: list[Any] = [part for part in own if not isinstance(part, (AutoGuideList, AutoCallable))]
        unknown = {name for name in local if any(name in part.prototype_trace for part in automatic)}
        if unknown:
            raise ValueError(
                f"infer() cannot know the latents {sorted(unknown)} of the new data points: their guide has parameters for each training "
                "point. Give AutoTruncated a conditional=... that samples them, or append an amortised guide to the AutoGuideList."
            )

    @contextmanager
    def _enter_plates(self, plates: Mapping[str, Any]) -> Iterator[None]:
        """Lets the parts enter these plates; restores their own plates afterwards."""
        list_plates = getattr(self.guide_list, "plates", {})
        self.guide_list.plates = dict(plates)
        try:
            yield
        finally:
            self.guide_list.plates = list_plates


def share_plates(guide_list: AutoGuideList, truncated_guide: Any) -> None:
    """Lets guides in a list reuse the list's plates."""
    for part in flatten_guides(guide_list):
        opens_its_own = isinstance(part, AutoCallable) or not type(part).forward.__module__.startswith("pyro.")
        if part is not truncated_guide and opens_its_own and "forward" not in vars(part):
            part.forward = SharedPlates()(part.forward)


def refuse_subsampled_latents(guide_list: Any, plates: Mapping[str, Any]) -> None:
    """Checks that guides can give latents of some data points."""
    partial = {name for name, plate in plates.items() if len(plate.indices) < plate.size}
    for part in flatten_guides(guide_list):
        if not partial or not isinstance(part, AutoContinuous | AutoGaussian | AutoStructured) or part.prototype_trace is None:
            continue
        # Some of these guides keep no more than the names of their sites.
        for node in latent_nodes(guide_list.prototype_trace):
            name, inside = node["name"], partial & {frame.name for frame in node["cond_indep_stack"]}
            if inside and name in part.prototype_trace:
                raise ValueError(
                    f"{type(part).__name__} holds one vector for all data points and cannot take the latent '{name}' for a subsample of "
                    f"plate '{min(inside)}'. Cover it by AutoNormal, AutoDelta or an amortised guide, or train without minibatches."
                )


def flatten_guides(guide_list: Any) -> Iterator[Any]:
    """The guides in a list and in the lists in it."""
    for part in guide_list:
        if isinstance(part, AutoGuideList):
            yield from flatten_guides(part)
        else:
            yield part
