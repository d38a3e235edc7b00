"""What the documentation shows runs: the examples of docstrings on small data, and the README's code."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import itertools
import logging
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import arviz as az
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.optim import Adam

import pyro_truncated
from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, GibbsGuide, LearnConfig, Truncated_ELBO, callbacks, models

ROOT = Path(__file__).parents[1]
PYRO = {"pyro": pyro, "dist": dist, "torch": torch, "SVI": SVI, "Trace_ELBO": Trace_ELBO, "Adam": Adam, "AutoNormal": AutoNormal}
ALWAYS = PYRO | {"az": az, "Path": Path}


def literal_blocks(docstring: str) -> list[str]:
    """The indented blocks after a double colon that are code (what follows a directive, such as a formula, is none)."""
    found = re.finditer(r"^(.*)::\n\n((?:[ ]{4}.*\n|\n)+)", docstring + "\n", re.MULTILINE)
    return [textwrap.dedent(match[2]) for match in found if not match[1].lstrip().startswith("..")]


def documented(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """The docstrings inside a file that hold code, by qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            qualified = f"{name}.{child.name}".lstrip(".")
            docstring = ast.get_docstring(child, clean=False) or ""
            if ">>>" in docstring or "::" in docstring:
                yield qualified, inspect.cleandoc(docstring)
            yield from documented(child, qualified)


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Every docstring with code by its name, with the part of the library whose names its examples know, such as ``pyro_truncated.gp``."""
    for path in sorted(path for folder in ("pyro_truncated", "models") for path in (ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        part = "pyro_truncated.models" if parts[0] == "models" else ".".join(parts[:2]).removesuffix(".py")
        yield from ((name, docstring, part) for name, docstring in documented(ast.parse(path.read_text()), ""))


def collect() -> dict[str, tuple[str, str]]:
    """Every example of a docstring that is a block of code, with the part of the library whose names it knows."""
    examples = {}
    for name, docstring, part in DOCSTRINGS:
        blocks = literal_blocks(docstring)
        for number, code in enumerate(blocks):
            examples[name if len(blocks) == 1 else f"{name} {number + 1}"] = code, part
    return examples


DOCSTRINGS = list(docstrings())
EXAMPLES = collect()
SESSIONS = {name: (docstring, part) for name, docstring, part in DOCSTRINGS if ">>>" in docstring}
LONG = {
    "AutoTruncated.infer",
    "ConvergenceWarning",
    "CrossValidation",
    "DisagreeingStartsWarning",
    "FactorialHMM",
    "GatedDecoder",
    "InducingSubset",
    "Latents",
    "LearnConfig",
    "LearnReport",
    "LinearMixture.likeliest_components",
    "Posterior",
    "Prediction",
    "Restored",
    "SASDecoder",
    "SASDecoder.reconstruct",
    "SparseCoding",
    "SpikeSlabGPLVMTransformer",
    "SpikeSlabMRD 1",
    "SpikeSlabMRD 2",
    "SubsetGPRegressor",
    "SubsetPredictor",
    "TruncatedMixture",
    "VaryingNoiseWarning",
    "Verdict",
    "compare_models",
    "cross_validate",
    "denoise",
    "diagnose",
    "fit",
    "fit_minibatches",
    "inpaint",
    "learn",
    "loo_pit",
    "natural_images",
    "natural_step",
    "plot_covered_mass",
    "plot_forest",
    "plot_gap",
    "plot_relevance",
    "plot_restarts",
    "remove_dimensions",
    "to_arviz",
}


def causes(num_data: int = 12) -> dict[str, Any]:
    """A model of binary causes with a global latent, and data."""
    y = torch.randn(num_data, 4)

    def model(y: torch.Tensor) -> None:
        noise = pyro.sample("noise", dist.LogNormal(0.0, 0.1))
        weight = pyro.param("weight", lambda: torch.randn(4, 5, generator=torch.Generator().manual_seed(0)))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((5,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, noise).to_event(1), obs=y)

    return {"model": model, "y": y}


def list_of_guides() -> dict[str, Any]:
    names = causes()
    guide_list = AutoGuideList(names["model"])
    guide_list.append(AutoNormal(poutine.block(names["model"], hide=["s"])))
    guide_list.append(AutoTruncated(names["model"], num_states=32))
    SVI(names["model"], guide_list, Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch())).step(names["y"])
    return {**names, "guide_list": guide_list, "y_new": torch.randn(6, 4), "search": ExhaustiveSearch()}


def local_causes() -> dict[str, Any]:
    names = causes()
    return {**names, "model": poutine.condition(names["model"], {"noise": torch.tensor(1.0)})}


def training() -> dict[str, Any]:
    names = local_causes()
    guide = AutoTruncated(names["model"], num_states=8)
    elbo = Truncated_ELBO(EvolutionarySearch())
    return {**names, "guide": guide, "elbo": elbo, "svi": SVI(names["model"], guide, Adam({"lr": 0.01}), elbo), "settings": {"seed": 0}}


def regression() -> dict[str, Any]:
    def model(x: torch.Tensor, y: torch.Tensor | None = None) -> None:
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    x, y = torch.randn(2, 20)
    SVI(model, AutoNormal(model), Adam({"lr": 0.01}), Trace_ELBO()).step(x, y)
    return {"model": model, "x": x, "y": y}


def gaussian_process(targets: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    X = torch.linspace(-200.0, 200.0, 300).unsqueeze(-1)
    kernel = pyro.contrib.gp.kernels.RBF(1)
    return {"X": X, "kernel": kernel, "y": targets(X.squeeze(-1).sin())}


def molecules() -> dict[str, Any]:
    molecules = ["C" * (n % 7) + "N" * (n % 5) + "O" * (n % 11) for n in range(205)]
    old, new = (pyro_truncated.gp.spectrum(some, 2) for some in (molecules[:200], molecules[200:]))
    return {"fingerprints": old, "y": torch.randn(200), "new_fingerprints": new}


def botorch_models() -> dict[str, Any]:
    pytest.importorskip("botorch")
    wanted = {
        "botorch.acquisition": ["LogExpectedImprovement"],
        "botorch.models": ["SingleTaskVariationalGP"],
        "botorch.optim": ["optimize_acqf_discrete"],
        "pyro_truncated.gp.botorch_models": ["SubsetAllocator", "SubsetGPModel"],
    }
    names = {name: getattr(importlib.import_module(file), name) for file, those in wanted.items() for name in those}
    y = torch.randn(20).double()
    regression = pyro_truncated.gp.SubsetGPRegression(pyro_truncated.gp.PrecomputedKernel(torch.eye(1000), torch.arange(20)), y)
    X, Y = torch.rand(40, 2).double(), torch.randn(40, 1).double()
    return {**names, "regression": regression, "y": y, "fingerprints": torch.arange(1000), "X": X, "Y": (Y - Y.mean()) / Y.std()}


def with_gpytorch() -> dict[str, Any]:
    pytest.importorskip("gpytorch")
    return {"X": torch.randn(30, 2), "y": torch.randn(30)}


def trained_decoder() -> dict[str, Any]:
    x = torch.randn(30, 4)
    return {"decoder": pyro_truncated.SASDecoder(30, 4).initialize(x), "x": x, "x_new": torch.randn(3, 4)}


def gated() -> dict[str, Any]:
    return {"examples": torch.randn(8, 6), "switches": torch.ones(8, 2), "poses": torch.randn(8, 2, 1), "x": torch.randn(4, 6)}


def short_learn() -> dict[str, Any]:
    quick = functools.partial(
        pyro_truncated.multistart.learn, steps=3, restarts=2, num_states=8, config=LearnConfig(tolerance=100.0), progress=False
    )
    return {"y": pyro_truncated.datasets.linear_bars(40, size=10).data, "learn": quick}


def short_denoise() -> dict[str, Any]:
    quick = functools.partial(pyro_truncated.restoration.denoise, progress=False)
    return {"photograph": 100 + 25 * torch.randn(16, 16), "denoise": quick}


def short_fit(*args: Any) -> Any:
    return pyro_truncated.gplvm.fit(*args, steps=5, warm_up=5, rounds=1)


def views() -> dict[str, Any]:
    images, texts = torch.randn(2, 20, 3)
    return {"images": images, "texts": texts, "fit": short_fit}


def labelled_views() -> dict[str, Any]:
    names = views()
    return {**names, "labels": torch.arange(20).remainder(10).unsqueeze(-1).float(), "new_images": torch.randn(2, 3)}


def correlated_outputs() -> dict[str, Any]:
    x = torch.linspace(0, 6, 30, dtype=torch.float64).unsqueeze(-1)
    return {"x": x, "y": torch.cat([x.sin(), x.cos()], 1), "new": x[:4] + 0.05}


def saved_regression() -> dict[str, Any]:
    names = molecules()
    kernel = pyro_truncated.gp.CountKernel(names["fingerprints"])
    return {**names, "model": pyro_truncated.SubsetGPRegression(kernel, names["fingerprints"].squared_norms.sqrt(), num_inducing=10)}


def trained_switches() -> dict[str, Any]:
    return {"model": pyro_truncated.gplvm.SpikeSlabGPLVM(12, 3, num_latents=3), "y": torch.randn(12, 3)}


@functools.cache
def converted() -> dict[str, Any]:
    """Two models of bars, converted with their training and the checks of one of them."""
    y, found = pyro_truncated.datasets.linear_bars(20, 3, mean_active=2.0, noise=5.0).data, []
    for num_latents in (6, 3):
        model = models.BinarySparseCoding(9, num_latents).initialize(y)
        guide = AutoTruncated(model, num_states=8)
        svi = SVI(model, guide, pyro_truncated.ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
        record = pyro_truncated.fit(svi, y, steps=5, progress=False).record
        checks = pyro_truncated.check_truncation(guide, y, steps=2, num_samples=100, warn=False)
        found.append(pyro_truncated.to_arviz(model, guide, y, training=record, checks=checks, num_samples=25))
    return {"idata": found[0], "other": found[1], "Figure": Figure}


def predicted() -> dict[str, Any]:
    # Parameters are point estimates, and the data few.
    warnings.simplefilter("ignore")
    return converted()


def with_global_latent() -> dict[str, Any]:
    names = regression()
    guide = AutoNormal(names["model"])
    SVI(names["model"], guide, Adam({"lr": 0.01}), Trace_ELBO()).step(names["x"], names["y"])
    return {"idata": pyro_truncated.to_arviz(names["model"], guide, names["x"], names["y"]), "Figure": Figure}


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    **dict.fromkeys(
        ("plot_restarts", "plot_covered_mass", "plot_effective_states", "plot_gap", "plot_activations", "plot_marginals"), converted
    ),
    **dict.fromkeys(("plot_predictive_check", "plot_pareto_k", "plot_loo_pit", "plot_comparison"), predicted),
    "plot_forest": with_global_latent,
    "ActiveSetGPLVM": dict,
    "AutoTruncated": local_causes,
    "AutoTruncated.infer": list_of_guides,
    "BinaryVAE": lambda: {"model": models.BinaryVAE(4, 5), "y": torch.randn(10, 4)},
    "CandidateLatents": trained_decoder,
    "Batches": lambda: {**training(), "itertools": itertools, "distributed": pyro_truncated.distributed},
    "GPyTorchKernel": with_gpytorch,
    "GatedDecoder": gated,
    "InducingSubset": molecules,
    "MaxSpikeSlabSparseCoding 1": lambda: {"model": models.MaxSpikeSlabSparseCoding(4, 5), "y": torch.randn(10, 4)},
    "MaxSpikeSlabSparseCoding 2": lambda: {"model": models.MaxSpikeSlabSparseCoding(4, 5), "y": torch.randn(10, 4)},
    "SASDecoder": lambda: {"x": torch.randn(1200, 4), "x_new": torch.randn(3, 4)},
    "SASDecoder.reconstruct": lambda: {
        "decoder": pyro_truncated.SASDecoder(60, 4, num_active=20),
        "x": torch.randn(60, 4),
        "x_new": torch.randn(3, 4),
    },
    "SASFunctionDecoder": lambda: {"x": torch.rand(10, 784).round()},
    "SparseCoding": dict,
    "SpikeSlabGPLVM": lambda: {"y": torch.randn(20, 3), "fit": short_fit},
    "CoregionalizedGPRegression": correlated_outputs,
    "SpikeSlabMRD 1": views,
    "SpikeSlabMRD 2": labelled_views,
    "SpikeSlabGPLVMTransformer": dict,
    "SpikeSlabMRD.switch_model": trained_switches,
    "SpikeSlabRegressor": dict,
    "SpikeSlabSparseCoding": lambda: {"model": models.SpikeSlabSparseCoding(4, 5), "y": torch.randn(10, 4)},
    "SubsetAllocator": botorch_models,
    "SubsetGPModel": botorch_models,
    "SubsetPredictor": saved_regression,
    "SubsetGPRegressor": dict,
    "SubsetSparseGPRegression": lambda: gaussian_process(lambda f: f),
    "SubsetVariationalGP": lambda: gaussian_process(lambda f: (f > 0).float()),
    "TensorBoard": lambda: {**training(), "TensorBoard": lambda folder: callbacks.TensorBoard(writer=MagicMock())},
    "TruncatedMixture": dict,
    "WandB": lambda: {**training(), "WandB": lambda **options: callbacks.WandB(MagicMock())},
    "denoise": short_denoise,
    "fit": training,
    "learn": short_learn,
    "save_checkpoint": training,
    "to_arviz": regression,
}


def with_marks(names: Iterable[str]) -> list[Any]:
    """What takes seconds runs at night."""
    return [pytest.param(name, marks=pytest.mark.nightly) if name in LONG else name for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", with_marks(EXAMPLES))
def test_the_example_of_a_docstring_runs(name, tmp_path, monkeypatch):
    """It knows the names of the face, of Pyro and of its own part of the library, and imports any others. Loops are cut short."""
    code, part = EXAMPLES[name]
    monkeypatch.chdir(tmp_path)
    faces = [pyro_truncated, pyro_truncated.extend, importlib.import_module(part)]
    names: dict[str, Any] = {public: getattr(face, public) for face in faces for public in getattr(face, "__all__", ())}
    names |= ALWAYS | {"range": lambda *limits: itertools.islice(range(*limits), 3)}
    names |= DATA[name]()
    exec(compile(code, f"example of {name}", "exec"), names)
    if "svi" in names and isinstance(names["svi"].guide, AutoTruncated | GibbsGuide):
        assert math.isfinite(names["svi"].step(*(names[argument] for argument in ("x", "y") if argument in names)))


@pytest.mark.slow
@pytest.mark.parametrize("name", with_marks(SESSIONS))
def test_the_session_of_a_docstring_prints_what_it_shows(name, tmp_path, monkeypatch):
    """It knows the names of the face, of the models and data sets, of Pyro and of its own part of the library."""
    docstring, part = SESSIONS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("pyro_truncated"), "level", logging.ERROR)
    names: dict[str, Any] = {**ALWAYS, "pyro_truncated": pyro_truncated, "warnings": warnings}
    for face in (
        pyro_truncated,
        pyro_truncated.extend,
        models,
        pyro_truncated.datasets,
        pyro_truncated.distributions,
        importlib.import_module(part),
    ):
        names |= {public: getattr(face, public) for public in getattr(face, "__all__", ())}
    session = doctest.DocTestParser().get_doctest(docstring, names, name, None, None)
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(session).failed == 0


SHOWN = (
    "",
    ".extend",
    ".models",
    ".search",
    ".datasets",
    ".testing",
    ".em",
    ".scenes",
    ".restoration",
    ".training",
    ".distributed",
    ".sklearn",
    ".callbacks",
    ".distributions",
    ".diagnostics",
    ".guide",
    ".states",
    ".gp",
    ".gplvm",
)


@pytest.mark.parametrize("face", SHOWN)
def test_every_public_name_has_an_example(face):
    module = importlib.import_module(f"pyro_truncated{face}")
    values = {name: getattr(module, name) for name in module.__all__ if not name.startswith("__")}
    known = {name.split(" ")[0] for name in EXAMPLES | SESSIONS}
    documented_here = {name for name, value in values.items() if isinstance(value, type) or inspect.isfunction(value)}
    assert not documented_here - known


def test_no_data_are_left_of_examples_that_are_gone():
    assert DATA.keys() == EXAMPLES.keys()


def is_there(name: str) -> bool:
    """Whether a dotted name leads to a module or to what one holds."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name is not None and not error.name.startswith("pyro_truncated"):
                return True  # a file that needs an optional package
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found is not None
    return False


@pytest.mark.slow
def test_the_names_that_pages_and_docstrings_give_are_there():
    files = [path for folder in ("pyro_truncated", "models", "examples") for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in [*files, *ROOT.glob("*.md")])
    names = set(re.findall(r"\bpyro_truncated(?:\.[A-Za-z_]\w*)+", text))
    assert len(names) > 100
    assert not {name for name in names if not is_there(name)}
