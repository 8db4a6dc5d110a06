"""Plots as SVG, with nothing to install."""

from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.sax.saxutils import escape

_WIDTH: Final = 640
_HEIGHT: Final = 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 170, 34, 46
_SMOOTHING: Final = 0.7
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c8c8c", "#bcbd22", "#17becf")


def training(log: Sequence[Mapping[str, Any]], block: int) -> str:
    """SVG of the accept length that a training log gives the true prefixes, by the texts' tokens, over the
    minutes of training."""
    curves: dict[str, list[tuple[float, float]]] = {}
    means: dict[int, float] = {}
    for line in log:
        if "teacher_forced_length" not in line:
            continue
        length = int(line["length"])
        value = float(line["teacher_forced_length"])
        means[length] = _SMOOTHING * means.get(length, value) + (1 - _SMOOTHING) * value
        curves.setdefault(f"{length:,}", []).append((line["seconds"] / 60, means[length]))
    ordered = dict(sorted(curves.items(), key=lambda item: int(item[0].replace(",", ""))))
    title = "Accept length behind the true text, while training"
    return lines(title, ("minutes", "by tokens of a text"), ordered, highest=block + 1.0)


def lines(
    title: str,
    axes: tuple[str, str],
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    highest: float = 1.0,
    is_square: bool = False,
) -> str:
    """SVG of curves over a common axis; y from 0 to `highest`, x from the least to the largest value.

    `is_square` lets x run from 0 to `highest` too and draws the diagonal.
    """
    xs = [x for curve in curves.values() for x, _ in curve]
    low, high = (0.0, highest) if is_square else (min(xs), max(xs))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> str:
        across = _LEFT + (right - _LEFT) * (x - low) / max(1e-9, high - low)
        return f"{across:.1f} {bottom - (bottom - _TOP) * y / highest:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">{escape(title)}</text>',
    ]
    rows = 5 if highest == 1 else round(highest)
    for n in range(rows + 1):
        value = highest * n / rows
        height = bottom - (bottom - _TOP) * n / rows
        parts.append(f'<path d="M{_LEFT} {height:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{value:.1f}</text>')
    is_counted = len(set(xs)) <= 9 and all(x == int(x) for x in xs) and not is_square
    for x in sorted(set(xs)) if is_counted else [low + (high - low) * n / 5 for n in range(6)]:
        across = at(x, 0).split()[0]
        parts.append(f'<text x="{across}" y="{bottom + 18}" text-anchor="middle">{x:.2g}</text>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{axes[0]}</text>')
    parts.append(f'<text x="{right + 12}" y="{_TOP}" fill="#555">{axes[1]}</text>')
    if is_square:
        parts.append(f'<path d="M{at(0, 0)}L{at(highest, highest)}" stroke="#999" stroke-dasharray="4"/>')
    for n, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[n % len(_COLOURS)]
        path = "L".join(at(x, y) for x, y in curve)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{right + 12}" y="{_TOP + 24 + 18 * n}" fill="{colour}">{name}</text>')
    return "\n".join((*parts, "</svg>", ""))
