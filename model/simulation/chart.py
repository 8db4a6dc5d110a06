"""Hit rate, throughput and waiting over live sessions, as SVG."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from model.simulation.result import Point

_WIDTH: Final = 920
_PANEL: Final = 268
_HEIGHT: Final = 330
_LEFT, _GAP, _TOP, _BOTTOM = 44, 30, 66, 44
_COLOURS: Final = {
    "sglang": "#c0392b",
    "admission": "#e08e0b",
    "redis": "#2471a3",
    "redis+admission": "#1e8449",
}
_NAMES: Final = {
    "sglang": "SGLang alone",
    "admission": "+ admission",
    "redis": "+ host and Redis",
    "redis+admission": "+ both",
}
_DASHES: Final = {"redis+admission": "5 3"}


def draw(points: Sequence[Point], title: str) -> str:
    """SVG of a sweep; one line a policy. Raises ValueError for no points."""
    if not points:
        raise ValueError("no points to draw")
    policies = list(dict.fromkeys(point.policy for point in points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="12" y="20" font-size="14">{title}</text>',
    ]
    for number, policy in enumerate(policies):
        x = 14 + 150 * number
        dash = f' stroke-dasharray="{_DASHES[policy]}"' if policy in _DASHES else ""
        parts.append(f'<path d="M{x} 38h22" stroke="{_COLOURS[policy]}" stroke-width="2.4"{dash}/>')
        parts.append(f'<text x="{x + 28}" y="42">{_NAMES[policy]}</text>')
    most_turns = max(point.turns_per_hour for point in points)
    step = 10 ** math.floor(math.log10(most_turns))
    top = math.ceil(most_turns / step) * step
    seconds = [max(point.ttft.p50, 0.01) for point in points]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    high = max(high, low + 1)
    panels: list[tuple[str, Callable[[Point], float], list[tuple[float, str]]]] = [
        ("Hit rate", lambda point: point.hit, [(n / 4, f"{n / 4:g}") for n in range(5)]),
        (
            "Turns an hour",
            lambda point: point.turns_per_hour / top,
            [(n / 4, f"{top * n / 4:,.0f}") for n in range(5)],
        ),
        (
            "TTFT p50, s",
            lambda point: (math.log10(max(point.ttft.p50, 0.01)) - low) / (high - low),
            [((power - low) / (high - low), f"{10.0**power:g}") for power in range(low, high + 1)],
        ),
    ]
    for number, (name, share, ticks) in enumerate(panels):
        parts += _panel(points, policies, name, share, ticks, _LEFT + number * (_PANEL + _GAP))
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    points: Sequence[Point],
    policies: Sequence[str],
    name: str,
    share: Callable[[Point], float],
    ticks: Sequence[tuple[float, str]],
    left: int,
) -> list[str]:
    counts = sorted({point.concurrency for point in points})
    right, bottom = left + _PANEL - 14, _HEIGHT - _BOTTOM
    span = max(1, counts[-1] - counts[0])

    def x(count: int) -> float:
        return left + (right - left) * (count - counts[0]) / span

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * value

    parts = [f'<text x="{left}" y="{_TOP - 8}">{name}</text>']
    for value, label in ticks:
        parts.append(f'<path d="M{left} {y(value):.1f}H{right}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 5}" y="{y(value) + 4:.1f}" text-anchor="end" font-size="11">{label}</text>'
        )
    shown = -math.inf
    for count in counts:
        if x(count) - shown >= 24:
            shown = x(count)
            parts.append(
                f'<text x="{shown:.1f}" y="{bottom + 16}" text-anchor="middle" font-size="11">{count}</text>'
            )
    parts.append(
        f'<text x="{(left + right) / 2:.1f}" y="{bottom + 33}" text-anchor="middle">live sessions</text>'
    )
    for policy in policies:
        line = sorted((p.concurrency, share(p)) for p in points if p.policy == policy)
        path = "L".join(f"{x(count):.1f} {y(value):.1f}" for count, value in line)
        dash = f' stroke-dasharray="{_DASHES[policy]}"' if policy in _DASHES else ""
        parts.append(f'<path d="M{path}" fill="none" stroke="{_COLOURS[policy]}" stroke-width="2"{dash}/>')
        parts += [
            f'<circle cx="{x(count):.1f}" cy="{y(value):.1f}" r="2.4" fill="{_COLOURS[policy]}"/>'
            for count, value in line
        ]
    return parts
