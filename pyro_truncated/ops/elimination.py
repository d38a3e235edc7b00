"""Sums over products of sets by variable elimination along a bucket tree."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, is_vectorised

# Stands for a log probability of minus infinity (nats): sums of it stay finite, and so do differences and gradients.
IMPOSSIBLE = -1e12
# Joint states from which on a sum is a product of matrices, where it can be: below, that takes no less time.
_MIN_MATMUL_STATES = 2**14
# Variables of a forest from which on messages are compiled, and entries for each up to which that takes less time than torch.
_MIN_COMPILED, _MAX_COMPILED_ENTRIES = 256, 2**11
# Columns of the variables of compiled messages. Two name others: the parent (-1 of a root) and the last one of the component. Two count
# states and members of plates. Three say where states, messages to the parent and the table shared with it begin. The last one counts
# members that have such a table of their own.
PARENT, ROOT, SIZE, MEMBERS, STATES, MESSAGES, PAIRS, PAIR_MEMBERS = range(8)


@dataclasses.dataclass(frozen=True)
class LogTables:
    """Log densities as tables over states."""

    scopes: Sequence[tuple[int, ...]]  # by table, the variables that it is of
    shapes: Sequence[torch.Size]  # by table, its shape. One that is the same for all members of a plate has a one there.
    entries: Tensor  # those of all tables, one table after the other, in float64. Impossible ones are finite.
    dtypes: Sequence[torch.dtype]  # by table, the type that it was computed in

    @classmethod
    def from_parts(cls, parts: Sequence[tuple[tuple[int, ...], Tensor]]) -> LogTables:
        """Tables with the variables that they are of."""
        scopes, tables = zip(*parts, strict=True)
        entries = torch.cat([table.flatten() for table in tables]).double().clamp(min=IMPOSSIBLE)
        return cls(scopes, [table.shape for table in tables], entries, [table.dtype for table in tables])

    @property
    def dtype(self) -> torch.dtype:
        """The type of all tables together."""
        return functools.reduce(torch.promote_types, self.dtypes)

    @functools.cached_property
    def parts(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """The tables with their variables."""
        parts = self.entries.split([shape.numel() for shape in self.shapes])
        return [(scope, part.view(shape)) for scope, shape, part in zip(self.scopes, self.shapes, parts, strict=True)]


@dataclasses.dataclass(frozen=True)
class BucketTree:
    r"""The order in which a product's variables are summed out.

    Every table has one dimension for each colour, followed by the plate dimensions. A variable's states lie in the dimension of its colour,
    which no other variable of its cliques has. So tables add up by broadcasting. With the sets :math:`K_v` of states,

    .. math:: F = \log \sum_{s_1 \in K_1} \cdots \sum_{s_V \in K_V} \prod_f \psi_f(s) \prod_v e^{\theta_v(s_v)}.

    Source: Dechter, *Bucket elimination*, 1999; Obermeyer et al., *Tensor Variable Elimination for Plated Factor Graphs*, 2019.
    """

    order: tuple[int, ...]  # the variables in the order of their elimination
    separators: tuple[tuple[int, ...], ...]  # by variable, the others of its clique
    colours: tuple[int, ...]  # by variable, the number of its dimension
    plates: tuple[frozenset[int], ...]  # by variable, its plate dimensions (negative)
    depth: int  # number of plate dimensions

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

    @functools.cached_property
    def _forests(self) -> dict[Any, _Forest | None]:
        return {}

    def find_bucket(self, nodes: Sequence[int]) -> int:
        """The variable that a table is summed out with, its first."""
        return min(nodes, key=self.place.__getitem__)

    def lay_out(self, tables: LogTables, weights: Mapping[int, Tensor]) -> _Forest | None:
        """Where compiled messages have their numbers; ``None`` where torch sends them."""
        if len(self.order) < _MIN_COMPILED or is_vectorised(weights[self.order[0]]):
            return None
        if torch.is_grad_enabled() and tables.entries.requires_grad:
            return None
        key = tuple(zip(tables.scopes, tables.shapes, strict=True)), tuple(weights[node].shape for node in range(len(self.order)))
        if key not in self._forests:
            if len(self._forests) >= 8:
                self._forests.clear()
            self._forests[key] = _Forest.from_shapes(self, *key)
        return self._forests[key]


class _Forest(NamedTuple):
    """Where the numbers of compiled messages are."""

    order: np.ndarray  # the variables in the order of their elimination
    variables: np.ndarray  # a row for each, with the columns above
    tables: np.ndarray  # a row for each table
    state_sizes: list[int]  # number of entries of the states of each variable

    @classmethod
    def from_shapes(
        cls, tree: BucketTree, tables: Sequence[tuple[Sequence[int], torch.Size]], weights: Sequence[torch.Size]
    ) -> _Forest | None:
        """The places.

        ``None`` where cliques have more than two variables, or not the same plates, and where tables are large or differ along some plates.
        """
        pairs = zip(tree.separators, tree.parents, tree.plates, strict=True)
        if any(parent is not None and (len(others) > 1 or plates != tree.plates[parent]) for others, parent, plates in pairs):
            return None
        sizes = [shape[tree.dim(node)] for node, shape in enumerate(weights)]
        members = [shape.numel() // size for shape, size in zip(weights, sizes, strict=True)]
        pair_members, rows, begin = [1] * len(sizes), [], 0
        for scope, shape in tables:
            node, own_members = tree.find_bucket(scope), shape[len(shape) - tree.depth :].numel()
            if own_members not in (1, members[node]):
                return None
            strides = [math.prod(shape[dim + 1 :]) if size > 1 else 0 for dim, size in enumerate(shape)]
            parent = tree.parents[node] if len(scope) == 2 else None
            if parent is not None:
                pair_members[node] = max(pair_members[node], own_members)
            of_parent = 0 if parent is None else strides[tree.dim(parent)]
            rows.append((node, begin, strides[tree.dim(node)], of_parent, int(own_members > 1), int(parent is not None)))
            begin += shape.numel()
        variables, places = [], (0, 0, 0)
        for node, (size, number) in enumerate(zip(sizes, members, strict=True)):
            parent = tree.parents[node]
            above, of_pairs = (1, 0) if parent is None else (sizes[parent], size * sizes[parent] * pair_members[node])
            variables.append((-1 if parent is None else parent, tree.roots[node], size, number, *places, pair_members[node]))
            places = places[0] + size * number, places[1] + above * number, places[2] + of_pairs
        if begin + places[1] * max(sizes) > _MAX_COMPILED_ENTRIES * len(sizes):
            return None
        return cls(np.array(tree.order), np.array(variables), np.array(rows), [shape.numel() for shape in weights])


class _CompiledMessages(NamedTuple):
    """What compiled messages give."""

    beliefs: Sequence[Tensor]  # by variable, what each state adds to the evidence
    evidence: Mapping[int, Tensor]  # by variable that is a root, of its component
    gradient: Tensor  # of the evidence, by entry of the tables

    @classmethod
    def send(cls, forest: _Forest, tree: BucketTree, tables: LogTables, weights: Mapping[int, Tensor]) -> _CompiledMessages:
        """Sends messages to the roots and back."""
        entries = tables.entries.detach()
        flat = {id(own): own.detach().reshape(-1) for own in weights.values()}
        nodes = range(len(tree.order))
        log_weights = torch.cat([flat[id(weights[node])] for node in nodes])
        kernels = backend("elimination", entries)
        arrays = kernels.propagate(forest.order, forest.variables, forest.tables, entries.numpy(), log_weights.numpy(), IMPOSSIBLE)
        states, messages, gradient = map(torch.from_numpy, arrays)
        beliefs = [part.view(weights[node].shape) for node, part in zip(nodes, states.split(forest.state_sizes), strict=True)]
        evidence = {}
        for root in set(tree.roots.values()):
            place, members = forest.variables[root, [MESSAGES, MEMBERS]]
            shape = list(weights[root].shape)
            shape[tree.dim(root)] = 1
            evidence[root] = messages[place : place + members].view(shape)
        return cls(beliefs, evidence, gradient)


class Messages:
    """Sums (or maxima) of tables and messages in buckets, by variable.

    They are sent from the first variable to the last, and kept. Those of forests of many small variables are compiled. The log weights of
    a variable's states have the state in its dimension, and its plates. Maxima are for the most probable joint state.

    Attributes:
        may_be_impossible: whether some states may have probability zero.
    """

    def __init__(self, tree: BucketTree, tables: LogTables, weights: Mapping[int, Tensor], *, maximum: bool = False) -> None:
        self.tree, self.weights, self._tables = tree, dict(weights), tables
        self._reduce: Callable[..., Tensor] = torch.amax if maximum else torch.logsumexp
        self._joints: dict[int, Tensor] = {}
        self.may_be_impossible = True
        forest = None if maximum else tree.lay_out(tables, weights)
        self._compiled = None if forest is None else _CompiledMessages.send(forest, tree, tables, weights)
        if self._compiled is None:
            self._send_all()

    def _send_all(self) -> None:
        """Sends all messages by torch, which keeps each of them."""
        number = len(self.tree.order)
        self._compiled = None
        # Tables of two variables that are the same for all members of the plates lie apart: sums over them are products of matrices.
        self._sums: list[Tensor | None] = [None] * number
        self._pair_tables: list[Tensor | None] = [None] * number
        for nodes, table in self._tables.parts:
            bucket = self.tree.find_bucket(nodes)
            into = self._pair_tables if len(nodes) == 2 and table.shape[table.dim() - self.tree.depth :].numel() == 1 else self._sums
            previous = into[bucket]
            into[bucket] = table if previous is None else previous + table
        self._messages: list[Tensor | None] = [None] * number
        # How many of the messages in a bucket are impossible, and which entries of a message are. They are counted and not added up:
        # a message is taken out of a sum again, and what is left would be rounded as numbers of that size are.
        self._counts: list[Tensor | None] = [None] * number
        self._impossible: list[Tensor | None] = [None] * number
        different = {id(own): own for own in self.weights.values()}.values()
        parts = [part.detach().amin() for part in [*self._sums, *self._pair_tables, *different] if part is not None]
        self.may_be_impossible = bool(torch.stack(parts).amin() < IMPOSSIBLE / 2)
        for node in self.tree.order:
            self.send(node)

    def _send_singly(self) -> None:
        """Sends messages by torch if they were compiled."""
        if self._compiled is not None:
            self._send_all()

    def _own(self, node: int) -> Tensor:
        return self._with_impossible(self._finite(node), self._counts[node])

    def _finite(self, node: int) -> Tensor:
        total = self._sums[node]
        return torch.zeros_like(self.weights[node]) if total is None else total

    @staticmethod
    def _with_impossible(total: Tensor, count: Tensor | None) -> Tensor:
        return total if count is None else torch.where(count > 0, IMPOSSIBLE, total)

    def _sum_out(self, table: Tensor | None, other: Tensor, dims: Sequence[int]) -> Tensor:
        """Sums (or maximises) some dimensions of two tables' product out."""
        if table is not None and len(dims) == 1 and self._reduce is torch.logsumexp:
            product = _log_matmul(table, other, dims[0])
            if product is not None:
                return product
        return self._reduce(_add(table, other), dims, keepdim=True)

    def send(self, node: int) -> None:
        """Sums a variable out, and sends the rest to its parent's bucket."""
        tree, parent = self.tree, self.tree.parents[node]
        message = self._sum_out(self._pair_tables[node], self._own(node) + self.weights[node], [tree.dim(node)])
        if parent is None:
            self._messages[node] = message
            return
        count = None
        if self.may_be_impossible:
            is_impossible = message.detach() < IMPOSSIBLE / 2
            if bool(is_impossible.any()):
                message, count = message.masked_fill(is_impossible, 0.0), is_impossible.double()
        # The plates of the variable beyond those of its clique.
        outer_dims = sorted(tree.plates[node].difference(*(tree.plates[other] for other in tree.separators[node])))
        self._sums[parent] = _replace(self._sums[parent], self._messages[node], message, outer_dims)
        self._counts[parent] = _replace(self._counts[parent], self._impossible[node], count, outer_dims)
        self._messages[node], self._impossible[node] = message, count

    def evidence(self, node: int) -> Tensor:
        """The log sum over a component's states, by its last variable."""
        message = self._messages[node] if self._compiled is None else self._compiled.evidence[node]
        assert message is not None
        return message

    def message_from_above(self, node: int, messages: Mapping[int, Tensor]) -> Tensor:
        """What a variable's clique gets from its parent's, given what that gets."""
        tree, parent = self.tree, self.tree.parents[node]
        if parent is None:
            return self.weights[node].new_zeros((1,) * tree.num_dims)
        message = self._messages[node]
        assert message is not None
        count, own = self._counts[parent], self._impossible[node]
        others_count = count if count is None or own is None else count - own
        rest = self._with_impossible(self._finite(parent) - message, others_count) + self.weights[parent]
        dims = [tree.dim(other) for other in (parent, *tree.separators[parent]) if other not in tree.separators[node]]
        if not dims:
            return _add(self._pair_tables[parent], rest) + messages[parent]
        pair_table = self._pair_tables[parent]
        if pair_table is not None and all(rest.shape[dim] == 1 for dim in dims):
            # The parent's states stay: only those above it are summed out.
            return rest + self._sum_out(pair_table, messages[parent], dims)
        return self._sum_out(pair_table, rest + messages[parent], dims)

    def _belief(self, node: int, down: Tensor) -> Tensor:
        others = [self.tree.dim(other) for other in self.tree.separators[node]]
        own, pair_table = self._own(node), self._pair_tables[node]
        if not others:
            return own
        if pair_table is not None and all(own.shape[dim] == 1 for dim in others):
            return own + self._sum_out(pair_table, down, others)
        return self._reduce(_add(pair_table, own + down), others, keepdim=True)

    @functools.cached_property
    def above(self) -> dict[int, Tensor]:
        """By variable, the message that its clique gets from above."""
        self._send_singly()
        messages: dict[int, Tensor] = {}
        for node in reversed(self.tree.order):
            messages[node] = self.message_from_above(node, messages)
        return messages

    def posterior(self, scopes: Sequence[Sequence[int]], shapes: Sequence[torch.Size]) -> list[Tensor]:
        r"""Returns the posterior :math:`q_f(s_{v \in f})` of the states of each table.

        It is the gradient of :math:`F` with respect to the table, and zero where no joint state is possible.
        """
        self._send_singly()
        return [self._table_posterior(self.tree.find_bucket(scope), shape) for scope, shape in zip(scopes, shapes, strict=True)]

    def gradient(self) -> Tensor:
        """Returns the gradient of :math:`F` in the entries of all tables."""
        if self._compiled is not None:
            return self._compiled.gradient
        posterior = self.posterior(self._tables.scopes, self._tables.shapes)
        return torch.cat([table.flatten() for table in posterior])

    def _table_posterior(self, node: int, shape: torch.Size) -> Tensor:
        posterior = self._joints.get(node)
        if posterior is None:
            pair_table, evidence = self._pair_tables[node], self.evidence(self.tree.roots[node])
            own, down = self._own(node) + self.weights[node], self.above[node] - evidence
            others = [self.tree.dim(other) for other in self.tree.separators[node]]
            pair = None if pair_table is None else _pair_posterior(pair_table, own, down, shape)
            if pair is not None:
                return pair
            if pair_table is not None and all(own.shape[dim] == shape[dim] == 1 for dim in others):
                posterior = self._as_posterior(own + self._sum_out(pair_table, down, others), evidence)
            else:
                posterior = self._joints[node] = self._as_posterior(_add(pair_table, own) + down, evidence)
        beyond = [dim for dim, (size, target) in enumerate(zip(posterior.shape, shape, strict=True)) if size != target]
        return posterior.sum(beyond, keepdim=True) if beyond else posterior

    def _as_posterior(self, logs: Tensor, evidence: Tensor) -> Tensor:
        return logs.exp().masked_fill(evidence < IMPOSSIBLE / 2, 0.0) if self.may_be_impossible else logs.exp()

    def beliefs(self) -> dict[int, Tensor]:
        r"""Returns what each state adds to :math:`e^F`, without its own weight.

        Where a set of states is searched, this logarithm is the fitness of a candidate.
        """
        if self._compiled is not None:
            return dict(enumerate(self._compiled.beliefs))
        return {node: self._belief(node, down) for node, down in self.above.items()}

    def select(self, choose: Callable[[int, Tensor], Tensor | None]) -> None:
        """Visits the variables in turn, with the newest weights of all others.

        ``choose`` maps a variable and the belief of its states to new log weights of these, or to ``None``.
        """
        self._send_singly()
        tree = self.tree
        above: dict[int, Tensor] = {}
        for root in (node for node in self.tree.order if tree.parents[node] is None):
            stack = [(root, False)]
            while stack:
                node, is_done = stack.pop()
                if not is_done:
                    above[node] = self.message_from_above(node, above)
                    weights = choose(node, self._belief(node, above[node]))
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
        self._send_singly()
        tree = self.tree
        draws: dict[int, tuple[Tensor, Tensor]] = {}
        for node in reversed(tree.order):
            table = (_add(self._pair_tables[node], self._own(node)) + self.weights[node]).unsqueeze(0)
            for other in tree.separators[node]:
                table = torch.take_along_dim(table, draws[other][0], dim=tree.dim(other))
            logits = table.movedim(tree.dim(node), -1).log_softmax(-1)
            if num_samples is None:
                state = logits.argmax(-1, keepdim=True)
            else:
                logits = logits.expand(num_samples, *logits.shape[1:])
                flat = torch.multinomial(logits.exp().flatten(0, -2), 1, generator=generator)
                state = flat.reshape(*logits.shape[:-1], 1)
            log_prob = logits.gather(-1, state).squeeze(-1)
            position = tree.dim(node) % (tree.num_dims + 1)
            draws[node] = state.squeeze(-1).unsqueeze(position), log_prob.unsqueeze(position)
        return draws


