"""Parameters of an earlier model in Pyro's store.

A function that uses the same names finds them in place of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyro
import pyro.poutine as poutine
import torch

from pyro_truncated.program.call import Call
from pyro_truncated.utils.parameter_store import empty_store, spare_random_numbers


@contextmanager
def naming_earlier_parameters(call: Call) -> Iterator[None]:
    """Names earlier parameters if a model fails for their shapes.

    It then runs without these.

    Raises:
        ValueError: naming the parameters, from the error that the model ended with.
    """
    try:
        yield
    except Exception as error:
        if others := _of_other_shapes(call):
            reason = str(error).partition("\n")[0]  # Pyro adds the shapes of all sites
            raise ValueError(
                f"the model fails ({reason}), as Pyro's parameter store holds parameters of an earlier model under the same names: "
                f"{', '.join(others)}. Call pyro.clear_param_store() before making the guide, or run each model under "
                '"with pyro.get_param_store().scope(state):".'
            ) from error
        raise


def _of_other_shapes(call: Call) -> list[str]:
    """Returns parameters whose shapes would differ with an empty store.

    There are none if the model does not run then either.
    """
    held = {name: value.shape for name, value in pyro.get_param_store().items()}
    if not held:
        return []
    try:
        with empty_store(), poutine.block(), torch.no_grad(), spare_random_numbers():
            call.trace()
            wanted = {name: value.shape for name, value in pyro.get_param_store().items()}
    except Exception:
        return []
    return [
        f"'{name}' of shape {tuple(held[name])} in the place of {tuple(shape)}"
        for name, shape in wanted.items()
        if held.get(name, shape) != shape
    ]
