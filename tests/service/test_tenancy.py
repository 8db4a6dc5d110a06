"""No tenant sees, continues, counts or times another's turns.

What tenants do is drawn from so few words that they say the same all the time. Whatever a tenant observes
among others is what it observes when it does the same alone: answers, prompts, counts of tokens, sessions.
What tenants come by of each other (signatures, ids of calls and responses) is worth as much as made-up ones.
"""

import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from conftest import GatewayFactory
from fake_engine import Event, FakeEngine, event, reply_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_store.ledger import new_key
from service.signature import Signer
from service.tenants import Tenant, Tenants

NAMES = ("one", "two", "three")
WORDS = st.sampled_from(("go", "stop"))
SESSIONS = st.sampled_from((None, "s", "t"))
TOOL: Any = {"name": "run", "input_schema": {"type": "object"}}
MADE_UP = {
    "signature": Signer(bytes(32), "nobody").sign("0" * 32),
    "response": "resp_" + "0" * 32,
    "call": "call_" + "0" * 30,
}


@dataclass(frozen=True)
class Act:
    """What one tenant does. history: which of its conversations it goes on with; foreign: what is not its own
    it sends along."""

    tenant: str
    kind: str
    history: int
    word: str
    session: str | None
    foreign: bool


ACTS = st.builds(
    Act,
    tenant=st.sampled_from(NAMES),
    kind=st.sampled_from(("messages", "messages", "count", "responses", "show", "erase", "response")),
    history=st.integers(0, 2),
    word=WORDS,
    session=SESSIONS,
    foreign=st.booleans(),
)


@dataclass
class Client:
    """One tenant's side: its key, its conversations, what it has seen, and what others could get of it."""

    key: str
    tenant: Tenant
    histories: list[list[dict[str, Any]]] = field(default_factory=lambda: [[], [], []])
    seen: list[object] = field(default_factory=list[object])
    turns: list[str] = field(default_factory=list[str])
    possessions: dict[str, str] = field(default_factory=lambda: dict(MADE_UP))

    def number(self, turn: str | None) -> object:
        """A turn's number among those that this tenant has seen; keys themselves differ from run to run."""
        if turn is None:
            return None
        if turn not in self.turns:
            self.turns.append(turn)
        return self.turns.index(turn)


def thinking_aloud(engine: FakeEngine) -> Any:
    """Every answer shows the same; what is thought names the tenant."""

    async def script(request: Mapping[str, Any]) -> AsyncIterator[Event]:
        call = {"id": "x", "type": "function", "function": {"name": "run", "arguments": "{}"}}
        # Letter by letter, so that every tenant's thoughts have as many tokens.
        thoughts = [id for letter in request["cache_salt"] for id in engine.tokenizer.encode_text(letter)]
        ids = thoughts + reply_ids(engine.tokenizer, {"content": "ok", "tool_calls": [call]})
        yield event(ids, {"type": "stop", "matched": ids[-1]})

    return script


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(acts=st.lists(ACTS, min_size=4, max_size=14))
async def test_among_others_is_as_alone(gateway_factory: GatewayFactory, acts: list[Act]):
    keys: dict[bytes, Tenant] = {}

    def client() -> Client:
        new = Client(new_key(), Tenant(f"t-{new_key()[:12]}"))
        keys[hashlib.sha256(new.key.encode()).digest()] = new.tenant
        return new

    crowd, alone = ({name: client() for name in NAMES} for _ in range(2))
    async with gateway_factory(tenants=Tenants(keys)) as gateway:
        gateway.engine.script = thinking_aloud(gateway.engine)
        for act in acts:
            others = [crowd[name] for name in NAMES if name != act.tenant]
            await play(gateway, crowd[act.tenant], act, others[-1].possessions if act.foreign else None)
        for name in NAMES:
            for act in acts:
                if act.tenant == name:
                    await play(gateway, alone[name], act, MADE_UP if act.foreign else None)
    for name in NAMES:
        assert crowd[name].seen == alone[name].seen


