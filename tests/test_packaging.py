from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "pyro_truncated").rglob("__init__.py")}
    mapped = {name for name, folder in settings["package-dir"].items() if (ROOT / folder / "__init__.py").exists()}
    assert set(settings["packages"]) == found | mapped


def test_marked_as_typed() -> None:
    assert (ROOT / "pyro_truncated" / "py.typed").exists()
