"""The `headrace` command. Imports are inside the commands: `headrace --help` must not wait for gRPC, Ray or pydantic.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 no deployment reached (`audit`), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace import __version__

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Disaggregated LLM serving: a prefill pool, a KV channel and a decode pool.",
)
config_app = typer.Typer(no_args_is_help=True, help="Check a configuration file, or show what it resolves to.")
app.add_typer(config_app, name="config")
cache_app = typer.Typer(no_args_is_help=True, help="Look at the workers' prefix caches, or empty them.")
app.add_typer(cache_app, name="cache")

Address = Annotated[
    str, typer.Option(envvar="HEADRACE_ADDRESS", metavar="HOST:PORT", help="gRPC address of the gateway.")
]
ApiKey = Annotated[str | None, typer.Option(envvar="HEADRACE_API_KEY", help="Key, where the deployment wants one.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
DEFAULT_ADDRESS = "127.0.0.1:50051"


@app.command()
def serve(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG|MODEL]", help="A .yaml file, a model folder, a GGUF file, or nothing."),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name to clients.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file that replaces the model's template.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="KEY or TENANT=KEY; may be given again.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and output together.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Weights: auto, float32, float16 or bfloat16.")] = None,
    quantization: Annotated[str | None, typer.Option(help="Weights: none or int8.")] = None,
    kv_cache_bytes: Annotated[str | None, typer.Option(help="KV pool of each worker, e.g. 512MiB.")] = None,
    kv_cache_fraction: Annotated[float | None, typer.Option(help="The same as a share of available memory.")] = None,
    host: Annotated[str | None, typer.Option(help="Address that the gateway listens on.")] = None,
    http_port: Annotated[int | None, typer.Option(help="OpenAI-compatible HTTP; 0: any free port.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC; 0: any free port.")] = None,
    gateways: Annotated[int | None, typer.Option(help="Gateways, all at these two ports.")] = None,
    mode: Annotated[str | None, typer.Option(help="auto, disaggregated or colocated.")] = None,
    transport: Annotated[str | None, typer.Option(help="auto, ucx, tcp or nccl.")] = None,
    backend: Annotated[str | None, typer.Option(help="ray or process.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="Join this Ray cluster (`auto` or host:port).")] = None,
    exact: Annotated[bool | None, typer.Option("--exact/--no-exact", help="Outputs bit-equal in any batch.")] = None,
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Decode workers.")] = None,
    colocated: Annotated[int | None, typer.Option(min=0, help="Workers that do both.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads of each worker.")] = None,
    policy: Annotated[str | None, typer.Option(help="Who goes first at a worker: slo_fair, fair, fcfs, ...")] = None,
    itl_target_ms: Annotated[float | None, typer.Option(help="Time budget of steps with decodes; 0: none.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens computed in one step.")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="JSON with addresses and workers, while it serves.")] = None,
) -> None:
    """Start a deployment and serve until Ctrl-C."""
    flags = {
        "model.served_model_name": served_model_name,
        "model.chat_template": None if chat_template is None else str(chat_template.absolute()),
        "model.max_model_len": max_model_len,
        "model.dtype": dtype,
        "model.quantization": quantization,
        "gateway.api_keys": api_key or None,
        "gateway.host": host,
        "gateway.http_port": http_port,
        "gateway.grpc_port": grpc_port,
        "gateway.replicas": gateways,
        "gateway.mode": mode,
        "kv_transfer.transport": transport,
        "cluster.backend": backend,
        "cluster.address": ray_address,
        "exact": exact,
    }
    pool_flags = {
        "kv_cache_bytes": kv_cache_bytes,
        "kv_cache_fraction": kv_cache_fraction,
        "threads": threads,
        "scheduling.policy": policy,
        "scheduling.itl_target_ms": itl_target_ms,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    replicas = {"prefill": prefill, "decode": decode, "colocated": colocated}
    with _errors():
        from cluster.config import load_config
        from cluster.launch import serve as launch

        config = load_config(source, _given(flags), pool_overrides=_given(pool_flags), replicas=_given(replicas))
        sys.exit(launch(config, ready_file))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text; `-` reads standard input.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    as_json: Json = False,
    explain: Annotated[bool, typer.Option(help="Show who served it, what moved and where the time went.")] = False,
    max_tokens: Annotated[int | None, typer.Option()] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
) -> None:
    """Stream an answer to the terminal."""
    sampling: dict[str, Any] = _given(
        {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    )
    with _errors():
        from headrace import cli_output
        from headrace.client import HeadraceClient, chat

        text = sys.stdin.read() if prompt == "-" else prompt
        question = text if raw else chat(text)
        with HeadraceClient(address, api_key=api_key) as client:
            if as_json:
                cli_output.print_json(client.generate(question, explain=True, **sampling))
                return
            # Leaving the client closes its channel: an interrupted answer is cancelled on the server too.
            cli_output.print_stream(client.stream(question, explain=explain, **sampling))


@app.command()
def status(as_json: Json = False, address: Address = DEFAULT_ADDRESS, api_key: ApiKey = None) -> None:
    """Show the gateway and the workers."""
    with _errors():
        from headrace import cli_output
        from headrace.client import HeadraceClient

        with HeadraceClient(address, api_key=api_key, timeout_s=10.0) as client:
            answer = client.status()
        if as_json:
            cli_output.print_json(answer)
        else:
            cli_output.print_status(answer)


@app.command()
def audit(
    as_json: Json = False,
    settle_s: Annotated[float, typer.Option(min=0.1, max=60.0, help="How long to wait for quiescence.")] = 2.0,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
) -> None:
    """Prove that nothing is held: exit code 0 clean, 1 with findings, 3 when no gateway answers."""
    with _errors(unreachable=EXIT_UNREACHABLE):
        from headrace import cli_output
        from headrace.client import HeadraceClient

        with HeadraceClient(address, api_key=api_key, timeout_s=settle_s * 2 + 20.0) as client:
            answer = client.audit(settle_s)
        if as_json:
            cli_output.print_json(answer)
        else:
            cli_output.print_audit(answer)
        if not answer.clean:
            sys.exit(EXIT_FAILED)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST", help="The request's id, as it was sent or answered.")],
    as_json: Json = False,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
) -> None:
    """Show why a request went where it went: every way that was possible, with its cost in milliseconds."""
    with _errors():
        from headrace import cli_output
        from headrace.client import HeadraceClient

        with HeadraceClient(address, api_key=api_key, timeout_s=10.0) as client:
            answer = client.explain(request_id)
        if as_json:
            cli_output.print_json(answer)
        else:
            cli_output.print_routing(answer)


@app.command()
def move(
    worker: Annotated[str, typer.Argument(metavar="[WORKER]", help="The worker that is to be left.")] = "",
    request: Annotated[str, typer.Option(help="Only the request of this id; without a WORKER wherever it is.")] = "",
    to: Annotated[str, typer.Option(metavar="WORKER", help="Where to go; without it wherever it is cheapest.")] = "",
    tenant: Annotated[str, typer.Option(help="Whose requests; this key's own tenant when left out.")] = "",
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
    token: Annotated[str | None, typer.Option(envvar="HEADRACE_CLUSTER_TOKEN", help="The cluster's own.")] = None,
) -> None:
    """Have requests in progress leave a worker, their KV with them; clients notice a pause at most."""
    with _errors():
        from headrace.client import HeadraceClient

        with HeadraceClient(address, api_key=api_key, cluster_token=token, timeout_s=10.0) as client:
            answer = client.move(worker, request_id=request, tenant=tenant, to=to)
        print(f"{answer.moved} leave, {answer.stay} stay")
        if answer.stay:
            sys.exit(EXIT_FAILED)


@cache_app.command("show")
def cache_show(as_json: Json = False, address: Address = DEFAULT_ADDRESS, api_key: ApiKey = None) -> None:
    """Show what each worker has cached in which tier, and what it was good for."""
    with _errors():
        from headrace import cli_output
        from headrace.client import HeadraceClient

        with HeadraceClient(address, api_key=api_key, timeout_s=10.0) as client:
            answer = client.status()
        if as_json:
            cli_output.print_json(answer)
        else:
            cli_output.print_cache(answer)


@cache_app.command("clear")
def cache_clear(
    tenant: Annotated[str, typer.Option(help="Whose blocks; this key's own tenant when left out.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Of every tenant.")] = False,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
    token: Annotated[str | None, typer.Option(envvar="HEADRACE_CLUSTER_TOKEN", help="The cluster's own.")] = None,
) -> None:
    """Forget cached prefixes in all tiers of all workers; running requests go on."""
    with _errors():
        from headrace.client import HeadraceClient

        with HeadraceClient(address, api_key=api_key, cluster_token=token, timeout_s=10.0) as client:
            answer = client.clear_cache(tenant, everything=everything)
        print(f"told {', '.join(answer.workers) or 'nobody'}")
        if answer.unreachable:
            _complain(f"not reached, told when they are back: {', '.join(answer.unreachable)}")
            sys.exit(EXIT_FAILED)


@app.command()
def profile(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG|MODEL]", help="A .yaml file, a model folder, a GGUF file, or nothing."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write it, instead of the cache.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads of the worker.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About a minute, and a coarser grid.")] = False,
) -> None:
    """Measure how long a worker's steps take here, for workers to start from."""
    with _errors():
        from bench.profile import run

        run(source, out, threads, quick)


