"""A loss curve as SVG, drawn from a training log."""

import json
import math
from pathlib import Path
from typing import Any, Final

_WIDTH: Final = 860
_HEIGHT: Final = 430
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 150, 34, 46
_COLOURS: Final = {
    "think": "#1f77b4",
    "response": "#2ca02c",
    "call": "#9467bd",
    "argument": "#d62728",
    "result": "#8c8c8c",
    "text": "#bcbd22",
}
_LOWEST: Final = 1e-4
_SMOOTHING: Final = 0.6


def read_log(path: Path) -> list[dict[str, Any]]:
    """Lines of a `log.jsonl`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def draw(log: list[dict[str, Any]]) -> str:
    """SVG of the loss by kind of text over the tokens trained on, on a logarithmic axis."""
    points = [line for line in log if "kinds" in line]
    if not points:
        raise ValueError("the log holds no training step")
    most = max(line["tokens"] for line in points)
    curves = {
        kind: _smooth([(line["tokens"], line["kinds"][kind]) for line in points if kind in line["kinds"]])
        for kind in _COLOURS
    }
    curves = {kind: curve for kind, curve in curves.items() if curve}
    values = [value for curve in curves.values() for _, value in curve]
    low = math.floor(math.log10(max(_LOWEST, min(values))))
    high = math.ceil(math.log10(max(values)))

    def x(tokens: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * tokens / most

    def y(loss: float) -> float:
        share = (math.log10(max(loss, 10.0**low)) - low) / max(1, high - low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">Loss by kind of text (nats a token)</text>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for n in range(5):
        tokens = most * n / 4
        parts.append(
            f'<text x="{x(tokens):.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{tokens / 1e6:.0f}M</text>'
        )
    parts.append(f'<text x="{x(most / 2):.1f}" y="{_HEIGHT - 4}" text-anchor="middle">tokens</text>')
    labels: list[float] = []
    for kind, curve in sorted(curves.items(), key=lambda item: y(item[1][-1][1])):
        path = "L".join(f"{x(tokens):.1f} {y(loss):.1f}" for tokens, loss in curve)
        colour = _COLOURS[kind]
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        label = max([y(curve[-1][1]) + 4, *(at + 16 for at in labels[-1:])])
        labels.append(label)
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8}" y="{label:.1f}" fill="{colour}">{kind}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    smoothed: list[tuple[int, float]] = []
    mean = points[0][1] if points else 0.0
    for tokens, value in points:
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * value
        smoothed.append((tokens, mean))
    return smoothed
