"""DistributedDataParallel with its defaults: parameters are shared between processes, populations are not."""

from __future__ import annotations

from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.models import BinarySparseCoding


class Superposition(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 6))
        self.register_buffer("noise", torch.tensor(0.5))

    def forward(self, y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((6,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(s @ self.weight.mT, self.noise).to_event(1), obs=y)


def train(y: Tensor, **options: bool) -> dict[str, Tensor]:
    pyro.set_rng_seed(0)
    with pyro.settings.context(module_local_params=True):
        model = Superposition()
        guide = AutoTruncated(model, 8)
        elbo = Truncated_ELBO(EvolutionarySearch(parents=3, children=2))(model, guide)
        elbo(y)
        parallel = DistributedDataParallel(elbo, **options)
        optimiser = torch.optim.SGD(parallel.parameters(), lr=0.01)
        losses = []
        for _ in range(4):
            optimiser.zero_grad()
            words = guide.words.clone()
            with torch.no_grad():
                before = parallel(y)
            assert torch.equal(guide.words, words)
            loss = parallel(y)
            # Searching never lowers the bound of the process's own data.
            assert loss <= before + 1e-4
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
    return {"losses": torch.stack(losses), "weight": model.weight.detach(), "words": guide.words}


def run(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    y = torch.randn(10, 4, generator=torch.Generator().manual_seed(rank))
    torch.save([train(y), train(y, broadcast_buffers=False)], Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.nightly
def test_two_processes_share_parameters_and_not_populations(tmp_path):
    torch.multiprocessing.spawn(run, (str(tmp_path),), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for with_defaults, without_broadcast in found:
        assert torch.equal(with_defaults["losses"], without_broadcast["losses"])
        assert torch.equal(with_defaults["words"], without_broadcast["words"])
    (first, _), (second, _) = found
    assert torch.equal(first["weight"], second["weight"])
    assert not torch.equal(first["words"], second["words"])


def trained_module(steps: int) -> tuple[torch.nn.Module, Tensor]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    y = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    model = BinarySparseCoding(4, 6)
    module = Truncated_ELBO(EvolutionarySearch(parents=3, children=2))(model, AutoTruncated(model, 8))
    for _ in range(steps):
        module(y)
    return module, y


def test_states_load_with_and_without_the_prefix_of_what_wrapped_them(tmp_path):
    module, y = trained_module(steps=2)
    with torch.no_grad():
        expected = module(y)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(module)
        wrapped, plain = parallel.state_dict(), module.state_dict()
        assert all(name.startswith("module.") for name in wrapped)
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "module.model'):
            parallel.load_state_dict(plain)
    finally:
        torch.distributed.destroy_process_group()
    for state in (wrapped, plain, {f"elbo.{name}": value for name, value in plain.items()}):
        fresh, _ = trained_module(steps=0)
        fresh.load_state_dict(state)
        assert torch.equal(fresh.guide.words, module.guide.words)
        with torch.no_grad():
            assert torch.equal(fresh(y), expected)
    parts = {name: {f"module.{key}": value for key, value in part.state_dict().items()} for name, part in module.named_children()}
    for name, state in parts.items():
        fresh, _ = trained_module(steps=0)
        part = getattr(fresh, name)
        part.load_state_dict(state)
        with pytest.raises(RuntimeError, match=rf"this {type(part).__name__}, as its names begin with 'module\.{name}\.'"):
            part.load_state_dict(wrapped)
    with pytest.raises(RuntimeError, match=r"its names begin with 'module\.'"):
        fresh.load_state_dict({**wrapped, "other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fresh.load_state_dict({"other": torch.zeros(1)})
