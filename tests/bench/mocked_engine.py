"""An engine whose answers a test makes up: faults, and clocks, that a real one can't be asked for."""

from collections.abc import Callable
from typing import cast

import httpx

from bench.engines import Engine
from service.processes import HttpService


def mocked(answer: Callable[[httpx.Request], httpx.Response]) -> Engine:
    """An engine, of which no process runs, whose client gets what `answer` makes."""
    engine = Engine(cast(HttpService, None), 1)
    engine.client.close()
    engine.client = httpx.Client(base_url=engine.url, transport=httpx.MockTransport(answer))
    return engine
