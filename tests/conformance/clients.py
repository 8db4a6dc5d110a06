"""Real clients, each in a tool loop of three turns. Runs in an environment of its own (requirements.txt).

    python clients.py CLIENT URL SESSION

Every turn must call a tool, since the tiny model would not do so by itself. The client keeps the history in
its own types and sends it back as it sees fit: that is what is tested.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

MODEL = "kimi-k3"
TURNS = 3
MAX_TOKENS = 200
SYSTEM = "You run a house. You do what you are told with the tools that you have, and nothing else. " * 6
ASKED = "Turn on the lamp in the hall."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "room": {"type": "string", "enum": ["hall", "attic"]},
        "level": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["room", "level"],
    "additionalProperties": False,
}
DESCRIPTION = "Set the lamp of a room."


def done(turn: int) -> str:
    return f"Done, for time {turn}. Now the next room."


def anthropic(url: str, session: str) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="k", default_headers={"x-session-id": session}, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for turn in range(TURNS):
        with client.messages.stream(
            model=MODEL,
            max_tokens=MAX_TOKENS,
            system=[{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
            messages=messages,
            tools=[{"name": "set_lamp", "description": DESCRIPTION, "input_schema": PARAMETERS}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        ) as stream:
            message = stream.get_final_message()
        calls = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": done(turn)} for call in calls]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


def openai_chat(url: str, session: str) -> None:
    from openai import OpenAI

    client = OpenAI(
        base_url=f"{url}/v1", api_key="k", default_headers={"x-session-id": session}, max_retries=0
    )
    function = {"name": "set_lamp", "description": DESCRIPTION, "parameters": PARAMETERS}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
    for turn in range(TURNS):
        answer = client.chat.completions.create(
            model=MODEL,
            max_completion_tokens=MAX_TOKENS,
            messages=messages,
            tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
            tool_choice="required",
            parallel_tool_calls=False,
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": done(turn)})


def openai_responses(url: str, session: str) -> None:
    from openai import OpenAI

    client = OpenAI(
        base_url=f"{url}/v1", api_key="k", default_headers={"x-session-id": session}, max_retries=0
    )
    previous, items = None, [{"role": "user", "content": ASKED}]
    for turn in range(TURNS):
        answer = client.responses.create(
            model=MODEL,
            max_output_tokens=MAX_TOKENS,
            instructions=SYSTEM,
            input=items,  # type: ignore[arg-type]
            previous_response_id=previous,
            tools=[
                {
                    "type": "function",
                    "name": "set_lamp",
                    "description": DESCRIPTION,
                    "parameters": PARAMETERS,
                    "strict": True,
                }
            ],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        previous = answer.id
        items = [
            {"type": "function_call_output", "call_id": item.call_id, "output": done(turn)}
            for item in answer.output
            if item.type == "function_call"
        ]


def openai_agents(url: str, session: str, *, responses: bool = False) -> None:
    from agents import (
        Agent,
        MaxTurnsExceeded,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(
        base_url=f"{url}/v1", api_key="k", default_headers={"x-session-id": session}, max_retries=0
    )
    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel

    @function_tool
    def set_lamp(room: Literal["hall", "attic"], level: Literal["low", "high"]) -> str:
        """Set the lamp of a room."""
        return "Done. Now the next room."

    agent = Agent(
        name="house",
        instructions=SYSTEM,
        model=kind(model=MODEL, openai_client=client),
        tools=[set_lamp],
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=MAX_TOKENS
        ),
        reset_tool_choice=False,
    )
    with suppress(MaxTurnsExceeded):
        asyncio.run(Runner.run(agent, ASKED, max_turns=TURNS))


def openai_agents_responses(url: str, session: str) -> None:
    openai_agents(url, session, responses=True)


def _langchain(model: Any, **binding: Any) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    tool = {"name": "set_lamp", "description": DESCRIPTION, "parameters": PARAMETERS}
    bound = model.bind_tools([tool], parallel_tool_calls=False, **binding)
    messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(ASKED)]
    for turn in range(TURNS):
        message = bound.invoke(messages)
        messages.append(message)
        messages += [ToolMessage(done(turn), tool_call_id=call["id"]) for call in message.tool_calls]


def langchain_openai(url: str, session: str, *, responses: bool = False) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="k",  # type: ignore[arg-type]
        default_headers={"x-session-id": session},
        max_tokens=MAX_TOKENS,  # type: ignore[call-arg]
        max_retries=0,
        use_responses_api=responses,
    )
    _langchain(model, tool_choice="required")


def langchain_openai_responses(url: str, session: str) -> None:
    langchain_openai(url, session, responses=True)


def langchain_anthropic(url: str, session: str) -> None:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(
        model=MODEL,  # type: ignore[call-arg]
        base_url=url,
        api_key="k",  # type: ignore[arg-type]
        default_headers={"x-session-id": session},
        max_tokens=MAX_TOKENS,  # type: ignore[call-arg]
        max_retries=0,
    )
    _langchain(model, tool_choice="any")


def _pydantic_ai(model: Any, session: str) -> None:
    from pydantic_ai.direct import model_request
    from pydantic_ai.messages import (
        ModelRequest,
        SystemPromptPart,
        ToolCallPart,
        ToolReturnPart,
        UserPromptPart,
    )
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.settings import ModelSettings
    from pydantic_ai.tools import ToolDefinition

    tool = ToolDefinition(name="set_lamp", description=DESCRIPTION, parameters_json_schema=PARAMETERS)
    parameters = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
    settings = ModelSettings(
        max_tokens=MAX_TOKENS, parallel_tool_calls=False, extra_headers={"x-session-id": session}
    )

    async def loop() -> None:
        history: list[Any] = [ModelRequest([SystemPromptPart(SYSTEM), UserPromptPart(ASKED)])]
        for turn in range(TURNS):
            answer = await model_request(
                model, history, model_settings=settings, model_request_parameters=parameters
            )
            history.append(answer)
            history.append(
                ModelRequest(
                    [
                        ToolReturnPart(part.tool_name, done(turn), part.tool_call_id)
                        for part in answer.parts
                        if isinstance(part, ToolCallPart)
                    ]
                )
            )

    asyncio.run(loop())


def pydantic_ai_openai(url: str, session: str) -> None:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    _pydantic_ai(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="k")), session)


def pydantic_ai_responses(url: str, session: str) -> None:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    _pydantic_ai(
        OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="k")), session
    )


def pydantic_ai_anthropic(url: str, session: str) -> None:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    _pydantic_ai(AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key="k")), session)


def _litellm(session: str, **options: Any) -> None:
    import litellm

    litellm.suppress_debug_info = True
    function = {"name": "set_lamp", "description": DESCRIPTION, "parameters": PARAMETERS}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
    for turn in range(TURNS):
        answer: Any = litellm.completion(
            api_key="k",
            messages=messages,
            max_tokens=MAX_TOKENS,
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
            parallel_tool_calls=False,
            extra_headers={"x-session-id": session},
            num_retries=0,
            **options,
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": done(turn)})


def litellm_openai(url: str, session: str) -> None:
    _litellm(session, model=f"openai/{MODEL}", api_base=f"{url}/v1")


def litellm_anthropic(url: str, session: str) -> None:
    _litellm(session, model=f"anthropic/{MODEL}", api_base=url)


CLIENTS: dict[str, tuple[str, Callable[[str, str], None]]] = {
    "anthropic": ("Messages, streamed", anthropic),
    "openai": ("Chat", openai_chat),
    "openai (Responses)": ("Responses, previous_response_id", openai_responses),
    "openai-agents": ("Chat", openai_agents),
    "openai-agents (Responses)": ("Responses", openai_agents_responses),
    "langchain-openai": ("Chat", langchain_openai),
    "langchain-openai (Responses)": ("Responses", langchain_openai_responses),
    "langchain-anthropic": ("Messages", langchain_anthropic),
    "pydantic-ai": ("Chat", pydantic_ai_openai),
    "pydantic-ai (Responses)": ("Responses", pydantic_ai_responses),
    "pydantic-ai (Anthropic)": ("Messages", pydantic_ai_anthropic),
    "litellm": ("Chat", litellm_openai),
    "litellm (Anthropic)": ("Messages", litellm_anthropic),
}


def version(client: str) -> str:
    """The version of the package that a client is of."""
    from importlib.metadata import version as installed

    package = client.split(" ")[0]
    return installed({"pydantic-ai": "pydantic-ai-slim"}.get(package, package))


if __name__ == "__main__":
    _, name, url, session = sys.argv
    CLIENTS[name][1](url, session)
    print(json.dumps({"version": version(name)}))
