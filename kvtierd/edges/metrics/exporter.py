"""Turns the daemon's figures into what a scraper reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from kvtierd.edges.histogram import Histogram
from kvtierd.edges.metrics import engines, events, process, tenants, tiers
from kvtierd.edges.metrics.family import PREFIX, Family, Figures, Kind

FAMILIES: tuple[Family, ...] = (
    *process.FAMILIES,
    *tiers.FAMILIES,
    *tenants.FAMILIES,
    *engines.FAMILIES,
    *events.FAMILIES,
)
"""Every metric of kvtierd, in the order in which it is exported; ``process_*`` come beside them."""


class Exporter:
    """The metrics of one daemon; ``figures`` is asked once per scrape."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def describe(self) -> Iterator[Metric]:
        """Name nothing: the registry would else collect at registration, before there is a daemon."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every family with all of its series."""
        figures = self._figures()
        for family in FAMILIES:
            yield _metric(family, figures)

    def render(self, accept: str) -> tuple[str, bytes]:
        """Return (content type, body) in the format that an Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)


def _metric(family: Family, figures: Figures) -> Metric:
    name = PREFIX + family.name
    readings = list(family.read(figures))
    if family.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, family.help, labels=family.labels)
        for labels, value in readings:
            assert isinstance(value, Histogram)
            histogram.add_metric(labels, value.cumulative(), value.sum)
        return histogram
    if family.kind is Kind.INFO:
        info = InfoMetricFamily(name, family.help)
        for labels, _ in readings:
            info.add_metric((), dict(zip(family.labels, labels, strict=True)))
        return info
    make = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = make(name, family.help, labels=family.labels)
    for labels, value in readings:
        assert not isinstance(value, Histogram)
        metric.add_metric(labels, value)
    return metric
