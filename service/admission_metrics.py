"""What admission tells Prometheus; there only where it is on."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_WAIT_BUCKETS_S: Final = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)


class AdmissionMetrics:
    """The series of all engines' admission."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"longhaul_admission_{name}", text, ("engine",), registry=registry)

        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(f"longhaul_admission_{name}", text, (label,), registry=registry)

        self.places = gauge("places", "Sessions with a place on the engine's device.")
        self.place_tokens = gauge("place_tokens", "Tokens that these are taken to need.")
        self.room_tokens = gauge("room_tokens", "Tokens that they may have.")
        self.waiting = gauge("waiting_turns", "Turns that wait for a place.")
        self.waited = counter("waited", "Turns that waited for a place.", "tenant")
        self.refused = counter("refused", "Turns that waited too long and were refused.", "tenant")
        self.restored = counter("restored", "Turns let in without a place, to be restored.", "tenant")
        self.taken_back = counter("taken_back", "Places that sessions lost: idle, outgrown.", "reason")
        self.wait = Histogram(
            "longhaul_admission_wait_seconds",
            "How long turns waited for a place.",
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
