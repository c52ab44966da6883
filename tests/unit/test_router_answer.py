"""What the consumer of a call is told, whatever order the workers' and its own ends come in."""

from __future__ import annotations

import asyncio

import pytest

from headrace.core.admission_records import Ticket
from headrace.core.records import FinishReason
from headrace.ids import RequestId
from headrace.sampling import SamplingParams
from router.answer import Branch, Events, deltas
from router.api import Delta, GenerationSpec
from router.core.flight import Flight
from router.core.legs import Deliver, Ended
from router.core.placement import Mode
from tests.doors_fixtures import text_model


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP])
def test_a_stop_string_ends_the_answer_even_where_the_worker_was_at_its_end_first(reason: FinishReason) -> None:
    async def main() -> list[Delta]:
        text, events = text_model(), Events()
        params = SamplingParams(max_tokens=4)
        flight = Flight(RequestId("req-1"), (5,), params, Mode.AUTO, lambda: 1)
        spec = GenerationSpec("t", "", (5,), (params,), stop=("b",))
        branch = Branch(flight, 0, spec, b"", 9.0, events, Ticket("t", 1, 1, 1, 0), reserved_output_tokens=4)
        for token_id in text.encode("abcd"):
            events.put_nowait((branch, Deliver((token_id,))))
        events.put_nowait((branch, Ended(reason)))
        try:
            return [delta async for delta in deltas(text, spec, [branch], events, lambda branch: None)]
        finally:
            text.close()

    seen = asyncio.run(main())
    assert "".join(delta.text for delta in seen) == "a"
    assert seen[-1].finish_reason == "stop"
