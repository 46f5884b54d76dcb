"""Plots as SVG, written by hand so that no library is needed: bars on a scale of powers of ten."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

import msgspec

WIDTH, LEFT, RIGHT, TOP, ROW = 860, 330, 90, 44, 26
OURS, THEIRS = "#2563a8", "#9aa5b1"


class Bar(msgspec.Struct, frozen=True):
    """One line of a plot."""

    name: str
    value: float
    is_ours: bool


def bars(title: str, values: Sequence[Bar]) -> str:
    """An SVG with one bar for each value; each tick is ten times the one before."""
    # What was too little to be measured has a bar of no length.
    logs = [math.log10(bar.value) if bar.value > 0 else None for bar in values]
    least = math.floor(min((log for log in logs if log is not None), default=0))
    most = math.ceil(max((log for log in logs if log is not None), default=1))
    height = TOP + ROW * len(values) + 34
    scale = (WIDTH - LEFT - RIGHT) / max(1, most - least)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for power in range(least, most + 1):
        x = LEFT + scale * (power - least)
        parts += [
            f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height - 26}" stroke="#d5dae0"/>',
            f'<text x="{x:.1f}" y="{height - 9}" text-anchor="middle" fill="#555">{10.0**power:,g}</text>',
        ]
    for row, (bar, log) in enumerate(zip(values, logs, strict=True)):
        y, length = TOP + ROW * row, scale * (log - least) if log is not None else 0.0
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="{ROW - 8}" '
            f'fill="{OURS if bar.is_ours else THEIRS}"/>',
            f'<text x="{LEFT + length + 6:.1f}" y="{y + 15}">{shown(bar.value)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def shown(value: float) -> str:
    """Three figures, no more than were measured."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