@app.command()
def doctor(
    source: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG|MODEL]", help="A .yaml file, a model folder, a GGUF file, or nothing."),
    ] = None,
    as_json: Json = False,
    limit_s: Annotated[float, typer.Option(min=1.0, max=600.0, help="How long it may take.")] = 20.0,
) -> None:
    """Say what on this machine would make KV slow or a deployment fail: exit code 1 when a check fails."""
    with _errors():
        from headrace.cli_doctor import run

        if not run(source, as_json, limit_s):
            sys.exit(EXIT_FAILED)


@app.command()
def events(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Workers' event logs, or their folder.")],
    request: Annotated[str | None, typer.Option(help="The life of this request, over all files.")] = None,
) -> None:
    """Show what happened to requests at the workers (`events.path` of the configuration)."""
    with _errors():
        from headrace import event_log
        from headrace.errors import StartupError

        log = event_log.read(files)
        if log.num_unreadable:
            _complain(f"{log.num_unreadable} line(s) are no events")
        lines = event_log.overview(log.entries) if request is None else event_log.life(log.entries, request)
        text = "\n".join(lines)
        if not text:
            raise StartupError(f"no event of request {request} in these files")
        print(text)


@config_app.command("validate")
def config_validate(file: Annotated[str, typer.Argument(metavar="FILE")]) -> None:
    """Check a file; every fault is one line with its field and limit."""
    with _errors():
        _load_file(file)
        print(f"{file}: ok")


