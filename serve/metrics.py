"""Prometheus metrics, with vLLM's names and the prefix `specjax:` or `vllm:`.

prometheus-client adds `_total` to counters. The engine's thread counts chunks and rounds, the event
loop requests and times.
"""

from __future__ import annotations

import dataclasses
from collections import Counter as Counts
from types import SimpleNamespace
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector as PrometheusCollector

from specjax.engine.sequence import News

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Replica(NamedTuple):
    """The state of one replica.

    Attributes:
      strategy: the strategy that the controller chose last, see `Controller.active`.
      running: number of samples that have a slot.
      waiting: number of samples that wait for a slot of this replica.
    """

    strategy: str
    running: int
    waiting: int


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of the engine after its last chunk.

    Attributes:
      running: number of samples that have a slot.
      waiting: number of samples that have none.
      pages_used: cache pages of all replicas that samples hold.
      pages: cache pages of all replicas.
      preemptions: number of preemptions since the start.
      prefix_queries: number of prompt tokens that were looked up in the prefix cache.
      prefix_hits: number of those that were found.
      compilations: number of compiled programs since the start.
      compiling: number of programs that are still to be compiled in the background.
      version: version of the weights.
      rejections: rejected drafts since the start, by cause; empty without telemetry.
      replicas: the state of each replica.
      bucket: compiled batch size of the last chunk, summed over replicas that run samples.
      alarms: messages about weights that are not finite.
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    compilations: int = 0
    compiling: int = 0
    version: int = 0
    rejections: dict[str, int] = dataclasses.field(default_factory=dict)
    replicas: tuple[Replica, ...] = ()
    bucket: int = 0
    alarms: tuple[str, ...] = ()

    @property
    def programs(self) -> dict[str, int]:
        """How many programs are ready and how many are left, for /health and /server_info."""
        return {"ready": self.compilations, "to_compile": self.compiling}


