"""Old names of public attributes work for a version, and say the new ones."""

from __future__ import annotations

import pytest
import torch

from pyro_truncated import AutoTruncated, distributed, gp
from pyro_truncated.diagnostics.prediction import RestartComparison
from pyro_truncated.diagnostics.truncation.evidence import ExactComparison
from pyro_truncated.distributions import PiecewiseGaussian
from pyro_truncated.em import ClosedForm, GibbsEM
from pyro_truncated.extend import Renamed
from pyro_truncated.gplvm import Latents, Posterior, SpikeSlabGPLVM
from pyro_truncated.models import BinarySparseCoding, GatedDecoder, OcclusiveComponents
from pyro_truncated.multistart import LearnReport
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.scenes import Match, PlacementSelection
from pyro_truncated.search import ConditionalSearch, Preselection, SearchBatch, Singletons
from pyro_truncated.sklearn import SubsetGPRegressor


class Ruler:
    """A class whose method and property have new names."""

    def measure(self, length: int) -> int:
        return 2 * length

    @property
    def unit(self) -> str:
        return "cm"

    length_of = Renamed("measure")
    unit_of_length = Renamed("unit")


def test_old_names_of_methods_and_properties_warn_and_work() -> None:
    with pytest.warns(DeprecationWarning, match="length_of has a new name: use measure"):
        assert Ruler().length_of(3) == 6
    with pytest.warns(DeprecationWarning, match="unit_of_length has a new name: use unit"):
        assert Ruler().unit_of_length == "cm"


def test_names_of_the_version_before_lead_to_todays() -> None:
    half, third = torch.full((2, 3, 2), 0.5), torch.full((2, 3, 2), 1 / 3)
    exact = ExactComparison(half[:, 0, 0], half[:, 0, 0], half, third, half, third, half[:, 0, 0] > 0)
    with pytest.warns(DeprecationWarning, match="error_of_marginals has a new name: use marginal_error"):
        assert torch.equal(exact.error_of_marginals, exact.marginal_error)
    with pytest.warns(DeprecationWarning, match="error_of_pairs has a new name: use pair_error"):
        assert torch.equal(exact.error_of_pairs, exact.pair_error)
    scenes = OcclusiveComponents(2, canvas=(4, 4), template=(2, 2), num_channels=1)
    with pytest.warns(DeprecationWarning, match="parameters_of_scene has a new name: use scene_parameters"):
        assert torch.equal(scenes.parameters_of_scene().features, scenes.scene_parameters().features)
    decoder = GatedDecoder(torch.rand(3, 5), torch.ones(3, 2), torch.zeros(3, 2, 1))
    with pytest.warns(DeprecationWarning, match="poses_of has a new name: use infer_poses"):
        assert decoder.poses_of(torch.rand(4, 5))[0].shape == (4, 2, 1)
    value, zero, one = torch.tensor([1.0]), torch.tensor(0.0), torch.tensor(1.0)
    with pytest.warns(DeprecationWarning, match="of_maximum has a new name: use from_maximum"):
        slab = PiecewiseGaussian.of_maximum(value, zero.expand(1), one.expand(1), one, zero, one)
    assert torch.equal(slab.mean, PiecewiseGaussian.from_maximum(value, zero.expand(1), one.expand(1), one, zero, one).mean)
    match = Match(torch.eye(2), torch.zeros(2, 2, 2, dtype=torch.int64))
    with pytest.warns(DeprecationWarning, match="recovered has a new name: use is_recovered"):
        assert torch.equal(match.recovered(), match.is_recovered())


def test_old_names_of_reports_lead_to_todays() -> None:
    comparison = RestartComparison(
        torch.zeros(2), 0, torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[1.0], [0.5]]), torch.zeros(2, 1, 1)
    )
    with pytest.warns(DeprecationWarning, match="shared has a new name: use match_rate"):
        assert comparison.shared().tolist() == [1.0, 0.0]
    report = LearnReport((), {}, "", None, 3, 0.5, "gradients", {})
    with pytest.warns(DeprecationWarning, match="remaining has a new name: use remaining_gain"):
        assert report.remaining == report.remaining_gain == 0.5


def test_old_names_of_guides_populations_and_functions_lead_to_todays() -> None:
    y = torch.rand(4, 3)
    model = BinarySparseCoding(3, 2).initialize(y)
    guide = AutoTruncated(model, num_states=2)
    with pytest.warns(DeprecationWarning, match="batch_of has a new name: use make_batch"):
        population = guide.batch_of(y).population()
    with pytest.warns(DeprecationWarning, match="siblings has a new name: use companions"):
        assert guide.siblings is guide.companions is None
    with pytest.warns(DeprecationWarning, match="rows_of has a new name: use select_rows"):
        assert torch.equal(population.rows_of(y), y)
    with pytest.warns(DeprecationWarning, match="log_joint_of has a new name: use make_scorer"):
        scorer = guide.log_joint_of(y)
    assert isinstance(scorer, LogJoint)
    with pytest.warns(DeprecationWarning, match="rescored has a new name: use rescore"):
        assert torch.equal(guide.rescored(scorer).log_joint, guide.rescore(scorer).log_joint)
    with pytest.warns(DeprecationWarning, match="scored has a new name: use stored_posterior"):
        assert torch.equal(guide.scored().population.words, guide.stored_posterior().population.words)
    batch = SearchBatch(population, lambda words: torch.zeros(words.shape[:2]))
    for old, now in (("scored", "evaluate"), ("scored_with_moments", "evaluate_with_moments")):
        with pytest.warns(DeprecationWarning, match=f"{old} has a new name: use {now}"):
            assert getattr(batch, old) == getattr(batch, now)
    with pytest.warns(DeprecationWarning, match="candidates_of has a new name: use num_candidates_for"):
        assert ConditionalSearch(64).candidates_of(8) == 64
    for old, new in (("positions_of", distributed.global_positions), ("sums_of", distributed.shard_sum)):
        with pytest.warns(DeprecationWarning, match=f"distributed.{old} has a new name: use distributed.{new.__name__}"):
            assert getattr(distributed, old) is new


