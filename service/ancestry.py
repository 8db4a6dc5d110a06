"""Which recorded turns a conversation continues: the deepest path of the turn tree that it proves.

A turn is proved by its visible digest, which covers everything before it. Of several turns under one digest
(the same turn asked twice, with equal visible answers) the order of trial is:

1. the one that the last message names (`turn`, which a signature gave), even where newer ones have pushed it
   out of the digest's list;
2. those whose reasoning, for the last message, is what the client sent;
3. those whose call ids the client sent back;
4. those of the client's session;
5. the newest.

A path is then followed from its root, and ends before the first turn that is gone, or whose reasoning is not
that of the client's message (white space aside; a client that sends none agrees with any). From there on the
client has a version of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cache_store.ledger import Ledger, LedgerUnavailable
from cache_store.turn import Turn
from cache_store.version import Version
from service import marks
from service.conversation import Message
from service.digest import NO_REASONING, SHORT_BYTES, Chain, call_ids_digest, label_digest

_TRIALS: Final = 4
_NOT_RECORDED: Final = "messages[{}] (assistant): not a recorded turn"


@dataclass(frozen=True, slots=True)
class Ancestry:
    """The proved turns, root first, and what stopped the path, if anything did."""

    path: tuple[Turn, ...] = ()
    divergence: str | None = None

    @property
    def messages(self) -> int:
        """How many messages of the conversation the path covers."""
        return self.path[-1].messages if self.path else 0


class AncestorSearch:
    """One search in the ledger. `chain` and `messages` are those of the request."""

    def __init__(
        self, ledger: Ledger, tenant: str, session: str | None, chain: Chain, messages: Sequence[Message]
    ) -> None:
        self._ledger = ledger
        self._tenant = tenant
        self._session = session
        self._chain = chain
        self._messages = messages
        self._ends = [
            end for end, message in enumerate(messages, start=1) if message.get("role") == "assistant"
        ]
        self._loaded: dict[str, Turn | None] = {}

    async def find(self) -> Ancestry:
        """The deepest ancestry. Raises `LedgerUnavailable`."""
        if not self._ends:
            return Ancestry()
        deepest_first = self._ends[::-1]
        found = await self._ledger.versions(self._tenant, [self._chain.digests[end] for end in deepest_first])
        parents = {version.key: version.parent for versions in found for version in versions}
        best: Ancestry | None = None
        trials = 0
        for end, versions in zip(deepest_first, found, strict=True):
            if best is not None and end <= best.messages:
                break
            versions = await self._with_named(end, versions, parents)
            for version in self._by_preference(end, versions)[: _TRIALS - trials]:
                trials += 1
                ancestry = await self._follow(version.key, parents)
                if best is None or ancestry.messages > best.messages:
                    best = ancestry
                if best.messages == end:
                    break
        best = best or Ancestry()
        if best.divergence is None and best.messages < self._ends[-1]:
            return Ancestry(best.path, await self._explain(best))
        return best

    async def _with_named(
        self, end: int, versions: list[Version], parents: dict[str, str | None]
    ) -> list[Version]:
        """The versions at a digest, and the turn that the message names if it ends there, too."""
        named = self._messages[end - 1].get("turn")
        if named is None or any(version.key == named for version in versions):
            return versions
        await self._load([named])
        turn = self._loaded[named]
        if turn is None or turn.digest != self._chain.digests[end]:
            return versions
        parents[turn.key] = turn.parent
        unknown = bytes(SHORT_BYTES)
        return [
            Version(turn.key, turn.parent, marks.reasoning_of(turn.marks[-1]), unknown, unknown),
            *versions,
        ]

    def _by_preference(self, end: int, versions: Sequence[Version]) -> list[Version]:
        named = self._messages[end - 1].get("turn")
        reasoning = self._chain.reasoning[end - 1]
        call_ids = call_ids_digest(self._messages[:end])
        session = label_digest(self._session) if self._session else None

        def rank(version: Version) -> tuple[bool, bool, bool, bool]:
            # A client that sends none may have dropped it: that says nothing about the turn.
            other_reasoning = reasoning not in (NO_REASONING, version.reasoning)
            return (
                version.key != named,
                other_reasoning,
                version.call_ids != call_ids,
                version.session != session,
            )

        return sorted(versions, key=rank)

    async def _follow(self, key: str, parents: dict[str, str | None]) -> Ancestry:
        """Check the path that ends at a turn."""
        keys: list[str] = []
        next_key: str | None = key
        while next_key is not None:
            keys.append(next_key)
            if next_key not in parents or len(keys) > len(self._ends):
                # Its version was pushed out of its list by newer ones: the turn itself knows its parent.
                await self._load(keys)
                turn = self._loaded[next_key]
                if turn is None or len(keys) > len(self._ends):
                    break
                parents[next_key] = turn.parent
            next_key = parents[next_key]
        await self._load(keys)
        path: list[Turn] = []
        for key in reversed(keys):
            turn = self._loaded[key]
            if turn is None or not self._continues(path[-1] if path else None, turn):
                return Ancestry(tuple(path))
            if (place := self._other_reasoning(turn)) is not None:
                problem = f"messages[{place}] (assistant): reasoning differs from turn {turn.key}"
                return Ancestry(tuple(path), problem)
            path.append(turn)
        return Ancestry(tuple(path))

    async def _load(self, keys: Sequence[str]) -> None:
        missing = [key for key in keys if key not in self._loaded]
        self._loaded |= zip(missing, await self._ledger.turns(self._tenant, missing), strict=True)

    def _continues(self, before: Turn | None, turn: Turn) -> bool:
        """Whether a turn follows the one before it, and ends where the conversation says."""
        return (
            turn.parent == (before.key if before else None)
            and turn.messages < len(self._chain.digests)
            and turn.digest == self._chain.digests[turn.messages]
            and turn.messages - len(turn.marks) == (before.messages if before else 0)
        )

    def _other_reasoning(self, turn: Turn) -> int | None:
        first = turn.messages - len(turn.marks)
        for position, mark in enumerate(turn.marks, start=first):
            shown = self._chain.reasoning[position]
            if shown not in (NO_REASONING, marks.reasoning_of(mark)):
                return self._chain.places[position]
        return None

    async def _explain(self, ancestry: Ancestry) -> str:
        """Why the next assistant message is not recorded: compare with the session's other turns."""
        unknown = next(end for end in self._ends if end > ancestry.messages)
        explanation = _NOT_RECORDED.format(unknown - 1)
        if self._session is None:
            return explanation
        parent = ancestry.path[-1].key if ancestry.path else None
        furthest = -1
        try:
            turns = await self._ledger.session(self._tenant, self._session)
        except LedgerUnavailable:  # the path itself is known
            return explanation
        for turn in turns:
            if turn.parent != parent:
                continue
            if turn.head != self._chain.head:
                position, how = -1, "tools, thinking or effort differ"
            else:
                position, how = self._first_difference(turn)
            if position >= furthest and how is not None:
                furthest = position
                where = "" if position < 0 else self._where(position)
                explanation = f"{where}{how} from turn {turn.key}"
        return explanation

    def _first_difference(self, turn: Turn) -> tuple[int, str | None]:
        first = turn.messages - len(turn.marks)
        for position, recorded in enumerate(turn.marks, start=first):
            if position == len(self._messages):
                return position, None
            fingerprint = self._chain.fingerprints[position]
            shown = marks.mark(fingerprint, self._chain.reasoning[position])
            if how := marks.difference(shown, recorded):
                return position, how
        return turn.messages, None

    def _where(self, position: int) -> str:
        return f"messages[{self._chain.places[position]}] ({self._chain.fingerprints[position].role}): "
