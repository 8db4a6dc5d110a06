"""The store's settings, from SGLang's ``--hicache-storage-backend-extra-config``."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cache_store.retention import TtlClass
from cache_store.stream import Endpoint

URL_VARIABLE = "LONGHAUL_STORE_URL"
OPTIONS_VARIABLE = "LONGHAUL_STORE_OPTIONS"
# What SGLang itself reads from the same object.
_FOREIGN = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size"})

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1)]


def _split(url: str) -> list[str]:
    """The URLs of a list. A comma in a password is written %2C."""
    return [one.strip() for one in url.split(",")]


def _of_environment() -> dict[str, Any]:
    text = os.environ.get(OPTIONS_VARIABLE, "")
    try:
        options = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{OPTIONS_VARIABLE} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f'{OPTIONS_VARIABLE} is not an object: write {{"ttl": "1h"}}')
    return cast(dict[str, Any], options)


class StoreOptions(BaseModel):
    """Settings of the store.

    Attributes:
        url: of the blob server, or of several, as a list or parted by commas (`cache_store.shards`); without
            one, the variable LONGHAUL_STORE_URL.
        timeout_s: what any one call from the engine may take, connecting included.
        ttl: how long pages and states live after their last use, where the gateway does not say.
        state_keep_every: tokens from one state of a chain that stays to the next.
        superseded_ttl_s: how long a state lives that a newer one of its chain has replaced.
        state_dtype: "exact" stores states as they are; "bfloat16" in half the bytes, with rounding.
        tenant_max_bytes: what one tenant's values may take in a namespace, where the gateway does not say;
            None for no limit.
        connections: kept open to the server.
        share_bytes: shared memory in which the ranks of an engine on one host leave each other the pages that
            all of them hold; 0 for none.
        retry_bytes: bound of the memory that failed writes may hold until they are retried.
        retry_attempts: after which a write is given up; waiting for a dead server counts as none.
        drain_s: how long closing may take to write what is still queued. SGLang grants 15 s in all.
        breaker_failures: in a row, after which the server counts as dead.
        breaker_cooldown_s: until the first probe of a dead server; doubles up to 30 s.
        model_path: the checkpoint's directory; without one, the engine's own.
        salt: parts namespaces that are equal in all that can be seen.
    """

    # A URL holds a password: errors must not repeat what was given.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, protected_namespaces=())

    url: str = Field(repr=False)
    timeout_s: _Seconds = 2.0
    ttl: TtlClass = "24h"
    # A state weighs as much as 16,253 tokens: one every 32,768 alone would add half of the pages' bytes.
    state_keep_every: _Count = 36_864
    superseded_ttl_s: _Seconds = 60.0
    state_dtype: Literal["exact", "bfloat16"] = "exact"
    tenant_max_bytes: _Count | None = None
    connections: _Count = 4
    share_bytes: int = Field(default=512 * 1024 * 1024, ge=0)
    retry_bytes: int = Field(default=256 * 1024 * 1024, ge=0)
    retry_attempts: _Count = 8
    drain_s: float = Field(default=5.0, ge=0, le=10)
    breaker_failures: _Count = 3
    breaker_cooldown_s: float = Field(default=1.0, gt=0, le=30)
    model_path: Path | None = None
    salt: str = ""

    @field_validator("url", mode="before")
    @classmethod
    def _joined(cls, url: Any) -> Any:
        return ",".join(map(str, cast(list[Any], url))) if isinstance(url, list) else url

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        endpoints = [Endpoint.parse(one) for one in _split(url)]
        named = {(str(endpoint), endpoint.database) for endpoint in endpoints}
        if len(named) < len(endpoints):
            raise ValueError("one server is named twice: give each of several URLs once")
        return url

    @property
    def urls(self) -> list[str]:
        """The URL of each server."""
        return _split(self.url)

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "StoreOptions":
        """Read the extra config, and the variable LONGHAUL_STORE_OPTIONS for what it leaves out.

        Raises:
            ValueError: a setting is unknown or has an impossible value, or there is no URL.
        """
        given = _of_environment() | {name: value for name, value in extra.items() if name not in _FOREIGN}
        given.setdefault("url", os.environ.get(URL_VARIABLE, ""))
        if not given["url"]:
            raise ValueError(f'no store URL: give "url" in the extra config or set {URL_VARIABLE}')
        try:
            return cls(**given)
        except ValidationError as error:
            found = "; ".join(
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}"
                for item in error.errors(include_url=False)
            )
            raise ValueError(f"store options in the extra config or {OPTIONS_VARIABLE}: {found}") from None
