"""A spike-and-slab GP-LVM of your own learns the number of latent dimensions.

    python examples/own_spike_slab_gplvm.py

Every latent dimension has a switch. AutoNormal is the guide of the latents, AutoTruncated that of the switches, and a Gaussian process
with an active set is the likelihood; kernel and noise are learned. With ``--elbo stock`` it trains by Pyro's own TraceEnum_ELBO,
to the same answer in the same time. For ``x * switches`` takes all states of the switches at once, in a dimension to the left of the
data's. Of a model that does not broadcast so, Pyro would run one state after the other.
"""

import argparse
import time

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.contrib.gp.kernels import RBF
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal, init_to_value
from pyro.nn import PyroModule, PyroParam
from torch import Tensor

from pyro_truncated import AutoTruncated, Truncated_ELBO
from pyro_truncated.distributions import ActiveSetGaussianProcess


class SwitchedGPLVM(PyroModule):
    """Gaussian processes from latents to data, and a switch for each latent."""

    def __init__(self, y: Tensor, num_latents: int, num_active: int) -> None:
        super().__init__()
        self.num_latents, self.num_active = num_latents, num_active
        self.kernel = RBF(num_latents, y.var(), torch.full((num_latents,), 2.0))
        self.noise = PyroParam(y.var() / 2, dist.constraints.positive)

    def forward(self, y: Tensor) -> None:
        """The model: given the first rows, the active set, others are independent."""
        switches = pyro.sample("b", dist.Bernoulli(torch.full((self.num_latents,), 0.1)).to_event(1))
        with pyro.plate("data", len(y)):
            x = pyro.sample("x", dist.Normal(torch.zeros(self.num_latents), 1.0).to_event(1))
            seen = x * switches
            pyro.sample("y", ActiveSetGaussianProcess(seen, self.kernel, self.noise, self.num_active, y.shape[1]), obs=y)


def principal_components(y: Tensor, num: int) -> Tensor:
    """Principal components of unit variance: where the latents start."""
    return torch.linalg.svd(y - y.mean(0), full_matrices=False).U[:, :num] * len(y) ** 0.5


def make_data(args: argparse.Namespace) -> Tensor:
    """Curved functions of two latents."""
    x = torch.randn(args.points, args.true_latents)
    y = torch.tanh(x @ torch.randn(args.true_latents, 12))
    return y - y.mean(0) + 0.1 * torch.randn(y.shape)


def main(args: argparse.Namespace) -> Tensor:
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    y = make_data(args)
    model = SwitchedGPLVM(y, args.latents, num_active=len(y) // 2)
    start = init_to_value(values={"x": principal_components(y, args.latents)})
    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, hide=["b"]), init_loc_fn=start))
    guide.append(AutoTruncated(model, num_states=2**args.latents))
    elbo = Truncated_ELBO() if args.elbo == "truncated" else TraceEnum_ELBO(max_plate_nesting=1)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), elbo)
    begin = time.process_time()
    for step in range(args.steps):
        loss = svi.step(y)
        if step % max(1, args.steps // 6) == 0 or step == args.steps - 1:
            print(f"step {step:4}   free energy {-loss:9.1f}   noise {float(model.noise.detach().sqrt()):.3f}")
    probability = guide[-1].marginals()["b"].squeeze(0)
    print(f"{time.process_time() - begin:.1f} CPU seconds; switches on with probability {[round(p, 3) for p in probability.tolist()]}")
    print(f"dimensions in use: {int((probability > 0.5).sum())} of {args.latents}; the data were made from {args.true_latents}")
    return probability


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--true-latents", type=int, default=2)
    parser.add_argument("--latents", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--elbo", choices=["truncated", "stock"], default="truncated", help="stock: Pyro's TraceEnum_ELBO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.points, args.steps = 40, 30
    return args


if __name__ == "__main__":
    main(parse_args())
