"""Greedy tokens of the default model by Hugging Face transformers (float32), with each position's top-two margin.

    .venv/bin/python -m tests.reference.make_reference      writes tests/reference/smollm2_greedy.json

`make reference` runs it. The prompts are stretches of the licence text, as token ids; see `prompts`.
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE / "smollm2_greedy.json"
LENGTHS = [1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 257, 512, 1023, 2001, 3000]
"""24 lengths from 1 to 3000; block size 16: k*16-1, k*16 and k*16+1 for several k."""
NUM_TOKENS = 48


def prompts(encode: object) -> list[list[int]]:
    """Prompt i begins at another place of the licence text, so that no two share a prefix."""
    text = (HERE.parent.parent / "LICENSE").read_text()
    ids = encode(text)  # type: ignore[operator]
    ids = ids + ids
    return [ids[17 * i : 17 * i + length] for i, length in enumerate(LENGTHS)]


def main() -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from headrace.paths import cache_root
    from workers.model.prepare import prepare_model

    folder = prepare_model("smollm2-135m-instruct", cache_root())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    with torch.inference_mode():
        for prompt in prompts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids):
            cache, ids = None, torch.tensor([prompt])
            tokens: list[int] = []
            margins: list[float] = []
            for _ in range(NUM_TOKENS):
                out = model(ids, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                top = torch.topk(out.logits[0, -1], 2)
                tokens.append(int(top.indices[0]))
                margins.append(round(float(top.values[0] - top.values[1]), 6))
                ids = top.indices[None, :1]
            rows.append({"length": len(prompt), "tokens": tokens, "margins": margins})
            print(len(prompt), tokens[:8], min(margins), flush=True)
    TARGET.write_text(json.dumps(rows, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
