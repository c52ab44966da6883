"""With the prefix cache as without it, on a real model in exact mode: 40 random trees; `make chaos` runs 1,000."""

from __future__ import annotations

import pytest

from tests.model_fixtures import tiny_model
from tests.model_trees import BLOCK, MAX_LEN, POOL_BLOCKS, Trees
from workers.runner.torch_runner import TorchRunner


def test_outputs_over_random_prefix_trees_are_those_without_a_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_model(tmp_path_factory.mktemp("tiny"))
    trees = Trees(TorchRunner(folder, MAX_LEN, block_size=BLOCK, num_blocks=POOL_BLOCKS, exact=True))
    for seed in range(40):
        trees.compare(seed)
    assert all(trees.hits.values()), trees.hits
