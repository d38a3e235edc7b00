"""Observations whose entries depend on different latents: each part of them is a factor of its own."""

from __future__ import annotations

import logging
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import TraceEnum_ELBO, config_enumerate

from pyro_truncated import AutoTruncated, Truncated_ELBO
from pyro_truncated.distributions import BinaryChains, CategoricalChains

TRANSITION = torch.tensor([[0.8, 0.15, 0.05], [0.1, 0.8, 0.1], [0.05, 0.25, 0.7]], dtype=torch.float64)
WEIGHT = torch.tensor([[1.0, -0.5], [0.3, 2.0]], dtype=torch.float64)
ONE = torch.ones((), dtype=torch.float64)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def locations():
    return pyro.param("loc", lambda: torch.tensor([-1.0, 0.0, 1.5], dtype=torch.float64))


def evaluate(model, guide, elbo, *args):
    """A loss and its gradient."""
    loss = elbo.loss_and_grads(model, guide, *args)
    parameter = pyro.get_param_store()._params["loc"]
    gradient, parameter.grad = parameter.grad.clone(), None
    return loss, gradient


def chain_in_event(y, is_stacked):
    steps, z = [], torch.tensor(0)
    with pyro.plate("data", len(y)):
        for t in pyro.markov(range(y.shape[1])):
            z = pyro.sample(f"z_{t}", dist.Categorical(TRANSITION[z]))
            steps.append(z)
            if not is_stacked:
                pyro.sample(f"y_{t}", dist.Normal(locations()[z], 0.6 * ONE), obs=y[:, t])
        if is_stacked:
            pyro.sample("y", dist.Normal(locations()[torch.stack(steps, -1)], 0.6 * ONE).to_event(1), obs=y)


def loop_over_data(y, is_stacked):
    means = []
    for n in range(len(y)):
        z = pyro.sample(f"z_{n}", dist.Categorical(TRANSITION[1]))
        means.append(locations()[z])
        if not is_stacked:
            pyro.sample(f"y_{n}", dist.Normal(means[n], 0.6 * ONE), obs=y[n, 0])
    if is_stacked:
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(torch.stack(means, -1), 0.6 * ONE), obs=y[:, 0])


def two_chains_under_a_flag(y, is_stacked):
    """Steps of two chains and a flag, in a plate of sequences, below a plate of time."""
    means = []
    with pyro.plate("data", len(y), dim=-2):
        flag = pyro.sample("flag", dist.Bernoulli(0.3 * ONE))
        a, b = torch.tensor(0), torch.tensor(0)
        for t in pyro.markov(range(y.shape[1])):
            a = pyro.sample(f"a_{t}", dist.Categorical(TRANSITION[a]))
            b = pyro.sample(f"b_{t}", dist.Bernoulli(0.2 + 0.6 * b * ONE))
            means.append((1 + flag) * locations()[a.long()] - b)
            if not is_stacked:
                pyro.sample(f"y_{t}", dist.Normal(means[t], 0.6 * ONE), obs=y[:, t : t + 1])
        if is_stacked:
            with pyro.plate("time", y.shape[1], dim=-1):
                pyro.sample("y", dist.Normal(torch.cat(means, -1), 0.6 * ONE), obs=y)


@pytest.mark.parametrize("model", [chain_in_event, loop_over_data, two_chains_under_a_flag])
def test_stacked_observations_equal_those_of_single_steps(model):
    """Loss, gradient and marginals are those of exact enumeration; with smaller sets the loss is a bound."""
    y = draw(3, 5)
    guide = AutoTruncated(model, 8)
    loss, gradient = evaluate(model, guide, Truncated_ELBO(), y, True)
    enumerated = config_enumerate(lambda y: model(y, False), "parallel")
    exact = evaluate(enumerated, lambda y: None, TraceEnum_ELBO(max_plate_nesting=2), y)
    assert loss == pytest.approx(exact[0], rel=1e-12)
    torch.testing.assert_close(gradient, exact[1], rtol=1e-10, atol=1e-10)
    singly = AutoTruncated(model, 8)
    Truncated_ELBO().loss(model, singly, y, False)
    torch.testing.assert_close(guide.marginals(), singly.marginals(), rtol=1e-10, atol=1e-12)
    small = AutoTruncated(model, 2)
    bound = Truncated_ELBO().loss(model, small, y, True)
    assert small.product is not None
    assert bound >= loss - 1e-9


