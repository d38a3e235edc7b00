"""Scenes of occluding objects against brute force: every mask bit of every object, and every owner, enumerated."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.ops import scenes as public
from pyro_truncated.ops.canvas import Canvas, SceneParameters
from pyro_truncated.ops.scenes import scan_at, scan_places, scene_log_prob, scene_pixel_log_prob, scene_statistics
from pyro_truncated.ops.vectorised import scenes
from pyro_truncated.ops.vectorised.scenes import normal_log_density


def make_problem(wrap: bool, num_objects: int = 4, num_data: int = 3, num_states: int = 12) -> tuple[Any, ...]:
    canvas = Canvas(4, 5, 2, 3, wrap)
    places = torch.randint(canvas.num_places, (num_data, num_states, num_objects))
    places[torch.rand(places.shape) < 0.25] = -1
    places[:, 0], places[:, 1] = -1, 0  # nothing, and everything at one place
    rank = torch.rand(places.shape).argsort(-1)
    images = torch.rand(num_data, canvas.num_pixels, 2, dtype=torch.float64)
    features = torch.rand(num_objects, canvas.num_entries, 2, dtype=torch.float64)
    masks = 0.05 + 0.9 * torch.rand(num_objects, canvas.num_entries, dtype=torch.float64)
    scales = torch.tensor([0.3, 0.2], dtype=torch.float64).square()
    background = torch.rand(2, dtype=torch.float64)
    return canvas, places, rank, images, SceneParameters(features, masks, scales[0], background, scales[1])


def normal(value: Tensor, mean: Tensor, variance: Tensor) -> float:
    error = float((value - mean).square().sum())
    return math.exp(-0.5 * error / float(variance)) / (2 * math.pi * float(variance)) ** (len(value) / 2)


def by_hand(canvas: Canvas, places: Tensor, rank: Tensor | None, image: Tensor, parameters: tuple) -> tuple[float, dict]:
    """Density of one image under one state by enumeration of masks and owners; with posterior owners and mask bits, pixel by pixel."""
    features, masks, variance, background, background_variance = parameters
    total, found = 0.0, {}
    for pixel in range(canvas.num_pixels):
        over = []
        for h, place in enumerate(places.tolist()):
            if place >= 0:
                here = (canvas.pixels[place] == pixel).nonzero().flatten().tolist()
                over += [(h, i) for i in here]
        density, owner, on = 0.0, dict.fromkeys([None, *over], 0.0), dict.fromkeys(over, 0.0)
        for bits in itertools.product([0, 1], repeat=len(over)):
            prior = math.prod(float(masks[h, i]) if bit else 1 - float(masks[h, i]) for (h, i), bit in zip(over, bits, strict=True))
            visible = [entry for entry, bit in zip(over, bits, strict=True) if bit]
            if rank is not None and visible:
                visible = [min(visible, key=lambda entry: int(rank[entry[0]]))]
            for entry in visible or [None]:
                mean, spread = (background, background_variance) if entry is None else (features[entry], variance)
                weight = prior / max(1, len(visible)) * normal(image[pixel], mean, spread)
                density += weight
                owner[entry] += weight
                for other, bit in zip(over, bits, strict=True):
                    on[other] += weight * bit
        total += math.log(density)
        found[pixel] = ({k: v / density for k, v in owner.items()}, {k: v / density for k, v in on.items()})
    return total, found


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("in_depth", [True, False])
def test_density_sums_over_all_masks_and_owners(wrap: bool, in_depth: bool) -> None:
    canvas, places, rank, images, parameters = make_problem(wrap)
    given = rank if in_depth else None
    expected = torch.tensor(
        [
            [by_hand(canvas, places[n, c], rank[n, c] if in_depth else None, images[n], parameters)[0] for c in range(places.shape[1])]
            for n in range(len(places))
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(scene_log_prob(places, images, parameters, canvas, given), expected, rtol=1e-12, atol=1e-10)
    with ops.use_backend("vectorised"):
        dense = scenes.log_prob(places, given, images, parameters, canvas)
    torch.testing.assert_close(dense, expected, rtol=1e-12, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("in_depth", [True, False])
def test_densities_of_pixels_add_up_to_that_of_the_image(in_depth: bool) -> None:
    canvas, places, rank, images, parameters = make_problem(wrap=True)
    ranks = rank if in_depth else None
    pixels = scene_pixel_log_prob(places, images, parameters, canvas, ranks)
    torch.testing.assert_close(pixels.sum(-1), scene_log_prob(places, images, parameters, canvas, ranks), rtol=1e-12, atol=1e-9)
    with ops.use_backend("vectorised"):
        dense = scene_pixel_log_prob(places, images, parameters, canvas, ranks)
    torch.testing.assert_close(pixels, dense, rtol=1e-12, atol=1e-9)
    behind = normal_log_density(images, *parameters[3:])
    torch.testing.assert_close(pixels[:, 0], behind, rtol=1e-12, atol=1e-9)  # nothing is there


@pytest.mark.slow
@pytest.mark.parametrize("in_depth", [True, False])
def test_statistics_are_posterior_owners_and_mask_bits(in_depth: bool) -> None:
    canvas, places, rank, images, parameters = make_problem(wrap=True, num_data=2, num_states=5)
    weights = torch.rand(places.shape[:2], dtype=torch.float64)
    masks = parameters[1]
    owned = torch.zeros(*masks.shape, 4, dtype=torch.float64)
    on, present, rest = torch.zeros_like(masks), torch.zeros(len(masks), dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for n, c in itertools.product(range(2), range(5)):
        _, found = by_hand(canvas, places[n, c], rank[n, c] if in_depth else None, images[n], parameters)
        present += weights[n, c] * (places[n, c] >= 0)
        for pixel, (owner, bits) in found.items():
            y = images[n, pixel]
            terms = weights[n, c] * torch.cat([torch.ones(1, dtype=y.dtype), y, y.square().sum().reshape(1)])
            for entry, value in owner.items():
                if entry is None:
                    rest += value * terms
                else:
                    owned[entry] += value * terms
            for entry, value in bits.items():
                on[entry] += weights[n, c] * value
    given = rank if in_depth else None
    for kind in ("compiled", "vectorised"):
        with ops.use_backend(kind):
            got = scene_statistics(places, weights, images, parameters, canvas, given)
        for mine, expected in zip(got, (owned, on, present, rest), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_objects", [2, 5, 6])
def test_without_depth_is_the_average_over_depths_pixel_by_pixel(num_objects: int) -> None:
    canvas = Canvas(1, 1, 1, 1)
    _, _, _, _, parameters = make_problem(wrap=True, num_objects=num_objects)
    parameters = SceneParameters(parameters[0][:, :1], parameters[1][:, :1], *parameters[2:])
    images = torch.rand(1, 1, 2, dtype=torch.float64)
    orders = torch.tensor(list(itertools.permutations(range(num_objects)))).unsqueeze(0)
    places = torch.zeros_like(orders)
    every = scene_log_prob(places, images, parameters, canvas, orders)
    without = scene_log_prob(places[:, :1], images, parameters, canvas)
    torch.testing.assert_close(without[0, 0], every.logsumexp(1)[0] - math.log(orders.shape[1]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("in_depth", [True, False])
def test_gradient_is_that_of_the_dense_form(in_depth: bool) -> None:
    canvas, places, rank, images, parameters = make_problem(wrap=True)
    given, weights = rank if in_depth else None, torch.randn(places.shape[:2], dtype=torch.float64)
    inputs = [value.clone().requires_grad_() for value in parameters]
    fast = torch.autograd.grad((weights * scene_log_prob(places, images, SceneParameters(*inputs), canvas, given)).sum(), inputs)
    with ops.use_backend("vectorised"):
        dense = scenes.log_prob(places, given, images, SceneParameters(*inputs), canvas)
    slow = torch.autograd.grad((weights * dense).sum(), inputs)
    for mine, expected in zip(fast, slow, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-9)


def test_log_ratios_of_hundreds_are_exact() -> None:
    canvas, places, _, images, parameters = make_problem(wrap=True)
    narrow = SceneParameters(*parameters[:2], torch.tensor(1e-4).double(), parameters[3], torch.tensor(2e-4).double())
    images = images.clone()
    images[:, ::2] = parameters[0][0, 0]  # some pixels fit perfectly, the others not at all
    got = scene_log_prob(places, images, narrow, canvas)
    with ops.use_backend("vectorised"):
        expected = scene_log_prob(places, images, narrow, canvas)
    assert float(expected.max() - expected.min()) > 700
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-8)


@pytest.mark.parametrize("in_depth", [True, False])
@pytest.mark.parametrize("num_objects", [1, 2, 7])
@pytest.mark.parametrize("smallest", [0.05, 1e-60])
def test_until_kernels_are_compiled_torch_gives_the_same_to_the_last_digit(
    in_depth: bool, num_objects: int, smallest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of images in a block of their own and in shared ones, and of products that underflow."""
    canvas, places, rank, images, parameters = make_problem(in_depth, num_objects, num_data=20)
    is_usual, narrow = torch.rand(parameters.masks.shape) < 0.2, torch.tensor(1e-4).double()
    parameters = parameters._replace(masks=parameters.masks.where(is_usual, smallest), background_variance=narrow)
    weights, given = torch.rand(places.shape[:2], dtype=torch.float64), rank if in_depth else None
    weights[torch.rand(weights.shape) < 0.3] = 0.0

    def every_result() -> list[Tensor]:
        return [
            scene_log_prob(places, images, parameters, canvas, given),
            scene_pixel_log_prob(places, images, parameters, canvas, given),
            *scene_statistics(places, weights, images, parameters, canvas, given),
        ]

    compiled = every_result()
    monkeypatch.setattr(public, "backend", lambda *_: scenes)
    for budget in (None, 2**12):
        with ops.memory_budget(budget):
            for one, other in zip(compiled, every_result(), strict=True):
                torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_scan_is_the_log_likelihood_ratio_of_single_objects(wrap: bool, channels: int) -> None:
    canvas = Canvas(6, 7, 3, 2, wrap)
    images, features = torch.rand(4, 42, channels), torch.rand(3, 6, channels)
    masks, background = 0.01 + 0.98 * torch.rand(3, 6), torch.rand(channels)
    spread = torch.tensor(0.05), torch.tensor(0.1)
    scene = SceneParameters(features, masks, spread[0], background, spread[1])
    got = scan_places(images, scene, canvas)
    singles = torch.full((3, canvas.num_places, 3), -1)
    for h in range(3):
        singles[h, :, h] = torch.arange(canvas.num_places)
    places = torch.cat([torch.full((1, 3), -1), singles.flatten(0, 1)]).expand(4, -1, -1)
    scores = scene_log_prob(places, images, scene, canvas)
    expected = (scores[:, 1:] - scores[:, :1]).reshape(4, 3, -1)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-3)
    energy = -normal_log_density(images.double(), background.double(), spread[1].double())
    logits = masks.double().logit() - 0.5 * channels * math.log(2 * math.pi * float(spread[0]))
    dense = scenes.scan(images, scene, canvas, energy, logits, masks >= 0)
    torch.testing.assert_close(dense.double(), expected, rtol=1e-5, atol=1e-4)


