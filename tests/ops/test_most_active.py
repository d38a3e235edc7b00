"""How many latents of states are active at most: followed on a device from states to states, never too few, and never stale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyro_truncated import StateSpace, ops
from pyro_truncated.ops.packed_states import most_active, note_most_active
from tests.pretended_device import PretendedDevice, here, there

SPACE = StateSpace([2] * 70)


def states(num_active: int = 6) -> Tensor:
    """States with so many active latents at most, of which one has as many."""
    values = torch.zeros(4, 9, 70, dtype=torch.int64)
    for n in range(4):
        for c in range(9):
            values[n, c, torch.randperm(70)[: min(c, num_active)]] = 1
    return SPACE.pack(values)


def count(words: Tensor) -> int:
    return int(SPACE.unpack(here(words), torch.int64).sum(-1).max())


def slabs(words: Tensor, num_latents: int = 70) -> Tensor:
    value, weight = torch.randn(4, 3).double(), torch.randn(3, num_latents).double()
    one = torch.ones(num_latents).double()
    return ops.spike_slab_log_prob(words, *map(there, (value, weight, torch.ones(3).double(), one, one)))


@pytest.mark.slow
def test_flips_and_selections_are_followed_without_a_look() -> None:
    torch.manual_seed(0)
    with PretendedDevice() as device:
        words = there(states())
        assert most_active(words) is None
        slabs(words)
        assert most_active(words) == 6
        parents = ops.gather_states(words, there(torch.tensor([[8, 3]]).expand(4, -1)))
        children = ops.flip_random(parents, SPACE.fields)
        assert most_active(parents, 0) == 6
        assert most_active(children) == 7 >= count(children)
        with ops.defer_checks():
            device.forget()
            scores = slabs(children)
            assert not any("active_latents" in line or "look" in line for line in device.syncs)
        kept, _ = ops.select_top(words, there(torch.randn(4, 9).double()), children, scores, 9)
        assert most_active(kept) == 7 >= count(kept)
        assert most_active(kept, 0) is None
        grandchildren = ops.flip_random(ops.flip_random(children, SPACE.fields), SPACE.fields)
        assert most_active(grandchildren) is None


def test_somebody_who_looks_tells_those_that_were_made_of_it() -> None:
    with PretendedDevice():
        words = there(states())
        note_most_active(words, 6)
        children = ops.flip_random(words, SPACE.fields)
        copies = ops.inherit_active_bound(children.clone(), children)
        assert most_active(copies) == 7
        note_most_active(children, 5)
        assert most_active(copies, 0) == 5


def test_what_has_changed_is_unknown() -> None:
    with PretendedDevice():
        words = there(states())
        note_most_active(words, 6)
        assert most_active(words[:2]) == 6
        words[:2] = words[:2] | 7
        assert most_active(words) is None
        assert most_active(ops.inherit_active_bound(words.clone(), words)) is None


def test_nothing_is_remembered_on_the_cpu() -> None:
    words = states()
    note_most_active(words, 6)
    assert most_active(words) is None


def test_rows_of_larger_tensors_are_looked_at_together() -> None:
    with PretendedDevice():
        words = there(states())
        slabs(words[:, :4])
        assert most_active(words) is None
        value, weight, ones = torch.randn(1, 3).double(), torch.randn(3, 70).double(), torch.ones(70).double()
        ops.spike_slab_log_prob(words[:1], *map(there, (value, weight, torch.ones(3).double(), ones, ones)))
        assert most_active(words) == most_active(words[2:3]) == 6


def test_too_small_a_number_is_found_out() -> None:
    with PretendedDevice():
        words = there(states())
        note_most_active(words, 4)
        with pytest.raises(RuntimeError, match="more active latents"), ops.defer_checks():
            slabs(words)
