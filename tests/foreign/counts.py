"""Latent counts: thinning, unknown totals, queues, epidemics; their supports depend on other latents."""

import pyro
import pyro.distributions as dist
import torch

from tests.foreign import Foreign, foreign


@foreign
def twice_thinned() -> Foreign:
    """Thinning twice: five eggs, some hatch, some of these fledge, a noisy weight of the fledglings."""

    def model(y):
        with pyro.plate("data", len(y)):
            hatched = pyro.sample("hatched", dist.Binomial(5, 0.5))
            fledged = pyro.sample("fledged", dist.Binomial(hatched, 0.5))
            pyro.sample("y", dist.Normal(fledged, 0.3), obs=y)

    return Foreign(model, (torch.tensor([1.1, 2.9, 0.0]),))


@foreign
def poisson_thinning() -> Foreign:
    """Eggs by a Poisson law, survivors binomial in them (Casella and Berger), detection in what survived."""

    def model(seen):
        rate = pyro.sample("rate", dist.Gamma(3.0, 1.0))
        survive = pyro.sample("survive", dist.Beta(2.0, 2.0))
        with pyro.plate("nests", len(seen)):
            eggs = pyro.sample("eggs", dist.Poisson(rate))
            alive = pyro.sample("alive", dist.Binomial(eggs, survive))
            pyro.sample("seen", dist.Binomial(alive, 0.8, validate_args=False), obs=seen)

    return Foreign(model, (torch.tensor([2.0, 0.0, 1.0]),), plates=("nests",), max_count={"eggs": 7})


@foreign
def thinning_without_plate() -> Foreign:
    """The two-stage thinning as scalars, outside of all plates."""

    def model(y):
        a = pyro.sample("a", dist.Binomial(5, 0.5))
        b = pyro.sample("b", dist.Binomial(a, 0.5))
        pyro.sample("y", dist.Normal(b, 0.3), obs=y)

    return Foreign(model, (torch.tensor(1.1),), plates=())


@foreign
def unknown_total() -> Foreign:
    """A binomial with unknown number of trials (Raftery; "waterbuck"): several counts share one latent total."""

    def model(counts):
        p = pyro.sample("p", dist.Beta(2.0, 2.0))
        n = pyro.sample("n", dist.Poisson(6.0))
        with pyro.plate("data", len(counts)):
            pyro.sample("counts", dist.Binomial(n, p, validate_args=False), obs=counts)

    return Foreign(model, (torch.tensor([3.0, 5.0, 4.0]),), plates=(), max_count={"n": 15})


@foreign
def german_tanks() -> Foreign:
    """The German tank problem: the number of tanks from serial numbers drawn without replacement."""

    def model(serials):
        total = pyro.sample("total", dist.Categorical(torch.ones(20))) + 1
        size = len(serials)
        falling = torch.lgamma(total + 1.0) - torch.lgamma((total - size).clamp(min=0) + 1.0)
        pyro.factor("serials", torch.where(total >= serials.max(), -falling, -torch.inf))

    return Foreign(model, (torch.tensor([4, 11, 7]),), plates=())


@foreign
def lincoln_petersen() -> Foreign:
    """Capture and recapture in a closed population (hypergeometric): population size is one of a range."""

    def model(marked, caught, recaptured):
        extra = pyro.sample("extra", dist.Geometric(0.1))
        size = marked + caught - recaptured + extra

        def log_choose(n, k):
            return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)

        log_prob = log_choose(torch.as_tensor(marked), recaptured) + log_choose(size - marked, caught - recaptured)
        pyro.factor("recaptured", log_prob - log_choose(size, caught))

    return Foreign(model, (torch.tensor(8.0), torch.tensor(6.0), torch.tensor(3.0)), plates=(), max_count={"extra": 30})


@foreign
def waiting_line() -> Foreign:
    """A queue that is observed through noise: arrivals and departures, who departs must have been there."""

    def model(y):
        with pyro.plate("data", len(y)):
            length = torch.zeros(())
            for t in range(y.shape[1]):
                arrived = pyro.sample(f"arrived_{t}", dist.Binomial(2, 0.4))
                left = pyro.sample(f"left_{t}", dist.Binomial(length + arrived, 0.5))
                length = length + arrived - left
                pyro.sample(f"y_{t}", dist.Normal(length, 0.5), obs=y[:, t])

    return Foreign(model, (torch.tensor([[1.0, 0.2], [0.1, 2.0]]),))


@foreign
def chain_binomial_epidemic() -> Foreign:
    """A chain-binomial epidemic (Reed and Frost): new infections out of those still susceptible, noisy counts of them."""

    def model(reported):
        beta = pyro.sample("beta", dist.Beta(2.0, 3.0))
        susceptible, infected = torch.tensor(3.0), torch.tensor(1.0)
        for t, seen in enumerate(reported):
            infected = pyro.sample(f"infected_{t}", dist.Binomial(susceptible, 1 - (1 - beta) ** infected))
            susceptible = susceptible - infected
            pyro.sample(f"reported_{t}", dist.Poisson(0.7 * infected + 0.05), obs=seen)

    return Foreign(model, (torch.tensor([1.0, 1.0, 0.0]),), plates=())


@foreign
def extended_binomial_epidemic() -> Foreign:
    """The same with ``ExtendedBinomial``, as Pyro's epidemiology writes it: negative totals have probability zero."""

    def model(reported):
        susceptible, infected = torch.tensor(3.0), torch.tensor(1.0)
        for t, seen in enumerate(reported):
            infected = pyro.sample(f"infected_{t}", dist.ExtendedBinomial(susceptible, 0.4 + 0.1 * infected / 4))
            susceptible = susceptible - infected
            pyro.sample(f"reported_{t}", dist.Poisson(0.7 * infected + 0.05), obs=seen)

    return Foreign(model, (torch.tensor([1.0, 1.0]),), plates=(), max_count={"infected_0": 3, "infected_1": 3})


@foreign
def rounded_photons() -> Foreign:
    """Electrons of a camera pixel: a Poisson count read out through gain and Gaussian noise."""

    def model(adu):
        flux = pyro.sample("flux", dist.Gamma(2.0, 0.5))
        gain = pyro.param("gain", torch.tensor(2.0), constraint=dist.constraints.positive)
        with pyro.plate("pixels", len(adu)):
            electrons = pyro.sample("electrons", dist.Poisson(flux))
            pyro.sample("adu", dist.Normal(gain * electrons, 1.0), obs=adu)

    return Foreign(model, (torch.tensor([4.2, 0.3, 7.9]),), plates=("pixels",), max_count={"electrons": 14})


@foreign
def number_of_dice() -> Foreign:
    """How many dice were thrown? The number decides which entries of a vector of dice count (a gate)."""

    def model(total):
        number = pyro.sample("number", dist.Categorical(torch.ones(3)))
        dice = pyro.sample("dice", dist.Categorical(torch.ones(3, 4)).to_event(1))
        is_thrown = (torch.arange(3) <= number.unsqueeze(-1)).to(total.dtype)
        pyro.sample("total", dist.Normal(((dice + 1) * is_thrown).sum(-1), 0.3), obs=total)

    return Foreign(model, (torch.tensor(7.0),), plates=())
