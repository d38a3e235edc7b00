"""Plots draw what they are given; the report holds what it is given."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from pyro_truncated.diagnostics.pages import tensor_plots as plots
from pyro_truncated.diagnostics.pages.summary_text import Section, write_page


@pytest.fixture
def ax():
    return Figure().subplots()


def shown(ax) -> np.ndarray:
    return np.ma.filled(ax.images[0].get_array().astype(float), np.nan)


def test_mosaic_puts_images_row_by_row():
    images = torch.arange(3.0).reshape(3, 1, 1).expand(3, 2, 3)
    sheet = plots.mosaic(images, columns=2)
    nan = np.nan
    expected = [
        [0, 0, 0, nan, 1, 1, 1],
        [0, 0, 0, nan, 1, 1, 1],
        [nan] * 7,
        [2, 2, 2, nan, nan, nan, nan],
        [2, 2, 2, nan, nan, nan, nan],
    ]
    np.testing.assert_array_equal(sheet, expected)
    assert plots.mosaic(torch.zeros(9, 4, 4)).shape == (14, 14)


@pytest.mark.parametrize("shape", [(4, 4), (0, 2, 2)])
def test_mosaic_refuses_what_is_not_images(shape):
    with pytest.raises(ValueError, match="must have shape"):
        plots.mosaic(torch.zeros(shape))


@pytest.mark.parametrize("unit", [1.0, 1e-30])
def test_dictionary_scales_each_field_and_keeps_zero_grey(ax, unit):
    weight = unit * torch.tensor([[1.0, -10.0, 0.0], [0.5, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    assert plots.plot_dictionary(weight, ax, columns=3) is ax
    picture = shown(ax)
    np.testing.assert_allclose(picture[:2, :2], [[1, 0.5], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(picture[:2, 3:5], [[-1, 0], [0.5, 0]], rtol=1e-6)
    np.testing.assert_allclose(picture[:2, 6:8], 0)
    assert ax.images[0].get_clim() == (-1, 1)


def test_dictionary_of_oblong_fields(ax):
    plots.plot_dictionary(torch.ones(6, 2), ax, shape=(2, 3), columns=2)
    assert shown(ax).shape == (2, 7)
    with pytest.raises(ValueError, match="6 pixels do not make images of shape"):
        plots.plot_dictionary(torch.ones(6, 2), ax)


def test_free_energy_shows_every_iteration(ax):
    values = [-100.0, -10.0, -9.0, -8.5, -8.4]
    plots.plot_free_energy(values, ax)
    x, drawn = ax.lines[0].get_data()
    np.testing.assert_array_equal(x, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(drawn, values)
    assert ax.get_ylim()[0] > -100
    plots.plot_free_energy([-1.0], ax)


def test_activations_counts_every_data_point(ax):
    marginals = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.5, 0.0], [1.0, 1.0, 1.0], [0.2, 0.1, 0.0]])
    plots.plot_activations(marginals, ax)
    assert [patch.get_height() for patch in ax.patches] == [2, 0, 1, 1]
    assert ax.lines[0].get_xdata()[0] == pytest.approx(1.2)


def test_activations_where_nothing_is_active(ax):
    plots.plot_activations(torch.zeros(5, 3), ax)
    assert sum(patch.get_height() for patch in ax.patches) == 5


def test_usage_is_sorted(ax):
    plots.plot_usage(torch.tensor([[0.0, 1.0, 0.5], [0.0, 1.0, 0.0]]), ax)
    assert [patch.get_height() for patch in ax.patches] == [1.0, 0.25, 0.0]


@pytest.mark.parametrize("unit", [1.0, 1e-30])
def test_decompositions_show_patch_sum_and_the_strongest_parts(ax, unit):
    original = unit * torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    parts = unit * torch.tensor([[0.5, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.25]])
    plots.plot_decompositions(original, [parts], ax, most=2)
    picture = shown(ax)
    corners = [picture[0, column] for column in (0, 4, 8, 12)]
    np.testing.assert_allclose(corners, [1.0, 0.75, 0.5, 0.25], rtol=1e-6)
    assert picture[1, 5] == pytest.approx(0.125)


def test_decompositions_of_nothing(ax):
    plots.plot_decompositions(torch.ones(1, 4), [torch.zeros(0, 4)], ax, most=2)
    assert np.isnan(shown(ax)[:, 8:]).all()


def test_page_holds_its_pictures(tmp_path):
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([1, 2])
    sections = [Section("A <picture>", "Seen & said.", figure), Section("A table", "", table=[["name", "value"], ["x", 3]])]
    page = write_page(tmp_path / "new" / "page.html", "Title", "Lead.", {"nats": "-1.5"}, sections)
    text = page.read_text()
    assert sorted(path.name for path in page.parent.iterdir()) == ["page.html"]
    assert re.search(r'<img src="data:image/png;base64,[\w+/=]+" alt="A &lt;picture&gt;">', text)
    assert "Seen &amp; said." in text
    assert "<th>name</th>" in text
    assert "<td>3</td>" in text
    assert "<b>-1.5</b><span>nats</span>" in text
    assert "http" not in text


def test_activations_of_nearly_whole_numbers_share_a_bin(ax):
    plots.plot_activations(torch.tensor([[0.999, 0.0], [1.0, 0.001], [1.0, 0.0]]), ax)
    assert [patch.get_height() for patch in ax.patches] == [0, 3]
