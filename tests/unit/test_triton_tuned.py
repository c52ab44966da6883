"""Which launch parameters a shape gets."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from kernels.triton.tuned import (
    MAX_SPLITS,
    SUPPORTED,
    DecodeLaunch,
    Device,
    Heads,
    PrefillLaunch,
    Tuned,
    decode_class,
    decode_rule,
    fixed_class,
    prefill_class,
    prefill_rule,
)

H200 = Device("NVIDIA H200", 132)
HEADS = Heads("bf16", 128, 4, 16)
NOTHING = Tuned({})


def test_what_was_measured_on_this_device_goes_before_the_rule(tmp_path: Path) -> None:
    decode, prefill = DecodeLaunch(32, 8, 5, 7, 96), PrefillLaunch(64, 32, 4, 4)
    table = NOTHING.changed(H200, decode_class(HEADS, 8, 4096), decode)
    table = table.changed(H200, prefill_class(HEADS, 100), prefill)
    table.save(tmp_path / "table.json")
    table = Tuned.load(tmp_path / "table.json")
    # 1. The whole class is meant, not the one shape.
    assert table.decode(H200, HEADS, 1, 8, 4096) == table.decode(H200, HEADS, 1, 7, 3000) == decode
    assert table.prefill(H200, HEADS, 100) == table.prefill(H200, HEADS, 128) == prefill
    # 2. Nothing else is.
    for device, heads in ((H200, replace(HEADS, block=32)), (Device("NVIDIA H100", 132), HEADS)):
        assert table.decode(device, heads, 1, 8, 4096) == decode_rule(heads, 8, 4096, 132)
        assert table.prefill(device, heads, 100) == prefill_rule(heads, 100)
    assert table.decode(H200, HEADS, 2, 8, 4096) != decode


def test_with_fixed_splits_and_invariant_prefills_the_batch_changes_nothing() -> None:
    tables = [NOTHING]
    tables += [NOTHING.changed(H200, decode_class(HEADS, 8, 4096), DecodeLaunch(32, 8, 5, 7, 96))]
    tables += [NOTHING.changed(H200, fixed_class(HEADS), DecodeLaunch(32, 8, 5, 7, 96))]
    for table in tables:
        launches = {table.decode(H200, HEADS, rows, 8, 4096 * rows, splits=5) for rows in (1, 8, 300)}
        assert len(launches) == 1
        assert launches.pop().splits == 5


@pytest.mark.parametrize("processors", [4, 132])
def test_the_rule_launches_what_the_kernels_can_run(processors: int) -> None:
    for heads, pairs, capacity in product(SUPPORTED, (1, 8, 64, 1024, 4096), (16, 4096, 131072)):
        launch = decode_rule(heads, pairs, capacity, processors)
        assert launch.least % launch.tile == 0
        assert launch.tile & (launch.tile - 1) == 0
        assert 1 <= launch.splits <= MAX_SPLITS
    for heads, tokens in product(SUPPORTED, (0, 1, 7, 4096)):
        prefill = prefill_rule(heads, tokens)
        assert prefill.tile_rows >= heads.group
        assert prefill.tile_rows & (prefill.tile_rows - 1) == 0


def test_the_rule_gives_every_processor_something_to_read() -> None:
    # One row of 4,096 positions, and 32 rows of 16,384, of 8 KV heads each.
    for pairs, capacity in ((8, 4096), (256, 16384)):
        assert pairs * decode_rule(HEADS, pairs, capacity, 132).splits >= 0.9 * 132
    # Many short rows fill them without being cut.
    assert decode_rule(HEADS, 2048, 1024, 132).splits == 1


def test_tuning_takes_the_steps_that_make_a_launch_faster() -> None:
    pytest.importorskip("triton")
    from kernels.triton.tune import decode_values, descend

    start = decode_rule(HEADS, 8, 4096, 132)
    best = replace(start, num_stages=5, num_warps=8, splits=start.splits * 2)
    timed: list[DecodeLaunch] = []

    def time_us(launch: DecodeLaunch) -> float:
        timed.append(launch)
        different = (launch.num_stages != 5, launch.num_warps != 8, launch.splits != best.splits, launch.tile != 64)
        return 10.0 + sum(different)

    assert descend(start, decode_values(start), time_us) == best
    assert all(launch.least % launch.tile == 0 for launch in timed)


def test_tuning_leaves_alone_what_no_step_makes_clearly_faster() -> None:
    pytest.importorskip("triton")
    from kernels.triton.tune import descend, prefill_values

    start = prefill_rule(HEADS, 4096)
    assert descend(start, prefill_values(), lambda launch: 10.0 if launch == start else 9.9) == start
