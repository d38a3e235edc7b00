"""Every example runs with tiny settings; the main one survives being killed."""

from __future__ import annotations

import importlib
import itertools
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from pyro_truncated.gp import AllNoiseWarning

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = {
    "bars": ("--variants", "all"),
    "bars_selection": (),
    "binary_vae": (),
    "cross_modal_retrieval": (),
    "denoising": (),
    "digits_as_counts": (),
    "energy_meter": (),
    "enumeration_wall": (),
    "gp_select_mixture": (),
    "image_decoder": (),
    "missing_frames": (),
    "molecule_search": (),
    "missing_values_in_scikit_learn": (),
    "moving_parts": (),
    "natural_images": ("--checkpoint-every", "0"),
    "occlusive_components": ("--selections", "scan,gp,gp-every-5,gp-low-rank"),
    "own_closed_form_model": (),
    "own_spike_slab_gplvm": (),
    "question_latents": (),
    "question_models": (),
    "question_population": (),
    "question_predict": (),
    "ratings": (),
    "sparse_regression": (),
    "spike_slab_digits": (),
    "spike_slab_regression": (),
    "spike_slab_signals": (),
}
# Examples that train for more than a few seconds even so.
LONG = {
    "bars_selection",
    "binary_vae",
    "digits_as_counts",
    "enumeration_wall",
    "gp_select_mixture",
    "image_decoder",
    "missing_frames",
    "missing_values_in_scikit_learn",
    "moving_parts",
    "natural_images",
    "occlusive_components",
    "own_spike_slab_gplvm",
    "question_latents",
    "question_models",
    "question_population",
    "question_predict",
    "ratings",
    "sparse_regression",
    "spike_slab_digits",
    "spike_slab_signals",
}
PICTURES = {
    "bars": {"bars.png"},
    "bars_selection": {"bars_selection.png"},
    "binary_vae": {"binary_vae.png"},
    "cross_modal_retrieval": {"cross_modal_retrieval.png"},
    "denoising": {"denoising.png"},
    "digits_as_counts": {"digits_as_counts.png"},
    "energy_meter": {"energy_meter.png"},
    "enumeration_wall": {"enumeration_wall.png"},
    "gp_select_mixture": {"gp_select_mixture.png"},
    "image_decoder": {"latent_space.png"},
    "missing_frames": {"missing_frames.png"},
    "molecule_search": set(),
    "missing_values_in_scikit_learn": set(),
    "moving_parts": {"moving_parts.png"},
    "natural_images": {"dictionary.png", "decompositions.png", "reconstruction.png", "free_energy.png", "activations.png"},
    "occlusive_components": {"objects.png", "locations.png", "free_energy.png"},
    "own_closed_form_model": set(),
    "own_spike_slab_gplvm": set(),
    "question_latents": {"question_latents.png"},
    "question_models": {"question_models.png"},
    "question_population": {"question_population.png"},
    "question_predict": {"question_predict.png"},
    "ratings": {"ratings.png"},
    "sparse_regression": {"sparse_regression_snelson.png"},
    "spike_slab_digits": {"spike_slab_digits.png"},
    "spike_slab_regression": {"spike_slab_regression.png"},
    "spike_slab_signals": {"spike_slab_signals.png"},
}


def run(name: str, *flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module(name)
    module.main(module.parse_args(list(flags)))


def test_every_example_is_listed():
    scripts = {path.stem for path in FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert scripts == EXAMPLES.keys() == PICTURES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) if name in LONG else name for name in EXAMPLES])
def test_example_runs(name, tmp_path, monkeypatch, capsys):
    folder = ("--output", str(tmp_path)) if PICTURES[name] else ()
    run(name, "--smoke", *folder, *EXAMPLES[name], monkeypatch=monkeypatch)
    assert {path.name for path in tmp_path.glob("*.png")} == PICTURES[name]
    assert any(character.isdigit() for character in capsys.readouterr().out)