def test_representative_features_leave_entries_out() -> None:
    canvas, _, _, images, (features, masks, *rest) = make_problem(wrap=True)
    got = scan_places(images, SceneParameters(features, masks, *rest), canvas, min_mask=0.5)
    # An entry whose mask is never on has a log likelihood ratio of zero.
    kept = torch.where(masks >= 0.5, masks, 1e-12)
    torch.testing.assert_close(got, scan_places(images, SceneParameters(features, kept, *rest), canvas), rtol=1e-5, atol=2e-3)


def test_entries_are_left_out_by_their_masks_before_these_are_bounded() -> None:
    canvas, _, _, images, (features, masks, *rest) = make_problem(wrap=True)
    got = scan_places(images, SceneParameters(features, masks, *rest), canvas, min_mask=0.6, max_mask=0.5)
    kept = torch.where(masks >= 0.6, 0.5, 1e-12)
    assert bool((masks >= 0.6).any())
    torch.testing.assert_close(got, scan_places(images, SceneParameters(features, kept, *rest), canvas), rtol=1e-5, atol=2e-3)


def test_clutter_raises_what_the_bare_background_cannot_explain() -> None:
    canvas, _, _, images, parameters = make_problem(wrap=True)
    bare, cluttered = (scan_places(images, parameters, canvas, clutter=clutter) for clutter in (0.0, 0.3))
    behind = normal_log_density(images, parameters[3], parameters[4])
    features, masks, variance, background, _ = parameters
    colours = torch.cat([features.flatten(0, 1), background.unsqueeze(0)])
    energy = -torch.log(0.7 * behind.exp() + 0.3 / (colours.amax(0) - colours.amin(0)).prod())
    logits = masks.logit() - (2 * math.pi * variance).log()
    expected = scenes.scan(images, parameters, canvas, energy, logits, masks >= 0)
    torch.testing.assert_close(cluttered, expected, rtol=1e-4, atol=2e-3)
    assert not torch.allclose(bare, cluttered, atol=0.1)


