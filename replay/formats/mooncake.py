"""Mooncake's format: one request a line, in blocks of 512 tokens.

`{timestamp, input_length, output_length, hash_ids}` (kvcache-ai/Mooncake, FAST25 release; `timestamp` in
milliseconds) is a request alone: a session of one. With `session_id` (aiperf) the rows of an id are the turns
of one session, and `delay` is the milliseconds from the turn before. Such a row's prompt is either whole, its
ids beginning as those of the session's first row do, or only what is appended to the turns before it and
their answers, as aiperf writes it. Ids mean the same in all rows; those of appended blocks don't lie on the
grid of the whole prompt, so they are replaced by ids of the session's own.

The recorded server's time is not told and counts as 0.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, cast

from replay.formats.base import Entry
from replay.formats.chain import BlockChain
from replay.trace import Agent, Request, Session

BLOCK_TOKENS = 512


class MooncakeFormat:
    """Reads rows of requests, with sessions or without."""

    name = "mooncake"

    def accepts(self, document: Any) -> bool:
        """An object with an input length and hash ids."""
        return (
            isinstance(document, dict)
            and {"input_length", "hash_ids"} <= cast("dict[str, Any]", document).keys()
        )

    def read(self, entries: Iterator[Entry], *, in_folder: bool) -> Iterator[Session]:
        """The sessions in the order of their first rows. Raises TraceError."""
        sessions: dict[str, list[Entry]] = {}
        for number, entry in enumerate(entries, 1):
            named = "session_id" in entry.values
            name = entry.text("session_id") if named else f"{entry.path.stem}-{number}"
            sessions.setdefault(name, []).append(entry)
        for name, rows in sessions.items():
            yield _session(name, rows)


def _session(name: str, rows: list[Entry]) -> Session:
    arrival_s = rows[0].milliseconds("timestamp", default=0.0)
    ids = [_hash_ids(row) for row in rows]
    whole = all(row_ids[:1] == ids[0][:1] for row_ids in ids)
    chain = BlockChain(BLOCK_TOKENS, _first_own_id(rows[0], name))
    requests: list[Request] = []
    start_s, known_tokens = 0.0, 0
    for number, (row, row_ids) in enumerate(zip(rows, ids, strict=True)):
        if number:
            if "delay" in row.values:
                start_s += max(0.0, row.milliseconds("delay"))
            elif "timestamp" in row.values:
                start_s = max(start_s, row.milliseconds("timestamp") - arrival_s)
        new_tokens, output_tokens = row.integer("input_length", least=1), row.integer("output_length")
        if whole or number == 0:
            input_tokens = new_tokens
            blocks = tuple(row_ids[: input_tokens // BLOCK_TOKENS])
            chain.blocks = blocks
        else:
            input_tokens = known_tokens + new_tokens
            blocks = chain.prompt(known_tokens, input_tokens)
        known_tokens = input_tokens + output_tokens
        requests.append(Request(start_s, 0.0, input_tokens, output_tokens, blocks))
    root = Agent("root", 0, tuple(requests), 0.0, start_s)
    return Session(name, BLOCK_TOKENS, (root,), shared_blocks=True, arrival_s=arrival_s)


def _hash_ids(row: Entry) -> list[int]:
    ids = row.integers("hash_ids")
    most = -(-row.integer("input_length", least=1) // BLOCK_TOKENS)
    if len(ids) > most:
        raise row.error("hash_ids", f"has {len(ids)} ids for at most {most} blocks of {BLOCK_TOKENS} tokens")
    return ids


def _first_own_id(row: Entry, session: str) -> int:
    """Far from the trace's ids and from those of other sessions: negative, by a digest."""
    digest = hashlib.blake2b(f"{row.path}\0{session}".encode(), digest_size=6).digest()
    return -1 - (int.from_bytes(digest) << 20)


MOONCAKE = MooncakeFormat()
