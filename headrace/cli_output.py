"""What the client commands print: answers, explanations, status and audit, for people or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
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
    console = Console(highlight=False)
    gateway = answer.gateway
    console.print(
        f"[bold]{answer.model}[/bold], {gateway.gateway_id}\n{gateway.live_requests} live; "
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


def print_audit(answer: admin_pb2.AuditResponse) -> None:
    console = Console(highlight=False)
    for finding in answer.findings:
        console.print(finding, markup=False, style="red")
    verdict = "[green]clean[/green]" if answer.clean else "[red]not clean[/red]"
    console.print(
        f"{verdict}: {answer.used_blocks} blocks, {answer.leases} leases, {answer.transfers} transfers, "
        f"{answer.bookings} bookings held, {answer.quarantined_blocks} blocks in quarantine"
    )
