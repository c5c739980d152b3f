"""What Prometheus reads at /metrics. Whatever can be a counter is one.

Names are vLLM's with the prefix `specjax:`; prometheus-client adds `_total` to counters. The thread
that owns the engine counts chunks and rounds, the event loop requests and times.
"""

from __future__ import annotations

import dataclasses

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector as PrometheusCollector

from specjax.engine.watch import News

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The engine as it stood after its last chunk.

    Attributes:
      running, waiting: samples. pages_used, pages: of the caches, in all.
      preemptions, compilations: so far. version: of the weights.
      rejections: so far, by cause; empty without telemetry.
      strategies: what the controllers chose last. bucket: of the last chunk, summed over the
        replicas that run anything.
      alarms: what is wrong with the weights, in words.
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    preemptions: int = 0
    compilations: int = 0
    version: int = 0
    rejections: dict[str, int] = dataclasses.field(default_factory=dict)
    strategies: tuple[str, ...] = ()
    bucket: int = 0
    alarms: tuple[str, ...] = ()


class Metrics(PrometheusCollector):
    """The counters of one server.

    Attributes:
      snapshot: to be replaced after every chunk.
      registry: what /metrics shows. rounds, accepted: of all samples, those that drafted nothing
        included.
    """

    def __init__(self, model: str):
        disable_created_metrics()  # a second series for each, with the time of its birth
        self.registry = CollectorRegistry(auto_describe=False)
        self.snapshot = Snapshot()
        self.rounds = self.accepted = 0
        self._last: dict[int, str] = {}  # bucket -> strategy of its last chunk
        registry = self.registry

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"specjax:{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"specjax:{name}", text, registry=registry, buckets=SECONDS)

        spec = "spec_decode_num_"
        self._drafts = counter(spec + "drafts", "Rounds that drafted.")
        self._drafted = counter(spec + "draft_tokens", "Drafted tokens that were verified.")
        self._accepted = counter(spec + "accepted_tokens", "Drafted tokens that were emitted.")
        self._per_pos = counter(
            spec + "accepted_tokens_per_pos",
            "Rounds that accepted a draft at this depth, from 0.",
            ("position",),
        )
        self._chunks = counter("chunks", "Chunks that ran.", ("strategy", "bucket"))
        self._chunk_rounds = counter("rounds", "Rounds that ran.", ("strategy", "bucket"))
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = counter("generation_tokens", "Tokens handed to clients.")
        self.ended = counter("request_success", "Samples that ended.", ("finished_reason",))
        self.aborted = counter("request_aborted", "Samples whose client went away.")
        self.answers = counter("http_requests", "Answers.", ("path", "status"))
        self.lost_lines = counter("log_errors", "Lines that could not be written to log_file.")
        self.updates = counter("weight_updates", "Weights that were swapped in.", ("what",))
        self.first_token = histogram("time_to_first_token_seconds", "From arrival, per sample.")
        self.per_token = histogram(
            "inter_token_latency_seconds", "Between tokens: a chunk's share for each of its tokens."
        )
        self.latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        info = Gauge("specjax:model_info", "The model.", ("model",), registry=registry)
        info.labels(model).set(1)
        registry.register(self)

    # --- told by the engine's thread --------------------------------------------------------------

    def chunk(self, strategy: str, bucket: int, rounds: int) -> None:
        self._chunks.labels(strategy, bucket).inc()
        self._chunk_rounds.labels(strategy, bucket).inc(rounds)
        self._last[bucket] = strategy

    def news(self, news: News) -> None:
        """Counts a sample's rounds."""
        accepted = sum(news.rounds) - len(news.rounds)
        self.rounds += len(news.rounds)
        self.accepted += accepted
        if not news.steps:
            return
        self._drafts.inc(len(news.rounds))
        self._drafted.inc(len(news.rounds) * news.rows)
        self._accepted.inc(accepted)
        for position in range(max(news.rounds) - 1):
            hits = sum(count > position + 1 for count in news.rounds)
            self._per_pos.labels(position).inc(hits)

    @property
    def accept_length(self) -> float | None:
        """Tokens per round, bonus included; None before the first."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    # --- read by Prometheus ----------------------------------------------------------------------

    def collect(self):
        """What is counted elsewhere, or is as it is."""
        now = self.snapshot
        for name, value, text in (
            ("num_requests_running", now.running, "Samples that have a slot."),
            ("num_requests_waiting", now.waiting, "Samples that have none."),
            ("kv_cache_pages_used", now.pages_used, "Cache pages that samples hold."),
            ("kv_cache_pages", now.pages, "Cache pages there are."),
            ("kv_cache_usage_perc", now.pages_used / max(now.pages, 1), "Their quotient."),
            ("weight_version", now.version, "Of the weights, 1 at start."),
            ("weight_alarms", len(now.alarms), "Sets of weights that are not finite."),
        ):
            yield GaugeMetricFamily(f"specjax:{name}", text, value)
        for name, value, text in (
            ("num_preemptions", now.preemptions, "Samples that had to make room."),
            ("compilations", now.compilations, "Programs that were compiled."),
        ):
            yield CounterMetricFamily(f"specjax:{name}", text, value)
        yield self._by_cause(now)
        active = GaugeMetricFamily(
            "specjax:active_strategy",
            "1 for the strategy that a batch of this size ran last.",
            labels=("bucket", "strategy"),
        )
        for bucket, strategy in sorted(self._last.copy().items()):
            active.add_metric((str(bucket), strategy), 1)
        yield active

    def _by_cause(self, now: Snapshot) -> Metric:
        rejections = CounterMetricFamily(
            "specjax:spec_decode_num_rejections",
            "Rounds that ended in a rejected draft, by cause.",
            labels=("cause",),
        )
        for cause, count in now.rejections.items():
            rejections.add_metric((cause,), count)
        return rejections

    def text(self) -> bytes:
        return generate_latest(self.registry)
