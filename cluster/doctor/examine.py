"""`headrace doctor`: looks at this machine and at one configuration, a check at a time, each with its own limit.

A check that hangs (a name server, a driver) is told and left behind in its daemon thread; the processes of a check end
by themselves and with this one. What is measured comes last and alone.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from cluster import prepare
from cluster.config import Deployment, ServeConfig, read_machine, read_model_facts, resolve
from cluster.config.units import format_bytes
from cluster.core.doctor import deployment as judge_deployment
from cluster.core.doctor import lanes as judge_lanes
from cluster.core.doctor import machine as judge_machine
from cluster.doctor import deployment, lanes, machine
from cluster.doctor.lane_end import POOL_BYTES
from headrace.clock import monotonic
from headrace.control_groups import core_quota
from headrace.core.findings import Finding, fail, ok, warn
from headrace.errors import StartupError
from kvtransfer.transports.select import LANES

CHECK_SHARE, PROCESS_SHARE = 0.15, 0.4
"""Of all the time: the limit of one check, without and with processes of its own."""
PROCESS_END_S = 2.5
"""What the end of such processes may take behind that."""
MIN_LEFT_S = 0.5
"""With less time left a check is not begun."""
_BLOCK_BYTES = 1 << 20
"""Of the lanes' blocks, where the model is not known."""


def examine(config: ServeConfig, source: str | None, total_s: float) -> Iterator[Finding]:
    """Findings as they come, for about total_s at most. source: what the configuration was read from."""
    end = monotonic() + total_s
    resolved, finding = _resolve(config, PROCESS_SHARE * total_s)
    yield finding
    subject = _Subject(config, source, resolved)
    for name, look in subject.checks().items():
        yield from limited(name, min(CHECK_SHARE * total_s, end - monotonic()), look)
    by_processes: dict[str, Callable[[float], list[Finding]]] = {"GPUs": subject.gpus}
    by_processes |= {f"lane {lane}": partial(subject.lane, lane) for lane in LANES if lane != "auto"}
    for name, measure in by_processes.items():
        limit_s = min(PROCESS_SHARE * total_s, end - PROCESS_END_S - monotonic())
        yield from limited(name, limit_s, partial(measure, limit_s), PROCESS_END_S)


def _resolve(config: ServeConfig, limit_s: float) -> tuple[Deployment | None, Finding]:
    """Everything that `headrace serve` works out before it starts a process."""
    check = "configuration"

    async def prepared() -> Deployment:
        async with asyncio.timeout(limit_s):
            folder = await prepare.prepare_model(config.model.path)
        facts = read_model_facts(folder, config.model.weight_format)
        return resolve(config, facts, read_machine(), lambda: "")

    try:
        prepare.check_path(config.model.path)
        resolved = asyncio.run(prepared())
    except TimeoutError:
        found = f"the model was not ready within {limit_s:g} s; the first time it is converted"
        return None, warn(check, found, f"python -m cluster.prepare {config.model.path}, then look again")
    except StartupError as error:
        return None, fail(check, str(error), "change the configuration, or give the machine what it asks for")
    workers = ", ".join(worker.worker_id for worker in resolved.workers)
    memory = "memory suffices" if config.cluster.address is None else "the nodes' memory is not looked at"
    return resolved, ok(check, f"{workers}; {memory}, KV pools of at most {format_bytes(_pool_bytes(resolved))}")


@dataclass(frozen=True, slots=True)
class _Subject:
    config: ServeConfig
    source: str | None
    resolved: Deployment | None

    def checks(self) -> dict[str, Callable[[], list[Finding]]]:
        return {
            "machine": self._machine,
            "versions": lambda: [judge_deployment.judge_versions(deployment.read_versions(self.config))],
            "addresses": self._addresses,
            "ports": self._ports,
            "keys and tokens": self._secrets,
            "folders": self._folders,
        }

    def _machine(self) -> list[Finding]:
        config, in_cluster = self.config, self.config.cluster.address is not None
        num_workers = sum(pool.replicas for pool in config.pools)
        private_ray = config.cluster.backend == "ray" and not in_cluster
        found = [
            judge_machine.judge_isolation(machine.read_isolation(in_cluster)),
            judge_machine.judge_shared_memory(machine.read_shared_memory(private_ray)),
            judge_machine.judge_huge_pages(machine.read_huge_pages()),
            judge_machine.judge_open_files(
                machine.read_open_files(), config.gateway.limits.max_live_requests, num_workers
            ),
            judge_machine.judge_allocator(os.environ),
            judge_lanes.judge_network(machine.read_network(in_cluster)),
        ]
        if self.resolved is not None:
            threads = sum(worker.threads for worker in self.resolved.workers)
            found.append(judge_machine.judge_cores(threads, read_machine().cores, core_quota(), in_cluster))
            found.append(judge_machine.judge_memlock(machine.read_memlock(_pool_bytes(self.resolved))))
        return found

    def _addresses(self) -> list[Finding]:
        return [judge_deployment.judge_address(facts) for facts in deployment.read_addresses(self.config)]

    def _ports(self) -> list[Finding]:
        faults, wanted = deployment.read_port_faults(self.config), deployment.wanted_ports(self.config)
        return [judge_deployment.judge_ports(faults, wanted)]

    def _secrets(self) -> list[Finding]:
        return [
            judge_deployment.judge_secrets(deployment.read_secrets(self.config, self.source)),
            judge_deployment.judge_ray(deployment.read_ray(self.config)),
        ]

    def _folders(self) -> list[Finding]:
        return [judge_deployment.judge_folder(facts) for facts in deployment.read_folders(self.config)]

    def gpus(self, limit_s: float) -> list[Finding]:
        return [judge_machine.judge_gpus(machine.read_gpus(limit_s))]

    def lane(self, lane: str, limit_s: float) -> list[Finding]:
        block_bytes = _BLOCK_BYTES
        if self.resolved is not None:
            common = self.resolved.gateways[0]
            block_bytes = min(common.kv_bytes_per_token * common.block_size, POOL_BYTES)
        wanted, host = self.config.kv_transfer.transport, deployment.peer_host(self.config)
        return [judge_lanes.judge_lane(lanes.measure(lane, wanted, host, block_bytes, limit_s))]


def _pool_bytes(resolved: Deployment) -> int:
    return max(worker.kv_cache_bytes for worker in resolved.workers)


def limited(name: str, limit_s: float, look: Callable[[], list[Finding]], end_s: float = 0.0) -> list[Finding]:
    """What `look` finds; a look that takes too long or breaks is a finding too. end_s: more time for one that
    keeps the limit by itself."""
    if limit_s < MIN_LEFT_S:
        return [
            warn(name, "left out: the time was over", "look again when the machine is idle, or with a higher --limit-s")
        ]
    found: list[Finding] = []

    def work() -> None:
        try:
            found.extend(look())
        except Exception as error:  # one check that breaks must not hide what the others say
            found.append(warn(name, f"cannot be looked at: {error!r}", "tell which machine and versions these are"))

    thread = threading.Thread(target=work, daemon=True, name=f"doctor {name}")
    thread.start()
    thread.join(limit_s + end_s)
    if thread.is_alive():
        advice = "look for what hangs: a name server, a file system, a driver"
        return [warn(name, f"no answer within {limit_s:.1f} s", advice)]
    return found
