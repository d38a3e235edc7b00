"""python -m pyro_truncated.restoration: pictures in files."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageDraw, ImageFilter

from pyro_truncated.restoration import __main__ as command
from pyro_truncated.restoration import denoise
from pyro_truncated.restoration.__main__ import main

QUICK = ["--side", "3", "--rounds", "1"]


def pixels_of(path):
    with Image.open(path) as picture:
        return np.array(picture)


@pytest.mark.slow
def test_the_command_line_restores_files_and_names_what_is_wrong(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name, shape in (("grey.png", (14, 15)), ("colour.png", (14, 15, 3))):
        Image.fromarray(rng.integers(0, 255, shape, dtype=np.uint8)).save(tmp_path / name)
        arguments = [str(tmp_path / name), "--output", str(tmp_path / f"out_{name}"), "--side", "4", "--components", "8", "--rounds", "1"]
        assert main(arguments) == 0
        assert np.array(Image.open(tmp_path / f"out_{name}")).shape == shape
    Image.fromarray((rng.random((14, 15)) < 0.5).astype(np.uint8) * 255).save(tmp_path / "mask.png")
    assert main([*arguments, "--mask", str(tmp_path / "mask.png")]) == 0
    seen, given, found = (np.array(Image.open(tmp_path / name)) for name in ("mask.png", "colour.png", "out_colour.png"))
    assert np.array_equal(found[seen > 0], given[seen > 0])
    capsys.readouterr()
    for wrong in (["nothing.png", "--output", "x.png"], [str(tmp_path / "grey.png"), "--output", str(tmp_path / "x.exe")]):
        assert main(wrong) == 1
        assert "error:" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_line_reads_what_cameras_and_scanners_write(tmp_path, capsys):
    grey = np.random.default_rng(0).integers(0, 255, (12, 15))
    pictures = {"8.png": grey.astype(np.uint8), "16.png": (257 * grey).astype(np.uint16), "32.tiff": (257 * grey).astype(np.int32)}
    found = []
    for name, pixels in {**pictures, "float.tiff": grey.astype(np.float32)}.items():
        Image.fromarray(pixels).save(tmp_path / name)
        assert main([str(tmp_path / name), "--output", str(tmp_path / "out.png"), "--side", "4", "--components", "8", "--rounds", "1"]) == 0
        pixels = pixels_of(tmp_path / "out.png")
        assert pixels.dtype == (np.uint16 if name in ("16.png", "32.tiff") else np.uint8)
        found.append(pixels.astype(int) // (257 if pixels.dtype == np.uint16 else 1))
    assert all(np.abs(other - found[0]).max() <= 1 for other in found)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(grey.astype(np.uint8)).save(tmp_path / "turned.jpg", exif=turned)
    assert main([str(tmp_path / "turned.jpg"), "--output", str(tmp_path / "out.png"), "--side", "4", "--rounds", "1"]) == 0
    assert pixels_of(tmp_path / "out.png").shape == (15, 12)
    Image.fromarray((grey / 255).astype(np.float32)).save(tmp_path / "share.tiff")
    capsys.readouterr()
    assert main([str(tmp_path / "share.tiff"), "--output", str(tmp_path / "out.png")]) == 1
    assert "between 0 and 255" in capsys.readouterr().err


@pytest.mark.slow
def test_files_are_written_as_transparent_and_deep_as_they_were_or_it_is_said(tmp_path, capsys):
    rng = np.random.default_rng(0)
    given = {"colour": rng.integers(0, 255, (8, 9, 4), dtype=np.uint8), "grey": rng.integers(0, 65535, (8, 9)).astype(np.uint16)}
    Image.fromarray((rng.random((8, 9)) < 0.7).astype(np.uint8) * 255).save(tmp_path / "mask.png")
    seen = pixels_of(tmp_path / "mask.png") > 0
    # A bmp leaves transparency out, and a webp makes deep pixels white, without an error.
    for name, lost, poor in (("colour", "no transparency", "bmp"), ("grey", "no 16 bits", "webp")):
        Image.fromarray(given[name]).save(tmp_path / f"{name}.png")
        flags = ["--mask", str(tmp_path / "mask.png"), "--side", "3", "--rounds", "1"]
        for kind in ("png", "jpg", poor):
            assert main([str(tmp_path / f"{name}.png"), "--output", str(tmp_path / f"out.{kind}"), *flags]) == 0
            assert (lost in capsys.readouterr().out) == (kind != "png")
        assert pixels_of(tmp_path / f"out.{poor}").mean() == pytest.approx(pixels_of(tmp_path / "out.jpg").mean(), abs=3)
        found = pixels_of(tmp_path / "out.png")
        assert found.dtype == given[name].dtype
        assert np.array_equal(found[seen], given[name][seen])
        assert np.array_equal(found[..., 3:], given[name][..., 3:]) or name == "grey"


@pytest.mark.slow
def test_masks_of_any_depth_say_what_is_seen_by_what_is_not_zero(tmp_path):
    given = np.random.default_rng(0).integers(0, 255, (8, 9), dtype=np.uint8)
    Image.fromarray(given).save(tmp_path / "grey.png")
    seen = np.random.default_rng(1).random((8, 9)) < 0.7
    for kind, value in ((np.float32, 0.4), (np.uint16, 100), (np.int32, 1)):
        Image.fromarray((value * seen).astype(kind)).save(tmp_path / "mask.tiff")
        arguments = ["--output", str(tmp_path / "out.png"), "--mask", str(tmp_path / "mask.tiff"), "--side", "3", "--rounds", "1"]
        assert main([str(tmp_path / "grey.png"), *arguments]) == 0
        found = pixels_of(tmp_path / "out.png")
        assert np.array_equal(found[seen], given[seen])
        assert (found[~seen] != given[~seen]).any()


@pytest.mark.parametrize("ending", [".psd", ".xbm", ".exe", ""])
def test_formats_that_cannot_be_written_are_refused_before_the_work(tmp_path, capsys, monkeypatch, ending):
    monkeypatch.setattr(command, "denoise", None)
    Image.fromarray(np.zeros((8, 9), np.uint8)).save(tmp_path / "grey.png")
    assert main([str(tmp_path / "grey.png"), "--output", str(tmp_path / f"out{ending}")]) == 1
    assert "--output must end with the name of a format" in capsys.readouterr().err


@pytest.mark.parametrize(("ending", "size"), [(".ico", "16x14"), (".icns", "1024x1024"), (".ICO", "16x14")])
def test_formats_that_change_the_size_are_refused_before_the_work(tmp_path, capsys, monkeypatch, ending, size):
    monkeypatch.setattr(command, "denoise", None)
    Image.fromarray(np.zeros((20, 23), np.uint8)).save(tmp_path / "grey.png")
    assert main([str(tmp_path / "grey.png"), "--output", str(tmp_path / f"out{ending}")]) == 1
    message = f"--output must name a format that keeps the size of the picture, 23x20, such as .png; got {tmp_path / 'out'}"
    assert f"{message}{ending}, of size {size}" in capsys.readouterr().err
    assert not (tmp_path / f"out{ending}").exists()


def test_pictures_that_are_too_large_for_a_format_are_refused_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "denoise", None)
    Image.fromarray(np.zeros((2, 16_384), np.uint8)).save(tmp_path / "wide.png")
    assert main([str(tmp_path / "wide.png"), "--output", str(tmp_path / "out.webp")]) == 1
    assert "--output must end with the name of a format that Pillow writes pictures of size 16384x2 in" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "side"), [(".ico", 16), (".pdf", 20)])
def test_icons_of_their_own_size_and_formats_that_are_not_read_are_written(tmp_path, ending, side):
    grey = np.random.default_rng(0).integers(0, 255, (side, side), dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    assert main([str(tmp_path / "grey.png"), "--output", str(tmp_path / f"out{ending}"), *QUICK]) == 0
    assert ending == ".pdf" or pixels_of(tmp_path / "out.ico").shape[:2] == (side, side)


@pytest.mark.slow
def test_grey_pictures_in_files_of_colours_are_restored_as_grey_ones(tmp_path):
    grey = np.random.default_rng(0).integers(0, 255, (12, 13), dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey).convert("RGB").save(tmp_path / "colour.png")
    found = []
    for name in ("grey", "colour"):
        assert main([str(tmp_path / f"{name}.png"), "--output", str(tmp_path / "out.png"), *QUICK]) == 0
        found.append(pixels_of(tmp_path / "out.png"))
    assert np.array_equal(found[1], np.repeat(found[0][..., None], 3, 2))
    assert not np.array_equal(found[0], grey)


@pytest.mark.slow
def test_profiles_are_kept_quality_is_high_and_other_pictures_are_mentioned(tmp_path, capsys):
    rng = np.random.default_rng(0)
    first, second = (Image.fromarray(rng.integers(0, 255, (16, 17, 3), dtype=np.uint8)) for _ in range(2))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    first.save(tmp_path / "given.tiff", save_all=True, append_images=[second], icc_profile=profile)
    for kind in ("png", "jpg"):
        assert main([str(tmp_path / "given.tiff"), "--output", str(tmp_path / f"out.{kind}"), *QUICK]) == 0
        assert "; the first of the 2 pictures in" in capsys.readouterr().out
    with Image.open(tmp_path / "out.jpg") as written:
        assert written.info["icc_profile"] == profile
    # Pillow's own quality is a root mean square of 14 away.
    difference = pixels_of(tmp_path / "out.jpg").astype(float) - pixels_of(tmp_path / "out.png")
    assert np.sqrt((difference**2).mean()) < 10


def test_grey_pictures_keep_transparency_where_the_format_has_it_for_colours(tmp_path, capsys):
    given = np.random.default_rng(0).integers(0, 255, (8, 9, 2), dtype=np.uint8)
    Image.fromarray(given).save(tmp_path / "grey.png")
    Image.fromarray((given[..., 0] < 128).astype(np.uint8)).save(tmp_path / "mask.png")
    assert main([str(tmp_path / "grey.png"), "--output", str(tmp_path / "out.webp"), *QUICK, "--mask", str(tmp_path / "mask.png")]) == 0
    said = capsys.readouterr().out
    assert "no transparency" not in said
    assert f"the {100 * (given[..., 0] >= 128).mean():.1f} % that are missing" in said
    assert np.array_equal(pixels_of(tmp_path / "out.webp")[..., 3], given[..., 1])


def test_help_says_what_is_white(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "it is 65535" in " ".join(capsys.readouterr().out.split())


def drawn_mask(size=(20, 18)):
    """A disc with soft edges, as programs draw it: black on white."""
    rows, columns = np.mgrid[: size[0], : size[1]]
    distance = np.hypot(rows - 9, columns - 8)
    return (255 * np.clip((distance - 3) / 3, 0, 1)).astype(np.uint8)


@pytest.mark.parametrize("kind", ["png", "jpg", "inverted", "transparent", "red", "ones", "grey", "scan", "nearly black", "NaN"])
def test_masks_as_programs_draw_them_hide_the_damage(tmp_path, capsys, kind):
    soft = drawn_mask() if kind != "jpg" else np.where(drawn_mask() < 128, 0, 255).astype(np.uint8)
    given = np.full(soft.shape, 100, np.uint8)
    given[soft < 250] = 255
    Image.fromarray(given).save(tmp_path / "damaged.png")
    mask, flags = Image.fromarray(soft), []
    if kind == "inverted":
        mask, flags = Image.fromarray(255 - soft), ["--invert"]
    elif kind == "transparent":
        mask = Image.new("RGBA", mask.size, "black")
        mask.putalpha(Image.fromarray(255 - soft))
    elif kind == "red":
        mask = Image.fromarray(np.stack([np.full_like(soft, 255), soft, soft], -1))
    elif kind == "ones":
        mask = Image.fromarray((soft >= 250).astype(np.uint8))
    elif kind == "grey":
        mask = Image.fromarray(np.where(soft < 250, 128, 255).astype(np.uint8))
    elif kind == "scan":
        paper = np.random.default_rng(0).normal(235, 5, soft.shape)
        mask = Image.fromarray(np.where(soft < 250, 20, paper).clip(0, 255).astype(np.uint8))
    elif kind == "nearly black":
        mask, flags = Image.fromarray(np.where(soft < 250, 250, 6).astype(np.uint8)), ["--invert"]
    elif kind == "NaN":
        mask = Image.fromarray(np.where(soft < 250, np.nan, 1).astype(np.float32))
    path = tmp_path / f"mask.{({'jpg': 'jpg', 'NaN': 'tif'}).get(kind, 'png')}"
    mask.save(path, quality=95)
    assert main([str(tmp_path / "damaged.png"), "--output", str(tmp_path / "out.png"), "--mask", str(path), *flags, *QUICK]) == 0
    assert (np.abs(pixels_of(tmp_path / "out.png").astype(int) - 100) < 20).all()
    assert "are missing filled in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("level", "what", "flags"), [(255, "nothing", []), (0, "all", []), (0, "nothing", ["--invert"]), (255, "all", ["--invert"])]
)
@pytest.mark.parametrize("kind", ["png", "jpg"])
def test_masks_that_hide_nothing_or_all_are_refused(tmp_path, capsys, level, what, flags, kind):
    Image.fromarray(np.zeros((20, 18), np.uint8)).save(tmp_path / "grey.png")
    noise = np.random.default_rng(0).integers(0, 5, (20, 18)) * (kind == "jpg")
    Image.fromarray(np.abs(level - noise).astype(np.uint8)).save(tmp_path / f"mask.{kind}")
    arguments = [str(tmp_path / "grey.png"), "--output", str(tmp_path / "out.png"), "--mask", str(tmp_path / f"mask.{kind}"), *flags]
    assert main(arguments) == 1
    assert f"--mask hides {what}" in capsys.readouterr().err


def test_an_inverted_mask_must_be_there(tmp_path, capsys):
    Image.fromarray(np.zeros((20, 18), np.uint8)).save(tmp_path / "grey.png")
    assert main([str(tmp_path / "grey.png"), "--output", str(tmp_path / "out.png"), "--invert"]) == 1
    assert "--invert needs a mask" in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists()


def test_more_than_half_missing_is_said(tmp_path, capsys):
    Image.fromarray(np.arange(240, dtype=np.uint8).reshape(12, 20)).save(tmp_path / "grey.png")
    Image.fromarray((np.arange(240).reshape(12, 20) % 3 == 0).astype(np.uint8) * 255).save(tmp_path / "mask.png")
    assert main([str(tmp_path / "grey.png"), "--output", str(tmp_path / "out.png"), "--mask", str(tmp_path / "mask.png"), *QUICK]) == 0
    assert "more than half: with --invert" in capsys.readouterr().out


def test_real_numbers_say_what_to_do_and_nan_is_filled_in(tmp_path, capsys):
    grey = np.random.default_rng(0).random((12, 13)).astype(np.float32)
    Image.fromarray(grey).save(tmp_path / "unit.tif")
    assert main([str(tmp_path / "unit.tif"), "--output", str(tmp_path / "out.tif")]) == 1
    assert "multiply them by 255" in capsys.readouterr().err
    Image.fromarray(np.float32(1e-5) * (grey / grey.max())).save(tmp_path / "dark.tif")
    assert main([str(tmp_path / "dark.tif"), "--output", str(tmp_path / "out.tif")]) == 1
    assert "between 0 and 1e-05: multiply them by 2.55e+07" in capsys.readouterr().err
    Image.fromarray(np.where(grey > 0.9, np.float32(np.inf), grey)).save(tmp_path / "infinite.tif")
    assert main([str(tmp_path / "infinite.tif"), "--output", str(tmp_path / "out.tif")]) == 1
    assert "the picture must be finite, or NaN where missing; got" in capsys.readouterr().err
    holes = 255 * grey
    holes[:3, :3] = np.nan
    Image.fromarray(holes).save(tmp_path / "holes.tif")
    assert main([str(tmp_path / "holes.tif"), "--output", str(tmp_path / "out.png"), *QUICK]) == 0
    assert "the 5.8 % that are missing filled in" in capsys.readouterr().out
    assert np.abs(pixels_of(tmp_path / "out.png")[3:] - holes[3:]).max() <= 1
    Image.fromarray(300 * grey - 20).save(tmp_path / "other.tif")
    assert main([str(tmp_path / "other.tif"), "--output", str(tmp_path / "out.png")]) == 1
    assert "scale them" in capsys.readouterr().err
    Image.fromarray(np.full((12, 13), np.nan, np.float32)).save(tmp_path / "nothing.tif")
    assert main([str(tmp_path / "nothing.tif"), "--output", str(tmp_path / "out.png")]) == 1
    assert "the picture must have an observed pixel; got" in capsys.readouterr().err


def test_files_that_are_not_read_say_what_to_do(tmp_path, capsys):
    (tmp_path / "letter.tif").write_text("no picture")
    assert main([str(tmp_path / "letter.tif"), "--output", str(tmp_path / "out.png")]) == 1
    assert "Pillow reads no such format. Save the picture as PNG" in capsys.readouterr().err


def test_a_picture_is_not_lost_to_its_own_output(tmp_path, capsys):
    picture, mask = tmp_path / "picture.png", tmp_path / "mask.png"
    for path in (picture, mask):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16), dtype=np.uint8)).save(path)
    before = picture.read_bytes(), mask.read_bytes()
    for output, named in ((picture, "the picture"), (tmp_path / "." / "mask.png", "--mask")):
        assert main([str(picture), "--mask", str(mask), "--output", str(output)]) == 1
        assert f"--output must be another file than {named}" in capsys.readouterr().err
    assert (picture.read_bytes(), mask.read_bytes()) == before
    # A folder was found out after the work.
    (tmp_path / "folder.png").mkdir()
    assert main([str(picture), "--output", str(tmp_path / "folder.png"), "--rounds", "0"]) == 1
    assert "--output must be a file that can be written; got" in capsys.readouterr().err


def test_pictures_of_real_numbers_are_told_to_lose_them(tmp_path, capsys):
    Image.fromarray(np.random.default_rng(0).random((12, 12), dtype=np.float32) * 200).save(tmp_path / "real.tif")
    assert main([str(tmp_path / "real.tif"), "--output", str(tmp_path / "out.tif"), *QUICK]) == 0
    assert "; its real numbers are written as whole ones, from 0 to 255" in capsys.readouterr().out


def test_several_pictures_are_told_to_come_one_by_one(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["a.png", "b.png", "c.png", "--output", str(tmp_path / "o.png")])
    assert "unrecognized arguments: b.png c.png. One picture is restored at a time" in capsys.readouterr().err


def painted(picture):
    """A photograph over which somebody has painted what is missing."""
    return np.where(np.arange(60) % 20 < 3, 0, picture).astype(np.uint8)


PHOTOGRAPHS = {
    "photograph": lambda picture: picture,
    "painted photograph": painted,
    "dark photograph": lambda picture: (picture / 4).astype(np.uint8),
    "sixteen bits": lambda picture: 257 * picture.astype(np.uint16),
    "colour": lambda picture: np.stack([picture, picture.T[::-1], 255 - picture], -1),
}


@pytest.mark.parametrize("flags", [[], ["--invert"]])
@pytest.mark.parametrize("kind", PHOTOGRAPHS)
def test_photographs_are_no_masks(tmp_path, capsys, kind, flags):
    height, width = np.mgrid[:60, :60] / 60
    picture = (110 + 60 * np.sin(5 * height + width**2) + 50 * np.cos(7 * width * height)).clip(0, 255).astype(np.uint8)
    Image.fromarray(picture).save(tmp_path / "grey.png")
    Image.fromarray(PHOTOGRAPHS[kind](picture)).save(tmp_path / "mask.png")
    assert main([str(tmp_path / "grey.png"), "--output", str(tmp_path / "out.png"), "--mask", str(tmp_path / "mask.png"), *flags]) == 1
    error = capsys.readouterr().err
    assert "--mask must have two levels, black and white; got a photograph" in error
    assert "of masks at most 5 %" in error
    assert not (tmp_path / "out.png").exists()


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("noise", [0.0, 3.0, 6.0])
def test_noisy_and_soft_masks_are_masks(tmp_path, capsys, noise):
    mask = Image.new("L", (60, 50), 235)
    ImageDraw.Draw(mask).rectangle((25, 15, 40, 30), fill=25)
    soft = np.array(mask.filter(ImageFilter.GaussianBlur(2)), float)
    pixels = soft + noise * np.random.default_rng(0).normal(size=soft.shape)
    Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).save(tmp_path / "mask.png")
    Image.fromarray(np.tile(np.arange(60, dtype=np.uint8), (50, 1))).save(tmp_path / "grey.png")
    assert main([str(tmp_path / "grey.png"), "--output", str(tmp_path / "out.png"), "--mask", str(tmp_path / "mask.png"), *QUICK]) == 0
    share = float(re.search(r"the (.*) % that are missing filled in", capsys.readouterr().out)[1]) / 100
    assert 14**2 <= share * 60 * 50 <= 25**2


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_command_line_counts_photons_in_the_numbers_of_the_file(tmp_path, capsys, dtype):
    rows = np.arange(24.0)
    counts = np.random.default_rng(0).poisson(20 + 15 * np.sin(rows / 4)[:, None] * np.cos(rows / 5)).astype(dtype)
    Image.fromarray(counts).save(tmp_path / "in.png")
    options = [str(tmp_path / "in.png"), "--output", str(tmp_path / "out.png"), "--side", "4", "--rounds", "1"]
    assert main([*options, "--noise", "poisson"]) == 0
    assert "the noise of photons taken off" in capsys.readouterr().out
    torch.manual_seed(0)
    expected = denoise(torch.from_numpy(counts.astype(np.float32)), "poisson", side=4, rounds=1, progress=False)
    np.testing.assert_array_equal(pixels_of(tmp_path / "out.png"), np.round(expected))


def test_the_command_line_takes_and_tells_the_noise_of_each_channel(tmp_path, capsys):
    noise = np.random.default_rng(0).normal(size=(30, 32, 3)) * [4, 10, 40]
    Image.fromarray((128 + noise).clip(0, 255).round().astype(np.uint8)).save(tmp_path / "in.png")
    options = [str(tmp_path / "in.png"), "--output", str(tmp_path / "out.png"), "--side", "3", "--rounds", "1"]
    for given in ([], ["--noise", "4,10,40"]):
        assert main([*options, *given]) == 0
        levels = re.search(r"deviation ([\d.]+), ([\d.]+), ([\d.]+) \(of 255\)", capsys.readouterr().out).groups()
        np.testing.assert_allclose([float(level) for level in levels], [4, 10, 40], rtol=0.15)
    with pytest.raises(SystemExit):
        main([*options, "--noise", "loud"])
    assert "one for each channel such as 5,10,40, or poisson; got loud" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["picture", "mask"])
@pytest.mark.parametrize("kind", ["png", "bmp"])
def test_damaged_files_are_named(role, kind, tmp_path, capsys):
    good, bad = tmp_path / "good.png", tmp_path / f"bad.{kind}"
    for path in (good, bad):
        Image.fromarray(np.arange(300).reshape(15, 20).astype(np.uint8)).save(path)
    content = bad.read_bytes()
    # Half of a file, or one that claims to have 2^32 pixels.
    bad.write_bytes(content[: len(content) // 2] if kind == "png" else content[:18] + 2 * b"\0\0\1\0" + content[26:])
    files = [str(bad)] if role == "picture" else [str(good), "--mask", str(bad)]
    assert main([*files, "--output", str(tmp_path / "out.png"), *QUICK]) == 1
    assert str(bad) in capsys.readouterr().err


def test_seeds_that_torch_cannot_take_are_named(tmp_path, capsys):
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "in.png")
    assert main([str(tmp_path / "in.png"), "--output", str(tmp_path / "out.png"), "--seed", "9" * 20, *QUICK]) == 1
    assert "--seed must lie in" in capsys.readouterr().err


def test_an_interruption_is_a_line_and_a_status(tmp_path, capsys, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "in.png")
    monkeypatch.setattr(command, "denoise", interrupt)
    assert main([str(tmp_path / "in.png"), "--output", str(tmp_path / "out.png"), *QUICK]) == 130
    assert capsys.readouterr().err == f"interrupted before {tmp_path / 'out.png'} was written\n"
    assert not (tmp_path / "out.png").exists()
