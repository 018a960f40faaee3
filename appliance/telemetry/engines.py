"""What each engine counts, read at every scrape: nothing is asked of an engine, so a scrape wakes nobody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from inferd.appliance.supervisor.served import ServedModel
from inferd.appliance.supervisor.slot import EngineSlot
from inferd.appliance.supervisor.states import ModelState
from inferd.appliance.supervisor.supervisor import Supervisor
from inferd.appliance.telemetry.latency import ENGINE, LABELS
from inferd.engine.insight.histogram import STEP_TOKENS_BUCKETS
from inferd.engine.messages import SchedulerStats

COUNTERS = {
    "prefix_queried_tokens": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits", "Of them, those that were found"),
    "preemptions": ("vllm:num_preemptions", "Requests that gave their blocks back"),
    "prompt_tokens": ("vllm:prompt_tokens", "Prompt tokens computed or found"),
    "generated_tokens": ("vllm:generation_tokens", "Tokens of answers"),
    "corrupted": ("vllm:corrupted_requests", "Requests whose logits were no numbers"),
    "evictions": ("inferd_kv_evictions", "Cached blocks given away"),
}
SLEEP_STATES = {
    "awake": (ModelState.READY, ModelState.DRAINING),
    "weights_offloaded": (ModelState.SLEEPING_1,),
    "discard_all": (ModelState.SLEEPING_2,),
}


class EngineCollector(Collector):
    """Counters go on over restarts of an engine, which begins at 0 again."""

    def __init__(self, supervisor: Supervisor[ServedModel]) -> None:
        self._supervisor = supervisor
        self._carried: dict[str, _Carried] = {}

    def collect(self) -> Iterator[Metric]:
        slots = self._supervisor.slots
        totals = {slot.model: self._total(slot) for slot in slots}
        yield from _gauges(slots)
        for field, (name, text) in COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=LABELS)
            for model, total in totals.items():
                family.add_metric((model, ENGINE), getattr(total, field))
            yield family
        yield from _speculation(totals)
        yield _step_tokens(totals)

    def _total(self, slot: EngineSlot[ServedModel]) -> SchedulerStats:
        carried = self._carried.setdefault(slot.model, _Carried(SchedulerStats()))
        if slot.process is not None:
            carried.see(slot.process.pid, slot.process.llm.stats)
        return carried.total()


@dataclass
class _Carried:
    """Sums of engines that are gone, and the present one's."""

    before: SchedulerStats
    present: SchedulerStats | None = None
    pid: int = 0

    def see(self, pid: int, stats: SchedulerStats) -> None:
        if pid != self.pid:
            self.before, self.pid = self.total(), pid
        self.present = stats

    def total(self) -> SchedulerStats:
        return self.before if self.present is None else _added(self.before, self.present)


def _added(one: SchedulerStats, other: SchedulerStats) -> SchedulerStats:
    summed = SchedulerStats()
    for field in (*COUNTERS, "step_tokens_sum", "step"):
        setattr(summed, field, getattr(one, field) + getattr(other, field))
    for field in ("step_tokens", "drafted", "accepted"):
        setattr(summed, field, _sum_lists(getattr(one, field), getattr(other, field)))
    return summed


def _sum_lists(one: list[int], other: list[int]) -> list[int]:
    length = max(len(one), len(other))
    padded = [values + [0] * (length - len(values)) for values in (one, other)]
    return [first + second for first, second in zip(*padded, strict=True)]


def _gauges(slots: Iterable[EngineSlot[ServedModel]]) -> Iterator[Metric]:
    running = GaugeMetricFamily("vllm:num_requests_running", "Requests in the engine's batch", labels=LABELS)
    waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait, here or in the engine", labels=LABELS)
    reasons = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Those of the engine's queue", labels=(*LABELS, "reason")
    )
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", labels=LABELS)
    sleep = GaugeMetricFamily("vllm:engine_sleep_state", "1 for the present one", labels=(*LABELS, "sleep_state"))
    starts = CounterMetricFamily("inferd_engine_starts", "Starts of an engine process", labels=LABELS)
    for slot in slots:
        labels = (slot.model, ENGINE)
        stats = slot.process.llm.stats if slot.process is not None else SchedulerStats()
        running.add_metric(labels, stats.running)
        waiting.add_metric(labels, stats.waiting + slot.door.num_waiting)
        reasons.add_metric((*labels, "capacity"), stats.waiting - stats.deferred)
        reasons.add_metric((*labels, "deferred"), stats.deferred)
        used = stats.blocks_total - stats.blocks_free
        usage.add_metric(labels, used / stats.blocks_total if stats.blocks_total else 0.0)
        for name, states in SLEEP_STATES.items():
            sleep.add_metric((*labels, name), float(slot.state in states))
        starts.add_metric(labels, slot.num_starts)
    yield from (running, waiting, reasons, usage, sleep, starts)


def _speculation(totals: dict[str, SchedulerStats]) -> Iterator[Metric]:
    drafts = CounterMetricFamily("vllm:spec_decode_num_drafts", "Drafts that were checked", labels=LABELS)
    drafted = CounterMetricFamily("vllm:spec_decode_num_draft_tokens", "Tokens of drafts", labels=LABELS)
    accepted = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens", "Of them, those that stood", labels=LABELS)
    by_place = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "The same by place in a draft", labels=(*LABELS, "position")
    )
    for model, total in totals.items():
        drafts.add_metric((model, ENGINE), total.drafted[0] if total.drafted else 0)
        drafted.add_metric((model, ENGINE), sum(total.drafted))
        accepted.add_metric((model, ENGINE), sum(total.accepted))
        for place, count in enumerate(total.accepted):
            by_place.add_metric((model, ENGINE, str(place)), count)
    yield from (drafts, drafted, accepted, by_place)


def _step_tokens(totals: dict[str, SchedulerStats]) -> Metric:
    """A histogram, despite its name."""
    family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step", labels=LABELS)
    for model, total in totals.items():
        counts, seen, buckets = total.step_tokens, 0, []
        for bound, count in zip((*map(float, STEP_TOKENS_BUCKETS), None), counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound is None else str(bound), seen))
        family.add_metric((model, ENGINE), buckets, total.step_tokens_sum)
    return family
