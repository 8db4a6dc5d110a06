import json
from typing import Any

import pytest

from service.identity import MAX_SESSION_CHARS, Session, identify

UUID = "0ac8d84c-6496-4fc6-8262-21533e882c22"


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        pytest.param(
            {"x-claude-code-session-id": UUID},
            {},
            Session(UUID, "x-claude-code-session-id"),
            id="Claude Code",
        ),
        pytest.param(
            {},
            {"metadata": {"user_id": json.dumps({"device_id": "0", "session_id": UUID})}},
            Session(UUID, "metadata.user_id"),
            id="Claude Code, metadata",
        ),
        pytest.param(
            {},
            {"metadata": {"user_id": f"user_00_account__session_{UUID}"}},
            Session(UUID, "metadata.user_id"),
            id="Claude Code, older metadata",
        ),
        pytest.param(
            {"session-id": UUID, "thread-id": "t"},
            {"prompt_cache_key": UUID},
            Session(UUID, "prompt_cache_key"),
            id="Codex",
        ),
        pytest.param(
            {"session-id": UUID, "thread-id": "t"}, {}, Session(UUID, "session-id"), id="Codex, headers"
        ),
        pytest.param(
            {},
            {"client_metadata": {"thread_id": UUID}},
            Session(UUID, "client_metadata.thread_id"),
            id="Codex, metadata",
        ),
        pytest.param(
            {"x-session-affinity": "ses_dd", "x-session-id": "ses_dd"},
            {},
            Session("ses_dd", "x-session-id"),
            id="opencode",
        ),
        pytest.param(
            {}, {"prompt_cache_key": "session_1"}, Session("session_1", "prompt_cache_key"), id="Kimi Code"
        ),
        pytest.param(
            {"x-litellm-session-id": UUID},
            {"prompt_cache_key": UUID},
            Session(UUID, "prompt_cache_key"),
            id="OpenHands",
        ),
        pytest.param(
            {}, {"session_id": "S", "prompt_cache_key": "s1"}, Session("S", "session_id"), id="LiteLLM"
        ),
        pytest.param({}, {"litellm_session_id": "S"}, Session("S", "litellm_session_id"), id="LiteLLM, own"),
        pytest.param(
            {}, {"metadata": {"session_id": "S"}}, Session("S", "metadata.session_id"), id="LiteLLM's proxy"
        ),
        pytest.param({"session_id": UUID}, {}, Session(UUID, "session_id"), id="Codex, older"),
        pytest.param({"x-kilocode-taskid": "t"}, {}, Session("t", "x-kilocode-taskid"), id="Kilo Code"),
        pytest.param({"x-client-session-id": "c"}, {}, Session("c", "x-client-session-id"), id="Copilot CLI"),
        pytest.param({"x-correlation-id": "c-1"}, {}, Session("c-1", "x-correlation-id"), id="agentx"),
        pytest.param({"user-agent": "OpenAI/Python"}, {"user": "u"}, None, id="unknown"),
    ],
)
def test_each_client_names_its_session(
    headers: dict[str, str], body: dict[str, Any], session: Session | None
) -> None:
    assert identify(headers, body) == session


@pytest.mark.parametrize(
    "body",
    [
        {"session_id": ""},
        {"session_id": "  "},
        {"session_id": 7},
        {"session_id": None},
        {"session_id": ["a"]},
        {"session_id": "x" * (MAX_SESSION_CHARS + 1)},
        {"metadata": None},
        {"metadata": []},
        {"metadata": {"user_id": "[1]"}},
        {"metadata": {"user_id": '{"session_id": 3}'}},
        {"metadata": {"user_id": "someone"}},
    ],
)
def test_what_is_no_name_names_nothing(body: dict[str, Any]) -> None:
    assert identify({}, body) is None


def test_the_next_source_counts_where_one_is_unusable() -> None:
    assert identify({"x-session-id": "s"}, {"session_id": 7}) == Session("s", "x-session-id")
