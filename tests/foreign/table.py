"""Writes RESULTS.md: what came of every foreign model. ``python -m tests.foreign.table`` (some minutes)."""

from __future__ import annotations

import logging
import re
import warnings
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
  `AutoLowRankMultivariateNormal` (losses against brute force for the same draws), `median`, copies. Said there: what the library refuses
  with a reason, and what Pyro cannot do with this model whatever the guide is.

"""
_COLUMNS = "| model | after | states | loss | gradient | marginals | habits |\n| --- | --- | --- | --- | --- | --- | --- |\n"


def row(name: str) -> tuple[str, bool]:
    """The line of a model, and whether all is well with it."""
    source = (MODELS[name].__doc__ or "").partition("\n")[0].replace("|", "/")
    if name in OPEN:
        return f"| `{name}` | {source} | | | | | **open**: {OPEN[name]} |", False
    try:
        with as_a_new_user(name) as case:
            if case.refused is not None:
                return f"| `{name}` | {source} | | | | | refused: {_refusal(case)} |", True
            errors = compare(case)
    except Exception as error:
        return f"| `{name}` | {source} | | | | | **fails**: {_short(error)} |", False
    numbers = (f"{value:.0e}" if value else "0" for value in (max(errors.loss, errors.stock_loss), errors.gradient, errors.marginals))
    remarks = [remark for habit in HABITS if (remark := _remark(name, habit))]
    fine = errors.worst < 1e-8 and not any("**" in remark for remark in remarks)
    return f"| `{name}` | {source} | {errors.states} | {' | '.join(numbers)} | {'; '.join(remarks) or 'all'} |", fine


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


def main() -> None:
    """Runs everything and writes the table."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    rows = []
    for name in MODELS:
        rows.append(row(name))
        print(rows[-1][0], flush=True)
    fine = sum(well for _, well in rows)
    refused = sum("| refused: " in line for line, _ in rows)
    summary = f"{len(rows)} models: {fine - refused} exact, {refused} refused by name, {len(rows) - fine} open.\n\n"
    PATH.write_text(_HEAD + summary + _COLUMNS + "\n".join(line for line, _ in rows) + "\n")


if __name__ == "__main__":
    main()
