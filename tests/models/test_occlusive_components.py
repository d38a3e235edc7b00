"""Occlusive components on scenes small enough to enumerate: free energies, posteriors, M-steps, and what the model generates."""

from __future__ import annotations

import itertools
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.distributions import DepthOrder, OccludedScene, Positions
from pyro_truncated.models import OcclusiveComponents
from pyro_truncated.scenes import generated_objects, occluded_scenes
from pyro_truncated.scenes.occlusion import depth_code, depth_rank
from pyro_truncated.scenes.place_scan import place_probabilities
from pyro_truncated.testing import check_guide, enumerate_log_joint
from tests.models.enumeration import assert_never_falls

CANVAS, TEMPLATE = (2, 4), (1, 2)


def make_model(
    order: str = "exclusive", num_objects: int = 2, wrap: bool = True, dtype: torch.dtype = torch.float64
) -> OcclusiveComponents:
    model = OcclusiveComponents(num_objects, CANVAS, TEMPLATE, 2, order=order, wrap=wrap, min_scale=1e-3, dtype=dtype)
    model.masks = 0.2 + 0.6 * torch.rand_like(model.masks)
    model.prior = torch.full_like(model.prior, 0.4)
    return model


def make_data(model: OcclusiveComponents, num_data: int = 12) -> Tensor:
    with torch.no_grad():
        y: Tensor = model(num_data=num_data)
    pyro.clear_param_store()
    return y


def all_states(order: str, num_objects: int, num_places: int) -> list[tuple[tuple[int, ...], float, tuple[int, ...] | None]]:
    """Places (-1: absent), log prior without presence, and front-to-back orders, counted by hand."""
    states = []
    for places in itertools.product(range(-1, num_places), repeat=num_objects):
        present = [h for h, place in enumerate(places) if place >= 0]
        log_prior = -len(present) * math.log(num_places)
        orders = list(itertools.permutations(present)) if order == "depth" else [None]
        states += [(places, log_prior - math.log(len(orders)), sequence) for sequence in orders]
    return states


def log_joints_by_hand(model: OcclusiveComponents, y: Tensor) -> Tensor:
    """``log p(y_n, state)`` of every scene, with the density of scenes taken from a hand-written distribution of one state at a time."""
    columns = []
    prior = model.prior.detach()
    for places, log_prior, sequence in all_states(model.order, model.num_objects, model.canvas.num_places):
        presence = torch.tensor([float(place >= 0) for place in places], dtype=y.dtype)
        position = torch.tensor([max(place, 0) for place in places])
        order = None
        if sequence is not None:
            rank = torch.tensor([sequence.index(h) if h in sequence else 9 for h in range(len(places))])
            order = depth_code(rank, presence)
        scene = OccludedScene(
            presence, position, model.features, model.masks, model.scale, model.background, model.background_scale,
            (model.canvas.height, model.canvas.width), wrap=model.canvas.wrap, order=order,
        )  # fmt: skip
        bernoulli = (presence * prior.log() + (1 - presence) * (1 - prior).log()).sum()
        columns.append(log_prior + bernoulli + scene.log_prob(y).detach())
    return torch.stack(columns, -1)


@pytest.mark.parametrize(("order", "wrap"), [("exclusive", True), ("exclusive", False), ("depth", True)])
def test_free_energy_and_posterior_of_all_scenes_are_exact(order: str, wrap: bool) -> None:
    model = make_model(order, wrap=wrap)
    y = make_data(model)
    expected = log_joints_by_hand(model, y)
    num_scenes = expected.shape[1]
    guide = AutoTruncated(model, num_states=num_scenes)
    elbo = Truncated_ELBO(ExhaustiveSearch())
    svi = SVI(model, guide, Adam({"lr": 0.0}), elbo)
    loss = svi.step(y)
    assert loss == pytest.approx(-float(expected.logsumexp(-1).sum()), rel=1e-10)
    population = guide.population()
    # The population holds exactly the scenes of positive probability, so it is the exact posterior.
    torch.testing.assert_close(population.log_joint.sort(-1).values, expected.sort(-1).values, rtol=1e-9, atol=1e-9)
    weights = expected.softmax(-1)
    states = all_states(order, model.num_objects, model.canvas.num_places)
    for h in range(model.num_objects):
        present = torch.tensor([places[h] >= 0 for places, _, _ in states])
        torch.testing.assert_close(guide.marginals()["presence"][:, h], weights[:, present].sum(-1), rtol=1e-8, atol=1e-10)
    entries, values = place_probabilities(population)
    dense = torch.zeros(len(y), model.num_objects * model.canvas.num_places, dtype=torch.float64)
    dense[entries[0], entries[1]] = values
    for h, place in itertools.product(range(model.num_objects), range(model.canvas.num_places)):
        here = torch.tensor([places[h] == place for places, _, _ in states])
        torch.testing.assert_close(dense[:, h * model.canvas.num_places + place], weights[:, here].sum(-1), rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["exclusive", "depth"])
