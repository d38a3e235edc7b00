"""How Sphinx builds the site: `make docs`.

Nothing is fetched from the network while it builds or while it is read.
"""

import importlib.metadata
import sys
import tomllib
import warnings
from pathlib import Path

import matplotlib

import pyro_truncated

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "extensions"))

matplotlib.use("Agg")
warnings.filterwarnings("ignore", message=r"\s*ArviZ is undergoing a major refactor")

from inventories import inventories  # noqa: E402

project = "pyro_truncated"
author = "The authors of pyro_truncated"
copyright = author
version = release = pyro_truncated.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "public_names",
]
exclude_patterns = [
    "_build",
    "scripts",
    "extensions",
    "inventories",
    "**/GALLERY_HEADER.rst",
]
nitpicky = False
suppress_warnings = ["config.cache"]

# What measurements ran with: |pyro-ppl|, |torch|.
rst_epilog = "".join(
    f".. |{package}| replace:: {importlib.metadata.version(package)}\n"
    for package in ("pyro-ppl", "torch")
)

# Markdown
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Names of the library
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
intersphinx_mapping = inventories(HERE / "inventories", HERE / "_build" / "inventories")
intersphinx_timeout = 1

# Scripts, run while the site is built; an error in one of them is an error of the build.
sphinx_gallery_conf = {
    "examples_dirs": ["scripts/tutorials", "scripts/comparison"],
    "gallery_dirs": ["tutorials", "comparison"],
    "filename_pattern": r"\.py$",
    "within_subsection_order": "public_names.reading_order",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 0,
    "remove_config_comments": True,
    "reset_modules": ("matplotlib", "public_names.fresh_start"),
    "backreferences_dir": None,
    "plot_gallery": True,
    "nested_sections": False,
    "write_computation_times": False,
    "image_scrapers": ("matplotlib",),
    "thumbnail_size": (320, 224),
    "notebook_images": False,
}

# Pages
html_theme = "furo"
html_title = f"pyro_truncated {version}"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#1f5d85",
        "color-brand-content": "#1f5d85",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7fb6d9",
        "color-brand-content": "#7fb6d9",
    },
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
pygments_style = "friendly"

metadata = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
