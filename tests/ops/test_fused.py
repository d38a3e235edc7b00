"""Triton's kernels give what plain torch gives: on a GPU where there is one, else by Triton's interpreter (``pip install triton``)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pyro_truncated import StateSpace, ops
from pyro_truncated.ops.streams import Stream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

# The interpreter's NumPy warns of the logarithm of zero.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")

# Spaces that end inside a word, fill it to the sign bit, and need several words.
LATENTS = [3, 64, 130]


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    with ops.use_backend("fused"):
        yield


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(DEVICE)


def states(num_data: int, number: int, num_latents: int, share: float | None = None) -> Tensor:
    share = 6 / (6 + num_latents) if share is None else share
    words: Tensor = StateSpace([2] * num_latents).pack((torch.rand(num_data, number, num_latents) < share).long())
    return words.to(DEVICE)


def both(function, *arguments, **options):
    """Results of the fused kernels and of plain torch."""
    with ops.use_backend("vectorised"):
        plain = function(*arguments, **options)
    return function(*arguments, **options), plain


def assert_close(fused: Tensor, plain: Tensor) -> None:
    assert fused.dtype == plain.dtype
    torch.testing.assert_close(fused, plain, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("num_latents", LATENTS)
def test_pair_energy(num_latents: int, is_shared: bool) -> None:
    words = states(3, 6, num_latents)
    words = words[:1].expand(3, -1, -1) if is_shared else words
    assert_close(*both(ops.pair_energy, words, draw(3, num_latents), draw(num_latents, num_latents)))
    assert_close(*both(ops.pair_energy, words, draw(3, num_latents), draw(3, num_latents, num_latents)))
    assert_close(*both(ops.linear_energy, words, draw(3, num_latents)))


@pytest.mark.parametrize("num_latents", [*LATENTS, 300])
def test_flip_energy(num_latents: int) -> None:
    words = states(4, 1, num_latents).squeeze(1)
    assert_close(*both(ops.flip_energy, words, draw(4, num_latents), draw(num_latents, num_latents)))


@pytest.mark.parametrize("num_latents", LATENTS)
def test_noisy_or_with_missing_entries_and_impossible_states(num_latents: int) -> None:
    words, y = states(3, 5, num_latents), (torch.rand(3, 9) < 0.4).double()
    y[0, 4] = math.nan
    weight = torch.rand(9, num_latents, dtype=torch.float64) ** 8
    # The first latent is certain to switch the first pixel on; the second pixel has no causes, and no leak.
    weight[0, 0], weight[1], y[1, 1] = 1.0, 0.0, 1.0
    leak = torch.linspace(0.0, 0.3, 9, dtype=torch.float64)
    leak[1] = 0.0
    # Parameters may be columns of a matrix.
    columns = (tensor.unsqueeze(-1).expand(*tensor.shape, 2).contiguous()[..., 0] for tensor in (y, (-weight).log1p(), (-leak).log1p()))
    arguments = (tensor.to(DEVICE) for tensor in columns)
    fused, plain = both(ops.noisy_or_log_prob, words, *arguments, draw(1, num_latents).expand(3, -1))
    assert bool((fused[1] == -math.inf).all())
    assert_close(fused, plain)


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 40.0, 800.0])
def test_noisy_or_is_accurate_at_both_ends(scale: float) -> None:
    # One cause and one pixel that is on: the log probability is log(1 - exp(-scale)).
    words, y = states(1, 1, 1, share=1.0), torch.ones(1, 1, dtype=torch.float64, device=DEVICE)
    log_complement = torch.tensor([[-scale]], dtype=torch.float64, device=DEVICE)
    found = ops.noisy_or_log_prob(words, y, log_complement, torch.zeros(1, dtype=torch.float64, device=DEVICE))
    exact = math.log(-math.expm1(-scale)) if scale < 1 else math.log1p(-math.exp(-scale))
    assert float(found) == pytest.approx(exact, rel=1e-14, abs=1e-300)


@pytest.mark.parametrize("num_latents", LATENTS)
def test_the_best_distinct_states(num_latents: int) -> None:
    words, few = states(4, 9, num_latents), states(4, 3, num_latents)
    words = torch.cat([words, words[:, :4]], 1)
    fused, plain = both(ops.find_duplicates, words)
    assert torch.equal(fused, plain)
    with ops.use_backend("vectorised"):
        first = ops.select_top(words, draw(4, 13), few, draw(4, 3), 3)[0]
    # Rounded, so that some are equal; some are impossible.
    scores, others = draw(4, 3).round(), draw(4, 13).round()
    scores[0, 1], others[:, 2] = -math.inf, -math.inf
    for found, expected in zip(*both(ops.select_top, first, scores, words, others, 3), strict=True):
        assert torch.equal(found, expected)
    # What is no number is found in the end, so until then nothing may be written beside its place.
    others[1, :2] = math.nan
    for found, expected in zip(*both(ops.select_top, first, scores, words, others, 3), strict=True):
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("num_latents", LATENTS)
def test_draws(num_latents: int) -> None:
    fields = StateSpace([2] * num_latents).fields
    on = torch.rand(3, num_latents, dtype=torch.float64, device=DEVICE)
    rows = torch.tensor([0, 7, 2**40], device=DEVICE)

    def draws(*, ahead: bool) -> Tensor:
        generator = Stream(3)
        if ahead:
            ops.draw_ahead([0, 3], rows=rows, generator=generator)
        found: Tensor = ops.draw_values(torch.stack([1 - on, on], -1), 5, fields, rows=rows, generator=generator)
        return found

    for ahead in (False, True):
        fused, plain = both(draws, ahead=ahead)
        assert torch.equal(fused, plain)


@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize(("num_latents", "share"), [(3, 0.5), (64, 0.1), (64, 0.3), (130, 0.05), (130, 0.9)])
def test_slabs(num_latents: int, share: float, is_missing: bool) -> None:
    words, y = states(2, 4, num_latents, share), draw(2, 6)
    if is_missing:
        y[0, :3] = math.nan
    weight, precision = draw(6, num_latents), draw(6).exp()
    mean, deviation = draw(num_latents), draw(num_latents).abs()
    assert_close(*both(ops.slab_log_prob, words, y, weight, precision, mean, deviation))


@pytest.mark.parametrize("per_datum", [False, True])
@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize(("num_latents", "share"), [(3, 0.5), (64, 0.1), (130, 0.05), (130, 0.9)])
def test_slab_moments(num_latents: int, share: float, is_missing: bool, per_datum: bool) -> None:
    words, y = states(2, 4, num_latents, share), draw(2, 6)
    if is_missing:
        y[0, :3] = math.nan
    weights = torch.rand(2, 4, dtype=torch.float64).to(DEVICE)
    arguments = draw(6, num_latents), draw(6).exp(), draw(num_latents), draw(num_latents).abs()
    for fused, plain in zip(*both(ops.slab_moments, words, weights, y, *arguments, per_datum=per_datum), strict=True):
        assert_close(fused, plain)
