"""The rules of the house that neither ruff nor import-linter keeps; `make lint` runs this file.

A private name stays in its file. A private function has at most 8 parameters. A file of less than 60 lines has two importers or a
reason. Two files of one name hold one idea. A file imports from files, not from the list of names of a folder that it lies in.
What "returns" does not yield.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("pyro_truncated", "models")
# A likelihood is a file of one name on up to five floors. Functions that numba or Triton compile take arrays, not objects.
KERNELS = ("pyro_truncated/ops/compiled", "pyro_truncated/ops/vectorised", "pyro_truncated/ops/fused")
ONE_IDEA = {"pyro_truncated/ops", *KERNELS, "pyro_truncated/distributions", "models"}
# Above the face and the models.
ABOVE = ("pyro_truncated/__main__.py", "pyro_truncated/warmup.py", "pyro_truncated/restoration/", "pyro_truncated/sklearn/")
# Private names of torch and Pyro that files import; pyproject.toml says what they are good for, beside those of objects.
OF_OTHERS = {"_pytree", "_python_dispatch", "_PYRO_STACK", "_DIM_ALLOCATOR", "_Context"}
MAX_PARAMETERS = 8
MIN_LINES = 60
REASON = "A file of its own"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The modules that a file imports from, and the names; those inside of functions, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.rpartition(".")[::2] for alias in node.names)


def crowded(tree: ast.Module) -> Iterator[str]:
    """Private functions and methods with too many parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and is_private(node.name):
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if len(names) - (names[:1] in (["self"], ["cls"])) > MAX_PARAMETERS:
                yield node.name


def misdescribed(tree: ast.Module) -> Iterator[str]:
    """Classes that "return", and functions that return what they "yield" or yield what they "return"."""
    for node in ast.walk(tree):
        says = (ast.get_docstring(node) or "").partition(" ")[0] if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
        if says in ("Returns", "Yields"):
            parts, kind = set(map(type, ast.walk(node))), ast.unparse(getattr(node, "returns", None) or [])
            yields, iterates = not parts.isdisjoint((ast.Yield, ast.YieldFrom)), "Iterator" in kind
            returns = ast.Return in parts and not yields and not iterates
            if isinstance(node, ast.ClassDef) or (returns if says == "Yields" else yields and iterates):
                yield node.name


def names_from_own_lists(root: Path, path: str, tree: ast.Module) -> Iterator[str]:
    """What a file imports from the `__init__` of a folder that it lies in: with the way back, that is a loop."""
    above = [] if path.startswith(ABOVE) or path.endswith("__init__.py") else path.split("/")[:-1]
    for module, name in imports(tree):
        if module and above[: module.count(".") + 1] == module.split("."):
            folder = root.joinpath(*module.split("."))
            if name not in {file.stem for file in folder.glob("*")}:
                yield f"{module}.{name}"


def findings(root: Path) -> Iterator[str]:
    """Everything that breaks a rule."""
    files = sorted(file for package in PACKAGES for file in (root / package).rglob("*.py"))
    texts = {file.relative_to(root).as_posix(): file.read_text() for file in files}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    importers, folders = defaultdict(set), defaultdict(list)
    for path, tree in trees.items():
        folder, _, file = path.rpartition("/")
        folders[file].append(folder)
        for module, name in imports(tree):
            importers[module].add(path)
            importers[f"{module}.{name}"].add(path)
        used = {part for names in imports(tree) for name in names for part in name.split(".") if is_private(part)}
        yield from (f"{path}: uses the private name {name}" for name in sorted(used - OF_OTHERS))
        if not path.startswith(KERNELS):
            yield from (f"{path}: {name} has more than {MAX_PARAMETERS} parameters" for name in crowded(tree))
        yield from (f"{path}: takes {name} from the list of names of its own folder" for name in names_from_own_lists(root, path, tree))
        yield from (f"{path}: {name} does not do what its docstring's first word says" for name in misdescribed(tree))
    for path, tree in trees.items():
        module = ("pyro_truncated/" * path.startswith("models/") + path).removesuffix(".py").replace("/", ".")
        is_short = texts[path].count("\n") < MIN_LINES
        if is_short and len(importers[module]) == 1 and REASON not in (ast.get_docstring(tree) or ""):
            yield f"{path}: is short, has one importer, and its docstring does not say why it is `{REASON}`"
    for name, places in folders.items():
        if name not in ("__init__.py", "__main__.py") and len(places) > 1 and not ONE_IDEA.issuperset(places):
            yield f"{name}: is the name of files in {', '.join(places)}"


if __name__ == "__main__":
    sys.exit("\n".join(findings(Path(__file__).parents[1])) or 0)
