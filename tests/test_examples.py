"""Every example runs with tiny settings and leaves behind what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = {
    "bars.py": ["bars.png"],
    "enumeration_wall.py": ["enumeration_wall.png"],
    "natural_images.py": ["index.html", "dictionary.png", "free_energy.png", "activations.png", "reconstruction.png", "summary.csv"],
    "spike_slab_regression.py": ["spike_slab_regression.png"],
}


def run(script: str, output: Path, *arguments: str) -> str:
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    command = [sys.executable, "-W", "ignore", str(FOLDER / script), "--smoke", "--output", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", EXAMPLES)
def test_example(script, tmp_path):
    assert run(script, tmp_path).strip()
    for name in EXAMPLES[script]:
        assert (tmp_path / name).stat().st_size > 0


def test_every_example_is_tested():
    scripts = {file.name for file in FOLDER.glob("*.py") if "__main__" in file.read_text()}
    assert scripts == set(EXAMPLES)


def test_natural_images_go_on_from_their_checkpoint_to_the_same_numbers(tmp_path):
    def free_energy(printed: str) -> str:
        return next(line for line in printed.splitlines() if "free energy" in line)

    whole = free_energy(run("natural_images.py", tmp_path / "whole", "--iterations", "8"))
    # Killed at half-way: the checkpoint says that four of eight iterations are done.
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    arguments = ["--smoke", "--iterations", "8", "--checkpoint-every", "0", "--output", str(tmp_path / "parts")]
    done = subprocess.run([sys.executable, "-W", "ignore", str(script), str(FOLDER), *arguments], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    printed = run("natural_images.py", tmp_path / "parts", "--iterations", "8", "--checkpoint-every", "0")
    assert "4 of 8 iterations done already" in printed
    assert free_energy(printed) == whole


INTERRUPTED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import natural_images
steps = 0
save = natural_images.save_checkpoint
def save_then_die(*args, **kwargs):
    global steps
    save(*args, **kwargs)
    steps += 1
    if steps == 4:
        os._exit(3)
natural_images.save_checkpoint = save_then_die
natural_images.main(natural_images.parse_args(sys.argv[2:]))
"""
