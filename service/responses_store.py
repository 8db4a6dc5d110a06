"""Stored responses: what `previous_response_id` and `item_reference` refer to, kept in the ledger.

A response is kept under the key of its turn: the response as it was answered, the items of its input, and the
keys of the responses before it, root first, so that a whole conversation is read in two round trips. What is
deleted, or has outlived the ledger's time to live, is gone for its successors, too.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cache_store.ledger import Ledger, LedgerUnavailable
from service.encryption import ReasoningSeals
from service.errors import InvalidRequest, LedgerDown, NotFound
from service.responses_items import Item
from service.runner import Turn

_RESPONSE: Final = re.compile(r"resp_([0-9a-f]{32})")
_ITEM: Final = re.compile(r"(rs|msg|fc|fco)_(?:in_)?([0-9a-f]{32})(?:_\d+)?")
_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response: as it was answered, the items of its own input, the turns of those before it."""

    body: dict[str, Any]
    input: list[Item]
    path: list[str]


class ResponseStore:
    """The stored responses of one ledger, and those under way in this gateway, by (tenant, turn)."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.seals = ReasoningSeals(ledger)
        self.running: dict[tuple[str, str], Turn] = {}

    async def get(self, tenant: str, id: str) -> StoredResponse:
        """The response with this id. Raises NotFound, LedgerDown."""
        turn = turn_of_response(id)
        found = await self._load(tenant, [turn]) if turn is not None else [None]
        if found[0] is None:
            raise _unknown(id)
        return found[0]

    async def delete(self, tenant: str, id: str) -> None:
        """Erase the response with this id. Raises NotFound, LedgerDown."""
        turn = turn_of_response(id)
        try:
            if turn is None or not await self._ledger.delete_document(tenant, turn):
                raise _unknown(id)
        except LedgerUnavailable:
            raise LedgerDown from None

    async def history(self, tenant: str, previous: str) -> tuple[list[Item], list[str]]:
        """All items up to and including a response, and the turns of the path. Raises as `get`."""
        turn = turn_of_response(previous)
        last = (await self._load(tenant, [turn]))[0] if turn is not None else None
        if turn is None or last is None:
            raise _no_previous(previous)
        before = await self._load(tenant, last.path)
        items: list[Item] = []
        for key, response in zip((*last.path, turn), (*before, last), strict=True):
            if response is None:
                raise _no_previous(f"resp_{key}")
            items += [*response.input, *response.body["output"]]
        return items, [*last.path, turn]

    async def resolved(self, tenant: str, items: Sequence[Item]) -> list[tuple[Item, str]]:
        """Items with their places, references replaced by what they name. Raises InvalidRequest, LedgerDown.

        A reference to reasoning that is gone is left out: the turn's digest gives the reasoning back, as to
        every client that drops it.
        """
        wanted = {
            found[2]
            for item in items
            if item["type"] == "item_reference" and (found := _ITEM.fullmatch(item["id"]))
        }
        keys = sorted(wanted)
        known: dict[str, Item] = {}
        for response in await self._load(tenant, keys):
            if response is not None:
                known |= {item["id"]: item for item in (*response.input, *response.body["output"])}
        resolved: list[tuple[Item, str]] = []
        for place, item in enumerate(items):
            path = f"input[{place}]"
            if item["type"] != "item_reference":
                resolved.append((item, path))
            elif (named := known.get(item["id"])) is not None:
                resolved.append((named, path))
            elif not item["id"].startswith("rs_"):
                raise InvalidRequest(
                    f"{path}.id: no item with id {item['id'][:100]!r} is kept; with store false none is. "
                    "Send the item itself.",
                    param=f"{path}.id",
                )
        return resolved

    async def save(
        self,
        tenant: str,
        turn: str,
        body: Mapping[str, Any],
        items: Sequence[Item],
        path: Sequence[str],
    ) -> bool:
        """Keep a response; True once the ledger has acknowledged it. Items without ids are given some."""
        named = [
            item if "id" in item else {**item, "id": f"{_PREFIXES[item['type']]}_in_{turn}_{place}"}
            for place, item in enumerate(items)
        ]
        document = {"response": body, "input": named, "path": list(path)}
        return await self._ledger.put_document(tenant, turn, document, path)

    async def _load(self, tenant: str, keys: Sequence[str]) -> list[StoredResponse | None]:
        try:
            documents = await self._ledger.documents(tenant, keys)
        except LedgerUnavailable:
            raise LedgerDown from None
        return [_read(document) for document in documents]


def turn_of_response(id: str) -> str | None:
    """The key of the turn of a response, if the id is one of ours."""
    found = _RESPONSE.fullmatch(id)
    return found[1] if found else None


def _read(document: Mapping[str, Any] | None) -> StoredResponse | None:
    if document is None or "response" not in document:
        return None
    return StoredResponse(document["response"], document["input"], document["path"])


def _unknown(id: str) -> NotFound:
    return NotFound(
        f"Response with id {id[:100]!r} not found. Responses are not kept when store is false.",
        param="response_id",
        code="response_not_found",
    )


def _no_previous(id: str) -> InvalidRequest:
    return InvalidRequest(
        f"previous_response_id: no response with id {id[:100]!r} is kept; with store false none is. "
        "Send the conversation's items instead.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
