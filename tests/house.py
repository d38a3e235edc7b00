"""The rules of the house that neither ruff nor import-linter keeps; `make lint` runs this file.

A private name stays in its file; no file is longer than 300 lines; two files of one name hold one idea; whatever is public is documented,
whether `__all__` lists it or not; a file imports from files, not from the list of names of a folder that it lies in; models are imported
from above only.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Definition = ast.FunctionDef | ast.ClassDef
PACKAGES = ("pyro_truncated", "models")
LONGEST = 300
# A likelihood is a file of one name on up to five floors.
ONE_IDEA = {"pyro_truncated/ops", "pyro_truncated/ops/compiled", "pyro_truncated/ops/vectorised", "pyro_truncated/distributions", "models"}
# Above the face and the models.
ABOVE = ("pyro_truncated/__main__.py", "pyro_truncated/warmup.py", "pyro_truncated/restoration/", "pyro_truncated/sklearn/")
# Private names of others for which there is no public one.
OF_OTHERS = {
    # torch
    "_base": "whose memory a tensor is a view of",
    "_version": "whether a tensor was changed in place",
    "_validate_sample": "what a distribution checks values with; there is no public name for a way of its own",
    "_validate_args": "Distribution.expand hands it on; there is no public flag of one distribution",
    "_pytree": "the tensors inside of any arguments; torch has no other place for it",
    "_C": "whether torch.jit traces",
    "_get_tracing_state": "whether torch.jit traces",
    "_load_from_state_dict": "what a module overrides to check and to adapt what it loads",
    "_set_params_and_buffers_to_ignore_for_model": "how DistributedDataParallel is told, by its own documentation",
    "_parameters": "a module's parameters without those that a property computes",
    "_modules": "a module's children without those that a property computes",
    "_buffers": "a module's buffers, those that are not set included: what a module is put back to",
    # Pyro
    "_PYRO_STACK": "which handlers are open, those too that answer no message, such as traces",
    "_DIM_ALLOCATOR": "the dimensions of open plates: set aside while the model runs on its own",
    "_stack": "the dimensions of open plates",
    "_pyro_context": "within it, a PyroModule's attributes are one draw",
    "_pyro_name": "what the names of a PyroModule's parameters begin with",
    "_model": "the model that an automatic guide is of",
    "_pyro_params": "the constrained parameters of a PyroModule",
    "_pyro_dims": "the dimensions of a packed tensor",
    "_Context": "the base class of what gives a PyroModule's parameters their names",
    "_mask": "the mask inside a MaskedDistribution",
    "_slice_input": "how a Pyro kernel applies active_dims",
    "_load_pyro_samples": "how a GPModel draws its parameters",
    "_setup_prototype": "how the guides of an AutoGuideList are shown the model",
    "_create_plates": "the plates of the AutoGuideList that a guide is part of",
    "_guess_max_plate_nesting": "how Pyro's ELBOs count plates",
    "_params": "the parameter store without its constraints",
    "_constraints": "the parameter store is set aside whole",
    "_param_to_name": "the parameter store is set aside whole",
    # the standard library and numba
    "_asdict": "public in spite of its name: NamedTuple",
    "_fields": "public in spite of its name: NamedTuple",
    "_replace": "public in spite of its name: NamedTuple",
    "_cache": "where numba looks for the compiled code of a function",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_own(node: ast.Attribute) -> bool:
    """Whether it is an attribute of the object or the class whose method this is, or of its base class."""
    owner = node.value
    return ast.unparse(owner) in ("self", "cls", "super()", "type(self)", "self.__class__")


def bound_names(tree: ast.Module) -> set[str]:
    """The functions, classes, variables and attributes of its own objects that a file binds."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_private(node.attr) and is_own(node):
            names.add(node.attr)
    return names


def used_names(tree: ast.Module) -> Iterator[str]:
    """The names that a file takes from other files or from objects that are not its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node):
            yield node.attr
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
        ):
            yield from (argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant))


def private_names_of_others(tree: ast.Module) -> set[str]:
    return {name for name in used_names(tree) if is_private(name)} - bound_names(tree) - OF_OTHERS.keys()


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public functions, classes and methods without a docstring; ruff passes over those that `__all__` leaves out."""
    for node in public(tree):
        members = {f"{node.name}.{member.name}": member for member in public(node) if isinstance(node, ast.ClassDef)}
        yield from (name for name, one in {node.name: node, **members}.items() if ast.get_docstring(one) is None)


def public(parent: ast.Module | Definition) -> list[Definition]:
    """The public functions and classes inside, without the setters of properties and overloads, which the first of that name documents."""
    found = [node for node in parent.body if isinstance(node, Definition) and not node.name.startswith("_")]
    return [
        node for node in found if not any(ast.unparse(decorator).endswith((".setter", "overload")) for decorator in node.decorator_list)
    ]


def names_from_own_lists(root: Path, path: str, tree: ast.Module) -> Iterator[str]:
    """What a file imports from the `__init__` of a folder that it lies in: with the way back, that is a loop."""
    above = [] if path.startswith(ABOVE) or path.endswith("__init__.py") else path.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and above[: node.module.count(".") + 1] == node.module.split("."):
            folder = root.joinpath(*node.module.split("."))
            files = {file.stem for file in folder.glob("*")}
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in files)


def takes_models(path: str, tree: ast.Module) -> bool:
    """Whether a file below the models imports one; import-linter does not see it, for `models/` is mapped into the package."""
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return not path.startswith((*ABOVE, "models/")) and any(module.startswith("pyro_truncated.models") for module in modules)


def findings(root: Path) -> Iterator[str]:
    """Everything that breaks a rule."""
    folders = defaultdict(list)
    for file in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        path, text = file.relative_to(root).as_posix(), file.read_text()
        tree = ast.parse(text)
        folders[file.name].append(path.rpartition("/")[0])
        if text.count("\n") > LONGEST:
            yield f"{path}: longer than {LONGEST} lines"
        yield from (f"{path}: uses the private name {name}" for name in sorted(private_names_of_others(tree)))
        yield from (f"{path}: {name} has no docstring" for name in undocumented(tree))
        if takes_models(path, tree):
            yield f"{path}: imports models, which lie above it"
        yield from (f"{path}: takes {name} from the list of names of its own folder" for name in names_from_own_lists(root, path, tree))
    for name, places in folders.items():
        if name not in ("__init__.py", "__main__.py") and len(places) > 1 and not ONE_IDEA.issuperset(places):
            yield f"{name}: is the name of files in {', '.join(places)}"


if __name__ == "__main__":
    sys.exit("\n".join(findings(Path(__file__).parents[1])) or 0)
