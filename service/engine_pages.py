"""Prometheus pages of several engines as one page: each series gets a label that says whose it is."""

import logging
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

LABEL = "engine"


class _Families(Collector):
    """Families that were read, given out again."""

    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        yield from self._families.values()


def merge_pages(pages: Mapping[str, bytes]) -> bytes:
    """One page (text format 0.0.4) of many, by the engines' names; what can't be read is left out."""
    merged: dict[str, Metric] = {}
    for name, page in pages.items():
        try:
            families = list(text_string_to_metric_families(page.decode()))
        except ValueError as error:
            log.warning("the metrics of engine %s can't be read: %s", name, error)
            continue
        for family in families:
            # A page may hold one family in several pieces (SGLang gathers those of its processes).
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [
                sample._replace(labels={**sample.labels, LABEL: name}) for sample in family.samples
            ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(merged))
    return generate_latest(registry)
