"""300 requests at once, all cancelled while their KV moves: every block is back within two seconds."""

from __future__ import annotations

import random
import time
from pathlib import Path

import grpc
import pytest

from headrace.core.records import Role
from headrace.v1 import inference_pb2, inference_pb2_grpc
from tests.fault_fleet import FaultyFleet, faulty_fleet
from tests.fault_proxy import OTHER, Rule
from tests.model_fixtures import tiny_model

P, D = Role.PREFILL, Role.DECODE
STORM = 300
PROMPT_TOKENS = 100
MOVING = 270
"""Of them, whose reads are under way at the moment of the cancel."""
LANE_BYTES_PER_S = 8e3
"""Of one connection: a prompt's KV takes far longer than a round."""


def storm(running: FaultyFleet, rng: random.Random, limit_s: float) -> float:
    """One round; seconds from the cancel until nothing was held."""
    with grpc.insecure_channel(running.gateway_ready.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        running.lanes["prefill-0"].obey(Rule(frozenset({OTHER}), bytes_per_s=LANE_BYTES_PER_S))
        calls = []
        for _ in range(STORM):
            request = inference_pb2.GenerateRequest()
            request.token_ids.ids.extend(rng.randrange(3, 500) for _ in range(PROMPT_TOKENS))
            request.sampling.max_tokens = 200
            request.sampling.ignore_eos = True
            calls.append(stub.GenerateStream(request, timeout=120))
        end = time.monotonic() + 60
        while (moving := running.worker_status("decode-0").transfers) < MOVING:
            assert time.monotonic() < end, f"only {moving} of {STORM} reads were ever under way at once"
            time.sleep(0.02)
        before = running.worker_status("decode-0")
        assert before.transfers >= MOVING and before.used_blocks > MOVING
        for call in calls:
            call.cancel()
        cancelled_at = time.monotonic()
        held = running.wait_nothing_held(limit_s)
        back_s = time.monotonic() - cancelled_at
        assert not held, f"{held} {back_s:.1f} s after the cancel"
        running.lanes["prefill-0"].heal()
    return back_s


@pytest.mark.parametrize(
    ("rounds", "limit_s"),
    [
        pytest.param(3, 10.0, id="3 rounds"),
        pytest.param(20, 2.0, id="20 rounds", marks=[pytest.mark.chaos, pytest.mark.timeout(1800)]),
    ],
)
def test_a_storm_of_cancels_in_mid_transfer_gives_every_block_back(tmp_path: Path, rounds: int, limit_s: float) -> None:
    """`make test` demands that they are back, `make chaos`, for which the machine is quiet, how soon."""
    rng = random.Random(3)
    with faulty_fleet(tiny_model(tmp_path), P, D, transport="tcp", liveness_s=8.0) as running:
        probe = {"temperature": 0.9, "seed": 5, "max_tokens": 8, "ignore_eos": True}
        with running.client() as client:
            expected = list(client.generate([5, 6, 7], **probe).choices[0].token_ids)
            running.assert_drained()
            before = running.footprint()
            for number in range(rounds):
                back_s = storm(running, rng, limit_s)
                answer = client.generate([5, 6, 7], cache_salt=f"round {number}", timeout_s=20, **probe)
                assert list(answer.choices[0].token_ids) == expected
                print(f"round {number}: nothing held after {back_s:.2f} s", flush=True)
            counts = client.status().gateway
        assert counts.cancelled == rounds * STORM and counts.retries == 0
        running.assert_accounts_close()
        running.assert_drained()
        running.assert_back_at(before)
