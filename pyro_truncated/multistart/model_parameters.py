"""Parameters of modules and functions, medians beside them, and initial values."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import init_to_feasible, init_to_sample
from pyro.params.param_store import normalize_param_name
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.nn.utils.parametrize import is_parametrized

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.sites import log_density
from pyro_truncated.utils.constraints import as_signed
from pyro_truncated.utils.devices import generator_device
from pyro_truncated.utils.parameter_store import spare_random_numbers

# Least size of a parameter: from near zero, steps in its own unit would be too small.
_LEAST_SIZE = 0.2
# Separator in names of parameters that ``pyro.module`` registers.
_OF_A_MODULE = "$$$"
_MEDIAN = "median of "
# Prefix of unconstrained medians in the state of an AutoNormal.
_LOC = "locs.{}_unconstrained"
# Weight of equal shares in drawn shares: components with a tiny share get no data. At a tenth one of
# five mixtures of three clusters lost a cluster silently, at a half none of eleven.
_UNIFORM_SHARE = 0.5


def learned_tensors(model: Any, y: Tensor) -> dict[str, Tensor]:
    """The tensors that hold what a model has learned, by name."""
    if isinstance(model, torch.nn.Module):
        return model.state_dict()
    with spare_random_numbers(), poutine.block(), torch.no_grad():
        nodes = poutine.trace(model, param_only=True).get_trace(y).nodes
    return {name: _to_unconstrained(node["value"]) for name, node in nodes.items() if node["type"] == "param"}


def learned_parameters(model: Any, y: Tensor) -> dict[str, Tensor]:
    """Returns learned parameters by name, without buffers."""
    return dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else learned_tensors(model, y)


def layer_parameters(model: Any, y: Tensor) -> set[str]:
    """Returns names of parameters of torch's layers, or a function's modules."""
    if not isinstance(model, torch.nn.Module):
        return {name for name in learned_tensors(model, y) if _OF_A_MODULE in name}
    names = set()
    for name, layer in model.named_modules():
        if hasattr(layer, "reset_parameters"):
            parts = [("", layer.named_parameters(recurse=False))]
            if is_parametrized(layer):
                parts.append(("parametrizations.", layer.parametrizations.named_parameters()))
            names |= {f"{name}.{prefix}{own}".lstrip(".") for prefix, parameters in parts for own, _ in parameters}
    return names


def num_weights(model: Any, y: Tensor) -> int:
    """How many matrices of weights torch's own layers hold."""
    tensors = learned_tensors(model, y)
    return sum(tensors[name].dim() > 1 for name in layer_parameters(model, y))


def snapshot(model: Any, y: Tensor) -> dict[str, Tensor]:
    """What a model has learned, by name, apart from the model."""
    return {name: value.clone() for name, value in learned_tensors(model, y).items()}


@torch.no_grad()
def load_snapshot(model: Any, y: Tensor, state: dict[str, Tensor]) -> None:
    """Writes values in place, so that stores and optimisers keep their tensors."""
    for name, value in learned_tensors(model, y).items():
        value.copy_(state[name])


@torch.no_grad()
def disturb(model: Any, y: Tensor, other_parameters: dict[str, Tensor], generator: torch.Generator | None) -> None:
    """Adds noise of their root mean square to unconstrained parameters.

    Args:
        model: the model.
        y: its data.
        other_parameters: what its parameters were elsewhere: where these are larger, their root mean square counts.
        generator: source of randomness.
    """
    for name, value in learned_parameters(model, y).items():
        size = max(_size(value), _size(other_parameters[name]))
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype, device=generator_device(generator))
        value.add_((size or 1.0) * noise.to(value.device))


def least_size(y: Tensor) -> float:
    """Returns the least size of a parameter: 0.2, or less for small data.

    The unit of a parameter is not known: log odds that start small but not at zero move slowly beside data in a small unit. Each of
    several processes looks at its own data.
    """
    low, high = as_signed(y).nan_to_num().aminmax()
    return _LEAST_SIZE * min(1.0, max(-float(low), float(high)))


