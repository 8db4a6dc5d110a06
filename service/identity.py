"""Which session a request belongs to, from what clients put into headers and bodies.

The first source of the table that has a value counts. A session's name is a hint: it chooses among turns with
equal visible digests and routes to an engine, and never decides what is continued. A request that names none
continues by its digests alone; its turn then belongs to the session of the turn that it continues, if any.

| source | sent by |
|---|---|
| body `session_id` | SGLang's clients, LiteLLM |
| body `litellm_session_id` | LiteLLM |
| body `prompt_cache_key` | OpenAI's SDKs, Codex, Kimi Code, OpenHands |
| header `x-session-id` | opencode |
| header `x-session-affinity` | opencode |
| header `x-claude-code-session-id` | Claude Code |
| header `session-id`, `session_id`, `thread-id` | Codex (with the underscore: its older releases) |
| header `x-litellm-session-id` | LiteLLM, OpenHands |
| header `x-kilocode-taskid` | Kilo Code |
| header `x-client-session-id` | Copilot CLI |
| header `x-correlation-id` | agentx replays |
| body `metadata.user_id`: JSON with `session_id`, or a name ending in `_session_ID` | Claude Code |
| body `metadata.session_id` | LiteLLM's proxy, and frameworks that trace through it |
| body `client_metadata.thread_id` | Codex |

A user's name (`user`, any other `metadata.user_id`) is no session: one user has many.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

MAX_SESSION_CHARS: Final = 512


@dataclass(frozen=True, slots=True)
class Session:
    """A client's name for its session, and the header or field it came from."""

    id: str
    source: str


def _claude_code_session(user_id: str) -> str:
    try:
        named: object = json.loads(user_id)
    except (ValueError, RecursionError):
        found = re.search(r"_session_([0-9A-Za-z-]+)$", user_id)
        return found[1] if found else ""
    session = cast("dict[str, Any]", named).get("session_id") if isinstance(named, dict) else None
    return session if isinstance(session, str) else ""


def _as_it_is(value: str) -> str:
    return value


_SOURCES: Final[tuple[tuple[str, str, Callable[[str], str]], ...]] = (
    ("body", "session_id", _as_it_is),
    ("body", "litellm_session_id", _as_it_is),
    ("body", "prompt_cache_key", _as_it_is),
    ("header", "x-session-id", _as_it_is),
    ("header", "x-session-affinity", _as_it_is),
    ("header", "x-claude-code-session-id", _as_it_is),
    ("header", "session-id", _as_it_is),
    ("header", "session_id", _as_it_is),
    ("header", "thread-id", _as_it_is),
    ("header", "x-litellm-session-id", _as_it_is),
    ("header", "x-kilocode-taskid", _as_it_is),
    ("header", "x-client-session-id", _as_it_is),
    ("header", "x-correlation-id", _as_it_is),
    ("body", "metadata.user_id", _claude_code_session),
    ("body", "metadata.session_id", _as_it_is),
    ("body", "client_metadata.thread_id", _as_it_is),
)


def identify(headers: Mapping[str, str], body: Mapping[str, Any]) -> Session | None:
    """The session that a request names, or None. Header names in `headers` are in lower case.

    A value that is no text, is empty, or is longer than `MAX_SESSION_CHARS`, names nothing.
    """
    for place, name, read in _SOURCES:
        value = headers.get(name) if place == "header" else _field(body, name)
        if not isinstance(value, str) or len(value) > MAX_SESSION_CHARS:
            continue
        if session := read(value.strip()):
            return Session(session, name)
    return None


def _field(body: Mapping[str, Any], path: str) -> object:
    value: object = body
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value
