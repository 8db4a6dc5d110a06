"""The gateway's own Prometheus series. The engine's stand beside them on the same page."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from service.conversation import Usage
from service.turns import Prompt

# A cached turn of a small model answers in milliseconds, a cold prefill of 1M tokens in minutes.
_TTFT_BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
_DURATION_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600, 1800, 3600)
_OWN_WORK_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Every series of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answered requests.", "route", "status", "tenant")
        self.duration = self._histogram(
            "request_duration_seconds", "From request to last byte.", _DURATION_BUCKETS_S, "route"
        )
        self.ttft = self._histogram(
            "ttft_seconds", "From request to the engine's first tokens.", _TTFT_BUCKETS_S
        )
        self.prepare = self._histogram(
            "prepare_seconds", "Assembling the prompt, ledger included.", _OWN_WORK_BUCKETS_S
        )
        self.record = self._histogram(
            "record_seconds", "Recording a turn in the ledger.", _OWN_WORK_BUCKETS_S
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of completed turns.", "tenant")
        self.completion_tokens = self._counter(
            "completion_tokens", "Generated tokens of completed turns.", "tenant"
        )
        self.reasoning_tokens = self._counter(
            "reasoning_tokens", "Generated tokens in the think channel.", "tenant"
        )
        self.cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens that were not computed.", "tenant", "tier"
        )
        self.turns = self._counter(
            "turns", "Completed turns, by whether they continued a recorded one.", "tenant", "origin"
        )
        self.continued_tokens = self._counter(
            "continued_tokens", "Prompt tokens taken from recorded turns.", "tenant"
        )
        self.restored = self._counter(
            "restored", "What clients dropped or rewrote and the ledger gave back.", "what"
        )
        self.fallbacks = self._counter("fallbacks", "Prompts rendered without the ledger.", "reason")
        self.replaced_images = self._counter("replaced_images", "Images that a text stood in for.")
        self.images = self._counter("images", "Images that were passed on to the engine.")
        self.divergences = self._counter(
            "divergences", "Prompts whose history differs from what is recorded."
        )
        self.aborted = self._counter(
            "aborted_turns", "Turns that were not completed, and so not recorded.", "cause"
        )
        self.refused = self._counter("refused", "Requests beyond a tenant's quota.", "tenant", "quota")
        self.quota_fallbacks = self._counter(
            "quota_fallbacks", "Requests whose quotas this gateway counted alone: the ledger did not answer."
        )
        self.ledger_failures = self._counter("ledger_failures", "Turns that the ledger did not acknowledge.")
        self.engine_turns = self._counter("engine_turns", "Turns begun, by the engine's address.", "engine")
        self.moved = self._counter("moved_turns", "Turns begun by another engine than their session's own.")
        self.engine_ready = Gauge(
            "longhaul_engine_ready",
            "Whether an engine takes requests, by its address.",
            ("engine",),
            registry=self.registry,
        )
        self.running = Gauge("longhaul_running_turns", "Turns under way.", registry=self.registry)
        self.encoding_verified = Gauge(
            "longhaul_encoding_verified",
            "1: the prompts rendered here are the engine's own; 0: they differ; -1: not compared yet.",
            registry=self.registry,
        )
        self.encoding_verified.set(-1)

    def count_prompt(self, prompt: Prompt) -> None:
        """Count how a prompt came about."""
        if prompt.restored_reasoning:
            self.restored.labels("reasoning").inc(prompt.restored_reasoning)
        if prompt.restored_ids:
            self.restored.labels("call_ids").inc(prompt.restored_ids)
        if prompt.images:
            self.images.inc(len(prompt.images))
        if prompt.fallback is not None:
            self.fallbacks.labels(prompt.fallback).inc()
        if prompt.divergence is not None:
            self.divergences.inc()

    def count_turn(self, tenant: str, prompt: Prompt, usage: Usage) -> None:
        """Count a completed turn."""
        self.turns.labels(tenant, "fresh" if prompt.parent is None else "continued").inc()
        self.continued_tokens.labels(tenant).inc(prompt.continued_tokens)
        self.prompt_tokens.labels(tenant).inc(usage.prompt_tokens)
        self.completion_tokens.labels(tenant).inc(usage.completion_tokens)
        self.reasoning_tokens.labels(tenant).inc(usage.reasoning_tokens)
        self.cached_tokens.labels(tenant, "device").inc(usage.cached_device_tokens)
        self.cached_tokens.labels(tenant, "host").inc(usage.cached_host_tokens)
        self.cached_tokens.labels(tenant, "storage").inc(usage.cached_storage_tokens)

    def page(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"longhaul_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"longhaul_{name}", text, labels, buckets=buckets, registry=self.registry)
