"""
Gradient estimators
===================

REINFORCE with and without a baseline, ARM, and the exact gradient of a truncated bound: variance and time, side by side.
"""

# %%
# Eight binary causes, so that every expectation can be computed by enumeration. The factorised guide :math:`q(s) = \prod_h
# \mathrm{Bernoulli}(s_h; \sigma(\phi_h))` has its logits :math:`\phi` for every data point, here at the marginals of the exact posterior.

import time

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO, TraceGraph_ELBO

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO

pyro.set_rng_seed(0)
H, N, D = 8, 20, 12
truth = torch.randn(D, H)
y = (torch.rand(N, H) < 0.3).float() @ truth.mT + 0.7 * torch.randn(N, D)
start_weight = truth + 0.3 * torch.randn(D, H)


def model(y):
    weight = pyro.param("weight", start_weight)
    with pyro.plate("data", N, dim=-1):
        s = pyro.sample("s", dist.Bernoulli(torch.full((H,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.7).to_event(1), obs=y)


every = ((torch.arange(2**H).unsqueeze(-1) >> torch.arange(H)) & 1).float()


def log_joint(states, weight):
    prior = dist.Bernoulli(torch.tensor(0.3)).log_prob(states).sum(-1)
    return prior + dist.Normal(states @ weight.mT, 0.7).log_prob(y).sum(-1)


exact = log_joint(every.unsqueeze(1), start_weight)
posterior = exact.softmax(0)
marginals = torch.einsum("sn,sh->nh", posterior, every).clamp(0.02, 0.98)
start_logits = torch.logit(marginals)

# %%
# The gradient with respect to the guide's logits
# -----------------------------------------------
# What a factorised guide is trained with. The exact gradient of its ELBO comes from enumeration.


def by_enumeration(logits):
    logits = logits.clone().requires_grad_()
    log_q = dist.Bernoulli(logits=logits).log_prob(every.unsqueeze(1)).sum(-1)
    elbo = (log_q.exp() * (exact - log_q)).sum()
    return torch.autograd.grad(elbo, logits)[0]


def guide(y):
    logits = pyro.param("logits", start_logits)
    with pyro.plate("data", N, dim=-1):
        infer = (
            {"baseline": {"use_decaying_avg_baseline": True, "baseline_beta": 0.9}}
            if baseline
            else {}
        )
        pyro.sample("s", dist.Bernoulli(logits=logits).to_event(1), infer=infer)


def by_pyro(elbo):
    def estimate():
        pyro.param("logits").unconstrained().grad = None
        elbo.loss_and_grads(model, guide, y)
        return -pyro.param("logits").unconstrained().grad.clone()

    pyro.clear_param_store()
    guide(y), model(y)
    return estimate


def arm():
    """Two antithetic draws from the same uniform numbers (Yin and Zhou, 2019)."""
    u = torch.rand(N, H)
    high, low = (
        (u > torch.sigmoid(-start_logits)).float(),
        (u < torch.sigmoid(start_logits)).float(),
    )
    q = dist.Bernoulli(logits=start_logits)
    f = [log_joint(s, start_weight) - q.log_prob(s).sum(-1) for s in (high, low)]
    return (f[0] - f[1]).unsqueeze(-1) * (u - 0.5)


def measure(name, estimate, repeats=400):
    estimate()
    start = time.perf_counter()
    draws = torch.stack([estimate() for _ in range(repeats)])
    seconds = (time.perf_counter() - start) / repeats
    wanted = by_enumeration(start_logits)
    deviation = draws.std(0).square().sum().sqrt() / wanted.norm()
    bias = (draws.mean(0) - wanted).norm() / wanted.norm()
    print(f"{name:34} {deviation:10.2f} {bias:10.2f} {1e3 * seconds:10.2f}")


print(
    f"{'relative to the exact gradient':34} {'deviation':>10} {'error of':>10} {'ms each':>10}"
)
print(f"{'':34} {'of one':>10} {'the mean':>10}")
baseline = False
measure("REINFORCE, one draw", by_pyro(Trace_ELBO()))
measure("REINFORCE, ten draws", by_pyro(Trace_ELBO(num_particles=10)))
baseline = True
measure("REINFORCE, decaying baseline", by_pyro(TraceGraph_ELBO()))
measure("ARM, one pair of draws", arm)

# %%
# The mean's error is what 400 repetitions leave of the deviation: a twentieth of it. The logits are near their optimum, where the exact
# gradient is small and relative deviations are large; that is where training spends its time.
#
# The gradient with respect to the model
# --------------------------------------
# ``AutoTruncated`` has no parameters: its posterior follows the model. What is left is the gradient with respect to the dictionary,
# compared with that of the exact log evidence. Its deviation is zero; its error is what the states outside the population would have added.

weight = start_weight.clone().requires_grad_()
wanted = torch.autograd.grad(
    log_joint(every.unsqueeze(1), weight).logsumexp(0).sum(), weight
)[0]

print(f"{'':34} {'deviation':>10} {'error of':>10} {'ms each':>10}")
print(f"{'relative to the exact gradient':34} {'of one':>10} {'the mean':>10}")
for size in (4, 8, 16, 32):
    pyro.clear_param_store()
    truncated = AutoTruncated(model, num_states=size)
    elbo = Truncated_ELBO(ExhaustiveSearch(), search_every=10**6)
    elbo.loss_and_grads(model, truncated, y)
    gradients = []
    start = time.perf_counter()
    for _ in range(20):
        pyro.param("weight").unconstrained().grad = None
        elbo.loss_and_grads(model, truncated, y)
        gradients.append(-pyro.param("weight").unconstrained().grad.clone())
    seconds = (time.perf_counter() - start) / 20
    gradients = torch.stack(gradients)
    deviation = gradients.std(0).norm() / wanted.norm()
    error = (gradients[0] - wanted).norm() / wanted.norm()
    print(
        f"{f'truncated, {size} of {2**H} states':34} {deviation:10.2f} {error:10.4f} {1e3 * seconds:10.2f}"
    )

draws = []
for _ in range(400):
    weight.grad = None
    s = dist.Bernoulli(marginals).sample()
    draws.append(torch.autograd.grad(log_joint(s, weight).sum(), weight)[0])
draws = torch.stack(draws)
deviation, error = (
    draws.std(0).norm() / wanted.norm(),
    (draws.mean(0) - wanted).norm() / wanted.norm(),
)
print(f"{'factorised guide, one draw':34} {deviation:10.2f} {error:10.4f}")

# %%
# In favour of estimators: they hold nothing per data point, and an amortised guide answers for new data at once. They work where the best
# few states hold none of the mass.
#
# In favour of the truncated bound: no variance, no baselines, no learning rate for a guide.
