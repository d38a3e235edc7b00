"""Which variables, which model, which features: selectors inside and outside of plates."""

import pyro
import pyro.distributions as dist
import torch

from tests.foreign import Foreign, foreign


@foreign
def spike_and_slab() -> Foreign:
    """Spike and slab regression (Kuo and Mallick) as everybody writes it, ``X @ (gamma * beta)``: it does not vectorise."""

    def model(x, y):
        gamma = pyro.sample("gamma", dist.Bernoulli(torch.full((4,), 0.3)).to_event(1))
        beta = pyro.sample("beta", dist.Normal(torch.zeros(4), 2.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ (gamma * beta), sigma), obs=y)

    return Foreign(model, (torch.randn(6, 4), torch.randn(6)), plates=())


@foreign
def spike_and_slab_vectorised() -> Foreign:
    """The same with a sum in place of the product: selectors may carry dimensions in front, as parallel enumeration asks for."""

    def model(x, y):
        gamma = pyro.sample("gamma", dist.Bernoulli(torch.full((4,), 0.3)).to_event(1))
        beta = pyro.sample("beta", dist.Normal(torch.zeros(4), 2.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal((x * gamma * beta).sum(-1), 0.7), obs=y)

    return Foreign(model, (torch.randn(6, 4), torch.randn(6)), plates=())


@foreign
def stochastic_search_variable_selection() -> Foreign:
    """SSVS (George and McCulloch): the selector chooses the width of the prior of a coefficient in a plate of predictors."""

    def model(x, y):
        with pyro.plate("predictors", x.shape[1]):
            gamma = pyro.sample("gamma", dist.Bernoulli(0.5))
            beta = pyro.sample("beta", dist.Normal(0.0, torch.where(gamma > 0, 3.0, 0.1)))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)

    return Foreign(model, (torch.randn(5, 3), torch.randn(5)), plates=())


@foreign
def model_averaging() -> Foreign:
    """Bayesian model averaging: a scalar index over three regressions of the same data."""

    def model(x, y):
        which = pyro.sample("which", dist.Categorical(torch.tensor([0.5, 0.3, 0.2])))
        coefficient = pyro.sample("coefficient", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        curves = torch.stack([torch.zeros_like(x), x, x**2])
        with pyro.plate("data", len(x)):
            mean = coefficient[..., which].unsqueeze(-1) * curves[which]
            pyro.sample("y", dist.Normal(mean.squeeze(-2) if mean.dim() > 1 and mean.shape[-2] == 1 else mean, 0.5), obs=y)

    return Foreign(model, (torch.linspace(-1, 1, 5), torch.randn(5)), plates=())


@foreign
def polynomial_degree() -> Foreign:
    """The degree of a polynomial as a categorical latent, coefficients above it switched off by a mask of ones."""

    def model(x, y):
        degree = pyro.sample("degree", dist.Categorical(torch.ones(4)))
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        powers = x.unsqueeze(-1) ** torch.arange(4)
        is_used = (torch.arange(4) <= degree.unsqueeze(-1)).to(x.dtype)
        with pyro.plate("data", len(x)):
            mean = (powers * (beta * is_used).unsqueeze(-2)).sum(-1)
            pyro.sample("y", dist.Normal(mean, 0.3), obs=y)

    return Foreign(model, (torch.linspace(-1, 1, 6), torch.randn(6)), plates=())


@foreign
def binary_factors() -> Foreign:
    """Probabilistic principal components with binary factors (also: cooperative vector quantisation)."""

    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 4]).to_event(2))
        sigma = pyro.sample("sigma", dist.LogNormal(-1.0, 0.5))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
            pyro.sample("y", dist.Normal(s @ w, sigma).to_event(1), obs=y)

    return Foreign(model, (torch.randn(5, 4),), new=(torch.randn(2, 4),))


@foreign
def spike_and_slab_factors() -> Foreign:
    """Sparse factors with slabs: each data point has switches and strengths, strengths have a guide of their own."""

    def model(y):
        w = pyro.param("w", torch.linspace(-1, 1, 6).reshape(2, 3))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.4)).to_event(1))
            z = pyro.sample("z", dist.Normal(torch.ones(2), 1.0).to_event(1))
            pyro.sample("y", dist.Normal((s * z) @ w, 0.5).to_event(1), obs=y)

    return Foreign(model, (torch.randn(4, 3),), limits={"infer": "cannot know the latents"})


@foreign
def eight_schools_with_outliers() -> Foreign:
    """Eight schools with an indicator at each school of whether it belongs to the others."""

    def model(sigma, y):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfCauchy(5.0))
        with pyro.plate("J", len(y)):
            is_odd = pyro.sample("is_odd", dist.Bernoulli(0.1))
            theta = pyro.sample("theta", dist.Normal(mu, tau * (1 + 9 * is_odd)))
            pyro.sample("obs", dist.Normal(theta, sigma), obs=y)

    effects = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0])
    return Foreign(model, (torch.tensor([15.0, 10, 16, 11, 9]), effects), plates=("J",), limits={"infer": "cannot know the latents"})


@foreign
def feature_allocation() -> Foreign:
    """A finite Indian buffet: an item's features add up, the owners of each feature are one vector in a plate of items."""

    def model(x):
        with pyro.plate("features", 3):
            share = pyro.sample("share", dist.Beta(0.5, 1.0))
            effect = pyro.sample("effect", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("items", len(x)):
            z = pyro.sample("Z", dist.Bernoulli(share).to_event(1))
            pyro.sample("x", dist.Normal(z @ effect, 0.5).to_event(1), obs=x)

    return Foreign(model, (torch.randn(4, 2),), plates=("items",))
