"""Old names of attributes, which still work and warn.

A file of its own, as models and diagnostics share it.
"""

from __future__ import annotations

import warnings
from typing import Any


class Renamed:
    """The old name of a method or property.

    Example:
        >>> class Scale:
        ...     def weigh(self):
        ...         return 7
        ...
        ...     weight_of = Renamed("weigh")
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     found = Scale().weight_of()
        >>> found, str(caught[0].message)
        (7, 'weight_of has a new name: use weigh')

    Args:
        name: the new name.

    Warns:
        DeprecationWarning: when the old name is used.
    """

    def __init__(self, name: str) -> None:
        self._name, self._old = name, name

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        warnings.warn(f"{self._old} has a new name: use {self._name}", DeprecationWarning, stacklevel=2)
        return getattr(instance, self._name)
