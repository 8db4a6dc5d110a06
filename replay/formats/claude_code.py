"""Claude Code's session logs (`~/.claude/projects/PROJECT/SESSION.jsonl`).

One line for each content block: `{type, uuid, parentUuid, isSidechain, agentId, timestamp, message: {id,
usage}}`. The lines of one `message.id` are one model call; its usage gives the tokens (input + cache writes +
cache reads). It starts at the line before its first one and ends with its last. Side chains are sub-agents:
inside the file, or in `SESSION/subagents/agent-ID.jsonl` or `agent-ID.jsonl` beside it.

A call that descends from the call before it in its conversation shares that one's prompt and answer with it;
one that does not (a compaction, an edited history) shares what the provider read from its cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import orjson

from replay.errors import TraceError
from replay.formats.base import Entry
from replay.formats.chain import BlockChain
from replay.formats.tracelab import timestamp_s
from replay.trace import Agent, Request, Session

BLOCK_TOKENS = 64
# So many ids for each agent of a session.
AGENT_IDS = 1 << 32
KINDS = ("user", "assistant")
USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


@dataclass(slots=True)
class _Call:
    """One model call, from the lines of one message."""

    start_s: float
    end_s: float
    input_tokens: int
    read_tokens: int
    output_tokens: int
    parent: str | None
    lines: set[str] = field(default_factory=set[str])


@dataclass(slots=True)
class _Conversation:
    name: str
    first_s: float
    calls: dict[str, _Call] = field(default_factory=dict[str, _Call])


class ClaudeCodeFormat:
    """Reads one session's log with those of its sub-agents."""

    name = "claude-code"

    def accepts(self, document: Any) -> bool:
        """An object with a session's id and a kind of line."""
        if not isinstance(document, dict):
            return False
        values = cast("dict[str, Any]", document)
        return "type" in values and ("sessionId" in values or "leafUuid" in values)

    def read(self, entries: Iterator[Entry], *, in_folder: bool) -> Iterator[Session]:
        """The session, none for the log of a sub-agent whose session is there. Raises TraceError."""
        lines = list(entries)
        path = lines[0].path
        if in_folder and all(line.values.get("isSidechain") for line in lines) and _main(lines[0]).exists():
            return
        for file in _subagent_files(path):
            lines += [line for line in _lines(file) if line.values.get("sessionId") == path.stem]
        session = _session(path, [line for line in lines if line.values.get("type") in KINDS])
        if session is not None:
            yield session
        elif not in_folder:
            raise TraceError(path, "", "holds no model call with usage")


def _main(line: Entry) -> Path:
    folder = line.path.parent
    if folder.name == "subagents":
        return folder.parent.with_suffix(".jsonl")
    return folder / f"{line.values.get('sessionId')}.jsonl"


def _subagent_files(path: Path) -> list[Path]:
    beside = [] if path.stem.startswith("agent-") else path.parent.glob("agent-*.jsonl")
    return sorted([*beside, *(path.with_suffix("") / "subagents").glob("agent-*.jsonl")])


def _lines(path: Path) -> Iterator[Entry]:
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                values = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise TraceError(path, f"line {number}", f"is not JSON ({error})") from error
            if not isinstance(values, dict):
                raise TraceError(path, f"line {number}", "must be an object")
            yield Entry(path, f"line {number}", cast("dict[str, Any]", values))


def _session(path: Path, lines: list[Entry]) -> Session | None:
    parents = {str(line.values.get("uuid")): line.values.get("parentUuid") for line in lines}
    times = {str(line.values.get("uuid")): timestamp_s(line, "timestamp") for line in lines}
    conversations: dict[str, _Conversation] = {}
    for line in lines:
        key = _conversation(line, parents)
        time_s = times[str(line.values.get("uuid"))]
        conversation = conversations.setdefault(key, _Conversation(key or "root", time_s))
        if line.values["type"] == "assistant":
            _add(conversation, line, time_s, times)
    conversations = {key: found for key, found in conversations.items() if found.calls}
    if "" not in conversations:
        return None
    begin_s = min(found.first_s for found in conversations.values())
    root = _requests(conversations.pop(""), begin_s, parents, 0)
    agents = [Agent("root", 0, root, 0.0, max(request.end_s for request in root))]
    for number, found in enumerate(sorted(conversations.values(), key=lambda item: item.first_s), 1):
        requests = _requests(found, begin_s, parents, number)
        start_s, end_s = found.first_s - begin_s, max(request.end_s for request in requests)
        start_s = min(start_s, requests[0].start_s)
        before = [place for place, request in enumerate(root) if request.start_s <= start_s]
        spawned = max(before, default=None)
        after = [
            place
            for place, request in enumerate(root)
            if request.start_s >= end_s and (spawned is None or place > spawned)
        ]
        agents.append(Agent(found.name, 0, requests, start_s, end_s, 0, spawned, min(after, default=None)))
    return Session(path.stem, BLOCK_TOKENS, tuple(agents))


def _conversation(line: Entry, parents: dict[str, Any]) -> str:
    """The sub-agent's id, the root of its chain where it has none, or nothing for the main conversation."""
    if not line.values.get("isSidechain"):
        return ""
    if line.values.get("agentId"):
        return str(line.values["agentId"])
    uuid = str(line.values.get("uuid"))
    while parents.get(uuid) in parents:
        uuid = str(parents[uuid])
    return uuid


def _add(conversation: _Conversation, line: Entry, time_s: float, times: dict[str, float]) -> None:
    message = line.object("message")
    if message.values.get("usage") is None:
        return
    usage = message.object("usage")
    input_tokens = sum(usage.integer(name, default=0) for name in USAGE)
    if not input_tokens:
        return  # made up by the client, such as the text of an API error
    identity = str(message.values.get("id") or line.values.get("requestId") or line.values.get("uuid"))
    parent = line.values.get("parentUuid")
    call = conversation.calls.get(identity)
    if call is None:
        call = conversation.calls[identity] = _Call(
            start_s=min(time_s, times.get(str(parent), time_s)),
            end_s=time_s,
            input_tokens=input_tokens,
            read_tokens=usage.integer("cache_read_input_tokens", default=0),
            output_tokens=0,
            parent=parent,
        )
    call.end_s = max(call.end_s, time_s)
    call.output_tokens = max(call.output_tokens, usage.integer("output_tokens", default=0))
    call.lines.add(str(line.values.get("uuid")))


def _requests(
    conversation: _Conversation, begin_s: float, parents: dict[str, Any], number: int
) -> tuple[Request, ...]:
    chain = BlockChain(BLOCK_TOKENS, number * AGENT_IDS)
    requests: list[Request] = []
    previous: _Call | None = None
    for call in sorted(conversation.calls.values(), key=lambda call: call.start_s):
        shared = 0
        if previous is not None:
            whole = previous.input_tokens + previous.output_tokens
            continues = _descends(call.parent, previous.lines, parents)
            grown = continues and call.input_tokens >= previous.input_tokens
            shared = whole if grown else min(call.read_tokens, previous.input_tokens)
        requests.append(
            Request(
                start_s=call.start_s - begin_s,
                service_s=call.end_s - call.start_s,
                input_tokens=call.input_tokens,
                output_tokens=call.output_tokens,
                blocks=chain.prompt(shared, call.input_tokens, call.output_tokens),
            )
        )
        previous = call
    return tuple(requests)


def _descends(uuid: str | None, ancestors: set[str], parents: dict[str, Any]) -> bool:
    while uuid is not None:
        if uuid in ancestors:
            return True
        uuid = parents.get(uuid)
    return False


CLAUDE_CODE = ClaudeCodeFormat()
