"""What the parts of a guide ask of the whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from pyro_truncated.guide.batch import Batch
from pyro_truncated.guide.companion_guides import Companions
from pyro_truncated.guide.store import PopulationStore
from pyro_truncated.program.call import Call
from pyro_truncated.program.candidate_runs import Conditional
from pyro_truncated.program.layout import Layout


class TruncatedGuide(Protocol):
    """A guide with the posterior renormalised on populations of states.

    The latents are discrete.

    Attributes:
        master: a reference to the guide list that it is a part of, or ``None``.
        plates: the plates that it sampled in when it last ran.
        populations: where the states of all data points are kept.
        num_draws: how many draws of the latents of other guides, or of a conditional that is not exact, are averaged over.
        is_conditional_exact: whether log joints are the same for every draw of the conditional; ``None`` if nobody has looked.
        is_enumerable: whether Pyro's ELBOs can run the model on many states.
    """

    master: Any
    plates: Any
    populations: PopulationStore
    num_draws: int
    is_conditional_exact: bool | None
    is_enumerable: bool

    @property
    def layout(self) -> Layout:
        """The discrete sites and the data plates."""

    @property
    def frames(self) -> Mapping[str, Any]:
        """The plates of the model's latents by name."""

    @property
    def companions(self) -> Companions | None:
        """The guides beside it."""

    @property
    def conditional(self) -> Conditional | None:
        """The callable that samples continuous latents given the states."""

    @property
    def index_name(self) -> str:
        """Name of the auxiliary index site."""

    def name_index(self, sites: Iterable[str]) -> str:
        """Returns a name for an index site that is not in use."""

    def batch(self, call: Call, values: Mapping[str, Any] | None = None) -> Batch:
        """Returns the populations of data points that a call selects."""

    def other_values(self, call: Call, *, median: bool = False, subsamples: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """Draws of the model's other latents by the guides beside it."""

    def created_plates(self, call: Call) -> dict[str, Any] | None:
        """The plates that its list, or the user, makes for it."""