@pytest.mark.parametrize("take", [lambda s, t: s[:, t], lambda s, t: s.unbind(-1)[t]], ids=["index", "unbind"])
def test_sites_that_take_entries_of_one_stack_have_sets(take):
    def model(y):
        steps, z = [], torch.tensor(0)
        with pyro.plate("data", len(y)):
            for t in range(y.shape[1]):
                z = pyro.sample(f"z_{t}", dist.Categorical(TRANSITION[z]))
                steps.append(z)
            s = torch.stack(steps, -1)
            for t in range(y.shape[1]):
                pyro.sample(f"y_{t}", dist.Normal(locations()[take(s, t)], 0.6 * ONE), obs=y[:, t])

    y, guide = draw(3, 7), AutoTruncated(model, 8)
    expected = Truncated_ELBO().loss(chain_in_event, AutoTruncated(chain_in_event, 8), y, False)
    assert Truncated_ELBO().loss(model, guide, y) == pytest.approx(expected, rel=1e-12)
    assert len(guide.product.graph.nodes) == 7


GROUP = torch.randint(6, (40,), generator=torch.Generator().manual_seed(1))
LOOKUPS = {
    "left": lambda z, loc: loc[z[GROUP]],
    "right": lambda z, loc: loc[z[..., GROUP]],
    "derived": lambda z, loc: loc[z][GROUP],
    "gather": lambda z, loc: loc[z.index_select(-1, GROUP)],
}


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_a_plate_that_an_index_looks_up_has_a_set_for_each_member(lookup):
    """As in tables with a row for each label: the evidence is a product over groups."""
    y = draw(40)

    def model(y):
        with pyro.plate("groups", 6):
            z = pyro.sample("z", dist.Categorical(TRANSITION[1]))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(lookup(z, locations()), 0.6 * ONE), obs=y)

    guide = AutoTruncated(model, 4)
    loss, gradient = evaluate(model, guide, Truncated_ELBO(), y)
    loc = torch.tensor([-1.0, 0.0, 1.5], dtype=torch.float64, requires_grad=True)
    log_joint = TRANSITION[1].log().expand(6, 3).index_add(0, GROUP, dist.Normal(loc, 0.6 * ONE).log_prob(y.unsqueeze(-1)))
    exact = -log_joint.logsumexp(-1).sum()
    assert loss == pytest.approx(exact.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact, loc)[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(guide.marginals()["z"].squeeze(0), log_joint.detach().softmax(-1), rtol=1e-10, atol=1e-12)


def annotators(y, item, annotator):
    """Dawid and Skene's model of labels, whose parameters begin uniform."""
    confusion = pyro.param("confusion", lambda: torch.full((3, 3, 3), 1 / 3, dtype=torch.float64), constraint=dist.constraints.simplex)
    with pyro.plate("items", 6):
        z = pyro.sample("z", dist.Categorical(TRANSITION[1]))
    with pyro.plate("labels", len(y)):
        pyro.sample("y", dist.Categorical(confusion[annotator, z[item]]), obs=y)


def test_parameters_that_hide_what_a_density_depends_on_are_no_matter():
    """Uniform ones do not, at first. A look at others leaves them as they were."""
    generator = torch.Generator().manual_seed(2)
    y, annotator = torch.randint(3, (40,), generator=generator), torch.randint(3, (40,), generator=generator)
    guide = AutoTruncated(annotators, 4)
    Truncated_ELBO().loss(annotators, guide, y, GROUP, annotator)
    assert bool((pyro.param("confusion") == 1 / 3).all())
    confusion = torch.rand(3, 3, 3, generator=generator, dtype=torch.float64)
    pyro.get_param_store()["confusion"] = confusion = confusion / confusion.sum(-1, keepdim=True)
    log_joint = TRANSITION[1].log().expand(6, 3).index_add(0, GROUP, confusion.log()[annotator, :, y])
    loss = Truncated_ELBO().loss(annotators, guide, y, GROUP, annotator)
    assert loss == pytest.approx(-float(log_joint.logsumexp(-1).sum()), rel=1e-12)


def test_another_lookup_of_the_same_shape_is_refused_and_inferred_for():
    generator = torch.Generator().manual_seed(2)
    y, annotator = torch.randint(3, (40,), generator=generator), torch.randint(3, (40,), generator=generator)
    other = torch.randint(6, (40,), generator=generator)
    guide = AutoTruncated(annotators, 4)
    confusion = TRANSITION.expand(3, 3, 3)
    pyro.param("confusion", confusion.clone(), constraint=dist.constraints.simplex)
    Truncated_ELBO().loss(annotators, guide, y, GROUP, annotator)
    with pytest.raises(ValueError, match="another structure than when the guide was set up"):
        Truncated_ELBO().loss(annotators, guide, y, other, annotator)
    log_joint = TRANSITION[1].log().expand(6, 3).index_add(0, other, confusion.log()[annotator, :, y])
    new = guide.infer((y, other, annotator))
    assert Truncated_ELBO().loss(annotators, new, y, other, annotator) == pytest.approx(-float(log_joint.logsumexp(-1).sum()), rel=1e-12)


def running_sums(z):
    return torch.stack(z, -1).cumsum(-1)


def differences(z):
    return torch.stack([after - before for before, after in zip((0.0, *z), z, strict=False)], -1)


@pytest.mark.parametrize("combine", [running_sums, differences])
def test_entries_that_depend_on_several_steps(combine, caplog):
    """Sums of all earlier steps keep whole states, and it is said; differences of two have sets."""
    y = draw(3, 10)

    def model(y):
        z, steps = torch.zeros((), dtype=torch.float64), []
        with pyro.plate("data", len(y)):
            for t in range(10):
                z = pyro.sample(f"z_{t}", dist.Bernoulli(0.2 + 0.6 * z))
                steps.append(z)
            pyro.sample("y", dist.Normal(combine(torch.broadcast_tensors(*steps)), 1.0).to_event(1), obs=y)

    guide = AutoTruncated(model, 64)
    with caplog.at_level(logging.INFO):
        loss = Truncated_ELBO().loss(model, guide, y)
    exact = Truncated_ELBO().loss(model, AutoTruncated(model, 1024), y)
    if combine is differences:
        assert loss == pytest.approx(exact, rel=1e-12)
        assert len(guide.product.graph.nodes) == 10
    else:
        assert guide.product is None
        assert "'y' depends on all of the sites z_0, z_1, z_2, z_3, ...: a population holds whole states, 64 of 1024" in caplog.text


def test_a_mask_and_a_scale_count_once_for_each_entry():
    y, is_seen = draw(3, 7), draw(3) > -0.5

    def model(y, is_stacked):
        steps, z = [], torch.tensor(0)
        with pyro.plate("data", len(y)), poutine.scale(scale=2.0):
            for t in range(7):
                z = pyro.sample(f"z_{t}", dist.Categorical(TRANSITION[z]))
                steps.append(z)
                if not is_stacked:
                    pyro.sample(f"y_{t}", dist.Normal(locations()[z], 0.6 * ONE).mask(is_seen), obs=y[:, t])
            if is_stacked:
                with poutine.mask(mask=is_seen):
                    pyro.sample("y", dist.Normal(locations()[torch.stack(steps, -1)], 0.6 * ONE).to_event(1), obs=y)

    losses = [Truncated_ELBO().loss(model, AutoTruncated(model, 8), y, is_stacked) for is_stacked in (True, False)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_stack_of_latents_without_plates_has_sets():
    y = draw(5)

    def model(y):
        steps = [pyro.sample(f"z_{t}", dist.Categorical(TRANSITION[1])) for t in range(5)]
        pyro.sample("y", dist.Normal(locations()[torch.stack(steps, -1)], 0.6 * ONE).to_event(1), obs=y)

    guide = AutoTruncated(model, 3)
    loss = Truncated_ELBO().loss(model, guide, y)
    assert len(guide.product.graph.nodes) == 5
    emission = dist.Normal(locations().detach(), 0.6 * ONE).log_prob(y.unsqueeze(-1))
    assert loss == pytest.approx(-float((emission + TRANSITION[1].log()).logsumexp(-1).sum()), rel=1e-12)


def test_weights_that_are_zero_at_first_do_not_hide_where_states_lie():
    """Rows look up steps that are stacked; the loss is exact after the weight has changed."""
    y, step = draw(40), GROUP % 3

    def model(y):
        weight = pyro.param("loc", torch.zeros((), dtype=torch.float64))
        steps = torch.stack([pyro.sample(f"s_{t}", dist.Bernoulli(0.4 * ONE)) for t in range(3)], -1)
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(weight * steps[..., step], ONE), obs=y)

    guide = AutoTruncated(model, 4)
    Truncated_ELBO().loss(model, guide, y)
    pyro.get_param_store()["loc"] = 0.8 * ONE
    loss = Truncated_ELBO().loss(model, guide, y)
    log_joint = torch.tensor([0.6, 0.4], dtype=torch.float64).log().expand(3, 2)
    log_joint = log_joint.index_add(0, step, dist.Normal(torch.tensor([0.0, 0.8], dtype=torch.float64), ONE).log_prob(y.unsqueeze(-1)))
    assert loss == pytest.approx(-float(log_joint.logsumexp(-1).sum()), rel=1e-12)


def test_labels_that_tell_nothing_of_a_latent_hide_no_lookup():
    """One column of the table is the same for all values, and all first labels are of it."""
    emission = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.7, 0.2], [0.3, 0.5, 0.2]], dtype=torch.float64)

    def model(y):
        with pyro.plate("groups", 6):
            z = pyro.sample("z", dist.Categorical(TRANSITION[1]))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Categorical(emission[z[GROUP]]), obs=y)

    y = torch.arange(40) % 3
    guide = AutoTruncated(model, 3)
    Truncated_ELBO().loss(model, guide, torch.full((40,), 2))
    log_joint = TRANSITION[1].log().expand(6, 3).index_add(0, GROUP, emission.log()[:, y].mT)
    loss = Truncated_ELBO().loss(model, guide, y)
    assert loss == pytest.approx(-float(log_joint.logsumexp(-1).sum()), rel=1e-12)


