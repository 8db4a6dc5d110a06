"""Whether any body brings the gateway down: thousands of mutated requests to all APIs.

Real requests (`bench.recorded_clients`) and ones that use every field are changed at random places: values of
other types and sizes, fields gone, twice there or misspelled, nesting, text that is no UTF-8, JSON cut short.
No answer may be a 5xx, and every 4xx must name the field at fault, in the API's own shape of an error.

    python -m bench.malformed --bodies 10000 --json
"""

import argparse
import asyncio
import copy
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from bench.crash import stack
from bench.engines import note
from bench.raw_client import Answer, RawClient
from bench.recorded_clients import CHAT, MESSAGES, RESPONSES, load

BODIES: Final = 10_000
CONNECTIONS: Final = 8
_LARGEST_BASE_BYTES: Final = 6_000
_SCHEMA: Final = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_FUNCTION: Final = {"name": "run", "description": "Run it.", "parameters": _SCHEMA, "strict": True}
_SAMPLED: Final = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "min_tokens": 1,
    "ignore_eos": False,
    "seed": 7,
}
_FULL: Final[dict[str, dict[str, Any]]] = {
    CHAT: {
        **_SAMPLED,
        "model": "kimi-k3",
        "messages": [
            {"role": "system", "content": "Be brief.", "tools": []},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"n": 1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
            {"role": "assistant", "content": "I", "partial": True},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "run"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
        "parallel_tool_calls": False,
        "reasoning_effort": "high",
        "thinking": {"type": "enabled"},
        "chat_template_kwargs": {"thinking": True},
        "max_tokens": 9,
        "max_completion_tokens": 9,
        "stop": ["END"],
        "n": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1},
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "stream": False,
        "stream_options": {"include_usage": True},
        "prompt_cache_key": "k",
        "session_id": "s",
        "metadata": {"user_id": "u"},
    },
    RESPONSES: {
        **_SAMPLED,
        "model": "kimi-k3",
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "Now."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
                "encrypted_content": "AAAA",
            },
            {"type": "function_call", "call_id": "c1", "name": "run", "arguments": '{"n": 1}'},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "x"}],
            },
            {"type": "item_reference", "id": f"rs_{'0' * 32}"},
        ],
        "tools": [{"type": "function", **_FUNCTION}, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "run"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "max_output_tokens": 9,
        "top_logprobs": 1,
        "truncation": "auto",
        "metadata": {"a": "b"},
        "store": True,
        "stream": True,
        "parallel_tool_calls": True,
        "background": False,
        "previous_response_id": None,
        "prompt_cache_key": "k",
    },
    MESSAGES: {
        "model": "kimi-k3",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "AAAA"},
                    {"type": "text", "text": "Now."},
                    {"type": "tool_use", "id": "c1", "name": "run", "input": {"n": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x", "is_error": False}],
            },
        ],
        "tools": [{"name": "run", "description": "Run it.", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"effort": "high"},
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "stream": True,
        "metadata": {"user_id": "u"},
    },
}
_IMAGE_URL: Final = "data:image/png;base64,iVBORw0KGgo="
_IMAGES: Final[dict[str, dict[str, Any]]] = {
    CHAT: {"type": "image_url", "image_url": {"url": _IMAGE_URL, "detail": "low"}},
    RESPONSES: {"type": "input_image", "image_url": _IMAGE_URL, "detail": "auto"},
    MESSAGES: {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
        "cache_control": {"type": "ephemeral"},
    },
}
_JUNK: Final[Sequence[Any]] = (
    None,
    True,
    0,
    -1,
    1.5,
    2**63,
    2**64 - 1,
    1e308,
    "",
    "x",
    "\x00",
    "<|open|>",
    "x" * 5000,
    [],
    [[]],
    [None],
    {},
    {"type": "x"},
    {"": {}},
    ["text"],
)
_NAMELESS: Final = ("invalid_json", "request_too_large", "context_length_exceeded")


def bases(*, images: bool = False) -> list[tuple[str, bytes]]:
    """Valid bodies to begin from, with their paths; with `images` for an engine that sees them, too."""
    found = [(path, orjson.dumps(body)) for path, body in _FULL.items()] * 4
    if images:
        for path, part in _IMAGES.items():
            key = "input" if path == RESPONSES else "messages"
            seen = {"role": "user", "content": [part]}
            found += [(path, orjson.dumps({**_FULL[path], key: [seen, *_FULL[path][key]]}))] * 2
    for session in load():
        body = orjson.dumps({**session.turns[-1], "model": "kimi-k3"})
        if len(body) < _LARGEST_BASE_BYTES:
            found.append((session.path, body))
    return found


