"""Discrete latents left to enumeration: exact draws and marginal likelihoods."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import infer_discrete
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_truncated.diagnostics.arviz.roles import is_data, is_factor, is_latent, site_plates
from pyro_truncated.program.sites import sample_nodes
from pyro_truncated.utils.isolation import Assign, isolated

Model = Callable[..., Any]


class Enumeration:
    """The discrete latents that :class:`~pyro.infer.TraceEnum_ELBO` sums out of a model.

    Latents inside the plates of the data that depend on them (``plates``) are summed out of the log likelihood of
    each data point. Others are parameters, and keep the values drawn.

    Args:
        model: the model.
        args: its arguments.
        kwargs: its keyword arguments.
        nodes: sites of a run of the model.
        names: the discrete latents.
        hidden: unknown latents on which nothing depends. Their densities are left out.

    Attributes:
        plates: the plates from left to right, with their sizes. Empty if no data point has such latents of its own.
        local: the latents inside them.
        inside: the sites inside them.
    """

    def __init__(
        self,
        model: Model,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        nodes: Mapping[str, Any],
        names: Collection[str],
        hidden: Collection[str] = (),
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.names, self.hidden = frozenset(names), frozenset(hidden)
        self.first_dim = -1 - max(len(node["fn"].batch_shape) for node in nodes.values())
        self._find_plates({name: node["value"] for name, node in nodes.items() if is_latent(node) and name not in names})

    def draw(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Draws the discrete latents from their posterior given the others."""
        prepared = self._prepare(values, self.names)
        with isolated():
            trace = poutine.trace(infer_discrete(prepared, first_available_dim=self.first_dim)).get_trace(*self.args, **self.kwargs)
        return {name: trace.nodes[name]["value"] for name in self.names}

    def log_evidence(self, values: Mapping[str, Any]) -> Tensor:
        """Log density of the data and the other latents."""
        trace = self._enumerate(values, self.names)
        chosen = [name for name in sample_nodes(trace) if name not in self.hidden]
        return sum((term.double().sum() for term in _contract(trace, chosen, self.names)), torch.zeros(()).double())

    def log_likelihood(self, values: Mapping[str, Any], leaves: Collection[str]) -> Tensor:
        """Returns the log likelihood of each data point, discrete latents summed out.

        Other latents are given. The shape is that of :attr:`plates`.

        ``leaves`` are latents on which nothing depends, such as missing data; their densities are left out.
        """
        trace = self._enumerate(values, self.local)
        inside = [name for name in self.inside if name not in leaves]
        latent = [name for name in inside if is_latent(trace.nodes[name])]
        joint, prior = (self._per_datum(_contract(trace, names, self.local), trace) for names in (inside, latent))
        return joint - prior

    def _prepare(self, values: Mapping[str, Any], names: Collection[str]) -> Model:
        """Returns the model with other latents fixed, marked for enumeration.

        The density of latents that nobody knows is left out.
        """
        given = {name: value for name, value in values.items() if name not in names}
        marks: Any = {True: {"enumerate": "parallel"}, False: {"enumerate": None}}
        configured: Model = poutine.infer_config(self.model, lambda site: marks[site["name"] in names])

        def prepared(*args: Any, **kwargs: Any) -> Any:
            """The model, called with its own arguments."""
            with Assign(given), _Silence(self.hidden):
                return configured(*args, **kwargs)

        return prepared

    def _enumerate(self, values: Mapping[str, Any], names: Collection[str]) -> poutine.Trace:
        prepared = self._prepare(values, names)
        with isolated():
            trace = poutine.trace(poutine.enum(prepared, first_available_dim=self.first_dim)).get_trace(*self.args, **self.kwargs)
        trace = prune_subsample_sites(trace)
        trace.compute_log_prob()
        trace.pack_tensors()
        return trace

    def _find_plates(self, values: Mapping[str, Any]) -> None:
        """Finds the plates of data that depend on the discrete latents."""
        trace = self._enumerate(values, self.names)
        nodes, summed = sample_nodes(trace), _sum_dims(trace, self.names)
        below = [node for node in nodes.values() if is_data(node) or is_factor(node)]
        below = [node for node in below if summed.intersection(node["packed"]["unscaled_log_prob"]._pyro_dims)]
        shared = frozenset.intersection(*map(site_plates, below)) if below else frozenset()
        self.local = frozenset(name for name in self.names if site_plates(nodes[name]) & shared)
        shared = shared.intersection(*(site_plates(nodes[name]) for name in self.local)) if self.local else frozenset()
        frames = {frame.name: frame for node in nodes.values() for frame in node["cond_indep_stack"] if frame.name in shared}
        self.plates = {frame.name: int(frame.size) for frame in sorted(frames.values(), key=lambda frame: frame.dim)}
        self.local = self.local if self.plates else frozenset()
        self.inside = [name for name, node in nodes.items() if self.plates and set(self.plates) <= site_plates(node)]

    def _per_datum(self, terms: list[Tensor], trace: poutine.Trace) -> Tensor:
        """Sums terms over all plates but those of the data points."""
        total = torch.zeros(tuple(self.plates.values()), dtype=torch.float64)
        symbols = [trace.plate_to_symbol[name] for name in self.plates]
        for term in terms:
            dims: str = term._pyro_dims  # type: ignore[attr-defined]
            extra = [position for position, symbol in enumerate(dims) if symbol not in symbols]
            reduced = term.double().sum(extra) if extra else term.double()
            kept = [symbol for symbol in dims if symbol in symbols]
            reduced = reduced.permute([kept.index(symbol) for symbol in symbols if symbol in kept])
            shape = [size if symbol in kept else 1 for symbol, size in zip(symbols, self.plates.values(), strict=True)]
            total = total.to(reduced.device) + reduced.reshape(shape)
        return total


class _Silence(Messenger):
    """Effect handler that takes the density of the named sites away."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.names:
            msg["mask"] = False


def _sum_dims(trace: poutine.Trace, names: Collection[str]) -> set[str]:
    """Symbols of the dimensions along which the named sites are enumerated."""
    marks: list[Any] = [trace.nodes[name]["infer"] for name in names]
    return {mark["_dim_to_symbol"][mark["_enumerate_dim"]] for mark in marks if mark.get("_enumerate_dim") in mark["_dim_to_symbol"]}


def _contract(trace: poutine.Trace, chosen: Collection[str], names: Collection[str]) -> list[Tensor]:
    """Sums named sites out of the log densities of the chosen ones.

    Returns one packed tensor for each connected part of the model.
    """
    tree: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    for name in chosen:
        node = trace.nodes[name]
        ordinal = frozenset(trace.plate_to_symbol[frame.name] for frame in node["cond_indep_stack"] if frame.vectorized and frame.size > 1)
        # What is summed out has a distribution whether masked or not, as in TraceEnum_ELBO.
        mask = None if name in names else node["packed"]["mask"]
        tree.setdefault(ordinal, []).append(packed.scale_and_mask(node["packed"]["unscaled_log_prob"], mask=mask))
    found = contract_tensor_tree(tree, _sum_dims(trace, names))
    return [term for terms in found.values() for term in terms]
