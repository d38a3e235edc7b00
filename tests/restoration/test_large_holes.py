"""Large holes: edges that lead into them go on."""

from __future__ import annotations

import pytest
import torch

from pyro_truncated.restoration import inpaint
from pyro_truncated.restoration.large_holes import anisotropic_membrane, biharmonic, fill_large_holes


def stripes(height: int = 40, width: int = 48) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(height).double(), torch.arange(width).double(), indexing="ij")
    return 100 + 30 * (0.3 * rows - 0.2 * columns).sin()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def with_strip(image: torch.Tensor, side: int = 12) -> torch.Tensor:
    holed = image.clone()
    holed[:, -side:] = torch.nan
    return holed


def with_holes(image: torch.Tensor) -> torch.Tensor:
    holed = image.clone()
    holed[2:6, 3:8] = torch.nan
    holed[7:, 8:] = torch.nan
    return holed


def error(found: torch.Tensor, image: torch.Tensor, holed: torch.Tensor) -> float:
    return float((found - image)[holed.isnan()].square().mean().sqrt())


def corner_gradients(image: torch.Tensor) -> torch.Tensor:
    """Gradients at the four corners of squares of two by two pixels, ``(4, height - 1, width - 1, 2)``."""
    down, across = image.diff(dim=0), image.diff(dim=1)
    return torch.stack([torch.stack([one, other], -1) for one in (down[:, :-1], down[:, 1:]) for other in (across[:-1], across[1:])])


def test_membranes_have_the_least_energy():
    holed = with_holes(stripes(9, 10) + noise(9, 10))
    gradients = corner_gradients(holed).mean(0)
    is_seen = ~gradients.isnan().any(-1)
    places = torch.cartesian_prod(torch.arange(8), torch.arange(9)).double()
    weights = (1 + torch.cdist(places, places[is_seen.flatten()]).square() / 16) ** -2
    tensors = torch.einsum("qp,pi,pj->qij", weights, gradients[is_seen], gradients[is_seen])
    tensors = tensors + 0.01 * torch.einsum("qii->q", tensors)[:, None, None] * torch.eye(2, dtype=torch.float64)
    inverses = tensors.inverse()
    matrices = (inverses @ inverses * tensors.det()[:, None, None]).reshape(8, 9, 2, 2)
    found = anisotropic_membrane(holed).requires_grad_()
    directed = corner_gradients(found)
    (gradient,) = torch.autograd.grad(torch.einsum("chwi,hwij,chwj->", directed, matrices, directed), found)
    torch.testing.assert_close(gradient[holed.isnan()], torch.zeros(24, dtype=torch.float64), rtol=0, atol=1e-8)
    assert torch.equal(found[~holed.isnan()], holed[~holed.isnan()])


def test_membranes_turn_with_the_image():
    image = stripes() + 5 * noise(40, 48)
    found = anisotropic_membrane(with_strip(image))
    torch.testing.assert_close(anisotropic_membrane(with_strip(image).flip(0)), found.flip(0))
    torch.testing.assert_close(anisotropic_membrane(with_strip(image).flip(1)), found.flip(1))
    torch.testing.assert_close(anisotropic_membrane(with_strip(image).mT), found.mT)
    torch.testing.assert_close(anisotropic_membrane(50 - 3 * with_strip(image)), 50 - 3 * found)


def test_channels_share_their_edges():
    image = with_strip(stripes() + 5 * noise(40, 48))
    found = anisotropic_membrane(torch.stack([image, 50 - 3 * image], -1))
    expected = anisotropic_membrane(image)
    torch.testing.assert_close(found, torch.stack([expected, 50 - 3 * expected], -1))


def test_membranes_stay_within_what_is_seen():
    holed = with_strip(10 * noise(40, 48))
    found, seen = anisotropic_membrane(holed), holed[~holed.isnan()]
    assert bool(((found >= seen.min()) & (found <= seen.max())).all())


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_constant_images_stay_constant(value):
    image = torch.full((40, 48), value)
    torch.testing.assert_close(anisotropic_membrane(with_strip(image)), image)


def test_edges_go_on():
    image = stripes() + noise(40, 48)
    holed = with_strip(image)
    others = by_second_differences(holed), holed[~holed.isnan()].mean().expand_as(image)
    assert error(anisotropic_membrane(holed), image, holed) < 0.6 * min(error(other, image, holed) for other in others)


def plane(height: int = 40, width: int = 48) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return (20 + 2.0 * rows - 1.5 * columns).double()


def test_biharmonic_surfaces_have_the_least_squared_laplacian():
    image = plane(9, 10)
    holed = with_holes(image)
    found = biharmonic(holed).requires_grad_()
    # Neumann's Laplacian: minus the gradient of half the squared differences.
    energy = sum(found.diff(1, dim).square().sum() for dim in (0, 1)) / 2
    (laplacian,) = torch.autograd.grad(energy, found, create_graph=True)
    (gradient,) = torch.autograd.grad(laplacian.square().sum(), found)
    torch.testing.assert_close(gradient[holed.isnan()], torch.zeros(24, dtype=torch.float64), rtol=0, atol=1e-9)


def test_biharmonic_surfaces_stay_within_what_is_seen():
    holed = with_strip(plane())
    found, seen = biharmonic(holed), holed[~holed.isnan()]
    assert bool(((found >= seen.min()) & (found <= seen.max())).all())


