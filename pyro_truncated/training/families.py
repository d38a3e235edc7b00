"""Families of starts: within each of the two latents are exchanged, between them not, so that it means something if they agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pyro_truncated.training.agreement import Reached
from pyro_truncated.training.recombination import Member, Recombination
from pyro_truncated.training.starts import Start


class Head(NamedTuple):
    """The best of a family: with its populations, what it has reached, and whether its last steps were small ones."""

    member: Member
    start: Start
    is_settled: bool = False


class Families:
    """Two families, which starts join in turn.

    Args:
        recombination: exchanges latents between two members.
        settle: trains the model a little, in ever smaller steps, from where a member is.
    """

    def __init__(self, recombination: Recombination, settle: Callable[[Member], Start]) -> None:
        self._recombination, self._settle = recombination, settle
        self._heads: dict[int, Head] = {}

    @property
    def reached(self) -> list[Reached]:
        """What each family has reached."""
        return [head.start.reached for head in self._heads.values()]

    def join(self, number: int, found: Start) -> Start:
        """What the family has reached once its next start has joined it."""
        side, newcomer = number % 2, self._recombination.member(found.parameters)
        if side not in self._heads:
            self._heads[side] = Head(newcomer, found)
        else:
            child = self._recombination.cross(self._heads[side].member, newcomer)
            if child is not self._heads[side].member:
                self._heads[side] = Head(child, _as_start(child))
        # Each family has exchanged latents, once at least.
        if number > 2 and self._have_nothing_to_exchange():
            self._heads = {side: self._settled(head) for side, head in self._heads.items()}
        return self._heads[side].start

    def united(self) -> Start:
        """What both families have found, together."""
        one, other = (head.member for head in self._heads.values())
        return self._settle(self._recombination.cross(one, other))

    def _have_nothing_to_exchange(self) -> bool:
        members = [head.member for head in self._heads.values()]
        child = self._recombination.cross(*members)
        return any(child is member for member in members)

    def _settled(self, head: Head) -> Head:
        if head.is_settled:
            return head
        start = self._settle(head.member)
        return Head(self._recombination.member(start.parameters, near=head.member), start, is_settled=True)


def _as_start(member: Member) -> Start:
    return Start(Reached(member.free_energy, each=member.population.free_energy()), member.parameters, None)
