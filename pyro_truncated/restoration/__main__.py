"""Restores a picture from a file: ``python -m pyro_truncated.restoration photograph.png --output restored.png``."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from pyro_truncated.restoration.restore import Restored, denoise, inpaint
from pyro_truncated.utils.arguments import check_count, describe
from pyro_truncated.utils.console import progress_bar

_OVERLAP_PIXELS = 32


def restore_in_tiles(
    image: Tensor,
    restore: Callable[[Tensor, bool | None], Restored],
    most: int = 2**19,
    progress: bool | None = None,
    *,
    keeps_observed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Restores an image as a whole or in overlapping tiles.

    Tiles have at most ``most`` entries, and fade into each other. If ``restore`` keeps what was observed, as :func:`.inpaint` does without
    noise, those without missing entries are skipped. It is given a part, and whether to show a progress bar.

    Returns the image, and the root mean square of the noise learned in the tiles: one number, or one for each channel. It is zero if
    nothing was learned. Raises ``ValueError`` before any work is done if in a part that is restored by itself all is missing.
    """
    is_missing = image.isnan()
    if keeps_observed and not bool(is_missing.any()):
        return image.clone(), torch.zeros(())
    if image.numel() <= most:
        whole = restore(image, progress)
        return whole.image, _learned_noise(whole)
    side = math.isqrt(most // image[0, 0].numel())
    places = list(itertools.product(*(spans(size, side) for size in image.shape[:2])))
    for rows, columns in places:
        if bool(is_missing[rows, columns].flatten(0, 1).all(0).any()):
            where = f"rows {rows.start} to {rows.stop - 1} and columns {columns.start} to {columns.stop - 1}"
            raise ValueError(
                f"the image is restored in tiles of {side} x {side} pixels, and all of {where} is missing: scale the image down"
            )
    if keeps_observed:
        # All parts that cover a missing entry stay: they fade into each other there as ever.
        places = [place for place in places if bool(is_missing[place].any())]
    total, share, squares = torch.zeros_like(image), image.new_zeros(image.shape[:2]), torch.zeros(())
    with progress_bar(progress, total=len(places), desc="tiles") as bar:
        for place in places:
            part = restore(image[place], False)
            # Weights fade to overlapping ends, never to zero.
            pixels = (torch.arange(1, span.stop - span.start + 1, dtype=torch.float64) for span in place)
            weight = torch.outer(*(along.minimum(along.flip(0)).clamp(max=_OVERLAP_PIXELS) for along in pixels)).to(image)
            share[place] += weight
            total[place] += part.image * weight.reshape(weight.shape + (1,) * (image.dim() - 2))
            squares = squares + _learned_noise(part).square() / len(places)
            bar.update()
    restored = total / share.reshape(share.shape + (1,) * (image.dim() - 2))
    if keeps_observed:
        # Exactly, which means of what is the same in all parts are not; nor is there one where no part was restored.
        restored = torch.where(is_missing, restored, image)
    return restored, squares.sqrt()


def _learned_noise(restored: Restored) -> Tensor:
    return torch.as_tensor(restored.noise if restored.channel_noise is None else restored.channel_noise)


def spans(size: int, side: int) -> list[slice]:
    """Returns evenly spaced stretches of a side, with 32 common entries or more."""
    side = min(side, size)
    number = math.ceil((size - side) / max(1, side - _OVERLAP_PIXELS)) + 1
    starts = torch.linspace(0, size - side, number).round().long().tolist()
    return [slice(start, start + side) for start in starts]


# Grey, of sixteen or thirty-two bits.
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_WHITE = 65535.0  # of 16 bits
_IMAGE = (
    "the damaged picture, grey or colour, in any format that Pillow reads. White is 255; in grey pictures of 16 bits, and of 32 if a "
    "pixel exceeds 255, it is 65535. Scale what has 10, 12 or 14 bits. In real numbers NaN is missing"
)


@dataclass
class _Picture:
    """What was read."""

    pixels: Tensor  # from 0 to 255
    alpha: Image.Image | None = None  # how opaque they are
    is_deep: bool = False  # whether they have 16 bits
    profile: bytes | None = None  # of their colours
    num_pictures: int = 1  # how many pictures the file holds
    notes: str = ""  # what was lost in reading


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads, restores and writes; returns the exit status."""
    parser = _parser()
    args, others = parser.parse_known_args(arguments)
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}. One picture is restored at a time")
    try:
        if args.invert and args.mask is None:
            raise ValueError("--invert needs a mask: add --mask FILE")
        for option, path in (("the picture", args.image), ("--mask", args.mask)):
            if path is not None and args.output.exists() and args.output.samefile(path):
                raise ValueError(f"--output must be another file than {option}, which would be lost; got {args.output} for both")
        picture = _read_picture(args.image)
        image = picture.pixels if args.mask is None else _with_holes(picture.pixels, args.mask, is_inverted=args.invert)
        missing = float(image.isnan().double().mean())
        has_holes = missing > 0
        _check_output(args.output, "L" if image.dim() == 2 else "RGB", *image.shape[:2])
        torch.manual_seed(check_count("--seed", args.seed, least=-(2**63), most=2**64 - 1))
        options = {"side": args.side, "num_components": args.components, "rounds": args.rounds, "stride": args.stride}
        noise, method = (args.noise or 0.0, inpaint) if has_holes else (args.noise, denoise)
        keeps_seen = has_holes and noise == 0.0
        # Photons are counted in the numbers of the file.
        unit = _WHITE / 255 if noise == "poisson" and picture.is_deep else 1.0
        with _print_warnings():
            pixels, level = restore_in_tiles(
                image * unit, lambda part, bar: method(part, noise=noise, progress=bar, **options), keeps_observed=keeps_seen
            )
        omission = _write(args.output, pixels / unit, picture)
    except (OSError, UnidentifiedImageError, ValueError) as error:
        hint = ": Pillow reads no such format. Save the picture as PNG" if isinstance(error, UnidentifiedImageError) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted before {args.output} was written", file=sys.stderr)
        return 130
    levels = ", ".join(f"{one:.1f}" for one in level.flatten().tolist())
    done = "the noise of photons taken off" if noise == "poisson" else f"noise of standard deviation {levels} (of 255) taken off"
    if keeps_seen:
        done = f"the {100 * missing:.1f} % that are missing filled in"
    if missing > 0.5:
        done += ", more than half: with --invert what is white is missing"
    rest = f"; the first of the {picture.num_pictures} pictures in {args.image} alone" if picture.num_pictures > 1 else ""
    print(f"{args.output}: {done}{picture.notes}{omission}{rest}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyro_truncated.restoration",
        description="Takes noise off a picture, or fills in what is missing, from the picture alone.",
        epilog="A megapixel takes a quarter of an hour to more than an hour of a processor core, longest in colour. With --stride 2 "
        "it takes a fifth of that, and a little more noise is left. Pictures of more than half a million numbers are restored in parts.",
    )
    parser.add_argument("image", type=Path, help=_IMAGE)
    parser.add_argument(
        "--output", type=Path, required=True, help="where the restored picture goes, with the transparency and the bits of the damaged one"
    )
    parser.add_argument("--mask", type=Path, help="a picture of the same size: what is not nearly white is missing")
    parser.add_argument("--invert", action="store_true", help="what is not nearly black in the mask is missing")
    parser.add_argument(
        "--noise",
        type=_parse_noise,
        help="standard deviation of the noise, of 255, or one for each channel (5,10,40), or poisson: photon counts; default: estimated, "
        "or none with a mask",
    )
    parser.add_argument("--side", type=int, help="side of a patch in pixels; default: several, by the noise")
    parser.add_argument("--components", type=int, help="components of the mixture of patches; default: by the size")
    parser.add_argument("--rounds", type=int, help="rounds of learning; default: 3, or 8 with a mask")
    parser.add_argument("--stride", type=int, default=1, help="distance of neighbouring patches (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: %(default)s)")
    return parser


def _parse_noise(text: str) -> float | list[float] | str:
    if text == "poisson":
        return text
    try:
        levels = [float(level) for level in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, one for each channel such as 5,10,40, or poisson; got {text}") from None
    return levels if len(levels) > 1 else levels[0]


@contextlib.contextmanager
def _open_picture(path: Path) -> Iterator[Image.Image]:
    """Opens a file, and names it in all errors of damaged ones."""
    try:
        with Image.open(path) as picture:
            yield picture
    except (OSError, RuntimeError, SyntaxError, TypeError, Image.DecompressionBombError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} is damaged, or too large: {error}") from error


def _read_picture(path: Path) -> _Picture:
    """Returns pictures ``(height, width)`` or ``(height, width, 3)``, from 0 to 255, upright."""
    with _open_picture(path) as opened:
        notes = (
            "; its colours of 16 bits are read as 8"
            if opened.mode not in _DEEP and any(";16" in str(tile) for tile in getattr(opened, "tile", ()))
            else ""
        )
        picture = ImageOps.exif_transpose(opened)
        num_pictures = getattr(opened, "n_frames", 1)
        # Other colours become red, green and blue, of which their profile says nothing.
        profile = None if picture.mode in ("CMYK", "LAB") else opened.info.get("icc_profile")
        if picture.mode in _DEEP:
            pixels, is_deep = _scale_to_255(torch.from_numpy(np.array(picture, dtype=np.float32)), picture.mode)
            if picture.mode == "F":
                notes = "; its real numbers are written as whole ones, from 0 to 255"
            return _Picture(pixels, None, is_deep, profile, num_pictures, notes)
        alpha = picture.convert("RGBA").getchannel("A") if picture.has_transparency_data else None
        pixels = torch.from_numpy(np.array(picture.convert("L" if picture.mode in ("1", "L", "LA") else "RGB"))).float()
        return _Picture(pixels, alpha, False, profile, num_pictures, notes)


def _scale_to_255(pixels: Tensor, mode: str) -> tuple[Tensor, bool]:
    """Returns grey pixels of more than eight bits, scaled to 255.

    White is 65535 in pictures of 16 bits, and in those of 32 bits if any pixel exceeds 255.
    """
    observed = pixels[~pixels.isnan()]
    if not len(observed):
        raise ValueError(f"the picture must have an observed pixel; got {describe(pixels)}")
    least, most = float(observed.min()), float(observed.max())
    if not math.isfinite(most - least):
        raise ValueError(f"the picture must be finite, or NaN where missing; got {describe(pixels)}")
    is_deep = mode.startswith("I;16") or (mode == "I" and most > 255)
    largest = _WHITE if is_deep else 255.0
    if mode == "F" and least >= 0 and 0 < most <= 1:
        # Of what is hardly above zero the brightest pixel is white.
        top = 1.0 if most > 1 / 255 else most
        raise ValueError(f"the pixels of a picture lie between 0 and 255; these between 0 and {top:g}: multiply them by {255 / top:g}")
    if not 0 <= least <= most <= largest:
        raise ValueError(
            f"the pixels of a picture lie between 0 and 255, of 16 bits between 0 and 65535; these between {least:g} and {most:g}: "
            f"scale them, for example by (pixels - {least:g}) * {255 / max(most - least, 1e-300):g}"
        )
    return pixels * (255 / largest), is_deep


def _write(path: Path, pixels: Tensor, picture: _Picture) -> str:
    """Writes restored pixels in the picture's mode; returns what was lost."""
    # Of formats that lose some of the picture.
    options: dict[str, Any] = {"quality": 95, "icc_profile": picture.profile}
    shallow = Image.fromarray(pixels.round().clamp(0, 255).to(torch.uint8).numpy())
    whole = shallow.copy()
    if picture.is_deep:
        whole = Image.fromarray((pixels.double() * 257).round().clamp(0, 65535).numpy().astype(np.uint16))
    if picture.alpha is not None:
        whole.putalpha(picture.alpha)
    if whole.mode != shallow.mode:
        try:
            whole.save(path, **options)
            _check_file(whole, path)
        except (OSError, ValueError):  # Not in this format.
            pass
        else:
            return ""
    shallow.save(path, **options)
    omissions = (f"; {path.suffix} takes no 16 bits, written as 8", f"; {path.suffix} takes no transparency, which is left out")
    return "" if whole.mode == shallow.mode else omissions[picture.alpha is not None]


def _check_file(picture: Image.Image, path: Path) -> None:
    """Refuses a written file that lacks what formats may silently drop."""
    with Image.open(path) as written:
        if picture.has_transparency_data:
            # Lossy formats keep it nearly: by how much it may differ in a file, of 255.
            alphas = (np.array(some.convert("RGBA").getchannel("A"), dtype=np.int16) for some in (written, picture))
            is_same = written.has_transparency_data and bool(np.abs(np.subtract(*alphas)).max() <= 16)
        else:
            is_same = np.array_equal(np.array(written), np.array(picture))
    if not is_same:
        raise ValueError(f"{path} must hold transparency and depth of the picture; got a file in mode {written.mode}")


@contextlib.contextmanager
def _print_warnings() -> Iterator[None]:
    """Prints warnings in a line each, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        print(f"warning: {text}", file=sys.stderr)


def _mask_values(path: Path) -> tuple[np.ndarray, float, bool]:
    """Returns the pixels of a mask, ``(height, width)``; transparent ones are white.

    The second number says which part of the distance from white to black is no noise, the third
    whether pixels have more than eight bits.
    """
    with _open_picture(path) as opened:
        # Edges of drawn text are grey, and blocks of lossy formats are, too.
        least = 1 / 8 if opened.format in ("JPEG", "WEBP") else 1 / 50
        picture = ImageOps.exif_transpose(opened)
        if picture.mode in _DEEP:
            return np.array(picture, dtype=np.float32), least, True
        whole = picture.convert("RGBA")
        white = Image.new("RGBA", whole.size, "white")
        values = np.array(Image.alpha_composite(white, whole).convert("RGB"), dtype=np.float32)
    # Any colour is as far from white as its darkest part.
    return values.min(-1), least, False


def _hidden_pixels(path: Path, *, is_inverted: bool) -> np.ndarray:
    """Returns which pixels a mask hides, those unlike most, and NaN.

    Black and white are the medians of two clusters, as paper and ink of a scan are neither.

    Raises:
        ValueError: for a photograph.
    """
    values, least, is_deep = _mask_values(path)
    observed = values[~np.isnan(values)]
    if not len(observed):
        return np.ones(values.shape, bool)
    middle = (observed.min() + observed.max()) / 2
    for _ in range(10 if observed.min() < observed.max() else 0):
        middle = (observed[observed <= middle].mean() + observed[observed > middle].mean()) / 2
    is_white = observed > middle
    levels = [float(np.median(some)) if len(some) else float(middle) for some in (observed[~is_white], observed[is_white])]
    # Black and white of masks of eight bits differ by more than this, but for masks of zeros and ones.
    most_black = 16
    is_noise = not is_deep and levels[1] - levels[0] <= most_black and (observed.max() > most_black or len(np.unique(observed)) > 2)
    if is_noise or levels[0] == levels[1]:
        is_all_white = levels[1] > (most_black if is_noise else 0)
        return np.asarray(np.isnan(values) | (is_all_white == is_inverted))
    white, other = levels if is_inverted else levels[::-1]
    # The standard deviation of normal numbers by their median absolute deviation.
    spread = 1.4826 * float(np.median(np.abs(observed[is_white != is_inverted] - white)))
    is_grey = np.minimum(abs(observed - white), abs(observed - other)) > abs(other - white) / 4
    # Soft masks have grey edges, and scans grey paper; photographs have both.
    if is_grey.mean() > 1 / 20 and spread > abs(other - white) / 16:
        raise ValueError(
            f"--mask must have two levels, black and white; got a photograph, {path}: {is_grey.mean():.0%} of it is far from both, "
            f"of masks at most 5 %. Paint missing pixels black and observed ones white."
        )
    distance = (values - white) * np.sign(other - white)
    # Up to four deviations of a scan's paper are no ink.
    return ~(distance <= max(least * abs(other - white), 4.0 * spread))


def _with_holes(pixels: Tensor, path: Path, *, is_inverted: bool) -> Tensor:
    is_hidden = torch.from_numpy(_hidden_pixels(path, is_inverted=is_inverted))
    for hides, what in ((~is_hidden.any(), "nothing"), (is_hidden.all(), "all")):
        if hides:
            other = "leave --invert out" if is_inverted else "add --invert"
            raise ValueError(f"--mask hides {what}: paint missing pixels black and observed ones white, or {other}")
    if is_hidden.shape != pixels.shape[:2]:
        sizes = ["x".join(map(str, reversed(array.shape[:2]))) for array in (pixels, is_hidden)]
        raise ValueError(f"--mask must have the size of the picture, {sizes[0]}; got {sizes[1]}")
    return torch.where(is_hidden.reshape(is_hidden.shape + (1,) * (pixels.dim() - 2)), torch.nan, pixels)


def _check_output(path: Path, mode: str, height: int, width: int) -> None:
    """Checks whether pictures of this mode and size can be written."""
    written, size = io.BytesIO(), f"{width}x{height}"
    try:
        Image.new(mode, (width, height)).save(written, Image.registered_extensions()[path.suffix.lower()])
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(
            f"--output must end with the name of a format that Pillow writes pictures of size {size} in, such as .png; got {path}"
        ) from error
    written_size = None  # where Pillow cannot read what it writes
    with contextlib.suppress(UnidentifiedImageError), Image.open(written) as picture:
        written_size = f"{picture.width}x{picture.height}"
    # Icons have certain sizes, and Pillow makes others fit without a word.
    if written_size not in (size, None):
        raise ValueError(
            f"--output must name a format that keeps the size of the picture, {size}, such as .png; got {path}, of size {written_size}"
        )
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError(f"--output must be a file that can be written; got {path}, {'a folder' if path.is_dir() else 'which cannot'}")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ValueError(f"--output must lie in a folder that exists and can be written; {path.parent} does not")


if __name__ == "__main__":
    sys.exit(main())