def test_rows_that_depend_on_a_latent_only_later_are_refused():
    """A covariate that was zero: to which group its row belongs is not known."""
    slope = torch.nn.Parameter(torch.arange(40.0).double() % 2, requires_grad=False)

    def model(y):
        with pyro.plate("groups", 6):
            z = pyro.sample("z", dist.Categorical(TRANSITION[1]))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(slope * z[GROUP], ONE), obs=y)

    y, guide = draw(40), AutoTruncated(model, 3)
    for _ in range(2):
        Truncated_ELBO().loss(model, guide, y)
    slope.copy_(slope.roll(1, 0))
    # At once, and not only at one of the calls that look again.
    with pytest.raises(ValueError, match="has entries that depend on other latents than they did"):
        Truncated_ELBO().loss(model, guide, y)


def test_groups_of_long_tables_are_told_apart():
    """Of which some entries are looked at: some of each column."""

    def model(rows):
        with pyro.plate("groups", 6):
            z = pyro.sample("z", dist.Categorical(TRANSITION[1]))
        with pyro.plate("data", len(rows)):
            pyro.sample("y", dist.Normal(z[rows[:, 1].long()], ONE), obs=rows[:, 0])

    rows, guide, elbo = torch.stack([draw(40_000), torch.arange(40_000) % 6], 1), AutoTruncated(model, 3), Truncated_ELBO()
    for _ in range(2):
        elbo.loss(model, guide, rows)
    with pytest.raises(ValueError, match="another structure than when the guide was set up"):
        elbo.loss(model, guide, torch.stack([rows[:, 0], rows[:, 1].flip(0)], 1))


