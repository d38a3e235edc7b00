"""The rules that `make lint` keeps by tests/house.py find what breaks them, and nothing else."""

from __future__ import annotations

import pytest

from tests.house import findings

DOC = '"""What it is."""\n'
BROKEN = {
    "imported": (DOC + "from pyro_truncated.states.space import _shift\n", "uses the private name _shift"),
    "module": (DOC + "import torch._inductor\n", "uses the private name _inductor"),
    "attribute": (DOC + "def f(guide):\n    'Do.'\n    return guide._store\n", "uses the private name _store"),
    "by string": (DOC + "def f(guide):\n    'Do.'\n    return getattr(guide, '_store')\n", "uses the private name _store"),
    "long": (DOC + "\n" * 300, "longer than 300 lines"),
    "function": (DOC + "__all__ = []\ndef f():\n    return 1\n", "f has no docstring"),
    "method": (DOC + "class A:\n    'An A.'\n    def f(self):\n        return 1\n", "A.f has no docstring"),
    "own list": (
        DOC + "from pyro_truncated.states import Population\n",
        "takes pyro_truncated.states.Population from the list of names of its own folder",
    ),
    "model": (DOC + "def f():\n    'Do.'\n    from pyro_truncated.models import NoisyOr\n", "imports models, which lie above it"),
    "face": (
        DOC + "from pyro_truncated import AutoTruncated\n",
        "takes pyro_truncated.AutoTruncated from the list of names of its own folder",
    ),
}
ALLOWED = {
    "own attribute": DOC + "class A:\n    'An A.'\n    def __init__(self, other):\n        self._x = other._x\n",
    "inherited": DOC + "class A(B):\n    'An A.'\n    def __len__(self):\n        return self._x, super()._y, type(self)._z\n",
    "own function": DOC + "def _f():\n    return 1\n\nclass A:\n    'An A.'\n    f = staticmethod(_f)\n",
    "of others": DOC + "def f(tensor):\n    'Do.'\n    return tensor._version, tensor.__class__\n",
    "setter": DOC
    + "class A:\n    'An A.'\n    @property\n    def f(self):\n        'Do.'\n    @f.setter\n    def f(self, value):\n        pass\n",
    "file of the folder": DOC + "from pyro_truncated.states.space import StateSpace\nfrom pyro_truncated import states\n",
    "300 lines": DOC + "\n" * 299,
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
