"""Sums over products of sets by variable elimination along a bucket tree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

# Stands for a log probability of minus infinity (nats): sums of it stay finite, and so do differences and gradients.
IMPOSSIBLE = -1e12


@dataclasses.dataclass(frozen=True)
class BucketTree:
    r"""The order in which a product's variables are summed out.

    Every table has one dimension for each colour, followed by the plate dimensions. A variable's states lie in the dimension of its colour,
    which no other variable of its cliques has. So tables add up by broadcasting. With the sets :math:`K_v` of states,

    .. math:: F = \log \sum_{s_1 \in K_1} \cdots \sum_{s_V \in K_V} \prod_f \psi_f(s) \prod_v e^{\theta_v(s_v)}.

    Attributes:
        order: the variables in the order of their elimination.
        separators: by variable, the others of its clique.
        colours: by variable, the number of its dimension.
        plates: by variable, its plate dimensions (negative).
        depth: number of plate dimensions.

    Source: Dechter, *Bucket elimination*, 1999; Obermeyer et al., *Tensor Variable Elimination for Plated Factor Graphs*, 2019.
    """

    order: tuple[int, ...]
    separators: tuple[tuple[int, ...], ...]
    colours: tuple[int, ...]
    plates: tuple[frozenset[int], ...]
    depth: int

    def __post_init__(self) -> None:
        place = {node: position for position, node in enumerate(self.order)}
        parents = [min(others, key=place.__getitem__, default=None) for others in self.separators]
        children: list[list[int]] = [[] for _ in parents]
        for node in self.order:
            if (parent := parents[node]) is not None:
                children[parent].append(node)
        roots: dict[int, int] = {}
        for node in reversed(self.order):
            parent = parents[node]
            roots[node] = node if parent is None else roots[parent]
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "roots", roots)
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "children", children)

    place: Mapping[int, int] = dataclasses.field(init=False, repr=False)
    parents: Sequence[int | None] = dataclasses.field(init=False, repr=False)
    children: Sequence[Sequence[int]] = dataclasses.field(init=False, repr=False)
    roots: Mapping[int, int] = dataclasses.field(init=False, repr=False)

    @functools.cached_property
    def num_dims(self) -> int:
        """Number of dimensions of every table."""
        return max(self.colours) + 1 + self.depth

    def dim(self, node: int) -> int:
        """The dimension (negative) of a variable's states."""
        return -self.depth - 1 - self.colours[node]

    def find_bucket(self, nodes: Sequence[int]) -> int:
        """The variable that a table is summed out with, its first."""
        return min(nodes, key=self.place.__getitem__)

    def collect(self, tables: Sequence[tuple[Sequence[int], Tensor]], weights: Mapping[int, Tensor], *, maximum: bool = False) -> Messages:
        """Sends messages from the first variable to the last.

        Args:
            tables: log tables with the variables that they are of.
            weights: by variable, the log weights of its states, with the state in its dimension.
            maximum: whether to maximise over states in place of summing, for the most probable joint state.
        """
        sums: list[Tensor | None] = [None] * len(self.separators)
        for nodes, table in tables:
            bucket = self.find_bucket(nodes)
            held, table = sums[bucket], table.double().clamp(min=IMPOSSIBLE)
            sums[bucket] = table if held is None else held + table
        messages = Messages(self, sums, dict(weights), maximum)
        for node in self.order:
            messages.send(node)
        return messages


