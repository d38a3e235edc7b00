"""A model's solution with medians of its continuous latents."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributions import biject_to, transform_to

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.sites import log_density
from pyro_truncated.training.model_parameters import copies, parameters_of, put_back

_MEDIAN = "median of "
# Prefix of unconstrained medians in the state of an AutoNormal.
_LOC = "locs.{}_unconstrained"


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

    def put_back(self, state: dict[str, Tensor]) -> None:
        """Writes what has been learned back into the model."""
        put_back(self.model, self.y, state)

    def scorer(self, state: dict[str, Tensor]) -> LogJoint:
        """The scorer of states under a model that has learned this."""
        self.put_back(state)
        values = {name: transform_to(support)(state[_MEDIAN + name]) for name, support in self._supports.items()}
        return self.guide.log_joint_of(self.y, values=values)

    def beyond(self, scorer: LogJoint) -> float:
        """Returns the log density per data point of global medians."""
        nodes = [scorer.nodes[name] for name in self._supports if not scorer.is_inside(scorer.nodes[name])]
        return float(log_density(nodes)) / self.guide.layout.num_data

    def state(self, beside: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the model's parameters and the medians of a guide's state."""
        free = {name: biject_to(support)(beside[_LOC.format(name)]) for name, support in self._supports.items()}
        return copies(self.model, self.y) | {_MEDIAN + name: transform_to(self._supports[name]).inv(value) for name, value in free.items()}

    def learned(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What may change places: parameters and medians, but no buffers."""
        names = [*parameters_of(self.model, self.y), *(_MEDIAN + name for name in self._supports)]
        return {name: state[name] for name in names}

    def beside(self, state: dict[str, Tensor], near: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns a guide's state with other medians."""
        medians = {
            _LOC.format(name): biject_to(support).inv(transform_to(support)(state[_MEDIAN + name]))
            for name, support in self._supports.items()
        }
        return {**near, **medians}
