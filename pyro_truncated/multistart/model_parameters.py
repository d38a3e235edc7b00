"""Parameters of modules and functions, medians beside them, and initial values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import init_to_feasible, init_to_sample
from pyro.params.param_store import normalize_param_name
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.nn.utils.parametrize import is_parametrized

from pyro_truncated.distributed.shards import shard_sum
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.sites import log_density
from pyro_truncated.program.supports import elementwise, get_support
from pyro_truncated.utils.devices import generator_device
from pyro_truncated.utils.parameter_store import Assign, spare_random_numbers

# Least size of a parameter: from near zero, steps in its own unit would be too small.
_LEAST_SIZE = 0.2
# Deviation from linearity that is rounding error.
_LINEAR_RTOL = 1e-2
# Deviations of the data by which means of a start may be off.
_FAR = 5.0
# Effects of equal steps on two columns, of their extents: between ten and a hundred latents were lost in silence.
_MAX_RATIO_OF_COLUMNS = 50.0
# Separator in names of parameters that ``pyro.module`` registers.
_OF_A_MODULE = "$$$"
_MEDIAN = "median of "
# Prefix of unconstrained medians in the state of an AutoNormal.
_LOC = "locs.{}_unconstrained"
# Weight of equal shares in drawn shares: components with a tiny share get no data. At a tenth one of
# five mixtures of three clusters lost a cluster silently, at a half none of eleven.
_UNIFORM_SHARE = 0.5


class ModelParameters:
    """What a model has learned, and the units of its steps.

    Runs of the model take continuous latents of a companion guide.
    """

    def __init__(self, model: Any, y: Tensor, companion: Any = None) -> None:
        self.model, self.y, self._companion = model, y, companion

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that hold what was learned."""
        if isinstance(self.model, torch.nn.Module):
            return self.model.state_dict()
        with spare_random_numbers(), poutine.block(), torch.no_grad():
            nodes = poutine.trace(self.model, param_only=True).get_trace(self.y).nodes
        values = {name: node["value"] for name, node in nodes.items() if node["type"] == "param"}
        # Substituted values are nobody's to learn.
        return {name: value.unconstrained() for name, value in values.items() if hasattr(value, "unconstrained")}

    def learned(self) -> dict[str, Tensor]:
        """Learned parameters, without buffers."""
        return dict(self.model.named_parameters()) if isinstance(self.model, torch.nn.Module) else self.tensors()

    def trainable(self) -> dict[str, Tensor]:
        """Learned parameters but frozen ones of modules."""
        is_module = isinstance(self.model, torch.nn.Module)
        return {name: value for name, value in self.learned().items() if value.requires_grad or not is_module}

    @cached_property
    def layers(self) -> frozenset[str]:
        """Names of parameters of torch's layers, or a function's modules."""
        if not isinstance(self.model, torch.nn.Module):
            return frozenset(name for name in self.tensors() if _OF_A_MODULE in name)
        names = set()
        for name, layer in self.model.named_modules():
            if hasattr(layer, "reset_parameters"):
                parts = [("", layer.named_parameters(recurse=False))]
                if is_parametrized(layer):
                    parts.append(("parametrizations.", layer.parametrizations.named_parameters()))
                names |= {f"{name}.{prefix}{own}".lstrip(".") for prefix, parameters in parts for own, _ in parameters}
        return frozenset(names)

    def in_layer(self, name: str) -> bool:
        """Whether a name of Pyro's store is that of a layer's parameter."""
        return f".{name}".endswith(tuple(f".{normalize_param_name(layer)}" for layer in self.layers))

    def snapshot(self) -> dict[str, Tensor]:
        """What was learned, apart from the model."""
        return {name: value.detach().clone() for name, value in self.tensors().items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Writes values in place, so that stores and optimisers keep their tensors."""
        for name, value in self.tensors().items():
            value.copy_(state[name])

    @torch.no_grad()
    def disturb(self, others: dict[str, Tensor], generator: torch.Generator | None) -> None:
        """Adds noise to unconstrained parameters.

        It is of size one where these had constraints, else of their unit or their root mean square: here or among others, whichever is
        larger.
        """
        for name, value in self.learned().items():
            unit = 1.0 if _constraint(value) is not constraints.real else 0.0 if name in self.layers else self.unit(value)
            value.add_((unit or max(_size(value), _size(others[name])) or 1.0) * draw_noise(value, generator))

    @torch.no_grad()
    def shuffle(self, generator: torch.Generator | None) -> None:
        """Permutes the entries of learned parameters; frozen ones stay.

        Weights that are all equal get noise instead, since any order leaves them and their units equal.
        """
        for value in self.trainable().values():
            order = torch.randperm(value.numel(), generator=generator, device=generator_device(generator)).to(value.device)
            values = value.flatten()[order]
            if value.dim() > 1 and bool((values == values[0]).all()):
                values = values + (float(values[0].abs()) or 1 / math.sqrt(value.shape[-1])) * draw_noise(values, generator)
            value.copy_(values.view_as(value))

    def units(self) -> dict[str, float]:
        """Returns units of all parameters, by name as optimisers get it.

        It is their own size where there is no other, at least 0.2. What has a prior is no larger than that says. Constrained parameters
        move on logarithmic or similar scales, without units.
        """
        latents = {free.data_ptr() for free in ([] if self._companion is None else self._companion.locs.parameters())}
        units = {}
        # Several processes must measure in one order.
        for key, free in sorted(pyro.get_param_store().named_parameters()):
            name, size, unit = normalize_param_name(key), max(_LEAST_SIZE, _size(free)), 1.0
            if _constraint(free) is constraints.real:
                unit = (0.0 if self.in_layer(name) else self.unit(free)) or size
            units[name] = min(unit, size) if free.data_ptr() in latents else unit
        return units

    @torch.no_grad()
    def unit(self, free: Tensor) -> float:
        """Returns by how much a parameter changes observed means by a deviation.

        All entries change by as much, and means by a deviation as a root mean square. It is zero where means are not linear in the
        parameter, or where nothing real is observed.
        """
        size = _size(free) or 1.0
        if (misfits := self._disturbed_misfits(free, size)) is None:
            return 0.0
        first, up, down = misfits
        effects = (up - first).square().sum(), (up - 2 * first + down).square().sum(), up.new_tensor(up.numel())
        effect, curvature, number = (float(total) for total in shard_sum(self.y)(effects))
        return size * math.sqrt(number / effect) if effect > 0 and curvature <= _LINEAR_RTOL**2 * effect else 0.0

    def _disturbed_misfits(self, free: Tensor, size: float) -> list[Tensor] | None:
        """Returns misfits at a parameter, and after equal steps up and down."""
        before = free.detach().clone()
        change = size * torch.randn(free.shape, generator=torch.Generator().manual_seed(0)).sign().to(before)
        misfits = []
        try:
            for value in (before, before + change, before - change):
                free.copy_(value)
                misfits.append(self._observe()[0])
        except (ValueError, RuntimeError):  # whatever a program says to values of no use
            return None
        finally:
            free.copy_(before)
        return misfits

    @torch.no_grad()
    def warn_about_columns(self) -> None:
        """Warns if equal steps are unlike in the columns of data ``(N, D)``."""
        y = self.y
        if self._observe()[2] != 1:
            return
        # Few outliers make no extent. A few thousand rows tell it: to sort all takes longer than a step.
        lowest, highest = y[:: -(-len(y) // 5000)].double().nanquantile(torch.tensor([0.05, 0.95], dtype=torch.float64, device=y.device), 0)
        extent = highest - lowest
        for key, free in sorted(pyro.get_param_store().named_parameters()):
            name = normalize_param_name(key)
            if self.in_layer(name) or free.numel() < y.shape[1] or not self.unit(free):
                continue
            misfits = self._disturbed_misfits(free, _size(free) or 1.0)
            if misfits is None or misfits[0].numel() != y.numel():
                continue
            effect = (misfits[1] - misfits[0]).reshape(y.shape).square().mean(0).sqrt() / extent
            effect = torch.where(effect.isfinite(), effect, 0.0)
            seen = effect[effect > 0]
            if len(seen) and float(seen.max() / seen.min()) > _MAX_RATIO_OF_COLUMNS:
                least, most = int(effect.argmax()), int(torch.where(effect > 0, effect, math.inf).argmin())
                warnings.warn(
                    f"columns of the data extend unlike: column {least} over {float(extent[least]):.3g} and column {most} over "
                    f"{float(extent[most]):.3g}, but steps of the parameter {name!r} are equal in both. If they have units of their own, "
                    "and are not dark pixels, standardise them, as by (y - y.mean(0)) / y.std(0), and multiply what is learned.",
                    UserWarning,
                    stacklevel=5,
                )
                return

    def approach(self, generator: torch.Generator | None) -> None:
        """Moves a start to data that lie far from its means.

        Steps in the unit of the data would be too small. All that means are linear in is fitted to random states by least squares, then
        all else, such as a scale, by maximum likelihood. In the end noise is added, of the size of units.
        """
        if _size(self._observe()[0]) <= _FAR:
            return
        parameters = [value for name, value in sorted(self.trainable().items()) if name not in self.layers]
        latents = () if self._companion is None else self._companion.locs.parameters()
        units = {value: self.unit(value) for value in (*parameters, *latents)}
        linear = [value for value, unit in units.items() if unit]
        if not linear:
            return
        _minimize(lambda: self._observe()[0].square().mean(), torch.optim.LBFGS(linear, 1, line_search_fn="strong_wolfe"))
        if others := [value for value in parameters if not units[value]]:
            # Steps of up to one, by signs, as densities may be infinite.
            _minimize(lambda: -self._observe()[1], torch.optim.Rprop(others, 0.1, step_sizes=(1e-6, 1.0)))
        for value in linear:
            value.data.add_(units[value] * draw_noise(value, generator))

    def _observe(self) -> tuple[Tensor, Tensor, int]:
        """Returns what a run says of observed real numbers, given random latents.

        These are means less numbers, in deviations of the data, the mean log density, and the number of sites. Latents are the same each
        time.
        """
        with spare_random_numbers(), poutine.block(), pyro.validation_enabled(False):
            torch.manual_seed(0)
            with Assign({} if self._companion is None else self._companion(self.y)):
                nodes = poutine.trace(self.model).get_trace(self.y).nodes.values()
            observed = [node for node in nodes if node["type"] == "sample" and node["is_observed"]]
            real = [node for node in observed if elementwise(get_support(node["fn"])) is constraints.real]
            density = log_density(real) / len(self.y)
        misfits = [torch.zeros(0, dtype=torch.float64)]
        for node in real:
            value = node["value"].as_subclass(Tensor).double()
            deviation = _size((value - value.nanmean(0)).nan_to_num())
            if deviation > 0:
                misfits.append(((node["fn"].mean - value) / deviation).where(value.isfinite(), 0.0).flatten())
        return torch.cat([part.to(misfits[-1]) for part in misfits]), density, len(misfits) - 1


def optimiser_options(lr: float, lrd: float, unit: float, is_layer: bool = False) -> dict[str, float]:
    """Returns Pyro's defaults of Adam in the unit of a parameter.

    Gradients of torch's layers are clipped as Pyro does it, whatever the unit of the steps.
    """
    scale = 1.0 if is_layer else unit
    return {"lr": lr * unit, "lrd": lrd, "clip_norm": 10.0 / scale, "eps": 1e-8 / scale}


def _minimize(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> None:
    def evaluate() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return float(value.detach())

    for _ in range(50):  # few are needed: what is fitted is linear, or a scale
        optimizer.step(evaluate)
    optimizer.zero_grad()


def _constraint(free: Tensor) -> Any:
    """The constraint of a parameter of Pyro's store: others are real numbers."""
    store = pyro.get_param_store()
    own = (store._constraints[name] for name, value in store.named_parameters() if value.data_ptr() == free.data_ptr())
    return next(own, constraints.real)


def draw_noise(value: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws standard normal numbers like a tensor, where the generator draws."""
    return torch.randn(value.shape, generator=generator, dtype=value.dtype, device=generator_device(generator)).to(value.device)


def _size(value: Tensor) -> float:
    return float(value.detach().square().mean().sqrt())


class Medians(ModelParameters):
    """Parameters and medians of continuous latents; scores states given these.

    So they change places as parameters do: a program may learn the weights of its latents by either. Shares are in the coordinates of
    Pyro's parameters, one number for each of them.
    """

    def __init__(self, guide: AutoTruncated, y: Tensor) -> None:
        super().__init__(guide.model, y)
        self.guide = guide
        nodes: Any = getattr(guide.prototype_trace, "nodes", {})
        self._supports = {name: nodes[name]["fn"].support for name in guide.layout.other_latents}

    def scorer(self, state: dict[str, Tensor]) -> LogJoint:
        """The scorer of states under a model that has learned this."""
        self.load(state)
        values = {name: transform_to(support)(state[_MEDIAN + name]) for name, support in self._supports.items()}
        return self.guide.make_scorer(self.y, values=values)

    def beyond(self, scorer: LogJoint) -> float:
        """Returns the log density per data point of global medians."""
        nodes = [scorer.nodes[name] for name in self._supports if not scorer.is_inside(scorer.nodes[name])]
        return float(log_density(nodes)) / self.guide.layout.num_data

    def state(self, companion: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the model's parameters and the medians of a guide's state."""
        free = {name: biject_to(support)(companion[_LOC.format(name)]) for name, support in self._supports.items()}
        return self.snapshot() | {_MEDIAN + name: transform_to(self._supports[name]).inv(value) for name, value in free.items()}

    def exchangeable_part(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What may change places: parameters and medians, but no buffers."""
        names = [*self.learned(), *(_MEDIAN + name for name in self._supports)]
        return {name: state[name] for name in names}

    def companion(self, state: dict[str, Tensor], near: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns a guide's state with other medians."""
        medians = {name: transform_to(support)(state[_MEDIAN + name]) for name, support in self._supports.items()}
        return near | {_LOC.format(name): biject_to(self._supports[name]).inv(value) for name, value in medians.items()}


def prior_draw(site: dict[str, Any]) -> Tensor:
    """Draws a latent from its prior, for ``init_loc_fn`` of Pyro's guides.

    Pyro's ``init_to_median(num_samples=1)`` takes the same feasible point for all vectors, and its ``init_to_sample`` may begin at the
    infinitely distant end of the support. Here a feasible point replaces such draws; of a simplex the draw is averaged with equal shares.
    """
    fn = site["fn"]
    value: Tensor = init_to_sample(site)
    support = fn.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if support is constraints.simplex:
        # In place: Pyro's draws carry a mark for its reparametrisations.
        value.mul_(1 - _UNIFORM_SHARE).add_(_UNIFORM_SHARE / value.shape[-1])
    if not fn.support.is_discrete and not bool(torch.isfinite(biject_to(fn.support).inv(value)).all()):
        return torch.as_tensor(init_to_feasible(site))
    return value
