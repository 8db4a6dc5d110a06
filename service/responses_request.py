"""OpenAI Responses: requests in.

Source: https://platform.openai.com/docs/api-reference/responses. What a field may hold, and what is ignored,
is in the README of this package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from service.chat_request import EFFORTS, named_tool
from service.fields import Fields
from service.responses_items import Item, read_input, tool_name
from service.sampling import Sampling, read_sampling

MAX_METADATA: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512

_SEALED: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"
_LEFT_OUT: Final = ("web_search", "web_search_preview")
"""Tools that agents offer unasked, and that a model does well without: not declared to it."""
_SUMMARIES: Final = ("auto", "concise", "detailed")
_UNSUPPORTED: Final = {
    "conversation": "is not supported: use previous_response_id.",
    "prompt": "is not supported: send instructions and input.",
    "context_management": "is not supported: leave it out.",
}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    declared: in the shape of Chat Completions. names: for each declared name, the (name, namespace) that the
    client knows it by. left_out: paths of tools that nobody declares to the model.
    """

    declared: tuple[Mapping[str, Any], ...] = ()
    names: Mapping[str, tuple[str, str | None]] | None = None
    left_out: tuple[str, ...] = ()

    def name(self, declared: str) -> tuple[str, str | None]:
        """What the client knows a tool by that the model has called."""
        return (self.names or {}).get(declared, (declared, None))


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request to `/v1/responses`. `model` None: whatever the engine serves.

    items: of `input`, references not yet looked up. sealed: reasoning items carry `encrypted_content`.
    summary: reasoning is shown as a summary instead of as content. shown: fields that the answer repeats.
    """

    model: str | None
    instructions: str | None
    items: list[Item]
    previous: str | None
    tools: Tools
    tool_choice: str | Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    thinking: bool
    effort: str | None
    sampling: Sampling
    stream: bool
    store: bool
    single_call: bool
    sealed: bool
    summary: bool
    shown: Mapping[str, Any]


def read_responses_request(
    fields: Fields, defaults: Mapping[str, float], vocabulary: int
) -> ResponsesRequest:
    """Read the body of a request; `defaults` are for sampling. Raises InvalidRequest."""
    for name, remedy in _UNSUPPORTED.items():
        if fields.values.get(name):
            raise fields.error(name, remedy)
    if fields.boolean("background"):
        raise fields.error("background", "only false is supported: stream the answer instead.")
    for name in ("session_id", "prompt_cache_key"):  # read by service.identity, which takes what it finds
        fields.string(name)
    include = fields.strings("include")
    previous = fields.string("previous_response_id")
    instructions = fields.string("instructions")
    items = read_input(fields)
    if not items and not previous and not instructions:
        raise fields.error("input", "is required: give a text or at least one item.")
    tools = _tools(fields)
    choice = _tool_choice(fields, tools)
    thinking, effort, summary = _reasoning(fields)
    response_format = _format(fields)
    sampling = read_sampling(
        fields,
        defaults,
        vocabulary,
        limits=("max_output_tokens",),
        logprobs=_LOGPROBS in include or fields.values.get("top_logprobs") is not None,
    )
    store = fields.boolean("store") is not False
    single_call = fields.boolean("parallel_tool_calls") is False
    return ResponsesRequest(
        model=fields.string("model"),
        instructions=instructions,
        items=items,
        previous=previous,
        tools=tools,
        tool_choice=choice,
        response_format=response_format,
        thinking=thinking,
        effort=effort,
        sampling=sampling,
        stream=fields.boolean("stream") or False,
        store=store,
        single_call=single_call,
        sealed=_SEALED in include,
        summary=summary,
        shown={
            "background": False,
            "instructions": instructions,
            "max_output_tokens": sampling.max_tokens,
            "max_tool_calls": fields.integer("max_tool_calls", 1, 2**31),
            "metadata": _metadata(fields),
            "parallel_tool_calls": not single_call,
            "previous_response_id": previous,
            "prompt_cache_key": fields.string("prompt_cache_key"),
            "reasoning": {
                "effort": _given_effort(fields),
                "summary": _given_summary(fields) if summary else None,
            },
            "safety_identifier": fields.string("safety_identifier"),
            "service_tier": "default",
            "store": store,
            "temperature": sampling.parameters.get("temperature"),
            "text": _shown_text(fields),
            "tool_choice": fields.values.get("tool_choice") or "auto",
            "tools": _shown_tools(fields),
            "top_logprobs": sampling.top_logprobs,
            "top_p": sampling.parameters.get("top_p"),
            # Nothing is ever cut out of a conversation; `auto` is taken, and this says what was done.
            "truncation": _truncation(fields),
            "user": fields.string("user"),
        },
    )


def _tools(fields: Fields) -> Tools:
    declared: list[Mapping[str, Any]] = []
    names: dict[str, tuple[str, str | None]] = {}
    left_out: list[str] = []
    for tool, namespace in _each_tool(fields):
        kind = tool.required_string("type")
        if kind.startswith(_LEFT_OUT):
            left_out.append(tool.path("type"))
            continue
        if kind != "function":
            raise tool.error(
                "type", f"{kind[:40]!r} is not among the tools of this service: declare functions."
            )
        function = _function(tool, namespace)
        names[function["name"]] = (tool.values["name"], namespace)
        declared.append({"type": "function", "function": function})
    return Tools(tuple(declared), names, tuple(left_out))


def _each_tool(fields: Fields) -> list[tuple[Fields, str | None]]:
    """The tools with their namespaces, which Codex groups tools by."""
    tools: list[tuple[Fields, str | None]] = []
    for tool in fields.entries("tools"):
        if tool.values.get("type") == "namespace":
            namespace = tool.required_string("name")
            tools += [(inner, namespace) for inner in tool.entries("tools")]
        else:
            tools.append((tool, None))
    return tools


def _function(tool: Fields, namespace: str | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool_name(tool.required_string("name"), namespace)}
    if (description := tool.string("description")) is not None:
        function["description"] = description
    if (parameters := tool.nested("parameters")) is not None:
        function["parameters"] = parameters.values
    if (strict := tool.boolean("strict")) is not None:
        function["strict"] = strict
    return function


def _shown_tools(fields: Fields) -> list[Mapping[str, Any]]:
    """The tools as the client wrote them; a function's optional fields are there, as clients expect."""
    return [
        {"parameters": None, "strict": None, **tool.values}
        if tool.values.get("type") == "function"
        else tool.values
        for tool in fields.entries("tools")
    ]


