"""How objects that know best become ArviZ data: :func:`pyro_truncated.to_arviz` asks here, and whoever knows registers."""

from __future__ import annotations

import functools
from typing import Any


@functools.singledispatch
def convert_owner(owner: Any, *args: Any, **options: Any) -> Any:
    """Converts the posterior that an object holds, by the function that is registered for its class.

    Functions are registered by ``@convert_owner.register(Class)`` and called with the object, the model's arguments, and the options
    ``num_samples``, ``num_chains`` and ``seed``; so no model needs to know the diagnostics.

    Example:
        >>> class Mine:
        ...     posterior = {"x": [[1.0, 2.0]]}
        >>> from pyro_truncated.diagnostics import convert_owner
        >>> @convert_owner.register
        ... def _(owner: Mine, y, **options):
        ...     return az.from_dict(posterior=owner.posterior)
        >>> idata = to_arviz(Mine(), torch.zeros(2))

    Raises:
        TypeError: if there is none.
    """
    raise TypeError(f"no function is registered that converts a {type(owner).__name__} to ArviZ data (convert_owner.register)")


def has_converter(owner: Any) -> bool:
    """Whether a function is registered for the class of an object, or one of its bases."""
    return convert_owner.dispatch(type(owner)) is not convert_owner.dispatch(object)
