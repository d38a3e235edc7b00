"""What users get wrong is said in words of theirs, before any work is done."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, ExhaustiveSearch, Population, StateSpace, Truncated_ELBO
from pyro_truncated import models as library
from pyro_truncated.states.population import States
from tests import zoo
from tests.faults import more_calls
from tests.faults.calls import CALLS

SEARCH = EvolutionarySearch(parents=2, children=2)
# What may be zero: steps that are not taken, seeds, and what then means all or none.
FROM_ZERO = {
    "ActiveSetGaussianProcess": {"num_active"},
    "Analytic_ELBO": {"warm_up"},
    "GatedDecoder": {"width"},
    "GibbsEM": {"burn_in"},
    "LeaveOneOutRegression.fit": {"steps"},
    "SASDecoder": {"num_active"},
    "SASDecoder.infer": {"steps"},
    "SASDecoder.initialize": {"steps"},
    "Sampling": {"seed"},
    "SubsetGPRegression.fit": {"max_epochs"},
    "UniformSplits": {"num_active"},
    "check_truncation": {"num_samples"},
    "fit_minibatches": {"steps"},
    "loo_pit": {"seed"},
    "gplvm.fit": {"removal_steps", "rounds", "steps", "warm_up"},
    "latents_to_arviz": {"seed"},
    "plot_covered_mass": {"worst"},
    "to_arviz": {"num_predictive", "seed"},
    "maximize_bound": {"steps"},
}


def values_that_do_not_fit(name, argument, value):
    """What is no integer, no number, and none of the words that an argument may be, by its value in a call that works."""
    if type(value) is int:
        return [2.5, True, "2", -1, *([0] if argument not in FROM_ZERO.get(name, ()) else [])]
    return {float: [math.nan, "2"], str: ["no such"]}.get(type(value), [])


# A step's arguments are those of the model.
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"SVI.step"}))
def test_integers_numbers_and_words_that_do_not_fit_are_refused_by_name(name):
    assert more_calls.__name__
    function, arguments = CALLS[name]()
    for argument, good in arguments.items():
        for value in values_that_do_not_fit(name, argument, good):
            with pytest.raises((ValueError, TypeError), match=argument):
                function(**(arguments | {argument: value}))


def step(model, *args, num_states=2, search=SEARCH, **options):
    return Truncated_ELBO(search).loss_and_grads(model, AutoTruncated(model, num_states, **options), *args)


def test_models_and_conditionals_are_callable():
    with pytest.raises(TypeError, match="conditional must be callable or None; got 3"):
        AutoTruncated(zoo.binary().model, conditional=3)
    with pytest.raises(TypeError, match=r"model must be callable; got float32 of shape \(9, 2\)"):
        AutoTruncated(torch.zeros(9, 2))


@pytest.mark.parametrize("shapes", [((4, 3), (4,)), ((3,), (4, 2))])
def test_batches_outside_of_plates_are_named(shapes):
    def model():
        s = pyro.sample("s", dist.Bernoulli(torch.full(shapes[0], 0.5)).to_event(1))
        rates = (0.2 + 0.5 * s.mean()) * torch.ones(shapes[1])
        pyro.sample("y", dist.Bernoulli(rates).to_event(1), obs=torch.zeros(shapes[1]))

    with pytest.raises(
        ValueError, match=r"site '[sy]' \(Bernoulli\) has batch shape \(4,\), dimension -1 of which lies in no plate.*\.to_event\(1\)"
    ):
        AutoTruncated(model)()


@pytest.mark.parametrize("in_plate", [False, True])
def test_batches_outside_of_plates_are_named_even_if_no_latent_matters_to_them(in_plate):
    """Pyro refuses them, too. Beyond data plates they are one constant, and are taken."""

    def model(size):
        with pyro.plate("data", 2, dim=-2) if in_plate else nullcontext():
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("y", dist.Normal(z, 1.0), obs=torch.zeros((2, 1) if in_plate else ()))
            pyro.sample("same", dist.Normal(torch.zeros(size), 1.0), obs=torch.zeros(size))

    size = (2, 3) if in_plate else (3,)
    with pytest.raises(ValueError, match=r"site 'same' .* dimension -1 of which lies in no plate"):
        AutoTruncated(model)(size)
    if in_plate:

        def beyond():
            model((2, 1))
            pyro.sample("same beyond", dist.Normal(torch.zeros(3), 1.0), obs=torch.zeros(3))

        zero, half = (float(dist.Normal(0.0, 1.0).log_prob(torch.tensor(value))) for value in (0.0, 1.0))
        expected = 2 * math.log(0.7 * math.exp(zero) + 0.3 * math.exp(half)) + 5 * zero
        assert Truncated_ELBO().loss(beyond, AutoTruncated(beyond, 2)) == pytest.approx(-expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(6, 1), (2, 6)])
def test_values_of_another_shape_than_their_site_are_named(shape):
    def model(y):
        with pyro.plate("data", 6):
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    with pytest.raises(
        ValueError, match=r"site 'y' \(Normal\) has shape \(6,\), but its values have .* in no plate. Give it values of shape \(6,\)"
    ):
        AutoTruncated(model)(torch.zeros(shape))
    assert AutoTruncated(model).infer(torch.zeros(1, 6), ExhaustiveSearch(), steps=1).marginals()["z"].shape == (6,)


W = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.3, 0.1]])


@pytest.mark.parametrize(
    ("beside", "added"),
    [
        (lambda: pyro.factor("prior", -W.sum(1).abs()), 2.9),
        (lambda: pyro.sample("prior", dist.Normal(torch.zeros(3), 1.0), obs=W[0]), 5.38182),
        (lambda: pyro.deterministic("prior", W, event_dim=0), 0.0),
        (lambda: pyro.sample("prior", dist.Delta(W[0]), obs=W[0]), 0.0),
    ],
    ids=["factor", "observed", "deterministic", "delta"],
)
def test_what_all_states_share_needs_no_plate(beside, added):
    def model(is_with):
        if is_with:
            beside()
        with pyro.plate("data", 4):
            s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(s @ W, 1.0).to_event(1), obs=torch.ones(4, 3))

    losses = [Truncated_ELBO(ExhaustiveSearch()).loss(model, AutoTruncated(model, 4), is_with) for is_with in (False, True)]
    assert losses[1] - losses[0] == pytest.approx(added, abs=1e-4)


def test_a_model_without_discrete_latents_hears_which_it_has():
    def model():
        signs = dist.TransformedDistribution(dist.Bernoulli(0.5), dist.transforms.AffineTransform(-1.0, 2.0))
        pyro.sample("y", dist.Normal(pyro.sample("s", signs), 1.0), obs=torch.zeros(()))

    with pytest.raises(NotImplementedError, match=r"'s' \(TransformedDistribution\) is not supported"):
        AutoTruncated(model)()

    def continuous():
        pyro.sample("y", dist.Normal(pyro.sample("s", dist.Normal(0.0, 1.0)), 1.0), obs=torch.zeros(()))

    with pytest.raises(ValueError, match=r"its latents are: 's' \(Normal\)"):
        AutoTruncated(continuous)()


@pytest.mark.parametrize("bound", [-1, 0, 2.5, True, "x", {"n": 0}])
def test_bounds_of_counts(bound):
    case = zoo.counts()
    with pytest.raises(ValueError, match=r"max_count, .* must be a positive integer"):
        step(case.model, *case.args, max_count=bound)


def test_bounds_of_sites_that_are_not_there():
    case = zoo.counts()
    with pytest.raises(ValueError, match=r"max_count bounds \['k'\], but the model's discrete sites are \['n', 'm'\]"):
        step(case.model, *case.args, max_count={"n": 4, "k": 3})


def test_counts_that_depend_on_each_other_are_refused():
    def model(y):
        with pyro.plate("data", len(y)):
            n = pyro.sample("n", dist.Multinomial(3, torch.ones(3) / 3))
            pyro.sample("y", dist.Normal(n[..., 0], 1.0), obs=y)

    with pytest.raises(NotImplementedError, match=r"site 'n' \(Multinomial\) has a support that is no product"):
        step(model, torch.randn(4))


@pytest.mark.parametrize("states", [[[0] * 5, [1] * 5], "zero"])
def test_initial_states_of_another_type(states: States):
    case = zoo.binary()
    with pytest.raises(TypeError, match="init must be a tensor, a dictionary of tensors by site name, or a callable"):
        step(case.model, *case.args, init=states)


def test_searches_are_searches():
    case = zoo.binary()
    guide = AutoTruncated(case.model, 2)
    with pytest.raises(TypeError, match=r"search must be a pyro_truncated search.*EvolutionarySearch"):
        guide.infer(case.args, EvolutionarySearch)
    with pytest.raises(TypeError, match=r"search must be a pyro_truncated search.*got a Tensor"):
        guide.infer(EvolutionarySearch(), *case.args)
    with pytest.raises(TypeError, match="only searches can be added to searches; got 3"):
        SEARCH + 3


def test_draws_and_expectations():
    case = zoo.binary()
    guide = AutoTruncated(case.model, 2)
    guide.refresh_(*case.args)
    with pytest.raises(ValueError, match=r"tensor that starts with the dimensions \(N, S\) = \(6, 2\); got shape \(\)"):
        guide.expectation(lambda values: values["s"].sum())


def test_a_part_of_a_saved_population_is_none():
    case = zoo.binary()
    guide = AutoTruncated(case.model, 2)
    guide.refresh_(*case.args)
    state = guide.state_dict()
    del state["populations.words"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"populations.words"'):
        AutoTruncated(case.model, 2).load_state_dict(state)
    AutoTruncated(case.model, 2).load_state_dict({})


def test_a_data_point_twice_in_a_minibatch_of_incremental_em():
    closed_form = ClosedForm(library.BinarySparseCoding(3, 4))
    with pytest.raises(ValueError, match="a data point occurs twice in the minibatch"):
        closed_form.collect({}, None, torch.tensor([1, 2, 1]), 5)


def test_populations_of_another_type():
    population = Population(StateSpace([2] * 3), torch.zeros(1, 1, 1), torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"words must be packed states \(N, C, W\) of type int64"):
        population.marginals()


def test_exhaustive_search_of_a_huge_space():
    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((60,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(s.sum(-1), 1.0), obs=y)

    with pytest.raises(ValueError, match=r"exhaustive search would score 2\^60\.0 states for each data point"):
        step(model, torch.randn(4), search=ExhaustiveSearch())