def mutated(body: bytes, chance: random.Random) -> bytes:
    """The body with one to three changes."""
    document: Any = json.loads(body)
    for _ in range(chance.randint(1, 3)):
        document = _changed(document, chance)
    raw = json.dumps(document, ensure_ascii=chance.random() < 0.5).encode(errors="replace")
    match chance.randrange(40):
        case 0:
            return raw[: chance.randrange(len(raw))]
        case 1:
            place = chance.randrange(len(raw))
            return raw[:place] + bytes([chance.randrange(256)]) + raw[place + 1 :]
        case 2:
            return raw.replace(b'"x"', b'"\\ud800"')
        case _:
            return raw


def _changed(document: Any, chance: random.Random) -> Any:
    places = list(_places(document))
    if not places:
        return copy.deepcopy(chance.choice(_JUNK))
    holder, key = chance.choice(places)
    match chance.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))  # pyright: ignore[reportUnknownMemberType]
        case 1:
            holder[f"{key}x"] = holder.pop(key)
        case 2:
            for _ in range(chance.choice((1, 3, 200))):
                holder[key] = [holder[key]] if chance.random() < 0.5 else {"a": holder[key]}
        case _:
            holder[key] = copy.deepcopy(chance.choice(_JUNK))
    return document


def _places(value: Any) -> Sequence[tuple[Any, Any]]:
    """Every (object or array, key) in a document."""
    found: list[tuple[Any, Any]] = []
    layer = [value]
    while layer:
        node = layer.pop()
        entries: list[tuple[Any, Any]] = []
        if isinstance(node, dict | list):
            entries = list(node.items() if isinstance(node, dict) else enumerate(node))
        for key, child in entries:
            found.append((node, key))
            layer.append(child)
    return found


def complaint(path: str, answer: Answer) -> str | None:
    """What is wrong with an answer; None for nothing."""
    if answer.status >= 500:
        return f"{answer.status}: {answer.body[:200]!r}"
    if answer.status == 200:
        return None
    try:
        error = orjson.loads(answer.body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError):
        return f"{answer.status} without an error: {answer.body[:200]!r}"
    if path != MESSAGES and error.get("param"):
        field = str(error["param"]).partition("[")[0].partition(".")[0]
        return None if field in message else f"{field} is not in {message!r}"
    known = (*_FULL[path], "The request body", "The model", "prompt is too long")
    if code in _NAMELESS or message.startswith(known):
        return None
    return f"{answer.status} names no field: {message!r}"


async def send(url: str, bodies: int, seed: int) -> tuple[Counter[int], list[str]]:
    """Send so many, and collect statuses and complaints."""
    chance = random.Random(seed)
    found = bases(images=True)
    waiting = iter([(path, mutated(body, chance)) for path, body in chance.choices(found, k=bodies)])
    statuses, complaints = Counter[int](), list[str]()

    async def ask() -> None:
        client = await RawClient.connect(url)
        for path, body in waiting:
            try:
                answer = await client.post_bytes(path, body)
            except (OSError, asyncio.IncompleteReadError) as error:
                complaints.append(f"{path} {error!r} for {body[:1500]!r}")
                client = await RawClient.connect(url)
                continue
            statuses[answer.status] += 1
            if (wrong := complaint(path, answer)) is not None:
                complaints.append(f"{path} {wrong} for {body[:1500]!r}")
        await client.close()

    await asyncio.gather(*(ask() for _ in range(CONNECTIONS)))
    return statuses, complaints


def measure(scratch: Path, bodies: int, seed: int) -> dict[str, Any]:
    """Start a gateway, send, and report."""
    with stack(scratch, delay_ms=0.0) as processes:
        statuses, complaints = asyncio.run(send(processes.url, bodies, seed))
    for wrong in complaints[:20]:
        note(wrong)
    if complaints:
        note((scratch / "gateway.log").read_text(errors="replace")[-4000:])
    return {
        "bodies": sum(statuses.values()),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "server_errors": sum(count for status, count in statuses.items() if status >= 500),
        "complaints": len(complaints),
    }


def main() -> int:
    """Send and report; 0 when there was no server error and every complaint named its field."""
    parser = argparse.ArgumentParser(prog="python -m bench.malformed", description=__doc__)
    parser.add_argument("--bodies", type=int, default=BODIES, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="longhaul-malformed-") as folder:
        report = measure(Path(folder), args.bodies, args.seed)
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 1 if report["complaints"] else 0


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", title="malformed bodies")
    for name, value in report.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
