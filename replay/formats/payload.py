"""Recorded request bodies: aiperf's raw payloads and its `inputs.json`.

A raw payload is one body of a Chat Completions request a line. A file that was found in a folder is one
session, its lines the turns; a file named alone has one session a line. `inputs.json` is `{data:
[{session_id, payloads: [body, ...]}]}`.

What is read are lengths and equal beginnings, not the text: a prompt is its tools and messages as JSON,
`BYTES_PER_TOKEN` bytes a token, and blocks are named by digests of all bytes so far, so that equal beginnings
are found across sessions and files. An answer is as long as the body asks (`max_completion_tokens`,
`max_tokens`), else as the assistant's message in the next body. There is no timing: turns follow at once.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import orjson

from replay.formats.base import Entry
from replay.trace import Agent, Request, Session

BLOCK_TOKENS = 64
BYTES_PER_TOKEN = 4
HEAD_ROLES = ("system", "developer")
LENGTHS = ("max_completion_tokens", "max_tokens")


class PayloadFormat:
    """Reads request bodies, one a line."""

    name = "raw payload"

    def accepts(self, document: Any) -> bool:
        """An object with messages and no trajectory around them."""
        return isinstance(document, dict) and "messages" in document

    def read(self, entries: Iterator[Entry], *, in_folder: bool) -> Iterator[Session]:
        """One session, or one for each line. Raises TraceError."""
        bodies = list(entries)
        if in_folder:
            yield payload_session(bodies[0].path.stem, bodies)
        else:
            for number, body in enumerate(bodies, 1):
                yield payload_session(f"{body.path.stem}-{number}", [body])


class InputsFormat:
    """Reads `inputs.json`."""

    name = "inputs.json"

    def accepts(self, document: Any) -> bool:
        """An object with a list of sessions under `data`."""
        return isinstance(document, dict) and isinstance(cast("dict[str, Any]", document).get("data"), list)

    def read(self, entries: Iterator[Entry], *, in_folder: bool) -> Iterator[Session]:
        """The sessions of the file. Raises TraceError."""
        for entry in entries:
            for session in entry.objects("data"):
                bodies = session.objects("payloads")
                if not bodies:
                    raise session.error("payloads", "must hold a request body")
                yield payload_session(session.text("session_id"), bodies)


def payload_session(name: str, bodies: Sequence[Entry]) -> Session:
    """A session of request bodies. Raises TraceError."""
    prompts = [_prompt(body) for body in bodies]
    requests: list[Request] = []
    for number, body in enumerate(bodies):
        following = bodies[number + 1] if number + 1 < len(bodies) else None
        requests.append(prompt_request(prompts[number], _output_tokens(body, following)))
    return Session(
        name,
        BLOCK_TOKENS,
        (Agent("root", tokens(_head(bodies[0])), tuple(requests), 0.0, 0.0),),
        shared_blocks=True,
    )


def prompt_request(parts: Iterable[bytes], output_tokens: int) -> Request:
    """A request without timing whose prompt is these bytes."""
    prompt = b"".join(parts)
    step = BLOCK_TOKENS * BYTES_PER_TOKEN
    blocks: list[int] = []
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(prompt) - step + 1, step):
        digest.update(prompt[start : start + step])
        blocks.append(int.from_bytes(digest.digest(), signed=True))
    return Request(0.0, 0.0, max(1, tokens([prompt])), output_tokens, tuple(blocks))


def tokens(parts: Iterable[bytes]) -> int:
    """The tokens that so many bytes are taken for."""
    return sum(map(len, parts)) // BYTES_PER_TOKEN


def message_bytes(message: Mapping[str, Any]) -> bytes:
    """A message as JSON, keys sorted."""
    return orjson.dumps(message, option=orjson.OPT_SORT_KEYS)


def _prompt(body: Entry) -> list[bytes]:
    messages = body.objects("messages")
    if not messages:
        raise body.error("messages", "must hold a message")
    tools = (
        [orjson.dumps(body.values["tools"], option=orjson.OPT_SORT_KEYS)] if "tools" in body.values else []
    )
    return [*tools, *(message_bytes(message.values) for message in messages)]


def _head(body: Entry) -> list[bytes]:
    messages = body.objects("messages")
    heads = 0
    while heads < len(messages) and messages[heads].values.get("role") in HEAD_ROLES:
        heads += 1
    parts = _prompt(body)
    return parts[: len(parts) - len(messages) + heads]


def _output_tokens(body: Entry, following: Entry | None) -> int:
    for name in LENGTHS:
        if body.values.get(name) is not None:
            return body.integer(name, least=1)
    if following is not None:
        added = following.objects("messages")[len(body.list("messages")) :]
        if added and added[0].values.get("role") == "assistant":
            return max(1, tokens([message_bytes(added[0].values)]))
    return 1


PAYLOAD = PayloadFormat()
INPUTS = InputsFormat()
