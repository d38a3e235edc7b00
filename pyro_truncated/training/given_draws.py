"""The free energy given draws of other guides: for models that Pyro's enumerating ELBO cannot run on many states at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.sites import sample_nodes


def free_energy_given_draws(part: AutoTruncated, guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    r"""The free energy of a guide with a truncated part, of one draw :math:`z` of its other parts, differentiable in all parameters.

    .. math:: \sum_n \log \sum_{s \in K_n} p(s, y_n, z_n \mid z) + \log p(z) - \log q(z), \qquad z \sim q

    with :math:`z_n` the draws inside the data plates and :math:`z` those outside: what the enumerating ELBO computes for the same draws,
    with the states scored the way the guide scores them.

    Args:
        part: the truncated part.
        guide: the whole guide, an :class:`~pyro.infer.autoguide.AutoGuideList` or any callable that runs ``part``.
        args: the arguments of model and guide.
        kwargs: their keyword arguments.

    Raises:
        NotImplementedError: if a draw depends on parameters that its distribution is not reparametrised in.
    """
    trace = poutine.trace(guide).get_trace(*args, **kwargs)
    own = {*part.layout.sites, part.index_name}
    siblings = {name: node for name, node in sample_nodes(trace).items() if name not in own}
    log_q = _log_density(siblings)
    _check_reparametrised(siblings)
    subsamples = {name: node["value"] for name, node in trace.nodes.items() if site_is_subsample(node)}
    drawn = {name: node["value"] for name, node in siblings.items() if name in part.layout.other_latents}
    log_joint = part.log_joint_of(*args, values={**drawn, **subsamples}, **kwargs)
    beyond = {name: node for name, node in log_joint.nodes.items() if name in drawn and not log_joint.is_inside(node)}
    return _truncated(part, log_joint) + log_joint.outside() + _log_density(beyond) - log_q


def _truncated(part: AutoTruncated, log_joint: LogJoint) -> Tensor:
    population = part.population(log_joint.indices)
    blocks = [log_joint.score(population.words[rows], rows).double().logsumexp(-1).sum() for rows in log_joint.row_blocks(part.num_states)]
    return log_joint.scale * torch.stack(blocks).sum()


def _log_density(nodes: Mapping[str, Any]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for node in nodes.values():
        log_prob = node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"])
        total = total.to(log_prob.device) + scale_and_mask(log_prob, node["scale"], node["mask"]).sum()
    return total


def _check_reparametrised(nodes: Mapping[str, Any]) -> None:
    for name, node in nodes.items():
        fn = node["fn"]
        if not fn.has_rsample and torch.is_grad_enabled() and fn.log_prob(node["value"]).requires_grad:
            raise NotImplementedError(
                f"site '{name}' of the guide ({type(fn).__name__}) is not reparametrised, and this model scores states in a way that "
                "Pyro's enumerating ELBO does not know, so that nothing gives its gradient. Guide it with a reparametrised distribution "
                "(Normal, LogNormal, Beta, ...), or let the model take many states at once (see the VectorizationWarning)."
            )
