"""From raw values of either door to SamplingParams and GenerationSpec, under the deployment's limits. Pure.

Order of refusal: type and range of every option (cheap, whatever the prompt), then the prompt, then both together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.errors import HeadraceError, invalid
from headrace.sampling import SamplingParams
from router.api import GenerationSpec, ToolWait
from router.core.recovery import OnFailure
from router.scalars import INT64_MAX, array, boolean, integer, json_object, label, number, one_of, string
from router.spec import GatewaySpec
from router.text import TextModel, check_unicode

MAX_STOP_TOKEN_IDS = 64
MAX_BIASES = 300
"""OpenAI's own limit."""
MAX_SALT_CHARS = 256
MAX_DEADLINE_S = 3600.0
MAX_PRIORITY = 2**31 - 1
MAX_STEPS = 1_000_000
MAX_LOGPROBS = 20
_TASK = re.compile(r"[A-Za-z0-9_.:/\-]{1,64}")
_GREEDY_BELOW = 1e-5
"""Logits divided by less overflow float32; the draw would be the arg max anyway."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for, and what it gets when it does not say."""

    vocab_size: int
    max_model_len: int
    default_max_tokens: int | None
    max_n: int
    max_stop_strings: int
    max_stop_bytes: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    capped_by: str = "model"
    """Whose limit `max_model_len` is."""

    @classmethod
    def of(cls, spec: GatewaySpec, text: TextModel) -> Limits:
        """Defaults come from the model's generation_config.json, as in vLLM; without it from OpenAI (1.0, 1.0, off)."""
        defaults = text.default_sampling
        limits = cls(
            vocab_size=text.vocab_size,
            max_model_len=spec.max_model_len,
            default_max_tokens=spec.default_max_tokens,
            max_n=spec.max_n,
            max_stop_strings=spec.max_stop_strings,
            max_stop_bytes=spec.max_stop_bytes,
        )
        return replace(
            limits,
            temperature=_temperature(defaults.get("temperature", 1.0)),
            top_p=number("top_p", defaults.get("top_p", 1.0), 0, 1, above_low=True),
            top_k=_top_k(defaults.get("top_k", 0), limits.vocab_size),
        )

    def capped(self, max_context_tokens: int | None) -> Limits:
        """The same for an endpoint that takes no more than that."""
        if max_context_tokens is None or max_context_tokens >= self.max_model_len:
            return self
        return replace(self, max_model_len=max_context_tokens, capped_by="endpoint")


