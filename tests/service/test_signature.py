from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.ledger import Ledger, new_key
from cache_store.servers import RedisServer, Role
from service.signature import Signatures, Signer

SIGNER = Signer(bytes(32), "acme")
KEYS = st.binary(min_size=16, max_size=16).map(bytes.hex)


@given(key=KEYS)
def test_a_signature_names_its_turn(key: str):
    signature = SIGNER.sign(key)
    assert SIGNER.turn_of(signature) == key
    assert len(signature) == 66
    assert set(signature) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


@given(key=KEYS, place=st.integers(0, 64), char=st.characters())
def test_an_altered_signature_names_nothing(key: str, place: int, char: str):
    """The last character is left alone: two of its bits stand for nothing."""
    signature = SIGNER.sign(key)
    altered = signature[:place] + char + signature[place + 1 :]
    assert SIGNER.turn_of(altered) == (key if altered == signature else None)


@pytest.mark.parametrize(
    "signature",
    ["", "abc", "EpQabc", "A" * 66, "A" * 67, "=" * 66, "é" * 66, SIGNER.sign("00" * 16)[:-1], "A" * 10_000],
)
def test_a_foreign_signature_names_nothing(signature: str):
    assert SIGNER.turn_of(signature) is None


def test_tenants_and_secrets_part_signatures():
    signature = SIGNER.sign("00" * 16)
    assert Signer(bytes(32), "zeta").turn_of(signature) is None
    assert Signer(bytes(31) + b"1", "acme").turn_of(signature) is None


async def test_gateways_on_one_ledger_share_the_secret_and_it_outlives_them(tmp_path: Path):
    key = new_key()
    with RedisServer(Role.LEDGER, tmp_path / "ledger") as server:
        first, second = Ledger(server.url), Ledger(server.url)
        signature = (await Signatures(first).signer("t")).sign(key)
        assert (await Signatures(second).signer("t")).turn_of(signature) == key
        await first.close()
        await second.close()
    with RedisServer(Role.LEDGER, tmp_path / "ledger") as server:
        ledger = Ledger(server.url)
        assert (await Signatures(ledger).signer("t")).turn_of(signature) == key
        await ledger.close()


async def test_without_a_ledger_turns_are_signed_for_the_moment(ledger_server: RedisServer):
    nobody = Ledger("redis://127.0.0.1:9/0")
    signatures = Signatures(nobody)
    signer = await signatures.signer("t")
    signature = signer.sign("00" * 16)
    assert (await signatures.signer("t")).turn_of(signature) == "00" * 16
    assert (await Signatures(nobody).signer("t")).turn_of(signature) is None
    await nobody.close()