def test_reconstructions_are_the_posterior_means_of_all_scenes_masks_and_owners(order: str) -> None:
    model = make_model(order, wrap=False)
    y = make_data(model, 3)
    guide = AutoTruncated(model, num_states=len(all_states(order, 2, model.canvas.num_places))).infer(y, ExhaustiveSearch(), 1)
    features, masks = model.features.detach().flatten(1, 2), model.masks.detach().flatten(1)
    expected = torch.zeros_like(y).flatten(1, 2)
    weights = log_joints_by_hand(model, y).softmax(-1)
    for t, (places, _, sequence) in enumerate(all_states(order, 2, model.canvas.num_places)):
        for pixel in range(model.canvas.num_pixels):
            # Who is here, by which entry, and all the masks that they can have.
            here = [
                (h, i) for h, place in enumerate(places) if place >= 0 for i, at in enumerate(model.canvas.pixels[place]) if at == pixel
            ]
            density, colour = torch.zeros(len(y), dtype=y.dtype), torch.zeros(len(y), 2, dtype=y.dtype)
            for on in itertools.product([False, True], repeat=len(here)):
                chance = math.prod(float(masks[cell]) if is_on else 1 - float(masks[cell]) for cell, is_on in zip(here, on, strict=True))
                shown = [cell for cell, is_on in zip(here, on, strict=True) if is_on]
                if sequence is not None and shown:
                    shown = [min(shown, key=lambda cell: sequence.index(cell[0]))]
                for cell in shown or [None]:
                    mean = model.background.detach() if cell is None else features[cell]
                    noise = dist.Normal(mean, (model.background_scale if cell is None else model.scale).detach()).to_event(1)
                    weight = chance / max(1, len(shown)) * noise.log_prob(y.flatten(1, 2)[:, pixel]).exp()
                    density, colour = density + weight, colour + weight.unsqueeze(-1) * mean
            expected[:, pixel] += weights[:, t, None] * colour / density.unsqueeze(-1)
    torch.testing.assert_close(model.reconstruct(guide.population(), y), expected.reshape(y.shape), rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["exclusive", "depth"])
def test_log_evidence_is_that_of_plain_runs_of_the_model(order: str) -> None:
    model = OcclusiveComponents(2, (1, 3), TEMPLATE, 2, order=order, dtype=torch.float64)
    y = make_data(model, 2)
    guide = AutoTruncated(model, num_states=8)
    evidence = enumerate_log_joint(guide, y).logsumexp(-1)
    torch.testing.assert_close(evidence, log_joints_by_hand(model, y).logsumexp(-1), rtol=1e-10, atol=1e-10)
    check_guide(guide, y)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["exclusive", "depth"])