@dataclass(frozen=True, slots=True)
class Options:
    """Everything a request says beside its prompt, checked. `max_tokens` None: as much as fits."""

    n: int
    max_tokens: int | None
    max_tokens_field: str
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    ignore_eos: bool
    stop: tuple[str, ...]
    include_stop: bool
    stop_token_ids: tuple[int, ...]
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    logprobs: int | None
    cache_salt: str
    session: str
    no_cache: bool
    priority: int


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, through which door, for what and until when."""

    tenant: str
    label: str
    deadline_s: float | None
    received_at: float
    endpoint: str = ""
    task: str = ""
    steps_left: int | None = None
    parent: str = ""
    answer_id: str = ""
    tool_wait: ToolWait | None = None
    on_transfer_failure: str = ""


def parse_options(raw: Mapping[str, object], limits: Limits) -> Options:
    """Reads the option fields of `raw`; None and absent mean the default. Other fields are not looked at."""

    def given(name: str) -> object | None:
        return raw.get(name)

    # litellm sends both names; the newer one is meant.
    max_field = "max_completion_tokens" if given("max_completion_tokens") is not None else "max_tokens"
    max_tokens = given(max_field)
    other = given("max_tokens")
    if other is not None:
        integer("max_tokens", other, 1, INT64_MAX)
    seed, logprobs = given("seed"), given("logprobs")
    return Options(
        n=integer("n", _or(given("n"), 1), 1, limits.max_n),
        max_tokens=None if max_tokens is None else integer(max_field, max_tokens, 1, INT64_MAX),
        max_tokens_field=max_field,
        min_tokens=integer("min_tokens", _or(given("min_tokens"), 0), 0, limits.max_model_len),
        temperature=_temperature(_or(given("temperature"), limits.temperature)),
        top_k=_top_k(_or(given("top_k"), limits.top_k), limits.vocab_size),
        top_p=number("top_p", _or(given("top_p"), limits.top_p), 0, 1, above_low=True),
        seed=None if seed is None else integer("seed", seed, -INT64_MAX - 1, INT64_MAX),
        ignore_eos=boolean("ignore_eos", _or(given("ignore_eos"), False)),
        stop=stop_strings(given("stop"), limits),
        include_stop=boolean("include_stop_str_in_output", _or(given("include_stop_str_in_output"), False)),
        stop_token_ids=stop_token_ids(given("stop_token_ids"), limits),
        min_p=number("min_p", _or(given("min_p"), 0.0), 0, 1),
        repetition_penalty=number("repetition_penalty", _or(given("repetition_penalty"), 1.0), 0, 2, above_low=True),
        presence_penalty=number("presence_penalty", _or(given("presence_penalty"), 0.0), -2, 2),
        frequency_penalty=number("frequency_penalty", _or(given("frequency_penalty"), 0.0), -2, 2),
        logit_bias=logit_bias(given("logit_bias"), limits),
        logprobs=None if logprobs is None else integer("logprobs", logprobs, 0, MAX_LOGPROBS),
        cache_salt=cache_salt(given("cache_salt")),
        session=session_label(raw),
        no_cache=boolean("no_cache", _or(given("no_cache"), False)),
        priority=integer("priority", _or(given("priority"), 0), -MAX_PRIORITY, MAX_PRIORITY),
    )


def stop_strings(
    value: object | None, limits: Limits, field: str = "stop", what: str = "a stop string"
) -> tuple[str, ...]:
    """A string or a list of them: few, short (bytes of UTF-8) and not empty."""
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else array(field, value, limits.max_stop_strings)
    for item in items:
        if not isinstance(item, str):
            raise invalid(field, "must be a string or a list of strings")
        if not item:
            raise invalid(field, f"{what} must have at least 1 character")
        # Characters first: encoding a megabyte to count its bytes is the caller's wish, not ours.
        if len(item) > limits.max_stop_bytes or len(item.encode(errors="replace")) > limits.max_stop_bytes:
            raise invalid(field, f"{what} must have at most {limits.max_stop_bytes} bytes")
        check_unicode(field, item)
    return tuple(dict.fromkeys(str(item) for item in items))


def tool_wait(on: Sequence[str], tool: str, request_id: str, limits: Limits) -> ToolWait:
    """Bounds of stop strings hold for `on`; the client resumes by the id that it has chosen."""
    if not request_id:
        raise invalid("request_id", "tool_wait needs one, to resume by")
    texts = stop_strings(list(on), limits, "tool_wait.on", "a text")
    if not texts:
        raise invalid("tool_wait.on", "must have at least 1 text")
    return ToolWait(texts, task_label("tool_wait.tool", tool))


def stop_token_ids(value: object | None, limits: Limits) -> tuple[int, ...]:
    if value is None:
        return ()
    items = array("stop_token_ids", value, MAX_STOP_TOKEN_IDS)
    return tuple(integer("stop_token_ids", item, 0, limits.vocab_size - 1) for item in items)


def logit_bias(value: object | None, limits: Limits) -> tuple[tuple[int, float], ...]:
    """(token id, amount) from an object whose keys are ids as decimal text; a number has one text only."""
    if value is None:
        return ()
    bias = json_object("logit_bias", value)
    if len(bias) > MAX_BIASES:
        raise invalid("logit_bias", f"must have at most {MAX_BIASES} entries")
    for key in bias:
        is_number = key.isascii() and key.isdigit() and len(key) <= 10 and key == str(int(key))
        if not is_number or int(key) >= limits.vocab_size:
            raise invalid("logit_bias", f"keys must be token ids between 0 and {limits.vocab_size - 1}")
    return tuple((int(key), number("logit_bias", amount, -100, 100)) for key, amount in bias.items())


def cache_salt(value: object | None) -> str:
    if value is None:
        return ""
    salt = string("cache_salt", value, MAX_SALT_CHARS)
    check_unicode("cache_salt", salt)
    return salt


def deadline(field: str, value: object | None) -> float | None:
    """Seconds from now, as a number or its decimal text (headers)."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise invalid(field, "must be a number of seconds") from None
    return number(field, value, 0, MAX_DEADLINE_S, above_low=True)


def token_ids(field: str, value: Sequence[object], vocab_size: int, max_items: int, what: str = "tokens") -> list[int]:
    """Ids inside the vocabulary. `max_items` is checked first, so that a huge list costs nothing."""
    if len(value) > max_items:
        raise invalid(field, f"has {len(value)} {what}; the limit is {max_items}")
    for item in value:
        if type(item) is not int:
            raise invalid(field, "token ids must be integers")
        if not 0 <= item < vocab_size:
            raise invalid(field, f"token ids must be between 0 and {vocab_size - 1}")
    return list(value)  # type: ignore[arg-type]


