"""The Cormack-Jolly-Seber model with a survival probability for each period, as ``model_2`` of Pyro's examples/capture_recapture/cjs.py.

As there: one discrete site for every period in a ``pyro.markov`` loop, the plate made once and entered in every period, continuous
latents drawn between the discrete ones, and a mask that hides what happened before an animal's first capture. The example updates its
mask in place, so that all sites end up with the last one; here each period keeps its own.
"""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch

from tests.user_models import UserModel


def model(capture_history, sex):
    num_animals, num_periods = capture_history.shape
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    z = torch.ones(num_animals)
    captured = torch.zeros(num_animals).bool()
    animals = pyro.plate("animals", num_animals, dim=-1)
    for t in pyro.markov(range(num_periods)):
        phi = pyro.sample(f"phi_{t}", dist.Uniform(0.0, 1.0)) if t > 0 else 1.0
        with animals, poutine.mask(mask=captured):
            alive = captured.to(z.dtype) * phi * z + (1 - captured.to(z.dtype))
            z = pyro.sample(f"z_{t}", dist.Bernoulli(alive), infer={"enumerate": "parallel"})
            pyro.sample(f"y_{t}", dist.Bernoulli(rho * z), obs=capture_history[:, t])
        captured = captured | capture_history[:, t].bool()


def make() -> UserModel:
    num_periods = 5
    history = torch.bernoulli(torch.full((12, num_periods), 0.4))
    return UserModel(model, (history, None), [f"z_{t}" for t in range(num_periods)], 2**num_periods, 1)
