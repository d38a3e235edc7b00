"""The check of the site finds what is wrong with a page, and nothing in the site, where that has been built and a browser is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs" / "_build" / "html"
GOOD = '<html><body id="top"><p>words</p><a href="other.html#there">other</a></body></html>'
OTHER = '<html><body><p id="there">words</p></body></html>'


def load(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


check_in_browser = load(ROOT / "docs" / "check_in_browser.py")
in_browser = pytest.mark.skipif(not check_in_browser.available(), reason="Chromium, its driver or Selenium is missing")


def write(folder: Path, body: str, page: str = "index.html") -> Path:
    (folder / page).write_text(GOOD.replace("<p>words</p>", body))
    (folder / "other.html").write_text(OTHER)
    return folder


def test_links_that_lead_somewhere_are_not_reported(tmp_path):
    assert check_in_browser.broken_links(write(tmp_path, '<a href="#top">up</a> <a href="https://pyro.ai">away</a>')) == []


@pytest.mark.parametrize("link", ["missing.html", "other.html#nowhere", "#nowhere"])
def test_a_link_that_leads_nowhere_is_found(tmp_path, link):
    assert link in check_in_browser.broken_links(write(tmp_path, f'<a href="{link}">there</a>'))[0]


@in_browser
@pytest.mark.slow
def test_what_a_reader_would_miss_is_found(tmp_path):
    bodies = {
        "pixels wider than a phone": '<div style="width: 900px">wide</div>',
        "pictures": '<img src="other.html">',
        "formulas": "<mjx-merror>Undefined control sequence</mjx-merror>",
        "formulas are not set": '<span class="math">x</span>',
    }
    found = {}
    with check_in_browser.served(tmp_path) as address, check_in_browser.browser() as driver:
        write(tmp_path, "<p>words</p>")
        assert check_in_browser.look(driver, address, "index.html") == []
        for number, (what, body) in enumerate(bodies.items()):
            write(tmp_path, body, f"{number}.html")
            found[what] = check_in_browser.look(driver, address, f"{number}.html", patience=1)
    assert {what for what, problems in found.items() if len(problems) == 1 and what in problems[0]} == bodies.keys()


@in_browser
@pytest.mark.slow
@pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site has not been built (make docs)")
def test_nothing_is_wrong_with_the_site():
    assert check_in_browser.check(SITE) == []


@pytest.fixture
def extensions(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs" / "extensions"), *sys.path])


def test_every_public_object_is_documented_once(extensions):
    public_names = importlib.import_module("public_names")
    seen, at_home, everything = set(), [], set()
    for package in public_names.installed():
        names = public_names.public_names(package, seen)
        at_home += [id(public.value) for public in names if public.is_at_home]
        everything |= {id(public.value) for public in names}
    assert len(at_home) > 200
    assert sorted(at_home) == sorted(everything)


def test_every_script_has_its_place_in_the_reading_order(extensions):
    public_names = importlib.import_module("public_names")
    scripts = {path.stem for path in (ROOT / "docs" / "scripts").rglob("*.py")}
    assert scripts == {*public_names.TUTORIALS, *public_names.COMPARISONS}


def test_inventories_are_read_by_sphinx(extensions, tmp_path):
    """Every name that is listed can be linked, at the address that its list begins with."""
    from sphinx.util.inventory import InventoryFile

    inventories = importlib.import_module("inventories")
    folder = ROOT / "docs" / "inventories"
    for name, (address, path) in inventories.inventories(folder, tmp_path).items():
        _, mentions = inventories.read(folder / f"{name}.txt")
        loaded = InventoryFile.loads(Path(path).read_bytes(), uri=address)
        known = {item for kind in loaded.data.values() for item in kind}
        assert known == {mention.name for mention in mentions}
