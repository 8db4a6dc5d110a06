"""What a simulation comes to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from model.capacity.budget import Budget
from model.capacity.machine import Machine
from model.simulation.admission import Admission
from model.simulation.events import Events
from model.simulation.loop import Loop
from model.simulation.node import Node, StoreSettings
from model.simulation.workload import Script
from replay.report import Distribution, distribution

POLICIES: Final[tuple[str, ...]] = ("sglang", "admission", "redis", "redis+admission")


@dataclass(frozen=True, slots=True)
class Policy:
    """SGLang alone, or with a store, or with admission, or both."""

    name: str

    def __post_init__(self) -> None:
        assert self.name in POLICIES, self.name

    @property
    def store(self) -> bool:
        """Whether there is a store."""
        return "redis" in self.name

    @property
    def admission(self) -> bool:
        """Whether sessions are admitted."""
        return "admission" in self.name


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one concurrency. Shares of prompt tokens; times in seconds; rates a second but for turns.

    `hit` is what was not computed: `hit_device` + `hit_host` + `hit_store`. `theoretical` is what an infinite
    cache would have had. TTFT runs from when the turn was due.
    """

    policy: str
    concurrency: int
    requests: int
    duration_s: float
    turns_per_hour: float
    hit: float
    hit_device: float
    hit_host: float
    hit_store: float
    theoretical: float
    recompute: float
    ttft: Distribution
    end_to_end_s_per_output_token_p90: float
    prefill_busy: float
    prefill_kv_bytes_s: float
    store_read_bytes_s: float
    store_write_bytes_s: float
    store_peak_bytes: float
    waited: int

    @property
    def hit_ratio(self) -> float:
        """The hit rate by the theoretical one."""
        return self.hit / self.theoretical if self.theoretical else 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the points of a sweep have in common; times in seconds.

    Sessions begin `start_spacing_s` apart, on the mean; with `once` all at once, each a single time. `hold_s`
    is how long an idle session keeps its place under admission, `hold_with_store_s` when there is a store to
    come back from.
    """

    requests: int = 3000
    seed: int = 0
    start_share: float = 0.75
    start_spacing_s: float = 10.0
    once: bool = False
    share: float = 0.95
    hold_s: float = 120.0
    hold_with_store_s: float = 10.0
    store: StoreSettings = field(default_factory=StoreSettings)


def simulate(
    machine: Machine,
    budget: Budget,
    scripts: Sequence[Script],
    policy: Policy,
    concurrency: int,
    settings: Settings,
) -> Point:
    """Run one policy at one concurrency."""
    events = Events()
    node = Node(machine, budget, events, settings.store if policy.store else None)
    hold_s = settings.hold_with_store_s if policy.store else settings.hold_s
    admission = Admission(events, budget, hold_s, settings.share, policy.store) if policy.admission else None
    loop = Loop(
        node,
        events,
        scripts,
        concurrency,
        settings.requests,
        settings.seed,
        admission,
        settings.start_share,
        settings.start_spacing_s * concurrency,
        warm_up=2 * concurrency,
        once=settings.once,
    )
    loop.run()
    for tier in node.tiers:
        tier.check_integrity()
    records = loop.records
    assert records, "no request was measured"
    total = sum(record.call.input_tokens for record in records)
    computed = sum(record.computed_tokens for record in records)
    device, host, store = (sum(record.hits[tier] for record in records) / total for tier in range(3))
    ttft = distribution(record.first_token_s - record.due_s for record in records)
    end_to_end = distribution((r.end_s - r.due_s) / r.call.output_tokens for r in records)
    assert ttft and end_to_end
    duration_s = max(events.now_s - loop.begin_s, 1e-9)
    whole_s = max(events.now_s, 1e-9)
    return Point(
        policy=policy.name,
        concurrency=concurrency,
        requests=len(records),
        duration_s=duration_s,
        turns_per_hour=len(records) / duration_s * 3600,
        hit=device + host + store,
        hit_device=device,
        hit_host=host,
        hit_store=store,
        theoretical=sum(record.call.prefix_tokens for record in records) / total,
        recompute=computed / total,
        ttft=ttft,
        end_to_end_s_per_output_token_p90=end_to_end.p90,
        prefill_busy=computed / machine.prefill_tokens_s / duration_s,
        prefill_kv_bytes_s=computed * budget.kv_bytes_per_token / duration_s,
        store_read_bytes_s=node.traffic.read_bytes / whole_s,
        store_write_bytes_s=node.traffic.written_bytes / whole_s,
        store_peak_bytes=node.traffic.peak_bytes,
        waited=admission.waited if admission else 0,
    )
