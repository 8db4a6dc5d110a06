"""Images in a conversation: passed on where the engine has vision, else refused, or replaced by a text.

An image is a data URL, `{"type": "image", "image": URL}` in a conversation. Its prompt is one
`<|media_pad|>`, as SGLang's chat path renders it, and SGLang's K3 processor makes of each one the image's
size and patches (SGLang 0.5.23: `managers/tokenizer_manager.py`, `multimodal/processors/kimi_k3.py`). So a
recorded prompt goes on exactly, as long as each request brings its images along; that they are the same is
what the digests prove.

Only data URLs: what stands behind another URL may differ from turn to turn, and whom the engine fetches
something from is not for clients to say.

Where the model reads text alone, one image (a screenshot that a tool took) would have each later turn
refused, too, since agents send a conversation whole with every request. With a constant text in its place the
session goes on; the digests see that text, so every later turn continues exactly.
"""

import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from service.errors import InvalidRequest
from service.fields import Fields

PLACEHOLDER: Final = "[An image was here. This model reads text alone.]"
MOST_TOKENS: Final = 4096 + 16
"""More than any image takes: Kimi's processor cuts it to 16,384 patches, four to a token, and frames it."""

_TEXT_OF: Final = {"image_url": "text", "image": "text", "input_image": "input_text"}
"""The parts that are images (Chat Completions, Messages, Responses), and each API's type of a text."""
_WITHIN: Final = ("content", "output")
"""What may hold parts: messages and tool results, and the outputs of function calls."""
_DATA_URL: Final = re.compile(r"data:(image/(?:png|jpeg|gif|webp));base64,")
_REMEDY: Final = (
    "must be a data URL, data:image/png;base64,...; PNG, JPEG, GIF and WebP are read. Other URLs are not "
    "fetched."
)


def image_part(part: Fields, name: str, url: str) -> dict[str, Any]:
    """A conversation's part for an image, whose field `name` has the URL. Raises InvalidRequest."""
    head = _DATA_URL.match(url)
    if head is None:
        raise part.error(name, _REMEDY, code="unsupported_content")
    try:
        data = binascii.a2b_base64(url[head.end() :], strict_mode=True)
    except (binascii.Error, ValueError):
        raise part.error(name, "is not base64.", code="invalid_image") from None
    if not data:
        raise part.error(name, "is empty: give the image's bytes in base64.", code="invalid_image")
    return {"type": "image", "image": url}


def images_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The data URLs of the images in messages, in their order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():  # pyright: ignore[reportUnknownVariableType]
            if isinstance(part, dict) and (url := cast(dict[str, Any], part).get("image")):
                yield url


def first_image(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Path and type of the first image in a request body's conversation."""
    for name in ("messages", "input"):
        for path, parts, index in _images(body.get(name), name):
            return f"{path}[{index}]", parts[index]["type"]
    return None


def refusal(path: str, kind: str) -> InvalidRequest:
    """What is said about an image where the model reads text alone."""
    return InvalidRequest(
        f"{path}.type: parts of type {kind!r} are not supported: this model reads text alone, so send that.",
        param=f"{path}.type",
        code="unsupported_content",
    )


def replace_images(body: Mapping[str, Any]) -> int:
    """Put the placeholder where a request body's conversation has images; returns how many there were."""
    replaced = 0
    for name in ("messages", "input"):
        for _, parts, index in _images(body.get(name), name):
            fields = parts[index]
            kept = {key: fields[key] for key in ("cache_control",) if key in fields}
            parts[index] = {"type": _TEXT_OF[fields["type"]], "text": PLACEHOLDER, **kept}
            replaced += 1
    return replaced


def _images(parts: object, path: str) -> Iterator[tuple[str, list[Any], int]]:
    """Where images are: a list's path, the list, and the place in it."""
    if not isinstance(parts, list):
        return
    entries = cast(list[Any], parts)
    for index, part in enumerate(entries):
        if not isinstance(part, dict):
            continue
        fields = cast(dict[str, Any], part)
        kind = fields.get("type")
        if isinstance(kind, str) and kind in _TEXT_OF:
            yield path, entries, index
        else:
            for name in _WITHIN:
                yield from _images(fields.get(name), f"{path}[{index}].{name}")
