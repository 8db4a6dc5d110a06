"""SWE-agent's trajectories (`.traj`): `{trajectory: [...], history: [{role, content, is_demo}], info}`.

Each message of the assistant in the history, demonstrations aside, is the answer of one model call whose
prompt is the history before it. Lengths and blocks are those of the text as in `replay.formats.payload`;
there is no timing.
"""

from collections.abc import Iterator
from typing import Any, cast

from replay.formats.base import Entry
from replay.formats.payload import BLOCK_TOKENS, message_bytes, prompt_request, tokens
from replay.trace import Agent, Request, Session

# What the model saw of a message; the rest is SWE-agent's book-keeping.
SEEN = ("role", "content", "tool_calls", "tool_call_ids")


class SweAgentFormat:
    """Reads one trajectory."""

    name = "swe-agent"

    def accepts(self, document: Any) -> bool:
        """An object with a trajectory and a history."""
        return (
            isinstance(document, dict)
            and {"trajectory", "history"} <= cast("dict[str, Any]", document).keys()
        )

    def read(self, entries: Iterator[Entry], *, in_folder: bool) -> Iterator[Session]:
        """A session from each document. Raises TraceError."""
        return map(_session, entries)


def _session(entry: Entry) -> Session:
    history = entry.objects("history")
    seen: list[bytes] = []
    requests: list[Request] = []
    head_tokens = 0
    for message in history:
        role = message.text("role")
        part = message_bytes({name: message.values[name] for name in SEEN if name in message.values})
        if role == "assistant" and not message.values.get("is_demo"):
            if not seen:
                raise message.error("role", "must not be assistant: there is no prompt before it")
            requests.append(prompt_request(seen, max(1, tokens([part]))))
        if role == "system" and not head_tokens:
            head_tokens = tokens([part])
        seen.append(part)
    if not requests:
        raise entry.error("history", "holds no answer of the model")
    root = Agent("root", head_tokens, tuple(requests), 0.0, 0.0)
    return Session(entry.path.stem, BLOCK_TOKENS, (root,), shared_blocks=True)


SWE_AGENT = SweAgentFormat()