@pytest.mark.parametrize("unit", [1e-3, 255.0])
def test_scans_do_not_depend_on_the_unit_of_colours(unit: float) -> None:
    canvas, _, _, images, (features, masks, variance, background, background_variance) = make_problem(wrap=True)
    scaled = SceneParameters(unit * features, masks, unit**2 * variance, unit * background, unit**2 * background_variance)
    expected = scan_places(images, SceneParameters(features, masks, variance, background, background_variance), canvas, clutter=0.3)
    torch.testing.assert_close(scan_places(unit * images, scaled, canvas, clutter=0.3), expected, rtol=1e-4, atol=2e-3)


def test_scan_beside_a_scene_is_the_gain_of_an_object_in_front_of_it() -> None:
    canvas, places, _, images, parameters = make_problem(wrap=True)
    places, rank = places[:, 4:5], torch.arange(4).expand(3, 1, 4)
    places[..., 0] = -1
    behind = scene_pixel_log_prob(places, images, parameters, canvas, rank)
    got = scan_places(images, parameters, canvas, behind=behind.squeeze(1))
    added = places.repeat(1, canvas.num_places, 1)
    added[..., 0] = torch.arange(canvas.num_places)
    gains = scene_log_prob(added, images, parameters, canvas, rank.expand_as(added)) - behind.sum(-1)
    torch.testing.assert_close(got[:, 0].double(), gains, rtol=1e-5, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [True, False])
