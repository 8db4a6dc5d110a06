"""Tenants: who may ask, what keeps their turns and cache apart, and how much each may do.

A tenants file is TOML:

    [tenants.acme]
    keys = ["sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
    key_env = ["ACME_API_KEY"]           # plain keys stay out of the file: read from the environment
    max_concurrent_turns = 32            # these are optional; no limit where one is left out
    requests_per_minute = 600
    tokens_per_minute = 2_000_000        # computed ones: of prompts beyond the cache, and of answers
    max_turn_bytes = 10_000_000_000      # of turns in the ledger
    max_cache_bytes = 2_000_000_000_000  # of pages and states in the store, which then takes no more

A key is hashed with `printf %s KEY | sha256sum`. Keys are long random strings, so a fast hash is enough.
"""

import hashlib
import hmac
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from service.errors import AuthenticationFailed

DEFAULT_TENANT = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HASHED_KEY = re.compile(r"sha256:([0-9a-f]{64})")
_LIMITS: Final = (
    "max_concurrent_turns",
    "requests_per_minute",
    "tokens_per_minute",
    "max_turn_bytes",
    "max_cache_bytes",
)
_FIELDS: Final = frozenset({"keys", "key_env", *_LIMITS})


class TenantsFileError(ValueError):
    """The tenants file can't be used; the message names the file, the field and the remedy."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant, with its limits; None: no limit (`service.quotas` says what each means)."""

    name: str
    max_concurrent_turns: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_turn_bytes: int | None = None
    max_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"tenant {self.name!r}: a name is 1 to 64 of A-Z a-z 0-9 _ . -, not starting with a mark"
            )
        for limit in _LIMITS:
            value = getattr(self, limit)
            if value is not None and value < 1:
                raise ValueError(
                    f"tenant {self.name!r}: {limit} must be at least 1; leave it out for no limit"
                )

    @property
    def cache_salt(self) -> str:
        """What the engine mixes into this tenant's prefix cache, on the device and in the store.

        A function of the name, so that it is the same on every replica and after every restart. Clients can't
        set it: that, not secrecy, is what keeps tenants apart.
        """
        return hashlib.sha256(f"longhaul tenant {self.name}".encode()).hexdigest()[:32]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants of one gateway.

    `keys` maps SHA-256 digests (32 bytes) to tenants; None means one open tenant, who needs no key.
    """

    keys: Mapping[bytes, Tenant] | None = None

    @property
    def open(self) -> bool:
        """Whether anybody may ask."""
        return self.keys is None

    @classmethod
    def load(cls, path: Path | None, environ: Mapping[str, str] = os.environ) -> "Tenants":
        """Read a tenants file; no file gives one open tenant. Raises TenantsFileError."""
        if path is None:
            return cls()
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TenantsFileError(f"{path}: can't be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise TenantsFileError(f"{path}: not TOML: {error}") from None
        tables = document.get("tenants")
        if not isinstance(tables, dict) or not tables:
            raise TenantsFileError(f"{path}: has no table [tenants.NAME]; add one per tenant")
        keys: dict[bytes, Tenant] = {}
        for name, table in cast(dict[str, Any], tables).items():
            for digest, tenant in _read_tenant(path, name, table, environ):
                if digest in keys:
                    raise TenantsFileError(
                        f"{path}: tenants.{name}: a key of {keys[digest].name!r}; give each its own"
                    )
                keys[digest] = tenant
        return cls(keys)

    def authenticate(self, key: str | None) -> Tenant:
        """The tenant that a presented key belongs to. Raises AuthenticationFailed.

        Takes the same time for every key: all digests are compared.
        """
        if self.keys is None:
            return Tenant(DEFAULT_TENANT)
        if not key:
            raise AuthenticationFailed(key_sent=False)
        presented = _digest(key)
        found: Tenant | None = None
        for digest, tenant in self.keys.items():
            if hmac.compare_digest(digest, presented):
                found = tenant
        if found is None:
            raise AuthenticationFailed(key_sent=True)
        return found


def _read_tenant(
    path: Path, name: str, table: object, environ: Mapping[str, str]
) -> list[tuple[bytes, Tenant]]:
    where = f"{path}: tenants.{name}"
    if not isinstance(table, dict):
        raise TenantsFileError(f"{where}: must be a table")
    fields = cast(dict[str, object], table)
    if unknown := sorted(fields.keys() - _FIELDS):
        raise TenantsFileError(f"{where}.{unknown[0]}: no such field; there are {', '.join(sorted(_FIELDS))}")
    limits: dict[str, int] = {}
    for limit in _LIMITS:
        value = fields.get(limit)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TenantsFileError(f"{where}.{limit}: must be a whole number")
        limits[limit] = value
    try:
        tenant = Tenant(name, **limits)
    except ValueError as error:
        raise TenantsFileError(f"{path}: {error}") from None
    digests: list[bytes] = []
    for hashed in _strings(where, "keys", fields):
        match = _HASHED_KEY.fullmatch(hashed)
        if match is None:
            raise TenantsFileError(
                f"{where}.keys: want 'sha256:' and 64 hex digits, from: printf %s KEY | sha256sum"
            )
        digests.append(bytes.fromhex(match[1]))
    for variable in _strings(where, "key_env", fields):
        key = environ.get(variable)
        if not key:
            raise TenantsFileError(
                f"{where}.key_env: the environment has no {variable}; export it or remove it here"
            )
        digests.append(_digest(key))
    if not digests:
        raise TenantsFileError(f"{where}: has no key; give it keys or key_env")
    return [(digest, tenant) for digest in digests]


def _strings(where: str, name: str, fields: Mapping[str, object]) -> list[str]:
    value = fields.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in cast(list[object], value)):
        raise TenantsFileError(f"{where}.{name}: must be a list of strings")
    return cast(list[str], value)
