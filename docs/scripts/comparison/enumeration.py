"""
Plain enumeration
=================

``TraceEnum_ELBO`` with ``config_enumerate`` is exact. Its time and memory double with every binary latent.
"""

# %%
# Five data points of 40 dimensions, each a sum of columns of a dictionary. Plain enumeration wants one site per latent.

import time

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import TraceEnum_ELBO, config_enumerate

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO


def by_sites(y, weight):
    rate = torch.tensor(2.0 / weight.shape[1], dtype=y.dtype)
    with pyro.plate("data", len(y), dim=-1):
        mean = sum(
            pyro.sample(f"s_{h}", dist.Bernoulli(rate)).unsqueeze(-1) * column
            for h, column in enumerate(weight.mT)
        )
        pyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y)


def by_vector(y, weight):
    with pyro.plate("data", len(y), dim=-1):
        s = pyro.sample(
            "s",
            dist.Bernoulli(
                torch.full((weight.shape[1],), 2.0 / weight.shape[1], dtype=y.dtype)
            ).to_event(1),
        )
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.5).to_event(1), obs=y)


def enumerated(y, weight):
    with torch.no_grad():
        return -TraceEnum_ELBO(max_plate_nesting=1).loss(
            config_enumerate(by_sites), lambda *args: None, y, weight
        )


def truncated(y, weight):
    search = EvolutionarySearch(
        parents=20, generations=1, crossover=True, mutation="sparseflips"
    )
    guide = AutoTruncated(by_vector, num_states=200)
    elbo = Truncated_ELBO(search, search_steps=50)
    elbo.loss_and_grads(by_vector, guide, y, weight)
    return -elbo.loss(by_vector, guide, y, weight)


# %%
# The last column is the bound minus the log joint of the states that made the data, which is one term of the evidence. Below zero, the
# search has missed them.

print(" H   enumerated   seconds   truncated   seconds   above the truth")
for latents in (4, 8, 12, 16, 50, 300):
    pyro.set_rng_seed(latents)
    weight = torch.randn(40, latents, dtype=torch.float64)
    states = (torch.rand(5, latents) < 2.0 / latents).double()
    y = states @ weight.mT + 0.5 * torch.randn(5, 40, dtype=torch.float64)
    truth = float(
        pyro.poutine.trace(pyro.poutine.condition(by_vector, {"s": states}))
        .get_trace(y, weight)
        .log_prob_sum()
    )
    line = f"{latents:3}"
    for method in (enumerated, truncated):
        if method is enumerated and latents > 16:
            line += "            -         -"
            continue
        start = time.perf_counter()
        bound = method(y, weight)
        line += f"   {bound:10.4f}   {time.perf_counter() - start:7.2f}"
    print(f"{line}   {bound - truth:10.4f}")

# %%
# In favour of enumeration: it is exact, it needs no search, and where latents interact with few others (``pyro.markov``: chains, trees)
# its cost is linear in their number. There the guide sums by messages, too (:doc:`/how-to/structure`), and keeps sets where states are
# too many.
#
# In favour of the truncated posterior: everything else. On an idle machine with 2 cores plain enumeration took half a minute and 8 GB at
# ``H = 20`` and died at ``H = 24``. ``examples/enumeration_wall.py`` measures it on yours, each method in a process of its own.
#
# .. image:: ../../examples/gallery/enumeration_wall.png
#    :alt: Time and memory of plain enumeration and of AutoTruncated, by the number of latents
#
# With ten points of 20 dimensions instead, which say less about their latents, the default search ended far below the states that made
# the data from ``H = 100`` on.
