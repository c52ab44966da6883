"""Random trees of prompts in exact mode: 1,000 on a tiny model, 20 on the default one. See `tests.model_trees`."""

from __future__ import annotations

import pytest

from headrace.paths import cache_root
from tests.model_fixtures import tiny_model
from tests.model_trees import BLOCK, MAX_LEN, POOL_BLOCKS, Trees
from workers.model.prepare import DEFAULT_MODEL, prepare_model
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


@pytest.mark.real_model
def test_outputs_of_the_default_model_are_those_without_a_cache() -> None:
    folder = prepare_model(DEFAULT_MODEL, cache_root())
    trees = Trees(TorchRunner(folder, MAX_LEN, block_size=BLOCK, num_blocks=POOL_BLOCKS, exact=True))
    for seed in range(20):
        trees.compare(seed)
    assert all(trees.hits.values()), trees.hits
