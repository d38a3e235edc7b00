"""Stored real data sets."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

DATA_VARIABLE = "PYRO_TRUNCATED_DATA"


class DatasetNotFoundError(FileNotFoundError):
    """A stored data set is not in the data folder.

    Example:
        >>> try:
        ...     arrays = load("no_such_data")
        ... except DatasetNotFoundError as error:
        ...     print("not there")
        not there
    """


def data_folder() -> Path:
    """The folder of the stored data sets.

    The environment variable ``PYRO_TRUNCATED_DATA`` names it; without it, it is ``../shared/data`` beside the repository, or else
    beside the working directory.

    Example:
        >>> isinstance(data_folder(), Path)
        True
    """
    if named := os.environ.get(DATA_VARIABLE):
        return Path(named)
    beside_repository = Path(__file__).parents[3] / "shared" / "data"
    return beside_repository if beside_repository.is_dir() else Path.cwd().parent / "shared" / "data"


def load(name: str) -> dict[str, np.ndarray]:
    """Loads the arrays of a stored data set ``<name>.npz`` by their names.

    Example:
        >>> try:
        ...     x = load("snelson1d")["x_train"]
        ... except DatasetNotFoundError:
        ...     x = torch.linspace(0, 6, 200).numpy()  # where the data folder does not hold it

    Raises:
        DatasetNotFoundError: if the data folder holds no such file.
    """
    file = data_folder() / f"{name}.npz"
    if not file.is_file():
        raise DatasetNotFoundError(f"data set {name!r} not found at {file}; set {DATA_VARIABLE} to the folder that holds {name}.npz")
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)
