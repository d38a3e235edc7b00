"""Makes the links of the README absolute, as the package index needs."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "pyro-truncated/pyro-truncated"
PICTURE = re.compile(r"(!\[[^]]*\]\()(?!\w+:)")
LINK = re.compile(r"((?<!!)\[[^]]*\]\()(?![#\w]+:)")


def with_absolute_links(text: str) -> str:
    """Returns the text with absolute addresses of pictures and links."""
    text = PICTURE.sub(rf"\1https://raw.githubusercontent.com/{REPOSITORY}/main/", text)
    return LINK.sub(rf"\1https://github.com/{REPOSITORY}/blob/main/", text)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=with_absolute_links(readme), long_description_content_type="text/markdown")
