"""References to what is not part of the object that keeps them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Reference(Generic[T]):
    """Refers to what is no part of the object that keeps it.

    A copy refers to the same object, or to its copy if that was copied before; a pickle refers to nothing.
    Pyro's guides lose their lists when they are pickled, so that an ELBO must not take one along.
    """

    def __init__(self, value: T | None = None) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Reference[T]:
        return Reference(memo.get(id(self.value), self.value))

    def __reduce__(self) -> tuple[type[Reference[Any]], tuple[()]]:
        return Reference, ()
