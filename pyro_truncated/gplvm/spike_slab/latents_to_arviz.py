"""Spike-and-slab GP-LVMs as ArviZ data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import torch
import xarray as xr
from torch import Tensor

from pyro_truncated.gplvm.spike_slab.bound import Views
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.arviz_compat import make_idata
from pyro_truncated.utils.arviz_converters import convert_owner
from pyro_truncated.utils.counts import check_counts


@names_arguments
@convert_owner.register(SpikeSlabMRD)
@takes_arrays
@torch.no_grad()
def latents_to_arviz(model: SpikeSlabMRD, y: Views, *, num_samples: int = 125, num_chains: int = 4, seed: int | None = None) -> Any:
    r"""Converts the posterior of switches and latents to what ArviZ reads: ``InferenceData``, or a ``DataTree`` from ArviZ 1.0 on.

    ``to_arviz(model, y)`` and ``to_arviz(model.model, model.guide, y)`` do the same. For a posterior over whole patterns of switches pass
    it ``model.switch_model`` and its :class:`~pyro_truncated.AutoTruncated`.

    =====================  ==========================================================================================================
    group                  content
    =====================  ==========================================================================================================
    ``posterior``          independent draws of the switches ``b`` (view, latent) and the latents ``x`` (data, latent)
    ``latent_posterior``   without sampling noise: ``probability`` and ``prior`` of the switches, their ``log_odds``, ``relevance`` (view,
                           latent), ``loc`` and ``scale`` of the latents where in use (data, latent), and the ``bound``
    ``observed_data``      ``y_0``, ``y_1``, ... (data, output)
    =====================  ==========================================================================================================

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> idata = latents_to_arviz(model, y, num_samples=10)

    Args:
        model: the trained model.
        y: its data.
        num_samples: number of draws per chain.
        num_chains: number of chains that the independent draws are dealt to.
        seed: seeds the draws; without it torch's global generator is used.

    Raises:
        ValueError: if ``num_samples`` or ``num_chains`` is not positive or the data do not fit the model.
    """
    num_samples, num_chains = check_counts(num_samples=num_samples, num_chains=num_chains)
    views = model.check_data(y)
    generator = torch.Generator()
    generator.manual_seed(int(torch.randint(2**31, ()) if seed is None else seed))
    found = model.latents()
    gamma, loc, scale = (value.detach().cpu().double() for value in (model.probability, found.loc, found.scale))
    switches = torch.rand(num_chains, num_samples, *gamma.shape, generator=generator, dtype=torch.float64) < gamma
    used = switches.any(2).unsqueeze(2)
    noise = torch.randn(num_chains, num_samples, *loc.shape, generator=generator, dtype=torch.float64)
    latents = torch.where(used, loc + scale * noise, noise) if model.time_prior is None else model.time_prior.draws(used.squeeze(2), noise)
    datasets = {
        "posterior": xr.Dataset(
            {
                "b": (("chain", "draw", "view", "latent"), _array(switches.to(torch.int8))),
                "x": (("chain", "draw", "data", "latent"), _array(latents)),
            }
        ),
        "latent_posterior": xr.Dataset(
            {
                **{name: (("view", "latent"), _array(value)) for name, value in _switches(model).items()},
                "loc": (("data", "latent"), _array(loc)),
                "scale": (("data", "latent"), _array(scale)),
                "bound": ((), _array(model.bound(views))),
            }
        ),
        "observed_data": xr.Dataset({f"y_{c}": (("data", f"output_{c}"), _array(v)) for c, v in enumerate(views)}),
    }
    attributes = {"inference_library": "pyro", "inference_library_version": pyro.__version__, "inference_method": "variational"}
    numbered = {name: data.assign_coords({d: np.arange(n) for d, n in data.sizes.items()}) for name, data in datasets.items()}
    return make_idata(**{name: data.assign_attrs(attributes) for name, data in numbered.items()})


def _switches(model: SpikeSlabMRD) -> dict[str, Tensor]:
    gamma = model.probability
    return {"probability": gamma, "prior": model.prior, "log_odds": gamma.logit(), "relevance": model.relevance()}


def _array(value: Tensor) -> np.ndarray:
    return value.detach().cpu().numpy()
