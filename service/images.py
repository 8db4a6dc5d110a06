"""Images in a conversation with a model that reads text alone: refused, or replaced by a text in their place.

Agents send a conversation whole with every request, so one image (a screenshot that a tool took) would have
each later turn refused, too. With a constant text in its place the session goes on; the digests see that
text, so every later turn continues exactly.
"""

from collections.abc import Mapping
from typing import Any, Final, cast

PLACEHOLDER: Final = "[An image was here. This model reads text alone.]"
_TEXT_OF: Final = {"image_url": "text", "image": "text", "input_image": "input_text"}
"""The parts that are images (Chat Completions, Messages, Responses), and each API's type of a text."""
_WITHIN: Final = ("content", "output")
"""What may hold parts: messages and tool results, and the outputs of function calls."""


def replace_images(body: Mapping[str, Any]) -> int:
    """Put the placeholder where a request body's conversation has images; returns how many there were."""
    return sum(_replace(body.get(name)) for name in ("messages", "input"))


def _replace(parts: object) -> int:
    if not isinstance(parts, list):
        return 0
    entries = cast(list[Any], parts)
    replaced = 0
    for index, part in enumerate(entries):
        if not isinstance(part, dict):
            continue
        fields = cast(dict[str, Any], part)
        kind = fields.get("type")
        if isinstance(kind, str) and kind in _TEXT_OF:
            kept = {name: fields[name] for name in ("cache_control",) if name in fields}
            entries[index] = {"type": _TEXT_OF[kind], "text": PLACEHOLDER, **kept}
            replaced += 1
        else:
            replaced += sum(_replace(fields.get(name)) for name in _WITHIN)
    return replaced
