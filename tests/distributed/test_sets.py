"""Sets of states for each node of the factor graph on several processes: the losses of one, or a refusal by name."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.ops.indexing import Vindex
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO, distributed, fit
from pyro_truncated.distributions import BinaryChains
from pyro_truncated.models import FactorialHMM

NUM_DATA, NUM_PARTS, NUM_VALUES = 7, 2, 9


def rows_with_parts(y, z, total):
    """Two chained categories and flags of parts for each row; two columns no latent explains, and a number belongs to no row."""
    loc = pyro.param("loc", lambda: torch.linspace(-3, 3, NUM_VALUES, dtype=torch.float64))
    moves = (-0.3 * (torch.arange(NUM_VALUES) - torch.arange(NUM_VALUES).unsqueeze(-1)).double().abs()).softmax(-1)
    pyro.sample("total", dist.Normal(loc.sum(), 1.0), obs=total)
    with pyro.plate("data", len(y), dim=-1) as rows:
        k = pyro.sample("k", dist.Categorical(torch.ones(NUM_VALUES, dtype=torch.float64)))
        h = pyro.sample("h", dist.Categorical(Vindex(moves)[k]))
        pyro.sample("y", dist.Normal(Vindex(loc)[h], 0.5), obs=y[rows])
        pyro.sample("z", dist.Normal(loc[0], 1.0), obs=z[rows, 0])
        with pyro.plate("parts", NUM_PARTS, dim=-2):
            on = pyro.sample("on", dist.Bernoulli(0.1 + 0.08 * k.double()))
            pyro.sample("x", dist.Normal(on, 0.7), obs=z[rows].mT)
    with pyro.plate("more", len(y), dim=-1) as rows:
        pyro.sample("w", dist.Normal(loc[1], 1.0), obs=z[rows, 1])


def flag_above(y, z, total):
    """A flag that all rows share."""
    flag = pyro.sample("flag", dist.Bernoulli(0.5))
    with pyro.plate("data", len(y)):
        k = pyro.sample("k", dist.Categorical(torch.ones(3)))
        pyro.sample("y", dist.Normal(k + flag, 1.0), obs=y)


def columns():
    generator = torch.Generator().manual_seed(0)
    y, z = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((NUM_DATA,), (NUM_DATA, NUM_PARTS)))
    return 2 * y, z + 0.5


def train(num_states, mutation="randflips", *, model=rows_with_parts, steps=4, **options):
    """The loss of every step, and of the parameters after the last."""
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    y, z = map(distributed.shard, columns())
    search = EvolutionarySearch(2, 2, mutation=mutation) if num_states > NUM_VALUES else None
    svi = SVI(model, AutoTruncated(model, num_states, **options), distributed.AllReduced(Adam({"lr": 0.05})), Truncated_ELBO(search))
    losses = [svi.step(y, z, torch.tensor(1.0)) for _ in range(steps)] + [svi.evaluate_loss(y, z, torch.tensor(1.0))]
    assert (svi.guide.product is None) is options.get("whole_states", False)
    return losses, pyro.param("loc").detach().clone()


def test_several_processes_train_full_sets_as_one_that_enumerates(crew):
    expected, loc = train(NUM_VALUES)
    elbo, model = TraceEnum_ELBO(max_plate_nesting=2), config_enumerate(rows_with_parts)
    assert expected[-1] == pytest.approx(elbo.loss(model, lambda *_: None, *columns(), torch.tensor(1.0)), rel=1e-9)
    for number in (2, 3):
        for losses, own in crew.results(number, train, NUM_VALUES):
            assert losses == pytest.approx(expected, rel=1e-12)
            torch.testing.assert_close(own, loc, rtol=1e-9, atol=1e-9)


def test_several_processes_search_as_one(crew, tmp_path):
    expected, loc = train(3)
    for options in ({}, {"store": tmp_path}):
        for number in (2, 3):
            for losses, own in crew.results(number, train, 3, **options):
                assert losses == pytest.approx(expected, rel=1e-12)
                torch.testing.assert_close(own, loc, rtol=1e-9, atol=1e-9)


# --- beside guides of continuous latents, and chains as one site ---

SWITCH = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).double().expand(4, 2, 2)


def chains_with_weights(y):
    """Binary chains, and weights with a prior."""
    weight = pyro.sample("weight", dist.Normal(torch.zeros(5, 4).double(), 2.0).to_event(2))
    with pyro.plate("sequences", len(y)):
        s = pyro.sample("s", BinaryChains(torch.full((4,), 0.3).double(), SWITCH, y.shape[1]))
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.5).to_event(2), obs=y)


def rows_with_an_offset(y, z, total):
    offset = pyro.sample("offset", dist.Normal(torch.zeros(()).double(), 1.0))
    rows_with_parts(y + offset, z, total)


def sequences():
    return torch.randn(NUM_DATA, 12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def arguments_of(model):
    if model is chains_with_weights:
        return (distributed.shard(sequences()),)
    return (*map(distributed.shard, columns()), torch.tensor(1.0))


def beside(model, latent, guide_class, **options):
    """The loss of every step beside another guide, and all parameters afterwards."""
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    guide = AutoGuideList(model)
    guide.append(guide_class(pyro.poutine.block(model, expose=[latent])))
    guide.append(AutoTruncated(model, 3, **options))
    search = None if options else EvolutionarySearch(2, 2)
    svi = SVI(model, guide, distributed.AllReduced(Adam({"lr": 0.05})), Truncated_ELBO(search))
    losses = [svi.step(*arguments_of(model)) for _ in range(3)]
    return losses, {name: value.detach().clone() for name, value in pyro.get_param_store().named_parameters()}


@pytest.mark.parametrize(
    ("model", "latent", "options"),
    [
        (chains_with_weights, "weight", {}),
        (rows_with_an_offset, "offset", {}),
        (rows_with_an_offset, "offset", {"whole_states": True, "vectorize": False}),
    ],
)
def test_sets_beside_other_guides_are_trained_as_by_one_process(model, latent, options, crew):
    expected, parameters = beside(model, latent, AutoNormal, **options)
    for losses, own in crew.results(2, beside, model, latent, AutoNormal, **options):
        assert losses == pytest.approx(expected, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-9)


def train_chains(is_closed, steps, folder=None, size=None):
    """Free energies of a factorial HMM, its weights and the sets of all steps."""
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    y = distributed.shard(sequences())
    model = FactorialHMM(5, 4, dtype=torch.float64).initialize(y)
    guide = AutoTruncated(model, 6)
    driver = ClosedForm(model) if is_closed else distributed.AllReduced(Adam({"lr": 0.02}))
    svi = SVI(model, guide, driver, Truncated_ELBO(EvolutionarySearch(2, 2)))
    batches = None if size is None else distributed.Batches(y, size, block=1)
    record = fit(svi, y, steps=steps, checkpoint=folder and folder / "run.pt", batches=batches, progress=False).record["free_energy"]
    return record, model.weight.detach(), guide.populations.stores[0].words


@pytest.mark.parametrize("is_closed", [True, False])
def test_chains_are_searched_and_trained_as_by_one_process(is_closed, crew, tmp_path):
    expected, weight, words = train_chains(is_closed, 4)
    assert expected[-1] > expected[0]
    for number in (2, 3):
        found = crew.results(number, train_chains, is_closed, 4)
        assert all(record == pytest.approx(expected, rel=1e-12) for record, *_ in found)
        assert all(torch.allclose(own, weight, rtol=1e-9, atol=1e-9) for _, own, _ in found)
        assert torch.equal(torch.cat([sets for *_, sets in found]), words)
    crew.results(2, train_chains, is_closed, 2, tmp_path)
    record, _, sets = train_chains(is_closed, 4, tmp_path)
    assert record == pytest.approx(expected, rel=1e-12)
    assert torch.equal(sets, words)


@pytest.mark.parametrize("is_closed", [True, False])
def test_minibatches_of_chains_are_searched_and_trained_as_by_one_process(is_closed, crew):
    expected, weight, words = train_chains(is_closed, 8, size=2)
    for number in (2, 3):
        found = crew.results(number, train_chains, is_closed, 8, size=2)
        assert all(record == pytest.approx(expected, rel=1e-12) for record, *_ in found)
        assert all(torch.allclose(own, weight, rtol=1e-9, atol=1e-9) for _, own, _ in found)
        assert torch.equal(torch.cat([sets for *_, sets in found]), words)


def continued(folder, steps):
    """Trains from a checkpoint if there is one; the record, and the sets of each group with its rows by data point."""
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    arguments = (*map(distributed.shard, columns()), torch.tensor(1.0))
    guide = AutoTruncated(rows_with_parts, 3)
    svi = SVI(rows_with_parts, guide, distributed.AllReduced(Adam({"lr": 0.05})), Truncated_ELBO(EvolutionarySearch(2, 2)))
    record = fit(svi, *arguments, steps=steps, checkpoint=folder / "run.pt", progress=False).record["free_energy"]
    groups = zip(guide.product.groups, guide.populations.stores, strict=True)
    return record, [store.words.unflatten(0, (len(group.nodes), len(arguments[0]), -1)) for group, store in groups]


@pytest.mark.slow
def test_a_run_on_sets_goes_on_with_any_number_of_processes(crew, tmp_path):
    (tmp_path / "whole").mkdir()
    expected, words = continued(tmp_path / "whole", 7)
    for before, after in ((2, 3), (3, 1), (1, 2)):
        folder = tmp_path / f"{before}_{after}"
        folder.mkdir()
        for steps, number in ((3, before), (7, after)):
            found = [continued(folder, steps)] if number == 1 else crew.results(number, continued, folder, steps)
        assert all(record == pytest.approx(expected, rel=1e-12) for record, _ in found)
        for place, own in enumerate(words):
            assert torch.equal(torch.cat([sets[place] for _, sets in found], 1), own)


def in_minibatches(mutation, temperature=1.0):
    """Losses of minibatches that some processes have no part of, the parameter afterwards and the sets of each group."""
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    y, z = map(distributed.shard, columns())
    elbo = Truncated_ELBO(EvolutionarySearch(2, 2, mutation=mutation), temperature=temperature)
    svi = SVI(rows_with_parts, AutoTruncated(rows_with_parts, 3), distributed.AllReduced(Adam({"lr": 0.05})), elbo)
    losses = [svi.step(y, z, torch.tensor(1.0))]
    for step in range(8):
        with distributed.Batches(y, 2, block=1).at(step):
            losses.append(svi.step(y, z, torch.tensor(1.0)))
    groups = zip(svi.guide.product.groups, svi.guide.populations.stores, strict=True)
    sets = [store.words.unflatten(0, (len(group.nodes), len(y), -1)) for group, store in groups]
    return losses, pyro.param("loc").detach().clone(), sets


@pytest.mark.parametrize(("mutation", "temperature"), [("sparseflips", 1.0), ("randflips", 2.0)])
def test_minibatches_of_several_processes_are_those_of_one(mutation, temperature, crew):
    expected, loc, words = in_minibatches(mutation, temperature)
    for number in (2, 3):
        found = crew.results(number, in_minibatches, mutation, temperature)
        for losses, own, _ in found:
            assert losses == pytest.approx(expected, rel=1e-12)
            torch.testing.assert_close(own, loc, rtol=1e-9, atol=1e-9)
        for place, own in enumerate(words):
            assert torch.equal(torch.cat([sets[place] for *_, sets in found], 1), own)


def test_plates_of_as_many_members_as_data_take_the_rows_unless_they_are_inside():
    y = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def model(y):
        with pyro.plate("covariates", 5) as rows:
            pyro.sample("c", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0), obs=y[rows, 0])
        with pyro.plate("data", 5, dim=-1) as rows:
            k = pyro.sample("k", dist.Categorical(torch.ones(3, dtype=y.dtype)))
            with pyro.plate("columns", 5, dim=-2):
                pyro.sample("x", dist.Normal(k.double(), 1.0), obs=y[rows].mT)

    guide, elbo = AutoTruncated(model, 3), Truncated_ELBO()
    elbo.loss(model, guide, y)
    with distributed.Batches(y, 2, block=1).at(0) as batch:
        loss = elbo.loss(model, guide, y)
    own, values = y[batch.rows], torch.arange(3.0, dtype=y.dtype)
    evidence = dist.Normal(values, 1.0).log_prob(own.unsqueeze(-1)).sum(1).logsumexp(-1) - torch.tensor(3.0).double().log()
    assert loss == pytest.approx(-5 / 2 * float((evidence + dist.Normal(0.0, 1.0).log_prob(own[:, 0])).sum()), rel=1e-12)


def test_a_summed_elbo_refuses_what_counts_once_for_each_process():
    svi = SVI(rows_with_parts, AutoTruncated(rows_with_parts, 3), Adam({"lr": 0.05}), distributed.SummedELBO(Trace_ELBO()))
    with pytest.raises(TypeError, match=r"what belongs to no data point.* use Truncated_ELBO"):
        svi.step(*columns(), torch.tensor(1.0))


def test_what_several_processes_cannot_do_is_refused_by_name(crew):
    refused = {
        "The latents lie in the plates {'flag': [], 'k': ['data']}": crew.run(2, train, 3, model=flag_above),
    }
    for words, errors in refused.items():
        for error in errors:
            assert isinstance(error, NotImplementedError), error
            assert words in str(error), error
