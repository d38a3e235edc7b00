"""The comparison with enumeration equals brute force, one state at a time."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuideList, AutoNormal

from pyro_truncated import AutoTruncated
from pyro_truncated.diagnostics import compare_with_enumeration
from tests import zoo
from tests.diagnostics.tables import table_guide


@pytest.mark.parametrize("case", zoo.CASES, ids=lambda case: case.__name__)
def test_evidence_of_models(case):
    case = case()
    guide = AutoTruncated(case.model, max(1, case.num_states // 3), max_count=case.max_count, whole_states=True)
    found = compare_with_enumeration(guide, *case.args)
    table = case.table().detach()
    torch.testing.assert_close(found.log_evidence, table.logsumexp(0), rtol=1e-10, atol=1e-14)
    assert bool((found.gap >= -1e-9).all())


def test_every_number_equals_brute_force(generator):
    table = 2 * torch.randn(3, 27, generator=generator, dtype=torch.float64)
    population = torch.stack([torch.randperm(27, generator=generator)[:8] for _ in range(3)])
    found = compare_with_enumeration(table_guide(table, population, 3, 3))
    exact = table.softmax(1)
    truncated = torch.zeros_like(exact).scatter(1, population, table.gather(1, population).softmax(1))
    levels = torch.arange(27).unsqueeze(-1) // 3 ** torch.arange(3) % 3
    for posterior, values, pairs in ((exact, found.values, found.pairs), (truncated, found.truncated_values, found.truncated_pairs)):
        for latent in range(3):
            for value in range(3):
                torch.testing.assert_close(values[:, latent, value], posterior[:, levels[:, latent] == value].sum(1))
            for other in range(3):
                both = (levels[:, latent] > 0) & (levels[:, other] > 0)
                torch.testing.assert_close(pairs[:, latent, other], posterior[:, both].sum(1))
    kl = torch.where(truncated > 0, truncated * (truncated.log() - exact.log()), 0.0).sum(1)
    torch.testing.assert_close(found.gap, kl)
    torch.testing.assert_close(found.covered_mass, exact.gather(1, population).sum(1))
    torch.testing.assert_close(found.marginal_error, (found.values - found.truncated_values).abs().flatten(1).amax(1))
    assert found.holds_mode.tolist() == [int(row.argmax()) in states for row, states in zip(table, population.tolist(), strict=True)]


def test_latents_of_other_guides_are_held_at_their_medians(generator):
    y = torch.randn(4, 2, generator=generator)

    def model(y):
        shift = pyro.sample("shift", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(s + shift, 0.5).to_event(1), obs=y)

    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, expose=["shift"])))
    guide.append(AutoTruncated(model, num_states=2))
    found = compare_with_enumeration(guide, y)
    shift = guide[0].median(y)["shift"].detach()
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 2)
    scores = dist.Bernoulli(torch.full((2,), 0.3)).log_prob(states).sum(1) + dist.Normal(states + shift, 0.5).log_prob(y[:, None]).sum(-1)
    torch.testing.assert_close(found.log_evidence.float(), scores.logsumexp(1), rtol=1e-5, atol=1e-5)


def test_large_spaces_are_refused():
    case = zoo.binary()
    guide = AutoTruncated(case.model, 2)
    with pytest.raises(ValueError, match="32 states per data point, more than max_states=31; use covered_mass"):
        compare_with_enumeration(guide, *case.args, max_states=31)
    with pytest.raises(ValueError, match="more than memory_budget=100"):
        compare_with_enumeration(guide, *case.args, memory_budget=100)
