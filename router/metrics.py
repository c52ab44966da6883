"""What the doors see of requests, for Prometheus: native `headrace_*` names with vLLM's suffixes. Definitions: SPEC.

Server side: times are taken where a delta leaves the gateway's core, on the gateway's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headrace.errors import Code
from router.api import Delta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_E2E_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOOL_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class DoorMetrics:
    """One gateway's door metrics in a registry of their own. The gateway may add collectors of its own series to
    `registry`, and those of workers' series, which every gateway has, to `worker_registry`.
    """

    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.worker_registry = CollectorRegistry()
        self.refresh: Callable[[], Awaitable[None]] | None = None
        """Brings up to date what is collected, before each scrape; set by whoever adds collectors."""
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, ("model_name",), registry=self.registry, buckets=buckets)
            return made.labels(model)

        self._requests = counter("headrace_requests", "Requests ended, by door and status code", "endpoint", "code")
        self._fallbacks = counter(
            "headrace_fallback_requests", "Refused calls sent to the fallback deployment, by what came of it", "outcome"
        )
        self._success = counter("headrace_request_success", "Choices ended normally, by reason", "finished_reason")
        self.prompt_tokens = counter("headrace_prompt_tokens", "Prompt tokens of started requests").labels(model)
        self.cached_tokens = counter("headrace_prompt_tokens_cached", "Prompt tokens not computed").labels(model)
        self.generation_tokens = counter("headrace_generation_tokens", "Output tokens delivered").labels(model)
        self.live = Gauge(
            "headrace_num_requests_live", "Requests inside the gateway", ("model_name",), registry=self.registry
        ).labels(model)
        self.paused = Gauge(
            "headrace_num_choices_paused", "Choices that wait for a tool", ("model_name",), registry=self.registry
        ).labels(model)
        self.tool_wait = histogram(
            "headrace_tool_wait_seconds", "From the last token of a tool call to the tool's answer", _TOOL_S
        )
        self.ttft = histogram("headrace_time_to_first_token_seconds", "Received to first token", _TTFT_S)
        self.itl = histogram("headrace_inter_token_latency_seconds", "Between tokens of one choice", _ITL_S)
        self.tpot = histogram(
            "headrace_time_per_output_token_seconds", "First to last token by n - 1; none for one token", _ITL_S
        )
        self.e2e = histogram("headrace_e2e_request_latency_seconds", "Received to complete", _E2E_S)
        self.request_prompt_tokens = histogram("headrace_request_prompt_tokens", "Prompt tokens a request", _TOKENS)
        self.request_generation_tokens = histogram(
            "headrace_request_generation_tokens", "Output tokens a request", _TOKENS
        )

    def refused(self, endpoint: str, code: Code | str) -> None:
        """A request that ended before it reached the gateway's core."""
        self._requests.labels(self._model, endpoint, str(code)).inc()

    def fell_back(self, outcome: str) -> None:
        self._fallbacks.labels(self._model, outcome).inc()

    def begin(self, endpoint: str, num_prompt: int, received_at: float) -> RequestMeter:
        return RequestMeter(self, endpoint, num_prompt, received_at)

    def ended(self, endpoint: str, code: str) -> None:
        self._requests.labels(self._model, endpoint, code).inc()

    def choice_ended(self, reason: str) -> None:
        self._success.labels(self._model, reason).inc()

    async def scrape(self) -> bytes:
        """The text format of Prometheus: all that this gateway knows."""
        if self.refresh is not None:
            await self.refresh()
        return self.text() + self.workers_text()

    def text(self) -> bytes:
        """The gateway's own series."""
        return generate_latest(self.registry)

    def workers_text(self) -> bytes:
        """The workers' series, as they were told last."""
        return generate_latest(self.worker_registry)


class RequestMeter:
    """Follows one call. `delta` for each delta as it goes out, `end` exactly once."""

    __slots__ = ("_endpoint", "_metrics", "_num_prompt", "_paused_at", "_received_at", "_spans", "_tokens")

    def __init__(self, metrics: DoorMetrics, endpoint: str, num_prompt: int, received_at: float) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._num_prompt = num_prompt
        self._received_at = received_at
        self._spans: dict[int, tuple[float, float, int]] = {}
        """First and last token's instant and the tokens so far, by branch."""
        self._tokens = 0
        self._paused_at: dict[int, float] = {}
        metrics.live.inc()

    def delta(self, delta: Delta, now: float) -> None:
        """k tokens together are one gap and k-1 zeros; a branch's first token has no gap, nor has the first behind a
        tool's answer, and what lies between is no part of the time that tokens took."""
        tokens = len(delta.token_ids)
        paused_at = self._paused_at.pop(delta.index, None)
        if paused_at is not None:
            self._metrics.paused.dec()
        if tokens:
            if not self._spans:
                self._metrics.ttft.observe(now - self._received_at)
                self._metrics.prompt_tokens.inc(self._num_prompt)
            first, last, before = self._spans.get(delta.index, (now, now, 0))
            if paused_at is not None:
                first += now - paused_at
            elif before:
                self._metrics.itl.observe(now - last)
            for _ in range(tokens - 1):
                self._metrics.itl.observe(0.0)
            self._spans[delta.index] = (first, now, before + tokens)
            self._tokens += tokens
            self._metrics.generation_tokens.inc(tokens)
        if delta.paused:
            self._paused_at[delta.index] = now
            self._metrics.paused.inc()
        if delta.finish_reason is not None:
            self._metrics.choice_ended(delta.finish_reason)
        if delta.usage is not None:
            self._metrics.prompt_tokens.inc(delta.usage.prompt_tokens - self._num_prompt)
            self._metrics.cached_tokens.inc(delta.usage.cached_tokens)

    def end(self, code: Code | None, now: float) -> None:
        """None: completed. Only a completed request counts in latency and length."""
        metrics = self._metrics
        metrics.live.dec()
        metrics.paused.dec(len(self._paused_at))
        metrics.ended(self._endpoint, "OK" if code is None else str(code))
        if code is None:
            for first, last, tokens in self._spans.values():
                if tokens > 1:
                    metrics.tpot.observe((last - first) / (tokens - 1))
            metrics.e2e.observe(now - self._received_at)
            metrics.request_prompt_tokens.observe(self._num_prompt)
            metrics.request_generation_tokens.observe(self._tokens)