@pytest.mark.parametrize("row", range(0, 200, 25))
def test_one_row_of_another_group_is_refused_at_once(row):
    """However many groups there are; states of both groups differ in some of the runs that are compared."""

    def model(y, group):
        with pyro.plate("groups", 50):
            z = pyro.sample("z", dist.Bernoulli(0.4 * ONE))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z[group], ONE), obs=y)

    y, group, guide = draw(200), torch.arange(200) % 50, AutoTruncated(model, 2)
    for _ in range(2):
        Truncated_ELBO().loss(model, guide, y, group)
    group[row] = (group[row] + 7) % 50
    with pytest.raises(ValueError, match="another structure than when the guide was set up"):
        Truncated_ELBO().loss(model, guide, y, group)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("step", range(0, 40, 5))
def test_stacks_in_another_order_are_refused_at_once(step):
    def model(y, order):
        steps, z = [], torch.tensor(0)
        for t in range(len(y)):
            z = pyro.sample(f"z_{t}", dist.Categorical(TRANSITION[z]))
            steps.append(z)
        pyro.sample("y", dist.Normal(torch.stack(steps, -1)[..., order].double(), ONE).to_event(1), obs=y)

    y, order, guide = draw(40), torch.arange(40), AutoTruncated(model, 3)
    for _ in range(2):
        Truncated_ELBO().loss(model, guide, y, order)
    order[[step, step + 1]] = order[[step + 1, step]]
    with pytest.raises(ValueError, match="another structure than when the guide was set up"):
        Truncated_ELBO().loss(model, guide, y, order)