@pytest.mark.parametrize("num_states", [1000, 6])
def test_em_with_fixed_states_never_lowers_the_free_energy(order: str, num_states: int) -> None:
    truth = make_model(order)
    y = make_data(truth, 40)
    model = make_model(order)
    num_scenes = len(all_states(order, model.num_objects, model.canvas.num_places))
    guide = AutoTruncated(model, num_states=min(num_states, num_scenes))
    guide.search_(ExhaustiveSearch(), guide.make_scorer(y))
    values = []
    for _ in range(25):
        population = guide.refresh_(y)
        values.append(float(population.free_energy().sum()))
        model.maximize(model.sufficient_statistics(population, y))
    assert_never_falls(values)
    assert values[-1] > values[0] + 1


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["exclusive", "depth"])
def test_gradient_of_the_free_energy_vanishes_where_the_m_step_has_converged(order: str) -> None:
    model = make_model(order, num_objects=1)
    y = make_data(make_model(order, num_objects=1), 30)
    guide = AutoTruncated(model, num_states=len(all_states(order, 1, model.canvas.num_places)))
    guide.search_(ExhaustiveSearch(), guide.make_scorer(y))

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        Truncated_ELBO(ExhaustiveSearch()).differentiable_loss(model, guide, y).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    before = gradients()
    for _ in range(200):
        model.maximize(model.sufficient_statistics(guide.refresh_(y), y))
    for name, gradient in gradients().items():
        assert gradient.abs().max() < 0.02 * before[name].abs().max(), name


@pytest.mark.parametrize("num_states", [4, 16])
def test_one_object_of_which_no_density_reads_the_depth_has_whole_states(num_states: int) -> None:
    model = make_model("depth", num_objects=1)
    y = make_data(make_model("depth", num_objects=1), 30)
    guide = AutoTruncated(model, num_states=num_states)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    losses = torch.tensor([svi.step(y) for _ in range(4)])
    assert bool((losses.diff() < 1e-9).all())
    assert guide.population().states().shape == (30, num_states, 3)


@pytest.mark.slow
def test_svi_with_closed_form_trains_from_the_data() -> None:
    truth = make_model(num_objects=2)
    truth.scale, truth.background_scale = torch.tensor(0.1).double(), torch.tensor(0.05).double()
    truth.masks = torch.full_like(truth.masks, 0.95)
    y = make_data(truth, 80)
    model = make_model().initialize(y)
    guide = AutoTruncated(model, num_states=32)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    losses = [svi.step(y) for _ in range(15)]
    assert losses[-1] < losses[0] - 10
    assert math.isfinite(losses[-1])


@pytest.mark.slow
def test_floors_hold_on_data_without_noise() -> None:
    model = OcclusiveComponents(2, CANVAS, TEMPLATE, 2, min_scale=0.03, dtype=torch.float64)
    y = torch.zeros(20, *CANVAS, 2, dtype=torch.float64)
    y[:10, 0, 1:3] = 0.7
    model.initialize(y)
    guide = AutoTruncated(model, num_states=64)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    losses = [svi.step(y) for _ in range(10)]
    assert all(after <= before + 1e-8 * abs(before) for before, after in itertools.pairwise(losses))
    floor = 0.03 * y.square().mean().sqrt().item()
    assert min(model.scale.item(), model.background_scale.item()) >= floor * (1 - 1e-12)
    assert 1e-3 <= model.masks.min().item() <= model.masks.max().item() <= 1 - 1e-3


def test_images_that_vary_by_less_than_the_floor_of_their_noise_are_told() -> None:
    y = occluded_scenes(generated_objects(2, 3), 12, (8, 8), presence=0.5, wrap=True).data
    with pytest.warns(UserWarning, match=r"vary by 0\.\d+, less than 15, the floor of the noise: min_scale=0\.15"):
        OcclusiveComponents(2, (8, 8), (3, 3)).initialize(y + 100)
    OcclusiveComponents(2, (8, 8), (3, 3)).initialize(y)


@pytest.mark.parametrize("order", ["exclusive", "depth"])
def test_generated_images_have_the_density_of_the_model(order: str) -> None:
    # E[p_1(y) / p_0(y)] = 1 for data from p_0; the ratio of two scenes is bounded by wide noise, so the mean of many is close to it.
    model = make_model(order)
    model.scale, model.background_scale = torch.tensor(1.0).double(), torch.tensor(1.0).double()
    presence, position = torch.ones(2, dtype=torch.float64), torch.tensor([1, 2])
    parameters = (model.features, model.masks, model.scale, model.background, model.background_scale, CANVAS)
    code = [depth_code(torch.tensor(rank), presence) if order == "depth" else None for rank in ([0, 1], [1, 0])]
    scene = OccludedScene(presence, position, *parameters, order=code[0])
    other = OccludedScene(presence, torch.tensor([2, 5]), *parameters, order=code[1])
    draws = scene.sample((20_000,))
    ratio = (other.log_prob(draws) - scene.log_prob(draws)).exp().detach()
    # Five standard errors: fails once in about two million seeds.
    assert abs(float(ratio.mean()) - 1) < 5 * float(ratio.std()) / len(draws) ** 0.5
    assert float(ratio.std()) > 0.1