async def play(gateway: Any, client: Client, act: Act, foreign: Mapping[str, str] | None) -> None:
    headers = {"x-api-key": client.key} | ({"x-session-id": act.session} if act.session else {})
    history = client.histories[act.history]
    sent = [*history, {"role": "user", "content": act.word}]
    body: dict[str, Any] = {"model": "kimi-k3", "max_tokens": 99, "messages": sent, "tools": [TOOL]}
    if foreign and history:
        body["messages"] = with_foreign(sent, foreign)
    gateway.engine.requests.clear()
    match act.kind:
        case "messages":
            answer = await gateway.http.post("/v1/messages", json=body, headers=headers)
            note(client, answer, gateway.engine)
            thinking, text, call = answer.json()["content"]
            assert thinking["thinking"] == client.tenant.cache_salt
            client.possessions |= {"signature": thinking["signature"], "call": call["id"]}
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "r"}
            # This client keeps no thinking: what comes back in prompts can only be restored.
            shown = {"role": "assistant", "content": [text, call]}
            history += [sent[-1], shown, {"role": "user", "content": [result]}]
        case "count":
            answer = await gateway.http.post("/v1/messages/count_tokens", json=body, headers=headers)
            client.seen.append(answer.json())
        case "responses":
            previous = foreign["response"] if foreign else None
            asked = {"input": act.word, "store": True, "previous_response_id": previous}
            answer = await gateway.http.post("/v1/responses", json=asked, headers=headers)
            assert answer.status_code == (400 if foreign else 200)
            if not foreign:
                note(client, answer, gateway.engine)
                client.possessions["response"] = answer.json()["id"]
        case "response":
            id = foreign["response"] if foreign else client.possessions["response"]
            answer = await gateway.http.get(f"/v1/responses/{id}", headers=headers)
            client.seen.append(answer.status_code)
            assert not foreign or answer.status_code == 404
        case "show":
            answer = await gateway.http.get(f"/v1/sessions/{act.session}", headers=headers)
            turns = answer.json().get("turns", [])
            client.seen.append(
                [
                    (client.number(turn["id"]), client.number(turn["parent"]), turn["prompt_tokens"])
                    for turn in turns
                ]
            )
        case _:
            answer = await gateway.http.delete(f"/v1/sessions/{act.session}", headers=headers)
            client.seen.append((answer.status_code, answer.json().get("turns")))


def with_foreign(sent: list[dict[str, Any]], foreign: Mapping[str, str]) -> list[dict[str, Any]]:
    """The conversation with another's signature on its answers, and another's id on the last call."""
    messages: list[dict[str, Any]] = []
    for message in sent:
        if message["role"] == "assistant":
            thinking = {"type": "thinking", "thinking": "", "signature": foreign["signature"]}
            message = {**message, "content": [thinking, *message["content"]]}
        messages.append(message)
    *_, answer, result, _ = messages
    text_and_thinking, call = answer["content"][:-1], answer["content"][-1]
    messages[-3] = {**answer, "content": [*text_and_thinking, {**call, "id": foreign["call"]}]}
    messages[-2] = {**result, "content": [{**result["content"][0], "tool_use_id": foreign["call"]}]}
    return messages


def note(client: Client, answer: Any, engine: FakeEngine) -> None:
    """What the tenant could tell of this turn, and what the engine was given for it."""
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    assert request["cache_salt"] == client.tenant.cache_salt
    prompt = engine.tokenizer.decode(request["input_ids"])
    headers = answer.headers
    client.seen.append(
        {
            "turn": client.number(headers["x-longhaul-turn"]),
            "parent": client.number(headers.get("x-longhaul-parent")),
            "continued": headers["x-longhaul-continued-tokens"],
            "restored": headers["x-longhaul-restored"],
            "diverges": "x-longhaul-divergence" in headers,
            # A tenant's salt is all that is thought: with its own written as S, prompts are the same.
            "prompt": prompt.replace(client.tenant.cache_salt, "S"),
        }
    )
