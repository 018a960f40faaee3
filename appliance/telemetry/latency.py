"""Latency histograms under vLLM's names, so that dashboards made for it show this daemon too."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from inferd.engine.frontend.stats import FinishedChoice

LABELS = ("model_name", "engine")
ENGINE = "0"
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
TIMES = {
    "e2e_s": ("e2e_request_latency_seconds", "From arrival to the last token", REQUEST_S),
    "queue_s": ("request_queue_time_seconds", "In the engine's queue", REQUEST_S),
    "prefill_s": ("request_prefill_time_seconds", "From the first schedule to the first token", REQUEST_S),
    "decode_s": ("request_decode_time_seconds", "From the first token to the last", REQUEST_S),
    "inference_s": ("request_inference_time_seconds", "Prefill and decode", REQUEST_S),
    "time_per_output_token_s": ("request_time_per_output_token_seconds", "Without the first token", TOKEN_S),
    "prompt_tokens": ("request_prompt_tokens", "Tokens of a prompt", TOKENS),
    "output_tokens": ("request_generation_tokens", "Tokens of an answer", TOKENS),
    "computed_prompt_tokens": ("request_prefill_kv_computed_tokens", "Prompt tokens that were not cached", TOKENS),
    "max_tokens": ("request_params_max_tokens", "What a request allowed", TOKENS),
    "longest_output_tokens": ("request_max_num_generation_tokens", "Of the longest answer", TOKENS),
    "num_choices": ("request_params_n", "Answers to one request", CHOICES),
}
"""What of a `FinishedChoice` goes into which histogram; None goes into none."""


class LatencyMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=registry)

        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token", FIRST_TOKEN_S)
        self.next_token = histogram("inter_token_latency_seconds", "Between tokens of one answer", TOKEN_S)
        self.finished = {field: histogram(*spec) for field, spec in TIMES.items()}
        self.success = Counter(
            "vllm:request_success", "Requests by how they ended", (*LABELS, "finished_reason"), registry=registry
        )

    def of_model(self, model: str) -> ModelLatency:
        """Its series exist from now on."""
        return ModelLatency(self, model)


class ModelLatency:
    """Implements `LatencyObserver` for one model."""

    def __init__(self, metrics: LatencyMetrics, model: str) -> None:
        labels = (model, ENGINE)
        self._labels = labels
        self._success = metrics.success
        self._first = metrics.first_token.labels(*labels)
        self._next = metrics.next_token.labels(*labels)
        self._finished = {field: histogram.labels(*labels) for field, histogram in metrics.finished.items()}

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, count: int) -> None:
        for _ in range(count):
            self._next.observe(seconds / count)

    def finished(self, choice: FinishedChoice) -> None:
        self._success.labels(*self._labels, choice.finish_reason.value).inc()
        for field, histogram in self._finished.items():
            if (value := getattr(choice, field)) is not None:
                histogram.observe(value)
