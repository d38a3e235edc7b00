"""What can be done without writing Python: ``python -m pyro_truncated``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyro_truncated
from pyro_truncated.utils.arviz_compat import read_netcdf

Command = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one of the commands and returns the exit status.

    It is 0 if all is well, 1 for an error, 2 for a posterior that is not to be trusted.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pyro_truncated",
        description="Posteriors over huge discrete latent spaces, without writing Python.",
        epilog="Each command explains itself: python -m pyro_truncated COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pyro_truncated {pyro_truncated.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for name, (help_text, _) in _COMMANDS.items():
        commands.add_parser(name, help=help_text, add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return _COMMANDS[options.command][1](rest)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{options.command} was interrupted", file=sys.stderr)
        return 130


def _parser(name: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"python -m pyro_truncated {name}", description=_COMMANDS[name][0])


def _demo(arguments: Sequence[str]) -> int:
    parser = _parser("demo")
    parser.add_argument("--output", type=Path, default=Path("report"), help="folder for page and posterior (default: %(default)s)")
    parser.add_argument("--images", type=int, default=500, help="number of images (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: %(default)s)")
    args = parser.parse_args(arguments)

    import torch

    from pyro_truncated.datasets import bar_components, linear_bars, matched_bars
    from pyro_truncated.models import BinarySparseCoding

    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    y = linear_bars(args.images, size=5, mean_active=2.0).data
    model, start = BinarySparseCoding(25, 10), time.monotonic()
    guide = pyro_truncated.learn(model, y, steps=30)
    num_bars = matched_bars(model.weight.detach(), 10 * bar_components(5))
    print(
        f"{args.images} images of 5 x 5 pixels, each the sum of some of ten bars: {num_bars} bars found in {time.monotonic() - start:.0f} s"
    )
    idata = pyro_truncated.to_arviz(model, guide, y, checks=pyro_truncated.check_truncation(guide, y))
    idata.to_netcdf(args.output / "demo.nc")
    pyro_truncated.diagnose(idata, args.output / "demo.html", weight=model.weight.detach(), warn=False)
    print(f"posterior: {args.output / 'demo.nc'}")
    return 0


def _check(arguments: Sequence[str]) -> int:
    parser = _parser("check")
    parser.add_argument("file", type=Path, help="netCDF file of a posterior that to_arviz has made")
    parser.add_argument("--page", type=Path, help="also write a page with pictures, such as diagnosis.html")
    args = parser.parse_args(arguments)
    if not args.file.is_file():
        raise FileNotFoundError(f"there is no file {args.file}")

    try:
        idata = read_netcdf(args.file)
    except Exception as error:
        raise ValueError(f"{args.file} cannot be read as netCDF: {error}") from error
    return 0 if pyro_truncated.diagnose(idata, args.page, warn=False).is_trusted else 2


def _restoration(arguments: Sequence[str]) -> int:
    from pyro_truncated.restoration.__main__ import main as restore

    return restore(arguments)


def _warmup(arguments: Sequence[str]) -> int:
    _parser("warmup").parse_args(arguments)

    from pyro_truncated.warmup import main as warm_up

    warm_up()
    return 0


_COMMANDS: dict[str, tuple[str, Command]] = {
    "demo": ("learn bars from images, and look at the posterior: a page and a netCDF file", _demo),
    "restoration": ("take noise off a picture, or fill in what is missing", _restoration),
    "check": ("say whether a saved posterior is to be trusted (exit status 2 if not), and what to change", _check),
    "warmup": ("compile all kernels, so that no later process waits for it", _warmup),
}


if __name__ == "__main__":
    sys.exit(main())