def _add(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other


def _other_dim(table: Tensor, dim: int) -> int | None:
    """The second dimension of a table of two variables."""
    dims = [other for other in range(-table.dim(), 0) if table.shape[other] > 1]
    return sum(dims) - dim if len(dims) == 2 and dim in dims else None


def _log_matmul(table: Tensor, other: Tensor, dim: int) -> Tensor | None:
    r"""Returns :math:`\log \sum_v e^{A(v, u) + B(v, n)}`, a product of matrices.

    It is ``None`` where it would be rounded, and where it would save nothing.
    """
    out = _other_dim(table, dim)
    if out is None or other.shape[out] > 1 or other.shape[dim] == 1:
        return None
    # On a device the check for underflow would wait.
    if table.device.type != "cpu" or table.shape[out] * other.numel() < _MIN_MATMUL_STATES:
        return None
    matrix = table.movedim((out, dim), (-2, -1)).flatten(0, -2)
    columns = other.movedim(dim, 0)
    flat = columns.flatten(1)
    top, left = matrix.amax(1, keepdim=True), flat.amax(0, keepdim=True)
    product = (matrix - top).exp() @ (flat - left).exp()
    # A larger sum of products has lost nothing to underflow.
    if not bool(product.amin() > 1e-200):  # far above the smallest number of float64
        return None
    total = (product.log() + top + left).view(len(matrix), *columns.shape[1:])
    return total.movedim(0, dim).transpose(dim, out)


def _pair_posterior(table: Tensor, own: Tensor, down: Tensor, shape: torch.Size) -> Tensor | None:
    r"""Returns :math:`e^{A(v, u)} \sum_n e^{B(v, n) + C(u, n)}`, summed to a shape.

    The sum over members of plates is a product of matrices. It is ``None`` where it would be rounded, and where it would save nothing.
    """
    first = next((dim for dim in range(-table.dim(), 0) if table.shape[dim] > 1 and own.shape[dim] > 1), None)
    second = None if first is None else _other_dim(table, first)
    if first is None or second is None or own.shape[second] > 1 or down.shape[first] > 1 or shape != table.shape:
        return None
    if table.device.type != "cpu" or table.shape[second] * own.numel() < _MIN_MATMUL_STATES:
        return None
    left, right = own.movedim((first, second), (0, 1)).squeeze(1), down.movedim((second, first), (0, 1)).squeeze(1)
    members = torch.broadcast_shapes(left.shape[1:], right.shape[1:])
    left, right = (part.expand(len(part), *members).flatten(1) for part in (left, right))
    tops = [part.amax(0) for part in (left, right)]
    # The exponential function of so many nats is far from the limits of float64.
    most_nats = 250.0
    if not bool((tops[0] + tops[1]).abs().amax() < most_nats) or not bool(table.amax() < most_nats):
        return None
    product = (left - tops[0]).exp() @ (right + tops[0]).exp().mT
    return table.exp() * (product if first < second else product.mT).reshape(shape)


def _replace(total: Tensor | None, old: Tensor | None, new: Tensor | None, outer_dims: Sequence[int]) -> Tensor | None:
    """A sum of messages with one, added up over plates, replaced."""
    for message, sign in ((new, 1), (old, -1)):
        if message is not None:
            part = message.sum(list(outer_dims), keepdim=True) if outer_dims else message
            total = sign * part if total is None else torch.add(total, part, alpha=sign)
    return total