def test_depth_codes_and_ranks_invert_each_other_and_every_order_has_one_code() -> None:
    num_objects = 4
    for present in itertools.product([0.0, 1.0], repeat=num_objects):
        presence = torch.tensor(present)
        codes = torch.cartesian_prod(*[torch.arange(num_objects)] * num_objects)
        log_prob = DepthOrder(presence.expand(len(codes), -1), validate_args=False).log_prob(codes)
        possible = codes[log_prob > -math.inf]
        count = math.factorial(int(presence.sum()))
        assert len(possible) == count
        torch.testing.assert_close(log_prob.exp().sum(), torch.tensor(1.0))
        ranks = depth_rank(possible, presence)
        assert len({tuple(rank.tolist()) for rank in ranks}) == count
        assert torch.equal(depth_code(ranks, presence), possible)


@pytest.mark.parametrize("distribution", [DepthOrder, lambda s: Positions(s, 5)])
def test_priors_of_places_and_orders_sample_what_they_say(distribution) -> None:
    presence = torch.tensor([1.0, 0.0, 1.0])
    fn = distribution(presence)
    draws = fn.sample((30_000,))
    values, counts = draws.unique(dim=0, return_counts=True)
    probabilities = fn.expand((len(values),)).log_prob(values).exp()
    torch.testing.assert_close(probabilities.sum(), torch.tensor(1.0))
    # Five standard deviations of each of at most 25 frequencies: fails once in about 70 000 seeds.
    deviation = (probabilities * (1 - probabilities) / len(draws)).sqrt()
    assert bool(((counts / len(draws) - probabilities).abs() < 5 * deviation).all())


def test_distributions_expand_and_share_images_between_states() -> None:
    model = make_model()
    presence = torch.bernoulli(torch.full((7, 3, 2), 0.6)).double()
    position = torch.randint(8, (7, 3, 2))
    parameters = (model.features, model.masks, model.scale, model.background, model.background_scale, CANVAS)
    y = torch.rand(3, *CANVAS, 2, dtype=torch.float64)
    together = OccludedScene(presence, position, *parameters).log_prob(y)
    assert together.shape == (7, 3)
    for c, n in itertools.product(range(7), range(3)):
        single = OccludedScene(presence[c, n], position[c, n], *parameters).log_prob(y[n])
        torch.testing.assert_close(together[c, n], single)
    wide = OccludedScene(presence[0], position[0], *parameters).expand((7, 3)).log_prob(y)
    torch.testing.assert_close(wide, OccludedScene(presence[0], position[0], *parameters).log_prob(y).expand(7, 3))


def test_float32_agrees_with_float64() -> None:
    model = make_model()
    y = make_data(model, 4)
    single = OcclusiveComponents(2, CANVAS, TEMPLATE, 2, dtype=torch.float32)
    single.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    traces = []
    for chosen, data in ((model, y), (single, y.float())):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        states = {"presence": torch.ones(4, 2, dtype=data.dtype), "position": torch.tensor([[0, 1]]).expand(4, -1)}
        trace = poutine.trace(poutine.condition(chosen, states)).get_trace(data)
        traces.append(trace.log_prob_sum().double())
    torch.testing.assert_close(traces[0], traces[1], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"order": "random"}, "order must be"), ({"min_mask": 0.6}, "min_mask must lie"), ({"template": (3, 2)}, "do not fit on a canvas")],
)
def test_bad_settings_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OcclusiveComponents(2, **({"canvas": CANVAS, "template": TEMPLATE} | arguments))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(3, 2, 5, 2), r"y must be of shape \(N, .*; got \(3, 2, 5, 2\)"),
        (torch.full((3, 2, 4, 2), torch.nan), "y must be finite; got 48 entries"),
    ],
)
def test_bad_data_are_refused(bad: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model().initialize(bad)