def test_missing_entries_of_later_data_are_named():
    y, guide, elbo = draw(4, 3), AutoTruncated(chain_in_event, 2), Truncated_ELBO()
    elbo.loss(chain_in_event, guide, y, False)
    y[2, 1] = torch.nan
    with pytest.raises(ValueError, match="site 'y_1' observes nan at data point 2"):
        elbo.loss(chain_in_event, guide, y, False)


@pytest.mark.parametrize("kind", ["labels", "measurements", "observed groups"])
@pytest.mark.parametrize(("is_in_place", "num_others"), [(False, 0), (True, 0), (False, 4)])
def test_rows_of_other_groups_are_refused_at_once(kind, is_in_place, num_others):
    """Groups and observations are columns of one table, or the groups are observed themselves."""

    def model(rows):
        group = rows[:, 0].long()
        with pyro.plate("groups", 6):
            z = pyro.sample("z", dist.Categorical(TRANSITION[1]))
        with pyro.plate("data", len(rows)):
            if kind == "labels":
                pyro.sample("y", dist.Categorical(TRANSITION[z[group]]), obs=rows[:, 1])
                return
            if kind == "observed groups":
                pyro.sample("group", dist.Categorical(torch.ones(6, dtype=torch.float64)), obs=rows[:, 0])
            pyro.sample("y", dist.Normal(z[group], ONE), obs=rows[:, 1])

    rows = torch.stack([GROUP, torch.arange(40) % 3], 1)
    rows = rows if kind == "labels" else rows.double()
    other = torch.stack([rows[:, 0].flip(0), rows[:, 1]], 1)
    guide, elbo = AutoTruncated(model, 3), Truncated_ELBO()
    first = [elbo.loss(model, guide, rows) for _ in range(2)]
    assert first[0] == first[1]
    # Tables with other observations tell nothing of the groups.
    for shift in range(num_others):
        elbo.loss(model, guide, torch.stack([rows[:, 0], rows[:, 1].roll(1 + shift)], 1))
    if is_in_place:
        rows.copy_(other)
    with pytest.raises(ValueError, match="another structure than when the guide was set up"):
        elbo.loss(model, guide, rows if is_in_place else other)