class Messages:
    """Sums (or maxima) of tables and messages in buckets, by variable.

    The messages that were sent are kept beside them.
    """

    def __init__(self, tree: BucketTree, sums: list[Tensor | None], weights: dict[int, Tensor], maximum: bool = False) -> None:
        self.tree, self.weights = tree, weights
        self._sums = sums
        self._messages: list[Tensor | None] = [None] * len(sums)
        # How many of the messages in a bucket are impossible, and which entries of a message are. They are counted and not added up:
        # a message is taken out of a sum again, and what is left would be rounded as numbers of that size are.
        self._counts: list[Tensor | None] = [None] * len(sums)
        self._impossible: list[Tensor | None] = [None] * len(sums)
        self._reduce: Callable[..., Tensor] = torch.amax if maximum else torch.logsumexp
        parts = [part.detach().amin() for part in [*sums, *{id(own): own for own in weights.values()}.values()] if part is not None]
        self._may_be_impossible = bool(torch.stack(parts).amin() < IMPOSSIBLE / 2)

    def _sum(self, node: int) -> Tensor:
        return self._with_impossible(self._finite(node), self._counts[node])

    def _finite(self, node: int) -> Tensor:
        held = self._sums[node]
        return torch.zeros_like(self.weights[node]) if held is None else held

    @staticmethod
    def _with_impossible(held: Tensor, count: Tensor | None) -> Tensor:
        return held if count is None else torch.where(count > 0, IMPOSSIBLE, held)

    def send(self, node: int) -> None:
        """Sums a variable out, and sends the rest to its parent's bucket."""
        tree, parent = self.tree, self.tree.parents[node]
        message = self._reduce(self._sum(node) + self.weights[node], tree.dim(node), keepdim=True)
        if parent is None:
            self._messages[node] = message
            return
        count = None
        if self._may_be_impossible:
            is_impossible = message.detach() < IMPOSSIBLE / 2
            if bool(is_impossible.any()):
                message, count = message.masked_fill(is_impossible, 0.0), is_impossible.double()
        beyond = self._beyond(node)
        self._sums[parent] = _replace(self._sums[parent], self._messages[node], message, beyond)
        self._counts[parent] = _replace(self._counts[parent], self._impossible[node], count, beyond)
        self._messages[node], self._impossible[node] = message, count

    def _beyond(self, node: int) -> list[int]:
        """The plates of a variable beyond those of its clique."""
        tree = self.tree
        return sorted(tree.plates[node].difference(*(tree.plates[other] for other in tree.separators[node])))

    def evidence(self, node: int) -> Tensor:
        """The log sum over a component's states, by its last variable."""
        found = self._messages[node]
        assert found is not None
        return found

    def clique(self, node: int, above: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
        """A clique's log weights without its variable's, and the message from above."""
        tree, parent = self.tree, self.tree.parents[node]
        if parent is None:
            down = self._sum(node).new_zeros((1,) * tree.num_dims)
        else:
            sent = self._messages[node]
            assert sent is not None
            count, own = self._counts[parent], self._impossible[node]
            others_count = count if count is None or own is None else count - own
            rest = self._with_impossible(self._finite(parent) - sent, others_count) + self.weights[parent] + above[parent]
            gone = [tree.dim(other) for other in (parent, *tree.separators[parent]) if other not in tree.separators[node]]
            down = self._reduce(rest, gone, keepdim=True) if gone else rest
        return (self._sum(node) if parent is None else self._sum(node) + down), down

    def _belief(self, node: int, clique: Tensor) -> Tensor:
        others = [self.tree.dim(other) for other in self.tree.separators[node]]
        return self._reduce(clique, others, keepdim=True) if others else clique

    @functools.cached_property
    def cliques(self) -> dict[int, Tensor]:
        """Log weights of each clique's joint states, without the variable's own."""
        found: dict[int, Tensor] = {}
        above: dict[int, Tensor] = {}
        for node in reversed(self.tree.order):
            found[node], above[node] = self.clique(node, above)
        return found

    def posterior(self, scopes: Sequence[Sequence[int]], shapes: Sequence[torch.Size]) -> list[Tensor]:
        r"""Returns the posterior :math:`q_f(s_{v \in f})` of the states of each table.

        It is the gradient of :math:`F` with respect to the table, and zero where no joint state is possible.
        """
        tree, found = self.tree, []
        joint: dict[int, Tensor] = {}
        for scope, shape in zip(scopes, shapes, strict=True):
            node = tree.find_bucket(scope)
            if node not in joint:
                evidence = self.evidence(tree.roots[node])
                own = (self.cliques[node] + self.weights[node] - evidence).exp()
                joint[node] = own.masked_fill(evidence < IMPOSSIBLE / 2, 0.0) if self._may_be_impossible else own
            own = joint[node]
            beyond = [dim for dim, (size, wanted) in enumerate(zip(own.shape, shape, strict=True)) if size != wanted]
            found.append(own.sum(beyond, keepdim=True) if beyond else own)
        return found

    def beliefs(self) -> dict[int, Tensor]:
        r"""Returns what each state adds to :math:`e^F`, without its own weight.

        Where a set of states is searched, this logarithm is the fitness of a candidate.
        """
        return {node: self._belief(node, clique) for node, clique in self.cliques.items()}

    def select(self, choose: Callable[[int, Tensor], Tensor | None]) -> None:
        """Visits the variables in turn, with the newest weights of all others.

        ``choose`` maps a variable and the belief of its states to new log weights of these, or to ``None``.
        """
        tree = self.tree
        above: dict[int, Tensor] = {}
        for root in (node for node in self.tree.order if tree.parents[node] is None):
            stack = [(root, False)]
            while stack:
                node, is_done = stack.pop()
                if not is_done:
                    clique, above[node] = self.clique(node, above)
                    weights = choose(node, self._belief(node, clique))
                    if weights is not None:
                        self.weights[node] = weights
                    stack.append((node, True))
                    stack.extend((child, False) for child in tree.children[node])
                else:
                    self.send(node)

    def draw(self, num_samples: int | None, generator: torch.Generator | None = None) -> dict[int, tuple[Tensor, Tensor]]:
        """Draws joint states: by variable, positions and log probabilities, ``(B, 1, ..., plates)``.

        Without ``num_samples`` it is the most probable joint state, of messages that are maxima.
        """
        tree = self.tree
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for node in reversed(tree.order):
            table = (self._sum(node) + self.weights[node]).unsqueeze(0)
            for other in tree.separators[node]:
                table = torch.take_along_dim(table, found[other][0], dim=tree.dim(other))
            logits = table.movedim(tree.dim(node), -1).log_softmax(-1)
            if num_samples is None:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                logits = logits.expand(num_samples, *logits.shape[1:])
                flat = torch.multinomial(logits.exp().flatten(0, -2), 1, generator=generator)
                chosen = flat.reshape(*logits.shape[:-1], 1)
            log_prob = logits.gather(-1, chosen).squeeze(-1)
            position = tree.dim(node) % (tree.num_dims + 1)
            found[node] = chosen.squeeze(-1).unsqueeze(position), log_prob.unsqueeze(position)
        return found


def _replace(held: Tensor | None, old: Tensor | None, new: Tensor | None, beyond: Sequence[int]) -> Tensor | None:
    """A sum of messages with one, added up over plates, replaced."""
    for message, sign in ((new, 1), (old, -1)):
        if message is not None:
            total = message.sum(list(beyond), keepdim=True) if beyond else message
            held = sign * total if held is None else torch.add(held, total, alpha=sign)
    return held
