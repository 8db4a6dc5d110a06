"""`/openapi.json`: what this service reads and answers (OpenAPI 3.1, JSON Schema 2020-12).

The shapes are those of the APIs' own documentation; here stand the fields that mean something to it,
with the values that it takes. Fields that are not listed are ignored, and null counts as absent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from service.chat_request import EFFORTS
from service.fields import MAX_DEPTH
from service.sampling import MAX_STOPS, MAX_TOP_LOGPROBS
from service.web import JsonResponse

Schema = dict[str, Any]

_INT64: Final = 2**63 - 1
_ANY: Final[Schema] = {"type": "object"}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(properties: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    """An object whose optional fields may be null."""
    return {
        "type": "object",
        "properties": {
            name: schema if name in required else _nullable(schema) for name, schema in properties.items()
        },
        "required": list(required),
    }


def _array(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def _words(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _integer(low: int, high: int = _INT64) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


_STRING: Final[Schema] = {"type": "string"}
_NAME: Final[Schema] = {"type": "string", "minLength": 1}
_FLAG: Final[Schema] = {"type": "boolean"}
_SESSION: Final = {"session_id": _STRING, "prompt_cache_key": _STRING}
_SAMPLING: Final[Mapping[str, Schema]] = {
    "temperature": _number(0, 2),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _integer(-1),
    "min_p": _number(0, 1),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "seed": _integer(-_INT64),
    "min_tokens": _integer(0),
    "ignore_eos": _FLAG,
    "stop": {"anyOf": [_NAME, {**_array(_NAME), "maxItems": MAX_STOPS}]},
    "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
    "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100)},
}
_EFFORT: Final = _words("none", *EFFORTS)
_FUNCTION: Final = {"name": _NAME, "description": _STRING, "parameters": _ANY, "strict": _FLAG}
_IMAGE_URL: Final[Schema] = {"type": "string", "pattern": "^data:image/(png|jpeg|gif|webp);base64,"}


def _content(image: Schema) -> Schema:
    """A text, or parts, some of which may be images."""
    text = _object({"type": _words("text", "input_text", "output_text"), "text": _STRING}, ("type", "text"))
    return {"anyOf": [_STRING, _array({"anyOf": [text, image]})]}


_CHAT_CONTENT: Final = _content(
    _object(
        {"type": _words("image_url"), "image_url": _object({"url": _IMAGE_URL}, ("url",))},
        ("type", "image_url"),
    )
)
_ITEM_CONTENT: Final = _content(
    _object({"type": _words("input_image"), "image_url": _IMAGE_URL}, ("type", "image_url"))
)

_CHAT: Final = _object(
    {
        "model": _STRING,
        "messages": _array(
            _object(
                {
                    "role": _words("system", "developer", "user", "assistant", "tool"),
                    "content": _CHAT_CONTENT,
                    "name": _STRING,
                    "reasoning_content": _STRING,
                    "tool_calls": _array(
                        _object(
                            {
                                "id": _STRING,
                                "type": _words("function"),
                                "function": _object({"name": _NAME, "arguments": _STRING}, ("name",)),
                            },
                            ("function",),
                        )
                    ),
                    "tool_call_id": _STRING,
                    "partial": _FLAG,
                },
                ("role",),
            ),
            least=1,
        ),
        "tools": _array(
            _object(
                {"type": _words("function"), "function": _object(_FUNCTION, ("name",))}, ("type", "function")
            )
        ),
        "tool_choice": {
            "anyOf": [
                _words("auto", "none", "required"),
                _object(
                    {"type": _words("function"), "function": _object({"name": _NAME}, ("name",))},
                    ("type", "function"),
                ),
            ]
        },
        "parallel_tool_calls": _FLAG,
        "response_format": {
            "anyOf": [
                _object({"type": _words("text", "json_object")}, ("type",)),
                _object(
                    {"type": _words("json_schema"), "json_schema": _object({"schema": _ANY}, ("schema",))},
                    ("type", "json_schema"),
                ),
            ]
        },
        "reasoning_effort": _EFFORT,
        "thinking": _object({"type": _words("enabled", "disabled")}),
        "chat_template_kwargs": _object({"thinking": _FLAG}),
        "max_tokens": _integer(1),
        "max_completion_tokens": _integer(1),
        **_SAMPLING,
        "n": _integer(1, 1),
        "logprobs": _FLAG,
        "stream": _FLAG,
        "stream_options": _object({"include_usage": _FLAG}),
        **_SESSION,
    },
    ("messages",),
)

_ITEM: Final[Schema] = {
    "anyOf": [
        _object(
            {
                "type": _words("message"),
                "role": _words("system", "developer", "user", "assistant"),
                "content": _ITEM_CONTENT,
            },
            ("role", "content"),
        ),
        _object(
            {
                "type": _words("reasoning"),
                "id": _STRING,
                "summary": _array(_object({"text": _STRING})),
                "content": _array(_object({"text": _STRING})),
                "encrypted_content": _STRING,
            },
            ("type",),
        ),
        _object(
            {
                "type": _words("function_call"),
                "call_id": _NAME,
                "name": _NAME,
                "namespace": _STRING,
                "arguments": _STRING,
            },
            ("type", "call_id", "name"),
        ),
        _object(
            {"type": _words("function_call_output"), "call_id": _NAME, "output": _ITEM_CONTENT},
            ("type", "call_id", "output"),
        ),
        _object({"type": _words("item_reference"), "id": _NAME}, ("id",)),
    ]
}
_RESPONSES: Final = _object(
    {
        "model": _STRING,
        "input": {"anyOf": [_NAME, _array(_ITEM)]},
        "instructions": _STRING,
        "previous_response_id": _STRING,
        "store": _FLAG,
        "background": {"const": False},
        "tools": _array(_object({"type": _STRING, **_FUNCTION}, ("type",))),
        "tool_choice": {
            "anyOf": [
                _words("auto", "none", "required"),
                _object({"type": _words("function"), "name": _NAME}, ("type", "name")),
            ]
        },
        "parallel_tool_calls": _FLAG,
        "text": _object(
            {
                "format": _object(
                    {
                        "type": _words("text", "json_object", "json_schema"),
                        "name": _STRING,
                        "schema": _ANY,
                        "strict": _FLAG,
                    },
                    ("type",),
                ),
                "verbosity": _words("low", "medium", "high"),
            }
        ),
        "reasoning": _object(
            {"effort": _EFFORT, "summary": _words("none", "auto", "concise", "detailed")},
        ),
        "max_output_tokens": _integer(1),
        **_SAMPLING,
        "include": _array(_STRING),
        "truncation": _words("auto", "disabled"),
        "metadata": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 512}},
        "stream": _FLAG,
        **_SESSION,
    }
)

_BLOCKS: Final = _array(
    _object({"type": _STRING, "cache_control": _object({"type": _words("ephemeral")})}, ("type",))
)
_MESSAGES: Final = _object(
    {
        "model": _STRING,
        "max_tokens": _integer(1),
        "messages": _array(
            _object(
                {"role": _words("user", "assistant", "system"), "content": {"anyOf": [_STRING, _BLOCKS]}},
                ("role", "content"),
            ),
            least=1,
        ),
        "system": {"anyOf": [_STRING, _BLOCKS]},
        "tools": _array(
            _object(
                {"name": _NAME, "description": _STRING, "input_schema": _ANY, "strict": _FLAG},
                ("name", "input_schema"),
            )
        ),
        "tool_choice": _object(
            {
                "type": _words("auto", "any", "tool", "none"),
                "name": _STRING,
                "disable_parallel_tool_use": _FLAG,
            },
            ("type",),
        ),
        "thinking": _object(
            {"type": _words("enabled", "disabled", "adaptive"), "budget_tokens": _integer(1)}, ("type",)
        ),
        "output_config": _object({"effort": _STRING, "format": _ANY}),
        "stop_sequences": _array(_NAME),
        "temperature": _number(0, 2),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _integer(-1),
        "stream": _FLAG,
        "metadata": _object({"user_id": _STRING}),
    },
    ("messages",),
)


def _operation(
    summary: str, *, body: Schema | None = None, query: Mapping[str, Schema] | None = None
) -> Schema:
    operation: Schema = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer, whole or as server-sent events."},
            "4XX": {"description": "A complaint that names the field."},
            "5XX": {"description": "The engine or the ledger fails; Retry-After says when to ask again."},
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if query:
        operation["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in query.items()
        ]
    return operation


def _with_id(path_item: Schema) -> Schema:
    parameter = {"name": "id", "in": "path", "required": True, "schema": _NAME}
    return {"parameters": [parameter], **path_item}


_PAGE: Final = {"limit": _integer(1, 100), "order": _words("asc", "desc"), "after": _STRING}
DOCUMENT: Final[Schema] = {
    "openapi": "3.1.0",
    "info": {
        "title": "Longhaul",
        "version": "1",
        "description": "Kimi K3 over the OpenAI and Anthropic APIs, every turn continued from its exact "
        f"tokens. Bodies are nested at most {MAX_DEPTH} levels deep.",
    },
    "paths": {
        "/v1/chat/completions": {"post": _operation("OpenAI Chat Completions.", body=_CHAT)},
        "/v1/responses": {"post": _operation("OpenAI Responses.", body=_RESPONSES)},
        "/v1/responses/{id}": _with_id(
            {"get": _operation("A stored response."), "delete": _operation("Erase a stored response.")}
        ),
        "/v1/responses/{id}/cancel": _with_id({"post": _operation("Abort a response under way.")}),
        "/v1/responses/{id}/input_items": _with_id(
            {"get": _operation("The items of a response's own input.", query=_PAGE)}
        ),
        "/v1/messages": {"post": _operation("Anthropic Messages.", body=_MESSAGES)},
        "/v1/messages/count_tokens": {"post": _operation("The tokens of a prompt.", body=_MESSAGES)},
        "/v1/sessions/{id}": _with_id(
            {"get": _operation("A session's turns."), "delete": _operation("Erase a session.")}
        ),
        "/v1/models": {"get": _operation("The model that is served.")},
        "/v1/models/{id}": _with_id({"get": _operation("One model.")}),
        "/health": {"get": _operation("Whether the gateway lives.")},
        "/ready": {"get": _operation("Whether a turn can be served.")},
        "/metrics": {"get": _operation("Prometheus series of the gateway and the engine.")},
        "/openapi.json": {"get": _operation("This document.")},
    },
    "components": {
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    },
    "security": [{}, {"bearer": []}, {"key": []}],
}


async def openapi(_: Request) -> Response:
    """Answer `GET /openapi.json`."""
    return JsonResponse(DOCUMENT)
