"""Variable elimination on a bucket tree against brute force over random tables."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from pyro_truncated.ops import elimination
from pyro_truncated.ops.elimination import IMPOSSIBLE, BucketTree, LogTables, Messages
from pyro_truncated.program.factor_graph import _colour, eliminate

PLATE = ("data", -1, 3)


class Problem:
    """Random tables over variables, some in a plate of three members, of different numbers of states.

    Args:
        sizes: numbers of states.
        in_plate: which variables lie in the plate.
        scopes: the variables of each table.
        zeros: share of entries that are impossible.
        shared: whether tables of several variables are the same for all members of the plate.
    """

    def __init__(self, sizes, in_plate, scopes, zeros, generator, shared=False):
        self.sizes, self.in_plate, self.scopes = sizes, in_plate, scopes
        nodes = list(range(len(sizes)))
        places = [frozenset({PLATE}) if node in in_plate else frozenset() for node in nodes]
        separators = eliminate(nodes, scopes, places.__getitem__, sizes.__getitem__)
        assert separators is not None
        order = tuple(separators)
        colours = _colour(order, separators)
        plates = tuple(frozenset({-1} if node in in_plate else ()) for node in nodes)
        self.tree = BucketTree(order, tuple(tuple(separators[n]) for n in nodes), tuple(colours[n] for n in nodes), plates, 1)
        self.tables = []
        for scope in scopes:
            shape = [1] * self.tree.num_dims
            for node in scope:
                shape[self.tree.dim(node)] = sizes[node]
            if set(scope) & set(in_plate) and not (shared and len(scope) > 1):
                shape[-1] = PLATE[2]
            table = torch.randn(shape, generator=generator, dtype=torch.float64)
            table[torch.rand(shape, generator=generator) < zeros] = -torch.inf
            self.tables.append((scope, table))
        self.weights = {}
        for node in nodes:
            shape = [1] * self.tree.num_dims
            shape[self.tree.dim(node)] = sizes[node]
            if node in in_plate:
                shape[-1] = PLATE[2]
            weight = torch.zeros(shape, dtype=torch.float64)
            # Ragged sets: the last state is no member somewhere.
            weight.select(self.tree.dim(node), -1)[torch.rand(weight.select(self.tree.dim(node), -1).shape, generator=generator) < 0.3] = (
                IMPOSSIBLE
            )
            self.weights[node] = weight
        # A global variable has one state, one in a plate one for each member.
        self.entries = [(n, m) for n in nodes for m in (range(PLATE[2]) if n in in_plate else [0])]
        self.states = torch.tensor(list(itertools.product(*(range(sizes[node]) for node, _ in self.entries))))

    def log_weights(self, states, weights=None):
        """The log weight of each joint state ``(T, E)``, entry by entry of the tables."""
        value = dict(zip(self.entries, states.unbind(-1), strict=True))
        total = torch.zeros(len(states), dtype=torch.float64)
        for scope, table in [*self.tables, *(((node,), weight) for node, weight in (weights or self.weights).items())]:
            for member in range(PLATE[2] if set(scope) & set(self.in_plate) else 1):
                place = [0] * self.tree.num_dims
                for node in scope:
                    place[self.tree.dim(node)] = value[node, member if node in self.in_plate else 0]
                place[-1] = min(member, table.shape[-1] - 1)
                total += table[tuple(place)]
        return total

    def evidence(self, weights=None):
        return self.log_weights(self.states, weights).logsumexp(0)

    def found(self, **options):
        messages = Messages(self.tree, LogTables.from_parts(self.tables), self.weights, **options)
        roots = [node for node in self.tree.order if self.tree.parents[node] is None]
        return messages, sum(messages.evidence(root).sum() for root in roots)


GRAPHS = {
    "chain": ([2, 3, 2, 3], [], [(0,), (0, 1), (1, 2), (2, 3), (3,)]),
    "ring": ([2, 2, 3, 2], [], [(0, 1), (1, 2), (2, 3), (3, 0)]),
    "second order": ([2, 2, 2, 2, 2], [], [(0, 1, 2), (1, 2, 3), (2, 3, 4)]),
    "two components": ([3, 2, 2, 2], [], [(0, 1), (2, 3)]),
    "hierarchy": ([2, 3], [1], [(0,), (0, 1), (1,)]),
    "two in a plate": ([2, 2, 2], [1, 2], [(0, 1), (1, 2), (0, 2)]),
    "uncoupled plates": ([3, 2], [1], [(0,), (1,)]),
    "pair in a plate": ([2, 3], [0, 1], [(0,), (0, 1), (1,)]),
}
CASES = [(name, zeros, seed) for name in GRAPHS for zeros in (0.0, 0.15) for seed in range(3)]


@pytest.fixture(autouse=True, params=itertools.product([False, True], [False, True]), ids=str)
def shared(request, monkeypatch):
    """Whether tables are shared by the members of a plate, and small sums are products of matrices as large ones are.

    Besides, whether messages of small forests are compiled as those of large ones are.
    """
    is_shared, is_compiled = request.param
    if is_shared:
        monkeypatch.setattr(elimination, "_MIN_MATMUL_STATES", 1)
    if is_compiled:
        monkeypatch.setattr(elimination, "_MIN_COMPILED", 1)
    return is_shared


def problem(name, zeros, seed):
    return Problem(*GRAPHS[name], zeros, torch.Generator().manual_seed(seed), shared=elimination._MIN_MATMUL_STATES == 1)


def equal(found, expected):
    found, expected = float(found), float(expected)
    return (found < IMPOSSIBLE / 2 and expected < IMPOSSIBLE / 2) or found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("name", "zeros", "seed"), CASES)
def test_evidence_and_maximum_equal_brute_force(name, zeros, seed):
    own = problem(name, zeros, seed)
    assert equal(own.found()[1], own.evidence())
    assert equal(own.found(maximum=True)[1], own.log_weights(own.states).max())


@pytest.mark.parametrize(("name", "zeros", "seed"), CASES)
def test_the_most_probable_state_is_that_of_brute_force(name, zeros, seed):
    own = problem(name, zeros, seed)
    messages, best = own.found(maximum=True)
    if best < IMPOSSIBLE / 2:
        return
    drawn = messages.draw(None)
    state = torch.tensor([[int(drawn[node][0].reshape(-1)[member]) for node, member in own.entries]])
    assert equal(own.log_weights(state), best)


@pytest.mark.parametrize(("name", "zeros", "seed"), CASES)
def test_beliefs_are_what_each_state_adds_to_the_evidence(name, zeros, seed):
    own = problem(name, zeros, seed)
    messages, whole = own.found()
    if whole < IMPOSSIBLE / 2:
        return
    beliefs = messages.beliefs()
    components = {node: root for root in own.tree.order if own.tree.parents[root] is None for node in below(own.tree, root)}
    for node, member in own.entries:
        belief = beliefs[node].movedim(own.tree.dim(node), 0).expand(own.sizes[node], *[-1] * (own.tree.num_dims - 1))
        belief = belief.reshape(own.sizes[node], -1)
        own_root = messages.evidence(components[node])
        for state in range(own.sizes[node]):
            only = {**own.weights, node: own.weights[node].clone()}
            row = only[node].movedim(own.tree.dim(node), 0)[..., min(member, only[node].shape[-1] - 1)].reshape(own.sizes[node], -1)
            row.fill_(IMPOSSIBLE)
            row[state] = 0.0
            # Where a root has members, the others of them are no part of its evidence.
            expected = own.evidence(only) - (whole - own_root.reshape(-1)[min(member, own_root.numel() - 1)])
            assert equal_loosely(belief[state, min(member, belief.shape[1] - 1)], expected), (node, member, state)


def below(tree, root):
    found = [root]
    for node in found:
        found.extend(tree.children[node])
    return found


def equal_loosely(found, expected):
    found, expected = float(found), float(expected)
    return (found < IMPOSSIBLE / 4 and expected < IMPOSSIBLE / 4) or found == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(("name", "zeros", "seed"), CASES)
def test_a_selection_that_keeps_the_best_states_never_lowers_the_evidence(name, zeros, seed):
    own = problem(name, zeros, seed)
    for node, weight in own.weights.items():  # start with all but the last states
        weight.zero_()
        weight.select(own.tree.dim(node), -1).fill_(IMPOSSIBLE)
    messages, before = own.found()

    def choose(node, belief):
        dim = own.tree.dim(node)
        shape = [1] * own.tree.num_dims
        shape[dim] = own.sizes[node]
        if node in own.in_plate:
            shape[-1] = PLATE[2]
        best = belief.expand(shape).topk(own.sizes[node] - 1, dim).indices
        own.weights[node] = torch.full(shape, IMPOSSIBLE, dtype=torch.float64).scatter(dim, best, 0.0)
        return own.weights[node]

    messages.select(choose)
    own.weights = messages.weights
    after = own.found()[1]
    assert after >= before - 1e-9
    roots = [node for node in own.tree.order if own.tree.parents[node] is None]
    assert equal_loosely(sum(messages.evidence(root).sum() for root in roots), after)


@pytest.mark.parametrize("name", GRAPHS)
def test_draws_have_the_frequencies_of_the_joint_distribution(name):
    own = problem(name, 0.0, 7)
    messages, whole = own.found()
    number = 4000
    drawn = messages.draw(number, torch.Generator().manual_seed(0))
    states = torch.stack([drawn[node][0].reshape(number, -1)[:, member] for node, member in own.entries], -1)
    counts = Counter(map(tuple, states.tolist()))
    log_probs = sum(drawn[node][1].reshape(number, -1).sum(1) for node in drawn)
    expected = number * (own.log_weights(own.states) - whole).exp()
    found = torch.tensor([counts[tuple(state)] for state in own.states.tolist()])
    # Six standard errors, and one for skewness: false alarms in fewer than one of a million runs.
    assert bool(((found - expected).abs() <= 1 + 6 * (expected * (1 - expected / number)).sqrt()).all())
    torch.testing.assert_close(log_probs, own.log_weights(states) - whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("zeros", [0.0, 0.15])
@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("name", ["chain", "hierarchy", "pair in a plate"])
def test_the_posterior_of_a_table_is_the_gradient_of_the_evidence(name, scale, zeros):
    own = problem(name, zeros, 3)
    own.weights = {node: torch.zeros_like(weight) for node, weight in own.weights.items()}
    tables = [(scale * table.nan_to_num(neginf=IMPOSSIBLE / scale)).requires_grad_() for _, table in own.tables]
    own.tables = [(scope, table) for (scope, _), table in zip(own.tables, tables, strict=True)]
    evidence = own.found()[1]
    if evidence < IMPOSSIBLE / 2:
        return
    gradients = torch.autograd.grad(evidence, tables)
    with torch.no_grad():
        found = own.found()[0].posterior(own.scopes, [table.shape for table in tables])
    for posterior, gradient, table in zip(found, gradients, tables, strict=True):
        torch.testing.assert_close(posterior.expand_as(table), gradient, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        entries = own.found()[0].gradient()
    torch.testing.assert_close(entries, torch.cat([gradient.flatten() for gradient in gradients]), rtol=1e-9, atol=1e-9)
