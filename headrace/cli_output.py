"""What the client commands print: answers, explanations, status and audit, for people or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headrace.v1 import admin_pb2, inference_pb2


def print_json(message: Message) -> None:
    """One object with the proto's field names; absent numbers are 0, not missing. 64-bit counters are numbers too."""
    import json

    data = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    print(json.dumps(_with_numbers(message, data), ensure_ascii=False))


def _with_numbers(message: Message, data: dict[str, object]) -> dict[str, object]:
    """The JSON mapping of protobuf writes 64-bit integers as strings; scripts want numbers."""
    for field in message.DESCRIPTOR.fields:
        value = data.get(field.name)
        if value is None:
            continue
        if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            data[field.name] = [int(item) for item in value] if isinstance(value, list) else int(str(value))
        elif field.cpp_type == field.CPPTYPE_MESSAGE and not field.message_type.GetOptions().map_entry:
            child = getattr(message, field.name)
            if isinstance(value, list):
                data[field.name] = [_with_numbers(item, dump) for item, dump in zip(child, value, strict=True)]
            elif isinstance(value, dict):
                data[field.name] = _with_numbers(child, value)
    return data


def print_stream(chunks: Iterable[inference_pb2.GenerateStreamResponse]) -> None:
    """Text as it comes on standard output; the explanation, when the last chunk has one, on standard error."""
    last: inference_pb2.GenerateStreamResponse | None = None
    for last in chunks:
        for choice in last.choices:
            sys.stdout.write(choice.text)
        sys.stdout.flush()
    print(flush=True)
    if last is not None and last.HasField("explanation"):
        print_explanation(last.explanation, last.usage)


def print_explanation(explanation: inference_pb2.Explanation, usage: inference_pb2.Usage) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(
        f"\n{explanation.mode}: prefill [bold]{explanation.prefill_worker}[/bold], "
        f"decode [bold]{explanation.decode_worker}[/bold], attempts {explanation.attempts}"
    )
    console.print(
        f"tokens: {usage.prompt_tokens} prompt ({explanation.cached_tokens} cached), {usage.completion_tokens} output"
    )
    console.print(f"moved: {explanation.bytes_moved:,} bytes over {explanation.lane}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for title, stages, total in (
        ("to the first token", explanation.to_first_token, explanation.ttft_ms),
        ("to the end", explanation.to_end, explanation.total_ms - explanation.ttft_ms),
    ):
        table.add_row(f"[bold]{title}[/bold]", f"[bold]{total:.1f} ms[/bold]")
        for stage in stages:
            table.add_row(f"  {stage.name}", f"{stage.ms:.1f} ms")
    table.add_row("[bold]total[/bold]", f"[bold]{explanation.total_ms:.1f} ms[/bold]")
    console.print(table)


def print_status(answer: admin_pb2.StatusResponse) -> None:
    """Each gateway's counts, then the workers."""
    console = Console(highlight=False)
    for gateway in sorted([answer.gateway, *answer.siblings], key=lambda each: each.gateway_id):
        if not gateway.pid:
            console.print(f"[bold]{gateway.gateway_id}[/bold] at {gateway.grpc_address}: [red]no answer[/red]")
            continue
        where = f" at {gateway.grpc_address}, http {gateway.http_address}" if answer.siblings else ""
        console.print(
            f"[bold]{answer.model}[/bold], {gateway.gateway_id}{where}\n{gateway.live_requests} live; "
            f"{gateway.accepted} accepted = {gateway.completed} completed + {gateway.failed} failed + "
            f"{gateway.cancelled} cancelled, {gateway.retries} retries"
        )
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("worker", "pid", "session", "waiting", "running", "step", "blocks", "leases", "reads")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for view in answer.workers:
        session = "yes" if view.connected else "[red]no[/red]"
        if view.HasField("status"):
            s = view.status
            row = [str(s.pid), session, str(s.load.waiting_requests), str(s.load.running_requests)]
            row += [f"{1e3 * s.load.step_s:.0f} ms", f"{s.used_blocks}/{s.load.total_blocks}"]
            row += [str(s.leases), str(s.transfers)]
        else:
            row = ["-", session, *["-"] * (len(columns) - 3)]
        table.add_row(view.worker_id, *row)
    console.print(table)
    for view in answer.workers:
        if view.refused:
            console.print(f"[red]{view.worker_id} is not used:[/red] {escape(view.refused)}")
    if any(view.status.pairs for view in answer.workers):
        console.print()
        console.print(_pairs(answer))


