"""Draws the pictures of docs/trajectories.md, of what collectors really deliver.

python scripts/draw_trajectories.py docs/pictures
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcollect import Collector
from rlcollect.testing import Counter

LENGTHS = 4, 7  # of the episodes of two lanes
STEPS, TRAJS, FRAGMENT = 6, 3, 3
CELL, GAP, LEFT = 26, 6, 92
COLOURS = "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2"
PADDING = "#e8e8e8"
Cell = tuple[int, int] | None
"""The id of a frame's episode, and its step; None: padding."""


def collected(count: int, **options: Any) -> list[Any]:
    """Batches of two lanes, whose episodes have these lengths."""
    makers = [lambda length=length: Counter(length) for length in LENGTHS]
    with Collector(makers, None, frames_per_batch=STEPS * len(LENGTHS), **options) as collector:
        return [collector.next().clone() for _ in range(count)]


def cells(batch: Any) -> list[list[Cell]]:
    """The frames of a batch, row by row."""
    ids, steps = batch["collector", "traj_ids"], batch["observation"]
    if ids.is_nested:
        pairs = zip(ids.unbind(), steps.unbind(), strict=True)
        return [[(int(i), int(s)) for i, s in zip(*pair, strict=True)] for pair in pairs]
    mask = batch.get(("collector", "mask"), None)
    if batch.batch_dims == 1:
        ids, steps = ids[None], steps[None]
    rows: list[list[Cell]] = []
    for row in range(len(ids)):
        valid = [True] * ids.shape[1] if mask is None else mask[row].tolist()
        frames = zip(ids[row].tolist(), steps[row].flatten().tolist(), valid, strict=True)
        rows.append([(int(i), int(s)) if is_valid else None for i, s, is_valid in frames])
    return rows


class Drawing:
    """An SVG, from top to bottom."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._colours: dict[int, str] = {}
        self._y = 8.0
        self._width = 0.0

    def title(self, text: str) -> None:
        """A line of text."""
        self._y += 14
        self._parts.append(f'<text x="8" y="{self._y}" font-size="13" font-weight="bold">{text}</text>')
        self._y += 10

    def rows(self, rows: Sequence[Sequence[Cell]], names: Sequence[str], breaks: Sequence[int] = ()) -> None:
        """Rows of frames; a gap before the columns in `breaks`."""
        for name, row in zip(names, rows, strict=True):
            self._parts.append(f'<text x="8" y="{self._y + 18}" font-size="12">{name}</text>')
            x = float(LEFT)
            for column, cell in enumerate(row):
                x += GAP if column in breaks else 0
                self._cell(x, cell)
                x += CELL
            self._width = max(self._width, x)
            self._y += CELL + 2
        self._y += 8

    def _cell(self, x: float, cell: Cell) -> None:
        fill = PADDING if cell is None else self._colour(cell[0])
        box = f'x="{x}" y="{self._y}" width="{CELL - 2}" height="{CELL - 2}" rx="3" fill="{fill}"'
        self._parts.append(f"<rect {box}/>")
        if cell is not None:
            at = f'x="{x + CELL / 2 - 1}" y="{self._y + 17}"'
            self._parts.append(f'<text {at} font-size="12" fill="white" text-anchor="middle">{cell[1]}</text>')

    def _colour(self, number: int) -> str:
        return self._colours.setdefault(number, COLOURS[len(self._colours) % len(COLOURS)])

    def svg(self) -> str:
        """The file's text."""
        width, height = int(self._width + 12), int(self._y + 4)
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
        return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *self._parts, "</svg>\n"])


def drawn() -> dict[str, str]:
    """All pictures, by file name."""
    rollouts = [cells(batch) for batch in collected(3)]
    lanes = [[cell for rollout in rollouts for cell in rollout[lane]] for lane in range(len(LENGTHS))]
    borders = range(STEPS, STEPS * len(rollouts), STEPS)
    pictures: dict[str, str] = {}

    formats = Drawing()
    formats.title(f"three rollouts of two lanes, [2, {STEPS}] each: episodes in pieces")
    formats.rows(lanes, ["lane 0", "lane 1"], borders)
    for kind, shape in (("padded", "[trajs, T], with a mask"), ("cat", "[frames]"), ("nested", "[trajs], jagged")):
        (batch,) = collected(1, trajs_per_batch=TRAJS, traj_format=kind)
        rows = cells(batch)
        names = ["frames"] if kind == "cat" else [f"episode {row}" for row in range(len(rows))]
        formats.title(f'trajs_per_batch={TRAJS}, traj_format="{kind}": {shape}')
        formats.rows(rows, names)
    pictures["formats.svg"] = formats.svg()

    pieces = Drawing()
    (first, *_) = rollouts
    pieces.title(f"one rollout, [2, {STEPS}]")
    pieces.rows(first, ["lane 0", "lane 1"])
    for title, options in (
        ("split_trajs=True: each piece a row", {"split_trajs": True}),
        (f"fragment_len={FRAGMENT}: rows of {FRAGMENT}, none over an end", {"fragment_len": FRAGMENT}),
    ):
        rows = cells(collected(1, **options)[0])
        pieces.title(title)
        pieces.rows(rows, [f"row {row}" for row in range(len(rows))])
    pictures["pieces.svg"] = pieces.svg()
    return pictures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the pictures go")
    folder = parser.parse_args().folder
    for name, text in drawn().items():
        (folder / name).write_text(text)
