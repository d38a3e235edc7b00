"""The free energy given draws of other guides.

It is for models that Pyro's ELBO cannot run on many states at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.call import Call
from pyro_truncated.program.sites import log_density, sample_nodes


def free_energy_given_draws(part: AutoTruncated, guide: Call) -> Tensor:
    r"""Returns the differentiable free energy of a guide with other parts.

    It is that of one draw :math:`z` of the other parts.

    .. math:: \sum_n \log \sum_{s \in K_n} p(s, y_n, z_n \mid z) + \log p(z) - \log q(z), \qquad z \sim q

    with :math:`z_n` the draws inside the data plates and :math:`z` those outside. The enumerating ELBO computes the same for these
    draws; here the guide's own scores are used.

    Args:
        part: the truncated part.
        guide: the whole guide, an :class:`~pyro.infer.autoguide.AutoGuideList` or any callable that runs ``part``, and its arguments.

    Raises:
        NotImplementedError: if a draw depends on parameters that its distribution is not reparametrised in.
    """
    trace = guide.trace()
    own = {*part.layout.sites, *part.index_names}
    siblings = {name: node for name, node in sample_nodes(trace).items() if name not in own}
    log_q = log_density(siblings.values())
    _check_reparametrised(siblings)
    subsamples = {name: node["value"] for name, node in trace.nodes.items() if site_is_subsample(node)}
    drawn = {name: node["value"] for name, node in siblings.items() if name in part.layout.other_latents}
    batch = part.batch(guide.of(part.model), {**drawn, **subsamples})
    beyond = {name: node for name, node in batch.scorer.nodes.items() if name in drawn and not batch.scorer.is_inside(node)}
    return batch.free_energy() + log_density(beyond.values()) - log_q  # type: ignore[no-any-return]


def _check_reparametrised(nodes: Mapping[str, Any]) -> None:
    for name, node in nodes.items():
        fn = node["fn"]
        if not fn.has_rsample and torch.is_grad_enabled() and fn.log_prob(node["value"]).requires_grad:
            raise NotImplementedError(
                f"site '{name}' of the guide ({type(fn).__name__}) is not reparametrised, and has no gradient, as this model does not "
                "take many states at once (see the VectorizationWarning). Use a reparametrised distribution (Normal, LogNormal, ...), "
                "or let the model vectorise."
            )
