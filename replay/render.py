"""A report as tables and as JSON."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from replay.record import Record
from replay.report import Distribution, Report, Summary
from replay.usage import TIERS

UNKNOWN = "-"
MOST_ROWS = 50


def tables(report: Report) -> Group:
    """Tokens, latency and prefix hits, one row per session and one in total; each fits 80 columns."""
    rows = report.sessions if len(report.sessions) <= MOST_ROWS else ()
    return Group(
        _table(
            "Tokens", ("turns", "errors", "input\nrequested", "input\nseen", "output"), rows, report, _tokens
        ),
        _table(
            "Latency",
            ("TTFT s\np50", "\np90", "ITL ms\np50", "\np90", "end to end s\np50", "\np90"),
            rows,
            report,
            _latencies,
        ),
        _table(
            "Prefix cache",
            ("cached", *TIERS, "hit", "hit in\ntheory", "hit /\ntheory"),
            rows,
            report,
            _hits,
        ),
        _caption(report),
    )


def _table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Summary],
    report: Report,
    cells: Callable[[Summary], list[str]],
) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("session", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    for summary in rows:
        table.add_row(summary.name, *cells(summary))
    table.add_section()
    table.add_row(report.total.name, *cells(report.total), style="bold")
    return table


def _tokens(summary: Summary) -> list[str]:
    return [
        f"{summary.turns:,}",
        f"{summary.errors:,}",
        f"{summary.input_requested:,}",
        f"{summary.input_seen:,}",
        f"{summary.output_seen:,}",
    ]


def _latencies(summary: Summary) -> list[str]:
    return [
        *_percentiles(summary.ttft),
        *_percentiles(summary.itl, unit_s=0.001),
        *_percentiles(summary.end_to_end),
    ]


def _percentiles(values: Distribution | None, *, unit_s: float = 1.0) -> list[str]:
    if values is None:
        return [UNKNOWN, UNKNOWN]
    return [f"{value / unit_s:.3g}" for value in (values.p50, values.p90)]


def _hits(summary: Summary) -> list[str]:
    return [
        UNKNOWN if summary.cached_tokens is None else f"{summary.cached_tokens:,}",
        *(UNKNOWN if summary.tiers is None else f"{summary.tiers[tier]:,}" for tier in TIERS),
        *(
            UNKNOWN if share is None else f"{share:.3f}"
            for share in (summary.actual_hit, summary.theoretical_hit, summary.hit_ratio)
        ),
    ]


def _caption(report: Report) -> Text:
    total = report.total
    lines = [
        f"{total.turns:,} turns in {report.wall_s:.1f} s",
        f"input off by at most {abs(total.largest_input_error)} tokens in a request, "
        f"by {total.input_seen - total.input_requested:+,} in all",
    ]
    if total.short_outputs:
        lines.append(f"{total.short_outputs} outputs were shorter than asked for")
    if report.scheduling_error:
        late = report.scheduling_error
        lines.append(f"requests left late by {late.p50 * 1000:.1f} ms (p50), {late.p99 * 1000:.1f} ms (p99)")
    if report.accept_length is not None:
        lines.append(f"accept length {report.accept_length:.2f}")
    lines += [f"{count} requests failed: {reason}" for reason, count in report.failures.items()]
    return Text("\n".join(lines))


def document(report: Report, run: Mapping[str, Any]) -> dict[str, Any]:
    """The report as one JSON object; `run` says how it was made and comes first."""
    return {
        **run,
        "sessions": [_summary(summary) for summary in report.sessions],
        "total": _summary(report.total),
        "wall_s": report.wall_s,
        "scheduling_error_s": _distribution(report.scheduling_error),
        "error_rate": report.error_rate,
        "accept_length": report.accept_length,
        "failures": report.failures,
    }


def _summary(summary: Summary) -> dict[str, Any]:
    values = dataclasses.asdict(summary)
    for name in ("ttft", "itl", "end_to_end"):
        values.pop(name)
        values[f"{name}_s"] = _distribution(getattr(summary, name))
    return {
        **values,
        "actual_hit": summary.actual_hit,
        "theoretical_hit": summary.theoretical_hit,
        "hit_ratio": summary.hit_ratio,
    }


def _distribution(values: Distribution | None) -> dict[str, float] | None:
    if values is None:
        return None
    return {"p50": values.p50, "p90": values.p90, "p99": values.p99, "max": values.most}


def request_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One object per request, for a file; times in seconds since the first request left."""
    begin = min((record.sent_s for record in records), default=0.0)
    return [_row(record, begin) for record in sorted(records, key=lambda record: record.sent_s)]


def _row(record: Record, begin: float) -> dict[str, Any]:
    planned, answer = record.planned, record.answer
    row: dict[str, Any] = {
        "session": record.session,
        "agent": record.agent,
        "turn": record.turn,
        "due_s": record.due_s - begin,
        "sent_s": (record.sent_s if answer is None else answer.sent_s) - begin,
        "messages": len(planned.messages),
        "input_requested": planned.input_tokens,
        "input_planned": planned.planned_tokens,
        "output_requested": planned.output_tokens,
        "prefix_tokens": planned.prefix_tokens,
    }
    if answer is None:
        return {**row, "failure": record.failure, "detail": record.detail}
    return {
        **row,
        "input_seen": answer.usage.prompt_tokens,
        "output_seen": answer.usage.completion_tokens,
        "cached_tokens": answer.usage.cached_tokens,
        "tiers": dict(answer.tiers) or None,
        "first_token_s": answer.first_token_s - begin,
        "end_s": answer.end_s - begin,
    }
