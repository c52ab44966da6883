"""llama.cpp's bare engine under the same load as `bench.engine`: run by an interpreter that has llama-cpp-python.

python bench/peers/llama_cpp_engine.py MODEL.gguf --storage f32 --threads 2

Writes the model as a GGUF of the wanted storage once, beside the temporary files. Then one request a line on standard
input, `decode ROWS CONTEXT STEPS` or `prefill TOKENS`; the answer is seconds, one number for each step, as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import llama_cpp as llama

_FTYPES = {"f32": 0, "f16": 1}
_KV_TYPES = {"f32": 0, "f16": 1}
_CHUNK = 512


def _stored(source: Path, storage: str) -> Path:
    stat = source.stat()
    target = Path(tempfile.gettempdir()) / f"{source.stem}-{stat.st_size}-{stat.st_mtime_ns}.{storage}.gguf"
    if storage not in _FTYPES:
        return source
    if not target.exists():
        params = llama.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = _FTYPES[storage], True
        partial = target.with_suffix(".partial")
        if llama.llama_model_quantize(str(source).encode(), str(partial).encode(), params):
            raise SystemExit(f"{source}: llama.cpp cannot write it as {storage}")
        partial.rename(target)
    return target


class Engine:
    def __init__(self, path: Path, kv: str, threads: int) -> None:
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        self._kv, self._threads = _KV_TYPES[kv], threads
        self._context = None
        self._batch = llama.llama_batch_init(_CHUNK, 0, 1)
        self._random = random.Random(0)

    def open(self, sequences: int, tokens: int) -> None:
        """A context with memory of its own for each sequence: in a common one a row looks at all keys."""
        if self._context is not None:
            llama.llama_free(self._context)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = sequences * (tokens + 256), sequences, False
        params.n_batch = params.n_ubatch = _CHUNK
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = self._kv
        self._context = llama.llama_init_from_model(self._model, params)

    def _run(self, rows: list[tuple[int, int]], wanted: set[int]) -> float:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (sequence, position) in enumerate(rows):
            batch.token[i], batch.pos[i] = self._random.randrange(100, 40000), position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, i in wanted
        began = time.perf_counter()
        if llama.llama_decode(self._context, batch):
            raise SystemExit("llama_decode failed")
        llama.llama_synchronize(self._context)
        return time.perf_counter() - began

    def prefill(self, tokens: int, sequence: int = 0) -> float:
        spent = 0.0
        for first in range(0, tokens, _CHUNK):
            count = min(_CHUNK, tokens - first)
            last = {count - 1} if first + count == tokens else set()
            spent += self._run([(sequence, first + i) for i in range(count)], last)
        return spent

    def decode(self, rows: int, context: int, steps: int) -> list[float]:
        for sequence in range(rows):
            self.prefill(context, sequence)
        return [self._run([(s, context + i) for s in range(rows)], set(range(rows))) for i in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--storage", choices=["f32", "f16", "as-is"], default="f32")
    parser.add_argument("--kv", choices=sorted(_KV_TYPES), default="f32")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    engine = Engine(_stored(args.model, args.storage), args.kv, args.threads)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, *numbers = line.split()
        sizes = list(map(int, numbers))
        engine.open(sizes[0] if kind == "decode" else 1, sum(sizes[1:]) if kind == "decode" else sizes[0])
        spent = engine.decode(*sizes) if kind == "decode" else [engine.prefill(sizes[0])]
        print(json.dumps(spent), flush=True)


if __name__ == "__main__":
    main()
