"""Writes RESULTS.md: what came of every foreign model, or of those that are named: ``python -m tests.foreign.table [name ...]``."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from tests.foreign import Foreign
from tests.foreign.catalogue import MODELS, OPEN
from tests.foreign.habits import HABITS, PyroLimitError
from tests.foreign.harness import as_a_new_user, compare

PATH = Path(__file__).parent / "RESULTS.md"
_HEAD = """\
# Foreign models

Written by `python -m tests.foreign.table`. Each model was written after a public description and meets the library as it is.

- *States*: joint states of one data point (of all data where they form one state).
- *Loss*, *gradient*, *marginals*: largest difference from brute force, one plain run of the model per state: of the loss by
  `Truncated_ELBO` and by Pyro's `TraceEnum_ELBO`, of the gradient in any parameter, of the posterior marginals; with all states kept, in
  float64, continuous latents under `AutoDelta`. Every bound of half of the states lay below the evidence.
- *Habits*: `fit`, `Predictive`, `Predictive(parallel=True)`, `to_arviz` with `az.summary`, `az.loo` and `az.plot_ppc`, `check_truncation`,
  `infer`, `state_dict`, an `AutoGuideList` with each of `AutoDelta`, `AutoNormal`, `AutoDiagonalNormal`, `AutoMultivariateNormal` and
  `AutoLowRankMultivariateNormal` (losses against brute force for the same draws), `median`, copies. Said there: what is refused
  with a reason, and what Pyro cannot do with this model whatever the guide is.

"""
_COLUMNS = "| model | after | states | loss | gradient | marginals | habits |\n| --- | --- | --- | --- | --- | --- | --- |\n"


def row(name: str) -> str:
    """The line of a model; what is not well stands in bold letters."""
    source = (MODELS[name].__doc__ or "").partition("\n")[0].replace("|", "/")
    if name in OPEN:
        return f"| `{name}` | {source} | | | | | **open**: {OPEN[name]} |"
    try:
        with as_a_new_user(name) as case:
            if case.refused is not None:
                return f"| `{name}` | {source} | | | | | refused: {_refusal(case)} |"
            errors = compare(case)
    except Exception as error:
        return f"| `{name}` | {source} | | | | | **fails**: {_short(error)} |"
    numbers = (f"{value:.0e}" if value else "0" for value in (max(errors.loss, errors.stock_loss), errors.gradient, errors.marginals))
    remarks = [remark for habit in HABITS if (remark := _remark(name, habit))]
    wrong = "" if errors.worst < 1e-8 else "**wrong**; "
    return f"| `{name}` | {source} | {errors.states} | {' | '.join(numbers)} | {wrong}{'; '.join(remarks) or 'all'} |"


def _refusal(case: Foreign) -> str:
    try:
        compare(case)
    except (ValueError, NotImplementedError) as error:
        return _short(error)
    return "**no longer**"


def _remark(name: str, habit: str) -> str:
    """Nothing for a habit that works, else why it does not."""
    try:
        with as_a_new_user(name) as case:
            HABITS[habit](case)
    except PyroLimitError:
        return f"{habit}: Pyro cannot"
    except Exception as error:
        expected = habit in case.limits and re.search(case.limits[habit], str(error))
        return f"{habit}: refused, {case.limits[habit]}" if expected else f"**{habit}**: {_short(error)}"
    return f"**{habit}**: no longer refused" if habit in case.limits else ""


def _short(error: BaseException) -> str:
    """The first line of a message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}".replace("|", "/")


def listed() -> dict[str, str]:
    """The lines of the table as it is, by model."""
    lines = PATH.read_text().splitlines() if PATH.exists() else []
    found = ((re.match(r"\| `(\w+)` \|", line), line) for line in lines)
    return {match.group(1): line for match, line in found if match}


def main(names: Sequence[str]) -> None:
    """Runs the named models, or all, and writes the table."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    new = {}
    for name in names or MODELS:
        new[name] = row(name)
        print(new[name], flush=True)
    rows = listed() | new
    lines = [rows[name] for name in MODELS if name in rows]
    refused = sum("| refused: " in line for line in lines)
    numbers = sum("**wrong**" not in line and "**open**" not in line and "**fails**" not in line for line in lines) - refused
    flawless = sum("**" not in line for line in lines) - refused
    summary = f"{len(lines)} models: {numbers} exact, {flawless} of them with every habit in order, {refused} refused by name.\n\n"
    PATH.write_text(_HEAD + summary + _COLUMNS + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