def test_old_names_of_arguments_lead_to_todays() -> None:
    with pytest.warns(DeprecationWarning, match="extended of PlacementSelection has a new name: use parents"):
        assert PlacementSelection(len, 2, extended=3).parents == 3
    with pytest.warns(DeprecationWarning, match="settling of GibbsEM has a new name: use warm_up"):
        assert GibbsEM(Preselection(Singletons(), 2), settling=3).warm_up == 3
    with pytest.warns(DeprecationWarning, match="polish of SubsetGPRegressor has a new name: use free_inputs"):
        regressor = SubsetGPRegressor(polish=True)
    assert regressor.get_params()["free_inputs"]
    with pytest.warns(DeprecationWarning, match="polish has a new name: use free_inputs"):
        assert regressor.polish
    x = torch.linspace(0, 1, 12).double().unsqueeze(1)
    regression = gp.SubsetGPRegression(gp.smooth_rbf(x), (6 * x[:, 0]).sin(), num_inducing=3)
    with pytest.warns(DeprecationWarning, match=r"polish(_evaluations)? of fit has a new name: use free_input"):
        regression.fit(max_epochs=1, polish=True, polish_evaluations=2)
    assert regression.inducing_inputs is not None
    with pytest.warns(DeprecationWarning, match="block of ExchangeSearch has no effect any more"):
        assert gp.ExchangeSearch(block=2).pool == 64


def test_old_names_of_gaussian_processes_and_of_constructors_lead_to_todays() -> None:
    with pytest.warns(DeprecationWarning, match="gp.growing has a new name: use gp.linear_growth"):
        assert gp.growing(2, 4, 2)(1) == 3
    with pytest.warns(DeprecationWarning, match="of has a new name: use from_occurrences"):
        assert len(gp.HashedCounts.of(1, torch.zeros(2).long(), torch.zeros(2).long()).keys) == 1
    with pytest.warns(DeprecationWarning, match="of has a new name: use from_rows"):
        assert distributed.Shard.of(torch.ones(2), distributed.Portion(0, 2, 4)).portion.size == 2
    model = SpikeSlabGPLVM(6, 2, num_latents=2)
    with pytest.warns(DeprecationWarning, match="used has a new name: use usage"):
        assert torch.equal(model.used(), model.usage())
    with pytest.warns(DeprecationWarning, match="holding has a new name: use fix_switches"), model.holding(0.5):
        assert bool((model.probability == 0.5).all())
    with pytest.warns(DeprecationWarning, match="shared has a new name: use group_dimensions"):
        assert Posterior(model, torch.randn(6, 2)).shared()
    latents = Latents(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(2), (0,), torch.zeros(1))
    with pytest.warns(DeprecationWarning, match="seen_by has a new name: use view_inputs"):
        assert len(Posterior(model, torch.randn(6, 2)).seen_by(latents, 0)) == 1
    for old, now in (("used", latents.usage), ("observed", latents.views)):
        with pytest.warns(DeprecationWarning, match=f"{old} has a new name"):
            assert getattr(latents, old) is now
    mixture = BinarySparseCoding(3, 2)
    driver = ClosedForm(mixture)
    with pytest.warns(DeprecationWarning, match="driving has a new name: use find"):
        assert ClosedForm.driving(mixture) is driver


class Metre(Ruler):
    """A class whose own method an old name finds, too."""

    @classmethod
    def of_length(cls, length: int) -> str:
        return f"{cls.__name__} {length}"

    made_of = Renamed("of_length")


class Foot(Metre):
    """The same with another name."""


def test_old_names_of_class_methods_find_those_of_the_class_that_is_asked() -> None:
    with pytest.warns(DeprecationWarning, match="made_of has a new name: use of_length"):
        assert Foot.made_of(2) == "Foot 2"


def test_old_names_of_parameters_are_set_and_not_given_twice() -> None:
    with pytest.warns(DeprecationWarning, match="polish of set_params has a new name: use free_inputs"):
        regressor = SubsetGPRegressor().set_params(polish=True)
    assert regressor.free_inputs
    with pytest.warns(DeprecationWarning, match="polish has a new name: use free_inputs"):
        regressor.polish = False
    assert not regressor.free_inputs
    with pytest.raises(TypeError, match="SubsetGPRegressor takes free_inputs or its old name polish; got both"):
        SubsetGPRegressor(polish=True, free_inputs=False)
