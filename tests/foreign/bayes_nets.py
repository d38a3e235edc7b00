"""Bayes nets: small diagnosis, the classics of the textbooks, noisy gates."""

import pyro
import pyro.distributions as dist
import torch
from pyro.ops.indexing import Vindex

from tests.foreign import Foreign, foreign


def _bernoulli(name: str, table: torch.Tensor, *parents: torch.Tensor, obs=None) -> torch.Tensor:
    """A binary node whose probability is looked up by its parents."""
    table = table.to(torch.get_default_dtype())
    return pyro.sample(name, dist.Bernoulli(Vindex(table)[tuple(parent.long() for parent in parents)] if parents else table), obs=obs)


@foreign
def sprinkler() -> Foreign:
    """The sprinkler of Pearl and Murphy: why is the grass wet; scalar sites, no plate."""

    def model(wet):
        cloudy = _bernoulli("cloudy", torch.tensor(0.5))
        sprinkler = _bernoulli("sprinkler", torch.tensor([0.5, 0.1]), cloudy)
        rain = _bernoulli("rain", torch.tensor([0.2, 0.8]), cloudy)
        _bernoulli("wet", torch.tensor([[0.01, 0.9], [0.9, 0.99]]), sprinkler, rain, obs=wet)

    return Foreign(model, (torch.tensor(1.0),), plates=())


@foreign
def asia() -> Foreign:
    """BUGS volume 2, "Asia" (Lauritzen and Spiegelhalter): dyspnoea after a visit to Asia, with a deterministic "or"."""

    def model(visit, dyspnoea):
        smoking = _bernoulli("smoking", torch.tensor(0.5))
        tuberculosis = _bernoulli("tuberculosis", torch.tensor([0.01, 0.05]), visit)
        cancer = _bernoulli("cancer", torch.tensor([0.01, 0.10]), smoking)
        bronchitis = _bernoulli("bronchitis", torch.tensor([0.3, 0.6]), smoking)
        either = pyro.deterministic("either", torch.maximum(tuberculosis, cancer))
        _bernoulli("xray", torch.tensor([0.05, 0.98]), either)
        _bernoulli("dyspnoea", torch.tensor([[0.1, 0.8], [0.7, 0.9]]), either, bronchitis, obs=dyspnoea)

    return Foreign(model, (torch.tensor(1.0), torch.tensor(1.0)), plates=())


@foreign
def alarm() -> Foreign:
    """Pearl's burglar alarm: John and Mary call, for several nights in a plate, with a rate of burglaries to learn."""

    def model(john, mary):
        rate = pyro.param("rate", torch.tensor(0.05), constraint=dist.constraints.unit_interval)
        with pyro.plate("nights", len(john)):
            burglary = pyro.sample("burglary", dist.Bernoulli(rate))
            earthquake = pyro.sample("earthquake", dist.Bernoulli(0.02))
            alarm = _bernoulli("alarm", torch.tensor([[0.001, 0.29], [0.94, 0.95]]), burglary, earthquake)
            _bernoulli("john", torch.tensor([0.05, 0.9]), alarm, obs=john)
            _bernoulli("mary", torch.tensor([0.01, 0.7]), alarm, obs=mary)

    return Foreign(model, (torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 0.0, 0.0])), plates=("nights",))


@foreign
def quick_medical_reference() -> Foreign:
    """QMR-DT (Shwe et al.): diseases cause findings through a noisy "or" with leaks, many patients."""

    def model(findings):
        prior = pyro.param("prior", torch.tensor([0.1, 0.3, 0.2, 0.05]), constraint=dist.constraints.unit_interval)
        strength = pyro.sample("strength", dist.HalfNormal(torch.ones(5, 4)).to_event(2))
        with pyro.plate("patients", len(findings)):
            diseases = pyro.sample("diseases", dist.Bernoulli(prior).to_event(1))
            absent = torch.exp(-(diseases @ strength.mT) - 0.01)
            pyro.sample("findings", dist.Bernoulli(1 - absent).to_event(1), obs=findings)

    return Foreign(model, (torch.bernoulli(torch.full((4, 5), 0.4)),), plates=("patients",), new=(torch.ones(2, 5),))


@foreign
def student() -> Foreign:
    """Koller and Friedman's student: difficulty and intelligence, grades in three values, one letter seen."""

    grades = torch.tensor([[[0.3, 0.4, 0.3], [0.9, 0.08, 0.02]], [[0.05, 0.25, 0.7], [0.5, 0.3, 0.2]]], dtype=torch.float64)

    def model(letter, sat):
        difficulty = pyro.sample("difficulty", dist.Bernoulli(0.4))
        intelligence = pyro.sample("intelligence", dist.Bernoulli(0.3))
        grade = pyro.sample("grade", dist.Categorical(Vindex(grades)[difficulty.long(), intelligence.long()]))
        _bernoulli("sat", torch.tensor([0.05, 0.8]), intelligence, obs=sat)
        _bernoulli("letter", torch.tensor([0.9, 0.6, 0.01]), grade, obs=letter)

    return Foreign(model, (torch.tensor(0.0), torch.tensor(1.0)), plates=())