class Metrics(PrometheusCollector):
    """The counters of one server.

    Attributes:
      snapshot: state of the engine after its last chunk.
      registry: Prometheus registry of /metrics.
      sums: tokens and rounds of samples; rounds that drafted, their tokens, and drafted tokens.
      by_strategy: rounds of each strategy.
      drafted_at, accepted_at: rounds that drafted, and accepted a draft, at each depth.

    Args:
      model: name of the model.
      deepest: largest number of tokens that are drafted one after the other.
      prefix: prefix of all names; `vllm` adds the labels that all of vLLM's metrics have.
    """

    def __init__(self, model: str, deepest: int, prefix: str = "specjax"):
        disable_created_metrics()  # a second time series for each counter
        self.registry = CollectorRegistry(auto_describe=False)
        self._model, self._prefix = model, prefix
        self.snapshot = Snapshot()
        names = ("tokens", "rounds", "drafting", "drafting_tokens", "drafted")
        self.sums = dict.fromkeys(names, 0)
        self.by_strategy: Counts[str] = Counts()
        self.drafted_at, self.accepted_at = [0] * deepest, [0] * deepest
        self._drafts_of, self._accepted_of = Counts(), Counts()  # by replica
        self._last: dict[int, str] = {}  # bucket -> strategy of its last chunk
        registry = self.registry

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"specjax:{name}", text, labels, registry=registry)

        def times(name: str, text: str) -> Histogram:
            return Histogram(f"specjax:{name}", text, buckets=SECONDS, registry=registry)

        self._chunks = counter("chunks", "Chunks that ran.", ("strategy", "bucket"))
        stood = "Rounds that ran in another program, while the right one was compiled."
        self._stand_in_rounds = counter("stand_in_rounds", stood)
        self._chunk_rounds = counter("rounds", "Rounds that ran.", ("strategy", "bucket"))
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = counter("generation_tokens", "Tokens handed to clients.")
        self.ended = counter("request_success", "Samples that ended.", ("finished_reason",))
        self.aborted = counter("request_aborted", "Samples whose client went away.")
        self.answers = counter("http_requests", "Answered requests.", ("path", "status"))
        self.lost_lines = counter("log_errors", "Lines that could not be written to log_file.")
        self.updates = counter("weight_updates", "Updates of weights.", ("what",))
        between = "Between tokens: a chunk's share for each of its tokens."
        self.first_token = times("time_to_first_token_seconds", "From arrival, per sample.")
        self.per_token = times("inter_token_latency_seconds", between)
        self.latency = times("e2e_request_latency_seconds", "From arrival to the last token.")
        info = Gauge("specjax:model_info", "The model.", ("model",), registry=registry)
        info.labels(model).set(1)
        registry.register(self)

    # --- called in the engine's thread ------------------------------------------------------------

    def chunk(self, strategy: str, bucket: int, rounds: int, stands_in: bool) -> None:
        self._stand_in_rounds.inc(rounds * stands_in)
        self._chunks.labels(strategy, bucket).inc()
        self._chunk_rounds.labels(strategy, bucket).inc(rounds)
        self._last[bucket] = strategy
        self.by_strategy[strategy] += rounds

    def news(self, news: News, replica: int, fresh: int) -> None:
        """Counts the rounds of a sample of a replica.

        Args:
          news: new tokens and rounds of the sample.
          replica: number of the replica.
          fresh: number of tokens that were not counted before.
        """
        sums, rounds = self.sums, news.rounds
        sums["tokens"] += fresh
        sums["rounds"] += len(rounds)
        if not news.steps:
            return
        sums["drafting"] += len(rounds)
        sums["drafting_tokens"] += sum(rounds)
        sums["drafted"] += len(rounds) * news.rows
        self._drafts_of[replica] += len(rounds)
        self._accepted_of[replica] += sum(rounds) - len(rounds)
        for depth in range(news.steps):
            self.drafted_at[depth] += len(rounds)
            self.accepted_at[depth] += sum(tokens > depth + 1 for tokens in rounds)

    def accept_length(self, replica: int) -> float | None:
        """SGLang's accept length of a replica: tokens per round that drafted, bonus included.

        None before the first such round.
        """
        drafts = self._drafts_of[replica]
        return 1 + self._accepted_of[replica] / drafts if drafts else None

    # --- called by prometheus-client -------------------------------------------------------------

    def collect(self):
        """The metrics that are computed when Prometheus reads them."""
        now = self.snapshot
        for name, value, text in (
            ("num_requests_running", now.running, "Samples that have a slot."),
            ("num_requests_waiting", now.waiting, "Samples that have none."),
            ("kv_cache_pages_used", now.pages_used, "Cache pages that samples hold."),
            ("kv_cache_pages", now.pages, "Cache pages."),
            ("kv_cache_usage_perc", now.pages_used / max(now.pages, 1), "Share of pages used."),
            ("weight_version", now.version, "Version of the weights, 1 at start."),
            ("programs_to_compile", now.compiling, "Programs that are still to be compiled."),
            ("weight_alarms", len(now.alarms), "Sets of weights that are not finite."),
        ):
            yield GaugeMetricFamily(f"specjax:{name}", text, value)
        for name, value, text in (
            ("num_preemptions", now.preemptions, "Samples that were preempted."),
            ("compilations", now.compilations, "Programs that were compiled."),
            ("prefix_cache_queries", now.prefix_queries, "Prompt tokens that were looked up."),
            ("prefix_cache_hits", now.prefix_hits, "Prompt tokens that were not computed again."),
        ):
            yield CounterMetricFamily(f"specjax:{name}", text, value)
        drafts, accepted = self.sums["drafting"], self.sums["drafting_tokens"]
        for name, value, text in (
            ("drafts", drafts, "Rounds that drafted."),
            ("draft_tokens", self.sums["drafted"], "Drafted tokens that were verified."),
            ("accepted_tokens", accepted - drafts, "Drafted tokens that were emitted."),
        ):
            yield CounterMetricFamily(f"specjax:spec_decode_num_{name}", text, value)
        for kind, name, text, labels, values in (
            (
                CounterMetricFamily,
                "spec_decode_num_accepted_tokens_per_pos",
                "Rounds that accepted a draft at this depth, from 0.",
                ("position",),
                {(str(place),): hits for place, hits in enumerate(self.accepted_at)},
            ),
            (
                CounterMetricFamily,
                "spec_decode_num_rejections",
                "Rounds that ended in a rejected draft, by cause.",
                ("cause",),
                {(cause,): count for cause, count in now.rejections.items()},
            ),
            (
                GaugeMetricFamily,
                "active_strategy",
                "1 for the strategy that a batch of this size ran last.",
                ("bucket", "strategy"),
                {(str(bucket), name): 1 for bucket, name in sorted(self._last.copy().items())},
            ),
        ):
            family = kind(f"specjax:{name}", text, labels=labels)
            for key, value in values.items():
                family.add_metric(key, value)
            yield family

    def text(self) -> bytes:
        if self._prefix == "specjax":
            return generate_latest(self.registry)
        labels, families = {"model_name": self._model, "engine": "0"}, []
        for family in self.registry.collect():
            family.name = f"{self._prefix}:{family.name.partition(':')[2]}"
            family.samples = [
                sample._replace(
                    name=f"{self._prefix}:{sample.name.partition(':')[2]}",
                    labels=labels | sample.labels,
                )
                for sample in family.samples
            ]
            families.append(family)
        return generate_latest(SimpleNamespace(collect=lambda: families))
