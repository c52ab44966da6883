"""1,000 random trees of prompts on a real model in exact mode: see `tests.model_trees`."""

from __future__ import annotations

import pytest

from tests.model_fixtures import tiny_model
from tests.model_trees import BLOCK, MAX_LEN, POOL_BLOCKS, Trees
from workers.runner.torch_runner import TorchRunner

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("batch", range(10))
def test_outputs_over_random_prefix_trees_are_those_without_a_cache(
    batch: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tiny_model(tmp_path_factory.mktemp("tiny"))
    trees = Trees(TorchRunner(folder, MAX_LEN, block_size=BLOCK, num_blocks=POOL_BLOCKS, exact=True))
    for seed in range(1000 + 100 * batch, 1100 + 100 * batch):
        trees.compare(seed)
