"""A run, or two beside each other, as one self-contained HTML file.

Made from the JSON that `--output` writes, rows included, so that a report can be made again later. No scripts
and nothing loaded from elsewhere; charts are inline SVG, and what a chart shows is in a table too.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from replay.report import distribution

Run = Mapping[str, Any]
Row = Mapping[str, Any]
Series = list[tuple[str, list[float]]]

_COLOURS: Final = ("#2471a3", "#e08e0b")
_TIERS: Final = {"device": "#1e8449", "host": "#7dcea0", "storage": "#2471a3"}
_MOST_SESSIONS: Final = 60
_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;margin:2rem auto;max-width:1080px;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:0}h2{font-size:1.15rem;margin:2.2rem 0 .4rem}
.note{color:#666;margin:.2rem 0}.bad{color:#b03a2e}.good{color:#1e8449}
table{border-collapse:collapse;margin:.6rem 0}th,td{padding:.25rem .8rem;text-align:right;
border-bottom:1px solid #e5e5e5;font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left;padding-left:0}
thead th{border-bottom:2px solid #bbb;font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:1rem}
.wide{overflow-x:auto}svg{max-width:100%;height:auto}svg text{fill:#333;font:11px system-ui,sans-serif}
"""


def page(runs: Sequence[tuple[str, Run]]) -> str:
    """The HTML of one or two named runs. Raises ValueError for rows that are missing."""
    for name, run in runs:
        if not isinstance(run.get("requests"), list):
            raise ValueError(f"{name}: has no rows of requests; write it with --output")
    title = "Replay" if len(runs) == 1 else "Two replays"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
        *(_heading(name, run, place, len(runs)) for place, (name, run) in enumerate(runs)),
        "<h2>Figures</h2>",
        _figures(runs),
        "<h2>Latency</h2>",
        '<p class="note">Share of requests that took at most so long; the axis is logarithmic.</p>',
        '<div class="charts">',
        *(
            _distribution(title, unit, [(name, _values(run, value)) for name, run in runs])
            for title, unit, value in _METRICS
        ),
        "</div>",
        "<h2>Prompt tokens by where they came from</h2>",
        _legend([*_TIERS.items(), ("computed", "#d5d8dc")]),
        *(_tiers(name, run) for name, run in runs),
        "<h2>Sessions over time</h2>",
        '<p class="note">A row a session, a bar a request: light until the first token, dark while '
        "answering, red where it failed.</p>",
        *(_timeline(name, run) for name, run in runs),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _heading(name: str, run: Run, place: int, count: int) -> str:
    mark = f'<span style="color:{_COLOURS[place]}">&#9632;</span> ' if count > 1 else ""
    about = [
        f"{run.get('model', '')} at {run.get('url', '')}",
        f"{run.get('concurrency', '')} live sessions, scale {run.get('scale', '')}, "
        f"time scale {run.get('time_scale', 0):g}, {run.get('arrivals', 'closed')} loop, "
        f"scenario {run.get('scenario', 'none')}",
    ]
    lines = [f'<p class="note">{mark}<b>{_text(name)}</b>: {_text("; ".join(about))}</p>']
    if run.get("scenario", "none") != "none":
        if run.get("valid"):
            lines.append('<p class="good">valid</p>')
        lines += [f'<p class="bad">not valid: {_text(why)}</p>' for why in run.get("invalid_because", ())]
    if run.get("stopped"):
        lines.append(f'<p class="bad">{_text(str(run["stopped"]))}</p>')
    return "\n".join(lines)


def _answered(run: Run) -> list[Row]:
    return [row for row in run["requests"] if "end_s" in row]


def _ttft(row: Row) -> float | None:
    return row["first_token_s"] - row["sent_s"]


def _itl(row: Row) -> float | None:
    gaps = row["output_seen"] - 1
    return (row["end_s"] - row["first_token_s"]) / gaps if gaps > 0 else None


def _interactivity(row: Row) -> float | None:
    itl = _itl(row)
    return 1 / itl if itl else None


def _per_output_token(row: Row) -> float | None:
    return (row["end_s"] - row["sent_s"]) / row["output_seen"] if row["output_seen"] else None


