"""Runs that leave Pyro's parameter store and torch's random state unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state

from pyro_truncated.utils.isolation import spare_random_numbers
from pyro_truncated.utils.parameter_store import empty_store


@contextmanager
def apart(random_state: Any = 0) -> Iterator[torch.Generator]:
    """A context with an empty parameter store and its own random numbers.

    It seeds torch's global generator and the generator that it returns.

    Args:
        random_state: as everywhere in scikit-learn: a seed, a ``RandomState``, or ``None`` for NumPy's global one, of which one number is
            drawn.
    """
    seed = int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
    with empty_store(), spare_random_numbers():
        torch.manual_seed(seed)
        yield torch.Generator().manual_seed(seed)
