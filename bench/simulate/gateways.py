"""A virtual cluster's gateways: each has a production router, fed with what has arrived by the time it decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from bench.simulate.calls import FIRST_GUESS_TOKENS, Call, ClusterSpec
from bench.simulate.fleet import ClusterWorker
from headrace.core.admission_records import Attainment, Reason, attainment
from headrace.core.lengths import OutputLengths
from headrace.core.records import FinishReason
from router.core.decision import Decision, RouteAsk
from router.core.foresight import Foresight
from router.core.placement import Mode, WorkerKey
from router.core.policies import Policy
from router.core.router import Router

OUTPUT_QUANTILE = 0.9
_NEW = 0.02
"""Weight of the newest answer in the average length."""


class Gateway:
    def __init__(self, number: int, spec: ClusterSpec, workers: Sequence[ClusterWorker]) -> None:
        self.number = number
        chance = Random(spec.seed * 1_000 + number).random
        self.router = Router(chance, spec.routing, Policy(spec.policy))
        self.foresight = Foresight()
        self._spec = spec
        self._workers = workers
        self._places = {worker.key: [0, 0] for worker in workers}
        """Changes and reports taken so far."""
        self._lengths = OutputLengths()
        self._output_tokens = float(FIRST_GUESS_TOKENS)
        for worker in workers:
            pool, role = worker.pool, worker.spec.role
            capacity, chunk = pool.num_blocks * pool.block_size, worker.spec.settings.chunk_tokens
            self.router.worker_up(worker.key, role, capacity, pool.block_size, worker.spec.lane, chunk_tokens=chunk)

    def catch_up(self, now: float) -> None:
        """Takes what has arrived. Each worker's changes come in order, and before the load that counts them."""
        for worker in self._workers:
            if not worker.alive:
                continue
            worker.report(now)
            place, published = self._places[worker.key], worker.published
            while place[0] < len(published.changes) and published.changes[place[0]][0] <= now:
                if not self.router.cache_changed(worker.key, published.changes[place[0]][1]):
                    raise RuntimeError("a cache change is missing although none is ever lost")
                place[0] += 1
            before = place[1]
            while place[1] < len(published.reports) and published.reports[place[1]].arrives_at <= now:
                place[1] += 1
            if place[1] > before:
                report = published.reports[place[1] - 1]
                self.router.report(worker.key, replace(report.load, submit_seq=report.submit_seq[self.number]))

    def refusal(self, call: Call, now: float) -> str:
        """Why a call that arrives now may not come in; "" when it may."""
        if not self._spec.refuse_lost_deadlines:
            return ""
        self.catch_up(now)
        call.outlook = self.router.outlook(self.ask(call, self._spec.mode), now)
        longest = self.predicted_tokens(call)
        shortest = self._lengths.quantile("", call.job.tenant, "", 1.0 - OUTPUT_QUANTILE) or 1
        forecast = self.foresight.forecast(call.outlook, min(shortest, longest), longest)
        chance = attainment(forecast, call.job.deadline_s)
        call.best_effort = chance is Attainment.DOUBTFUL
        return str(Reason.DEADLINE_LOST) if chance is Attainment.LOST else ""

    def ask(self, call: Call, mode: Mode) -> RouteAsk:
        done = len(call.token_times)
        left = call.max_tokens - done
        return RouteAsk(
            request_id=str(call.number),
            num_tokens=call.job.prompt_tokens + done,
            keys=call.prompt.keys,
            max_tokens=left,
            expected_output_tokens=max(1, min(left, round(self._output_tokens) - done)),
            mode=mode,
            excluded=call.excluded,
            tenant=call.job.tenant,
            may_wait=call.attempt == 0,
        )

    def book(self, decision: Decision, ask: RouteAsk, now: float) -> tuple[int, Callable[[], None]]:
        """(submit_seq to send, how to take the booking back)."""
        worker: WorkerKey = decision.worker
        seq = self.router.book(decision, ask, now)
        return seq, lambda: self.router.undo(worker, seq)

    def predicted_tokens(self, call: Call) -> int:
        """What a worker is told of the answer's length."""
        return self._lengths.predict("", call.job.tenant, "", call.max_tokens, OUTPUT_QUANTILE)

    def ended(self, call: Call, reason: FinishReason | None) -> None:
        if reason in (FinishReason.EOS, FinishReason.LENGTH):
            num_output = len(call.token_times)
            self._lengths.observe("", call.job.tenant, "", num_output)
            self._output_tokens += _NEW * (num_output - self._output_tokens)
            if call.outlook is not None and call.attempt == 1:
                times = call.token_times
                self.foresight.completed(call.outlook, num_output, times[0] - call.job.at_s, times[-1] - times[0])
        elif reason is FinishReason.DEADLINE and call.outlook is not None and not call.token_times:
            self.foresight.missed(call.outlook, (call.outcome.timeline.ended_at or call.job.at_s) - call.job.at_s)
        if call.decision is not None and call.token_times:
            self.router.completed(call.decision, (call.token_times[0] - call.job.at_s) * 1e3)
