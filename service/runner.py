"""The core that every API shares: prepare a prompt, generate, parse, record.

An API module makes a `TurnRequest` and awaits `TurnRunner.start`, which raises a `ServiceError` while there
is still a status to choose. It then iterates over the turn's steps and, when they end, finds
`turn.completion` recorded. It closes the turn in any case.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass

from cache_store.retention import TtlClass
from cache_store.roots import Root, RootRegistry
from model.tokenizer import K3Tokenizer
from service.admission import Demand
from service.constraint import output_constraint
from service.conversation import Completion, Conversation, Usage
from service.engines import Engines
from service.errors import InvalidRequest, QuotaExceeded, TooManyTurns
from service.generation import Chunk, Generation
from service.images import refusal
from service.metrics import Metrics
from service.quotas import Hold, Quotas
from service.reader import MessageReader, Step
from service.sampling import Sampling, output_room
from service.tenants import Tenant
from service.turns import Prompt, Turns

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an API module asks for. `single_call` ends the message after its first tool call.

    stream: whether the answer is shown as it comes.
    ttl: the class of time to live that the client asks for; None where it leaves that to the service.
    priority: among the tenant's own turns that wait for a place (`service.admission`), the higher first.
    """

    tenant: Tenant
    session: str | None
    conversation: Conversation
    sampling: Sampling
    single_call: bool = False
    stream: bool = True
    ttl: TtlClass | None = None
    priority: int = 0


class Turn:
    """One turn under way: an iterator over its steps.

    `completion` and `recorded` (the ledger has acknowledged it) are there when the iteration has ended,
    `usage`, as far as it is known, with the first step.
    """

    def __init__(
        self,
        prompt: Prompt,
        reader: MessageReader,
        chunks: AsyncGenerator[Chunk],
        runner: "TurnRunner",
        request: TurnRequest,
        hold: Hold,
        held: ExitStack,
        started_at: float,
        rid: str,
    ) -> None:
        self.prompt = prompt
        self.completion: Completion | None = None
        self.usage = Usage(prompt_tokens=len(prompt.ids))
        self.recorded = False
        self.ttft_s: float | None = None
        self.cancelled = False
        self._rid = rid
        self._reader = reader
        self._chunks = chunks
        self._runner = runner
        self._request = request
        self._hold = hold
        self._held = held
        self._started_at = started_at
        self._steps = self._run()
        self._first: asyncio.Future[Chunk] | None = None

    def __aiter__(self) -> AsyncIterator[Step]:
        return self._steps

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the message."""
        return self._reader.stop_string

    async def begin(self, grace_s: float) -> None:
        """Wait for the engine's first chunk, at most for the grace. Raises the engine's refusal."""
        self._first = asyncio.ensure_future(anext(self._chunks))
        done, _ = await asyncio.wait({self._first}, timeout=grace_s)
        if done:
            self._first.result()

    async def cancel(self) -> None:
        """Have the engine abort the turn, whose steps then end with its EngineError."""
        self.cancelled = True
        await self._runner.abort(self._rid)

    async def close(self, cause: str) -> None:
        """Give everything back. A turn that is not complete is aborted, and counted under the cause."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._steps.aclose()
        await self._chunks.aclose()
        if self.completion is None:
            self._runner.metrics.aborted.labels(cause).inc()
        self._held.close()
        await self._end()

    async def _run(self) -> AsyncGenerator[Step]:
        assert self._first is not None, "begin comes first"
        async with aclosing(self._chunks) as chunks:
            chunk = await self._first
            self.ttft_s = time.monotonic() - self._started_at
            self._runner.metrics.ttft.observe(self.ttft_s)
            while True:
                self.usage = self._usage(chunk)
                yield self._reader.feed(chunk)
                if chunk.stop is not None or self._reader.ended:
                    break
                chunk = await anext(chunks)
        yield self._reader.finish()
        completion = self._reader.completion(chunk.stop or "stop", self.usage)
        # Ended before anybody is told: who has seen the end may begin another, at any gateway.
        await self._end()
        self.recorded = await self._runner.record(self._request.tenant, self.prompt, completion)
        self.completion = completion

    async def _end(self) -> None:
        """Give back the tenant's turn, and charge what the engine has computed for it."""
        computed = self.usage.prompt_tokens - self.usage.cached_tokens + self._reader.sampled_tokens
        await self._runner.quotas.end(self._hold, 0 if self.ttft_s is None else computed)

    def _usage(self, chunk: Chunk) -> Usage:
        return Usage(
            # How many tokens an image is, the engine says.
            prompt_tokens=(chunk.prompt_tokens if self.prompt.images else 0) or len(self.prompt.ids),
            cached_device_tokens=chunk.cached_device_tokens,
            cached_host_tokens=chunk.cached_host_tokens,
            cached_storage_tokens=chunk.cached_storage_tokens,
        )


