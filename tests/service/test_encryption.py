import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.ledger import Ledger
from cache_store.servers import RedisServer
from service.encryption import ReasoningSeal, ReasoningSeals

KEY = bytes(range(32))


@given(st.text(st.characters(exclude_categories=["Cs"])), st.data())
def test_only_what_was_sealed_opens(text: str, data: st.DataObject):
    seal = ReasoningSeal(KEY, "acme")
    sealed = seal.seal(text)
    assert seal.open(sealed) == text
    assert seal.seal(text) != sealed
    assert ReasoningSeal(KEY, "other").open(sealed) is None
    assert ReasoningSeal(bytes(32), "acme").open(sealed) is None
    raw = bytearray(base64.urlsafe_b64decode(sealed))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert seal.open(base64.urlsafe_b64encode(raw).decode()) is None
    assert seal.open(sealed[: data.draw(st.integers(0, len(sealed) - 1))]) is None


@pytest.mark.parametrize("junk", ["", "opaque-ENC-resp_be8145d2e3dc", "é", "A" * 100, "=" * 8, "AQ=="])
def test_junk_opens_to_nothing(junk: str):
    assert ReasoningSeal(KEY, "acme").open(junk) is None


async def test_every_gateway_on_the_ledger_has_the_key(ledger_server: RedisServer):
    ledgers = [Ledger(ledger_server.url), Ledger(ledger_server.url)]
    one, two = [await ReasoningSeals(ledger).of("acme") for ledger in ledgers]
    assert one is not None
    assert two is not None
    assert two.open(one.seal("hm")) == "hm"
    for ledger in ledgers:
        await ledger.close()


async def test_no_ledger_no_seal():
    ledger = Ledger("redis://127.0.0.1:1/0")
    assert await ReasoningSeals(ledger).of("acme") is None
    await ledger.close()
