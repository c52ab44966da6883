"""The GPU checks' own parts that need no GPU: steps, served requests, gaps, the kernels' errors on small shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import model
from bench.gpu.clock import Walls
from bench.gpu.serve import Arrival, serve

WALLS = Walls("none", read=1e10, copy=1e10, matmul=1e11, mean_matmul=1e11)


def test_decode_and_prefill_steps_know_what_their_wall_is(tmp_path: Path) -> None:
    runner = model.open_model("tiny", tmp_path, "cpu", tokens=128, seqs=4, length=256)
    few, many = (model.decode(runner, "tiny", batch, 100, model.SAMPLED, WALLS) for batch in (1, 4))
    kv_of_three_rows = 3 * (100 + model.STEPS // 2) * model.bytes_a_token(runner)
    assert (many.wall_s - few.wall_s) * WALLS.read == pytest.approx(kv_of_three_rows)
    assert len(many.steps_s) == model.STEPS - 1
    c = runner.config
    matrices = c.layers * (c.hidden * 64 + 64 * c.hidden + 2 * c.hidden * 32 + 3 * c.hidden * c.intermediate)
    least = 2 * 128 * matrices / WALLS.matmul
    assert least < model.prefill(runner, "tiny", 128, WALLS, trials=3).wall_s < 1.3 * least


@pytest.mark.parametrize("overlap", [True, False])
def test_every_request_gets_all_its_tokens(tmp_path: Path, overlap: bool) -> None:
    runner = model.open_model("tiny", tmp_path, "cpu", tokens=64, seqs=4, length=256)
    served = serve(runner, [Arrival([7] * (5 + i), 3 + i) for i in range(9)], most_rows=4, overlap=overlap)
    assert served.output_tokens == sum(3 + i for i in range(9))


def test_gaps_are_what_no_span_covers() -> None:
    assert model._gaps([]) == 0.0
    assert model._gaps([(0.0, 4.0), (1.0, 2.0), (5.0, 8.0), (8.0, 10.0)]) == pytest.approx(0.1)


def test_nothing_of_it_needs_the_cpu_kernels_compiler() -> None:
    """A GPU machine may have torch and Triton and little else."""
    code = "import sys; sys.modules['numba'] = None; import bench.gpu.model, bench.gpu.peers, bench.gpu_check"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_kernels_are_right_on_small_shapes() -> None:
    pytest.importorskip("triton", minversion="3.8")
    kernels = pytest.importorskip("bench.gpu.kernels")
    wrong = [check.line() for check in kernels.checks("cpu", "tiny") if not check.good]
    assert not wrong