class TurnRunner:
    """Starts turns. `grace_s`: how long a start waits for the engine's first tokens.

    What the engine refuses, it refuses at once; a prefill takes minutes. So an answer whose engine was silent
    for the grace can be begun, and pinged, without a guess at its status.
    """

    def __init__(
        self,
        engines: Engines,
        turns: Turns,
        tokenizer: K3Tokenizer,
        quotas: Quotas,
        metrics: Metrics,
        *,
        roots: RootRegistry | None = None,
        grace_s: float = 5.0,
    ) -> None:
        self.metrics = metrics
        self.quotas = quotas
        self._engines = engines
        self._turns = turns
        self._tokenizer = tokenizer
        self._roots = roots
        self._announcing: set[asyncio.Task[bool]] = set()
        self._grace_s = grace_s

    async def start(self, request: TurnRequest) -> Turn:
        """Begin a turn: its prompt is assembled and the engine has taken it. Raises ServiceError."""
        started_at = time.monotonic()
        with self._counting_refusals(request.tenant):
            hold = await self.quotas.begin(request.tenant)
        try:
            turn = await self._started(request, hold, started_at)
        except BaseException:
            await self.quotas.end(hold, 0)
            raise
        try:
            await turn.begin(self._grace_s)
        except BaseException as error:
            await turn.close("client" if isinstance(error, asyncio.CancelledError) else "engine")
            raise
        return turn

    async def _started(self, request: TurnRequest, hold: Hold, started_at: float) -> Turn:
        with ExitStack() as held:
            held.enter_context(self.metrics.running.track_inprogress())
            info = await self._engines.info()
            prompt = await self._prepare(request)
            if prompt.images and not info.vision:  # of an earlier response
                raise refusal("input", "input_image")
            self._announce(request, prompt)
            room_tokens = output_room(
                prompt.most_tokens,
                max_prompt_tokens=info.max_prompt_tokens,
                max_request_tokens=info.max_request_tokens,
                context_tokens=info.context_tokens,
            )
            sampling = request.sampling.engine_parameters(room_tokens)
            sampling |= output_constraint(
                request.conversation,
                prompt.channel,
                self._tokenizer,
                max_tokens=sampling["max_new_tokens"],
                single_call=request.single_call,
            )
            generation = Generation(
                # Ours, and of one length: the engine aborts every request whose id begins with the given one.
                rid=secrets.token_hex(16),
                ids=prompt.ids,
                sampling=sampling,
                cache_salt=request.tenant.cache_salt,
                top_logprobs=request.sampling.top_logprobs,
                highest=prompt.highest,
                images=prompt.images,
                in_steps=request.stream,
            )
            reader = MessageReader(
                self._tokenizer, prompt.channel, request.sampling, single_call=request.single_call
            )
            demand = Demand(
                rid=generation.rid,
                tenant=request.tenant.name,
                session=(place := _place(prompt)),
                prompt_tokens=prompt.most_tokens,
                output_tokens=sampling["max_new_tokens"],
                priority=request.priority,
                continued=prompt.parent is not None,
            )
            chunks = self._engines.generate(generation, place, demand)
            return Turn(
                prompt, reader, chunks, self, request, hold, held.pop_all(), started_at, generation.rid
            )

    async def abort(self, rid: str) -> None:
        """Have the engine abort a request; without effect when it has ended."""
        await self._engines.abort(rid)

    async def count(self, request: TurnRequest) -> int:
        """How many tokens the prompt has that `start` would send, with images at most so many.

        Raises InvalidRequest and QuotaExceeded.
        """
        with self._counting_refusals(request.tenant):
            await self.quotas.take_request(request.tenant)
        return (await self._assemble(request)).most_tokens

    async def record(self, tenant: Tenant, prompt: Prompt, completion: Completion) -> bool:
        """Record a turn and count it; whether the ledger has acknowledged it."""
        started_at = time.monotonic()
        recorded = await self._turns.record(prompt, completion)
        self.metrics.record.observe(time.monotonic() - started_at)
        if not recorded.stored:
            self.metrics.ledger_failures.inc()
        self.metrics.count_turn(tenant.name, prompt, completion.usage)
        return recorded.stored

    async def close(self) -> None:
        """Give the connections back."""
        await asyncio.gather(*self._announcing, return_exceptions=True)
        await self.quotas.close()
        if self._roots is not None:
            await self._roots.aclose()

    @contextmanager
    def _counting_refusals(self, tenant: Tenant) -> Generator[None]:
        try:
            yield
        except TooManyTurns:
            self.metrics.refused.labels(tenant.name, "max_concurrent_turns").inc()
            raise
        except QuotaExceeded as error:
            self.metrics.refused.labels(tenant.name, error.quota).inc()
            raise

    def _announce(self, request: TurnRequest, prompt: Prompt) -> None:
        """Tell the store whose pages these will be, and how long they are wanted.

        It knows long before the engine has computed any, and nobody waits for it: it may be down.
        """
        if self._roots is None:
            return
        tenant = request.tenant
        root = Root(tenant.name, request.ttl, tenant.max_cache_bytes)
        task = asyncio.create_task(self._roots.announce(prompt.ids, tenant.cache_salt, root))
        self._announcing.add(task)
        task.add_done_callback(self._announcing.discard)

    async def _prepare(self, request: TurnRequest) -> Prompt:
        started_at = time.monotonic()
        prompt = await self._assemble(request)
        self.metrics.prepare.observe(time.monotonic() - started_at)
        self.metrics.count_prompt(prompt)
        return prompt

    async def _assemble(self, request: TurnRequest) -> Prompt:
        try:
            return await self._turns.prepare(
                request.tenant.name, request.session, request.conversation, ttl=request.ttl
            )
        except ValueError as error:
            raise InvalidRequest(str(error), param=getattr(error, "field", None)) from None


def _place(prompt: Prompt) -> str:
    """What decides which engine serves a turn: its session, else the first turn of what it continues."""
    context = prompt.context
    name = context.session or (context.path[0].key if context.path else prompt.turn)
    return f"{context.tenant}\0{name}"
