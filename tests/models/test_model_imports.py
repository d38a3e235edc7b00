"""Models are written as a user would write hers: on public names of the library, on nothing behind."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pyro_truncated
import pyro_truncated.models
from pyro_truncated import distributions, extend, scenes, search, sequences

FILES = sorted(Path(pyro_truncated.models.__file__).parent.glob("*.py"))
PUBLIC = {module.__name__: set(module.__all__) for module in (pyro_truncated, distributions, extend, scenes, search, sequences)}


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Modules and names that a file imports from the library, wherever it does so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "*") for alias in node.names if alias.name.startswith("pyro_truncated"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyro_truncated"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def violations(source: str) -> list[str]:
    found = []
    for module, name in imported(ast.parse(source)):
        is_sibling = module == "pyro_truncated.models" or module.startswith("pyro_truncated.models.")
        if not is_sibling and name not in PUBLIC.get(module, ()):
            found.append(f"{module}: {name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_models_import_public_names_only(path: Path) -> None:
    assert violations(path.read_text()) == []


def test_the_rule_sees_what_it_forbids() -> None:
    assert len(FILES) > 10
    assert violations("from pyro_truncated import ops") == ["pyro_truncated: ops"]
    assert violations("def f():\n    import pyro_truncated.ops") == ["pyro_truncated.ops: *"]
    assert violations("from pyro_truncated.utils.arrays import takes_arrays") == ["pyro_truncated.utils.arrays: takes_arrays"]
    assert violations("from pyro_truncated.extend import takes_arrays\nfrom pyro_truncated.distributions import or_missing") == []
