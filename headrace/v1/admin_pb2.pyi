from headrace.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Member(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    address: str
    role: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class SetMembersRequest(_message.Message):
    __slots__ = ("version", "members", "siblings")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    siblings: _containers.RepeatedCompositeFieldContainer[Sibling]
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., siblings: _Optional[_Iterable[_Union[Sibling, _Mapping]]] = ...) -> None: ...

class Sibling(_message.Message):
    __slots__ = ("name", "incarnation", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    address: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class SetMembersResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("alone",)
    ALONE_FIELD_NUMBER: _ClassVar[int]
    alone: bool
    def __init__(self, alone: _Optional[bool] = ...) -> None: ...

class GatewayStatus(_message.Message):
    __slots__ = ("gateway_id", "live_requests", "bookings", "tasks", "accepted", "completed", "failed", "cancelled", "retries", "pid", "index_entries", "index_bytes", "grpc_address", "http_address", "open", "moves")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BOOKINGS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INDEX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    live_requests: int
    bookings: int
    tasks: int
    accepted: int
    completed: int
    failed: int
    cancelled: int
    retries: int
    pid: int
    index_entries: int
    index_bytes: int
    grpc_address: str
    http_address: str
    open: bool
    moves: int
    def __init__(self, gateway_id: _Optional[str] = ..., live_requests: _Optional[int] = ..., bookings: _Optional[int] = ..., tasks: _Optional[int] = ..., accepted: _Optional[int] = ..., completed: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., retries: _Optional[int] = ..., pid: _Optional[int] = ..., index_entries: _Optional[int] = ..., index_bytes: _Optional[int] = ..., grpc_address: _Optional[str] = ..., http_address: _Optional[str] = ..., open: _Optional[bool] = ..., moves: _Optional[int] = ...) -> None: ...

class WorkerView(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "address", "connected", "status", "refused")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: str
    address: str
    connected: bool
    status: _worker_pb2.WorkerStatusResponse
    refused: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., connected: _Optional[bool] = ..., status: _Optional[_Union[_worker_pb2.WorkerStatusResponse, _Mapping]] = ..., refused: _Optional[str] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("model", "gateway", "workers", "siblings")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    model: str
    gateway: GatewayStatus
    workers: _containers.RepeatedCompositeFieldContainer[WorkerView]
    siblings: _containers.RepeatedCompositeFieldContainer[GatewayStatus]
    def __init__(self, model: _Optional[str] = ..., gateway: _Optional[_Union[GatewayStatus, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerView, _Mapping]]] = ..., siblings: _Optional[_Iterable[_Union[GatewayStatus, _Mapping]]] = ...) -> None: ...

class AccountRequest(_message.Message):
    __slots__ = ("metrics",)
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: bool
    def __init__(self, metrics: _Optional[bool] = ...) -> None: ...

class AccountResponse(_message.Message):
    __slots__ = ("gateway", "live", "metrics")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    gateway: GatewayStatus
    live: _containers.RepeatedScalarFieldContainer[str]
    metrics: bytes
    def __init__(self, gateway: _Optional[_Union[GatewayStatus, _Mapping]] = ..., live: _Optional[_Iterable[str]] = ..., metrics: _Optional[bytes] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ("tenant", "all")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    all: bool
    def __init__(self, tenant: _Optional[str] = ..., all: _Optional[bool] = ...) -> None: ...

class ClearCacheResponse(_message.Message):
    __slots__ = ("workers", "unreachable")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedScalarFieldContainer[str]
    unreachable: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, workers: _Optional[_Iterable[str]] = ..., unreachable: _Optional[_Iterable[str]] = ...) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("worker_id", "request_id", "tenant", "to")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    request_id: str
    tenant: str
    to: str
    def __init__(self, worker_id: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., to: _Optional[str] = ...) -> None: ...

class MoveResponse(_message.Message):
    __slots__ = ("moved", "stay")
    MOVED_FIELD_NUMBER: _ClassVar[int]
    STAY_FIELD_NUMBER: _ClassVar[int]
    moved: int
    stay: int
    def __init__(self, moved: _Optional[int] = ..., stay: _Optional[int] = ...) -> None: ...

class AuditRequest(_message.Message):
    __slots__ = ("settle_s",)
    SETTLE_S_FIELD_NUMBER: _ClassVar[int]
    settle_s: float
    def __init__(self, settle_s: _Optional[float] = ...) -> None: ...

class AuditResponse(_message.Message):
    __slots__ = ("clean", "findings", "used_blocks", "leases", "transfers", "bookings", "quarantined_blocks")
    CLEAN_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    BOOKINGS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    clean: bool
    findings: _containers.RepeatedScalarFieldContainer[str]
    used_blocks: int
    leases: int
    transfers: int
    bookings: int
    quarantined_blocks: int
    def __init__(self, clean: _Optional[bool] = ..., findings: _Optional[_Iterable[str]] = ..., used_blocks: _Optional[int] = ..., leases: _Optional[int] = ..., transfers: _Optional[int] = ..., bookings: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ...) -> None: ...
