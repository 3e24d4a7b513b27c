"""The service's counters in Prometheus' text format. The names are documented here alone."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .calls import CallQueue


def text(queue: CallQueue) -> str:
    """All metrics, as `/metrics` answers them."""
    registry = CollectorRegistry()
    registry.register(_Now(queue))
    return generate_latest(registry).decode()


class _Now:
    """What a scrape finds; counters get the suffix `_total`."""

    def __init__(self, queue: CallQueue):
        self._queue = queue

    def collect(self) -> list[Metric]:
        queue, counters = self._queue, self._queue.counters
        return [
            GaugeMetricFamily("sandbox_waiting_calls", "in the queue", queue.waiting),
            GaugeMetricFamily("sandbox_running_calls", "in a worker", queue.running),
            GaugeMetricFamily("sandbox_held_bytes", "of programs and inputs", queue.held_bytes),
            _by("level", GaugeMetricFamily, "sandbox_level", "isolation", {queue.sandbox.level: 1}),
            CounterMetricFamily("sandbox_accepted_calls", "taken in", counters.accepted),
            CounterMetricFamily("sandbox_refused_calls", "the queue was full", counters.refused),
            CounterMetricFamily("sandbox_repeated_calls", "an id came again", counters.repeated),
            CounterMetricFamily("sandbox_run_seconds", "sum over calls", counters.run_seconds),
            CounterMetricFamily("sandbox_queue_seconds", "sum over calls", counters.queue_seconds),
            _by("status", CounterMetricFamily, "sandbox_ended_calls", "run", counters.statuses),
            _by("reason", CounterMetricFamily, "sandbox_not_run_calls", "", counters.not_run),
        ]


def _by(label: str, kind: type, name: str, what: str, values: dict) -> Metric:
    family = kind(name, f"{what}, by {label}".lstrip(", "), labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
