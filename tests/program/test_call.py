"""What the rest of the library asks of a Pyro program: calls, probes, packed scores, and the plates around."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch.distributions import AffineTransform, constraints

from pyro_truncated import AutoTruncated, Truncated_ELBO
from pyro_truncated.program.call import Call
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.inspection import plates_around
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.packed_scoring import PackedStateScorer
from pyro_truncated.program.probe import Probe

Y = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 1.0], [1.0, 0.0, 0.0], [3.0, 1.0, 1.0], [0.5, 2.5, 1.5]]).double()


class CountingSum(dist.TorchDistribution):
    """A user's own likelihood, normal around the number of active latents, that scores packed states by itself."""

    arg_constraints = {}  # noqa: RUF012
    support = constraints.real_vector

    def __init__(self, states, size):
        self.states, self.size = states, size
        super().__init__(states.shape[:-1], torch.Size([size]), validate_args=False)

    def expand(self, batch_shape, _instance=None):
        return self if torch.Size(batch_shape) == self.batch_shape else CountingSum(self.states.expand(*batch_shape, -1), self.size)

    def sample(self, sample_shape=()):
        return self.states.sum(-1, keepdim=True).expand(*sample_shape, *self.batch_shape, self.size)

    def log_prob(self, value):
        return dist.Normal(self.states.sum(-1, keepdim=True), 1.0).log_prob(value).sum(-1)

    @property
    def has_packed_log_prob(self):
        return True

    def packed_log_prob(self, words, value, state_logits=None):
        states = ((words >> torch.arange(4)) & 1).double()
        score = dist.Normal(states.sum(-1, keepdim=True), 1.0).log_prob(value.unsqueeze(1)).sum(-1)
        return score if state_logits is None else score + (states * state_logits).sum(-1)


def counting(y, batch=None):
    with pyro.plate("data", len(y), subsample_size=batch, dim=-1) as chosen:
        s = pyro.sample("s", dist.Bernoulli(torch.tensor([0.1, 0.2, 0.3, 0.4]).double()).to_event(1))
        pyro.sample("y", CountingSum(s, 3), obs=y[chosen])


def masked(y):
    with poutine.mask(mask=torch.tensor(True)):
        counting(y)


def test_a_likelihood_that_follows_the_protocol_is_scored_packed_as_the_model_scores_it():
    call = Call(counting, (Y,))
    layout = Layout(call.trace(), Dependencies(call))
    log_joint, dense = LogJoint(call, layout), LogJoint(Call(masked, (Y,)), layout)
    assert isinstance(log_joint.nodes["y"]["fn"], PackedStateScorer)
    assert log_joint.packed_model is not None
    assert dense.packed_model is None
    words = torch.arange(16).reshape(1, 16, 1).expand(5, 16, 1)
    torch.testing.assert_close(log_joint.score(words), dense.score(words))
    torch.testing.assert_close(log_joint.score(words[1:3], slice(1, 3)), dense.score(words)[1:3])


def test_a_distribution_that_does_not_follow_it_is_no_packed_one():
    assert not isinstance(dist.Normal(0.0, 1.0), PackedStateScorer)


def test_a_run_takes_values_and_nobody_sees_it():
    call = Call(counting, (Y,), {"batch": 2})
    given = {"data": torch.tensor([4, 1]), "s": torch.ones(2, 4).double()}
    with poutine.trace() as seen:
        trace = call.run(given)
    assert not seen.trace.nodes
    torch.testing.assert_close(trace.nodes["y"]["value"], Y[[4, 1]])
    torch.testing.assert_close(trace.nodes["s"]["value"], given["s"])
    with poutine.trace() as seen:
        call()
    assert "s" in seen.trace.nodes


def test_another_program_takes_the_same_arguments():
    call = Call(counting, (Y,), {"batch": 2})
    assert call.with_program(lambda y, batch: (len(y), batch))() == (5, 2)
    assert set(call.with_program(poutine.block(counting, hide=["s"])).trace().nodes) >= {"y", "data"}
    assert call.model is counting


def test_calls_are_compared_by_identity():
    # Equality of arguments would be that of tensors' entries.
    assert Call(counting, (Y,)) != Call(counting, (Y,))


@pytest.mark.parametrize("chosen", [[4, 1], [0, 2, 3]])
def test_a_probe_knows_which_data_points_it_took(chosen):
    call, every = Call(counting, (Y,), {"batch": len(chosen)}), Call(counting, (Y,))
    layout = Layout(every.trace(), Dependencies(every))
    probe = Probe(call, layout, {"data": torch.tensor(chosen)})
    assert probe.indices.tolist() == chosen
    assert (probe.num_data, probe.full_size) == (len(chosen), 5)
    assert float(probe.scale) == pytest.approx(5 / len(chosen))
    assert float(probe.scale_beyond_subsamples("s")) == pytest.approx(1.0)
    torch.testing.assert_close(probe.observations()["y"], Y[chosen])
    assert Probe(every, layout).indices is None


