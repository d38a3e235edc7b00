"""Detects populations that are used for other data."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_truncated.ops.streams import GOLDEN
from pyro_truncated.program.call import Call
from pyro_truncated.program.inspection import ordinary_tensors
from pyro_truncated.program.observed import ObservedValues
from pyro_truncated.program.probe import Probe
from pyro_truncated.program.sites import family, is_subsampled, sample_nodes
from pyro_truncated.utils.parameter_store import spare_random_numbers


class ChangedDataWarning(UserWarning):
    """The data differ from those that a guide's populations belong to.

    Example:
        >>> model, y = GaussianMixture(2, 3), torch.randn(10, 2)
        >>> guide = AutoTruncated(model.initialize(y), num_states=3)
        >>> loss = Truncated_ELBO().loss(model, guide, y)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     loss = Truncated_ELBO().loss(model, guide, y + 1)
        >>> [warning.category.__name__ for warning in caught]
        ['ChangedDataWarning']
    """


class SeenData:
    """A hash of each data point's observations when last used.

    It uses at most 32 entries per data point and observed site, so it is cheap. It detects other
    data, not every small correction. Observed values that are computed from latents are no data,
    and left out. Data outside data plates are not compared.
    """

    is_new = False

    def __init__(self, is_new: bool = False) -> None:
        self.is_new = is_new
        self._hashes: dict[str, Tensor] = {}
        self._computed_sites: set[str] = set()
        self._arguments: list[Any] | None = None
        self._observed = ObservedValues()
        # Data points are known as long as the arguments stay the same: `_last_round` holds the round of their last comparison.
        self._round = 0
        self._last_round: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arguments": None}

    def knows(self, call: Call) -> bool:
        """Whether the arguments are the very tensors of last time, unchanged."""
        now, last = _identities(call), self._arguments
        if now is None or last is None or len(now) != len(last):
            return False
        # References are compared by identity, of which a living tensor has one: equality would be that of the tensors' entries.
        pairs = zip(now, last, strict=True)
        return all(a is b or (not isinstance(a, weakref.ref) and not isinstance(b, weakref.ref) and a == b) for a, b in pairs)

    def compare(self, log_joint: Probe) -> None:
        """Checks new data, warns if they differ from last time, remembers them."""
        if not self.knows(log_joint.call):
            self._arguments = _identities(log_joint.call)
            self._round += 1
        where = slice(None) if log_joint.indices is None else log_joint.indices
        index = slice(None) if log_joint.plate_indices is None else log_joint.plate_indices.cpu()
        if self._last_round is None:
            with ordinary_tensors():
                self._last_round = torch.zeros(log_joint.full_size, dtype=torch.int32, device="cpu")
        if bool((self._last_round[index] == self._round).all()):
            return
        self._observed.check(log_joint)
        self._last_round[index] = self._round
        names = []
        for name, new in _hash_data(log_joint, log_joint.nodes).items():
            with ordinary_tensors():
                hashes = self._hashes[name] if name in self._hashes else new.new_zeros(log_joint.full_size)
                self._hashes[name] = hashes = hashes.to(new.device)
            old = hashes[where]
            if bool(((old != 0) & (old != new)).any()) and name not in self._computed_sites:
                names.append(name)
            hashes[where] = new
        if names:
            # Those that change between runs with equal arguments.
            with torch.no_grad(), spare_random_numbers():
                again = _hash_data(log_joint, sample_nodes(log_joint.run(log_joint.subsamples)))
            first = _hash_data(log_joint, log_joint.nodes)
            self._computed_sites |= {name for name in names if name not in again or not torch.equal(again[name], first[name])}
        if changed := [name for name in names if name not in self._computed_sites]:
            warnings.warn(
                f"the data observed at {changed} are not those that the populations were found for, so the bound may be loose. For new "
                "data use guide.infer(new_data, search, steps); for minibatches pass pyro.plate(name, num_data, subsample=positions).",
                ChangedDataWarning,
                stacklevel=4,
            )


def _identities(call: Call) -> list[Any] | None:
    """Returns a key that identifies arguments and their content."""
    identities: list[Any] = []
    leaves = tree_leaves((call.args, dict(call.kwargs)))
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not leaf.is_inference():
            identities += [weakref.ref(leaf), leaf._version]
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            identities.append(leaf)
        else:
            return None
    return identities if any(isinstance(leaf, Tensor) for leaf in leaves) else None


def _hash_data(log_joint: Probe, nodes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Hashes ``(N,)`` of the data points by observed site, never zero."""
    hashes = {}
    for name, value in log_joint.observations(nodes).items():
        node = nodes[name]
        others = [frame for frame in node["cond_indep_stack"] if frame.name not in log_joint.layout.plates]
        # Labels of a latent are put into the populations.
        is_label = name in log_joint.layout.sites
        if len(value) == log_joint.num_data and not any(map(is_subsampled, others)) and not is_label and family(node["fn"]) != "Delta":
            hashes[name] = _hash_rows(value.detach().reshape(len(value), -1))
    return hashes


def _hash_rows(rows: Tensor) -> Tensor:
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    rows = rows[:, :: -(-rows.shape[1] // 32) or 1]  # at most 32 entries of each
    # In one type, so that the same data in another precision are the same; minus zero is zero.
    bits = (rows.to(torch.float32) + 0.0).contiguous().view(torch.int32).long()
    factors = (torch.arange(1, bits.shape[1] + 1, device=rows.device) * GOLDEN) | 1
    hashes = (bits * factors).sum(1)
    return torch.where(hashes == 0, 1, hashes)
