"""The Weka format: one JSON object per session, as callanjfox/kv-cache-tester writes it.

`{id, block_size, hash_id_scope, tool_tokens, system_tokens, requests: [...]}`; a request is
`{t, type: "n" | "s", in, out, hash_ids, api_time}` or a sub-agent
`{t, type: "subagent", agent_id, duration_ms, tool_tokens, system_tokens, requests: [...]}`.
`t` is in seconds from the session's start; inside a sub-agent from the sub-agent's start (kv-cache-tester)
or from the session's (SemiAnalysis' corpora): relative when the first of them lies before the sub-agent's
own `t`.

Who waits for whom is read as AgentX reads it: a sub-agent starts after the request listed before it, and
the first later request of the parent that began when the sub-agent had ended waits for it.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from replay.errors import TraceError
from replay.trace import Agent, Request, Session

JOIN_TOLERANCE_S = 1e-6
MODEL_CALLS = ("n", "s")
SUBAGENT = "subagent"


@dataclass(frozen=True, slots=True)
class _Entry:
    """One JSON object of the file and where it stands, for errors that name it."""

    path: Path
    where: str
    values: dict[str, Any]

    def error(self, name: str, problem: str) -> TraceError:
        return TraceError(self.path, f"{self.where}.{name}" if self.where else name, problem)

    def child(self, name: str, index: int, value: Any) -> "_Entry":
        where = f"{self.where}.{name}[{index}]" if self.where else f"{name}[{index}]"
        if not isinstance(value, dict):
            raise TraceError(self.path, where, f"must be an object, is {type(value).__name__}")
        return _Entry(self.path, where, cast("dict[str, Any]", value))

    def integer(self, name: str, *, default: int | None = None, least: int = 0) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(name, f"must be an integer of at least {least}, is {value!r}")
        return value

    def seconds(self, name: str, *, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(name, f"must be a number of seconds, is {value!r}")
        return float(value)

    def list(self, name: str) -> list[Any]:
        value = self.values.get(name)
        if not isinstance(value, list):
            raise self.error(name, f"must be a list, is {type(value).__name__}")
        return cast("list[Any]", value)

    def head_tokens(self) -> int:
        return self.integer("tool_tokens", default=0) + self.integer("system_tokens", default=0)


@dataclass(slots=True)
class _Reader:
    """Collects the agents of one session, parents first."""

    block_tokens: int
    agents: list[Agent | None] = field(default_factory=list[Agent | None])

    def conversation(
        self,
        entry: _Entry,
        *,
        name: str,
        offset_s: float,
        parent: int | None = None,
        span: tuple[float, float | None] = (0.0, None),
        position: tuple[int | None, "list[Request]"] = (None, []),
    ) -> None:
        """Read the entry's requests as one agent, then its sub-agents.

        `offset_s` is added to each `t`. `position` is the parent's request before it, and all of the
        parent's.
        """
        index = len(self.agents)
        self.agents.append(None)
        requests: list[tuple[int, Request]] = []
        children: list[tuple[int, _Entry]] = []
        for number, value in enumerate(entry.list("requests")):
            item = entry.child("requests", number, value)
            kind = item.values.get("type")
            if kind == SUBAGENT:
                children.append((number, item))
            elif kind in MODEL_CALLS:
                requests.append((number, self._request(item, offset_s)))
            else:
                raise item.error("type", f"must be one of n, s, subagent, is {kind!r}")
        requests.sort(key=lambda pair: pair[1].start_s)
        ordered = [request for _, request in requests]
        start_s, end_s = span
        if end_s is None:
            end_s = max((request.end_s for request in ordered), default=start_s)
        spawned_after, siblings = position
        self.agents[index] = Agent(
            name=name,
            head_tokens=entry.head_tokens(),
            requests=tuple(ordered),
            start_s=start_s,
            end_s=end_s,
            parent=parent,
            spawned_after=spawned_after,
            joined_before=_joined_before(siblings, spawned_after, end_s),
        )
        for number, child in children:
            before = [place for place, (listed, _) in enumerate(requests) if listed < number]
            self._subagent(child, index, offset_s, (max(before, default=None), ordered))

    def _subagent(
        self, entry: _Entry, parent: int, offset_s: float, position: tuple[int | None, list[Request]]
    ) -> None:
        start_s = offset_s + entry.seconds("t")
        inner = [
            entry.child("requests", number, value).seconds("t")
            for number, value in enumerate(entry.list("requests"))
        ]
        if not inner:
            return
        relative = min(inner) + JOIN_TOLERANCE_S < entry.seconds("t")
        duration_ms = entry.values.get("duration_ms")
        end_s = None if duration_ms is None else start_s + max(0.0, entry.seconds("duration_ms")) / 1000
        self.conversation(
            entry,
            name=str(entry.values.get("agent_id") or f"agent_{len(self.agents)}"),
            offset_s=start_s if relative else offset_s,
            parent=parent,
            span=(start_s, end_s),
            position=position,
        )

    def _request(self, entry: _Entry, offset_s: float) -> Request:
        input_tokens = entry.integer("in", least=1)
        blocks = entry.list("hash_ids") if "hash_ids" in entry.values else []
        for number, block in enumerate(blocks):
            if not isinstance(block, int) or isinstance(block, bool):
                raise entry.error(f"hash_ids[{number}]", f"must be an integer, is {block!r}")
        return Request(
            start_s=offset_s + entry.seconds("t"),
            service_s=max(0.0, entry.seconds("api_time", default=0.0)),
            input_tokens=input_tokens,
            output_tokens=entry.integer("out"),
            # A recorder may give the last, partial block an id too: only full blocks have known tokens.
            blocks=tuple(cast("list[int]", blocks)[: input_tokens // self.block_tokens]),
        )


def _joined_before(siblings: list[Request], spawned_after: int | None, end_s: float) -> int | None:
    first = 0 if spawned_after is None else spawned_after + 1
    for index in range(first, len(siblings)):
        if siblings[index].start_s + JOIN_TOLERANCE_S >= end_s:
            return index
    return None


class WekaFormat:
    """Reads one Weka trace."""

    name = "weka"

    def accepts(self, document: Any) -> bool:
        """An object with a block size and requests."""
        return isinstance(document, dict) and "requests" in document and "block_size" in document

    def read(self, document: Any, path: Path, where: str) -> Session:
        """The session in the document. Raises TraceError."""
        entry = _Entry(path, where, document)
        scope = entry.values.get("hash_id_scope", "local")
        if scope not in ("local", "global"):
            raise entry.error("hash_id_scope", f"must be local or global, is {scope!r}")
        reader = _Reader(block_tokens=entry.integer("block_size", least=1))
        reader.conversation(entry, name="root", offset_s=0.0)
        agents = [agent for agent in reader.agents if agent is not None]
        if not any(agent.requests for agent in agents):
            raise entry.error("requests", "holds no model call")
        return Session(
            name=str(entry.values.get("id") or path.stem),
            block_tokens=reader.block_tokens,
            agents=tuple(agents),
            shared_blocks=scope == "global",
        )


WEKA = WekaFormat()
