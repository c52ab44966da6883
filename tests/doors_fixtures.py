"""A tiny real tokenizer and a small real GatewayService for tests of the doors: no engine, deterministic text."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.errors import Code, HeadraceError
from router.api import Delta, Explanation, GenerationSpec, Usage
from router.branch_text import BranchText
from router.grpc_api import GrpcDoor, ModelFacts, build_server
from router.metrics import DoorMetrics
from router.openai_api import build_app
from router.spec import GatewaySpec
from router.text import TextModel
from workers.runner.fake import fake_logprobs

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('this model has no tool role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = 0
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("D", "E")]


def byte_level_tokenizer() -> Tokenizer:
    """256 byte tokens, a few merges, three special tokens: every text has ids and most characters have several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [a + b for a, b in MERGES]
    vocab = {token: i for i, token in enumerate(SPECIALS + alphabet + merged)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def text_model(template: str | None = TEMPLATE) -> TextModel:
    return TextModel(
        byte_level_tokenizer(),
        chat_template=template,
        config={"architectures": ["TinyForCausalLM"], "eos_token_id": EOS, "torch_dtype": "float32"},
        special_tokens={"eos_token": SPECIALS[0]},
    )


def gateway_spec(**changes: object) -> GatewaySpec:
    settings = {
        "gateway_id": "gateway-0",
        "model_path": "unused",
        "served_model_name": "tiny",
        "max_model_len": 256,
        "cluster_token": "cluster-secret",
    }
    return GatewaySpec.model_validate(settings | changes)


class EchoGateway:
    """Answers each branch with the prompt's own tokens, over and over, up to max_tokens; the seed shifts the start.

    Real detokenizer, real stop strings, FakeRunner's log-probabilities. `pause_s` waits before each token; `fail_after`
    breaks the call in its middle; `refuse` is raised before the first delta. `running` and `closed` count calls.
    """

    def __init__(self, text: TextModel | None = None) -> None:
        self.text = text or text_model()
        self.pause_s = 0.0
        self.fail_after: int | None = None
        self.refuse: HeadraceError | None = None
        self.is_ready = True
        self.running: dict[tuple[str, str], list[GenerationSpec]] = {}
        self.specs: list[GenerationSpec] = []
        self.cancelled = 0
        self.answers: list[tuple[str, str, int, list[int], str]] = []
        """Arguments of each `resume`."""
        self.answer: Callable[[GenerationSpec, int], Sequence[int]] = echo_tokens

    async def generate(self, spec: GenerationSpec) -> AsyncIterator[Delta]:
        self.specs.append(spec)
        if self.refuse is not None:
            raise self.refuse
        key = (spec.tenant, spec.label)
        self.running.setdefault(key, []).append(spec)
        finished = False
        try:
            async for delta in self._deltas(spec):
                yield delta
            finished = True
        finally:
            self.running[key].remove(spec)
            if not self.running[key]:
                del self.running[key]
            if not finished:
                self.cancelled += 1

    async def _deltas(self, spec: GenerationSpec) -> AsyncIterator[Delta]:
        branches = [_Branch(self.text, spec, i, self.answer(spec, i)) for i in range(len(spec.sampling))]
        live = list(branches)
        step = 0
        while live:
            await asyncio.sleep(self.pause_s)
            for branch in list(live):
                delta = branch.step()
                if delta.finish_reason is not None:
                    live.remove(branch)
                    if not live:
                        total = sum(len(b.out) for b in branches)
                        delta.usage = Usage(len(spec.prompt_ids), total, cached_tokens=0)
                        delta.explanation = Explanation(mode="colocated") if spec.explain else None
                yield delta
            step += 1
            if self.fail_after is not None and step >= self.fail_after:
                raise HeadraceError(Code.ABORTED, "the transfer failed", retry_after_s=1.0)

    async def cancel(self, tenant: str, label: str) -> bool:
        return (tenant, label) in self.running

    def resume(self, tenant: str, label: str, index: int, token_ids: Sequence[int], field: str) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.answers.append((tenant, label, index, list(token_ids), field))

    def ready(self) -> bool:
        return self.is_ready

    def fingerprint(self) -> str:
        return "ab" * 16


class _Branch:
    def __init__(self, text: TextModel, spec: GenerationSpec, index: int, answer: Sequence[int]) -> None:
        self.index = index
        self.sampling = spec.sampling[index]
        self.answer = answer
        self.out: list[int] = []
        self.vocab_size = text.vocab_size
        self.prompt_ids = spec.prompt_ids
        self.text = BranchText(text, spec.stop, spec.include_stop, self.sampling)

    def step(self) -> Delta:
        token, num_top = self.answer[len(self.out) % len(self.answer)], self.sampling.logprobs
        told = ()
        if num_top is not None:
            told = (fake_logprobs([*self.prompt_ids, *self.out], token, num_top, self.vocab_size),)
        self.out.append(token)
        text, stopped = self.text.push([token], told)
        reason = "stop" if stopped else "length" if len(self.out) >= self.sampling.max_tokens else None
        if reason == "length":
            text += self.text.flush()
            reason = "stop" if self.text.stopped else reason
        entries = self.text.take_entries(ended=reason is not None)
        return Delta(self.index, text, (token,), reason, logprobs=told, entries=entries)


def echo_tokens(spec: GenerationSpec, branch: int) -> Sequence[int]:
    shift = branch % len(spec.prompt_ids)
    return spec.prompt_ids[shift:] + spec.prompt_ids[:shift]


class Doors:
    """Both doors of an EchoGateway on loopback ports, on an event loop in a thread of its own."""

    def __init__(self, **spec: object) -> None:
        self.gateway = EchoGateway()
        self.spec = gateway_spec(**spec)
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.http = ""
        self.grpc = ""
        self.grpc_door: GrpcDoor | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), daemon=True)

    def __enter__(self) -> Doors:
        self._thread.start()
        assert self._ready.wait(20), "the doors did not open"
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.gateway.text.close()

    def wait_idle(self, timeout_s: float = 3.0) -> None:
        """Nothing runs in the gateway any more."""
        end = time.monotonic() + timeout_s
        while self.gateway.running and time.monotonic() < end:
            time.sleep(0.005)
        assert not self.gateway.running

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        metrics = DoorMetrics(self.spec.served_model_name)
        listener = socket.create_server(("127.0.0.1", 0))
        app = build_app(self.gateway, self.spec, metrics=metrics)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", http="httptools"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        self.grpc_door = build_server(self.gateway, self.spec, metrics=metrics, facts=ModelFacts(block_size=16))
        self.grpc = f"127.0.0.1:{self.grpc_door.bind('127.0.0.1:0')}"
        await self.grpc_door.start()
        while not server.started:
            await asyncio.sleep(0.005)
        self.http = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        await self.grpc_door.stop(0)
        server.should_exit = True
        await serving
