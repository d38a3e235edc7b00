"""Animals: occupancy, abundance, capture and recapture."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch

from tests.foreign import Foreign, foreign


def _visits(*shape: int, rate: float = 0.4) -> torch.Tensor:
    return torch.bernoulli(torch.full(shape, rate))


@foreign
def occupancy() -> Foreign:
    """Single-season occupancy (MacKenzie et al.; in BUGS, Stan and PyMC): is the site occupied though nothing was seen?"""

    def model(seen, x):
        psi = pyro.sample("psi", dist.Beta(1.0, 1.0))
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("sites", len(seen)):
            z = pyro.sample("z", dist.Bernoulli(psi))
            detection = torch.sigmoid(beta[..., :1] + beta[..., 1:] * x)
            pyro.sample("seen", dist.Bernoulli(z.unsqueeze(-1) * detection).to_event(1), obs=seen)

    seen = torch.tensor([[0.0, 0, 0], [1, 0, 1], [0, 0, 0], [0, 1, 0]])
    return Foreign(model, (seen, torch.randn(4, 3)), plates=("sites",))


@foreign
def dynamic_occupancy() -> Foreign:
    """Multi-season occupancy: sites are colonised and go extinct between seasons; visits lie in a nested plate."""

    def model(seen):
        colonise, persist = pyro.sample("gamma", dist.Beta(1.0, 1.0)), pyro.sample("phi", dist.Beta(1.0, 1.0))
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        visits = pyro.plate("visits", seen.shape[0], dim=-2)
        with pyro.plate("sites", seen.shape[-1], dim=-1):
            z = pyro.sample("z_0", dist.Bernoulli(0.5))
            for season in range(seen.shape[1]):
                if season:
                    z = pyro.sample(f"z_{season}", dist.Bernoulli(z * persist + (1 - z) * colonise))
                with visits:
                    pyro.sample(f"seen_{season}", dist.Bernoulli(z * p), obs=seen[:, season])

    return Foreign(model, (_visits(2, 3, 4),), plates=("sites",))


@foreign
def false_positive_occupancy() -> Foreign:
    """Occupancy with misidentification (Royle and Link): an empty site may yield detections too."""

    def model(seen):
        psi = pyro.param("psi", torch.tensor(0.4), constraint=dist.constraints.unit_interval)
        rates = pyro.param("rates", torch.tensor([0.1, 0.7]), constraint=dist.constraints.unit_interval)
        with pyro.plate("sites", len(seen)):
            z = pyro.sample("z", dist.Categorical(torch.stack([1 - psi, psi])))
            pyro.sample("y", dist.Binomial(4, rates[z]), obs=seen)

    return Foreign(model, (torch.tensor([0.0, 1.0, 4.0]),), plates=("sites",))


@foreign
def two_species_occupancy() -> Foreign:
    """Two species on the same sites (Rota et al.), one four-valued state per site with interaction."""

    patterns = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)

    def model(seen):
        f = pyro.sample("f", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        p = pyro.sample("p", dist.Beta(torch.ones(2), torch.ones(2)).to_event(1))
        logits = torch.stack([torch.zeros_like(f[..., 0]), f[..., 0], f[..., 1], f.sum(-1)], -1)
        with pyro.plate("sites", len(seen)):
            z = pyro.sample("z", dist.Categorical(logits=logits))
            pyro.sample("seen", dist.Binomial(3, patterns[z] * p).to_event(1), obs=seen)

    return Foreign(model, (torch.tensor([[0.0, 2], [1, 0], [3, 1]]),), plates=("sites",))


@foreign
def n_mixture() -> Foreign:
    """Royle's N-mixture model: abundances nobody sees, repeated counts whose support is the abundance."""

    def model(counts):
        rate = pyro.sample("lambda", dist.Gamma(2.0, 0.5))
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        with pyro.plate("sites", len(counts)):
            n = pyro.sample("N", dist.Poisson(rate))
            pyro.sample("counts", dist.Binomial(n.unsqueeze(-1), p, validate_args=False).to_event(1), obs=counts)

    return Foreign(model, (torch.tensor([[2.0, 3.0], [0.0, 1.0], [4.0, 4.0]]),), plates=("sites",), max_count={"N": 15})


@foreign
def royle_nichols() -> Foreign:
    """Royle and Nichols: detection grows with abundance, so that detections alone tell of it."""

    def model(detections):
        rate = pyro.sample("lambda", dist.Gamma(2.0, 1.0))
        r = pyro.sample("r", dist.Beta(1.0, 3.0))
        with pyro.plate("sites", len(detections)):
            n = pyro.sample("N", dist.Poisson(rate))
            pyro.sample("y", dist.Binomial(5, 1 - (1 - r) ** n), obs=detections)

    return Foreign(model, (torch.tensor([0.0, 2.0, 5.0]),), plates=("sites",), max_count={"N": 12})


@foreign
def removal_sampling() -> Foreign:
    """Removal sampling: what is caught in a pass is gone in the next, all from an unknown start."""

    def model(catches):
        p = pyro.sample("p", dist.Beta(2.0, 2.0))
        with pyro.plate("streams", len(catches)):
            left = pyro.sample("N", dist.Poisson(4.0))
            for k in range(catches.shape[1]):
                pyro.sample(f"catch_{k}", dist.Binomial(left, p, validate_args=False), obs=catches[:, k])
                left = (left - catches[:, k]).clamp(min=0)

    return Foreign(model, (torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]]),), plates=("streams",), max_count={"N": 12})


