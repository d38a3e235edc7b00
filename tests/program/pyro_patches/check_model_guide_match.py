"""A reproduction in Pyro alone: a matrix-valued site in fewer plates than the model has, its states enumerated by an index in the guide.

``python tests/program/pyro_patches/check_model_guide_match.py`` ends with ``Model and guide shapes disagree at site 's'``, though
both are ``(4, 2, 2)`` but for the dimension of enumeration; ``check_model_guide_match.patch`` (for pyro-ppl 1.9.2) mends it.
"""

import itertools

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import TraceEnum_ELBO

STATES = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4))).reshape(16, 2, 2)


def model(y: torch.Tensor) -> None:
    """Four data points with a matrix of four binary latents each, and three observed rows."""
    with pyro.plate("data", 4, dim=-1):
        s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.3)).expand([2, 2]).to_event(2))
        with pyro.plate("rows", 3, dim=-2):
            pyro.sample("y", dist.Normal(s.sum((-1, -2)), 0.5), obs=y)


def guide(y: torch.Tensor) -> None:
    """The exact posterior over all sixteen states."""
    likelihood = dist.Normal(STATES.sum((-1, -2)), 0.5).log_prob(y.unsqueeze(-1)).sum(0)
    prior = dist.Bernoulli(torch.tensor(0.3)).log_prob(STATES).sum((-1, -2))
    with pyro.plate("data", 4, dim=-1):
        index = pyro.sample("index", dist.Categorical(logits=likelihood + prior), infer={"enumerate": "parallel", "is_auxiliary": True})
        pyro.sample("s", dist.Delta(STATES[index], event_dim=2))


def log_evidence(y: torch.Tensor) -> float:
    """What minus the loss should be: the guide is exact."""
    likelihood = dist.Normal(STATES.sum((-1, -2)), 0.5).log_prob(y.unsqueeze(-1)).sum(0)
    prior = dist.Bernoulli(torch.tensor(0.3)).log_prob(STATES).sum((-1, -2))
    return float((likelihood + prior).logsumexp(-1).sum())


if __name__ == "__main__":
    data = torch.arange(12.0).reshape(3, 4) / 4
    pyro.enable_validation(True)
    print("log evidence", log_evidence(data))
    print("by TraceEnum_ELBO(max_plate_nesting=3)", -TraceEnum_ELBO(max_plate_nesting=3).loss(model, guide, data))
    print("by TraceEnum_ELBO()", -TraceEnum_ELBO().loss(model, guide, data))
