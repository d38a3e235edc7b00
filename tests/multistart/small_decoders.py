"""Small networks that decode binary latents."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

NUM_LATENTS, WIDTH, NUM_OBSERVED = 5, 6, 12


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def every_state(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=NUM_LATENTS)), dtype=dtype)


def perceptron(dtype: torch.dtype | None = None, bias: bool = True, deep: bool = False) -> torch.nn.Sequential:
    layers = [torch.nn.Linear(NUM_LATENTS, WIDTH, bias=bias, dtype=dtype), torch.nn.LeakyReLU(0.1)]
    if deep:
        layers += [torch.nn.Linear(WIDTH, WIDTH, dtype=dtype), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, NUM_OBSERVED, bias=bias, dtype=dtype))


def drawn(network: torch.nn.Sequential, seed: int) -> torch.nn.Sequential:
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.randn(value.shape, generator=generator(seed)).to(value))
    return network