@config_app.command("show")
def config_show(file: Annotated[str, typer.Argument(metavar="FILE")]) -> None:
    """Print what would run on this machine: every `auto` resolved, secrets masked."""
    with _errors():
        import asyncio

        from cluster import config as cfg
        from cluster.prepare import check_path, prepare_model

        config = _load_file(file)
        check_path(config.model.path)
        folder = asyncio.run(prepare_model(config.model.path))
        facts = cfg.read_model_facts(folder, config.model.weight_format)
        deployment = cfg.resolve(config, facts, cfg.read_machine(), lambda: "***")
        sys.stdout.write(cfg.masked_yaml(deployment))


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _load_file(file: str) -> Any:
    from cluster.config import ConfigError, load_config

    if not file.endswith((".yaml", ".yml")):
        raise ConfigError([f"{file}: a configuration file ends in .yaml or .yml"])
    return load_config(file)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


@contextmanager
def _errors(unreachable: int = EXIT_FAILED) -> Iterator[None]:
    """Turns what can go wrong into one line on standard error and an exit code."""
    from headrace.errors import Code, HeadraceError, StartupError

    try:
        yield
    except StartupError as error:
        is_usage = hasattr(error, "lines")
        _complain(str(error))
        sys.exit(EXIT_USAGE if is_usage else EXIT_FAILED)
    except HeadraceError as error:
        if error.code is Code.UNAVAILABLE and "connect" in error.message:
            _complain(f"no gateway answers there ({error.message.rpartition(': ')[2]}); is `headrace serve` running?")
            sys.exit(unreachable)
        wait = f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s else ""
        _complain(f"{error.code}: {error.message}{wait}")
        sys.exit(unreachable if error.code in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED) else EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader went away (`| head`). Nothing more can be said; Python's own flush at exit must not try.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)


def _complain(text: str) -> None:
    for line in text.splitlines():
        print(f"headrace: {line}", file=sys.stderr)


def main() -> None:
    """Entry point of the `headrace` script."""
    try:
        app(prog_name="headrace")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
