"""Prometheus series of the store, from the process that holds it.

SGLang's `/metrics` collects the files of all its processes (prometheus_client's multiprocess mode): the
variable ``PROMETHEUS_MULTIPROC_DIR`` is set before a scheduler starts, so what is counted there appears among
SGLang's own series, summed over the ranks. Import this module only where that holds, or where one process is
all there is.
"""

import logging
import threading
import time

from prometheus_client import Counter, Gauge, Histogram

logger = logging.getLogger(__name__)

# From a lookup over a unix socket to a call that runs into its deadline.
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LOG_AGAIN_S = 60.0

LOOKUPS = Counter("longhaul_store_lookups", "Spans of pages looked up in the store")
LOOKUP_PAGES = Counter("longhaul_store_lookup_pages", "Pages looked up, by outcome", ["pool", "outcome"])
PAGES = Counter(
    "longhaul_store_pages", "Pages moved, by direction and outcome", ["pool", "direction", "outcome"]
)
BYTES = Counter("longhaul_store_bytes", "Payload bytes moved", ["pool", "direction"])
SECONDS = Histogram("longhaul_store_seconds", "Duration of calls to the store", ["call"], buckets=_SECONDS)
ERRORS = Counter("longhaul_store_errors", "Faults, each of them a miss and nothing more", ["kind"])
REFUSED = Counter("longhaul_store_refused_pages", "Pages not stored: their tenant is at its limit", ["pool"])
STATES = Counter("longhaul_store_states", "States superseded by newer ones, and found expired", ["outcome"])
CHAINS = Gauge(
    "longhaul_store_chains_waiting",
    "Chains whose lives are still to be looked at",
    multiprocess_mode="livesum",
)
RETRIES = Counter("longhaul_store_retries", "Failed writes taken up again, by outcome", ["outcome"])
BREAKER = Gauge(
    "longhaul_store_breaker", "0 closed, 1 half open, 2 open", ["server"], multiprocess_mode="livemax"
)
QUEUE_BYTES = Gauge(
    "longhaul_store_retry_queue_bytes", "Failed writes waiting to be retried", multiprocess_mode="livesum"
)


class Faults:
    """Counts every fault by kind, and logs the first of a kind, then at most one a minute. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged_at: dict[str, float] = {}

    def count(self, kind: str, detail: object, number: int = 1, *, trace: bool = False) -> None:
        """Count `number` faults of one kind; `trace` adds the present exception's stack to the log."""
        ERRORS.labels(kind).inc(number)
        now = time.monotonic()
        with self._lock:
            last = self._logged_at.get(kind)
            if last is not None and now - last < _LOG_AGAIN_S:
                return
            self._logged_at[kind] = now
        logger.warning(
            "store: %s: %s (a miss; logged once a minute, counted always)", kind, detail, exc_info=trace
        )

    def forget(self) -> None:
        """Log the next fault of each kind again: the server is back."""
        with self._lock:
            self._logged_at.clear()
