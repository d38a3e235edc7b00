"""Large holes: what is filled in is checked where the image is seen."""

from __future__ import annotations

import pytest
import torch
from scipy.ndimage import distance_transform_edt

from pyro_truncated.restoration import inpaint
from pyro_truncated.restoration.patch_size_stacking import biharmonic, fill_large_holes, membrane


def plane(height: int = 40, width: int = 48) -> torch.Tensor:
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return (20 + 2.0 * rows - 1.5 * columns).double()


def with_strip(image: torch.Tensor, side: int = 12) -> torch.Tensor:
    holed = image.clone()
    holed[:, -side:] = torch.nan
    return holed


def error(found: torch.Tensor, image: torch.Tensor, holed: torch.Tensor) -> float:
    return float((found - image)[holed.isnan()].square().mean().sqrt())


def test_membranes_have_the_least_squared_differences():
    image = plane(9, 10) + torch.randn(9, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    holed = with_holes(image)
    found = membrane(holed).requires_grad_()
    (gradient,) = torch.autograd.grad(sum(found.diff(1, dim).square().sum() for dim in (0, 1)), found)
    torch.testing.assert_close(gradient[holed.isnan()], torch.zeros(24, dtype=torch.float64), rtol=0, atol=1e-9)


def with_holes(image: torch.Tensor) -> torch.Tensor:
    holed = image.clone()
    holed[2:6, 3:8] = torch.nan
    holed[7:, 8:] = torch.nan
    return holed


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
    # Pixels near to what is seen stay as they were.
    assert error(found[:, -5:], image[:, -5:], holed[:, -5:]) < 0.05 * error(bad(holed), image, holed)
    assert torch.equal(found[:, :-9], bad(holed)[:, :-9])


def test_what_fills_seen_pixels_well_fills_holes():
    generator = torch.Generator().manual_seed(0)
    image = plane() + 30 * torch.randn(40, 48, generator=generator, dtype=torch.float64)

    def good(other: torch.Tensor) -> torch.Tensor:
        return torch.where(other.isnan(), image + 0.1, other)

    holed = with_strip(image)
    assert error(fill_large_holes(holed, good(holed), good), image, holed) < 3.0


def test_small_holes_are_filled_once():
    image = plane()
    image[10:16, 10:16] = torch.nan
    restored = torch.zeros_like(image)
    assert fill_large_holes(image, restored, lambda other: pytest.fail("restored again")) is restored


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
    others = by_second_differences(holed), membrane(holed), holed[~holed.isnan()].mean().expand_as(image)
    assert error(found, image, holed) < min(error(other, image, holed) for other in others)


def test_weights_are_inverse_to_mean_squared_errors_on_moved_holes():
    generator = torch.Generator().manual_seed(0)
    image = 30 * torch.randn(60, 60, generator=generator, dtype=torch.float64)
    holed, hidden = with_strip(image), []

    def restore(other: torch.Tensor) -> torch.Tensor:
        hidden.append(other)
        return torch.where(other.isnan(), image + 20.0, other)

    found = fill_large_holes(holed, restore(holed), restore)
    depth = torch.from_numpy(distance_transform_edt(hidden[1].isnan().numpy()))
    candidates = torch.stack([restore(hidden[1]), membrane(hidden[1]), biharmonic(hidden[1])])
    squares = (candidates - image).square() * ((depth - 3) / 4).clamp(0, 1)
    # The strip is moved to the opposite border, and is turned to the upper one.
    errors = torch.stack([squares[:, :, :12].sum((1, 2)), squares[:, :12, 12:48].sum((1, 2))])
    inverse = errors.log().mean(0).neg().exp()
    surfaces = inverse[1] * membrane(holed) + inverse[2] * biharmonic(holed)
    expected = (inverse[0] * (image + 20.0) + surfaces) / inverse.sum()
    torch.testing.assert_close(found[:, -5:], expected[:, -5:], rtol=1e-9, atol=1e-9)
