"""The engines behind one gateway: which of them serves a session, and what happens when it is gone.

Sessions are placed by rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit
rates", 1998): each engine's weight for a session is a hash of both, and the heaviest that is there serves it.
So every gateway places a session alike without asking anybody, the loss of an engine moves its own sessions
alone, and they return when it does. Whoever gets a session finds its prefix in the store.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Final

from service.admission import Admission, AdmissionSettings, Demand, Stay
from service.admission_metrics import AdmissionMetrics
from service.engine import Engine, EngineInfo
from service.engine_pages import merge_pages
from service.errors import EngineOverloaded, EngineUnavailable
from service.generation import Chunk, Generation
from service.metrics import Metrics

_WEIGHT_BYTES: Final = 8


class Engines:
    """One engine or more that serve the same checkpoint and share a store."""

    def __init__(
        self, engines: Sequence[Engine], metrics: Metrics, admission: AdmissionSettings | None = None
    ) -> None:
        """`admission` None lets every turn in at once. Raises ValueError when an engine is named twice."""
        names = [engine.name for engine in engines]
        assert names, "a gateway has an engine"
        if len(set(names)) < len(names):
            raise ValueError(f"--engine: {', '.join(names)} has one twice; give each once")
        self.engines = tuple(engines)
        self._metrics = metrics
        self._placed: dict[str, Engine] = {}
        self._admissions: dict[str, Admission] = {}
        if admission is not None:
            series = AdmissionMetrics(metrics.registry)
            self._admissions = {name: Admission(name, admission, series) for name in names}

    async def close(self) -> None:
        """Give the connections back."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def order(self, key: str) -> list[Engine]:
        """All engines, in the order in which they come into question for a session."""
        return sorted(self.engines, key=lambda engine: _weight(engine.name, key), reverse=True)

    async def info(self) -> EngineInfo:
        """What is served: the limits of the smallest engine that is there, and vision if all of them have it.

        Raises EngineUnavailable.
        """
        found: list[EngineInfo] = []
        for engine in sorted(self.engines, key=lambda engine: not engine.available):
            if found and not engine.available:
                break
            try:
                found.append(await engine.info())
            except EngineUnavailable:
                continue
        if not found:
            raise EngineUnavailable
        smallest = min(found, key=lambda info: info.max_request_tokens)
        return replace(smallest, vision=all(info.vision for info in found))

    async def ready(self) -> bool:
        """Whether any engine takes requests now."""
        return any(await asyncio.gather(*(engine.ready() for engine in self.engines)))

    async def metrics(self) -> bytes:
        """The engines' Prometheus pages in one; with several, each series has the label `engine`."""
        pages = await asyncio.gather(*(engine.metrics() for engine in self.engines))
        if len(pages) == 1:
            return pages[0]
        names = [engine.name for engine in self.engines]
        return await asyncio.to_thread(merge_pages, dict(zip(names, pages, strict=True)))

    async def generate(
        self, generation: Generation, key: str, demand: Demand | None = None
    ) -> AsyncGenerator[Chunk]:
        """Stream one completion from the engine that serves the session `key`, as `Engine.generate` does.

        Where admission is on, `demand` has to be let in first. Raises NoPlace when that takes too long.

        An engine that can't be reached or is full has begun nothing, and the next one is asked. One that
        breaks off has: it may have died of this very request, which is then not given to the others.
        """
        home, *_ = order = self.order(key)
        refusal: EngineUnavailable | EngineOverloaded | None = None
        try:
            for engine in sorted(order, key=lambda engine: not engine.available):
                self._placed[generation.rid] = engine
                begun = False
                try:
                    async with AsyncExitStack() as held:
                        stay = await self._admit(engine, demand, held)
                        chunks = await held.enter_async_context(aclosing(engine.generate(generation)))
                        async for chunk in chunks:
                            if not begun:
                                begun = True
                                self._count(engine, home)
                            stay.saw(chunk)
                            yield chunk
                    return
                except (EngineUnavailable, EngineOverloaded) as error:
                    if begun:
                        raise
                    # The first one's: those that are there were asked before those that seem not to be.
                    refusal = refusal or error
        finally:
            self._placed.pop(generation.rid, None)
        assert refusal is not None
        raise refusal

    async def abort(self, rid: str) -> None:
        """Have its engine end the work on a request; without effect when it has ended. Never raises."""
        engine = self._placed.get(rid)
        if engine is None:
            return
        admission = self._admissions.get(engine.name)
        if admission is None or not admission.withdraw(rid):
            await engine.abort(rid)

    async def _admit(self, engine: Engine, demand: Demand | None, held: AsyncExitStack) -> Stay:
        admission = self._admissions.get(engine.name)
        if admission is None or demand is None:
            return Stay()
        info = await engine.info()
        return await held.enter_async_context(admission.turn(demand, info.room))

    def _count(self, engine: Engine, home: Engine) -> None:
        self._metrics.engine_turns.labels(engine.name).inc()
        if engine is not home:
            self._metrics.moved.inc()


def _weight(engine: str, key: str) -> bytes:
    """The weight of an engine for a session: alike in every gateway that calls it by the same address."""
    return hashlib.blake2b(f"{engine}\0{key}".encode(), digest_size=_WEIGHT_BYTES).digest()
