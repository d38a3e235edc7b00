"""All foreign models (importing a file registers what is in it), and those that the library does not yet take."""

from tests.foreign import (  # noqa: F401
    MODELS,
    bayes_nets,
    chains,
    change_points,
    counts,
    ecology,
    fields,
    genes,
    mixtures,
    people,
    selection,
    styles,
)

__all__ = ["MODELS", "OPEN"]

# Name and reason. Nothing of it is tested; the table shows it.
OPEN: dict[str, str] = {}
