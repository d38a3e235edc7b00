"""What the wheel holds, and that the pages about the repository name what is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md")


def test_every_package_is_listed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "pyro_truncated").rglob("__init__.py")}
    mapped = {name for name, folder in settings["package-dir"].items() if (ROOT / folder / "__init__.py").exists()}
    assert set(settings["packages"]) == found | mapped


def test_marked_as_typed() -> None:
    assert (ROOT / "pyro_truncated" / "py.typed").exists()


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_targets_that_a_page_names_are_there(page: str) -> None:
    text = (ROOT / page).read_text()
    linked = {path for path in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in path}
    quoted = set(re.findall(r"`(?:python )?((?:pyro_truncated|models|tests|examples)/[\w./]*)", text))
    assert linked | quoted
    assert not {path for path in linked | quoted if not (ROOT / path).exists()}
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not set(re.findall(r"`make ([a-z0-9]+)", text)) - targets


def test_the_map_names_every_folder_of_the_package() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "pyro_truncated").glob("*/__init__.py")}
    assert not {folder for folder in folders if f"`{folder}/`" not in text}


def test_tests_lie_in_the_folder_of_what_they_test() -> None:
    others = {"benchmarks", "faults", "foreign", "papers", "user_models", "models"}
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert not {folder for folder in folders if folder.parts[0] not in others and not (ROOT / "pyro_truncated" / folder).is_dir()}
    tested = {folder.parts[0] for folder in folders}
    assert not {path.parent.name for path in (ROOT / "pyro_truncated").glob("*/__init__.py")} - tested
