"""What has been found out about data on a device is remembered: to look at it again would be to wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# By tensor (that of the memory, for views), which view of it, and what is asked. A changed tensor is another.
_facts: Any = WeakIdKeyDictionary()


def known_of(value: Tensor, question: str, find_out: Callable[[], Tensor]) -> bool:
    """The answer to a question about the entries of a tensor.

    On the CPU, where memory may be shared with arrays that change unseen, it is found out whenever it is asked.

    Args:
        value: the tensor.
        question: names what is asked.
        find_out: gives the answer as a Boolean scalar.
    """
    if not _is_remembered(value):
        return bool(find_out())
    answers, key = _answers(value), _key(value, question)
    if key not in answers:
        answers[key] = bool(find_out())
    return answers[key]


def is_noted(value: Tensor, question: str) -> bool:
    """Whether it is remembered that the answer to a question about a tensor is yes."""
    return _is_remembered(value) and _answers(value).get(_key(value, question), False)


def note_of(value: Tensor, question: str, answer: bool) -> None:
    """Remembers the answer to a question about a tensor, where answers are remembered."""
    if _is_remembered(value):
        _answers(value)[_key(value, question)] = answer


def _is_remembered(value: Tensor) -> bool:
    # Whether an inference tensor has been changed since cannot be told.
    return not value.is_cpu and not value.is_inference()


def _answers(value: Tensor) -> dict[Any, bool]:
    owner = value if value._base is None else value._base
    version, answers = _facts.get(owner, (None, {}))
    if version != value._version:
        answers = {}
        _facts[owner] = value._version, answers
    known: dict[Any, bool] = answers
    return known


def _key(value: Tensor, question: str) -> Any:
    return question, value.dtype, value.shape, value.stride(), value.storage_offset()
