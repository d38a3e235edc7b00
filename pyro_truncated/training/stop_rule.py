"""The number of restarts, and disagreement about the best one."""

from __future__ import annotations

import math

from pyro_truncated.distributed.shards import total_rows
from pyro_truncated.training.agreement import are_alike, have_agreed, is_gain_below_error, share_most
from pyro_truncated.training.pool import SolutionPool, have_found_the_same
from pyro_truncated.training.profile import Profile
from pyro_truncated.training.solution import Solution


class StopRule:
    """Says whether another restart is made, and whether two agree.

    Args:
        profile: of restarts.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile, self._config = profile, profile.config
        self._are_by_gradients = profile.is_by_gradients and not profile.is_resizable
        self._fewest = self._config.min_restarts if profile.is_shared or self._has_few_rows() else 1

    def _has_few_rows(self) -> bool:
        """Whether restarts easily agree on a poor optimum, and are cheap."""
        profile = self._profile
        if profile.space is None or profile.has_companion or profile.is_product:
            return profile.has_companion
        if profile.is_mixture:
            return profile.y.numel() * profile.space.size <= self._config.small_mixture
        return self._are_by_gradients and total_rows(profile.y) < self._config.few_rows_per_latent * profile.space.num_latents

    def max_restarts(self, pool: SolutionPool) -> int:
        """The largest number of restarts."""
        if self._profile.max_restarts is not None:
            return self._profile.max_restarts
        if self._profile.is_resizable and self._profile.is_large:
            return self._config.max_large_restarts
        return self._config.max_exchanging_restarts if pool.groups else self._config.max_restarts

    def reason(self, pool: SolutionPool) -> str | None:
        """Why no further restart is made, ``None`` if one is."""
        number = len(pool.energies)
        if number >= self._fewest:
            is_early = pool.decoded is not None and number < self._config.min_warm_restarts
            if (self._profile.is_matched or pool.is_network) and not is_early and is_gain_below_error(pool.estimates):
                return "another restart is expected to gain less than chance or more steps"
            if pool.groups and pool.is_complete():
                return "two restarts have found each latent of the best"
            if self._have_agreed(pool) and not pool.use_redundant_latents():
                return "two restarts agree"
        if number < self.max_restarts(pool):
            return None
        pool.use_redundant_latents()
        return "all restarts are made"

    def disagreement(self, pool: SolutionPool) -> str | None:
        """Why the best restart may be a local optimum, if it may."""
        number = len(pool.energies)
        if number == 1 or self._have_agreed(pool):
            return None
        if pool.groups:
            number_alone = pool.num_singletons
            return f"{number_alone} latents of the best of {number} starts were found by fewer than two of them" if number_alone else None
        ordered = ", ".join(f"{value:.2f}" for value in sorted(pool.energies, reverse=True))
        unit = "per posterior" if self._profile.is_shared else "per data point"
        if self._profile.is_mixture:
            return f"{number} starts reached different free energies {unit} ({ordered}), and another one may reach more"
        if self._are_equal(pool):
            return f"no two of {number} starts that reached the same free energy {unit} ({ordered}) found the same latents"
        if pool.is_network and pool.kept and self._same_code(pool):
            return f"starts found the same latents, but free energies {unit} ({ordered}) that say that some networks are fitted badly"
        remaining = max(one.remaining for one in sorted(pool.estimates, key=lambda one: -one.free_energy)[:2])
        if remaining > self._profile.tolerance:
            return f"the best two of {number} starts have not converged: free energies {unit} ({ordered}) may rise by {remaining:.2g}"
        return f"no two of {number} starts reached the same free energy {unit} ({ordered})"

    def _have_agreed(self, pool: SolutionPool) -> bool:
        """Whether two restarts reached the best free energy by the same latents.

        Of networks that have found the same latents none need have reached just what the other has: their weights differ everywhere.
        """
        if not pool.kept or not self._profile.compares_latents:
            return self._are_equal(pool, self._profile.compares_latents and self._are_by_gradients)
        best, *others = pool.kept
        if best.probabilities is not None:
            # Covariates do not count.
            size = (self._profile.y if pool.decoded is None else pool.decoded)[0].numel()
            return bool(self._same_code(pool, max(self._profile.tolerance, self._config.network_gap * size))) or self._are_equal(pool, True)
        near = [other for other in others if have_agreed([best.estimate, other.estimate], self._lead(pool))]
        return any(have_found_the_same(self._profile, best, other) for other in near)

    def _same_code(self, pool: SolutionPool, gap: float = math.inf) -> list[Solution]:
        """Returns network restarts with the latents of the best one.

        Their free energies must not be lower by more than the gap.
        """
        best, *others = pool.kept
        return [
            other
            for other in others
            if best.free_energy - other.free_energy <= gap
            and best.probabilities is not None
            and other.probabilities is not None
            and share_most(best.probabilities, other.probabilities, self._config.max_unmatched)
        ]

    def _are_equal(self, pool: SolutionPool, must_be_alike: bool = False) -> bool:
        """Whether two independent restarts have equal free energies everywhere.

        They must be those of the same data points, and none may be higher.
        """
        if not pool.estimates:
            return False
        best, *others = sorted(pool.estimates, key=lambda one: one.free_energy, reverse=True)
        lead = self._lead(pool)
        near = [other for other in others if have_agreed([best, other], lead)]
        is_met = any(not must_be_alike or are_alike(best, other, self._profile.tolerance) for other in near)
        return is_met and pool.best.free_energy <= best.free_energy + lead

    def _lead(self, pool: SolutionPool) -> float:
        """How far apart the best two restarts may be."""
        return self._profile.tolerance * (min(len(pool.estimates) / 2, self._config.max_lead) if self._profile.is_mixture else 1)
