"""Genetics and lifetimes: blood groups, pedigrees, trees, haplotypes; cure rates and frailties."""

import pyro
import pyro.distributions as dist
import torch
from pyro.ops.indexing import Vindex

from tests.foreign import Foreign, foreign

# Genotypes AA, AO, BB, BO, AB, OO and the blood group that each shows: A, B, AB, O.
SHOWN = torch.tensor([0, 0, 1, 1, 2, 3])


def _transmission() -> torch.Tensor:
    """P(child's number of copies | father's, mother's) of one allele."""
    passes = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    f, m = passes.unsqueeze(-1), passes
    return torch.stack([(1 - f) * (1 - m), f * (1 - m) + (1 - f) * m, f * m], -1)


@foreign
def blood_groups() -> Foreign:
    """ABO blood groups (Bernstein; the classic of the EM algorithm): genotypes in Hardy-Weinberg proportions are latent."""

    def model(groups):
        freq = pyro.sample("freq", dist.Dirichlet(torch.ones(3)))
        a, b, o = freq.unbind(-1)
        genotypes = torch.stack([a * a, 2 * a * o, b * b, 2 * b * o, 2 * a * b, o * o], -1)
        with pyro.plate("people", len(groups)):
            genotype = pyro.sample("genotype", dist.Categorical(genotypes))
            pyro.sample("group", dist.Categorical(torch.eye(4)[SHOWN[genotype]]), obs=groups)

    return Foreign(model, (torch.tensor([0, 0, 3, 1, 2]),), plates=("people",))


@foreign
def genotyping_error() -> Foreign:
    """Hardy-Weinberg genotypes read with errors: three-valued latent, binomial reads of the alternative allele."""

    def model(reads, depth):
        q = pyro.sample("q", dist.Beta(1.0, 1.0))
        error = pyro.param("error", torch.tensor(0.02), constraint=dist.constraints.unit_interval)
        with pyro.plate("data", len(reads)):
            copies = pyro.sample("copies", dist.Binomial(2, q))
            share = copies / 2
            pyro.sample("reads", dist.Binomial(depth, share * (1 - error) + (1 - share) * error), obs=reads)

    return Foreign(model, (torch.tensor([0.0, 4.0, 9.0]), torch.tensor([8.0, 9.0, 9.0])))


@foreign
def pedigree() -> Foreign:
    """BUGS volume 2, "Pigs": genotypes of a small inbred family, of which some members are seen."""

    def model(affected):
        q = pyro.sample("q", dist.Beta(1.0, 1.0))
        founders = torch.stack([(1 - q) ** 2, 2 * q * (1 - q), q**2], -1)
        child = _transmission()
        ann = pyro.sample("Ann", dist.Categorical(founders))
        brian = pyro.sample("Brian", dist.Categorical(founders))
        clare = pyro.sample("Clare", dist.Categorical(child[ann, brian]))
        diane = pyro.sample("Diane", dist.Categorical(child[ann, brian]))
        eric = pyro.sample("Eric", dist.Categorical(child[brian, clare]))
        for name, genotype in (("Clare", clare), ("Diane", diane), ("Eric", eric)):
            shows = (genotype == 2).to(q.dtype)
            pyro.sample(f"{name}_affected", dist.Bernoulli(0.98 * shows + 0.01), obs=affected[name])

    return Foreign(model, ({"Clare": torch.tensor(0.0), "Diane": torch.tensor(0.0), "Eric": torch.tensor(1.0)},), plates=())


@foreign
def phylogeny() -> Foreign:
    """A tree of four species: nucleotides at the inner nodes are summed out at each site of the alignment (Felsenstein)."""

    def model(alignment):
        length = pyro.sample("length", dist.Exponential(torch.full((6,), 5.0)).to_event(1))
        stay = torch.exp(-4 / 3 * length).unsqueeze(-1).unsqueeze(-1)
        transition = stay * torch.eye(4) + (1 - stay) / 4
        with pyro.plate("sites", alignment.shape[-1]):
            left = pyro.sample("left", dist.Categorical(torch.ones(4)))
            right = pyro.sample("right", dist.Categorical(Vindex(transition)[..., 4, left, :]))
            for species, parent in enumerate((left, left, right, right)):
                probs = Vindex(transition)[..., species, parent, :]
                pyro.sample(f"species_{species}", dist.Categorical(probs), obs=alignment[species])

    return Foreign(model, (torch.randint(4, (4, 3)),), plates=("sites",))


