"""The Weka format: one JSON object per session, as callanjfox/kv-cache-tester writes it.

`{id, block_size, hash_id_scope, tool_tokens, system_tokens, arrival_s, requests: [...]}`; a request is
`{t, type: "n" | "s", in, out, hash_ids, api_time}` or a sub-agent
`{t, type: "subagent", agent_id, duration_ms, tool_tokens, system_tokens, requests: [...]}`.
`t` is in seconds from the session's start; inside a sub-agent from the sub-agent's start (kv-cache-tester)
or from the session's (SemiAnalysis' corpora): relative when the first of them lies before the sub-agent's
own `t`.

Who waits for whom is read as AgentX reads it: a sub-agent starts after the request listed before it, and
the first later request of the parent that began when the sub-agent had ended waits for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from replay.formats.base import Entry
from replay.trace import Agent, Request, Session

JOIN_TOLERANCE_S = 1e-6
MODEL = "recorded"
MODEL_CALLS = ("n", "s")
SUBAGENT = "subagent"


@dataclass(slots=True)
class _Reader:
    """Collects the agents of one session, parents first."""

    block_tokens: int
    agents: list[Agent | None] = field(default_factory=list[Agent | None])

    def conversation(
        self,
        entry: Entry,
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
        children: list[tuple[int, Entry]] = []
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
            head_tokens=_head_tokens(entry),
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
        self, entry: Entry, parent: int, offset_s: float, position: tuple[int | None, list[Request]]
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

    def _request(self, entry: Entry, offset_s: float) -> Request:
        input_tokens = entry.integer("in", least=1)
        blocks = entry.integers("hash_ids")
        return Request(
            start_s=offset_s + entry.seconds("t"),
            service_s=max(0.0, entry.seconds("api_time", default=0.0)),
            input_tokens=input_tokens,
            output_tokens=entry.integer("out"),
            # A recorder may give the last, partial block an id too: only full blocks have known tokens.
            blocks=tuple(blocks[: input_tokens // self.block_tokens]),
        )


def _head_tokens(entry: Entry) -> int:
    return entry.integer("tool_tokens", default=0) + entry.integer("system_tokens", default=0)


def _joined_before(siblings: list[Request], spawned_after: int | None, end_s: float) -> int | None:
    first = 0 if spawned_after is None else spawned_after + 1
    for index in range(first, len(siblings)):
        if siblings[index].start_s + JOIN_TOLERANCE_S >= end_s:
            return index
    return None


class WekaFormat:
    """Reads and writes Weka traces; `arrival_s`, when the session began, is an addition of ours."""

    name = "weka"

    def accepts(self, document: Any) -> bool:
        """An object with a block size and requests."""
        return isinstance(document, dict) and "requests" in document and "block_size" in document

    def read(self, entries: Iterator[Entry], *, in_folder: bool) -> Iterator[Session]:
        """A session from each document. Raises TraceError."""
        return map(_session, entries)


def weka_document(session: Session) -> dict[str, Any]:
    """The session as a Weka object; reading it gives an equal session.

    Equal but for sub-agents without requests, parts of a millisecond in how long sub-agents took, and waits
    that the format has no room for: it derives them from the recorded times. aiperf and agentx-harness read
    it, too: they want names of models, whole milliseconds, and no sub-agent in another.
    """

    def entries(index: int, offset_s: float) -> list[dict[str, Any]]:
        agent = session.agents[index]
        listed: list[dict[str, Any]] = []
        for number in (None, *range(len(agent.requests))):
            if number is not None:
                request = agent.requests[number]
                listed.append(
                    {
                        "t": request.start_s - offset_s,
                        "type": "s",
                        "model": MODEL,
                        "in": request.input_tokens,
                        "out": request.output_tokens,
                        "hash_ids": list(request.blocks),
                        "api_time": request.service_s,
                    }
                )
            for place, child in enumerate(session.agents):
                if child.parent == index and child.spawned_after == number:
                    start_s = child.start_s - offset_s
                    inner_s = _first_start_s(session, place) - child.start_s
                    # Times that would be taken for absolute ones are written as such.
                    inner_offset_s = child.start_s if inner_s + JOIN_TOLERANCE_S < start_s else offset_s
                    listed.append(
                        {
                            "t": start_s,
                            "type": SUBAGENT,
                            "agent_id": child.name,
                            "subagent_type": "agent",
                            "status": "completed",
                            "models": [MODEL],
                            "duration_ms": round((child.end_s - child.start_s) * 1000),
                            "tool_tokens": 0,
                            "system_tokens": child.head_tokens,
                            "requests": entries(place, inner_offset_s),
                        }
                    )
        return listed

    arrival = {"arrival_s": session.arrival_s} if session.arrival_s else {}
    return {
        "id": session.name,
        "models": [MODEL],
        "block_size": session.block_tokens,
        "hash_id_scope": "global" if session.shared_blocks else "local",
        "tool_tokens": 0,
        "system_tokens": session.agents[0].head_tokens,
        **arrival,
        "requests": entries(0, 0.0),
    }


def _first_start_s(session: Session, index: int) -> float:
    """When the first request of an agent or of a sub-agent listed in it begins, in the sense of its list."""
    starts = [request.start_s for request in session.agents[index].requests]
    starts += [agent.start_s for agent in session.agents if agent.parent == index]
    return min(starts, default=session.agents[index].start_s)


def _session(entry: Entry) -> Session:
    scope = entry.values.get("hash_id_scope", "local")
    if scope not in ("local", "global"):
        raise entry.error("hash_id_scope", f"must be local or global, is {scope!r}")
    reader = _Reader(block_tokens=entry.integer("block_size", least=1))
    reader.conversation(entry, name="root", offset_s=0.0)
    agents = [agent for agent in reader.agents if agent is not None]
    if not any(agent.requests for agent in agents):
        raise entry.error("requests", "holds no model call")
    return Session(
        name=str(entry.values.get("id") or entry.path.stem),
        block_tokens=reader.block_tokens,
        agents=tuple(agents),
        arrival_s=entry.seconds("arrival_s", default=0.0),
        shared_blocks=scope == "global",
    )


WEKA = WekaFormat()
