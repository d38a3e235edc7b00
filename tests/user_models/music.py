"""The hidden Markov model over sequences of unequal lengths, as ``model_1`` of Pyro's examples/hmm.py.

As there: sequences in a subsampled plate at dimension -2 (the tones take -1), a mask that ends short sequences and covers discrete and
observed sites alike, and a prior that can be masked off.
"""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch

from tests.user_models import UserModel

HIDDEN = 2


def model(sequences, lengths, batch_size=None, include_prior=True):
    num_sequences, max_length, num_tones = sequences.shape
    with poutine.mask(mask=include_prior):
        probs_x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(HIDDEN) + 0.1).to_event(1))
        probs_y = pyro.sample("probs_y", dist.Beta(0.1, 0.9).expand([HIDDEN, num_tones]).to_event(2))
    tones = pyro.plate("tones", num_tones, dim=-1)
    with pyro.plate("sequences", num_sequences, batch_size, dim=-2) as batch:
        lengths = lengths[batch]
        x = 0
        for t in pyro.markov(range(max_length)):
            with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                x = pyro.sample(f"x_{t}", dist.Categorical(probs_x[x]), infer={"enumerate": "parallel"})
                with tones:
                    pyro.sample(f"y_{t}", dist.Bernoulli(probs_y[x.squeeze(-1)]), obs=sequences[batch, t])


def sequence_plate(sequences, lengths, batch_size=None):
    """Plate of the guide."""
    return pyro.plate("sequences", len(sequences), subsample_size=batch_size, dim=-2)


def make() -> UserModel:
    max_length = 4
    sequences = torch.bernoulli(torch.full((6, max_length, 5), 0.3))
    lengths = torch.tensor([4, 2, 3, 4, 1, 3])
    discrete = [f"x_{t}" for t in range(max_length)]
    batch = {"batch_size": 3}
    return UserModel(model, (sequences, lengths), discrete, HIDDEN**max_length, 2, batch=batch, create_plates=sequence_plate)
