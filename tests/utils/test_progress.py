"""Progress bars."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
import torch

from pyro_truncated.gp import CoregionalizedGPRegression, SubsetGPRegression
from pyro_truncated.gplvm import SASDecoder
from pyro_truncated.utils.console import progress_bar


def test_a_bar_ends_full_where_less_was_needed_and_short_where_an_error_ended_it(capsys):
    for error, shown in ((None, "2/2"), (ValueError, "2/10")):
        with pytest.raises(error) if error else contextlib.nullcontext(), progress_bar(True, total=10) as bar:
            bar.update(2)
            if error:
                raise error
        assert shown in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("kind", ["subset", "coregionalized", "decoder"])
def test_long_fits_show_a_bar_in_a_terminal_only(kind, is_terminal, monkeypatch):
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    fits = {
        "subset": lambda: SubsetGPRegression(x, x[:, 0], num_inducing=3).fit(max_epochs=1),
        "coregionalized": lambda: CoregionalizedGPRegression(x, x).fit(max_iterations=2),
        "decoder": lambda: SASDecoder(12, 2).fit(x, epochs=1),
    }
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    fits[kind]()
    assert ("epoch" in screen.getvalue() or "phase" in screen.getvalue()) == is_terminal


@pytest.mark.parametrize("progress", [None, True])
def test_programs_without_standard_error_have_no_bar(progress, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar(progress, total=2) as bar:
        bar.update(2)
    assert bar.disable
