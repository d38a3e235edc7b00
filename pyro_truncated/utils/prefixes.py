"""States of modules that were saved as part of another: names with a prefix, as ``DistributedDataParallel`` and Lightning write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class TakesPrefixed(torch.nn.Module):
    """A module that loads its state from what wrapped it, such as ``DistributedDataParallel``, whose names begin with ``module.``."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch does; a prefix that all names have in common, such as ``module.``, is taken off.

        Raises:
            RuntimeError: if names do not fit; naming the prefix, if those of this module are a part of them.
        """
        return super().load_state_dict(without_prefix(state_dict, self), strict, assign)


def without_prefix(state_dict: Mapping[str, Any], module: torch.nn.Module) -> Mapping[str, Any]:
    """The state by the names of a module.

    Raises:
        RuntimeError: if it is of something that the module was only a part of.
    """
    own = _first_names(module)
    if not isinstance(state_dict, Mapping) or any(_first(name) in own for name in state_dict):
        return state_dict
    prefixes = sorted({prefix for name in state_dict for prefix in _prefixes(name) if _first(name.removeprefix(prefix)) in own}, key=len)
    common = next((prefix for prefix in prefixes if all(name.startswith(prefix) for name in state_dict)), None)
    if common is not None:
        return {name.removeprefix(common): value for name, value in state_dict.items()}
    if prefixes:
        found = repr(prefixes[0])
        raise RuntimeError(
            f"the state is of something that this {type(module).__name__} was a part of: its names begin with {found} there. Load it where "
            f"it was saved, or pass {{name.removeprefix({found}): value for name, value in state.items() if name.startswith({found})}}"
        )
    return state_dict


def _first_names(module: torch.nn.Module) -> set[str]:
    names = (name for name, _ in (*module.named_children(), *module.named_parameters(), *module.named_buffers()))
    return {"_extra_state", *map(_first, names)}


def _first(name: str) -> str:
    return name.partition(".")[0]


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) + "." for end in range(1, len(parts)))
