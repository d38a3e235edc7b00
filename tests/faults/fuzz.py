"""Bad arguments for every public function: ``python -m tests.faults.fuzz``.

One argument after the other of each call in :mod:`tests.faults.calls` is replaced by what does not fit. A call must work, or raise an error
of a kind that users may expect whose text names the argument; it must neither hang nor return NaN where it did not before.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import io
import logging
import math
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor

from tests.faults.calls import CALLS

MOST_SECONDS = 20
NUMBERS: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "-1": -1,
    "0": 0,
    "2.5": 2.5,
    "1e300": 1e300,
    "'x'": "x",
    "None": None,
    "True": True,
    "1j": 1j,
    "[]": [],
    "empty tensor": torch.empty(0),
    "tensor of nan": torch.tensor(math.nan),
}
OTHERS: dict[str, Any] = {"nan": math.nan, "-1": -1, "3": 3, "'x'": "x", "None": None, "[]": [], "a tensor": torch.ones(2, 2)}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A call that neither works nor is refused by name."""

    call: str
    argument: str
    value: str
    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.call}({self.argument}={self.value}): {self.what} {self.where}"


def bad_values(good: Any) -> dict[str, Any]:
    """What an argument is replaced by, by how it is called."""
    if isinstance(good, Tensor):
        return _bad_tensors(good)
    if isinstance(good, (int, float)) and not isinstance(good, bool):
        return NUMBERS
    if isinstance(good, (tuple, list)) and good and all(isinstance(part, (int, float)) for part in good):
        inner = {f"({name}, ...)": type(good)([value, *good[1:]]) for name, value in NUMBERS.items()}
        return OTHERS | inner
    return OTHERS


def _bad_tensors(good: Tensor) -> dict[str, Any]:
    real = good if good.is_floating_point() else good.double()
    found: dict[str, Any] = {
        "nan": torch.full_like(real, math.nan),
        "inf": torch.full_like(real, math.inf),
        "-1": torch.full_like(real, -1),
        "zeros": torch.zeros_like(real),
        "huge": torch.full_like(real, torch.finfo(real.dtype).max),
        "one more dimension": good.unsqueeze(0),
        "complex": good.to(torch.complex64),
        "bool": good.bool(),
        "int64": good.long(),
        "float32": good.float(),
        "float64": good.double(),
        "'x'": "x",
        "None": None,
        "3": 3,
    }
    if good.dim():
        one = real.clone()
        one.view(-1)[0] = math.nan
        found |= {"one nan": one, "one row less": good[:-1], "no rows": good[:0], "one column less": good[..., :-1], "a row": good[0]}
    return found


def findings(names: Sequence[str], chance: torch.Generator | None = None, share: float = 1.0) -> Iterator[Finding | None]:
    """Tries bad arguments, all of them or a random share; one item per call that was made."""
    for name in names:
        arguments = CALLS[name]()[1]
        expected = has_nan(_called(name, None, None))
        for argument, good in arguments.items():
            for text, value in bad_values(good).items():
                if chance is None or float(torch.rand((), generator=chance)) < share:
                    yield _tried(name, argument, text, value, expected)


def _called(name: str, argument: str | None, value: Any) -> Any:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    function, arguments = CALLS[name]()
    if argument is not None:
        arguments[argument] = value.clone() if isinstance(value, Tensor) else value
    return function(**arguments)


def _tried(name: str, argument: str, text: str, value: Any, expected: bool) -> Finding | None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = _called(name, argument, value)
        return Finding(name, argument, text, "returns NaN") if has_nan(found) and not expected else None
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        # What torch says of the value of a distribution, and of shapes that do not fit, names what the other one is held against.
        if re.search(
            rf"(?<![A-Za-z])({'|'.join(map(re.escape, {argument, *CALLS[name]()[1], 'value', 'Value', 'the data'}))})(?![A-Za-z])",
            str(error),
        ):
            return None
        return Finding(name, argument, text, f"{type(error).__name__} that does not name it: {_brief(error)}", _place(error))
    except Exception as error:
        return Finding(name, argument, text, f"{type(error).__name__}: {_brief(error)}", _place(error))


def _too_long(*_: Any) -> None:
    raise TimeoutError("takes too long")


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:110]


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "tests/faults" not in frame.filename]
    ours = [frame for frame in frames if "site-packages" not in frame.filename]
    return "at " + " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(ours[-2:])) if ours else ""


def has_nan(found: Any) -> bool:
    """Whether there is a NaN anywhere in what a call has returned."""
    if isinstance(found, float):
        return math.isnan(found)
    if isinstance(found, (Tensor, np.ndarray)):
        return bool(torch.as_tensor(found).isnan().any()) if not isinstance(found, np.ndarray) or found.dtype.kind == "f" else False
    if isinstance(found, torch.nn.Module):
        return has_nan(list(found.state_dict().values()))
    if isinstance(found, Mapping):
        return any(has_nan(value) for value in found.values())
    if isinstance(found, (tuple, list)):
        return any(has_nan(value) for value in found)
    return (
        has_nan(list(vars(found).values())) if type(found).__module__.startswith("pyro_truncated") and hasattr(found, "__dict__") else False
    )


def main() -> int:
    import tests.faults.more_calls  # noqa: F401 - fills the table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", nargs="*", help="names of calls; default: all")
    names = parser.parse_args().calls or list(CALLS)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message="Casting complex values to real")
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _too_long)
    tried, bad = 0, collections.Counter[str]()
    for name in names:
        signal.alarm(MOST_SECONDS)
        for found in findings([name]):
            signal.alarm(MOST_SECONDS)
            tried += 1
            if found is not None:
                bad[name] += 1
                print(found, flush=True)
    print(f"{tried} calls with a bad argument, {sum(bad.values())} neither work nor are refused by name: {dict(bad)}")
    return min(1, len(bad))


if __name__ == "__main__":
    sys.exit(main())
