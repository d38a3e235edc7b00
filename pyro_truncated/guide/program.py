"""A truncated guide as a Pyro program.

It has one enumerated index per data point and sets the sites to the indexed state.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.distributions.util import broadcast_shape
from pyro.ops.indexing import Vindex
from pyro.ops.provenance import get_provenance, track_provenance
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK, effectful
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor

from pyro_truncated.guide.batch import Batch
from pyro_truncated.guide.given_states import excess_density
from pyro_truncated.guide.plates import SharedPlates, enter, model_plates, open_plates, plate_subsamples, recorded_subsamples
from pyro_truncated.guide.whole_model import WholeModelGuide
from pyro_truncated.program import inspection
from pyro_truncated.program.call import Call
from pyro_truncated.program.candidate_runs import AsInModel
from pyro_truncated.program.layout import SiteLayout
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.probe import AllObservedError, Probe
from pyro_truncated.program.sites import DiscreteSite, trim
from pyro_truncated.search.base import Search
from pyro_truncated.states.population import Population


class SearchRequest(Messenger):
    """Effect handler under which a truncated guide searches once when it runs."""

    def __init__(self, search: Search, steps: int) -> None:
        super().__init__()
        self.search, self.steps, self.done = search, steps, False

    def _pyro_truncated_search(self, msg: Any) -> None:
        if not self.done:
            self.done, msg["value"], msg["done"] = True, self, True


@effectful(type="truncated_search")
def find_search_request() -> SearchRequest | None:
    """Returns the surrounding handler that asks for a search, if any."""
    return None


def recorded_values(guide: WholeModelGuide) -> dict[str, Any]:
    """Draws of other latents in the recording traces.

    They come with the subsamples of plates that they are for. Plates around the guide that take dimensions of the model's are moved to
    the left of all: a guide may have fewer plates than the model.
    """
    names, depth = guide.layout.other_latents, guide.layout.depth
    if not names:
        return {}
    outer = [plate.dim for plate in inspection.plates_around(guide.frames, names[0]) if plate.dim >= -depth]
    values: dict[str, Any] = {}
    # Traces record in silence: no message asks them for what they hold, so that Pyro's private stack of handlers has to.
    for handler in _PYRO_STACK:
        if isinstance(handler, TraceMessenger):
            nodes: dict[str, Any] = {name: handler.trace.nodes[name] for name in names if name in handler.trace.nodes}
            values.update({name: _move_left(node["value"], node["fn"].event_dim, outer, depth) for name, node in nodes.items()})
    return values | recorded_subsamples(guide.frames) if values else {}


def _move_left(value: Any, event_dim: int, dims: Sequence[int], depth: int) -> Any:
    """Moves given batch dimensions left of ``depth`` others, if present."""
    for target, dim in enumerate(sorted(dims, reverse=True), start=depth + 1):
        if value.dim() - event_dim < -dim:
            continue
        padding = max(0, target - (value.dim() - event_dim))
        value = value[(None,) * padding].transpose(dim - event_dim, -target - event_dim)
    return value


class ProgramRun:
    """One run of a guide that has seen its model."""

    def __init__(self, guide: WholeModelGuide, call: Call) -> None:
        self._guide, self._call, self._layout = guide, call, guide.layout

    def sample(self) -> dict[str, Tensor]:
        """Samples the sites and returns all values."""
        guide, layout, values, plates = self._guide, self._layout, recorded_values(self._guide), None
        # A guide around this one may have sampled the other latents already.
        if not values and guide.master is None and (companions := guide.companions) is not None:
            # A trace of its own, so that what functions sample can be read even where nobody records it.
            with poutine.trace():
                guide.plates = plates = model_plates(self._call, guide.frames)
                companions.run(plates, self._call)
                values = recorded_values(guide)
        elif not values:
            subsamples = {} if guide.master is None else plate_subsamples(getattr(guide.master(), "plates", {}))
            values = guide.other_values(self._call, subsamples=subsamples)
        # The draws that the states were scored with go with them: outside of a trace they are not the ones the list has just made.
        others: dict[str, Tensor] = {name: values[name] for name in layout.other_latents if name in values}
        with torch.no_grad():
            try:
                plates, batch = self._open(values, plates)
            except AllObservedError:
                return others | self._sample_given_states(values)
            # Under the name of a site, the message passes whatever lets that site pass.
            request = find_search_request(name=next(iter(layout.sites)))
            found = None if request is None else batch.search_(request.search, request.steps)
        return others | self._sample_batch(batch, plates, found)

    def _sample_batch(self, batch: Any, plates: Mapping[str, Any], found: Any) -> dict[str, Tensor]:
        """Samples the states of a batch in the given plates."""
        with torch.no_grad():
            full_population = batch.rescore() if found is None or batch.scorer.is_vectorized else found
            population, excess = full_population.without_impossible(), None
            if population is not full_population or full_population.log_joint.dim() != 2:
                excess = excess_density(full_population.log_joint.amax(-1), list(self._layout.sites))
        scorer = batch.scorer
        hidden = scorer.runs.hidden_log_probs(population.words)
        with ExitStack() as stack:
            for name in self._layout.plates:
                enter(stack, plates[name])
            states = self._sample_states(population, excess, hidden, scorer, plates)
            labels = {name: scorer.nodes[name]["value"] for name in scorer.observed_sites}
            return states | self._sample_conditional(labels | states, scorer.nodes)

    def _sample_conditional(self, states: dict[str, Any], nodes: Mapping[str, Any]) -> dict[str, Tensor]:
        """Samples what the conditional does, but for sites that the model observes."""
        conditional = self._guide.conditional
        if conditional is None:
            return {}
        hidden = [name for name, node in nodes.items() if node["is_observed"]]
        with poutine.block(hide=hidden), AsInModel(nodes, self._layout):
            return conditional(states, *self._call.args, **self._call.kwargs) or {}

    def _sample_given_states(self, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Handles models that observe all discrete sites."""
        if self._guide.conditional is None:
            return {}
        with SharedPlates(), ExitStack() as stack:
            plates = self._guide.created_plates(self._call)
            plates = model_plates(self._call, self._guide.frames) if plates is None else plates
            for name in self._layout.plates:
                enter(stack, plates[name])
            try:
                self._guide.batch(self._call, {**values, **plate_subsamples(plates)})
            except AllObservedError as observed:
                with torch.enable_grad():
                    return self._sample_conditional(observed.values, observed.nodes)
        return {}

    # --- plates ---

    def _open(self, values: Mapping[str, Any], plates: dict[str, Any] | None) -> tuple[dict[str, Any], Batch]:
        """Returns the plates to sample in, with the batch in them."""
        plates = self._guide.created_plates(self._call) if plates is None else plates
        if plates is None:
            return self._open_as_the_model(values)
        return plates, self._guide.batch(self._call, {**values, **plate_subsamples(plates)})

    def _open_as_the_model(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], Batch]:
        """Plates with the very subsamples that the model draws.

        So guide and model agree whatever the batch size, and a handler outside (a replay, say) still has the last word. A guide around
        this one that has the plates already decides.
        """
        frames = {frame.name: frame for site in self._layout.sites.values() for frame in site.frames if frame.vectorized}
        outer_plates = open_plates({name: frame.dim for name, frame in frames.items()})
        subsamples = recorded_subsamples(frames) | plate_subsamples(outer_plates)
        batch = self._guide.batch(self._call, {**values, **subsamples})
        run_values = batch.scorer.values
        frames = {f.name: f for site in self._layout.sites for f in batch.scorer.nodes[site]["cond_indep_stack"] if f.vectorized}
        with SharedPlates():
            self._guide.plates = plates = {
                name: outer_plates.get(name) or pyro.plate(name, frame.full_size or frame.size, subsample=run_values[name], dim=frame.dim)
                for name, frame in frames.items()
            }
        if any(plate.indices is not run_values[name] for name, plate in plates.items()):
            batch = self._guide.batch(self._call, {**values, **plate_subsamples(plates)})
        return plates, batch

    # --- sites ---

    def _sample_states(
        self, population: Population, excess: Tensor | None, hidden: Mapping[str, Tensor], scorer: LogJoint, plates: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        layout, words, log_joint = self._layout, population.words, population.log_joint
        logits = (log_joint if excess is None else log_joint.masked_fill(excess.unsqueeze(-1) > 0, 0.0)).log_softmax(-1)
        batch = layout.spread(scorer.sizes)
        draws, dims = logits.shape[:-2], [frame.dim for frame in self._draw_frames()] if logits.dim() > 2 else []
        # Where they are not those of plates, they are left-most.
        dims = dims if len(dims) == len(draws) else list(range(-scorer.depth, -scorer.depth + len(draws)))
        shape = spread_draws(dims, draws, batch)
        logits = logits.reshape(*shape, logits.shape[-1])
        # What does not take many states at once can be enumerated one by one, by Pyro's ELBOs too.
        enumerate_ = "parallel" if self._guide.is_enumerable else "sequential"
        infer: Any = {"enumerate": enumerate_, "is_auxiliary": True, "truncated": {"guide": weakref.ref(self._guide)}}
        # A scale that the model puts on its discrete sites, beyond that of subsampling, must weigh the guide's sites as well.
        with poutine.scale(scale=scorer.scale_beyond_subsamples(next(iter(layout.sites)))):
            index = pyro.sample(self._guide.index_name, dist.Categorical(logits=logits), infer=infer)
            rows = torch.arange(len(words), device=words.device).reshape(batch)
            # Unpacking forgets that the states come from the index, which pictures of the guide should show.
            levels = track_provenance(layout.space.unpack(words[rows, index]), get_provenance(index))
            values = layout.decode(levels, max(layout.depth, levels.dim() - 1), scorer.dtypes)
            # The guide's density gives back what a mask takes away from the model's, see LogJoint.
            densities = {name: -Vindex(value.movedim(0, -1))[..., index] for name, value in hidden.items()}
            zero = logits.new_zeros(())
            latent = {name: value for name, value in values.items() if name not in scorer.observed_sites}
            if excess is not None:
                first = next(iter(latent))
                densities[first] = densities.get(first, zero) + excess.reshape(shape)
            return {name: self._sample_site(layout.sites[name], value, plates, densities.get(name, zero)) for name, value in latent.items()}

    def _draw_frames(self) -> list[Any]:
        """The plates of parallel draws around the guide, from left to right."""
        frames = inspection.plates_around(self._guide.frames, self._guide.index_name)
        return sorted((frame for frame in frames if frame.size > 1), key=lambda frame: frame.dim)

    def _sample_index(self, own: SiteLayout, position: Tensor, log_prob: Tensor, plates: Mapping[str, Any], scorer: Probe) -> None:
        """Samples an auxiliary site of some sites' states."""
        infer: Any = {"is_auxiliary": True, "truncated": {"guide": weakref.ref(self._guide)}}
        with ExitStack() as stack:
            for name in own.plates:
                enter(stack, plates[name])
            stack.enter_context(poutine.scale(scale=scorer.scale_beyond_subsamples(next(iter(own.sites)))))
            depth = max((-dim for dim in own.dims), default=0)
            position, log_prob = (trim(value, 0, depth) for value in (position, log_prob))
            pyro.sample(self._guide.name_index(own.sites), dist.Delta(position, log_density=log_prob), infer=infer)

    def _sample_site(
        self,
        site: DiscreteSite,
        value: Tensor,
        plates: Mapping[str, Any],
        log_density: Tensor,
        *,
        scale: float | Tensor = 1.0,
        is_auxiliary: bool = False,
    ) -> Tensor:
        """Samples a site as a point mass of some density."""
        with ExitStack() as stack:
            for frame in site.frames:
                if frame.vectorized:
                    enter(stack, plates[frame.name])
            stack.enter_context(poutine.scale(scale=scale))
            value = trim(value, site.event_dim, site.depth)
            shape = value.shape[: value.dim() - site.event_dim]
            # Given always: with integer values the default would bring a float32 density into a float64 model.
            log_density = log_density.to(value.device).expand(broadcast_shape(shape, log_density.shape))
            value = value.expand((*log_density.shape, *value.shape[len(shape) :]))
            stack.enter_context(self._layout.extra_plates_for(site, log_density.dim()))
            infer: Any = {"is_auxiliary": True} if is_auxiliary else {}
            return pyro.sample(site.name, dist.Delta(value, log_density=log_density, event_dim=site.event_dim), infer=infer)


def spread_draws(dims: Sequence[int], draws: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    """Returns a batch shape with parallel draws at some dimensions."""
    shape = [1] * (max([-dim for dim in dims], default=0) - len(batch)) + list(batch)
    for dim, size in zip(dims, draws, strict=True):
        shape[dim] = size
    return tuple(shape)