def test_subsamples_out_of_range_are_named():
    call = Call(counting, (Y,))
    layout = Layout(call.trace(), Dependencies(call))

    def shifted(y):
        with pyro.plate("data", 5, subsample=torch.tensor([1, 7]), dim=-1):
            pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.2).double()).to_event(1))

    with pytest.raises(ValueError, match=r"plate 'data' must lie in 0 \.\. 4; got 1 \.\. 7"):
        _ = Probe(Call(shifted, (Y,)), layout).indices


def test_plates_around_are_those_that_a_site_would_meet():
    with pyro.plate("draws", 3, dim=-2), pyro.plate("data", 5, dim=-1):
        assert [(frame.name, frame.dim, frame.size) for frame in plates_around({"data"})] == [("draws", -2, 3)]
        with poutine.block():
            assert not plates_around(())
        with poutine.block(expose=["s"]):
            assert not plates_around((), "z")
            assert {frame.name for frame in plates_around((), "s")} == {"draws", "data"}
    assert not plates_around(())
    for _ in pyro.plate("steps", 2):
        assert not plates_around(())


def observing(y):
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (np.zeros(3), "numpy.ndarray"),
        ([0.1, 1.2, 0.7], "list"),
        (pd.Series([0.1, 1.2, 0.7]), r"pandas\.\S*Series"),
        (pd.DataFrame({"y": [0.1, 1.2, 0.7]}), r"pandas\.\S*DataFrame"),
        (1.0, "float"),
    ],
)
def test_data_that_are_no_tensor_are_refused_by_the_name_of_their_site(data, kind):
    conditioned = poutine.condition(lambda: observing(None), data={"y": data})
    message = rf"site 'y' observes a {kind}, where Pyro needs a tensor\. Pass torch\.as_tensor\(data, dtype=torch\.float32\)"
    for ask in (
        lambda: Truncated_ELBO().loss(observing, AutoTruncated(observing), data),
        lambda: AutoTruncated(observing).infer(data),
        lambda: AutoTruncated(conditioned).setup(),
        lambda: AutoTruncated(observing)(data),
    ):
        with pytest.raises(TypeError, match=message):
            ask()
    guide = AutoTruncated(observing)
    guide.setup(torch.zeros(3))
    with pytest.raises(TypeError, match=message):
        guide.refresh_(data)


def test_several_arguments_of_the_model_are_no_search():
    with pytest.raises(TypeError, match=r"search must be .* got a Tensor; several arguments of the model go in as a tuple, guide\.infer"):
        AutoTruncated(observing).infer(torch.zeros(3), torch.zeros(3))
    with pytest.raises(TypeError, match=r"several arguments of the model go in as a tuple"):
        AutoTruncated(observing).infer(torch.zeros(3), torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize("mask", [np.array([True, False, True]), [True, False, True]])
def test_errors_of_a_model_name_its_arguments_that_are_no_tensors(mask):
    def model(y, mask):
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y, obs_mask=mask)

    with pytest.raises(ValueError, match=r"ambiguous|boolean") as caught:
        AutoTruncated(model).infer((torch.zeros(3), mask))
    assert f"no tensors: number 2 (a {type(mask).__name__}). Pyro needs torch.as_tensor of them." in caught.value.__notes__[0]


def test_tensors_that_no_distribution_takes_are_named():
    def model(y):
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(z.unsqueeze(-1), 1.0).expand([3, 2]).to_event(1), obs=y)

    y = torch.ones(3, 2)
    with pytest.raises(TypeError, match=r"site 'y' must observe real numbers, as its distribution says; got torch.complex64"):
        Truncated_ELBO().loss(model, AutoTruncated(model), y + 0j)

    class Shifted(dist.TransformedDistribution):
        """A class of one's own, of real numbers as its base is."""

    def shifted(y):
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", Shifted(dist.Normal(z, 1.0), [AffineTransform(1.0, 2.0)]), obs=y)

    with pytest.raises(TypeError, match=r"site 'y' must observe real numbers, as its distribution says; got torch.complex64"):
        Truncated_ELBO().loss(shifted, AutoTruncated(shifted), torch.ones(3) + 0j)
    with pytest.raises(TypeError, match=r"site 'y' observes a tensor of layout torch.sparse_coo: call its to_dense\(\)"):
        Truncated_ELBO().loss(model, AutoTruncated(model), y.to_sparse())
    with pytest.raises(TypeError, match=r"site 'y' observes a numpy.ma.*data\.filled\(0\), and the site under poutine\.mask"):
        Truncated_ELBO().loss(model, AutoTruncated(model), np.ma.masked_less(y.numpy(), 0.0))