_METRICS: Final[tuple[tuple[str, str, Callable[[Row], float | None]], ...]] = (
    ("Time to the first token", "s", _ttft),
    ("Time between tokens", "s", _itl),
    ("Interactivity", "tokens/s", _interactivity),
    ("End to end per output token", "s", _per_output_token),
)


def _values(run: Run, value: Callable[[Row], float | None]) -> list[float]:
    return [found for row in _answered(run) if (found := value(row)) is not None]


def figures(run: Run) -> dict[str, float | None]:
    """The figures of a run by name, None where it does not tell; from its JSON with rows."""
    rows, total = _answered(run), run["total"]
    wall_s = run.get("wall_s") or 0.0
    found: dict[str, float | None] = {
        "requests": total["turns"],
        "failed": total["errors"],
        "prompt tokens": total["input_seen"],
        "output tokens": total["output_seen"],
        "time, s": wall_s,
        "prompt tokens a second": total["input_seen"] / wall_s if wall_s else None,
        "output tokens a second": total["output_seen"] / wall_s if wall_s else None,
        "requests an hour": 3600 * len(rows) / wall_s if wall_s else None,
        "hit rate": total["actual_hit"],
        "hit rate in theory": total["theoretical_hit"],
        "hit rate / theory": total["hit_ratio"],
        "accept length": run.get("accept_length"),
    }
    for title, unit, value in _METRICS:
        spread = distribution(_values(run, value))
        for name in ("p50", "p90", "p99"):
            found[f"{title} {name}, {unit}"] = None if spread is None else getattr(spread, name)
    slowest = found["End to end per output token p90, s"]
    found["1 / P90 of end to end per output token, tokens/s"] = 1 / slowest if slowest else None
    return found


