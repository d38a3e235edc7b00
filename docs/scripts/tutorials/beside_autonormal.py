"""
Beside AutoNormal: priors on the parameters
===========================================

Parameters that have priors become continuous latents. Pyro's ``AutoNormal`` takes these, ``AutoTruncated`` the discrete ones, and an
``AutoGuideList`` holds both.
"""

# %%
# Again bars (:doc:`/tutorials/twenty_lines`), this time few images, so that it is worth asking how sure one can be of the dictionary.

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal

from pyro_truncated import (
    AutoTruncated,
    EvolutionarySearch,
    Truncated_ELBO,
    learn,
    to_arviz,
)
from pyro_truncated.datasets import linear_bars
from pyro_truncated.models import BinarySparseCoding

pyro.set_rng_seed(0)
bars = linear_bars(100, size=4, mean_active=2.0)
y = bars.data


def model(y):
    rate = pyro.sample("rate", dist.Beta(1.0, 3.0))
    noise = pyro.sample("noise", dist.LogNormal(1.0, 1.0))
    weight = pyro.sample("weight", dist.Normal(0.0, 10.0).expand([16, 8]).to_event(2))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(rate).expand([8]).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, noise).to_event(1), obs=y)


# %%
# A normal distribution describes the surroundings of one optimum, so it is worth starting at a good one. ``learn`` finds it for the
# shipped model without priors.

point = BinarySparseCoding(16, 8, offset=False)
learn(point, y, progress=False)
start = {
    "weight": point.weight.detach(),
    "rate": point.prior.detach(),
    "noise": point.scale.detach(),
}

# %%
# ``AutoTruncated`` is given the *whole* model, because it scores states under it, and is appended last. ``AutoNormal`` is given the model
# without the discrete site.

guide = AutoGuideList(model)
guide.append(
    AutoNormal(
        poutine.block(model, hide=["s"]),
        init_loc_fn=pyro.infer.autoguide.init_to_value(values=start),
        init_scale=0.05,
    )
)
guide.append(AutoTruncated(model, num_states=32))

svi = SVI(
    model,
    guide,
    pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.99}),
    Truncated_ELBO(EvolutionarySearch(crossover=True)),
)
losses = [svi.step(y) for _ in range(300)]

figure, ax = plt.subplots(figsize=(6, 2.6))
ax.plot(losses)
ax.set(xlabel="step", ylabel="loss", ylim=(min(losses) - 100, losses[20]))
figure.tight_layout()

# %%
# The loss fluctuates now: for each draw of the parameters the sum over states is exact, but the parameters are drawn.
#
# What the guide knows about a pixel of the dictionary is a normal distribution. What it knows about the states of an image is an average
# over draws of the parameters.

quantiles = guide.quantiles([0.05, 0.5, 0.95])
low, middle, high = quantiles["noise"]
print(f"noise: {middle:.2f}, 90 % between {low:.2f} and {high:.2f} (made with 2.00)")
print(guide[-1].marginals()["s"][0])

# %%
# ArviZ sees draws of all latents, and the log likelihood with the states summed out.

idata = to_arviz(model, guide, y)
weight = idata["posterior"]["weight"]
figure, axes = plt.subplots(2, 8, figsize=(8, 2.2))
for column in range(8):
    for ax, picture in zip(
        axes[:, column],
        (weight.mean(("chain", "draw")), weight.std(("chain", "draw"))),
        strict=True,
    ):
        ax.imshow(
            picture[:, column].values.reshape(4, 4),
            cmap="RdBu_r" if ax is axes[0, column] else "viridis",
        )
        ax.set(xticks=[], yticks=[])
axes[0, 0].set_ylabel("mean")
axes[1, 0].set_ylabel("deviation")

# %%
# ``AutoNormal`` sees one of the 8! equivalent orders of the columns, and only the surroundings of one optimum. What the intervals say
# holds within it.
