"""The rules of the prose that `make lint` keeps: pages, changelog, docstrings, comments, messages.

A sentence has at most 30 words, a docstring 300, its first line 12, an error or a warning two sentences, the README 80 lines, an unreleased
changelog 60 entries of one line. A number begins with a digit, in code too. Only the changelog and the records of measurements speak of
what was.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST_SENTENCE = 30  # words
LONGEST_SUMMARY = 12  # words
LONGEST_DOCSTRING = 300  # words
LONGEST_MESSAGE = 2  # sentences
LONGEST_README = 80  # lines
LONGEST_CHANGELOG = 60  # entries
PAGES = ("*.md", "docs/**/*.md", "docs/**/*.rst", "tests/papers/results/*.md")
CODE = ("*.py", "pyro_truncated/**/*.py", "models/**/*.py", "examples/**/*.py", "docs/**/*.py", "tests/**/*.py")
TESTS = "tests/"  # whose docstrings and comments may be long
BUILT = ("docs/_build/", "docs/tutorials/", "docs/comparison/", "docs/reference/packages/")
HISTORICAL = ("CHANGELOG.md", "tests/papers/results/")  # pages that may say what was
EXEMPT = ("tests/prose.py", "tests/test_prose.py")  # which show what breaks the rules

MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
HISTORY = re.compile(
    rf"\b(?:formerly|previously|no longer(?! than)|nowadays|used to (?:be|have|take)|in earlier versions|until now"
    rf"|\d(?: (?:m?s|h|min|seconds|minutes|hours|nats|dB|[KMG]B|%))? before|(?:than|as|was|were) before(?! \w)"
    rf"|(?:since|before|until|as of|by) (?:\d{{4}}-\d\d|\d+ (?:{MONTHS})|(?:{MONTHS}) \d))\b",
    re.IGNORECASE,
)
BARE_NUMBER = re.compile(r"(?<![\w.)\]\\*])\.\d(?!\d*[a-z%])")
QUOTED = re.compile(r"``[^`]+``|`[^`]+`|\]\([^)]*\)")
FENCE = r"^[ ]*(`{3,})(?!\{(?:figure|note|tip|important|warning|admonition)\}).*?^[ ]*\1"
COMMENT = re.compile(r"(?:^|\s{2,})#\s+(.*)$", re.MULTILINE)
# What is no prose, and what stands for it: code, formulas, sessions at the prompt, directives and blocks after a double colon, HTML.
# Headings and cells of tables are paragraphs. Links and roles stand for their text; what is quoted as code or as a formula is one word.
NO_PROSE = (
    (re.compile(FENCE, re.MULTILINE | re.DOTALL), "\n\n"),
    (re.compile(r"\$\$.*?\$\$", re.DOTALL), "\n\n"),
    (re.compile(r"^ *=+(?: +=+)+\n(?:.*\S.*\n)*", re.MULTILINE), "\n\n"),
    (re.compile(r"^[=~^-]{3,} *$", re.MULTILINE), "\n\n"),
    (re.compile(r"^\s*(?:>>> |\.\.\. ).*$", re.MULTILINE), "\n\n"),
    (re.compile(r"^\s*(?:[`:]{3,}(?:\{.*)?|\.\. (?:note|tip|important|warning)::|:[\w-]+: .*)$", re.MULTILINE), "\n\n"),
    (re.compile(r"^( *)\.\. .*\n(?:[ \t]*\n|\1 {3,}.*\n)*", re.MULTILINE), "\n\n"),
    (re.compile(r"^( *)(.*)::\n[ \t]*\n(?:\1 {2,}.*\n|[ \t]*\n)+", re.MULTILINE), r"\1\2\n\n"),
    (re.compile(r"<[^>\n]+>|!\[[^\]]*\]\([^)]*\)"), " "),
    (re.compile(r"\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"\{?:?[\w:]+\}?:?`[^`]+`|``[^`]+``|`[^`]+`|\$[^$]+\$"), "Code"),
    (re.compile(r"^\s*#+ (.*)$", re.MULTILINE), r"\n\n\1\n\n"),
    (re.compile(r"^\s*\|.*$", re.MULTILINE), lambda row: row[0].replace("|", "\n\n")),
)
WORD = re.compile(r"[A-Za-z][A-Za-z'\-]*")
PARAGRAPH = re.compile(r"\n\s*\n|\n\s*[-*+] |\n\s*\d+\. |\n(?=\s+\w+: )")
SENTENCE = re.compile(r"(?<=[.!?])[\"')\]*]*\s+(?=[A-Z`\"(])")


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a text, without code and formulas."""
    text += "\n"
    for pattern, new in NO_PROSE:
        text = pattern.sub(new, text)
    for paragraph in PARAGRAPH.split(text):
        yield from SENTENCE.split(" ".join(paragraph.split()))


