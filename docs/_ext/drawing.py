"""Pictures from text: boxes, lines and arrows of ASCII characters become an SVG.

    python docs/_ext/drawing.py docs/diagrams/layers.txt > docs/_static/layers.svg

``-`` and ``|`` are lines, ``+`` is where they meet, ``<``, ``>``, ``^`` and ``v`` at their ends are
heads of arrows. Closed boxes get a tint. All else is text. A ``-`` between letters stays a ``-``.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

WIDE, HIGH = 8.4, 17.0  # of a character
COLOURS = (
    "svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}"
    ".tint{fill:#4c8ed9;fill-opacity:.13}"
)


class Canvas:
    """Characters in rows and columns; blank outside."""

    def __init__(self, text: str) -> None:
        self.rows = text.rstrip("\n").split("\n")
        self.height, self.width = len(self.rows), max(map(len, self.rows))

    def at(self, row: int, column: int) -> str:
        """Return the character there."""
        inside = 0 <= row < self.height and 0 <= column < len(self.rows[row])
        return self.rows[row][column] if inside else " "

    def across(self, row: int, column: int) -> bool:
        """Whether a horizontal line passes through, or a corner joins one."""
        here, sides = self.at(row, column), (self.at(row, column - 1), self.at(row, column + 1))
        if here == "-":
            return any(side in "-+<>" for side in sides)
        if here == "+":
            return "-" in sides
        return (here == ">" and sides[0] == "-") or (here == "<" and sides[1] == "-")

    def down(self, row: int, column: int) -> bool:
        """Whether a vertical line passes through, or a corner joins one."""
        here, ends = self.at(row, column), (self.at(row - 1, column), self.at(row + 1, column))
        if here == "|":
            return True
        if here == "+":
            return any(end in "|^v+" for end in ends)
        return (here == "v" and ends[0] in "|+") or (here == "^" and ends[1] in "|+")

    def drawn(self, row: int, column: int) -> bool:
        """Whether the character is part of a line, not of a text."""
        return self.across(row, column) or self.down(row, column)


def _place(row: int, column: int) -> tuple[float, float]:
    return (column + 0.5) * WIDE, (row + 0.5) * HIGH


def _runs(canvas: Canvas, *, across: bool) -> list[tuple[int, int, int]]:
    """Lines as (fixed coordinate, from, to)."""
    found = []
    outer, inner = (canvas.height, canvas.width) if across else (canvas.width, canvas.height)
    for fixed in range(outer):
        start = None
        for moving in range(inner + 1):
            place = (fixed, moving) if across else (moving, fixed)
            part = canvas.across(*place) if across else canvas.down(*place)
            if part and start is None:
                start = moving
            if not part and start is not None:
                if moving - 1 > start:
                    found.append((fixed, start, moving - 1))
                start = None
    return found


def _boxes(canvas: Canvas) -> list[tuple[int, int, int, int]]:
    """Closed boxes as (top, left, bottom, right): the smallest from each upper left corner."""
    corners = [
        (row, column)
        for row in range(canvas.height)
        for column in range(canvas.width)
        if canvas.at(row, column) == "+"
    ]
    found = []
    for top, left in corners:
        wider = [column for row, column in corners if row == top and column > left]
        lower = [row for row, column in corners if column == left and row > top]
        closed = (
            (top, left, bottom, right)
            for bottom in lower
            for right in wider
            if _is_closed(canvas, top, left, bottom, right)
        )
        found += list(closed)[:1]
    return found


def _is_closed(canvas: Canvas, top: int, left: int, bottom: int, right: int) -> bool:
    across = all(
        canvas.at(row, column) in "-+" and canvas.across(row, column)
        for row in (top, bottom)
        for column in range(left, right + 1)
    )
    return across and all(
        canvas.at(row, column) in "|+" and canvas.down(row, column)
        for row in range(top, bottom + 1)
        for column in (left, right)
    )


def _head(row: int, column: int, character: str) -> str:
    x, y = _place(row, column)
    ahead, aside = {
        ">": ((5, 0), (-4, 4)), "<": ((-5, 0), (4, 4)),
        "v": ((0, 7), (4, -4)), "^": ((0, -7), (4, 4)),
    }[character]  # fmt: skip
    if character in "<>":
        points = [(x + ahead[0], y), (x + aside[0], y - 4.5), (x + aside[0], y + 4.5)]
    else:
        points = [(x, y + ahead[1]), (x - 4.5, y + aside[1]), (x + 4.5, y + aside[1])]
    return '<polygon points="' + " ".join(f"{a:.1f},{b:.1f}" for a, b in points) + '"/>'


def _texts(canvas: Canvas) -> list[str]:
    found = []
    for row in range(canvas.height):
        line = "".join(
            " " if canvas.drawn(row, column) else canvas.at(row, column)
            for column in range(canvas.width)
        )
        column = 0
        while column < len(line):
            if line[column] == " ":
                column += 1
                continue
            end = line.find("  ", column)
            words = line[column:] if end < 0 else line[column:end]
            words = words.rstrip()
            x, y = column * WIDE, (row + 0.5) * HIGH + 4.5
            found.append(
                f'<text x="{x:.1f}" y="{y:.1f}" textLength="{len(words) * WIDE:.1f}">'
                f"{escape(words)}</text>"
            )
            column += len(words)
    return found


def draw(text: str, title: str, *, alone: bool) -> str:
    """Return the SVG of a picture.

    Args:
        text: the picture in characters.
        title: what it shows, for those who do not see it.
        alone: a file of its own, with colours that follow the reader's light or dark screen;
            otherwise for a page, whose colours it takes.
    """
    canvas = Canvas(text)
    width, height = (canvas.width + 1) * WIDE, (canvas.height + 0.5) * HIGH
    lines = [
        "M{:.1f} {:.1f}H{:.1f}".format(*_place(row, a), _place(row, b)[0])
        for row, a, b in _runs(canvas, across=True)
    ] + [
        "M{:.1f} {:.1f}V{:.1f}".format(*_place(a, column), _place(b, column)[1])
        for column, a, b in _runs(canvas, across=False)
    ]
    tints = [
        f'<rect class="tint" x="{_place(top, left)[0]:.1f}" y="{_place(top, left)[1]:.1f}" '
        f'width="{(right - left) * WIDE:.1f}" height="{(bottom - top) * HIGH:.1f}"/>'
        for top, left, bottom, right in _boxes(canvas)
    ]
    heads = [
        _head(row, column, canvas.at(row, column))
        for row in range(canvas.height)
        for column in range(canvas.width)
        if canvas.at(row, column) in "<>^v" and canvas.drawn(row, column)
    ]
    style = f"<style>{COLOURS}</style>" if alone else ""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" role="img" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace" '
            f'font-size="13.5" fill="currentColor">',
            f"<title>{escape(title)}</title>{style}",
            *tints,
            f'<path d="{"".join(lines)}" fill="none" stroke="currentColor" stroke-width="1.3"/>',
            *heads,
            *_texts(canvas),
            "</svg>",
            "",
        ]
    )


def read(file: Path) -> tuple[str, str]:
    """Return title and picture of a file: the first line, and what follows an empty one."""
    title, _, picture = file.read_text(encoding="utf-8").partition("\n\n")
    return title.strip(), picture


if __name__ == "__main__":
    caption, drawing = read(Path(sys.argv[1]))
    sys.stdout.write(draw(drawing, caption, alone=True))
