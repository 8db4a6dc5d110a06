"""TraceLab's rows: one model call of a coding session a line (uw-syfi/TraceLab).

`{session_id, round_index, input_tokens_total, prefix_tokens, output_tokens, timing_events: [{event_type,
timestamp}]}`. A prompt shares with the one before it what the recorded provider found in its cache
(`prefix_tokens`): where that cache had forgotten, the trace says less than was really equal. A call starts
at its last user message or tool result and ends at its last event.
"""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, cast

from replay.formats.base import Entry
from replay.formats.chain import BlockChain
from replay.trace import Agent, Request, Session

BLOCK_TOKENS = 64
INPUT_EVENTS = ("user_message", "tool_result")


class TraceLabFormat:
    """Reads rows of rounds."""

    name = "tracelab"

    def accepts(self, document: Any) -> bool:
        """An object with a round's number and its input tokens."""
        return (
            isinstance(document, dict)
            and {"round_index", "input_tokens_total"} <= cast("dict[str, Any]", document).keys()
        )

    def read(self, entries: Iterator[Entry], *, in_folder: bool) -> Iterator[Session]:
        """The sessions in the order of their first rows. Raises TraceError."""
        sessions: dict[str, list[Entry]] = {}
        for entry in entries:
            sessions.setdefault(entry.text("session_id"), []).append(entry)
        for name, rows in sessions.items():
            yield _session(name, sorted(rows, key=lambda row: row.integer("round_index")))


def _session(name: str, rows: list[Entry]) -> Session:
    chain = BlockChain(BLOCK_TOKENS)
    requests: list[Request] = []
    begin_s = _span(rows[0])[0]
    for number, row in enumerate(rows):
        start_s, end_s = _span(row)
        start_s = max(start_s - begin_s, requests[-1].start_s if requests else 0.0)
        input_tokens = row.integer("input_tokens_total", least=1)
        shared_tokens = row.integer("prefix_tokens", default=0) if number else 0
        requests.append(
            Request(
                start_s=start_s,
                service_s=max(0.0, end_s - begin_s - start_s),
                input_tokens=input_tokens,
                output_tokens=row.integer("output_tokens"),
                blocks=chain.prompt(shared_tokens, input_tokens),
            )
        )
    root = Agent("root", 0, tuple(requests), 0.0, max(request.end_s for request in requests))
    return Session(name, BLOCK_TOKENS, (root,))


def _span(row: Entry) -> tuple[float, float]:
    inputs: list[float] = []
    others: list[float] = []
    for event in row.objects("timing_events"):
        times = inputs if event.text("event_type") in INPUT_EVENTS else others
        times.append(timestamp_s(event, "timestamp"))
    if not inputs and not others:
        raise row.error("timing_events", "must hold an event")
    start_s = max(inputs) if inputs else min(others)
    return start_s, max(start_s, *others) if others else start_s


def timestamp_s(entry: Entry, name: str) -> float:
    """An ISO 8601 time in a field, as seconds since 1970. Raises TraceError."""
    try:
        return datetime.fromisoformat(entry.text(name)).timestamp()
    except ValueError as error:
        raise entry.error(name, f"must be an ISO 8601 time, is {entry.values[name]!r}") from error


TRACELAB = TraceLabFormat()