def broken_rules(text: str, may_be_historical: bool = False, may_be_long: bool = False) -> Iterator[str]:
    """Yields what breaks a rule in a text, whether page, docstring or comment."""
    for sentence in sentences(text):
        number = len(WORD.findall(sentence))
        if number > LONGEST_SENTENCE and not may_be_long:
            yield f"a sentence of {number} words: {sentence[:80]}"
        if not may_be_historical and (found := HISTORY.search(sentence)):
            yield f"history ({found[0]}): {sentence[:80]}"
    for line in re.sub(FENCE, "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
        if BARE_NUMBER.search(QUOTED.sub("", line)):
            yield f"a number without a digit before its point: {line.strip()[:80]}"


def docstring_rules(docstring: str, may_be_long: bool = False) -> Iterator[str]:
    """Yields what breaks a rule in a docstring."""
    number = len(WORD.findall(" ".join(sentences(docstring.strip().split("\n\n")[0]))))
    if number > LONGEST_SUMMARY and not may_be_long:
        yield f"a first line of {number} words: {docstring.strip()[:80]}"
    # Fields of a configuration are documented together, one line each.
    if (number := sum(len(WORD.findall(sentence)) for sentence in sentences(docstring.split("\nAttributes:")[0]))) > LONGEST_DOCSTRING:
        yield f"a docstring of {number} words"
    yield from broken_rules(docstring, may_be_long=may_be_long)


def changelog_rules(unreleased: str) -> Iterator[str]:
    """Yields what breaks a rule in the part of a changelog above the newest release."""
    if (number := len(re.findall(r"^- ", unreleased, re.MULTILINE))) > LONGEST_CHANGELOG:
        yield f"{number} entries, more than {LONGEST_CHANGELOG}"
    yield from (f"an entry of more than one line: {line.strip()[:80]}" for line in re.findall(r"^ +\S.*$", unreleased, re.MULTILINE))


def page_findings(root: Path) -> Iterator[str]:
    """Yields everything that breaks a rule on a page."""
    for path in sorted({path for pattern in PAGES for path in root.glob(pattern)}):
        name = path.relative_to(root).as_posix()
        if name.startswith(BUILT):
            continue
        text = path.read_text()
        if name == "CHANGELOG.md":
            text = re.split(r"^## \[\d", text, maxsplit=1, flags=re.MULTILINE)[0]
            yield from (f"{name}: {what}" for what in changelog_rules(text))
        if name == "README.md" and text.count("\n") > LONGEST_README:
            yield f"{name}: longer than {LONGEST_README} lines"
        for code in re.findall(r"^```py\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield from (f"{name}: {what}" for comment in COMMENT.findall(code) for what in broken_rules(comment))
        text = re.sub(r"(?<=\n\n)(?: {4}.*\n)+(?=\n|\Z)", "\n", text)  # commands
        yield from (f"{name}: {what}" for what in broken_rules(text, name.startswith(HISTORICAL)))


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields lines and texts of the docstrings of a file, those of attributes and nested functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, inspect.cleandoc(node.value.value)


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields lines and texts of errors and warnings, with a letter for each value."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and call.args and (call is not node or ast.unparse(call.func) == "warnings.warn"):
            parts = getattr(call.args[0], "values", [call.args[0]])
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)
            yield node.lineno, text.replace(" .. ", " to ")


def comments(tokens: list[tokenize.TokenInfo]) -> Iterator[tuple[int, str]]:
    """Yields lines and texts of comments; lines that follow each other are one."""
    start, lines, end = 0, [""], 0
    for token in tokens:
        if token.type == tokenize.COMMENT:
            line, is_alone = token.start[0], token.line.lstrip().startswith("#")
            if not is_alone or line != end + 1:
                yield start, "\n".join(lines)
                start, lines = line, []
            lines.append(re.sub(r"^#+ ?(%%)?", "", token.string))
            end = line if is_alone else -1
    yield start, "\n".join(lines)


def code_findings(root: Path) -> Iterator[str]:
    """Yields everything that breaks a rule in docstrings, comments, messages and numbers of code."""
    for path in sorted({path for pattern in CODE for path in root.glob(pattern)}):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        if name.startswith((*BUILT, *EXEMPT)):
            continue
        tree = ast.parse(text)
        for line, docstring in docstrings(tree):
            yield from (f"{name}:{line}: {what}" for what in docstring_rules(docstring, name.startswith(TESTS)))
        for line, message in messages(tree):
            if not name.startswith(TESTS) and len(list(sentences(message))) > LONGEST_MESSAGE:
                yield f"{name}:{line}: a message of more than {LONGEST_MESSAGE} sentences: {message[:80]}"
            yield from (f"{name}:{line}: {what}" for what in broken_rules(message, True, name.startswith(TESTS)))
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        for line, comment in comments(tokens):
            yield from (f"{name}:{line}: {what}" for what in broken_rules(comment, may_be_long=name.startswith(TESTS)))
        for token in tokens:
            if token.type == tokenize.NUMBER and token.string.startswith("."):
                yield f"{name}:{token.start[0]}: a number without a digit before its point: {token.string}"


def findings(root: Path) -> Iterator[str]:
    """Yields what breaks a rule on pages and in code."""
    yield from page_findings(root)
    yield from code_findings(root)


if __name__ == "__main__":
    sys.exit("\n".join(findings(ROOT)) or 0)