def check_length(field: str, num_prompt: int, limits: Limits) -> None:
    """The prompt must leave room for one token of output."""
    if num_prompt == 0:
        raise invalid(field, "must have at least 1 token")
    if num_prompt >= limits.max_model_len:
        raise too_long(field, str(num_prompt), limits)


def too_long(field: str, num_prompt: str, limits: Limits) -> HeadraceError:
    return invalid(
        field,
        f"this {limits.capped_by}'s maximum context length is {limits.max_model_len} tokens; the prompt has "
        f"{num_prompt} and must leave room for at least 1 token of output",
    )


def output_room(num_prompt: int, options: Options, limits: Limits) -> int:
    """max_tokens of the call: what was asked for if it fits, else the default within the room that is left."""
    room = limits.max_model_len - num_prompt
    if options.max_tokens is None:
        max_tokens = room if limits.default_max_tokens is None else min(room, limits.default_max_tokens)
    elif options.max_tokens > room:
        raise invalid(
            options.max_tokens_field,
            f"this {limits.capped_by}'s maximum context length is {limits.max_model_len} tokens; the prompt has "
            f"{num_prompt} and {options.max_tokens} of output were asked for, together "
            f"{num_prompt + options.max_tokens}",
        )
    else:
        max_tokens = options.max_tokens
    if options.min_tokens > max_tokens:
        raise invalid("min_tokens", f"must be at most {options.max_tokens_field}, here {max_tokens}")
    return max_tokens


def build_spec(
    prompt_field: str,
    prompt_ids: Sequence[int],
    options: Options,
    caller: Caller,
    limits: Limits,
    new_seed: Callable[[], int],
    *,
    tokenized_at: float,
    explain: bool = False,
) -> GenerationSpec:
    """The checked call. All branches share one seed (given, else `new_seed()`) and differ by their branch number."""
    check_length(prompt_field, len(prompt_ids), limits)
    max_tokens = output_room(len(prompt_ids), options, limits)
    seed = new_seed() if options.seed is None else options.seed
    sampling = tuple(
        SamplingParams(
            max_tokens=max_tokens,
            min_tokens=options.min_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=seed,
            branch=branch,
            ignore_eos=options.ignore_eos,
            stop_token_ids=options.stop_token_ids,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=options.logit_bias,
            logprobs=options.logprobs,
        )
        for branch in range(options.n)
    )
    return GenerationSpec(
        tenant=caller.tenant,
        label=caller.label,
        prompt_ids=tuple(prompt_ids),
        sampling=sampling,
        stop=options.stop,
        include_stop=options.include_stop,
        cache_salt=options.cache_salt,
        session=options.session,
        no_cache=options.no_cache,
        deadline_s=caller.deadline_s,
        explain=explain,
        received_at=caller.received_at,
        tokenized_at=tokenized_at,
        endpoint=caller.endpoint,
        task=caller.task,
        priority=options.priority,
        steps_left=caller.steps_left,
        parent=caller.parent,
        tool_wait=caller.tool_wait,
        on_transfer_failure=caller.on_transfer_failure,
        answer_id=caller.answer_id,
        prompt_field=prompt_field,
    )


def session_label(raw: Mapping[str, object]) -> str:
    """`prompt_cache_key` is OpenAI's name of it, `session` the gRPC door's."""
    field = "session" if raw.get("session") is not None else "prompt_cache_key"
    value = raw.get(field)
    return "" if value is None else label(field, value)


def request_label(field: str, value: object | None) -> str:
    return "" if value is None else label(field, value)


def task_label(field: str, value: str | None) -> str:
    """'' when absent. It is a key of statistics and metrics: short, and of few kinds of character."""
    if not value:
        return ""
    if not _TASK.fullmatch(value):
        raise invalid(field, "must have 1 to 64 letters, digits, `_`, `.`, `:`, `/` or `-`")
    return value


def on_transfer_failure(field: str, value: str | None) -> str:
    """'' when absent: as the deployment has it."""
    return one_of(field, value, OnFailure) if value else ""


def steps_left(field: str, value: int | str | None) -> int | None:
    """A whole number, or its decimal text (headers)."""
    if isinstance(value, str):
        if not (value.isascii() and value.isdigit() and len(value) <= 10):
            raise invalid(field, f"must be an integer between 0 and {MAX_STEPS}")
        value = int(value)
    return None if value is None else integer(field, value, 0, MAX_STEPS)


def _or(value: object | None, default: object) -> object:
    return default if value is None else value


def _temperature(value: object) -> float:
    temperature = number("temperature", value, 0, 2)
    return 0.0 if temperature < _GREEDY_BELOW else temperature


def _top_k(value: object, vocab_size: int) -> int:
    """0 and -1 are off."""
    return max(0, integer("top_k", value, -1, vocab_size))
