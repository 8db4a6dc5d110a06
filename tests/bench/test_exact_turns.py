from collections.abc import Iterator
from typing import Any

import pytest

from bench.exact_turns import stub_stack, tenant_of
from bench.recorded_clients import Habits, Session, learned, load
from bench.session_player import Player

NAMES = ("rewriter /v1/chat", "rewriter /v1/responses", "rewriter /v1/messages", "codex")


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Player]:
    with stub_stack(tmp_path_factory.mktemp("turns"), len(NAMES) + 1) as player:
        yield player


def session(name: str) -> Session:
    return next(session for session in load() if name in session.client)


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_client_gets_its_tokens_back(player: Player, name: str):
    report = player.play(session(name), 3, tenant_of(NAMES.index(name)))
    assert report.holds
    assert (report.turns, report.compared, report.attacks) == (3, 2, 3)
    if name.startswith("rewriter"):
        assert report.reasoning_restored == 2
        assert report.ids_restored == 3


def test_a_client_that_changes_what_it_shows_is_caught(player: Player, monkeypatch: pytest.MonkeyPatch):
    altered = Habits.altered

    def loses_a_call(self: Habits, answer: Any) -> list[dict[str, Any]]:
        (message,) = altered(self, answer)
        message["tool_calls"][0]["function"]["arguments"] = "{}"
        return [message]

    monkeypatch.setattr(Habits, "altered", loses_a_call)
    report = player.play(session("vercel_ai_sdk compat"), 2, tenant_of(len(NAMES)))
    assert not report.holds
    assert report.exact == 0


def test_habits_are_those_of_the_recordings():
    dropping = {
        session.client for session in load() if (habits := learned(session)) and habits.drops_reasoning
    }
    assert {"vercel_ai_sdk oaichat", "python_frameworks c_agents.py chat"} <= dropping
    assert not {"codex", "claude_code", "kimi_code", "vercel_ai_sdk oairesp"} & dropping
    openhands = learned(session("openhands"))
    assert openhands is not None
    answer = {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": []}
    assert openhands.altered(answer)[0]["content"] == [{"type": "text", "text": "x"}]