def optimiser_options(lr: float, lrd: float, least: float, name: str) -> dict[str, float]:
    """Returns optimiser options: steps relative to a parameter's size.

    A zero parameter is taken to be of size 0.2.
    """
    store = pyro.get_param_store()
    # Optimisers get a plain module's own parameter names, not those of the store.
    key = next(key for key in store if normalize_param_name(key) == name)
    value: Any = store[key]
    free = _to_unconstrained(value)
    # Constrained parameters move on logarithmic or similar scales, without units.
    size = _size(free) if torch.equal(free, value.detach()) else 1.0
    return {"lr": lr * max(least if size else _LEAST_SIZE, size), "lrd": lrd}


def _size(value: Tensor) -> float:
    return float(value.detach().square().mean().sqrt())


def _to_unconstrained(value: Any) -> Tensor:
    return value.unconstrained().detach() if hasattr(value, "unconstrained") else value.detach()  # type: ignore[no-any-return]


class Medians:
    """Scores states given medians of continuous latents, treated as parameters.

    So they change places as parameters do: a program may learn the weights of its latents by either. Shares are in the coordinates of
    Pyro's parameters, one number for each of them.

    Args:
        model: the model; its parameters are changed.
        y: its data.
        guide: the truncated guide, which has seen them.
    """

    def __init__(self, model: Any, y: Tensor, guide: AutoTruncated) -> None:
        self.model, self.y, self.guide = model, y, guide
        nodes: Any = getattr(guide.prototype_trace, "nodes", {})
        self._supports = {name: nodes[name]["fn"].support for name in guide.layout.other_latents}

    def scorer(self, state: dict[str, Tensor]) -> LogJoint:
        """The scorer of states under a model that has learned this."""
        load_snapshot(self.model, self.y, state)
        values = {name: transform_to(support)(state[_MEDIAN + name]) for name, support in self._supports.items()}
        return self.guide.make_scorer(self.y, values=values)

    def beyond(self, scorer: LogJoint) -> float:
        """Returns the log density per data point of global medians."""
        nodes = [scorer.nodes[name] for name in self._supports if not scorer.is_inside(scorer.nodes[name])]
        return float(log_density(nodes)) / self.guide.layout.num_data

    def state(self, companion: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the model's parameters and the medians of a guide's state."""
        free = {name: biject_to(support)(companion[_LOC.format(name)]) for name, support in self._supports.items()}
        return snapshot(self.model, self.y) | {
            _MEDIAN + name: transform_to(self._supports[name]).inv(value) for name, value in free.items()
        }

    def exchangeable_part(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What may change places: parameters and medians, but no buffers."""
        names = [*learned_parameters(self.model, self.y), *(_MEDIAN + name for name in self._supports)]
        return {name: state[name] for name in names}

    def companion(self, state: dict[str, Tensor], near: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns a guide's state with other medians."""
        medians = {
            _LOC.format(name): biject_to(support).inv(transform_to(support)(state[_MEDIAN + name]))
            for name, support in self._supports.items()
        }
        return {**near, **medians}


def prior_draw(site: dict[str, Any]) -> Tensor:
    """Draws a latent from its prior, for ``init_loc_fn`` of Pyro's guides.

    Pyro's ``init_to_median(num_samples=1)`` takes the same feasible point for all vectors, and its ``init_to_sample`` may begin at the
    infinitely distant end of the support. Here a feasible point replaces such draws; of a simplex the draw is averaged with equal shares.
    """
    fn = site["fn"]
    value: Tensor = init_to_sample(site)
    support = fn.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if support is constraints.simplex:
        # In place: Pyro's draws carry a mark for its reparametrisations.
        value.mul_(1 - _UNIFORM_SHARE).add_(_UNIFORM_SHARE / value.shape[-1])
    if not fn.support.is_discrete and not bool(torch.isfinite(biject_to(fn.support).inv(value)).all()):
        return torch.as_tensor(init_to_feasible(site))
    return value
