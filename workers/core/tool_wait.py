"""What becomes of a request's KV while its client runs a tool: whatever costs least, in milliseconds (SPEC C9).

    keep     memory:   what the cache loses to blocks that nobody may take while the tool runs
    offload  copies:   every block to the host now; back those that the prefix cache will have lost by then
             host:     what preempted requests lose to a host that is full
             return:   it has to be let in again
    drop     again:    prefill of what the prefix cache will have lost by then
             return:   as above

With r blocks given out or hit a second, f blocks free, a blocks free or evictable, n blocks that this request alone
uses, each worth v ms to the cache, and a pause of T seconds:

    extra evictions of keep(T) = n * max(0, r T - f) / a          the cache turns over once in a / r seconds
    lost by then(T)            = min(n, max(0, r T - a))          blocks given up now are the last to be evicted

Costs are expected ones: over points of T that are equally likely, if the answer comes; if it never does (`lost_share`),
memory is held until the deadline and nothing is brought back. The least costly wins, of equal ones the first above.

Does not: free, copy, or read a clock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import exp, inf, isfinite

from workers.core.request import Keep

UNKNOWN_WAIT_S = (0.2, 1.0, 5.0, 20.0, 120.0)
"""Of a tool that nobody knows."""
_LOST_S = 600.0
"""A lost answer is waited for so long, without a deadline."""
_RATE_TAU_S = 30.0


@dataclass(frozen=True, slots=True)
class Call:
    """What the gateway tells of a call, and how long its tool is expected to take."""

    num_output: int
    """Output tokens up to the end of the call; what was sampled behind it is forgotten."""
    wait_s: tuple[float, ...] = UNKNOWN_WAIT_S
    """Equally likely points."""
    lost_share: float = 0.0
    tool: str = ""


@dataclass(frozen=True, slots=True)
class Stand:
    """How things stand when a request pauses: its own blocks and tokens, behind the cut none."""

    kv_blocks: int
    """Blocks with computed KV."""
    held_blocks: int
    """Those of them that nobody else uses."""
    private_blocks: int
    """Those that the prefix cache cannot keep: all of a request that has opted out, else none."""
    private_tokens: int
    """Computed tokens in those."""
    block_ms: float
    """Prefill of a block's tokens."""
    token_ms: float
    copy_ms: float
    """One block to the host, or back."""
    return_ms: float
    """How long a request that has given its blocks up waits until it is let in again."""
    blocks_per_s: float
    """Given out by the pool or hit in the cache, of late: so fast others come behind in the order of eviction."""
    free_blocks: int
    """Of the pool."""
    available_blocks: int
    """Of the pool: free or evictable."""
    saved_ms: float
    """Prefill time that each of the next evictions gives up."""
    free_host_blocks: int
    host_blocks: int
    time_left_s: float = inf


@dataclass(frozen=True, slots=True)
class Costs:
    """Terms in milliseconds. `copies_ms` is infinite without room on the host."""

    memory_ms: float
    copies_ms: float
    host_ms: float
    again_ms: float
    return_ms: float

    def of(self, keep: Keep) -> float:
        match keep:
            case Keep.KEEP:
                return self.memory_ms
            case Keep.OFFLOAD:
                return self.copies_ms + self.host_ms + self.return_ms
            case Keep.DROP:
                return self.again_ms + self.return_ms

    def rounded(self) -> dict[str, float]:
        """The finite terms, for a record."""
        return {name: round(ms, 3) for name, ms in asdict(self).items() if isfinite(ms)}

    @property
    def cheapest(self) -> Keep:
        return min((Keep.KEEP, Keep.OFFLOAD, Keep.DROP), key=self.of)


def costs(stand: Stand, call: Call) -> Costs:
    """See the module's docstring."""
    points = call.wait_s or UNKNOWN_WAIT_S
    comes = 1.0 - call.lost_share
    weight = comes / len(points)
    lost_s = stand.time_left_s if isfinite(stand.time_left_s) else max(_LOST_S, *points)
    memory_ms = call.lost_share * _memory_ms(stand, lost_s) + weight * sum(_memory_ms(stand, t) for t in points)
    lost_blocks = weight * sum(_lost_blocks(stand, t) for t in points)
    copied = stand.kv_blocks + lost_blocks + comes * stand.private_blocks
    is_room = stand.kv_blocks <= stand.free_host_blocks
    return Costs(
        memory_ms=memory_ms,
        copies_ms=copied * stand.copy_ms if is_room else inf,
        host_ms=_host_ms(stand) if is_room else 0.0,
        again_ms=lost_blocks * stand.block_ms + comes * stand.private_tokens * stand.token_ms,
        return_ms=comes * stand.return_ms,
    )


def _memory_ms(stand: Stand, wait_s: float) -> float:
    evicted = max(0.0, stand.blocks_per_s * wait_s - stand.free_blocks) / max(1, stand.available_blocks)
    return stand.held_blocks * stand.saved_ms * evicted


def _lost_blocks(stand: Stand, wait_s: float) -> float:
    cacheable = stand.held_blocks - stand.private_blocks
    return min(max(0, cacheable), max(0.0, stand.blocks_per_s * wait_s - stand.available_blocks))


def _host_ms(stand: Stand) -> float:
    """What a preempted request saves by its copy, times how likely it will find no room for it."""
    taken = stand.host_blocks - stand.free_host_blocks + stand.kv_blocks
    share = taken / stand.host_blocks if stand.host_blocks else 0.0
    return stand.kv_blocks * max(0.0, stand.block_ms - 2.0 * stand.copy_ms) * share**2


class TakeRate:
    """Blocks a second that are given out or hit: an average that forgets with `_RATE_TAU_S`."""

    def __init__(self) -> None:
        self._per_s = 0.0
        self._seen = 0
        self._at: float | None = None

    def see(self, blocks: int, now: float) -> float:
        """`blocks`: all since the start. Short intervals are left to the next call."""
        if self._at is None:
            self._seen, self._at = blocks, now
        elif (passed_s := now - self._at) > 0.01 * _RATE_TAU_S:
            fresh = 1.0 - exp(-passed_s / _RATE_TAU_S)
            self._per_s += fresh * ((blocks - self._seen) / passed_s - self._per_s)
            self._seen, self._at = blocks, now
        return self._per_s
