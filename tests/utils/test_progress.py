"""Progress bars."""

from __future__ import annotations

import contextlib

import pytest

from pyro_truncated.utils.console import progress_bar


def test_a_bar_ends_full_where_less_was_needed_and_short_where_an_error_ended_it(capsys):
    for error, shown in ((None, "2/2"), (ValueError, "2/10")):
        with pytest.raises(error) if error else contextlib.nullcontext(), progress_bar(True, total=10) as bar:
            bar.update(2)
            if error:
                raise error
        assert shown in capsys.readouterr().err
