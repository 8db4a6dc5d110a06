"""Tenants: who may ask, what keeps their turns and cache apart, and how much each may do at once.

A tenants file is TOML:

    [tenants.acme]
    keys = ["sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
    key_env = ["ACME_API_KEY"]           # plain keys stay out of the file: read from the environment
    max_concurrent_turns = 32            # optional; no limit when left out

A key is hashed with `printf %s KEY | sha256sum`. Keys are long random strings, so a fast hash is enough.
"""

import hashlib
import hmac
import os
import re
import tomllib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from service.errors import AuthenticationFailed, TooManyTurns

DEFAULT_TENANT = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HASHED_KEY = re.compile(r"sha256:([0-9a-f]{64})")
_FIELDS = frozenset({"keys", "key_env", "max_concurrent_turns"})


class TenantsFileError(ValueError):
    """The tenants file can't be used; the message names the file, the field and the remedy."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. `max_concurrent_turns` None: no limit."""

    name: str
    max_concurrent_turns: int | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"tenant {self.name!r}: a name is 1 to 64 of A-Z a-z 0-9 _ . -, not starting with a mark"
            )
        if self.max_concurrent_turns is not None and self.max_concurrent_turns < 1:
            raise ValueError(
                f"tenant {self.name!r}: max_concurrent_turns must be at least 1; leave it out for no limit"
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


@dataclass(slots=True)
class Tenants:
    """The tenants of one gateway: authentication and the count of turns that each has running.

    `keys` maps SHA-256 digests (32 bytes) to tenants; None means one open tenant, who needs no key.
    """

    keys: Mapping[bytes, Tenant] | None = None
    _running: dict[str, int] = field(default_factory=dict[str, int])

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

    @contextmanager
    def turn(self, tenant: Tenant) -> Generator[None]:
        """Hold one of the tenant's concurrent turns. Raises TooManyTurns when all are taken."""
        running = self._running.get(tenant.name, 0)
        if tenant.max_concurrent_turns is not None and running >= tenant.max_concurrent_turns:
            raise TooManyTurns(tenant.max_concurrent_turns)
        self._running[tenant.name] = running + 1
        try:
            yield
        finally:
            self._running[tenant.name] -= 1

    def running(self, tenant: Tenant) -> int:
        """How many turns the tenant has running."""
        return self._running.get(tenant.name, 0)


def _read_tenant(
    path: Path, name: str, table: object, environ: Mapping[str, str]
) -> list[tuple[bytes, Tenant]]:
    where = f"{path}: tenants.{name}"
    if not isinstance(table, dict):
        raise TenantsFileError(f"{where}: must be a table")
    fields = cast(dict[str, object], table)
    if unknown := sorted(fields.keys() - _FIELDS):
        raise TenantsFileError(f"{where}.{unknown[0]}: no such field; there are {', '.join(sorted(_FIELDS))}")
    limit = fields.get("max_concurrent_turns")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise TenantsFileError(f"{where}.max_concurrent_turns: must be a whole number")
    try:
        tenant = Tenant(name, limit)
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
