"""
Is my posterior any good?
=========================

A population of states may be too small, or the search may not have found the best ones. What tells, and what does not.
"""

# %%
# Faint bars in so much noise that many states are plausible: the hard case for a small population. The model is the one that made the
# data, so that only the truncation can be wrong.

import matplotlib.pyplot as plt
import pyro
import torch

from pyro_truncated import (
    AutoTruncated,
    EvolutionarySearch,
    check_truncation,
    diagnose,
    to_arviz,
)
from pyro_truncated.datasets import linear_bars
from pyro_truncated.models import BinarySparseCoding

pyro.set_rng_seed(0)
bars = linear_bars(
    40, 5, mean_active=2.5, noise=14.0, generator=torch.Generator().manual_seed(0)
)
model = BinarySparseCoding(25, 10, offset=False)
model.weight, model.scale, model.prior = (
    bars.components,
    torch.tensor(14.0),
    torch.tensor(0.25),
)

# %%
# One page of answers
# -------------------
# With eight states per image:

search = EvolutionarySearch(parents=8, children=4, crossover=True)
small = AutoTruncated(model, num_states=8).infer(bars.data, search, steps=30)
report = check_truncation(small, bars.data, search=search, warn=False)
print(report)

# %%
# *covered mass, at most* is a proven upper bound on the posterior mass of the population. It comes from all states one change away
# (Hamming neighbours). The search goes on for *nats gained by more search*, and with twice the states for the next line. All three say
# that much is missing. The exact lines are there because this space has only 1024 states.
#
# ===============================  =========================  =============================
# line                             good                       else
# ===============================  =========================  =============================
# covered mass, at most            near 1, but no proof       small: enlarge ``num_states``
# nats gained by more search       near zero                  search longer, then enlarge
# nats gained by twice the states  below what you can accept  enlarge ``num_states``
# ===============================  =========================  =============================
#
# With 256 states:

large = AutoTruncated(model, num_states=256).infer(bars.data, search, steps=30)
print(check_truncation(large, bars.data, search=search, warn=False))

# %%
# As the population grows
# -----------------------

sizes = (4, 8, 16, 32, 64, 128, 256)
reports = []
for size in sizes:
    search = EvolutionarySearch(parents=min(8, size), children=4, crossover=True)
    guide = AutoTruncated(model, num_states=size).infer(bars.data, search, steps=30)
    reports.append(check_truncation(guide, bars.data, search=search, warn=False))

figure, ax = plt.subplots(figsize=(6, 3.4))
ax.plot(
    sizes,
    [report.exact.gap.mean() for report in reports],
    color="0.75",
    linewidth=6,
    label="exact",
)
ax.plot(
    sizes,
    [report.evidence.gap.mean() for report in reports],
    "o-",
    label="estimated by importance sampling",
)
ax.plot(
    sizes,
    [-report.covered_mass.log().mean() for report in reports],
    "o-",
    label="lower bound, from neighbours",
)
ax.set(
    xscale="log", yscale="log", xlabel="states per image", ylabel="nats missing per image"
)
ax.legend(frameon=False, fontsize=8)
figure.tight_layout()

# %%
# Pareto's k cannot detect missing states: importance weights are constant within the population (:doc:`/explanation/psis`).
#
# A verdict and a page
# --------------------
# ``diagnose`` prints a verdict on what ``to_arviz`` made, and writes a page with pictures if it is told where. The small population,
# with what ``check_truncation`` found:

idata = to_arviz(model, small, bars.data, checks=report)
verdict = diagnose(idata, warn=False)

# %%
# Numbers come first, then a line for each finding with its advice, then remarks.
#
# ===============================  ==============================================  ==========================================
# entry                            how to read it                                  what to do
# ===============================  ==============================================  ==========================================
# first line                       *Do not trust*: at least one finding            follow the findings in order
# free energy per data point       the bound on the log evidence, in nats          compare on the same data only
# covered mass, at most            above 0.9 passes, but is no proof               search longer, or enlarge ``num_states``
# nats gained by more search       what the same search still finds; at most 0.1   search longer before anything else
# effective states                 ``exp`` of the entropy; at most half is good    enlarge ``num_states``
# nats gained by twice the states  what a larger population adds; at most 0.1      double ``num_states`` until it is small
# gap to ... log evidence          what the bound lacks in all; at most 0.2        enlarge ``num_states``; vary the search
# elpd (PSIS-LOO)                  expected log density of new data, with error    compare models by ``plot_comparison``
# remark *Leave-one-out*           why that number may flatter the model           give parameters priors, or hold data out
# remark *Drawn ... data points*   statistics that draws reproduce, or miss        change the model: the truncation is fine
# ===============================  ==============================================  ==========================================
#
# With 256 states no finding is left:

report = check_truncation(large, bars.data, search=search, warn=False)
verdict = diagnose(to_arviz(model, large, bars.data, checks=report), warn=False)
