"""Structural tags that force Kimi K3 to call a tool, for `sampling_params.structural_tag` of SGLang.

The grammar covers the `tools` channel, from its opening to its close. K3's markers stand in it as tokens: a
tag that spells them, as SGLang's own does, also admits their spelling in ordinary tokens, and that is text to
everybody who decides structure by id. Otherwise all that is admitted here, SGLang's strict tag admits too
(`sglang.srt.function_call.kimik3_structural_tag`).

Arguments follow the tool's JSON schema: in the order of `properties`, those not required optional; arguments
that the schema does not name only where `additionalProperties` says so outright, since a model that is forced
to go on might never come to an end of them.

Source of the format: xgrammar's structural tags (https://xgrammar.mlc.ai, `structural_tag`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

Format = dict[str, Any]
Schema = Mapping[str, Any]

MAX_WHITESPACE_CHARS: Final = 16
"""Longest run of white space in a JSON argument: enough to indent, too little to get lost in."""

_MARKERS: Final = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_ARGUMENT_TYPES: Final = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "object",
    "array": "array",
}
_ANY_TYPE: Final = ("string", "number", "boolean", "null", "object", "array")
_DATA: Final = ("enum", "const", "default", "examples")
_LENGTHS: Final = ("minLength", "maxLength")
_STRING_RULES: Final = ("enum", "const", "pattern", "format", "minLength", "maxLength")


class StructureError(ValueError):
    """Tools that no grammar can be made of; the message names the field and the remedy."""


def forced_call_tag(
    tools: Sequence[Mapping[str, Any]], parallel: bool = False, *, max_string_tokens: int | None = None
) -> str:
    """JSON of the structural tag for exactly one call of one of the tools, or for several (`parallel`).

    Tools are OpenAI's, `{"type": "function", "function": {...}}` or the inner object alone. A string argument
    without rules of its own is at most `max_string_tokens` long: a model that never closes one needs a limit.
    Raises `StructureError`.
    """
    return json.dumps(
        {"type": "structural_tag", "format": tool_calls_format(tools, parallel, max_string_tokens)}
    )


def tool_calls_format(
    tools: Sequence[Mapping[str, Any]], parallel: bool = False, max_string_tokens: int | None = None
) -> Format:
    """The grammar of the `tools` channel, to be put into a larger tag. Raises `StructureError`."""
    if not tools:
        raise StructureError("tools: must hold at least one tool to be called")
    calls = [_call(tool, parallel, max_string_tokens, f"tools[{at}]") for at, tool in enumerate(tools)]
    content = _either(calls)
    if parallel:
        content = {"type": "plus", "content": content}
    return _element("tools", [], [content])


def _call(tool: Mapping[str, Any], parallel: bool, max_string_tokens: int | None, field: str) -> Format:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise StructureError(f"{field}.function.name: must be the name of the tool")
    index: Format = {"type": "regex", "pattern": "[1-9][0-9]?"} if parallel else _text("1")
    field = f"{field}.function.parameters"
    parameters = cast("Mapping[str, Any]", function).get("parameters")
    arguments = list(_arguments(parameters, max_string_tokens, field)) if parameters else []
    return _element("call", [_text(f' tool="{_escaped(name)}" index="'), index, _text('"')], arguments)


def _arguments(parameters: object, max_string_tokens: int | None, field: str) -> Iterator[Format]:
    if not isinstance(parameters, Mapping):
        raise StructureError(f"{field}: must be the JSON schema of an object")
    root = cast("Schema", parameters)
    rules = dict(_variants(root, root)).get("object")
    if rules is None:
        raise StructureError(f"{field}.type: must be object")
    properties: Mapping[str, Any] = rules.get("properties") or {}
    required: Sequence[str] = rules.get("required") or ()
    if missing := [key for key in required if key not in properties]:
        raise StructureError(f"{field}.properties: lacks {', '.join(missing)}, which `required` names")
    for key, schema in properties.items():
        start = _text(f' key="{_escaped(key)}" type="')
        argument = _argument([start], schema, root, max_string_tokens)
        if argument is None and key in required:
            raise StructureError(f"{field}.properties.{key}: accepts no value, but is required")
        if argument is not None:
            yield argument if key in required else {"type": "optional", "content": argument}
    additional = rules.get("additionalProperties", False)
    if additional is not False:
        name: Format = {"type": "regex", "pattern": r'[^"& \t\r\n\f\v=<>]+'}
        start = [_text(' key="'), name, _text('" type="')]
        if (argument := _argument(start, additional, root, max_string_tokens)) is not None:
            yield {"type": "star", "content": argument}


def _argument(
    start: list[Format], schema: object, root: Schema, max_string_tokens: int | None
) -> Format | None:
    """One argument element, or None when the schema accepts nothing."""
    variants = [
        _element(
            "argument",
            [*start, _text(f'{_ARGUMENT_TYPES[kind]}"')],
            [_value(kind, restricted, root, max_string_tokens)],
        )
        for kind, restricted in _variants(schema, root)
    ]
    return _either(variants) if variants else None


def _value(kind: str, schema: Schema, root: Schema, max_string_tokens: int | None) -> Format:
    if kind == "string" and not any(rule in schema for rule in _STRING_RULES):
        free: Format = {"type": "any_tokens", "exclude_tokens": list(_MARKERS)}
        return free if max_string_tokens is None else {**free, "max_tokens": max_string_tokens}
    if kind == "string" and not any(rule in schema for rule in _STRING_RULES if rule not in _LENGTHS):
        return {"type": "regex", "pattern": _bounded_text(schema)}
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    value: Format = {"type": "json_schema", "json_schema": _spelled_out({**definitions, **schema})}
    if kind == "string":
        return {**value, "style": "qwen_xml"}  # as it is, not in quotes
    return {**value, "max_whitespace_cnt": MAX_WHITESPACE_CHARS}


def _bounded_text(schema: Schema) -> str:
    """A pattern for text of the schema's length that has no `<|`, and so no marker, in it.

    xgrammar's patterns take a marker's token for the text that it spells: a pattern that admits that text
    goes on behind the marker that ends the argument, and the grammar no longer knows where it is. A `<` and
    what follows it count as one character.
    """
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    for bound in (low, high or 0):
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
            raise StructureError("minLength and maxLength of a string: must be whole numbers from 0 on")
    if high != "" and low > high:
        raise StructureError("minLength of a string: must not be above its maxLength")
    return f"([^<]|<{{1,3}}[^<|]){{{low},{high}}}<?" if high != 0 else ""


def _spelled_out(schema: Any) -> Any:
    """State the defaults of JSON schema that xgrammar reads otherwise: any items, any properties."""
    if isinstance(schema, list):
        return [_spelled_out(part) for part in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping):
        return schema
    rules = {
        name: rule if name in _DATA else _spelled_out(rule) for name, rule in cast("Schema", schema).items()
    }
    kinds = rules.get("type")
    if kinds == "array" or (isinstance(kinds, list) and "array" in kinds):
        rules.setdefault("items", "prefixItems" not in rules)
    if (kinds == "object" or (isinstance(kinds, list) and "object" in kinds)) and "properties" not in rules:
        rules.setdefault("additionalProperties", True)
    return rules


def _variants(schema: object, root: Schema, depth: int = 0) -> list[tuple[str, Schema]]:
    """JSON types that the schema accepts, each with the schema restricted to it."""
    if schema is False or depth > 16:
        return []
    if not isinstance(schema, Mapping):
        schema = {}
    rules = dict(cast("Schema", schema))
    if isinstance(ref := rules.pop("$ref", None), str):
        return _variants({**_resolved(ref, root), **rules}, root, depth + 1)
    for part in rules.pop("allOf", ()):
        rules = {**rules, **part}
    for choice in ("anyOf", "oneOf"):
        if options := rules.pop(choice, None):
            merged = ({**rules, **option} if isinstance(option, Mapping) else option for option in options)
            return [variant for option in merged for variant in _variants(option, root, depth + 1)]
    return list(_by_type(rules))


def _by_type(rules: dict[str, Any]) -> Iterator[tuple[str, Schema]]:
    values = [rules["const"]] if "const" in rules else rules.get("enum")
    declared = rules.get("type", _ANY_TYPE if values is None else dict.fromkeys(map(_type_of, values)))
    for kind in [declared] if isinstance(declared, str) else declared:
        if kind not in _ARGUMENT_TYPES:
            continue
        if values is None:
            yield kind, {**rules, "type": kind}
        elif fitting := [value for value in values if _fits(value, kind)]:
            rest = {name: rule for name, rule in rules.items() if name not in ("const", "enum")}
            yield kind, {**rest, "type": kind, "enum": fitting}


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _fits(value: object, kind: str) -> bool:
    own = _type_of(value)
    return own == kind or (own, kind) == ("integer", "number")


def _resolved(ref: str, root: Schema) -> Schema:
    target: Any = root
    for part in ref.removeprefix("#/").split("/") if ref.startswith("#/") else ():
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or key not in target:
            raise StructureError(f"tools: no schema at {ref!r}; define it in the tool's parameters")
        target = cast("Schema", target)[key]
    if target is root or not isinstance(target, Mapping):
        raise StructureError(f"tools: cannot follow {ref!r}; use a local reference such as #/$defs/name")
    return cast("Schema", target)


def _element(tag: str, attributes: Sequence[Format], content: Sequence[Format]) -> Format:
    elements = [
        _marker("<|open|>"),
        _text(tag),
        *attributes,
        _marker("<|sep|>"),
        *content,
        _marker("<|close|>"),
        _text(tag),
        _marker("<|sep|>"),
    ]
    return {"type": "sequence", "elements": elements}


def _either(formats: Sequence[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def _marker(token: str) -> Format:
    return {"type": "token", "token": token}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _escaped(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;")
