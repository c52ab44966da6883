"""How the memory of a machine is divided between workers: KV pools, host blocks, and whether all of it fits. Pure."""

from __future__ import annotations

from dataclasses import replace

from cluster.config.facts import Machine, ModelFacts
from cluster.config.load import ConfigError
from cluster.config.schema import PoolConfig, ServeConfig
from cluster.config.units import format_bytes
from headrace.errors import StartupError

DEFAULT_KV_CACHE_BYTES = 1 << 30
DEFAULT_KV_CACHE_FRACTION = 0.10
SWAP_SHARE = 0.25
"""Of a worker's KV pool: the automatic host memory for preempted requests."""
LOW_MEMORY_SHARE = 0.03
MOST_LOW_MEMORY_BYTES = 512 << 20
PROCESS_BYTES = 384 << 20
"""Interpreter, libraries and workspace of one worker, beside weights and KV."""


def on_gpu(config: ServeConfig, model: ModelFacts, device: str) -> ModelFacts:
    """The model as workers on `device` hold it: on a GPU KV has the model's dtype, and weights take no host memory."""
    if device == "cpu":
        return model
    token_bytes = model.kv_bytes_per_token // (1 if config.model.dtype == "float32" else 2)
    return replace(model, kv_bytes_per_token=token_bytes, weight_bytes=0)


def _block_bytes(pool: PoolConfig, model: ModelFacts) -> int:
    return model.kv_bytes_per_token * pool.block_size


def gpu_kv_cache_bytes(pool: PoolConfig, model: ModelFacts) -> int:
    """0: each worker takes what is left of its device's memory."""
    return (pool.kv_cache_bytes or 0) // _block_bytes(pool, model) * _block_bytes(pool, model)


def kv_cache_bytes(pool: PoolConfig, model: ModelFacts, machine: Machine, max_model_len: int | None) -> int:
    """Whole blocks only. An explicit max_model_len raises the automatic size to hold one such request."""
    if pool.kv_cache_bytes is not None:
        size = pool.kv_cache_bytes
    elif pool.kv_cache_fraction is not None:
        size = int(pool.kv_cache_fraction * machine.available_bytes)
    else:
        size = min(DEFAULT_KV_CACHE_BYTES, int(DEFAULT_KV_CACHE_FRACTION * machine.available_bytes))
        if max_model_len is not None:
            size = max(size, -(-max_model_len // pool.block_size) * _block_bytes(pool, model))
    return size // _block_bytes(pool, model) * _block_bytes(pool, model)


def _fixed_bytes(config: ServeConfig, model: ModelFacts, kv_bytes: list[int]) -> int:
    """What all workers together take beside their host blocks."""
    num_workers = sum(pool.replicas for pool in config.pools)
    kv_total = sum(size * pool.replicas for pool, size in zip(config.pools, kv_bytes, strict=True))
    return num_workers * (model.weight_bytes + PROCESS_BYTES) + kv_total


def swap_bytes(config: ServeConfig, model: ModelFacts, machine: Machine, kv_bytes: list[int]) -> list[int]:
    """Host memory of each pool's workers, in whole blocks.

    An automatic size gives way before a deployment is refused for it.
    """
    asked = sum((pool.swap_bytes or 0) * pool.replicas for pool in config.pools)
    wanted = [
        int(SWAP_SHARE * size) if pool.swap_bytes is None else 0
        for pool, size in zip(config.pools, kv_bytes, strict=True)
    ]
    total = sum(size * pool.replicas for pool, size in zip(config.pools, wanted, strict=True))
    left = max(0, machine.available_bytes - _fixed_bytes(config, model, kv_bytes) - asked)
    fits = config.cluster.address is not None or total <= left
    share = 1.0 if fits else left / total
    return [
        (int(share * size) if pool.swap_bytes is None else pool.swap_bytes)
        // _block_bytes(pool, model)
        * _block_bytes(pool, model)
        for pool, size in zip(config.pools, wanted, strict=True)
    ]


def memory_marks(pool: PoolConfig, machine: Machine) -> tuple[int, int]:
    """Available memory below which a worker lets nobody in, and below which it preempts. An automatic low mark is at
    least twice an explicit critical one."""
    low, critical = pool.low_memory_bytes, pool.critical_memory_bytes
    if low is None:
        low = max(min(MOST_LOW_MEMORY_BYTES, int(LOW_MEMORY_SHARE * machine.available_bytes)), 2 * (critical or 0))
    return low, low // 2 if critical is None else critical


def max_model_len(config: ServeConfig, model: ModelFacts, kv_bytes: list[int], device: str = "cpu") -> int:
    """Raises ConfigError for a KV pool that is too small."""
    held = []
    for index, (pool, size) in enumerate(zip(config.pools, kv_bytes, strict=True)):
        if device != "cpu" and pool.kv_cache_bytes is None:
            continue  # known to its worker alone
        tokens = size // model.kv_bytes_per_token
        if size < 2 * _block_bytes(pool, model):
            needed = format_bytes(2 * _block_bytes(pool, model))
            raise ConfigError([f"pools.{index}.kv_cache_bytes: must be at least two blocks of this model, {needed}"])
        if config.model.max_model_len is not None and tokens < config.model.max_model_len:
            needed = format_bytes(-(-config.model.max_model_len // pool.block_size) * _block_bytes(pool, model))
            raise ConfigError(
                [
                    f"pools.{index}.kv_cache_bytes: holds {tokens} tokens, below max_model_len "
                    f"{config.model.max_model_len}; must be at least {needed}"
                ]
            )
        held.append(tokens)
    return config.model.max_model_len or min([model.max_position_embeddings, *held])


def check_memory(
    config: ServeConfig, model: ModelFacts, machine: Machine, kv_bytes: list[int], swap_bytes: list[int]
) -> None:
    """Raises StartupError, with the sums, when all workers together need more than the machine has."""
    if config.cluster.address is not None:
        return  # the workers live on other machines
    num_workers = sum(pool.replicas for pool in config.pools)
    kv_total = sum(size * pool.replicas for pool, size in zip(config.pools, kv_bytes, strict=True))
    swap_total = sum(size * pool.replicas for pool, size in zip(config.pools, swap_bytes, strict=True))
    needed = _fixed_bytes(config, model, kv_bytes) + swap_total
    if needed > machine.available_bytes:
        swap = f", host KV {format_bytes(swap_total)}" if swap_total else ""
        raise StartupError(
            f"not enough memory: {num_workers} worker(s) need {format_bytes(needed)} "
            f"(KV {format_bytes(kv_total)}{swap}, weights {format_bytes(model.weight_bytes)} each), "
            f"{format_bytes(machine.available_bytes)} available; "
            f"lower kv_cache_bytes{', swap_bytes' if swap_total else ''} or the number of workers"
        )
