"""Opens every page of the built site in headless Chromium.

No link, picture or formula may be broken, nothing wider than a phone, and search has to find pages.

    python docs/check_in_browser.py docs/_build/html

Says that it skips, and succeeds, where Chromium or its driver is missing. With ``--pictures FOLDER`` screenshots of some pages are written.
"""

import argparse
import functools
import http.server
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

PHONE, WIDE = (390, 844), (1366, 900)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
)
# Waits until formulas are set, so many seconds at most, then says what a reader would miss.
LOOK = """
const done = arguments[arguments.length - 1];
const count = selector => document.querySelectorAll(selector).length;
const unset = () => count("span.math, div.math") - count("mjx-container");
const report = () => done({
  pictures: [...document.images].filter(i => i.complete && !i.naturalWidth && i.getClientRects().length).map(i => i.src),
  formulas: [...document.querySelectorAll("mjx-merror, .merror")].map(e => e.textContent),
  unset: unset(),
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  foreign: performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith(location.origin) && !n.startsWith("data:")),
});
const wait = left => unset() > 0 && left > 0 ? setTimeout(() => wait(left - 1), 100) : report();
wait(10 * arguments[0]);
"""
SHOWN = (
    "index.html",
    "tutorials/index.html",
    "tutorials/twenty_lines.html",
    "how-to/choose.html",
    "explanation/bound.html",
    "reference/packages/pyro_truncated.html",
)


def available() -> bool:
    """Whether Chromium, its driver and Selenium are installed."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return False
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serves the site, as search needs, and yields its address."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    try:
        driver.set_script_timeout(60)
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, size: tuple[int, int]) -> None:
    """Sets the size of the page itself: windows have a least width."""
    settings = {
        "width": size[0],
        "height": size[1],
        "deviceScaleFactor": 1,
        "mobile": False,
    }
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", settings)


def pages(site: Path) -> list[str]:
    """The addresses of all pages."""
    return sorted(
        path.relative_to(site).as_posix()
        for path in site.rglob("*.html")
        if "_static" not in path.parts
    )


def anchors(text: str) -> set[str]:
    """What a page can be entered at."""
    return set(re.findall(r'\b(?:id|name)="([^"]+)"', text))


def broken_links(site: Path) -> list[str]:
    """Links inside the site that lead nowhere."""
    texts = {page: (site / page).read_text() for page in pages(site)}
    targets = {page: anchors(text) for page, text in texts.items()}
    found = []
    for page, text in texts.items():
        for link in sorted(set(re.findall(r'(?:href|src)="([^"]+)"', text))):
            if re.match(r"[a-z]+:|//", link):
                continue
            address, anchor = urldefrag(unquote(link.replace("&amp;", "&")))
            address = address.split("?")[0]
            path = (site / page).parent / address if address else site / page
            name = path.resolve().relative_to(site.resolve()).as_posix()
            if not path.exists() or (
                anchor and name in targets and anchor not in targets[name]
            ):
                found.append(f"{page}: the link {link} leads nowhere")
    return found


def look(driver: Any, address: str, page: str, patience: int = 30) -> list[str]:
    """Yields what is wrong with a page, wide and on a phone."""
    resize(driver, WIDE)
    driver.get(f"{address}/{page}")
    seen = driver.execute_async_script(LOOK, patience)
    found = [
        f"{page}: {kind} {what}"
        for kind in ("pictures", "formulas", "foreign")
        for what in seen[kind]
    ]
    if seen["unset"] > 0:
        found.append(f"{page}: {seen['unset']} formulas are not set")
    resize(driver, PHONE)
    over = driver.execute_async_script(LOOK, patience)["wide"]
    if over > 0:
        found.append(f"{page}: {over} pixels wider than a phone")
    return found


def search(driver: Any, address: str, words: str, wanted: str) -> list[str]:
    """Whether the search for some words finds a page."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(f"{address}/search.html?q={words}")
    try:
        WebDriverWait(driver, 20).until(
            lambda d: (
                wanted in d.find_element("id", "search-results").get_attribute("innerHTML")
            )
        )
    except Exception:
        return [f"the search for {words!r} does not find {wanted}"]
    return []


def take_pictures(driver: Any, address: str, folder: Path) -> None:
    """Screenshots of some pages, wide and on a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in SHOWN:
        for name, size in (("wide", WIDE), ("phone", PHONE)):
            resize(driver, (size[0], 2 * size[1]))
            driver.get(f"{address}/{page}")
            driver.execute_async_script(LOOK, 30)
            driver.save_screenshot(
                str(folder / f"{page.replace('/', '-').removesuffix('.html')}-{name}.png")
            )


def check(site: Path, pictures: Path | None = None) -> list[str]:
    """Everything that is wrong with a site."""
    found = broken_links(site)
    with served(site) as address, browser() as driver:
        for page in pages(site):
            found += look(driver, address, page)
        found += search(
            driver, address, "AutoTruncated", "reference/packages/pyro_truncated.html"
        )
        found += search(driver, address, "minibatch", "how-to/minibatches.html")
        if pictures is not None:
            take_pictures(driver, address, pictures)
    return found


def main() -> int:
    """Checks the site that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    args = parser.parse_args()
    if not available():
        print(
            "Chromium, its driver or Selenium is missing: the pages are not opened in a browser"
        )
        return 0
    found = check(args.site, args.pictures)
    print(
        "\n".join(found)
        or f"{len(pages(args.site))} pages: links, pictures, formulas, width and search are as they should be"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
