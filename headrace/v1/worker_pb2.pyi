from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "adopt", "finish", "heartbeat", "cache_resync", "clear_cache", "resume", "pause", "peers")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    CACHE_RESYNC_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    submit: Submit
    adopt: Adopt
    finish: Finish
    heartbeat: Heartbeat
    cache_resync: CacheResync
    clear_cache: ClearCache
    resume: Resume
    pause: Pause
    peers: Peers
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., cache_resync: _Optional[_Union[CacheResync, _Mapping]] = ..., clear_cache: _Optional[_Union[ClearCache, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[PeerAddress]
    def __init__(self, holders: _Optional[_Iterable[_Union[PeerAddress, _Mapping]]] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("handle", "num_output", "tool", "wait_s", "lost_share")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    LOST_SHARE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    num_output: int
    tool: str
    wait_s: _containers.RepeatedScalarFieldContainer[float]
    lost_share: float
    def __init__(self, handle: _Optional[int] = ..., num_output: _Optional[int] = ..., tool: _Optional[str] = ..., wait_s: _Optional[_Iterable[float]] = ..., lost_share: _Optional[float] = ...) -> None: ...

class CacheResync(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClearCache(_message.Message):
    __slots__ = ("tenant", "all")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    all: bool
    def __init__(self, tenant: _Optional[str] = ..., all: _Optional[bool] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("handle", "token_ids")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handle: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("gateway_id",)
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    def __init__(self, gateway_id: _Optional[str] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed", "branch", "ignore_eos", "stop_token_ids", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_ids", "bias_amounts", "logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_AMOUNTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    branch: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_amounts: _containers.RepeatedScalarFieldContainer[float]
    logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., branch: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_ids: _Optional[_Iterable[int]] = ..., bias_amounts: _Optional[_Iterable[float]] = ..., logprobs: _Optional[int] = ...) -> None: ...

class RequestBody(_message.Message):
    __slots__ = ("request_id", "attempt", "prompt_ids", "output_ids", "sampling", "time_left_s", "namespace", "no_cache", "tenant", "priority", "endpoint", "task", "reserved_output_tokens", "steps_left", "tenant_service", "inserts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NO_CACHE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    RESERVED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_LEFT_FIELD_NUMBER: _ClassVar[int]
    TENANT_SERVICE_FIELD_NUMBER: _ClassVar[int]
    INSERTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    time_left_s: float
    namespace: bytes
    no_cache: bool
    tenant: str
    priority: int
    endpoint: str
    task: str
    reserved_output_tokens: int
    steps_left: int
    tenant_service: float
    inserts: _containers.RepeatedCompositeFieldContainer[Insert]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., time_left_s: _Optional[float] = ..., namespace: _Optional[bytes] = ..., no_cache: _Optional[bool] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., endpoint: _Optional[str] = ..., task: _Optional[str] = ..., reserved_output_tokens: _Optional[int] = ..., steps_left: _Optional[int] = ..., tenant_service: _Optional[float] = ..., inserts: _Optional[_Iterable[_Union[Insert, _Mapping]]] = ...) -> None: ...

class Insert(_message.Message):
    __slots__ = ("position", "token_ids")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "submit_seq", "body", "hand_off", "fetch")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_SEQ_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    handle: int
    submit_seq: int
    body: RequestBody
    hand_off: bool
    fetch: Fetch
    def __init__(self, handle: _Optional[int] = ..., submit_seq: _Optional[int] = ..., body: _Optional[_Union[RequestBody, _Mapping]] = ..., hand_off: _Optional[bool] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("source", "num_blocks")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    source: PeerAddress
    num_blocks: int
    def __init__(self, source: _Optional[_Union[PeerAddress, _Mapping]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("handle", "submit_seq", "body", "source", "number")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_SEQ_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    handle: int
    submit_seq: int
    body: RequestBody
    source: PeerAddress
    number: int
    def __init__(self, handle: _Optional[int] = ..., submit_seq: _Optional[int] = ..., body: _Optional[_Union[RequestBody, _Mapping]] = ..., source: _Optional[_Union[PeerAddress, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class PeerAddress(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("handle", "reason")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: str
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("hello", "started", "tokens", "done", "failed", "load", "prefilled", "cache", "paused", "paired")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    PAIRED_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    started: Started
    tokens: Tokens
    done: Done
    failed: Failed
    load: LoadReport
    prefilled: Prefilled
    cache: CacheEvents
    paused: Paused
    paired: Paired
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ..., paused: _Optional[_Union[Paused, _Mapping]] = ..., paired: _Optional[_Union[Paired, _Mapping]] = ...) -> None: ...

class Paired(_message.Message):
    __slots__ = ("holder_id", "holder_incarnation", "lane", "lane_gbps", "note", "refused")
    class LaneGbpsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    LANE_GBPS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    holder_id: str
    holder_incarnation: str
    lane: str
    lane_gbps: _containers.ScalarMap[str, float]
    note: str
    refused: bool
    def __init__(self, holder_id: _Optional[str] = ..., holder_incarnation: _Optional[str] = ..., lane: _Optional[str] = ..., lane_gbps: _Optional[_Mapping[str, float]] = ..., note: _Optional[str] = ..., refused: _Optional[bool] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("epoch", "from_seq", "to_seq", "snapshot", "stored", "removed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    TO_SEQ_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    from_seq: int
    to_seq: int
    snapshot: bool
    stored: bytes
    removed: bytes
    def __init__(self, epoch: _Optional[int] = ..., from_seq: _Optional[int] = ..., to_seq: _Optional[int] = ..., snapshot: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ...) -> None: ...

class Paused(_message.Message):
    __slots__ = ("handle", "keep")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    handle: int
    keep: str
    def __init__(self, handle: _Optional[int] = ..., keep: _Optional[str] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("handle", "ledger")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    handle: int
    ledger: WorkerLedger
    def __init__(self, handle: _Optional[int] = ..., ledger: _Optional[_Union[WorkerLedger, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "fingerprint", "block_size", "total_blocks", "max_model_len", "lane", "chunk_tokens", "card")
    class CardEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: str
    fingerprint: str
    block_size: int
    total_blocks: int
    max_model_len: int
    lane: str
    chunk_tokens: int
    card: _containers.ScalarMap[str, str]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., lane: _Optional[str] = ..., chunk_tokens: _Optional[int] = ..., card: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("handle", "cached_tokens", "queue_s")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    handle: int
    cached_tokens: int
    queue_s: float
    def __init__(self, handle: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("handle", "offset", "token_id", "logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: _containers.RepeatedScalarFieldContainer[int]
    offset: _containers.RepeatedScalarFieldContainer[int]
    token_id: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    def __init__(self, handle: _Optional[_Iterable[int]] = ..., offset: _Optional[_Iterable[int]] = ..., token_id: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("row", "logprob", "num_top", "top_id", "top_logprob")
    ROW_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_ID_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    row: _containers.RepeatedScalarFieldContainer[int]
    logprob: _containers.RepeatedScalarFieldContainer[float]
    num_top: _containers.RepeatedScalarFieldContainer[int]
    top_id: _containers.RepeatedScalarFieldContainer[int]
    top_logprob: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, row: _Optional[_Iterable[int]] = ..., logprob: _Optional[_Iterable[float]] = ..., num_top: _Optional[_Iterable[int]] = ..., top_id: _Optional[_Iterable[int]] = ..., top_logprob: _Optional[_Iterable[float]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("handle", "reason", "ledger", "output_hash")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_HASH_FIELD_NUMBER: _ClassVar[int]
    handle: int
    reason: str
    ledger: WorkerLedger
    output_hash: bytes
    def __init__(self, handle: _Optional[int] = ..., reason: _Optional[str] = ..., ledger: _Optional[_Union[WorkerLedger, _Mapping]] = ..., output_hash: _Optional[bytes] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("handle", "code", "reason", "message", "retry_after_s")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    handle: int
    code: str
    reason: str
    message: str
    retry_after_s: float
    def __init__(self, handle: _Optional[int] = ..., code: _Optional[str] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class WorkerLedger(_message.Message):
    __slots__ = ("queue_s", "prefill_s", "sampling_s", "hand_off_s", "decode_s", "preempted_s", "cached_tokens", "computed_tokens", "bytes_moved", "transfer_s", "lane", "tool_wait_s")
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_S_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    TOOL_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    queue_s: float
    prefill_s: float
    sampling_s: float
    hand_off_s: float
    decode_s: float
    preempted_s: float
    cached_tokens: int
    computed_tokens: int
    bytes_moved: int
    transfer_s: float
    lane: str
    tool_wait_s: float
    def __init__(self, queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., sampling_s: _Optional[float] = ..., hand_off_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., preempted_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., transfer_s: _Optional[float] = ..., lane: _Optional[str] = ..., tool_wait_s: _Optional[float] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("submit_seq", "waiting_requests", "waiting_tokens", "running_requests", "adopting_requests", "free_blocks", "evictable_blocks", "total_blocks", "step_age_s", "step_s", "cache_epoch", "cache_seq", "queue_s", "decode_rows", "decode_context", "expected_output_tokens", "step_costs", "eviction_ms_per_block", "restore_block_s", "closed")
    SUBMIT_SEQ_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ADOPTING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CACHE_SEQ_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_MS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    RESTORE_BLOCK_S_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    submit_seq: int
    waiting_requests: int
    waiting_tokens: int
    running_requests: int
    adopting_requests: int
    free_blocks: int
    evictable_blocks: int
    total_blocks: int
    step_age_s: float
    step_s: float
    cache_epoch: int
    cache_seq: int
    queue_s: float
    decode_rows: int
    decode_context: int
    expected_output_tokens: int
    step_costs: _containers.RepeatedScalarFieldContainer[float]
    eviction_ms_per_block: float
    restore_block_s: float
    closed: str
    def __init__(self, submit_seq: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., running_requests: _Optional[int] = ..., adopting_requests: _Optional[int] = ..., free_blocks: _Optional[int] = ..., evictable_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., step_age_s: _Optional[float] = ..., step_s: _Optional[float] = ..., cache_epoch: _Optional[int] = ..., cache_seq: _Optional[int] = ..., queue_s: _Optional[float] = ..., decode_rows: _Optional[int] = ..., decode_context: _Optional[int] = ..., expected_output_tokens: _Optional[int] = ..., step_costs: _Optional[_Iterable[float]] = ..., eviction_ms_per_block: _Optional[float] = ..., restore_block_s: _Optional[float] = ..., closed: _Optional[str] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("number", "open", "verify", "pulled", "close", "heartbeat")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    number: int
    open: LeaseOpen
    verify: LeaseVerify
    pulled: LeasePulled
    close: LeaseClose
    heartbeat: Heartbeat
    def __init__(self, number: _Optional[int] = ..., open: _Optional[_Union[LeaseOpen, _Mapping]] = ..., verify: _Optional[_Union[LeaseVerify, _Mapping]] = ..., pulled: _Optional[_Union[LeasePulled, _Mapping]] = ..., close: _Optional[_Union[LeaseClose, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class LeaseOpen(_message.Message):
    __slots__ = ("request_id", "attempt", "reader", "holder_incarnation", "proof", "block_hashes", "number")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reader: PeerAddress
    holder_incarnation: str
    proof: bytes
    block_hashes: bytes
    number: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reader: _Optional[_Union[PeerAddress, _Mapping]] = ..., holder_incarnation: _Optional[str] = ..., proof: _Optional[bytes] = ..., block_hashes: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class LeaseVerify(_message.Message):
    __slots__ = ("lease_id", "holder_incarnation")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    holder_incarnation: str
    def __init__(self, lease_id: _Optional[str] = ..., holder_incarnation: _Optional[str] = ...) -> None: ...

class LeasePulled(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class LeaseClose(_message.Message):
    __slots__ = ("completed", "bytes_moved")
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    completed: bool
    bytes_moved: int
    def __init__(self, completed: _Optional[bool] = ..., bytes_moved: _Optional[int] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("number", "opened", "announce", "hand_off", "held", "revoked", "heartbeat")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    number: int
    opened: LeaseOpened
    announce: LeaseAnnounce
    hand_off: HandOff
    held: LeaseHeld
    revoked: LeaseRevoked
    heartbeat: Heartbeat
    def __init__(self, number: _Optional[int] = ..., opened: _Optional[_Union[LeaseOpened, _Mapping]] = ..., announce: _Optional[_Union[LeaseAnnounce, _Mapping]] = ..., hand_off: _Optional[_Union[HandOff, _Mapping]] = ..., held: _Optional[_Union[LeaseHeld, _Mapping]] = ..., revoked: _Optional[_Union[LeaseRevoked, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class LeaseOpened(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class LeaseAnnounce(_message.Message):
    __slots__ = ("first_block", "blocks", "digests")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_block: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class HandOff(_message.Message):
    __slots__ = ("output_ids", "num_tokens", "finished", "ledger", "logprobs")
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: int
    finished: bool
    ledger: WorkerLedger
    logprobs: Logprobs
    def __init__(self, output_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[int] = ..., finished: _Optional[bool] = ..., ledger: _Optional[_Union[WorkerLedger, _Mapping]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class LeaseHeld(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PairRequest(_message.Message):
    __slots__ = ("hello", "proof")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    hello: PairHello
    proof: PairProof
    def __init__(self, hello: _Optional[_Union[PairHello, _Mapping]] = ..., proof: _Optional[_Union[PairProof, _Mapping]] = ...) -> None: ...

class PairHello(_message.Message):
    __slots__ = ("reader", "holder_incarnation", "nonce")
    READER_FIELD_NUMBER: _ClassVar[int]
    HOLDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    reader: PeerAddress
    holder_incarnation: str
    nonce: bytes
    def __init__(self, reader: _Optional[_Union[PeerAddress, _Mapping]] = ..., holder_incarnation: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class PairProof(_message.Message):
    __slots__ = ("proof", "card")
    class CardEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROOF_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    card: _containers.ScalarMap[str, str]
    def __init__(self, proof: _Optional[bytes] = ..., card: _Optional[_Mapping[str, str]] = ...) -> None: ...

class PairResponse(_message.Message):
    __slots__ = ("challenge", "accepted")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    challenge: PairChallenge
    accepted: PairAccepted
    def __init__(self, challenge: _Optional[_Union[PairChallenge, _Mapping]] = ..., accepted: _Optional[_Union[PairAccepted, _Mapping]] = ...) -> None: ...

class PairChallenge(_message.Message):
    __slots__ = ("nonce", "proof")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class PairAccepted(_message.Message):
    __slots__ = ("ranks", "probe_block", "probe_blocks", "proof")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PROBE_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PROBE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[RankPool]
    probe_block: int
    probe_blocks: int
    proof: bytes
    def __init__(self, ranks: _Optional[_Iterable[_Union[RankPool, _Mapping]]] = ..., probe_block: _Optional[int] = ..., probe_blocks: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class RankPool(_message.Message):
    __slots__ = ("lanes",)
    class LanesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    LANES_FIELD_NUMBER: _ClassVar[int]
    lanes: _containers.ScalarMap[str, bytes]
    def __init__(self, lanes: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class LeaseRevoked(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class WorkerStatusRequest(_message.Message):
    __slots__ = ("audit",)
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    audit: bool
    def __init__(self, audit: _Optional[bool] = ...) -> None: ...

class BlockHolder(_message.Message):
    __slots__ = ("holder", "blocks")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    holder: str
    blocks: int
    def __init__(self, holder: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class WorkerStatusResponse(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "load", "live_requests", "leases", "handoffs", "transfers", "quarantined_blocks", "used_blocks", "holders", "integrity_error", "sessions", "counters", "pid", "transport", "policy", "predictor_ready", "predictor_error", "predictor_samples", "histograms", "tenant_service", "refusals", "last_schedule_s", "last_apply_s", "host_blocks", "free_host_blocks", "reserved_kv_tokens", "queue_s", "tiers", "tenant_caches", "pairs")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class HistogramsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Histogram
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...
    class TenantServiceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class RefusalsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_ERROR_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREDICTOR_READY_FIELD_NUMBER: _ClassVar[int]
    PREDICTOR_ERROR_FIELD_NUMBER: _ClassVar[int]
    PREDICTOR_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    HISTOGRAMS_FIELD_NUMBER: _ClassVar[int]
    TENANT_SERVICE_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    LAST_SCHEDULE_S_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLY_S_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TENANT_CACHES_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: str
    load: LoadReport
    live_requests: int
    leases: int
    handoffs: int
    transfers: int
    quarantined_blocks: int
    used_blocks: int
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolder]
    integrity_error: str
    sessions: int
    counters: _containers.ScalarMap[str, float]
    pid: int
    transport: str
    policy: str
    predictor_ready: bool
    predictor_error: float
    predictor_samples: int
    histograms: _containers.MessageMap[str, Histogram]
    tenant_service: _containers.ScalarMap[str, float]
    refusals: _containers.ScalarMap[str, int]
    last_schedule_s: float
    last_apply_s: float
    host_blocks: int
    free_host_blocks: int
    reserved_kv_tokens: int
    queue_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    tenant_caches: _containers.RepeatedCompositeFieldContainer[TenantCache]
    pairs: _containers.RepeatedCompositeFieldContainer[PairStatus]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., load: _Optional[_Union[LoadReport, _Mapping]] = ..., live_requests: _Optional[int] = ..., leases: _Optional[int] = ..., handoffs: _Optional[int] = ..., transfers: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[BlockHolder, _Mapping]]] = ..., integrity_error: _Optional[str] = ..., sessions: _Optional[int] = ..., counters: _Optional[_Mapping[str, float]] = ..., pid: _Optional[int] = ..., transport: _Optional[str] = ..., policy: _Optional[str] = ..., predictor_ready: _Optional[bool] = ..., predictor_error: _Optional[float] = ..., predictor_samples: _Optional[int] = ..., histograms: _Optional[_Mapping[str, Histogram]] = ..., tenant_service: _Optional[_Mapping[str, float]] = ..., refusals: _Optional[_Mapping[str, int]] = ..., last_schedule_s: _Optional[float] = ..., last_apply_s: _Optional[float] = ..., host_blocks: _Optional[int] = ..., free_host_blocks: _Optional[int] = ..., reserved_kv_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., tenant_caches: _Optional[_Iterable[_Union[TenantCache, _Mapping]]] = ..., pairs: _Optional[_Iterable[_Union[PairStatus, _Mapping]]] = ...) -> None: ...

class PairStatus(_message.Message):
    __slots__ = ("holder_id", "lane", "lane_gbps", "bytes", "transfer_s", "exposed_s", "reads", "stalls", "retries", "failures", "corrupt_blocks")
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    LANE_GBPS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    holder_id: str
    lane: str
    lane_gbps: float
    bytes: int
    transfer_s: float
    exposed_s: float
    reads: int
    stalls: int
    retries: int
    failures: int
    corrupt_blocks: int
    def __init__(self, holder_id: _Optional[str] = ..., lane: _Optional[str] = ..., lane_gbps: _Optional[float] = ..., bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., reads: _Optional[int] = ..., stalls: _Optional[int] = ..., retries: _Optional[int] = ..., failures: _Optional[int] = ..., corrupt_blocks: _Optional[int] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "capacity_blocks", "cached_blocks", "used_blocks", "free_blocks", "block_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    capacity_blocks: int
    cached_blocks: int
    used_blocks: int
    free_blocks: int
    block_bytes: int
    def __init__(self, name: _Optional[str] = ..., capacity_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class TenantCache(_message.Message):
    __slots__ = ("tenant", "blocks")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    blocks: int
    def __init__(self, tenant: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds", "counts", "sum")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...
