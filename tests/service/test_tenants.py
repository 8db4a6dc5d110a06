import hashlib
from pathlib import Path

import pytest

from service.errors import AuthenticationFailed
from service.tenants import Tenant, Tenants, TenantsFileError


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def load(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> Tenants:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return Tenants.load(path, environ or {})


def test_without_a_file_everybody_is_the_default_tenant():
    tenants = Tenants.load(None)
    assert tenants.open
    assert tenants.authenticate(None).name == tenants.authenticate("whatever").name == "default"


def test_keys_name_tenants(tmp_path: Path):
    tenants = load(
        tmp_path,
        f"""
        [tenants.acme]
        keys = ["{hashed("one")}", "{hashed("two")}"]
        [tenants.zeta]
        key_env = ["ZETA_KEY"]
        max_concurrent_turns = 2
        requests_per_minute = 3
        tokens_per_minute = 4
        max_turn_bytes = 5
        max_cache_bytes = 6
        """,
        {"ZETA_KEY": "thrée"},
    )
    assert not tenants.open
    assert tenants.authenticate("one") == tenants.authenticate("two") == Tenant("acme")
    assert tenants.authenticate("thrée") == Tenant("zeta", 2, 3, 4, 5, 6)
    for wrong in ("", None, "One", "one ", hashed("one"), "\udcff"):
        with pytest.raises(AuthenticationFailed):
            tenants.authenticate(wrong)


def test_salts_differ_between_tenants_and_last_over_restarts():
    salts = {Tenant(name).cache_salt for name in ("a", "b", "default")}
    assert len(salts) == 3
    assert Tenant("acme", 5).cache_salt == Tenant("acme").cache_salt == "90ba6ab7c43415a2486721a5c4490a41"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tenants = ", "not TOML"),
        ("", "[tenants.NAME]"),
        ("tenants = 3", "[tenants.NAME]"),
        ("[tenants.a]", "tenants.a: has no key"),
        ("[tenants]\na = 3", "tenants.a: must be a table"),
        ('[tenants.a]\nkey = ["x"]', "tenants.a.key: no such field"),
        ('[tenants.a]\nkeys = ["plain"]', "sha256sum"),
        ('[tenants.a]\nkeys = "plain"', "tenants.a.keys: must be a list of strings"),
        ('[tenants.a]\nkey_env = ["MISSING"]', "the environment has no MISSING"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\nmax_concurrent_turns = true', "must be a whole number"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\nmax_concurrent_turns = 0', "at least 1"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\ntokens_per_minute = -1', "tokens_per_minute must be"),
        (f'[tenants.a]\nkeys = ["{hashed("k")}"]\nmax_turn_bytes = "1G"', "max_turn_bytes: must be a whole"),
        (f'[tenants."a b"]\nkeys = ["{hashed("k")}"]', "a name is 1 to 64"),
        (
            f'[tenants.a]\nkeys = ["{hashed("k")}"]\n[tenants.b]\nkeys = ["{hashed("k")}"]',
            "give each its own",
        ),
    ],
)
def test_a_bad_file_is_refused_and_says_where(tmp_path: Path, text: str, named: str):
    with pytest.raises(TenantsFileError) as caught:
        load(tmp_path, text)
    assert named in str(caught.value)
    assert "tenants.toml" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(TenantsFileError):
        Tenants.load(tmp_path / "nowhere.toml")
