"""The rules that `make lint` keeps by tests/house.py find what breaks them, and nothing else."""

from __future__ import annotations

import pytest

from tests.house import findings

DOC = '"""What it is."""\n'
BROKEN = {
    "imported": (DOC + "from pyro_truncated.states.space import _shift\n", "uses the private name _shift"),
    "module": (DOC + "import torch._inductor\n", "uses the private name _inductor"),
    "crowded": (DOC + f"def _f({', '.join('abcdefghi')}):\n    return 1\n", "_f has more than 8 parameters"),
    "crowded method": (DOC + f"class A:\n    def _f(self, {', '.join('abcdefghi')}):\n        return 1\n", "_f has more than 8 parameters"),
    "own list": (
        DOC + "from pyro_truncated.states import Population\n",
        "takes pyro_truncated.states.Population from the list of names of its own folder",
    ),
    "face": (
        DOC + "from pyro_truncated import AutoTruncated\n",
        "takes pyro_truncated.AutoTruncated from the list of names of its own folder",
    ),
}
LIES = {
    "class": DOC + 'class A:\n    """Returns twos."""\n',
    "generator": DOC + 'def A() -> Iterator[int]:\n    """Returns twos."""\n    yield 2\n',
    "list": DOC + 'def A() -> list[int]:\n    """Yields twos."""\n    return [2]\n',
}
BROKEN |= {name: (text, "A does not do what its docstring's first word says") for name, text in LIES.items()}
ALLOWED = {
    "of others": DOC + "from torch.utils import _pytree\n",
    "eight": DOC + f"class A:\n    def _f(self, {', '.join('abcdefgh')}):\n        return 1\n",
    "public": DOC + f"def f({', '.join('abcdefghi')}):\n    return 1\n",
    "yields": DOC + 'def f() -> Iterator[int]:\n    """Yields twos."""\n    yield 2\n',
    "generator expression": DOC + 'def f() -> Iterator[int]:\n    """Yields twos."""\n    return (2 for _ in "ab")\n',
    "file of the folder": DOC + "from pyro_truncated.states.space import StateSpace\nfrom pyro_truncated import states\n",
}


def house(root, **files: str):
    for path, text in {"pyro_truncated/__init__": DOC, "pyro_truncated/states/__init__": DOC, "models/__init__": DOC, **files}.items():
        file = root / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return list(findings(root))


@pytest.mark.parametrize("case", BROKEN)
def test_what_breaks_a_rule_is_found(case, tmp_path):
    text, what = BROKEN[case]
    assert house(tmp_path, **{"pyro_truncated/states/new": text}) == [f"pyro_truncated/states/new.py: {what}"]


@pytest.mark.parametrize("case", ALLOWED)
def test_what_breaks_none_is_not(case, tmp_path):
    assert house(tmp_path, **{"pyro_truncated/states/new": ALLOWED[case]}) == []


def test_files_of_one_name_hold_one_idea(tmp_path):
    one = ("pyro_truncated/ops/linear", "pyro_truncated/ops/compiled/linear", "pyro_truncated/distributions/linear", "models/linear")
    assert house(tmp_path, **dict.fromkeys(one, DOC)) == []
    (found,) = house(tmp_path, **{"pyro_truncated/states/linear": DOC})
    assert found.startswith("linear.py: is the name of files in models, ")
    assert found.endswith("pyro_truncated/states")


@pytest.mark.parametrize(
    ("text", "importers", "what"),
    [
        (
            DOC,
            1,
            ["pyro_truncated/states/new.py: is short, has one importer, and its docstring does not say why it is `A file of its own`"],
        ),
        (DOC, 2, []),
        (DOC + "\n" * 59, 1, []),
        ('"""What it is. A file of its own, for torch is slow to import."""\n', 1, []),
    ],
)
def test_short_files_with_one_importer_give_a_reason(text, importers, what, tmp_path):
    users = {f"pyro_truncated/states/user_{n}": DOC + "from pyro_truncated.states.new import f\n" for n in range(importers)}
    assert house(tmp_path, **{"pyro_truncated/states/new": text, **users}) == what


def test_kernels_take_as_many_arrays_as_they_need(tmp_path):
    assert house(tmp_path, **{"pyro_truncated/ops/compiled/new": DOC + f"def _f({', '.join('abcdefghi')}):\n    return 1\n"}) == []