@foreign
def augmented_population() -> Foreign:
    """Closed population size by data augmentation (Royle, Dorazio and Link; BUGS): all-zero histories may be animals or not."""

    def model(captures, occasions):
        omega = pyro.sample("omega", dist.Beta(1.0, 1.0))
        p = pyro.sample("p", dist.Beta(1.0, 1.0))
        with pyro.plate("animals", len(captures)):
            z = pyro.sample("z", dist.Bernoulli(omega))
            pyro.sample("y", dist.Binomial(occasions, p * z), obs=captures)

    return Foreign(model, (torch.tensor([2.0, 1.0, 0.0, 0.0, 0.0]), 3), plates=("animals",))


@foreign
def multistate_recapture() -> Foreign:
    """Arnason and Schwarz: animals move between two places or die, and are seen, or not, where they are."""

    def model(seen):
        survive = pyro.sample("survive", dist.Beta(torch.full((2,), 8.0), torch.full((2,), 2.0)).to_event(1))
        move = pyro.sample("move", dist.Beta(torch.full((2,), 2.0), torch.full((2,), 5.0)).to_event(1))
        s, m = survive, move
        rows = [
            torch.stack([s[..., 0] * (1 - m[..., 0]), s[..., 0] * m[..., 0], 1 - s[..., 0]], -1),
            torch.stack([s[..., 1] * m[..., 1], s[..., 1] * (1 - m[..., 1]), 1 - s[..., 1]], -1),
            torch.eye(3)[2].expand(*s.shape[:-1], 3),
        ]
        transitions = torch.stack(rows, -2)
        emission = torch.tensor([[0.6, 0.0, 0.4], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
        with pyro.plate("animals", len(seen)):
            z = seen[:, 0]
            for t in pyro.markov(range(1, seen.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Categorical(transitions[z]))
                pyro.sample(f"seen_{t}", dist.Categorical(emission[z]), obs=seen[:, t])

    return Foreign(model, (torch.tensor([[0, 2, 1, 2], [1, 1, 2, 2], [0, 0, 2, 0]]),), plates=("animals",))


def _cormack_jolly_seber(phi_of, p_of) -> Foreign:
    """The models of Pyro's examples/capture_recapture/cjs.py: survival and recapture as functions of period and sex."""

    def model(history, sex):
        survival, recapture = phi_of(history.shape[1], sex), p_of()
        z = torch.ones(len(history))
        captured = torch.zeros(len(history)).bool()
        animals = pyro.plate("animals", len(history), dim=-1)
        for t in pyro.markov(range(history.shape[1])):
            with animals, poutine.mask(mask=captured):
                alive = captured.to(z.dtype) * survival(t) * z + (1 - captured.to(z.dtype))
                z = pyro.sample(f"z_{t}", dist.Bernoulli(alive), infer={"enumerate": "parallel"})
                pyro.sample(f"y_{t}", dist.Bernoulli(recapture * z), obs=history[:, t])
            captured = captured | history[:, t].bool()

    return Foreign(model, (_visits(5, 4), torch.tensor([0, 1, 0, 1, 1])), plates=("animals",))


def _recapture():
    return pyro.sample("rho", dist.Uniform(0.0, 1.0))


@foreign
def cjs_1() -> Foreign:
    """Cormack-Jolly-Seber, model 1: one survival probability, one recapture probability."""

    def survival(periods, sex):
        phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
        return lambda t: phi

    return _cormack_jolly_seber(survival, _recapture)


@foreign
def cjs_3() -> Foreign:
    """Cormack-Jolly-Seber, model 3: survival as a random effect of the period."""

    def survival(periods, sex):
        mean = pyro.sample("phi_mean", dist.Uniform(0.0, 1.0)).logit()
        sigma = pyro.sample("phi_sigma", dist.Uniform(0.0, 10.0))
        effect = pyro.sample("effect", dist.Normal(mean, sigma).expand([periods]).to_event(1))
        return lambda t: torch.sigmoid(effect[..., t])

    return _cormack_jolly_seber(survival, _recapture)


@foreign
def cjs_4() -> Foreign:
    """Cormack-Jolly-Seber, model 4: a survival probability for each sex."""

    def survival(periods, sex):
        male, female = pyro.sample("phi_male", dist.Uniform(0.0, 1.0)), pyro.sample("phi_female", dist.Uniform(0.0, 1.0))
        return lambda t: sex * male + (1 - sex) * female

    return _cormack_jolly_seber(survival, _recapture)


@foreign
def cjs_5() -> Foreign:
    """Cormack-Jolly-Seber, model 5: effects of sex and period that add up."""

    def survival(periods, sex):
        with pyro.plate("sexes", 2):
            gender = pyro.sample("gender", dist.Normal(0.0, 10.0))
        period = pyro.sample("period", dist.Normal(0.0, 10.0).expand([periods]).to_event(1))
        return lambda t: torch.sigmoid(gender[sex] + period[..., t])

    return _cormack_jolly_seber(survival, _recapture)
