"""Exact turns: every prompt continues from the tokens that the model saw and sampled before.

A prompt is the tokens of the deepest recorded turn that the conversation proves (`service.ancestry`), the
encoding of the messages after it, and the opening of the next message. What a turn's prompt said for that
turn only (tool choice, response format) stays in the history, since the model saw it, unless `keep_tails` is
off. A message that was cut is followed by K3's closing tags (`Completion.closing`).

Without the ledger a prompt is rendered as SGLang renders it. Nothing is guessed either way.
"""

import asyncio
import hashlib
import itertools
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cache_store.ledger import Ledger, LedgerUnavailable, new_key
from cache_store.retention import TtlClass
from cache_store.turn import Turn
from cache_store.version import Ancestor, Version
from model.tokenizer import K3Tokenizer
from service import images, marks
from service.ancestry import AncestorSearch, Ancestry
from service.channels import Channel
from service.conversation import Completion, Conversation, Message
from service.digest import (
    SHORT_BYTES,
    Chain,
    call_ids_digest,
    calls_of,
    chain,
    extend,
    fingerprint,
    label_digest,
    reasoning_digest,
)
from service.rendering import Renderer
from service.token_ids import TokenIds, encoded_ids

_THREAD_CHARS: Final = 20_000
"""Text longer than this is encoded beside the event loop, as tools are: it takes milliseconds."""
_NO_SESSION: Final = bytes(SHORT_BYTES)
_RENEW_AFTER: Final = 1 / 8
"""Part of the time to live after which a used path is renewed."""


@dataclass(frozen=True, slots=True)
class TurnContext:
    """What `Turns.record` needs to know of a prompt.

    path: the continued turns, root first; `covered` messages and `renewed_ms` are the last one's. session:
    the request's, else the last one's. ttl: the class that the client asked for. added: the ids that the
    prompt adds to theirs, with the turn's own part of them at `tail`.
    """

    tenant: str
    session: str | None
    conversation: Conversation
    chain: Chain
    path: tuple[Ancestor, ...]
    covered: int
    renewed_ms: int | None
    added: Sequence[int]
    tail: tuple[int, int]
    ttl: TtlClass | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids to generate from, and how they came about.

    turn: key under which the completion will be recorded, known before anything is generated.
    channel: where the generation prompt left off, for `ChannelParser`.
    parent: key of the turn that is continued, or None; `continued_tokens` of `ids` come from it.
    restored_reasoning: assistant messages whose reasoning the client dropped and the ledger gave back.
    restored_ids: tool calls whose ids the client had rewritten.
    fallback: why the ledger had no say (`ledger_unavailable`, `foreign_tokens`, `image_tokens`), or None.
    divergence: which message differs first from what is recorded, and how; None when nothing does.
    highest: the highest of `ids`; those of a recorded turn are compared with its own when it is decoded.
    images: data URLs, one for each `<|media_pad|>` of `ids`, which the engine expands.
    """

    ids: TokenIds
    turn: str
    channel: Channel
    parent: str | None
    continued_tokens: int
    restored_reasoning: int
    restored_ids: int
    fallback: str | None
    divergence: str | None
    highest: int
    images: tuple[str, ...]
    context: TurnContext = field(repr=False, compare=False)

    @property
    def most_tokens(self) -> int:
        """As many tokens as the prompt has, or more: what an image takes is known to the engine alone."""
        return len(self.ids) + images.MOST_TOKENS * len(self.images)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The outcome of recording a turn; `stored` is False when the ledger did not acknowledge it."""

    turn: str
    stored: bool