def _pairs(answer: admin_pb2.StatusResponse) -> Table:
    """Who has read how much KV from whom."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("reader", "from", "lane", "GB/s", "MiB", "exposed", "reads", "again", "failed"):
        left = column in ("reader", "from", "lane")
        table.add_column(column, no_wrap=True, justify="left" if left else "right")
    for view in answer.workers:
        for pair in view.status.pairs:
            moved = (f"{pair.lane_gbps:.1f}", f"{pair.bytes / 2**20:,.1f}", f"{1e3 * pair.exposed_s:,.0f} ms")
            counts = (str(pair.reads), str(pair.retries), str(pair.failures))
            table.add_row(view.worker_id, pair.holder_id, pair.lane, *moved, *counts)
    return table


def print_cache(answer: admin_pb2.StatusResponse) -> None:
    """Two tables: blocks by worker and tier; what the cache saved."""
    console = Console(highlight=False)
    tiers = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("worker", "tier", "cached", "in use", "free", "of", "size"):
        tiers.add_column(column, no_wrap=True, justify="left" if column in ("worker", "tier") else "right")
    saved = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("worker", "lookups", "hit tokens", "by copy", "saved", "evicted", "lost"):
        saved.add_column(column, no_wrap=True, justify="left" if column == "worker" else "right")
    for view in answer.workers:
        if not view.HasField("status"):
            tiers.add_row(view.worker_id, "[red]no answer[/red]", *["-"] * 5)
            continue
        for tier in view.status.tiers:
            numbers = (tier.cached_blocks, tier.used_blocks, tier.free_blocks, tier.capacity_blocks)
            size = f"{tier.capacity_blocks * tier.block_bytes / 2**20:,.0f} MiB"
            tiers.add_row(view.worker_id, tier.name, *(f"{n:,}" for n in numbers), size)
        counters = view.status.counters
        names = ("prefix_lookups", "cached_tokens_hit", "partial_tokens_hit", "saved_prefill_ms", "evictions")
        lookups, hit, part, saved_ms, evictions = (counters.get(name, 0.0) for name in names)
        row = (f"{lookups:,.0f}", f"{hit:,.0f}", f"{part:,.0f}", f"{saved_ms / 1e3:,.1f} s", f"{evictions:,.0f}")
        saved.add_row(view.worker_id, *row, f"{counters.get('evicted_ms', 0.0) / 1e3:,.1f} s")
    console.print(tiers)
    console.print()
    console.print(saved)
    tenants: dict[str, int] = {}
    for view in answer.workers:
        for entry in view.status.tenant_caches:
            tenants[entry.tenant] = tenants.get(entry.tenant, 0) + entry.blocks
    if tenants:
        parts = sorted(tenants.items(), key=lambda item: -item[1])
        console.print("\nblocks by tenant: " + ", ".join(f"{name} {blocks:,}" for name, blocks in parts))


def print_routing(answer: inference_pb2.ExplainResponse) -> None:
    console = Console(highlight=False)
    for decision in answer.decisions:
        realised = f", was {decision.realised_ms:.1f} ms" if decision.realised_ms else ""
        console.print(
            f"[bold]attempt {decision.attempt}, {decision.stage}[/bold] by {decision.policy}: {decision.reason}; "
            f"{decision.matched_tokens} of {decision.prompt_tokens} tokens known somewhere; "
            f"predicted {decision.predicted_ms:.1f} ms{realised}"
        )
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("", "plan", "worker", "from", "cached", "ms", "terms"):
            table.add_column(column, justify="right" if column in ("cached", "ms") else "left")
        for row in decision.candidates:
            terms = ", ".join(f"{term.name} {term.ms:.1f}" for term in row.terms if abs(term.ms) >= 0.05)
            source = f"{row.fetch_from} ({row.fetch_blocks} blocks)" if row.fetch_from else ""
            mark = "*" if row.chosen else ""
            table.add_row(mark, row.kind, row.worker, source, str(row.cached_tokens), f"{row.cost_ms:.1f}", terms)
        console.print(table)
        if decision.num_candidates > len(decision.candidates):
            console.print(f"and {decision.num_candidates - len(decision.candidates)} more")


def print_audit(answer: admin_pb2.AuditResponse) -> None:
    console = Console(highlight=False)
    for finding in answer.findings:
        console.print(finding, markup=False, style="red")
    verdict = "[green]clean[/green]" if answer.clean else "[red]not clean[/red]"
    console.print(
        f"{verdict}: {answer.used_blocks} blocks, {answer.leases} leases, {answer.transfers} transfers, "
        f"{answer.bookings} bookings held, {answer.quarantined_blocks} blocks in quarantine"
    )
