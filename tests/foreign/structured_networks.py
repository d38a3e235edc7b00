"""Structured programs on trees, grids and other networks: phylogenies, pedigrees, noisy-or networks, fields."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.ops.indexing import Vindex

from tests.foreign.structured import Structured, structured

_SIMPLEX = dist.constraints.simplex
_UNIT = dist.constraints.unit_interval


@structured
def phylogenetic_tree() -> Structured:
    """Felsenstein's pruning: letters at the inner nodes of a tree of four species, alignment sites in a plate."""

    def model(letters):
        rate = pyro.param("rate", torch.tensor(0.2), _UNIT)
        change = (1 - rate) * torch.eye(4) + rate / 4
        with pyro.plate("sites", letters.shape[1]):
            root = pyro.sample("root", dist.Categorical(torch.ones(4)))
            left = pyro.sample("left", dist.Categorical(Vindex(change)[root]))
            right = pyro.sample("right", dist.Categorical(Vindex(change)[root]))
            for leaf, parent in enumerate([left, left, right, right]):
                pyro.sample(f"leaf_{leaf}", dist.Categorical(Vindex(change)[parent]), obs=letters[leaf])

    return Structured(model, (torch.randint(4, (4, 2)),), full=4, nodes=3)


@structured
def tree_of_three_levels() -> Structured:
    """A tree of seven binary latents, noisy observations of all, trees in a plate."""

    def model(y):
        keep = pyro.param("keep", torch.tensor(0.8), _UNIT)
        with pyro.plate("trees", len(y)):
            state = {0: pyro.sample("z_0", dist.Bernoulli(0.5))}
            for node in range(1, 7):
                parent = state[(node - 1) // 2]
                state[node] = pyro.sample(f"z_{node}", dist.Bernoulli(parent * keep + (1 - parent) * (1 - keep)))
            for node in range(7):
                pyro.sample(f"y_{node}", dist.Normal(state[node], 0.8), obs=y[:, node])

    return Structured(model, (torch.randn(2, 7) + 0.5,), full=2, nodes=7)


@structured
def pedigree() -> Structured:
    """Genotypes in a family: parents, two children, a grandchild; phenotypes by genotype."""

    def model(y):
        freq, effect = pyro.param("freq", torch.tensor(0.3), _UNIT), pyro.param("effect", torch.tensor(1.0))
        founders = torch.stack([(1 - freq) ** 2, 2 * freq * (1 - freq), freq**2])
        give = torch.tensor([0.0, 0.5, 1.0])

        def child(a, b):
            a, b = give[a], give[b]
            return dist.Categorical(torch.stack([(1 - a) * (1 - b), a * (1 - b) + b * (1 - a), a * b], -1))

        people = [pyro.sample(f"g_{person}", dist.Categorical(founders)) for person in range(3)]
        people += [pyro.sample("g_3", child(people[0], people[1])), pyro.sample("g_4", child(people[0], people[1]))]
        people.append(pyro.sample("g_5", child(people[2], people[3])))
        for person, genotype in enumerate(people):
            pyro.sample(f"y_{person}", dist.Normal(effect * genotype, 0.7), obs=y[person])

    return Structured(model, (torch.randn(6),), full=3, nodes=6)


@structured
def noisy_or_network_with_missing_nodes() -> Structured:
    """Diseases and symptoms; some symptoms are not seen (``obs_mask``): unobserved twins of what is."""

    def model(seen, known):
        weight = pyro.param("weight", lambda: torch.rand(3, 4), _UNIT)
        with pyro.plate("patients", len(seen)):
            causes = [pyro.sample(f"disease_{d}", dist.Bernoulli(0.3)) for d in range(3)]
            for symptom in range(4):
                off = 0.9
                for d in range(3):
                    if (d + symptom) % 3:
                        off = off * (1 - weight[d, symptom] * causes[d])
                pyro.sample(f"symptom_{symptom}", dist.Bernoulli(1 - off), obs=seen[:, symptom], obs_mask=known[:, symptom])

    known = torch.tensor([[True, True, False, True], [True, False, True, True]])
    return Structured(model, (torch.bernoulli(torch.full((2, 4), 0.5)), known), full=8)


@structured
def noisy_or_of_two_layers() -> Structured:
    """A deep noisy-or network: the middle layer is latent as well."""

    def model(seen):
        weight = pyro.param("weight", lambda: 0.2 + 0.7 * torch.rand(3, 3), _UNIT)
        top = [pyro.sample(f"top_{i}", dist.Bernoulli(0.4)) for i in range(2)]
        middle = []
        for j in range(4):
            off = 0.9 * (1 - weight[0, j % 3] * top[0]) * (1 - weight[1, j % 3] * top[1])
            middle.append(pyro.sample(f"middle_{j}", dist.Bernoulli(1 - off)))
        for k in range(3):
            off = 0.95 * (1 - weight[2, k] * middle[k]) * (1 - 0.8 * middle[k + 1])
            pyro.sample(f"leaf_{k}", dist.Bernoulli(1 - off), obs=seen[k])

    return Structured(model, (torch.tensor([1.0, 0.0, 1.0]),), full=4)


@structured
def grid_of_two_rows() -> Structured:
    """An Ising model on a grid 2 x L, by factors."""

    def model(y):
        couple = pyro.param("couple", torch.tensor(0.6))
        z = {}
        for column in range(5):
            for row in range(2):
                z[row, column] = pyro.sample(f"z_{row}_{column}", dist.Bernoulli(0.5))
                pyro.sample(f"y_{row}_{column}", dist.Normal(2 * z[row, column] - 1, 1.5), obs=y[row, column])
                if column:
                    same = (2 * z[row, column] - 1) * (2 * z[row, column - 1] - 1)
                    pyro.factor(f"along_{row}_{column}", couple * same)
            pyro.factor(f"across_{column}", couple * (2 * z[0, column] - 1) * (2 * z[1, column] - 1))

    return Structured(model, (torch.randn(2, 5),), full=2, nodes=10)


@structured
def ring() -> Structured:
    """A closed ring of Potts spins."""

    def model(y):
        couple = pyro.param("couple", torch.tensor(0.9))
        z = [pyro.sample(f"z_{i}", dist.Categorical(torch.ones(3))) for i in range(6)]
        for i in range(6):
            pyro.factor(f"same_{i}", couple * (z[i] == z[(i + 1) % 6]))
            pyro.sample(f"y_{i}", dist.Normal(z[i].to(y.dtype), 1.0), obs=y[i])

    return Structured(model, (torch.randn(6) + 1,), full=3, nodes=6)


@structured
def asia_with_two_patients() -> Structured:
    """A Bayes net of eight nodes with a loop (Lauritzen and Spiegelhalter), some symptoms observed."""

    def model(xray, cough):
        with pyro.plate("patients", len(xray)):
            asia = pyro.sample("asia", dist.Bernoulli(0.2))
            smokes = pyro.sample("smokes", dist.Bernoulli(0.5))
            tub = pyro.sample("tub", dist.Bernoulli(0.05 + 0.3 * asia))
            lung = pyro.sample("lung", dist.Bernoulli(pyro.param("lung_rate", torch.tensor(0.3), _UNIT) * smokes + 0.05))
            bronchitis = pyro.sample("bronchitis", dist.Bernoulli(0.3 + 0.3 * smokes))
            either = pyro.sample("either", dist.Bernoulli(1 - (1 - tub) * (1 - lung)))
            pyro.sample("xray", dist.Bernoulli(0.05 + 0.9 * either), obs=xray)
            pyro.sample("cough", dist.Bernoulli(0.1 + 0.4 * either + 0.4 * bronchitis), obs=cough)

    return Structured(model, (torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])), full=8)


