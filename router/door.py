"""What both front doors share: from checked options and a raw prompt to running deltas. The only place that
tokenizes requests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from headrace.clock import Clock, monotonic
from headrace.errors import Code, HeadraceError
from router.api import Delta, GatewayService, GenerationSpec
from router.auth import Authenticator
from router.metrics import DoorMetrics
from router.spec import GatewaySpec
from router.text import TextModel
from router.validate import Caller, Limits, Options, build_spec, token_ids, too_long


def random_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of text, ids or messages, and the field that it came in."""

    field: str
    text: str | None = None
    ids: Sequence[object] | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class Door:
    """The doors' common state of one gateway process."""

    def __init__(
        self,
        gateway: GatewayService,
        spec: GatewaySpec,
        metrics: DoorMetrics | None = None,
        authenticator: Authenticator | None = None,
        clock: Clock = monotonic,
        new_seed: Callable[[], int] = random_seed,
    ) -> None:
        self.gateway = gateway
        self.spec = spec
        self.text: TextModel = gateway.text
        self.limits = Limits.of(spec, gateway.text)
        self.metrics = metrics or DoorMetrics(spec.served_model_name)
        self.auth = authenticator or Authenticator(spec.api_keys)
        self.clock = clock
        self._new_seed = new_seed

    @property
    def max_prompt_chars(self) -> int:
        """Longer contents cannot fit the context; a bound for checks that come before tokenizing."""
        return self.text.max_chars(self.spec.max_model_len)

    def check_model(self, name: object) -> None:
        """'' and None mean the one model that is served. Raises NOT_FOUND naming it."""
        if name is not None and not isinstance(name, str):
            raise HeadraceError(Code.INVALID_ARGUMENT, "model: must be a string", field="model")
        if name and name != self.spec.served_model_name:
            raise HeadraceError(
                Code.NOT_FOUND,
                f"model: no such model; this server serves {self.spec.served_model_name}",
                field="model",
            )

    async def encode(self, prompt: Prompt) -> list[int]:
        """Token ids, of a text that could fit the context by its characters; the exact length is checked later."""
        limits = self.limits
        if prompt.ids is not None:
            if len(prompt.ids) >= limits.max_model_len:
                raise too_long(prompt.field, str(len(prompt.ids)), limits)
            return token_ids(prompt.field, prompt.ids, limits.vocab_size, limits.max_model_len)
        if prompt.messages is not None:
            text = await self.text.render_chat_async(prompt.messages, prompt.add_generation_prompt)
        else:
            text = prompt.text or ""
        if len(text) > self.max_prompt_chars:
            raise too_long(prompt.field, f"more than {limits.max_model_len} tokens", limits)
        return await self.text.encode_async(text, prompt.add_special_tokens, prompt.field)

    async def prepare(self, prompt: Prompt, options: Options, caller: Caller, explain: bool = False) -> GenerationSpec:
        """Tokenizes and builds the checked call."""
        ids = await self.encode(prompt)
        return build_spec(
            prompt.field,
            ids,
            options,
            caller,
            self.limits.capped(self.spec.endpoint(caller.endpoint).max_context_tokens),
            self._new_seed,
            tokenized_at=self.clock(),
            explain=explain,
        )

    async def deltas(self, endpoint: str, spec: GenerationSpec) -> AsyncGenerator[Delta, None]:
        """The gateway's deltas, metered. Closing this iterator closes the gateway's."""
        meter = self.metrics.begin(endpoint, len(spec.prompt_ids), spec.received_at)
        code: Code | None = Code.CANCELLED
        try:
            async with aclosing(cast(AsyncGenerator[Delta, None], self.gateway.generate(spec))) as source:
                async for delta in source:
                    meter.delta(delta, self.clock())
                    yield delta
            code = None
        except HeadraceError as error:
            code = error.code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception:
            code = Code.INTERNAL
            raise
        finally:
            meter.end(code, self.clock())


_MERGE_BUFFER = 256


async def merged(sources: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(source number, delta) as they come. The first failure ends all; closing closes all and waits for them."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(_MERGE_BUFFER)
    tasks = [asyncio.create_task(_pump(number, source, queue)) for number, source in enumerate(sources)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    number: int, source: AsyncGenerator[Delta, None], queue: asyncio.Queue[tuple[int, Delta] | Exception | None]
) -> None:
    try:
        async with aclosing(source):
            async for delta in source:
                await queue.put((number, delta))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
