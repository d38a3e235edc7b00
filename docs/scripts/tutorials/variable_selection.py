"""
Variable selection with 200 predictors
======================================

There are 2\\ :sup:`200` models of which predictors matter. The guide holds thirty of them, with the coefficients integrated out.
"""

# %%
# A hundred observations, 200 predictors that are correlated with their neighbours, eight true effects of falling size.

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO

generator = torch.Generator().manual_seed(0)
noise = torch.randn(100, 200, generator=generator, dtype=torch.float64)
x = noise.clone()
for column in range(1, 200):
    x[:, column] = 0.6 * x[:, column - 1] + 0.8 * noise[:, column]
coefficients = torch.zeros(200, dtype=torch.float64)
coefficients[torch.linspace(0, 199, 10).long()[1:-1]] = torch.linspace(
    2.0, 0.4, 8, dtype=torch.float64
) * torch.tensor([1, -1]).repeat(4)
y = x @ coefficients + torch.randn(100, generator=generator, dtype=torch.float64)

# %%
# The model
# ---------
# A selector ``s`` and a coefficient ``b`` for every predictor. How many predictors to expect, how large their coefficients are and how
# much noise there is, is learned.


def parameters():
    rate = pyro.param(
        "rate",
        torch.tensor(0.05, dtype=torch.float64),
        constraint=dist.constraints.unit_interval,
    )
    slab = pyro.param(
        "slab", torch.tensor(1.0, dtype=torch.float64), constraint=dist.constraints.positive
    )
    noise = pyro.param(
        "noise",
        torch.tensor(2.0, dtype=torch.float64),
        constraint=dist.constraints.positive,
    )
    return rate, slab, noise


def model(x, y):
    rate, slab, noise = parameters()
    s = pyro.sample("s", dist.Bernoulli(rate).expand([200]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, slab).expand([200]).to_event(1))
    pyro.sample("y", dist.Normal((s * b) @ x.mT, noise).to_event(1), obs=y)


# %%
# Given the selectors the coefficients are Gaussian. Handed to the guide as ``conditional``, this exact conditional makes the score of a
# model its *collapsed* log joint :math:`\log p(y, s)`, whatever coefficients are drawn (see :doc:`/explanation/collapsing`).


def coefficients_given(states, x, y):
    _, slab, noise = parameters()
    s = states["s"].to(x)
    precision = (
        s.unsqueeze(-1) * (x.mT @ x) * s.unsqueeze(-2) / noise**2
        + torch.eye(200, dtype=x.dtype) / slab**2
    )
    mean = torch.cholesky_solve(
        (s * (y @ x) / noise**2).unsqueeze(-1), torch.linalg.cholesky(precision)
    ).squeeze(-1)
    pyro.sample(
        "b", dist.MultivariateNormal(mean, precision_matrix=precision, validate_args=False)
    )


# %%
# Training
# --------
# There is no data plate around the selectors, so the guide holds one population: of models. Gradients cost more than searching here, so
# there are four search steps before each.

pyro.set_rng_seed(0)
guide = AutoTruncated(model, num_states=30, conditional=coefficients_given)
elbo = Truncated_ELBO(
    EvolutionarySearch(parents=6, generations=1, crossover=True), search_steps=4
)
svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), elbo)
for _ in range(40):
    loss = svi.step(x, y)
print(f"log evidence at least {-loss:.1f}")

# %%
# What matters
# ------------

inclusion = guide.marginals()["s"].reshape(-1)
rate, slab, noise = (value.item() for value in parameters())
print(
    f"noise {noise:.2f}, coefficients of about {slab:.2f}, {200 * rate:.1f} predictors expected"
)
for index in inclusion.argsort(descending=True)[:10].tolist():
    print(
        f"predictor {index:3}: probability {inclusion[index]:.3f}, true coefficient {coefficients[index]:5.2f}"
    )

true = coefficients != 0
figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 4), sharex=True)
correlation = torch.corrcoef(torch.cat([y[:, None], x], 1).mT)[0, 1:].abs()
for ax, height, label in (
    (upper, correlation, "|correlation with y|"),
    (lower, inclusion.detach(), "inclusion probability"),
):
    for chosen, colour in ((~true, "tab:blue"), (true, "tab:red")):
        ax.bar(chosen.nonzero().flatten(), height[chosen], color=colour, width=1.4)
    ax.set_ylabel(label)
lower.set_xlabel("predictor; red: those with a true effect")
figure.tight_layout()

# %%
# This is seed 0; on other seeds the weakest effect can be missed. ``examples/spike_slab_regression.py`` trains longer and holds the
# scores against the closed form.
