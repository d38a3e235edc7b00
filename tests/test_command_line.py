"""python -m pyro_truncated."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import pyro_truncated
from pyro_truncated import LearnConfig
from pyro_truncated.__main__ import main


@pytest.mark.nightly
def test_the_module_lists_what_there_is():
    found = subprocess.run([sys.executable, "-m", "pyro_truncated"], capture_output=True, text=True, check=True).stdout
    assert all(f"\n    {name}" in found for name in ("demo", "restoration", "check", "warmup"))


@pytest.mark.parametrize("command", ["demo", "restoration", "check", "warmup"])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert "usage: python -m pyro_truncated" in capsys.readouterr().out


def test_version_and_unknown_commands(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"pyro_truncated {pyro_truncated.__version__}\n"
    with pytest.raises(SystemExit) as end:
        main(["restore"])
    assert end.value.code == 2
    assert "invalid choice: 'restore'" in capsys.readouterr().err


@pytest.mark.nightly
def test_demo_learns_and_check_reads_what_it_wrote(tmp_path, capsys):
    assert main(["demo", "--output", str(tmp_path), "--images", "200"]) == 0
    assert "10 bars found" in capsys.readouterr().out
    assert (tmp_path / "demo.html").stat().st_size > 0
    status = main(["check", str(tmp_path / "demo.nc"), "--page", str(tmp_path / "page.html")])
    found = capsys.readouterr().out
    assert status == (0 if found.startswith("Nothing speaks against") else 2)
    assert (tmp_path / "page.html").stat().st_size > 0


@pytest.mark.slow
def test_check_reads_what_a_short_demo_has_written(tmp_path, capsys, monkeypatch):
    learn = pyro_truncated.learn
    monkeypatch.setattr(
        pyro_truncated, "learn", lambda *args, steps: learn(*args, steps=5, config=LearnConfig(restart_steps=5), restarts=1, progress=False)
    )
    assert main(["demo", "--output", str(tmp_path), "--images", "60"]) == 0
    assert "60 images of 5 x 5 pixels" in capsys.readouterr().out
    assert "<html" in (tmp_path / "demo.html").read_text()
    status = main(["check", str(tmp_path / "demo.nc")])
    found = capsys.readouterr().out
    assert status == (0 if found.startswith("Nothing speaks against") else 2)


def test_files_that_cannot_be_checked_are_named(tmp_path, capsys):
    assert main(["check", str(tmp_path / "none.nc")]) == 1
    assert capsys.readouterr().err == f"error: there is no file {tmp_path / 'none.nc'}\n"
    other = tmp_path / "other.nc"
    other.write_text("no netCDF")
    assert main(["check", str(other)]) == 1
    assert f"error: {other} cannot be read as netCDF" in capsys.readouterr().err


def test_a_saved_posterior_that_is_not_to_be_trusted_is_a_status_of_two(tmp_path, capsys):
    import xarray as xr

    from pyro_truncated.utils.arviz_compat import make_idata

    draws = xr.Dataset({"x": (("chain", "draw"), np.zeros((1, 3)))})
    make_idata(posterior=draws).to_netcdf(tmp_path / "plain.nc")
    assert main(["check", str(tmp_path / "plain.nc")]) == 0
    assert "The guide has no importance weights" in capsys.readouterr().out


@pytest.mark.slow
def test_pictures_are_restored(tmp_path, capsys):
    assert main(["restoration", str(tmp_path / "none.png"), "--output", str(tmp_path / "out.png")]) == 1
    assert "none.png" in capsys.readouterr().err
    picture = tmp_path / "in.png"
    Image.fromarray((np.indices((12, 12)).sum(0) * 10).astype(np.uint8)).save(picture)
    flags = ["--output", str(tmp_path / "out.png"), "--side", "4", "--components", "6", "--rounds", "2"]
    assert main(["restoration", str(picture), *flags]) == 0
    assert (tmp_path / "out.png").exists()


def test_an_interruption_is_a_line_and_a_status(tmp_path, capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("pyro_truncated.__main__.read_netcdf", interrupt)
    (tmp_path / "posterior.nc").touch()
    assert main(["check", str(tmp_path / "posterior.nc")]) == 130
    assert capsys.readouterr().err == "check was interrupted\n"
