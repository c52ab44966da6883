"""The same sequences through our engine and through transformers' continuous batching, in one process and one run:
256 sequences, prompts and outputs of 100 to 1,024 tokens each (nano-vllm's workload), random weights.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.model import open_model
from bench.gpu.serve import Arrival, serve
from bench.gpu.shapes import model_folder

SHORTEST, LONGEST = 100, 1024
ROWS = 256
PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True)
class Rate:
    name: str
    output_tokens: int
    seconds: float

    @property
    def tokens_a_second(self) -> float:
        return self.output_tokens / self.seconds

    def line(self) -> str:
        many = f"{self.output_tokens:8,} tokens in {self.seconds:7.2f} s"
        return f"{self.name:36} {many}: {self.tokens_a_second:10,.0f} a second"


def workload(vocab: int, sequences: int, longest: int = LONGEST) -> list[Arrival]:
    rng, shortest = random.Random(0), min(SHORTEST, longest)
    lengths = [(rng.randint(shortest, longest), rng.randint(shortest, longest)) for _ in range(sequences)]
    return [Arrival([rng.randrange(vocab) for _ in range(length)], output) for length, output in lengths]


def rates(name: str, folder: Path, device: str, sequences: int = 256, longest: int = LONGEST) -> Iterator[Rate]:
    """Ours, the peer's, ours again: a machine that grows slower or faster shows."""
    runner = open_model(name, folder, device, tokens=8192, seqs=min(ROWS, sequences), length=2 * longest + 16)
    arrivals = workload(runner.config.vocab_size, sequences, longest)
    for turn in ("ours", "ours, warm"):
        served = serve(runner, arrivals, most_rows=min(ROWS, sequences))
        yield Rate(turn, served.output_tokens, served.seconds)
    del runner
    torch.cuda.empty_cache()
    yield _transformers(name, folder, device, arrivals)


def _transformers(name: str, folder: Path, device: str, arrivals: list[Arrival]) -> Rate:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(model_folder(name, folder))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=LONGEST)
    manager = model.init_continuous_batching(generation_config=settings)
    with suppress(AttributeError):  # older ones have no warm-up
        manager.warmup()
    manager.start()
    try:
        _finish(manager, arrivals[: min(4, len(arrivals))], "warm")
        began = time.perf_counter()
        tokens = _finish(manager, arrivals, "timed")
        seconds = time.perf_counter() - began
    finally:
        manager.stop(block=True)
    import transformers

    return Rate(f"transformers {transformers.__version__}", tokens, seconds)


def _finish(manager: Any, arrivals: list[Arrival], label: str) -> int:
    """Output tokens of all of them. Raises RuntimeError when they do not come."""
    for number, arrival in enumerate(arrivals):
        manager.add_request(arrival.prompt, request_id=f"{label}-{number}", max_new_tokens=arrival.num_output)
    open_ids, tokens, until = {f"{label}-{number}" for number in range(len(arrivals))}, 0, time.monotonic() + PATIENCE_S
    while open_ids:
        result = manager.get_result(timeout=1.0)
        if result is not None and result.is_finished() and result.request_id in open_ids:
            open_ids.discard(result.request_id)
            tokens += len(result.generated_tokens)
        if time.monotonic() > until or not manager.is_running():
            raise RuntimeError(f"{len(open_ids)} of {len(arrivals)} sequences did not end")
    return tokens