@pytest.mark.parametrize(("height", "width"), [(40, 48), (48, 40), (60, 60)])
def test_holes_are_moved_to_several_places_where_the_image_is_seen(height, width):
    image, hidden = plane(height, width), []
    holed = with_strip(image, 8)

    def restore(other: torch.Tensor) -> torch.Tensor:
        hidden.append(other.isnan() & ~holed.isnan())
        return torch.where(other.isnan(), 0.0, other)

    fill_large_holes(holed, holed.nan_to_num(0.0), restore)
    (moved,) = hidden
    assert bool(moved[:, :8].all())
    assert bool(moved[:8, : min(height, width) - 8].all())
    assert float(moved.double().sum()) <= 0.4 * height * (width - 8)


@pytest.mark.parametrize("channels", [None, 2])
def test_what_fills_seen_pixels_badly_does_not_fill_holes(channels):
    rows = plane()[:, :1].expand(40, 48)
    image = rows if channels is None else torch.stack([rows, 50 - 3 * rows], -1)
    holed = with_strip(image)

    def bad(other: torch.Tensor) -> torch.Tensor:
        return torch.where(other.isnan(), 500.0, other)

    found = fill_large_holes(holed, bad(holed), bad)
    # Pixels beside what is seen stay as they were.
    assert error(found[:, -5:], image[:, -5:], holed[:, -5:]) < 0.05 * error(bad(holed), image, holed)
    assert torch.equal(found[:, :-11], bad(holed)[:, :-11])


def test_what_fills_seen_pixels_well_fills_holes():
    generator = torch.Generator().manual_seed(0)
    image = plane() + 30 * torch.randn(40, 48, generator=generator, dtype=torch.float64)

    def good(other: torch.Tensor) -> torch.Tensor:
        return torch.where(other.isnan(), image + 0.1, other)

    holed = with_strip(image)
    assert error(fill_large_holes(holed, good(holed), good), image, holed) < 3.0


def test_small_holes_are_filled_once():
    image = stripes()
    image[10:22, 10:22] = torch.nan
    image[torch.rand(40, 48, generator=torch.Generator().manual_seed(0)) < 0.8] = torch.nan
    image[::3] = 100.0
    estimate = torch.zeros_like(image)
    assert fill_large_holes(image, estimate, lambda other: pytest.fail("restored again")) is estimate


def test_beside_large_holes_nothing_changes():
    holed = with_strip(stripes())
    holed[10:13, 10:13] = torch.nan
    estimate = stripes() + noise(40, 48)
    found = fill_large_holes(holed, estimate, lambda other: other.nan_to_num(0.0))
    # A disc of radius 7 fits into the strip, but neither into the small hole nor beside what is seen.
    assert torch.equal(found[:, :-11], estimate[:, :-11])
    assert bool((found[:, -11:] != estimate[:, -11:]).all())


def by_second_differences(holed: torch.Tensor) -> torch.Tensor:
    """Fills in what makes the sum of squared second differences least, by least squares."""
    number, unknown = holed.numel(), holed.isnan().flatten()
    units = torch.eye(number, dtype=torch.float64).reshape(number, *holed.shape)
    curvature = torch.zeros(number, *holed.shape, dtype=torch.float64)
    curvature[:, 1:-1] += units.diff(2, 1)
    curvature[:, :, 1:-1] += units.diff(2, 2)
    operator, found = curvature.flatten(1).mT, holed.double().flatten().clone()
    right = -(operator[:, ~unknown] @ found[~unknown])
    found[unknown] = torch.linalg.lstsq(operator[:, unknown], right).solution
    return found.reshape(holed.shape)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_strip_at_the_border_is_filled_better_than_by_simple_means(seed):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(40), torch.arange(48), indexing="ij")
    image = 100 + 40 * (rows / 9).sin() * (columns / 7).cos() + 5 * torch.randn(40, 48, generator=generator)
    holed = with_strip(image)
    found = inpaint(holed, side=5, rounds=3, generator=generator, progress=False).image
    others = by_second_differences(holed), anisotropic_membrane(holed), holed[~holed.isnan()].mean().expand_as(image)
    assert error(found, image, holed) < min(error(other, image, holed) for other in others)


def share(holed: torch.Tensor) -> torch.Tensor:
    """How far the average counts, by distances to all that is seen and to the centres of discs of radius 7."""
    places = torch.cartesian_prod(*(torch.arange(size) for size in holed.shape)).double()
    is_hole = holed.isnan().flatten()
    depth = torch.cdist(places, places[~is_hole]).amin(1)
    from_centres = torch.cdist(places, places[depth >= 7]).amin(1)
    return ((depth / 4).clamp(max=1) * (from_centres < 6)).reshape(holed.shape)


def test_weights_are_inverse_to_squares_of_mean_squared_errors_on_moved_holes():
    image, hidden = 30 * noise(60, 60), []
    holed = with_strip(image)

    def restore(other: torch.Tensor) -> torch.Tensor:
        hidden.append(other)
        return torch.where(other.isnan(), image + 20.0, other)

    def candidates(other: torch.Tensor) -> torch.Tensor:
        restored = restore(other)
        return torch.stack([restored, anisotropic_membrane(torch.where(share(other) > 0, torch.nan, restored)), biharmonic(other)])

    found = fill_large_holes(holed, restore(holed), restore)
    squares = (candidates(hidden[1]) - image).square() * share(hidden[1])
    # The strip is moved to the opposite border, and is turned to the upper one.
    errors = torch.stack([squares[:, :, :12].sum((1, 2)), squares[:, :12, 12:48].sum((1, 2))])
    weights = (-2 * errors.log().mean(0)).softmax(0)
    expected = torch.lerp(restore(holed), torch.tensordot(weights, candidates(holed), 1), share(holed))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
