"""The code of the documentation's pages runs, block after block; what they quote is there."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import logging
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PICTURES = "https://raw.githubusercontent.com/pyro-truncated/pyro-truncated/main/"
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    if "_build" not in path.parts
}
WITH_CODE = [page for page, text in PAGES.items() if BLOCK.search(text)]
# Pages that train for more than a few seconds.
LONG = {
    "README.md",
    "docs/explanation/learn.md",
    "docs/how-to/arviz.md",
    "docs/how-to/denoise-when.md",
    "docs/how-to/models.md",
    "docs/how-to/new-data.md",
    "docs/how-to/photon-counts.md",
    "docs/how-to/save-and-resume.md",
    "docs/how-to/scikit-learn.md",
    "docs/how-to/structure.md",
    "docs/how-to/watch-training.md",
    "docs/index.md",
}
# Of packages that the tests do not require: where they are missing, these pages are left out; what they warn of is theirs.
OPTIONAL = {
    "docs/how-to/lightning.md": (
        pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed"),
        pytest.mark.filterwarnings("ignore:::lightning"),
    )
}


def run(language: str, code: str, names: dict[str, Any], place: str) -> None:
    """Runs a block; of a session at the prompt, what it prints has to be what the page shows."""
    if language == "python":
        exec(compile(code, place, "exec"), names)
        return
    session = doctest.DocTestParser().get_doctest(code, names, place, place, 0)
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(session, clear_globs=False)
    names.update(session.globs)
    assert results.failed == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.nightly if page in LONG else OPTIONAL.get(page, ())) for page in WITH_CODE]
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("pyro_truncated"), "level", logging.ERROR)
    names: dict[str, Any] = {"__name__": "__main__"}
    if page == "README.md":  # which shows no more than that it runs
        names["range"] = lambda steps: range(min(steps, 20))
    for number, (language, code) in enumerate(BLOCK.findall(PAGES[page]), 1):
        run(language, code, names, f"{page}, block {number}")


def test_no_code_hides_in_other_fences():
    """Blocks of other languages are not run; Python is written in the two that are."""
    fences = {page: set(re.findall(r"^```([a-zA-Z]+)$", text, re.MULTILINE)) for page, text in PAGES.items()}
    assert not {page: found for page, found in fences.items() if found - {"python", "pycon", "sh", "text", "bibtex"}}


def test_pictures_of_the_readme_show_in_a_checkout_and_on_the_index():
    """Relative addresses in the file, absolute ones in what the package index shows."""
    path = ROOT / "setup.py"
    specification = importlib.util.spec_from_file_location("setup_of_the_package", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    address = re.compile(r"\]\(([^)]+)\)")
    relative = [link for link in address.findall(PAGES["README.md"]) if "://" not in link]
    assert any(link.endswith(".png") for link in relative)
    assert not [link for link in relative if not (ROOT / link).is_file()]
    absolute = address.findall(module.with_absolute_links(PAGES["README.md"]))
    assert not [link for link in absolute if not link.startswith("https://")]
    pictures = [link for link in absolute if link.endswith(".png")]
    assert pictures
    assert not [link for link in pictures if not (ROOT / link.removeprefix(PICTURES)).is_file()]
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    for url in urls.values():
        if url.startswith("https://github.com/"):
            assert url.removeprefix("https://github.com/").startswith(PICTURES.split("/", 3)[3].removesuffix("/main/"))


def literal_texts() -> str:
    """All strings of the library, pieces of one message joined, as they are written."""
    texts = []
    for path in sorted(path for folder in ("pyro_truncated", "models") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
    return "\n".join(texts)


@pytest.mark.nightly
def test_the_messages_that_the_page_of_errors_quotes_are_in_the_library():
    quoted = re.findall(r"^## `(.*)`$", PAGES["docs/how-to/errors.md"], re.MULTILINE)
    assert len(quoted) > 15
    texts = literal_texts()
    assert not [message for message in quoted if message not in texts]
