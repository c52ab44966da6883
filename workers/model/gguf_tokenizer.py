"""A GGUF file's tokenizer as tokenizer.json and tokenizer_config.json.

Byte-level BPE with a known pre-tokenizer is written directly (the `tokenizers` package, no torch); anything else goes
once through transformers, which takes seconds to import.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.errors import StartupError

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(fields: dict[str, Any], source: Path, target: Path) -> None:
    """Write both files into the folder `target`. `fields`: the GGUF's metadata by key."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and pre in ("smollm", "llama-bpe", "llama3", "qwen2", "gpt-2", "default"):
        _write_byte_bpe(fields, str(pre), target)
    else:
        _write_through_transformers(source, target)
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    tokens = fields["tokenizer.ggml.tokens"]
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokens):
            config.setdefault(name, tokens[token])
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    config["clean_up_tokenization_spaces"] = False
    if fields.get("tokenizer.chat_template"):
        config["chat_template"] = fields["tokenizer.chat_template"]
    path.write_text(json.dumps(config, ensure_ascii=False, indent=1))


def _write_byte_bpe(fields: dict[str, Any], pre: str, target: Path) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    if "tokenizer.ggml.merges" not in fields:
        raise StartupError("the GGUF's tokenizer has no merges")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    whole = pre in ("llama-bpe", "llama3")
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=whole))
    if pre == "smollm":
        splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif pre in ("gpt-2", "default"):
        splits = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        pattern = _SPLIT % ("" if pre == "qwen2" else "{1,3}")
        splits = [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)]
    if fields.get("tokenizer.ggml.add_bos_token", whole):
        bos = fields["tokenizer.ggml.bos_token_id"]
        steps.append(
            processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
            )
        )
    tokenizer.post_processor = processors.Sequence(steps)
    kinds = fields.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(tokens[i], special=kind == _CONTROL, normalized=False)
        for i, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.save(str(target / "tokenizer.json"))


def _write_through_transformers(source: Path, target: Path) -> None:
    try:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(str(target))
    except Exception as error:  # transformers raises anything here
        raise StartupError(f"{source}: its tokenizer cannot be converted ({type(error).__name__})") from error
    if not (target / "tokenizer.json").is_file():
        raise StartupError(f"{source}: its tokenizer cannot be converted to tokenizer.json")