class Turns:
    """Prepares prompts from the ledger's turns and records completions into it."""

    def __init__(
        self,
        ledger: Ledger,
        tokenizer: K3Tokenizer,
        *,
        keep_tails: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        """`vocab_size` is the engine's, when it has more rows than the tokenizer has ids."""
        self._ledger = ledger
        self._renderer = Renderer(tokenizer)
        self._keep_tails = keep_tails
        self._vocab_size = vocab_size or tokenizer.vocab_size
        if self._vocab_size < tokenizer.vocab_size:
            raise ValueError(
                f"vocab_size: {self._vocab_size} is less than the tokenizer's {tokenizer.vocab_size}; "
                "give the tokenizer of the model that the engine runs"
            )
        self._tokenizer_digest = _tokenizer_digest(tokenizer)

    async def prepare(
        self,
        tenant: str,
        session: str | None,
        conversation: Conversation,
        *,
        ttl: TtlClass | None = None,
    ) -> Prompt:
        """The prompt for the conversation's next message. Never fails for a fault of the ledger.

        `ttl` is the class of the turn that is to be recorded; its session, where the request names none, that
        of the turn that it continues.

        Raises `ValueError` naming the field when a message cannot be encoded.
        """
        messages = _history(conversation)
        digests = chain(self._salt(tenant), conversation, messages)
        fallback = None
        try:
            ancestry = await AncestorSearch(self._ledger, tenant, session, digests, messages).find()
        except LedgerUnavailable:
            ancestry, fallback = Ancestry(), "ledger_unavailable"
        if any(turn.highest >= self._vocab_size for turn in ancestry.path):
            ancestry, fallback = Ancestry(), "foreign_tokens"
        ordered = [messages[place] for place in digests.places]
        shown = tuple(images.images_of(ordered))
        if shown and self._image_places(ancestry) != len([*images.images_of(ordered[: ancestry.messages])]):
            ancestry, fallback = Ancestry(), "image_tokens"  # the model has sampled one
        covered = ancestry.messages
        with_tools = bool(conversation.tools) and not covered
        if with_tools or _text_length(conversation.messages[covered:]) > _THREAD_CHARS:
            rendered = await asyncio.to_thread(
                self._renderer.render, conversation, digests.digests[0], covered
            )
        else:
            rendered = self._renderer.render(conversation, digests.digests[0], covered)
        path = ancestry.path
        recorded = [turn.tokens(keep_tail=self._keep_tails) for turn in path]
        encoded = [turn.tokens_json(keep_tail=self._keep_tails) for turn in path]
        return Prompt(
            ids=TokenIds([*recorded, rendered.ids], [*encoded, encoded_ids(rendered.ids)]),
            turn=new_key(),
            channel=rendered.channel,
            parent=path[-1].key if path else None,
            continued_tokens=sum(map(len, recorded)),
            restored_reasoning=sum(_restored_reasoning(turn, digests) for turn in path),
            restored_ids=sum(_restored_ids(turn, messages) for turn in path),
            fallback=fallback,
            divergence=ancestry.divergence,
            highest=max(itertools.chain(rendered.ids, (turn.highest for turn in path))),
            images=shown,
            context=TurnContext(
                tenant=tenant,
                session=session or (path[-1].session if path else None),
                conversation=conversation,
                chain=digests,
                path=tuple(map(Ancestor.of, path)),
                covered=covered,
                renewed_ms=path[-1].renewed_ms if path else None,
                added=array("I", rendered.ids),
                tail=rendered.tail,
                ttl=ttl,
            ),
        )

    async def record(self, prompt: Prompt, completion: Completion) -> Recorded:
        """Store the turn; Redis has acknowledged it when this returns with `stored`."""
        context, now_ms = prompt.context, int(time.time() * 1000)
        session, digests, covered = context.session, context.chain, context.covered
        message = _assistant_message(context.conversation, completion)
        shown, reasoning = fingerprint(message), reasoning_digest(message)
        aged_ms = now_ms - (context.renewed_ms or now_ms)
        shortest_s = min((self._ledger.ttl_of(ancestor.ttl) for ancestor in context.path), default=0)
        renew = aged_ms > shortest_s * 1000 * _RENEW_AFTER
        usage = completion.usage
        turn = Turn(
            key=prompt.turn,
            parent=prompt.parent,
            session=session or "",
            digest=extend(digests.digests[-1], shown),
            head=digests.head,
            created_ms=now_ms,
            renewed_ms=now_ms if renew else now_ms - aged_ms,
            messages=len(digests.fingerprints) + 1,
            marks=(
                *map(marks.mark, digests.fingerprints[covered:], digests.reasoning[covered:]),
                marks.mark(shown, reasoning),
            ),
            prompt=context.added,
            tail=context.tail,
            completion=array("I", completion.ids),
            closing=array("I", completion.closing),
            reasoning=completion.reasoning,
            calls=tuple((call.id, call.name, call.arguments) for call in completion.calls),
            finish=completion.finish,
            highest=max(map(max, filter(None, (context.added, completion.ids, completion.closing)))),
            usage=(
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.reasoning_tokens,
                usage.cached_device_tokens,
                usage.cached_host_tokens,
                usage.cached_storage_tokens,
            ),
            ttl=context.ttl,
        )
        version = Version(
            key=prompt.turn,
            parent=prompt.parent,
            reasoning=reasoning,
            call_ids=call_ids_digest([*_history(context.conversation), message]),
            session=label_digest(session) if session else _NO_SESSION,
        )
        stored = await self._ledger.append(context.tenant, turn, version, context.path if renew else ())
        return Recorded(prompt.turn, stored)

    def _image_places(self, ancestry: Ancestry) -> int:
        """How many images the engine would look for in recorded tokens."""
        tokens = (turn.tokens(keep_tail=self._keep_tails) for turn in ancestry.path)
        return sum(ids.count(self._renderer.image_id) for ids in tokens)

    def _salt(self, tenant: str) -> bytes:
        return self._tokenizer_digest + tenant.encode()


def _history(conversation: Conversation) -> tuple[Message, ...]:
    """The messages that are complete."""
    return conversation.messages[:-1] if conversation.partial else conversation.messages


def _assistant_message(conversation: Conversation, completion: Completion) -> dict[str, Any]:
    """The assistant message that a client sends back; with `partial`, what it began and what was added."""
    message = completion.message()
    if not conversation.partial:
        return message
    begun = conversation.messages[-1]
    content = begun.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    reasoning = begun.get("reasoning_content") or begun.get("reasoning") or ""
    return {
        **begun,
        **message,
        "content": [*parts, {"type": "text", "text": completion.text}],
        "reasoning_content": f"{reasoning}{completion.reasoning}",
    }


def _restored_reasoning(turn: Turn, digests: Chain) -> int:
    first = turn.messages - len(turn.marks)
    return sum(
        any(marks.reasoning_of(mark)) and not any(digests.reasoning[position])
        for position, mark in enumerate(turn.marks, start=first)
    )


def _restored_ids(turn: Turn, messages: tuple[Message, ...]) -> int:
    shown = calls_of(messages[turn.messages - 1])
    return sum(call.get("id") != id for call, (id, _, _) in zip(shown, turn.calls, strict=False))


def _text_length(messages: tuple[Message, ...]) -> int:
    return sum(len(text) for message in messages for text in _texts(message))


def _texts(message: Message) -> Iterator[str]:
    content = message.get("content")
    for part in [content] if isinstance(content, str) else content or ():
        text = part if isinstance(part, str) else part.get("text")
        if isinstance(text, str):
            yield text


def _tokenizer_digest(tokenizer: K3Tokenizer) -> bytes:
    """Digest of what every id stands for: another tokenizer's tokens belong to other conversations."""
    digest = hashlib.blake2b(digest_size=16)
    for id in range(tokenizer.vocab_size):
        try:
            token = tokenizer.token_bytes(id)
        except KeyError:
            token = b""
        digest.update(len(token).to_bytes(4, "little") + token)
    digest.update(repr(sorted(tokenizer.markup.items())).encode())
    return digest.digest()
