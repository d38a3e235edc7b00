"""The rules of the prose that `make lint` keeps by tests/prose.py find what breaks them, and nothing else."""

from __future__ import annotations

import pytest

from tests.prose import ROOT, broken_rules, docstring_rules, findings, page_findings

LONG = "one " * 31
FITS = "one " * 30
BROKEN = {
    "sentence": (LONG + ".", "a sentence of 31 words"),
    "list": (f"- {LONG}.\n- Short.", "a sentence of 31 words"),
    "number": ("The share is .05.", "a number without a digit before its point"),
    "negative number": ("It falls by -.5 nats.", "a number without a digit before its point"),
    "number in a table": ("| a | .5 |", "a number without a digit before its point"),
    "date": ("Chosen since 25 November.", "history"),
    "earlier number": ("It takes 3 s (5 before).", "history"),
    "word": ("That is no longer so.", "history"),
}
ALLOWED = {
    "thirty words": FITS + ".",
    "two sentences": FITS + ". " + FITS.capitalize() + ".",
    "code": f"```python\n{LONG}\n```",
    "table": f"| {LONG} |",
    "code in a line": "Take `x = .5` or `[.1, .2]`.",
    "formula": "$$ " + LONG + "$$",
    "link": "See [this](a/b.md), v1.2 and 0.5.",
    "before": "Call it before the training.",
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


def test_docstrings_keep_the_rules(tmp_path):
    folder = tmp_path / "pyro_truncated" / "states"
    folder.mkdir(parents=True)
    (folder / "new.py").write_text(f'"""{LONG}"""\n')
    assert [what.split(":")[0] for what in findings(tmp_path)] == 2 * ["pyro_truncated/states/new.py"]


def test_history_is_for_the_changelog_and_the_results(tmp_path):
    for page in ("CHANGELOG.md", "README.md", "tests/papers/results/one.md"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text("That is no longer so.\n")
    assert [what.split(":")[0] for what in page_findings(tmp_path)] == ["README.md"]


def test_the_readme_is_short(tmp_path):
    for number, found in ((80, []), (81, ["README.md: longer than 80 lines"])):
        (tmp_path / "README.md").write_text("Short.\n" * number)
        assert list(page_findings(tmp_path)) == found


def test_released_sections_of_the_changelog_stay_as_they_are(tmp_path):
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [Unreleased]\n\n- Short.\n\n## [0.2.0] - 2026-11-22\n\n- {LONG}.\n")
    assert list(page_findings(tmp_path)) == []


def test_the_pages_of_the_project_keep_the_rules():
    assert list(page_findings(ROOT)) == []
