"""`python -m bench`: runs the benchmarks that exist and prints machine, versions, command, medians and spread.

python -m bench startup [--runs 5]      `headrace serve` until ready, and until the first answered token
python -m bench engine [--peer-python /path/with/llama-cpp-python/bin/python] [--http http://127.0.0.1:8000]
                                        one worker's engine without a server, against llama.cpp's and against itself
                                        behind HTTP; the machine's own limits beside them
python -m bench compare --server ours=http://127.0.0.1:8000 --server other=http://127.0.0.1:8001
                                        the same bursts to each server in turn, paired ratios
python -m bench schedule [batching|chunks|budget|fairness|all]
                                        the iteration scheduler in virtual time, on a model of a CPU and of a GPU
python -m bench longprompt [--mix]      what a long prompt does to those who decode, on the real model: the longest gap
                                        between tokens; with --mix random arrivals under an ITL target
python -m bench prefix [--address HOST:PORT] [--api-key KEY --api-key OTHERS_KEY]
                                        what a shared prefix saves on a running deployment: reuse, fetch, tenants
python -m bench kv [lanes|handoffs|exposed]
                                        KV between two processes against a plain copy and a bare socket; a hundred
                                        hand-offs at a time; what a client of a running deployment waits for it
python -m bench route [quality|trace NAME|gateways|grid]
                                        routing policies over eight virtual workers: hits, latency, balance, goodput
python -m bench routing                 what the router costs: prefix look-ups on a trace (beside Dynamo's radix tree
                                        where that is installed), decisions, cache events, memory
python -m bench schedule host           what one iteration of it costs this machine, in real time
python -m bench.gpu_check              kernels, whole models and a peer on a GPU; a script of its own (docs/gpu.md)
python -m bench tiers                   time to first token of a long prefix from the device, the host, the disk, or
                                        computed, on the real model
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from importlib.metadata import version

COMPARISONS = ("batching", "chunks", "budget", "fairness")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="name", required=True)
    start = commands.add_parser("startup")
    start.add_argument("--runs", type=int, default=5)
    start.add_argument("--config", default="configs/quickstart.yaml")
    versus = commands.add_parser("compare")
    versus.add_argument("--server", action="append", required=True, metavar="NAME=URL", help="the first is the base")
    versus.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    versus.add_argument("--input", type=int, default=64, help="prompt tokens")
    versus.add_argument("--output", type=int, default=64, help="output tokens")
    versus.add_argument("--rounds", type=int, default=5)
    versus.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="of the prompts; new each time")
    versus.add_argument("--vocab", type=int, default=40000, help="prompt ids are below this")
    bare = commands.add_parser("engine")
    bare.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    bare.add_argument("--dtype", default="float32", help="auto, float32, float16, bfloat16 or int8")
    bare.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    bare.add_argument("--prefill", type=int, default=2048, help="prompt tokens")
    bare.add_argument("--rounds", type=int, default=5)
    bare.add_argument("--peer-python", help="an interpreter that has llama-cpp-python")
    bare.add_argument("--peer-storage", default="f32", choices=["f32", "f16", "as-is"])
    bare.add_argument("--peer-kv", default="f16", choices=["f32", "f16"])
    bare.add_argument("--http", metavar="URL", help="a running colocated deployment of the same model")
    plan = commands.add_parser("schedule")
    plan.add_argument("what", nargs="?", default="all", choices=[*COMPARISONS, "all", "host"])
    plan.add_argument("--machine", nargs="+", default=["cpu", "gpu"], choices=["cpu", "gpu"], help="cost model")
    plan.add_argument("--profile", help="a file of `headrace profile`: its costs instead of a model")
    plan.add_argument("--lengths", default="mixed", help="mixed, lognormal, or the path of an Azure or Mooncake trace")
    plan.add_argument("--requests", type=int, default=300)
    plan.add_argument("--seed", type=int, default=1)
    plan.add_argument("--rows", type=int, nargs="+", default=[32, 64, 256], help="host: rows that decode")
    plan.add_argument("--waiting", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="host: queue lengths")
    plan.add_argument("--policy", help="host: instead of the scheduler's default")
    long = commands.add_parser("longprompt")
    long.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    long.add_argument("--prompt", type=int, default=6000, help="tokens of the long prompt")
    long.add_argument("--decodes", type=int, default=8, help="requests that decode all the time")
    long.add_argument("--rounds", type=int, default=3)
    long.add_argument("--itl-target-ms", type=float, default=250.0, help="time budget of a step with decodes")
    long.add_argument("--itl-quantile", type=float, default=0.95, help="share of steps that should stay inside it")
    long.add_argument("--mix", action="store_true", help="random arrivals instead of one prompt")
    long.add_argument("--seconds", type=float, default=60.0, help="mix: length of a trial")
    long.add_argument("--rate", type=float, default=0.3, help="mix: arrivals a second")
    costs = commands.add_parser("routing")
    costs.add_argument("--trace", default="../shared/traces/mooncake_conversation.jsonl.gz", help="Mooncake's format")
    costs.add_argument("--workers", type=int, default=64, help="that the trace's requests are spread over")
    costs.add_argument("--rounds", type=int, default=500, help="decisions")
    costs.add_argument("--seed", type=int, default=1)
    shared = commands.add_parser("prefix")
    shared.add_argument("--address", default="127.0.0.1:50051")
    shared.add_argument("--api-key", action="append", default=[], help="of a tenant; a second one measures isolation")
    shared.add_argument("--prefix", type=int, default=2000, help="tokens")
    shared.add_argument("--busy", type=int, default=4000, help="tokens of the prompt that keeps the holder busy")
    shared.add_argument("--rounds", type=int, default=5)
    shared.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    route = commands.add_parser("route")
    route.add_argument("what", choices=["quality", "trace", "gateways", "grid"])
    route.add_argument(
        "trace", nargs="*", help="trace: mooncake_conversation, mooncake_synthetic, azure_conv, azure_code"
    )
    route.add_argument(
        "--workloads", nargs="+", help="quality: some of zipf, system_prompt, chats, bursts, slow_worker"
    )
    route.add_argument("--policies", nargs="+", help="instead of all")
    route.add_argument("--seeds", type=int, default=10)
    route.add_argument("--traces", default="../shared/traces", help="trace: the folder that has them")
    route.add_argument("--requests", type=int, help="trace: only so many, from the first on")
    route.add_argument("--speed", type=float, default=1.0, help="trace: times as fast as recorded")
    channel = commands.add_parser("kv")
    channel.add_argument("what", choices=["lanes", "handoffs", "exposed"])
    channel.add_argument("--tokens", type=int, nargs="+", help="lanes: 256 to 1456 (64 MiB); handoffs, exposed: 2000")
    channel.add_argument("--rounds", type=int, default=9)
    channel.add_argument("--at-a-time", type=int, default=100, help="handoffs")
    channel.add_argument("--no-checksums", action="store_true", help="handoffs")
    channel.add_argument("--address", default="127.0.0.1:50051", help="exposed")
    channel.add_argument("--seed", type=int, default=time.time_ns() % 10**9, help="exposed: of the prompts")
    tiers = commands.add_parser("tiers")
    tiers.add_argument("--prefix", type=int, default=2000, help="tokens of the shared prefix")
    tiers.add_argument("--rounds", type=int, default=3)
    tiers.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    tiers.add_argument("--seed", type=int, default=1)
    return parser


def main() -> None:
    args = _parser().parse_args()
    print(f"machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    names = ("headrace", "torch", "ray", "grpcio", "numba")
    print("versions: " + ", ".join(f"{name} {version(name)}" for name in names))
    print(f"command: python -m bench {shlex.join(sys.argv[1:])}", flush=True)
    # Each imports what it needs alone: a load client beside a server must not compile kernels first.
    if args.name == "startup":
        from bench import startup

        startup.run(args.config, args.runs)
    elif args.name == "engine":
        from bench import engine

        options = {key: value for key, value in vars(args).items() if key != "name"}
        engine.run(**options)
    elif args.name == "longprompt":
        from bench import longprompt

        options = {key: value for key, value in vars(args).items() if key != "name"}
        longprompt.run(**options)
    elif args.name == "compare":
        from bench import compare

        servers = dict(server.split("=", 1) for server in args.server)
        compare.run(servers, args.concurrency, args.input, args.output, args.rounds, args.vocab, args.seed)
    elif args.name == "route":
        from bench.simulate import routing

        options = {key: value for key, value in vars(args).items() if key != "name"}
        routing.run(**options)
    elif args.name == "routing":
        from bench import routing as costs

        costs.run(args.trace, args.workers, args.rounds, args.seed)
    elif args.name == "prefix":
        from bench import prefix

        prefix.run(args.address, args.api_key, args.prefix, args.busy, args.rounds, args.seed)
    elif args.name == "kv":
        from bench import kv

        if args.what == "lanes":
            kv.lanes(args.tokens or (256, 512, 1024, 1456), args.rounds)
        elif args.what == "handoffs":
            kv.handoffs((args.tokens or [2000])[0], args.at_a_time, args.rounds, not args.no_checksums)
        else:
            kv.exposed(args.address, (args.tokens or [2000])[0], args.rounds, args.seed)
    elif args.name == "tiers":
        from bench import tiers

        tiers.run(args.prefix, args.rounds, args.threads, args.seed)
    elif args.name == "schedule":
        from bench.simulate import host, scenarios

        if args.what == "host":
            host.run(args.rows, args.waiting, args.seed, args.policy)
        else:
            names = COMPARISONS if args.what == "all" else (args.what,)
            scenarios.run(names, args.machine, args.lengths, args.requests, args.seed, args.profile)


if __name__ == "__main__":
    main()