@structured
def mixture_of_trees() -> Structured:
    """Which of two trees generates the leaves is itself a latent: a context-specific dependency."""

    def model(y):
        keep = pyro.param("keep", torch.tensor(0.85), _UNIT)
        which = pyro.sample("which", dist.Bernoulli(0.5))
        z = [pyro.sample("z_0", dist.Bernoulli(0.5))]
        for i in range(1, 6):
            first, second = z[(i - 1) // 2], z[i - 1]
            parent = which * first + (1 - which) * second
            z.append(pyro.sample(f"z_{i}", dist.Bernoulli(parent * keep + (1 - parent) * (1 - keep))))
        for i, one in enumerate(z):
            pyro.sample(f"y_{i}", dist.Normal(one, 0.6), obs=y[i])

    return Structured(model, (torch.rand(6),), full=2, nodes=7)


@structured
def error_correcting_code() -> Structured:
    """Bits behind a noisy channel with parity checks of probability zero or one."""

    def model(y):
        noise = pyro.param("noise", torch.tensor(0.8), dist.constraints.positive)
        bits = [pyro.sample(f"b_{i}", dist.Bernoulli(0.5)) for i in range(7)]
        for check, members in enumerate([(0, 1, 2), (2, 3, 4), (4, 5, 6)]):
            odd = sum(bits[i] for i in members).remainder(2)
            pyro.factor(f"check_{check}", torch.where(odd > 0, -torch.inf, 0.0))
        for i, bit in enumerate(bits):
            pyro.sample(f"y_{i}", dist.Normal(1 - 2 * bit, noise), obs=y[i])

    return Structured(model, (torch.randn(7),), full=2, nodes=7)


@structured
def alignment_of_two_words() -> Structured:
    """Offsets of letters that grow along a word: a site whose support depends on the one before, through a factor."""

    def model(y):
        stretch = pyro.param("stretch", torch.tensor(0.5))
        before = torch.tensor(0)
        for i in range(4):
            offset = pyro.sample(f"offset_{i}", dist.Categorical(torch.ones(6)))
            pyro.factor(f"grows_{i}", torch.where(offset < before, -torch.inf, -stretch * (offset - before)))
            pyro.sample(f"y_{i}", dist.Normal(offset.to(y.dtype), 0.6), obs=y[i])
            before = offset

    return Structured(model, (torch.tensor([0.3, 1.8, 3.1, 4.2]),), full=6, truncated=4, nodes=4)


@structured
def masked_edges() -> Structured:
    """A graph whose edges a mask switches on or off, data point by data point."""

    def model(y, edges):
        couple = pyro.param("couple", torch.tensor(1.2))
        with pyro.plate("graphs", len(y)):
            z = [pyro.sample(f"z_{i}", dist.Bernoulli(0.4)) for i in range(4)]
            for i in range(3):
                with poutine.mask(mask=edges[:, i]):
                    pyro.factor(f"edge_{i}", couple * (z[i] == z[i + 1]))
            for i in range(4):
                pyro.sample(f"y_{i}", dist.Normal(z[i], 1.0), obs=y[:, i])

    edges = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])
    return Structured(model, (torch.randn(3, 4), edges), full=2, nodes=4)
