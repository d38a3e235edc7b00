"""What users' own classes of sums of latents have in common in these tests: they say themselves where a start lies."""

import torch
from pyro.nn import PyroModule, PyroParam


class StartedAtRows(PyroModule):
    """Weights ``(D, H)`` that start at random data points."""

    def __init__(self, weight):
        super().__init__()
        self.num_latents, self.weight = weight.shape[1], PyroParam(weight)

    def initialize(self, y, generator=None):
        self.weight = y[torch.randint(len(y), (self.num_latents,), generator=generator)].mT.clone()
        return self