@pytest.mark.parametrize(("time", "number"), [(torch.arange(300) * 1.7 % 500, 500), (torch.arange(60) // 3 % 20 * 2.5, 50)])
def test_thresholds_among_many_values_are_found(time, number):
    """Groups change at a time of their own. Few pairs of values lie on both sides of a threshold; the lowest and the highest always do."""
    group = torch.arange(len(time)) % 3

    def change_points(y):
        with pyro.plate("groups", 3):
            tau = pyro.sample("tau", dist.Categorical(torch.ones(number, dtype=torch.float64)))
        with pyro.plate("data", len(time)):
            pyro.sample("y", dist.Normal(torch.where(time < tau[group], ONE, -ONE), ONE), obs=y)

    y = draw(len(time))
    terms = dist.Normal(2 * (time.unsqueeze(-1) < torch.arange(number)).double() - 1, ONE).log_prob(y.unsqueeze(-1))
    log_joint = torch.zeros(3, number, dtype=torch.float64).index_add(0, group, terms) - math.log(number)
    loss = Truncated_ELBO().loss(change_points, AutoTruncated(change_points, number), y)
    assert loss == pytest.approx(-float(log_joint.logsumexp(-1).sum()), rel=1e-6)


def test_rare_values_are_found():
    """A flag matters in one of twenty values."""

    def rare(y):
        flag = pyro.sample("flag", dist.Bernoulli(0.4 * ONE))
        steps = [pyro.sample(f"s_{t}", dist.Categorical(torch.ones(20, dtype=torch.float64))) for t in range(3)]
        s = torch.stack(steps, -1)
        pyro.sample("y", dist.Normal(0.1 * s + torch.where(s == 7, 2 * flag.unsqueeze(-1), 0.0), ONE).to_event(1), obs=y)

    y = draw(3) + 1
    loss = Truncated_ELBO().loss(rare, AutoTruncated(rare, 20), y)
    s = torch.arange(20, dtype=torch.float64)
    given = [dist.Normal(0.1 * s + 2 * flag * (s == 7), ONE).log_prob(y.unsqueeze(-1)).logsumexp(-1).sum() for flag in (0, 1)]
    exact = torch.stack([given[0] + math.log(0.6), given[1] + math.log(0.4)]).logsumexp(0) - 3 * math.log(20)
    assert loss == pytest.approx(-float(exact), rel=1e-6)


def test_what_parameters_hid_at_first_is_refused_once_they_show_it():
    """A unit that is dead at first depends on the step before, and training revives it."""

    def model(y):
        offset = pyro.param("offset", torch.tensor(-3.0, dtype=torch.float64))
        s = torch.stack([pyro.sample(f"s_{t}", dist.Bernoulli(0.4 * ONE)) for t in range(12)], -1)
        pyro.sample("y", dist.Normal(s + (s.roll(1, -1) + offset).relu(), ONE).to_event(1), obs=y)

    guide, y, elbo = AutoTruncated(model, 8), draw(12), Truncated_ELBO()
    elbo.loss(model, guide, y)
    pyro.get_param_store()["offset"] = torch.tensor(1.0, dtype=torch.float64)
    losses = (elbo.loss(model, guide, y) for _ in range(4))
    with pytest.raises(ValueError, match=r"entries of the sites \['y'\] depend on other discrete latents"):
        sum(losses)


def test_vectors_that_rows_look_up_have_sets():
    """Numbers of rows, groups and entries do not matter."""
    for number in (12, 14, 15):
        group = torch.arange(number) % 4
        y, slope = draw(number), torch.tensor([1.0, -0.6], dtype=torch.float64)

        def model(y, group=group, slope=slope):
            with pyro.plate("groups", 4):
                z = pyro.sample("z", dist.Bernoulli(0.4 * ONE.expand(2)).to_event(1))
            with pyro.plate("data", len(y)):
                pyro.sample("y", dist.Normal(z[group] @ slope, ONE), obs=y)

        guide = AutoTruncated(model, 4)
        loss = Truncated_ELBO().loss(model, guide, y)
        states = torch.tensor([[a, b] for a in (0.0, 1.0) for b in (0.0, 1.0)], dtype=torch.float64)
        prior = dist.Bernoulli(0.4 * ONE).log_prob(states).sum(-1)
        log_joint = prior.expand(4, 4).index_add(0, group, dist.Normal(states @ slope, ONE).log_prob(y.unsqueeze(-1)))
        assert loss == pytest.approx(-float(log_joint.logsumexp(-1).sum()), rel=1e-9)
        assert guide.product is not None


@pytest.mark.parametrize("kind", [BinaryChains, CategoricalChains])
def test_a_flag_that_switches_the_transitions_of_chains_is_a_node_of_its_own(kind):
    """The start, which has the batch of the transitions, does not depend on it."""
    switch = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64).expand(2, 2, 2)
    initial = 0.3 * ONE.expand(2) if kind is BinaryChains else torch.tensor([[0.7, 0.3]], dtype=torch.float64).expand(2, 2)

    def model(y):
        flag = pyro.sample("flag", dist.Bernoulli(0.4 * ONE))[..., None, None, None]
        s = pyro.sample("s", kind(initial, torch.where(flag == 1, switch.flip(-1), switch), num_steps=4))
        pyro.sample("y", dist.Normal(ONE * s.sum(-1), ONE).to_event(1), obs=y)

    y = draw(4)
    guide = AutoTruncated(model, 4)
    loss = Truncated_ELBO().loss(model, guide, y)
    assert len(guide.product.graph.nodes) == 5
    assert loss == pytest.approx(Truncated_ELBO().loss(model, AutoTruncated(model, 2**9), y), rel=1e-12)


@pytest.mark.parametrize("is_factor", [True, False])
def test_a_point_mass_that_observes_itself_keeps_its_own_density(is_factor):
    y = draw(8)

    def model(y):
        z = torch.tensor(0.0, dtype=torch.float64)
        for t in pyro.markov(range(8)):
            z = pyro.sample(f"z_{t}", dist.Bernoulli(torch.where(z > 0, 0.8 * ONE, 0.2 * ONE)))
            if is_factor:
                pyro.factor(f"f_{t}", 1.5 * z)
            else:
                place = 0.0 * ONE
                pyro.sample(f"f_{t}", dist.Delta(place, log_density=1.5 * z), obs=place)
            pyro.sample(f"y_{t}", dist.Normal(z, ONE), obs=y[t])

    guide = AutoTruncated(model, num_states=16)
    loss = Truncated_ELBO().loss(model, guide, y)
    exact = TraceEnum_ELBO(max_plate_nesting=0).loss(config_enumerate(model), lambda y: None, y)
    assert guide.product is not None
    assert loss == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("kind", ["asserted", "expanded"])
def test_parameters_that_cannot_be_moved_stay_where_they_are(kind):
    """A program may refuse others by an assertion; elements of an expanded tensor have one place."""
    weight = torch.full((2,), 0.5, dtype=torch.float64) if kind == "asserted" else ONE[None].expand(2)
    weight.requires_grad_()

    def model(y):
        assert kind == "expanded" or abs(float(weight.detach().sum()) - 1.0) < 1e-9
        steps, z = [], torch.tensor(0)
        with pyro.plate("data", len(y)):
            for t in pyro.markov(range(y.shape[1])):
                z = pyro.sample(f"z_{t}", dist.Categorical(TRANSITION[z]))
                steps.append(z)
            pyro.sample("y", dist.Normal(torch.stack(steps, -1) * weight[0], ONE).to_event(1), obs=y)

    y, before = draw(3, 6), weight.detach().clone()
    guide = AutoTruncated(model, num_states=16)
    Truncated_ELBO().loss(model, guide, y)
    assert guide.product is not None
    assert len(guide.product.graph.nodes) == 6
    assert torch.equal(weight.detach(), before)