@foreign
def monty_hall() -> Foreign:
    """Monty Hall: the host opens a door that is neither chosen nor hides the car; repeated games."""

    def model(choice, opened):
        with pyro.plate("games", len(choice)):
            car = pyro.sample("car", dist.Categorical(torch.ones(3)))
            doors = torch.arange(3)
            allowed = (doors != car.unsqueeze(-1)) & (doors != choice.unsqueeze(-1))
            pyro.sample("opened", dist.Categorical(allowed.to(torch.get_default_dtype())), obs=opened)

    return Foreign(model, (torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0])), plates=("games",))


@foreign
def murder_mystery() -> Foreign:
    """Model-Based Machine Learning, chapter 1: Auburn or Grey, revolver or dagger, and whose hair it is."""

    def model(weapon_seen, hair):
        auburn = pyro.sample("auburn", dist.Bernoulli(0.7))
        _bernoulli("weapon", torch.tensor([0.9, 0.2]), auburn, obs=weapon_seen)
        _bernoulli("hair", torch.tensor([0.5, 0.05]), auburn, obs=hair)

    return Foreign(model, (torch.tensor(1.0), torch.tensor(1.0)), plates=())


@foreign
def two_coins() -> Foreign:
    """Infer.NET's tutorial "two coins": not both came up heads."""

    def model(both):
        first = pyro.sample("first", dist.Bernoulli(0.5))
        second = pyro.sample("second", dist.Bernoulli(0.5))
        pyro.sample("both", dist.Delta(first * second), obs=both)

    return Foreign(model, (torch.tensor(0.0),), plates=())


@foreign
def biased_or_fair_coin() -> Foreign:
    """Is the coin fair? (BUGS "Cointoss"; Kruschke's model comparison): a scalar model indicator over all tosses."""

    def model(tosses):
        bias = pyro.sample("bias", dist.Beta(1.0, 1.0))
        is_biased = pyro.sample("is_biased", dist.Bernoulli(0.5))
        with pyro.plate("tosses", len(tosses)):
            pyro.sample("toss", dist.Bernoulli(torch.where(is_biased > 0, bias, 0.5)), obs=tosses)

    return Foreign(model, (torch.tensor([1.0, 1, 1, 0, 1, 1]),), plates=())


@foreign
def lung_cancer() -> Foreign:
    """Korb and Nicholson's metastatic cancer net with parameters to learn from partly observed patients (``obs_mask``)."""

    def model(smoker, xray, cancer, known):
        risk = pyro.sample("risk", dist.Beta(torch.tensor([1.0, 3.0]), torch.tensor([20.0, 20.0])).to_event(1))
        with pyro.plate("data", len(smoker)):
            pollution = pyro.sample("pollution", dist.Bernoulli(0.1))
            logits = risk[..., smoker.long()].logit() + pollution
            cancer = pyro.sample("cancer", dist.Bernoulli(logits=logits), obs=cancer, obs_mask=known)
            _bernoulli("xray", torch.tensor([0.2, 0.9]), cancer, obs=xray)

    smoker, xray, cancer = torch.tensor([0.0, 1, 1, 0]), torch.tensor([0.0, 1, 0, 1]), torch.tensor([0.0, 1, 0, 0])
    return Foreign(model, (smoker, xray, cancer, torch.tensor([True, True, False, False])))


@foreign
def car_that_does_not_start() -> Foreign:
    """A troubleshooter (Heckerman's car): battery, fuel, plugs; the engine turns or starts only if all that it needs works."""

    def model(lights, starts):
        battery = pyro.sample("battery", dist.Bernoulli(0.9))
        fuel = pyro.sample("fuel", dist.Bernoulli(0.95))
        plugs = pyro.sample("plugs", dist.Bernoulli(0.97))
        _bernoulli("lights", torch.tensor([0.0, 0.99]), battery, obs=lights)
        turns = pyro.deterministic("turns", battery * plugs)
        pyro.sample("starts", dist.Bernoulli(0.98 * turns * fuel), obs=starts)

    return Foreign(model, (torch.tensor(1.0), torch.tensor(0.0)), plates=())


@foreign
def scalar_implicature() -> Foreign:
    """The listener of the rational speech acts tutorial: a world by what a speaker would say of it, both looked up in tables."""

    truth = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 1, 1]], dtype=torch.float64)  # world (none, some, all) by utterance

    def model(utterance):
        world = pyro.sample("world", dist.Categorical(torch.ones(3)))
        rationality = pyro.param("rationality", torch.tensor(1.5), constraint=dist.constraints.positive)
        listener = truth / truth.sum(0)
        speaker = (listener + 1e-6).pow(rationality)
        pyro.sample("utterance", dist.Categorical(speaker[world]), obs=utterance)

    return Foreign(model, (torch.tensor(1),), plates=())
