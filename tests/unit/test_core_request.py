"""States, edges, and the rules that follow from one request's numbers."""

import pytest

from headrace.core.records import FinishReason
from headrace.errors import InvariantError, Rejected
from kvtransfer.wire import ledger_from_proto, ledger_to_proto
from tests.core_world import EOS, World, make_settings
from workers.core.limits import banned_ids, end_reason, refusal
from workers.core.request import TRANSITIONS, State, advance
from workers.core.stages import Stage, StageClock

PATHS = {
    "whole": (State.PREFILLING, State.DECODING, State.FINISHED),
    "hand_off": (State.PREFILLING, State.TRANSFERRING, State.FINISHED),
    "adopted": (State.TRANSFERRING, State.DECODING, State.FINISHED),
    "preempted": (State.PREFILLING, State.DECODING, State.PREEMPTED, State.PREFILLING, State.DECODING, State.FINISHED),
    "tool": (State.PREFILLING, State.DECODING, State.TOOL_WAIT, State.PREFILLING, State.DECODING, State.FINISHED),
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_every_drawn_path_is_legal(path: tuple[State, ...]) -> None:
    request = World().make(3)
    for state in path:
        advance(request, state, 7.0)
    assert request.finished_at == 7.0


def test_every_state_but_finished_can_finish_and_every_other_pair_raises() -> None:
    for state in State:
        for to in State:
            request = World().make(3)
            request.state = state
            if to in TRANSITIONS[state]:
                advance(request, to, 0.0)
            else:
                with pytest.raises(InvariantError):
                    advance(request, to, 0.0)
                assert request.state is state
        assert (State.FINISHED in TRANSITIONS[state]) == (state is not State.FINISHED)


def test_outputs_of_an_earlier_attempt_count_and_are_not_emitted_again() -> None:
    request = World().make([5, 6, 7], max_tokens=10, output=[8, 9])
    assert (request.token_ids, request.emitted, request.reserved_output_tokens) == ([5, 6, 7, 8, 9], 2, 8)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "output", "hand_off", "reason"),
    [
        (0, 4, 0, False, "empty_prompt"),
        (3, 2, 2, False, "complete"),
        (20, 1, 0, False, "too_long"),
        (18, 2, 2, False, "complete"),
        (19, 9, 0, False, None),  # bounded by max_model_len: 20 tokens fit 5 blocks
        (9, 8, 0, False, None),
        (9, 8, 0, True, None),
    ],
)
def test_refusals(prompt: int, max_tokens: int, output: int, hand_off: bool, reason: str | None) -> None:
    settings = make_settings(max_model_len=20)
    request = World().make(prompt, max_tokens, output=[1] * output, hand_off=hand_off)
    rejected = refusal(request, settings, num_blocks=5)
    assert rejected == (None if reason is None else Rejected(reason, 0.0))


def test_a_hand_off_request_needs_room_for_its_prompt_alone() -> None:
    settings = make_settings()
    assert refusal(World().make(12, 100), settings, num_blocks=4) == Rejected("too_large", 0.0)
    assert refusal(World().make(12, 100, hand_off=True), settings, num_blocks=4) is None


@pytest.mark.parametrize(
    ("output", "min_tokens", "max_tokens", "ignore_eos", "reason"),
    [
        ([3, EOS], 0, 9, False, FinishReason.EOS),
        ([3, EOS], 0, 2, False, FinishReason.EOS),
        ([3, EOS], 0, 9, True, None),
        ([3, EOS], 0, 2, True, FinishReason.LENGTH),
        ([3, EOS], 2, 9, False, None),
        ([3, EOS], 1, 9, False, FinishReason.EOS),
        ([3, 42], 0, 9, False, FinishReason.STOP),
        ([3, 42], 0, 9, True, FinishReason.STOP),
        ([3, 42], 2, 2, False, FinishReason.LENGTH),
        ([3, 4], 0, 9, False, None),
    ],
)
def test_what_ends_a_request(
    output: list[int], min_tokens: int, max_tokens: int, ignore_eos: bool, reason: FinishReason | None
) -> None:
    request = World().make(3, max_tokens, output=output, min_tokens=min_tokens, ignore_eos=ignore_eos, stop=(42,))
    assert end_reason(request, make_settings()) is reason


def test_max_model_len_ends_a_request() -> None:
    request = World().make(5, 100, output=[1, 2, 3])
    assert end_reason(request, make_settings(max_model_len=8)) is FinishReason.LENGTH
    assert end_reason(request, make_settings(max_model_len=9)) is None


def test_ids_that_would_end_it_are_banned_until_min_tokens() -> None:
    settings = make_settings()
    make = World().make
    assert banned_ids(make(3, 9, min_tokens=2, ignore_eos=False, stop=(42,), output=[1]), settings) == (EOS, 42)
    assert banned_ids(make(3, 9, min_tokens=2, ignore_eos=True, stop=(42,), output=[1]), settings) == (42,)
    assert banned_ids(make(3, 9, min_tokens=1, ignore_eos=False, stop=(42,), output=[1]), settings) == ()


def test_stages_sum_to_the_time_passed_even_when_instants_come_out_of_order() -> None:
    clock = StageClock()
    clock.enter(Stage.QUEUE, 10.0)
    clock.enter(Stage.PREFILL, 12.0)
    clock.enter(Stage.DECODE, 17.0, sampling_s=1.5)
    clock.enter(Stage.PREEMPTED, 16.5)
    clock.enter(Stage.DECODE, 19.0)
    clock.enter(None, 20.0)
    clock.enter(None, 99.0)
    ledger = clock.ledger
    assert (ledger.queue_s, ledger.prefill_s, ledger.sampling_s) == (2.0, 3.5, 1.5)
    assert (ledger.preempted_s, ledger.decode_s) == (2.0, 1.0)


def test_every_stage_has_its_place_in_the_ledger() -> None:
    # Old fault: the ledger had no field for tool waits, so that a request could pause but never resume.
    for stage in Stage:
        clock = StageClock()
        clock.enter(stage, 1.0)
        clock.enter(None, 3.0)
        assert getattr(clock.ledger, stage) == 2.0
        assert ledger_from_proto(ledger_to_proto(clock.ledger)) == clock.ledger


def test_settings_that_leave_no_room_for_a_prefill_are_refused() -> None:
    with pytest.raises(ValueError):
        make_settings(max_num_batched_tokens=7, max_num_seqs=8)
    with pytest.raises(ValueError):
        make_settings(block_size=0)
