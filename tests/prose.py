"""The rules of the prose that `make lint` keeps: pages, changelog and docstrings.

A sentence has at most 30 words, the first line of a docstring 12, the README 80 lines. A number begins with a digit. Only the changelog and
the results speak of what was.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST_SENTENCE = 30  # words
LONGEST_SUMMARY = 12  # words
LONGEST_README = 80  # lines
PAGES = ("README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md", "tests/papers/results/*.md")
HISTORICAL = ("CHANGELOG.md", "tests/papers/results/")  # pages that may say what was
PACKAGES = ("pyro_truncated", "models")

MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
HISTORY = re.compile(
    rf"\b(?:formerly|previously|no longer|nowadays|used to (?:be|have|take)|in earlier versions|\d before"
    rf"|(?:since|before|until|as of|by) (?:\d{{4}}-\d\d|\d+ (?:{MONTHS})|(?:{MONTHS}) \d))\b",
    re.IGNORECASE,
)
BARE_NUMBER = re.compile(r"(?<![\w.)\]\\])\.\d")
# What is no prose: code, formulas, tables, headings, directives, HTML, sessions at the prompt, and blocks after a double colon.
NO_PROSE = (
    re.compile(r"^(`{3,}|:{3,}).*?^\1", re.MULTILINE | re.DOTALL),
    re.compile(r"\$\$.*?\$\$", re.DOTALL),
    re.compile(r"^ *=+(?: +=+)+\n.*?^ *=+(?: +=+)+$", re.MULTILINE | re.DOTALL),
    re.compile(r"^\s*(?:\||#|>>>|\.\.\. ).*$", re.MULTILINE),
    re.compile(r"^\s*\.\. .*\n(?:\s*\n|\s{3,}.*\n)*", re.MULTILINE),
    re.compile(r"(?<=::\n)\n(?:[ ]{4}.*\n|\s*\n)+", re.MULTILINE),
    re.compile(r"<[^>\n]+>|!\[[^\]]*\]\([^)]*\)"),
)
# Links and roles stand for their text; what is quoted as code or as a formula counts as one word.
ONE_WORD = (
    (re.compile(r"\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"\{?:?[\w:]+\}?:?`[^`]+`|``[^`]+``|`[^`]+`|\$[^$]+\$"), "Code"),
)
WORD = re.compile(r"[A-Za-z][A-Za-z'\-]*")
PARAGRAPH = re.compile(r"\n\s*\n|\n\s*[-*+] |\n\s*\d+\. |\n(?=\s+\w+: )")
SENTENCE = re.compile(r"(?<=[.!?])[\"')\]*]*\s+(?=[A-Z`\"(])")


def prose(text: str) -> str:
    """Returns a text without code, tables, headings and formulas."""
    for pattern in NO_PROSE:
        text = pattern.sub(lambda found: "\n\n" if "\n" in found[0] else " ", text)
    for pattern, new in ONE_WORD:
        text = pattern.sub(new, text)
    return text


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a text."""
    for paragraph in PARAGRAPH.split(prose(text)):
        yield from SENTENCE.split(" ".join(paragraph.split()))


def broken_rules(text: str, may_be_historical: bool = False) -> Iterator[str]:
    """Yields what breaks a rule in a text, whether page or docstring."""
    for sentence in sentences(text):
        number = len(WORD.findall(sentence))
        if number > LONGEST_SENTENCE:
            yield f"a sentence of {number} words: {sentence[:80]}"
        if not may_be_historical and (found := HISTORY.search(sentence)):
            yield f"history ({found[0]}): {sentence[:80]}"
    for line in re.sub(NO_PROSE[0], "", text).splitlines():
        if BARE_NUMBER.search(re.sub(r"``[^`]+``|`[^`]+`|\]\([^)]*\)", "", line)):
            yield f"a number without a digit before its point: {line.strip()[:80]}"


def docstring_rules(docstring: str) -> Iterator[str]:
    """Yields what breaks a rule in a docstring."""
    summary = docstring.strip().split("\n")[0]
    number = len(WORD.findall(prose(summary)))
    if number > LONGEST_SUMMARY:
        yield f"a first line of {number} words: {summary[:80]}"
    yield from broken_rules(docstring)


def unreleased(changelog: str) -> str:
    """Returns the part of a changelog above the newest release."""
    return re.split(r"^## \[\d", changelog, maxsplit=1, flags=re.MULTILINE)[0]


def page_findings(root: Path) -> Iterator[str]:
    """Yields everything that breaks a rule on a page."""
    for path in sorted({path for pattern in PAGES for path in root.glob(pattern)}):
        name = path.relative_to(root).as_posix()
        if "_build" in path.parts or name.startswith(("docs/tutorials/", "docs/comparison/", "docs/reference/packages/")):
            continue
        text = path.read_text()
        text = unreleased(text) if name == "CHANGELOG.md" else text
        text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)  # commands
        yield from (f"{name}: {what}" for what in broken_rules(text, name.startswith(HISTORICAL)))
        if name == "README.md" and text.count("\n") > LONGEST_README:
            yield f"{name}: longer than {LONGEST_README} lines"


def docstring_findings(root: Path) -> Iterator[str]:
    """Yields everything that breaks a rule in a docstring."""
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (docstring := ast.get_docstring(node)):
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield from (f"{path.relative_to(root).as_posix()}:{line}: {what}" for what in docstring_rules(docstring))


def findings(root: Path) -> Iterator[str]:
    """Yields what breaks a rule on pages and in docstrings."""
    yield from page_findings(root)
    yield from docstring_findings(root)


if __name__ == "__main__":
    sys.exit("\n".join(findings(ROOT)) or 0)