def test_own_closed_form_model_never_loses_free_energy(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    example = importlib.import_module("own_closed_form_model")
    free_energies = example.main(example.parse_args(["--smoke"]))
    for before, after in itertools.pairwise(free_energies):
        assert after >= before - 1e-9 * abs(before)
    assert free_energies[-1] > free_energies[0] + 1


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("elbo", ["truncated", "stock"])
def test_own_spike_slab_gplvm_switches_on_as_many_dimensions_as_the_data_have(elbo, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    example = importlib.import_module("own_spike_slab_gplvm")
    probability = example.main(example.parse_args(["--smoke", "--elbo", elbo]))
    assert probability.round().tolist() == [1.0, 1.0, 0.0, 0.0]


def outcome(folder: Path) -> dict[str, object]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


@pytest.mark.nightly
def test_demo_killed_and_started_again_gives_the_numbers_of_an_uninterrupted_run(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    flags = ("--smoke", "--checkpoint-every", "0")
    run("natural_images", *flags, "--output", str(whole), monkeypatch=monkeypatch)
    process = subprocess.Popen([sys.executable, FOLDER / "natural_images.py", *flags, "--output", broken], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (broken / "checkpoint.pt").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    expected, partial = outcome(whole), outcome(broken)
    assert 0 < len(partial["history"]["seconds"]) < len(expected["history"]["seconds"])
    run("natural_images", *flags, "--output", str(broken), monkeypatch=monkeypatch)
    found = outcome(broken)
    for name in ("free_energy", "active", "noise"):
        assert found["history"][name] == expected["history"][name]
    for part in ("model", "guide"):
        for name, value in expected["modules"][part].items():
            assert torch.equal(found["modules"][part][name], value), name
    assert torch.equal(found["generators"]["cpu"], expected["generators"]["cpu"])


@pytest.mark.nightly
def test_demo_refuses_the_checkpoint_of_other_settings_and_starts_fresh_when_told(tmp_path, monkeypatch):
    flags = ("--smoke", "--iterations", "2", "--output", str(tmp_path))
    run("natural_images", *flags, monkeypatch=monkeypatch)
    with pytest.raises(ValueError, match=r"other settings \(seed: 0 in the checkpoint, 1 now\)"):
        run("natural_images", *flags, "--seed", "1", monkeypatch=monkeypatch)
    run("natural_images", *flags, "--seed", "1", "--fresh", monkeypatch=monkeypatch)
    assert outcome(tmp_path)["settings"]["seed"] == 1


@pytest.mark.nightly
def test_demo_page_shows_its_pictures_and_numbers(tmp_path, monkeypatch):
    run("natural_images", "--smoke", "--iterations", "2", "--output", str(tmp_path), monkeypatch=monkeypatch)
    page = (tmp_path / "index.html").read_text()
    assert page.count('src="data:image/png;base64,') == len(PICTURES["natural_images"])
    assert f"{outcome(tmp_path)['history']['free_energy'][-1]:.2f}" in page
    assert (tmp_path / "posterior.nc").stat().st_size > 0
    assert (tmp_path / "summary.csv").read_text().count("\n") == 21


@pytest.mark.parametrize("picture", sorted((FOLDER / "gallery").glob("*")), ids=lambda path: path.name)
def test_gallery_pictures_are_small(picture):
    assert picture.suffix == ".png"
    assert picture.stat().st_size < 150_000


def test_regression_scores_models_with_their_coefficients_integrated_out(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    example = importlib.import_module("spike_slab_regression")
    from pyro_truncated import AutoTruncated, ExhaustiveSearch

    data = example.make_data(example.parse_args(["--data=15", "--predictors=6", "--relevant=2"]))
    guide = AutoTruncated(example.model, num_states=64, conditional=example.coefficients_given)
    guide = guide.infer((data.x, data.y), ExhaustiveSearch(), steps=1)
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 6)
    exact = example.collapsed(states, data)
    torch.testing.assert_close(guide.population().free_energy().squeeze(), exact.logsumexp(0), rtol=1e-9, atol=1e-9)
    expected = (exact.softmax(0).unsqueeze(-1) * states).sum(0)
    torch.testing.assert_close(guide.marginals()["s"].reshape(-1).double(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize(("data", "stored"), [("molecules", "mol_thrombin"), ("hog", "coil_hog_pose"), ("kin40k", "kin40k")])
def test_sparse_regression_on_stored_data(data, stored, real_data, tmp_path, monkeypatch, capsys):
    real_data(stored)
    with warnings.catch_warnings():
        # In a third of a second of learning, all may still look like noise.
        warnings.simplefilter("ignore", AllNoiseWarning)
        run("sparse_regression", "--smoke", "--data", data, "--output", str(tmp_path), monkeypatch=monkeypatch)
    assert "SMSE" in capsys.readouterr().out
    assert (tmp_path / f"sparse_regression_{data}.png").stat().st_size > 0
