"""A report on one page: pictures and tables with captions."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1d2530; background: #f4f5f7; margin: 0; }
main { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
section, header { background: white; border-radius: 8px; padding: 1.2rem 1.6rem; margin-bottom: 1.2rem; box-shadow: 0 1px 3px #0002; }
h1 { margin: 0 0 .4rem; font-size: 1.7rem; } h2 { margin: 0 0 .3rem; font-size: 1.2rem; }
p { margin: .3rem 0 .8rem; max-width: 46rem; } img { max-width: 100%; display: block; margin: 0 auto; }
table { border-collapse: collapse; font-size: .85rem; } td, th { padding: .15rem .8rem .15rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr + tr { border-top: 1px solid #e4e7eb; }
.scroll { overflow-x: auto; } .numbers { display: flex; flex-wrap: wrap; gap: .4rem 2.2rem; margin-top: 1rem; }
.numbers b { display: block; font-size: 1.3rem; color: #2b5c8a; } .numbers span { font-size: .85rem; color: #5b6470; }
"""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: heading.
        text: what is seen, what the numbers mean. Plain text.
        figure: picture, stored beside the page as ``name``, or ``None``.
        name: file name of the picture.
        table: header and rows of a table, or empty.
    """

    title: str
    text: str
    figure: Figure | None = None
    name: str = ""
    table: Sequence[Sequence[Any]] = ()


def write_report(
    folder: str | Path, title: str, lead: str, numbers: Mapping[str, Any], sections: Sequence[Section], *, dpi: int = 110
) -> Path:
    """Writes ``index.html`` and its pictures into a folder.

    The page needs no network.

    Args:
        folder: where to write. Created if it does not exist.
        title: heading of the page.
        lead: opening paragraph, plain text.
        numbers: the main results by name. They stand in large type under the lead.
        sections: the rest, in order.
        dpi: resolution of the pictures.

    Returns:
        Path of the page.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sources = []
    for section in sections:
        if section.figure is not None:
            section.figure.savefig(folder / section.name, dpi=dpi, bbox_inches="tight", facecolor="white")
        sources.append(section.name)
    return _write(folder / "index.html", title, lead, numbers, sections, sources)


def write_page(path: str | Path, title: str, lead: str, numbers: Mapping[str, Any], sections: Sequence[Section], *, dpi: int = 100) -> Path:
    """Writes one file that holds its pictures.

    Arguments are those of :func:`write_report`, but the path is that of the page.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sources = []
    for section in sections:
        buffer = io.BytesIO()
        if section.figure is not None:
            section.figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight", facecolor="white")
        sources.append("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())
    return _write(path, title, lead, numbers, sections, sources)


def _write(page: Path, title: str, lead: str, numbers: Mapping[str, Any], sections: Sequence[Section], sources: Sequence[str]) -> Path:
    """Writes the page under a temporary name, then renames it."""
    tiles = "".join(f"<div><b>{_text(value)}</b><span>{_text(name)}</span></div>" for name, value in numbers.items())
    header = f'<header><h1>{_text(title)}</h1><p>{_text(lead)}</p><div class="numbers">{tiles}</div></header>'
    body = "\n".join([header, *map(_section, sections, sources)])
    temporary = page.with_name(f"{page.name}.tmp")
    temporary.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n",
        encoding="utf-8",
    )
    os.replace(temporary, page)
    return page


def _section(section: Section, source: str) -> str:
    picture = f'<img src="{_text(source)}" alt="{_text(section.title)}">' if section.figure is not None else ""
    return f"<section><h2>{_text(section.title)}</h2><p>{_text(section.text)}</p>{picture}{_table(section.table)}</section>"


def _table(rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    lines = [
        "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in row) for row, tag in zip(rows, ["th"] + ["td"] * (len(rows) - 1), strict=True)
    ]
    return '<div class="scroll"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _text(value: Any) -> str:
    return html.escape(str(value))
