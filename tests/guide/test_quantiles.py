"""Quantiles of discrete posteriors, alone and beside continuous ones, and pictures of models and guides."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.ops.indexing import Vindex

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO
from tests import zoo

QUANTILES = [0.0, 0.05, 0.3, 0.5, 0.95, 1.0]


@pytest.mark.parametrize("make", [zoo.counts, zoo.two_sites, zoo.nested], ids=lambda make: make.__name__)
def test_quantiles_are_those_of_the_marginals(make):
    case = make()
    guide = AutoTruncated(case.model, case.num_states, max_count=case.max_count)
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(case.model, guide, *case.args)
    found = guide.quantiles(QUANTILES, *case.args)
    median = guide.median(*case.args)
    for name, site in guide.layout.sites.items():
        assert found[name].shape == (len(QUANTILES), *median[name].shape)
        shares = guide.marginals()[name].double()
        shares = torch.stack([1 - shares, shares], -1) if site.kind == "boolean" else shares
        # Of each latent in turn: the smallest value of which enough probability is not above.
        latents = shares.reshape(-1, shares.shape[-1]).tolist()
        batch = found[name].reshape(len(QUANTILES), -1)
        if name == "z" and make is zoo.nested:  # words are left of data
            batch = found[name].mT.reshape(len(QUANTILES), -1)
        for row, q in zip(batch.tolist(), QUANTILES, strict=True):
            for value, probabilities in zip(row, latents, strict=True):
                enough = [v for v, p in enumerate(probabilities) if sum(probabilities[: v + 1]) >= max(q - 1e-6, 1e-6)]
                assert value == enough[0]


def test_quantiles_out_of_range_and_of_one_hot_sites():
    case = zoo.one_hot()
    guide = AutoTruncated(case.model, 3)
    with pytest.raises(NotImplementedError, match=r"one-hot sites \['z'\] have no order; use mode"):
        guide.quantiles([0.5], *case.args)
    with pytest.raises(ValueError, match=r"must lie in 0 .. 1; got \[1.5\]"):
        guide.quantiles([1.5], *case.args)


def clusters(y):
    loc = pyro.sample("loc", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.5, 0.3])))
        pyro.sample("y", dist.Normal(Vindex(loc)[..., z], 0.5), obs=y)


def in_company() -> AutoGuideList:
    guide = AutoGuideList(clusters)
    guide.append(AutoNormal(poutine.block(clusters, hide=["z"])))
    guide.append(AutoTruncated(clusters, 3))
    return guide


def test_quantiles_beside_a_continuous_guide():
    y = torch.randn(7)
    guide = in_company()
    guide(y)
    found = guide.quantiles([0.1, 0.9], y)
    assert found["loc"].shape == (2, 3)
    loc = guide[0].median()["loc"]
    below = (dist.Normal(loc, 0.5).log_prob(y.unsqueeze(-1)) + torch.tensor([0.2, 0.5, 0.3]).log()).softmax(-1).cumsum(-1)
    for row, q in zip(found["z"], (0.1, 0.9), strict=True):
        assert torch.equal(row, (below < q).sum(-1))


@pytest.mark.parametrize("make", [zoo.binary, zoo.nested], ids=lambda make: make.__name__)
def test_pictures_of_model_and_guide(make):
    graphviz = pytest.importorskip("graphviz")
    case = make()
    guide = AutoTruncated(case.model, case.num_states)
    for program, names in ((case.model, list(case.sites)), (guide, [guide_index(case), *case.sites])):
        graph = pyro.render_model(program, model_args=case.args, render_distributions=True)
        assert isinstance(graph, graphviz.Digraph)
        for name in names:
            assert f"\t{name} [" in graph.source or f"\t\t{name} [" in graph.source
        assert "label=data" in graph.source
    assert f"{guide_index(case)} ~ Categorical" in graph.source
    assert all(f"{guide_index(case)} -> {name}" in graph.source for name in case.sites)


def guide_index(case: zoo.Case) -> str:
    return "_".join([*case.sites, "index"])


def test_pictures_of_a_list_show_its_parts():
    pytest.importorskip("graphviz")
    source = pyro.render_model(in_company(), model_args=(torch.randn(7),), render_distributions=True).source
    assert "loc ~ " in source
    assert "z_index ~ Categorical" in source
    assert "z_index -> z" in source


def test_relations_of_a_guide_show_that_states_come_from_the_index():
    case = zoo.two_sites()
    relations = pyro.infer.inspect.get_model_relations(AutoTruncated(case.model, 4), case.args)
    assert relations["sample_sample"]["z_s_index"] == []
    assert relations["sample_sample"]["s"] == relations["sample_sample"]["z"] == ["z_s_index"]