def _tool_choice(fields: Fields, tools: Tools) -> str | Mapping[str, Any] | None:
    choice = fields.values.get("tool_choice")
    if choice is None or choice == "auto":
        return None
    if isinstance(choice, str):
        if choice not in ("none", "required"):
            raise fields.error(
                "tool_choice", "must be auto, none, required, or an object that names a function."
            )
        if choice == "required" and not tools.declared:
            raise fields.error("tool_choice", "needs tools: give at least one function.")
        return choice if tools.declared else None
    named = fields.nested("tool_choice")
    assert named is not None
    if named.string("type") != "function":
        raise named.error("type", 'must be "function": tool_choice names one function, or is a word.')
    name = tool_name(named.required_string("name"), named.string("namespace"))
    return named_tool(named, name, tools.declared)


def _format(fields: Fields) -> Mapping[str, Any] | None:
    text = fields.nested("text")
    chosen = text.nested("format") if text is not None else None
    if text is not None:
        text.string("verbosity", choices=("low", "medium", "high"))
    if chosen is None:
        return None
    match chosen.string("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            schema = chosen.nested("schema")
            if schema is None:
                raise chosen.error("schema", "is required: give a JSON schema.")
            described: dict[str, Any] = {"schema": schema.values}
            for name in ("name", "description"):
                if (given := chosen.string(name)) is not None:
                    described[name] = given
            if (strict := chosen.boolean("strict")) is not None:
                described["strict"] = strict
            return {"type": "json_schema", "json_schema": described}
        case _:
            raise chosen.error("type", "must be one of text, json_object, json_schema.")


def _shown_text(fields: Fields) -> Mapping[str, Any]:
    text = fields.nested("text")
    return {"format": {"type": "text"}, **(text.values if text is not None else {})}


def _reasoning(fields: Fields) -> tuple[bool, str | None, bool]:
    """Whether to think, how hard, and whether the reasoning is shown as a summary."""
    given = _given_effort(fields)
    thinking = given != "none"
    return thinking, EFFORTS[given] if thinking and given is not None else None, bool(_given_summary(fields))


def _given_effort(fields: Fields) -> str | None:
    reasoning = fields.nested("reasoning")
    return None if reasoning is None else reasoning.string("effort", choices=("none", *EFFORTS))


def _given_summary(fields: Fields) -> str | None:
    reasoning = fields.nested("reasoning")
    if reasoning is None:
        return None
    summary = reasoning.string("summary", choices=("none", *_SUMMARIES))
    older = reasoning.string("generate_summary", choices=_SUMMARIES)
    return None if summary == "none" else summary or older


def _metadata(fields: Fields) -> Mapping[str, str]:
    metadata = fields.nested("metadata")
    if metadata is None:
        return {}
    if len(metadata.values) > MAX_METADATA:
        raise fields.error("metadata", f"may have at most {MAX_METADATA} keys.")
    for key in metadata.values:
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise fields.error("metadata", f"keys may have at most {MAX_METADATA_KEY_CHARS} characters.")
        value = metadata.string(key)
        if value is None or len(value) > MAX_METADATA_VALUE_CHARS:
            raise metadata.error(key, f"must be a string of at most {MAX_METADATA_VALUE_CHARS} characters.")
    return metadata.values


def _truncation(fields: Fields) -> str:
    fields.string("truncation", choices=("auto", "disabled"))
    return "disabled"
