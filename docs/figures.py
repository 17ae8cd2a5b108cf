# SPDX-License-Identifier: Apache-2.0
"""Draws the tutorial's pictures into docs/figures: ``python docs/figures.py``."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "figures"
FIRST, SECOND, EMPTY = "#8ecae6", "#ffd166", "#f1f3f5"  # the request's first block, its second, memory that is free
CELL = 24


class Picture:
    def __init__(self, width: int, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'font-family="sans-serif" font-size="13">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="#495057"/>')

    def text(
        self, x: float, y: float, words: object, anchor: str = "middle", *, size: int = 13, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}"{weight}>{words}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """With its head downwards."""
        self.parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2 - 8}" stroke="#495057" stroke-width="1.5"/>')
        self.parts.append(f'<polygon points="{x2},{y2} {x2 - 4},{y2 - 8} {x2 + 4},{y2 - 8}" fill="#495057"/>')

    def cells(self, x: float, y: float, words: list[int], taken: str, free: str, number: int = 16) -> None:
        """A row of cells, CELL wide and high, the first ``number`` of them taken."""
        for i, word in enumerate(words):
            self.box(x + i * CELL, y, CELL, CELL, taken if i < number else free)
            self.text(x + (i + 0.5) * CELL, y + 16, word, size=11)

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def block_table() -> str:
    """Row 0 of the table, and the eight blocks of the cache."""
    p = Picture(720, 226)
    p.text(20, 24, "block_table, row 0", "start", bold=True)
    p.box(20, 36, 60, 32, FIRST)
    p.box(80, 36, 60, 32, SECOND)
    p.text(50, 57, 5)
    p.text(110, 57, 2)
    p.text(160, 57, "tokens 0 to 15 are in block 5, tokens 16 to 24 in block 2", "start")
    p.text(20, 214, "the cache of a layer: 8 blocks of 16 slots", "start", bold=True)
    for block in range(8):
        x = 20 + 85 * block
        for place in range(16):
            taken = block == 5 or (block == 2 and place < 9)
            fill = (FIRST if block == 5 else SECOND) if taken else EMPTY
            p.box(x + place * 5, 134, 5, 32, fill)
        p.text(x + 40, 186, f"block {block}")
    p.arrow(110, 68, 20 + 85 * 2 + 40, 133)
    p.arrow(50, 68, 20 + 85 * 5 + 40, 133)
    return p.svg()


def slots() -> str:
    """Positions of a request's tokens above the slots that hold them."""
    p = Picture(720, 250)
    left = 150
    for y, block, first, tokens, fill in ((20, 5, 0, 16, FIRST), (140, 2, 16, 9, SECOND)):
        p.text(left - 12, y + 16, "token", "end")
        p.cells(left, y, [first + i for i in range(tokens)], fill, EMPTY)
        p.text(left - 12, y + 66, f"slot, in block {block}", "end")
        p.cells(left, y + 50, [block * 16 + i for i in range(16)], fill, EMPTY, tokens)
        for i in range(tokens):
            p.arrow(left + (i + 0.5) * CELL, y + CELL, left + (i + 0.5) * CELL, y + 50)
    p.text(left, 236, "slot = block * 16 + place in the block; slots 41 to 47 are free", "start")
    return p.svg()


def element(matrix: str, token: object, dim: object) -> str:
    return "..." if "..." in (token, dim) else f"{matrix}{token},{dim}"


def block_layout() -> str:
    """Keys and values of a block, in the order of memory: titles, the rows, what a row is."""
    p, wide = Picture(720, 470), 44
    p.text(20, 24, "k3,1 is dimension 1 of the key of token 3. Memory goes along a row, then to the next row.", "start")
    tokens, dims, pairs = [0, 1, 2, "...", 15], [0, 1, 2, "...", "D-1"], (0, 2, 4)
    keys = [[element("k", t, d) for t in tokens] for d in dims]
    values = [[element("v", t, d) for d in dims] for t in tokens]
    paired_keys = [[element("k", t, d + i) for t in (0, 1) for i in (0, 1)] for d in pairs]
    paired_values = [[element("v", t + i, d) for d in (0, 1) for i in (0, 1)] for t in pairs]
    for paired in (paired_keys, paired_values):
        paired[:] = [[*row, "..."] for row in paired] + [["..."] * 5]
    for x, y, fill, rows, title, columns, a_row in (
        (20, 90, FIRST, keys, "keys, float32 and float16", "16 tokens of a group", "one dimension of 16 tokens"),
        (380, 90, SECOND, values, "values, float32 and float16", "dimensions", "one token"),
        (20, 310, FIRST, paired_keys, "keys, bfloat16", "pairs: token 0, token 1, ...", "two dimensions of 16 tokens"),
        (380, 310, SECOND, paired_values, "values, bfloat16", "pairs: dimension 0, dimension 1, ...", "two tokens"),
    ):
        p.text(x, y - 26, title, "start", bold=True)
        p.text(x, y - 8, columns, "start", size=11)
        for r, row in enumerate(rows):
            for c, word in enumerate(row):
                p.box(x + c * wide, y + r * CELL, wide, CELL, "white" if word == "..." else fill)
                p.text(x + (c + 0.5) * wide, y + r * CELL + 16, word, size=10)
        p.text(x, y + len(rows) * CELL + 16, f"one row: {a_row}", "start", size=11)
    return p.svg()


PICTURES = {"block_table": block_table, "slots": slots, "block_layout": block_layout}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