def test_scan_of_a_few_places_is_part_of_the_whole(wrap: bool) -> None:
    canvas, _, _, images, parameters = make_problem(wrap=wrap)
    options = {"clutter": 0.2, "min_mask": 0.3}
    whole = scan_places(images, parameters, canvas, **options)
    objects = torch.stack([torch.randperm(whole.shape[1])[:2] for _ in images])
    places = torch.randint(canvas.num_places, (*objects.shape, 5))
    expected = whole.gather(1, objects.unsqueeze(-1).expand(-1, -1, whole.shape[2])).gather(2, places)
    got = scan_at(images, parameters, canvas, objects, places, **options)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"places": torch.zeros(3, 12, 2, dtype=torch.int64)}, "places must be integers"),
        ({"places": torch.full((3, 12, 4), 20)}, "places must lie in -1 .. 19"),
        ({"images": torch.zeros(3, 19, 2)}, "images must have shape"),
        ({"rank": torch.zeros(3, 12, 3, dtype=torch.int64)}, "rank must have the shape"),
    ],
)
def test_misshapen_input_is_refused(change: dict[str, Tensor], message: str) -> None:
    canvas, places, rank, images, parameters = make_problem(wrap=True)
    given = {"places": places, "images": images, "rank": rank} | change
    with pytest.raises(ValueError, match=message):
        scene_log_prob(given["places"], given["images"], parameters, canvas, given["rank"])


def test_templates_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fit on a canvas of 4 x 5"):
        Canvas(4, 5, 5, 5)