@foreign
def haplotypes() -> Foreign:
    """Haplotype phasing: two of four haplotypes in each person, only their sum is typed."""

    alleles = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])

    def model(typed):
        freq = pyro.sample("freq", dist.Dirichlet(torch.ones(4)))
        with pyro.plate("people", len(typed)):
            first = pyro.sample("first", dist.Categorical(freq))
            second = pyro.sample("second", dist.Categorical(freq))
            sums = alleles[first] + alleles[second]
            pyro.sample("typed", dist.Categorical(0.97 * torch.eye(3)[sums] + 0.01).to_event(1), obs=typed)

    return Foreign(model, (torch.tensor([[0, 1], [1, 1], [2, 0]]),), plates=("people",))


@foreign
def quantitative_trait_locus() -> Foreign:
    """Interval mapping of a quantitative trait: the genotype between two typed markers is latent."""

    def model(markers, trait):
        mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
        flank = torch.tensor([[0.02, 0.5], [0.5, 0.98]])
        with pyro.plate("plants", len(trait)):
            locus = pyro.sample("locus", dist.Bernoulli(flank[markers[:, 0], markers[:, 1]]))
            pyro.sample("trait", dist.Normal(mean[..., locus.long()], sigma), obs=trait)

    return Foreign(model, (torch.randint(2, (5, 2)), torch.randn(5)), plates=("plants",))


@foreign
def cure_rate() -> Foreign:
    """A Weibull cure-rate model (Farewell; Berkson and Gage): who is cured never has the event, censored or not."""

    def model(time, died):
        cured_rate = pyro.sample("cured_rate", dist.Beta(1.0, 1.0))
        scale = pyro.sample("scale", dist.Gamma(2.0, 1.0))
        shape = pyro.sample("shape", dist.Gamma(2.0, 2.0))
        with pyro.plate("patients", len(time)):
            cured = pyro.sample("cured", dist.Bernoulli(cured_rate))
            hazard = (shape / scale).log() + (shape - 1) * (time / scale).log()
            survival = -((time / scale) ** shape)
            uncured = torch.where(died > 0, hazard + survival, survival)
            impossible = torch.where(died > 0, -torch.inf, 0.0)
            pyro.factor("survival", torch.where(cured > 0, impossible, uncured))

    return Foreign(model, (torch.tensor([0.5, 2.0, 5.0]), torch.tensor([1.0, 0.0, 0.0])), plates=("patients",))


@foreign
def mice() -> Foreign:
    """BUGS volume 1, "Mice": Weibull survival in groups, here with a latent class of frail cages."""

    def model(time):
        rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("cages", time.shape[-1], dim=-1):
            frail = pyro.sample("frail", dist.Bernoulli(0.4))
            with pyro.plate("mice", time.shape[0], dim=-2):
                pyro.sample("time", dist.Weibull(rate[..., frail.long()], torch.tensor(2.0)), obs=time)

    return Foreign(model, (torch.rand(3, 4) + 0.2,), plates=("cages",))


@foreign
def masked_causes() -> Foreign:
    """Competing risks with masked causes: which part failed is known only for some systems (``obs_mask``)."""

    def model(time, cause, known):
        rate = pyro.sample("rate", dist.Gamma(torch.ones(3), 1.0).to_event(1))
        with pyro.plate("systems", len(time)):
            cause = pyro.sample("cause", dist.Categorical(rate), obs=cause, obs_mask=known)
            pyro.sample("time", dist.Exponential(rate.sum(-1)), obs=time)
            pyro.sample("noise", dist.Normal(cause.to(time.dtype), 1.0), obs=time)

    return Foreign(model, (torch.rand(4) + 0.1, torch.tensor([0, 2, 1, 0]), torch.tensor([True, False, True, False])), plates=("systems",))