def _figures(runs: Sequence[tuple[str, Run]]) -> str:
    columns = [figures(run) for _, run in runs]
    heads = "".join(f"<th>{_text(name)}</th>" for name, _ in runs) + (
        "<th>ratio</th>" if len(runs) > 1 else ""
    )
    lines = [f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>"]
    for name in columns[0]:
        values = [column[name] for column in columns]
        cells = "".join(f"<td>{_number(value)}</td>" for value in values)
        if len(values) > 1:
            left, right = values[0], values[1]
            cells += f"<td>{right / left:.2f}</td>" if left and right is not None else "<td>-</td>"
        lines.append(f"<tr><td>{_text(name)}</td>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _distribution(title: str, unit: str, series: Series) -> str:
    width, height, left, right, top, bottom = 340, 220, 36, 10, 26, 34
    known = [value for _, values in series for value in values if value > 0]
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{_text(title)}">'
    name = f'<text x="{left}" y="14" font-weight="600">{_text(title)}, {_text(unit)}</text>'
    if not known:
        return f'{head}{name}<text x="{left}" y="60">no values</text></svg>'
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    high = max(high, low + 1)

    def x(value: float) -> float:
        return left + (width - left - right) * (math.log10(max(value, 10.0**low)) - low) / (high - low)

    def y(share: float) -> float:
        return height - bottom - (height - top - bottom) * share

    parts = [head, name]
    for share in (0, 0.5, 0.9, 1):
        parts.append(f'<path d="M{left} {y(share):.1f}H{width - right}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{left - 5}" y="{y(share) + 4:.1f}" text-anchor="end">{share:g}</text>')
    step = max(1, (high - low) // 4)
    for power in range(low, high + 1, step):
        at = x(10.0**power)
        parts.append(f'<path d="M{at:.1f} {top}V{height - bottom}" stroke="#f0f0f0"/>')
        anchor = "end" if power == high else "middle"
        parts.append(f'<text x="{at:.1f}" y="{height - 16}" text-anchor="{anchor}">{10.0**power:g}</text>')
    for place, (_, values) in enumerate(series):
        ranked = sorted(values)
        every = max(1, len(ranked) // 300)
        kept = sorted({*range(0, len(ranked), every), len(ranked) - 1} & set(range(len(ranked))))
        line = "L".join(f"{x(ranked[rank]):.1f} {y((rank + 1) / len(ranked)):.1f}" for rank in kept)
        if line:
            parts.append(f'<path d="M{line}" fill="none" stroke="{_COLOURS[place]}" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>"])


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    marks = (f'<span style="color:{colour}">&#9632;</span> {_text(name)}' for name, colour in entries)
    return f'<p class="note">{" &nbsp; ".join(marks)} &nbsp; | what an infinite cache would hit</p>'


def _tiers(name: str, run: Run) -> str:
    """One bar: shares of prompt tokens by tier, and a mark at the theoretical hit rate."""
    total = run["total"]
    seen, cached = total["input_seen"], total["cached_tokens"]
    if not seen or cached is None:
        return f'<p class="note">{_text(name)}: the endpoint does not report cached tokens</p>'
    tiers = total["tiers"] or {"device": cached}
    width, at = 1000, 0.0
    parts = [f'<svg viewBox="0 0 {width} 58" role="img" aria-label="tokens by tier">']
    parts.append(f'<text x="0" y="14">{_text(name)}</text>')
    shares = [(tier, tokens / seen) for tier, tokens in tiers.items()]
    shares.append(("computed", max(0.0, 1 - sum(share for _, share in shares))))
    for tier, share in shares:
        colour = _TIERS.get(tier, "#d5d8dc")
        parts.append(
            f'<rect x="{at * width:.1f}" y="22" width="{share * width:.1f}" height="24" fill="{colour}">'
            f"<title>{tier}: {share:.1%}</title></rect>"
        )
        if share > 0.06:
            ink = "#333" if tier in ("computed", "host") else "#fff"
            parts.append(f'<text x="{at * width + 6:.1f}" y="38" style="fill:{ink}">{share:.1%}</text>')
        at += share
    theory = total["theoretical_hit"]
    if theory is not None:
        parts.append(f'<path d="M{theory * width:.1f} 18V50" stroke="#000" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>"])


def _timeline(name: str, run: Run) -> str:
    """A row a session, the first `_MOST_SESSIONS` of them."""
    sessions: dict[str, list[Row]] = {}
    for row in run["requests"]:
        sessions.setdefault(row["session"], []).append(row)
    shown = list(sessions.items())[:_MOST_SESSIONS]
    end_s = max((row.get("end_s", row["sent_s"]) for row in run["requests"]), default=0.0) or 1.0
    left, width, line = 150, 1060, 15
    height = len(shown) * line + 40
    parts = [f'<div class="wide"><svg viewBox="0 0 {width} {height}" role="img" aria-label="timeline">']
    parts.append(f'<text x="0" y="13" font-weight="600">{_text(name)}</text>')

    def x(time_s: float) -> float:
        return left + (width - left - 10) * time_s / end_s

    for quarter in range(5):
        at_s = end_s * quarter / 4
        anchor = "end" if quarter == 4 else "middle"
        parts.append(f'<path d="M{x(at_s):.1f} 20V{height - 18}" stroke="#eee"/>')
        parts.append(f'<text x="{x(at_s):.1f}" y="{height - 4}" text-anchor="{anchor}">{at_s:.3g} s</text>')
    for number, (session, rows) in enumerate(shown):
        y = 22 + number * line
        parts.append(f'<text x="0" y="{y + 10}">{_text(session[:22])}</text>')
        for row in rows:
            parts += _bars(row, x, y)
    parts.append("</svg></div>")
    if len(sessions) > len(shown):
        parts.append(f'<p class="note">{len(sessions) - len(shown)} more sessions are not shown</p>')
    return "\n".join(parts)


def _bars(row: Row, x: Callable[[float], float], y: int) -> list[str]:
    if "end_s" not in row:
        return [
            f'<rect x="{x(row["sent_s"]):.1f}" y="{y}" width="3" height="11" fill="#b03a2e">'
            f"<title>{_text(str(row.get('failure')))}</title></rect>"
        ]
    begin, first, end = (x(row[name]) for name in ("sent_s", "first_token_s", "end_s"))
    cached = row.get("cached_tokens")
    hit = "" if cached is None else f", {cached:,} cached"
    title = f"{row['agent']} {row['turn']}: {row['input_seen']:,} in{hit}, {row['output_seen']:,} out"
    return [
        f'<rect x="{begin:.1f}" y="{y}" width="{max(first - begin, 0.4):.1f}" height="11" fill="#aed6f1">'
        f"<title>{_text(title)}</title></rect>",
        f'<rect x="{first:.1f}" y="{y}" width="{max(end - first, 0.4):.1f}" height="11" fill="#2471a3">'
        f"<title>{_text(title)}</title></rect>",
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _text(text: str) -> str:
    return html.escape(text)
