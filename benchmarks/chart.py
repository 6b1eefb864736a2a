"""A line chart on two logarithmic axes as one self-contained SVG; the same points always give the same text."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from benchmarks.trend import Point

_WIDTH: Final = 760
_HEIGHT: Final = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 210, 40, 50
_COLOURS: Final = ("#2f74c0", "#d1495b", "#2a9d6f", "#7a6fb0", "#c58b1b", "#4b5563")
_STYLE: Final = "text{font:12px system-ui,sans-serif;fill:#4b5563}.title{font-size:14px;font-weight:600}"


def chart(title: str, across: str, up: str, lines: Mapping[str, Sequence[Point]]) -> str:
    """The picture; ``across`` and ``up`` name the axes, ``lines`` has at least one point, all above 0."""
    points = [point for line in lines.values() for point in line]
    low_x, high_x = _decades([x for x, _ in points])
    low_y, high_y = _decades([y for _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)
        above = (math.log10(y) - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM)
        return _LEFT + right, _HEIGHT - _BOTTOM - above

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
        f'aria-label="{escape(title)}">',
        f'<style>{_STYLE}</style><rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text class="title" x="{_LEFT}" y="22">{escape(title)}</text>',
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:g}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(across)}</text>',
        f'<text x="14" y="{_TOP - 6}">{escape(up)}</text>',
    ]
    for power in range(low_x, high_x + 1):
        x, _ = at(10.0**power, 10.0**low_y)
        parts.append(_rule(x, _TOP, x, _HEIGHT - _BOTTOM))
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{_number(power)}</text>')
    for power in range(low_y, high_y + 1):
        _, y = at(10.0**low_x, 10.0**power)
        parts.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y))
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(power)}</text>')
    for number, (name, line) in enumerate(lines.items()):
        parts += _line(number, name, [at(x, y) for x, y in sorted(line)])
    return "\n".join([*parts, "</svg>"]) + "\n"


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around the values, at least one apart."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _number(power: int) -> str:
    return f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e2e6ec"/>'


def _line(number: int, name: str, at: Sequence[tuple[float, float]]) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at]
    left, top = _WIDTH - _RIGHT + 16, _TOP + 12 + number * 20
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *dots,
        f'<rect x="{left}" y="{top - 9}" width="10" height="10" fill="{colour}"/>',
        f'<text x="{left + 16}" y="{top}">{escape(name)}</text>',
    ]
