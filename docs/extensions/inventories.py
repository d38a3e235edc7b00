"""Inventories of other projects, as lists of the names mentioned here."""

from pathlib import Path
from typing import NamedTuple

from sphinx.util.inventory import InventoryFile


class Mention(NamedTuple):
    """A name with the page that documents it."""

    role: str
    name: str
    page: str


class Listing:
    """What Sphinx needs in order to write an inventory."""

    def __init__(self, project: str, mentions: list[Mention]) -> None:
        self.config = self
        self.project, self.version = project, ""
        self.domains = self
        self.mentions = mentions

    def sorted(self) -> list["Listing"]:
        """The domains: one, of Python names."""
        return [self]

    name = "py"

    def get_objects(self) -> list[tuple[str, str, str, str, str, int]]:
        """The names, as a domain gives them."""
        return [(name, name, role, page, name, 1) for role, name, page in self.mentions]

    def get_target_uri(self, page: str) -> str:
        """Pages are addresses already."""
        return page


def read(path: Path) -> tuple[str, list[Mention]]:
    """Reads an address and the lines of role, name and page below."""
    address, *lines = path.read_text().splitlines()
    return address, [Mention(*line.split()) for line in lines if line.strip()]


def inventories(folder: Path, built: Path) -> dict[str, tuple[str, str]]:
    """Writes inventories from lists; returns the value of `intersphinx_mapping`."""
    built.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for path in sorted(folder.glob("*.txt")):
        address, mentions = read(path)
        listing = Listing(path.stem, mentions)
        target = built / f"{path.stem}.inv"
        InventoryFile.dump(str(target), listing, listing)  # type: ignore[arg-type]
        mapping[path.stem] = (address, str(target))
    return mapping
