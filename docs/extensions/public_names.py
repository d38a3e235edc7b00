"""Reference pages of every public name, and what scripts start from."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from sphinx.application import Sphinx

# A name that several of them list is documented with the first.
PACKAGES = {
    "pyro_truncated": "Guides, ELBO, training, searches",
    "pyro_truncated.models": "Models",
    "pyro_truncated.distributions": "Distributions",
    "pyro_truncated.search": "Searches",
    "pyro_truncated.diagnostics": "Diagnostics",
    "pyro_truncated.gp": "Gaussian processes",
    "pyro_truncated.gplvm": "Latent variable models on Gaussian processes",
    "pyro_truncated.restoration": "Restoration of images and signals",
    "pyro_truncated.scenes": "Scenes of objects",
    "pyro_truncated.datasets": "Data sets",
    "pyro_truncated.em": "Closed-form and Gibbs EM",
    "pyro_truncated.multistart": "Restarts",
    "pyro_truncated.training": "Training",
    "pyro_truncated.states": "States",
    "pyro_truncated.testing": "Checks of a guide",
    "pyro_truncated.callbacks": "Callbacks",
    "pyro_truncated.distributed": "Several processes",
    "pyro_truncated.sklearn": "Estimators for scikit-learn",
    "pyro_truncated.extend": "Tools for authors of models",
}
TUTORIALS = (
    "twenty_lines",
    "from_enumeration",
    "variable_selection",
    "sequences",
    "beside_autonormal",
    "image_dictionary",
    "two_views",
    "molecules",
    "active_set_decoder",
    "photograph",
    "posterior_any_good",
)
COMPARISONS = (
    "enumeration",
    "auto_discrete_parallel",
    "tensor_monte_carlo",
    "gradient_estimators",
    "mcmc",
)


class PublicName(NamedTuple):
    """A public name, its value, and whether this package documents it."""

    name: str
    value: Any
    is_at_home: bool


def reading_order(script: str) -> int:
    """The place of a script in its gallery."""
    return (TUTORIALS + COMPARISONS).index(Path(script).stem)


def fresh_start(gallery_conf: dict[str, Any], script: str) -> None:
    """Each script starts from seed 0 and an empty parameter store."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    pyro.enable_validation(True)
    torch.set_default_dtype(torch.float32)


def installed() -> dict[str, str]:
    """The packages that can be imported here."""
    return {
        name: title
        for name, title in PACKAGES.items()
        if importlib.util.find_spec(name) is not None
    }


def public_names(package: str, seen: set[int]) -> list[PublicName]:
    """Returns what a package lists, and adds it to the objects `seen`."""
    module = importlib.import_module(package)
    values = {
        name: getattr(module, name)
        for name in sorted(module.__all__)
        if not name.startswith("_")
    }
    found = [
        PublicName(name, value, id(value) not in seen) for name, value in values.items()
    ]
    seen.update(id(value) for value in values.values())
    return found


def directive(package: str, public: PublicName) -> str:
    """What documents a name."""
    full = f"{package}.{public.name}"
    if inspect.isclass(public.value):
        return f".. autoclass:: {full}\n   :members:\n   :show-inheritance:\n"
    return f".. {'autofunction' if callable(public.value) else 'autodata'}:: {full}\n"


def page(package: str, title: str, names: list[PublicName]) -> str:
    """Returns the reference of a package: all names, then their documentation."""
    module = inspect.getdoc(importlib.import_module(package)) or ""
    table = "\n".join(
        f"   ~{package}.{public.name}" for public in names if public.is_at_home
    )
    elsewhere = ", ".join(
        f":py:obj:`~{address(public.value, public.name)}`"
        for public in names
        if not public.is_at_home
    )
    heading = f"{title}\n{'=' * len(title)}\n\n``import {package}``\n\n{module}\n"
    also = (
        f"\nDocumented elsewhere, and here for imports: {elsewhere}\n" if elsewhere else ""
    )
    body = "\n".join(directive(package, public) for public in names if public.is_at_home)
    return f"{heading}\n.. autosummary::\n   :nosignatures:\n\n{table}\n{also}\n{body}"


def address(value: Any, name: str) -> str:
    """The dotted name that a public object is documented under."""
    for package in installed():
        module = importlib.import_module(package)
        if name in module.__all__ and getattr(module, name) is value:
            return f"{package}.{name}"
    raise LookupError(name)


def write_pages(app: Sphinx) -> None:
    """Writes the reference of all packages, and only files that change."""
    folder = Path(app.srcdir) / "reference" / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[int] = set()
    for package, title in installed().items():
        names = public_names(package, seen)
        if not any(public.is_at_home for public in names):
            continue
        path, text = folder / f"{package}.rst", page(package, title, names)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def leave_out(
    app: Sphinx, what: str, name: str, value: Any, is_skipped: bool, options: Any
) -> bool | None:
    """Leaves out scikit-learn's methods for the routing of metadata."""
    return True if re.fullmatch("set_.*_request", name) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """The pages are written before Sphinx looks for sources."""
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-skip-member", leave_out)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
