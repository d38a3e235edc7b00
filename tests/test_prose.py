"""The rules of the prose that `make lint` keeps by tests/prose.py find what breaks them, and nothing else."""

from __future__ import annotations

import pytest

from tests.prose import ROOT, broken_rules, code_findings, docstring_rules, findings, page_findings

LONG = "one " * 31
FITS = "one " * 30
BROKEN = {
    "sentence": (LONG + ".", "a sentence of 31 words"),
    "list": (f"- {LONG}.\n- Short.", "a sentence of 31 words"),
    "number": ("The share is .05.", "a number without a digit before its point"),
    "negative number": ("It falls by -.5 nats.", "a number without a digit before its point"),
    "number in a table": ("| a | .5 |", "a number without a digit before its point"),
    "table": (f"| a | {LONG}. |", "a sentence of 31 words"),
    "heading": (f"## {LONG}", "a sentence of 31 words"),
    "note": (f"```{{note}}\n{LONG}.\n```", "a sentence of 31 words"),
    "card": (f":::{{grid-item-card}} Title\n:link: page\n{LONG}.\n:::", "a sentence of 31 words"),
    "caption": (f"```{{figure}} a.png\n:alt: picture\n\n{LONG}.\n```", "a sentence of 31 words"),
    "rst note": (f".. note::\n    {LONG}.\n\nShort.", "a sentence of 31 words"),
    "after a formula": (f"Args:\n    x: One.\n\n        .. math:: x\n    y: {LONG}.\n", "a sentence of 32 words"),
    "date": ("Chosen since 25 November.", "history"),
    "earlier number": ("It takes 3 s (5 before).", "history"),
    "seconds": ("It was 3 s before.", "history"),
    "comparison": ("It is faster than before.", "history"),
    "word": ("That is no longer so.", "history"),
    "word in a table": ("| a | That is no longer so. |", "history"),
}
ALLOWED = {
    "thirty words": FITS + ".",
    "two sentences": FITS + ". " + FITS.capitalize() + ".",
    "code": f"```python\n{LONG}\n```",
    "cells": "| " + FITS + " | " + FITS + " |",
    "table of text": f"====  ====\na     b\n====  ====\nc     {LONG}\n====  ====\n",
    "code in a line": "Take `x = .5` or `[.1, .2]`.",
    "formula": "$$ " + LONG + "$$",
    "link": "See [this](a/b.md), v1.2 and 0.5.",
    "before": "Call it before the training, which is no longer than before it ran.",
    "format": "It prints .2f or .3g digits.",
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_breaks_a_rule_is_found(case):
    text, what = BROKEN[case]
    found = list(broken_rules(text))
    assert len(found) == 1
    assert found[0].startswith(what)


@pytest.mark.parametrize("case", ALLOWED)
def test_what_breaks_none_is_not(case):
    assert list(broken_rules(ALLOWED[case])) == []


def test_first_lines_of_docstrings_are_short():
    assert list(docstring_rules("word " * 12 + ".\n\nMore.")) == []
    assert [what.split(":")[0] for what in docstring_rules("word " * 13 + ".\n\nMore.")] == ["a first line of 13 words"]


def test_docstrings_leave_the_rest_to_pages():
    assert list(docstring_rules("Short.\n\n" + "One two three. " * 99)) == []
    assert list(docstring_rules("Short.\n\n" + "One two three. " * 100)) == ["a docstring of 301 words"]


def test_docstrings_keep_the_rules(tmp_path):
    folder = tmp_path / "pyro_truncated" / "states"
    folder.mkdir(parents=True)
    (folder / "new.py").write_text(f'"""{LONG}"""\n')
    assert [what.split(":")[0] for what in findings(tmp_path)] == 2 * ["pyro_truncated/states/new.py"]


CODE = {
    "attribute": f'X = 1\n"""Short.\n\n{LONG}.\n"""\n',
    "nested": f'def f():\n    async def g():\n        """Short.\n\n        {LONG}.\n        """\n',
    "two lines": f'def f():\n    """{"word " * 7}\n    {"word " * 7}\n    """\n',
    "comment": f"X = 1\n# {'one ' * 20}\n# {'one ' * 20}\n",
    "end of a line": "X = 1  # of .5\n",
    "literal": "X = .5\n",
    "history": "X = 1  # previously 2\n",
    "error": f'raise ValueError(f"{{x}} is {LONG}.")\n',
    "warning": 'warnings.warn(f"It is {x}. It must be 1. Give 1.")\n',
}


@pytest.mark.parametrize("case", CODE)
@pytest.mark.parametrize("folder", ["models", "examples", "docs/scripts"])
def test_code_keeps_the_rules(case, folder, tmp_path):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "new.py").write_text(CODE[case])
    assert len(list(code_findings(tmp_path))) == 1


@pytest.mark.parametrize("text", [f'"""{LONG}"""\n', f"# {LONG}\n", "X = 1  # 0.5\n\n# Another one\n"])
def test_tests_may_explain_at_length(text, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "new.py").write_text(text)
    assert list(code_findings(tmp_path)) == []


def test_comments_of_pages_keep_the_rules(tmp_path):
    (tmp_path / "README.md").write_text("Short.\n\n```python\nx = 1\ny = 2  # as before\n```\n")
    assert len(list(page_findings(tmp_path))) == 1


def test_commands_are_no_prose_and_lists_are(tmp_path):
    for text, number in ((f"Short:\n\n    {LONG}\n\nShort.\n", 0), (f"- Short.\n    {LONG}\n", 1)):
        (tmp_path / "README.md").write_text(text)
        assert len(list(page_findings(tmp_path))) == number


def test_history_is_for_the_changelog_and_the_results(tmp_path):
    for page in ("CHANGELOG.md", "README.md", "tests/papers/results/one.md"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text("That is no longer so.\n")
    assert [what.split(":")[0] for what in page_findings(tmp_path)] == ["README.md"]


def test_the_readme_is_short(tmp_path):
    for number, found in ((80, []), (81, ["README.md: longer than 80 lines"])):
        (tmp_path / "README.md").write_text("Short.\n" * number)
        assert list(page_findings(tmp_path)) == found


def test_entries_of_the_changelog_are_few_lines(tmp_path):
    for entries, number in (("- One.\n" * 60, 0), ("- One.\n" * 61, 1), ("- One,\n  two.\n", 1)):
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [Unreleased]\n\n### Added\n\n{entries}")
        assert len(list(page_findings(tmp_path))) == number


def test_released_sections_of_the_changelog_stay_as_they_are(tmp_path):
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [Unreleased]\n\n- Short.\n\n## [0.2.0] - 2026-11-22\n\n- {LONG}.\n")
    assert list(page_findings(tmp_path)) == []


def test_the_pages_of_the_project_keep_the_rules():
    assert list(page_findings(ROOT)) == []
