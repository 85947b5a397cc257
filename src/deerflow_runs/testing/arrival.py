"""The row of a newcomer as it is inserted; whether and where it gets in is decided in ``protocol.admission``."""

from __future__ import annotations

from deerflow_runs.model import Micros, Run, RunStatus
from deerflow_runs.protocol.admission import Newcomer


def arrival(newcomer: Newcomer, status: RunStatus, *, now: Micros, seq: int) -> Run:
    """The row of a newcomer: owned at epoch 1 if its session takes it at once, otherwise nobody's at epoch 0 (§3)."""
    owned = status is RunStatus.PENDING and newcomer.take
    return Run(
        run_id=newcomer.run_id,
        thread_id=newcomer.thread_id,
        kind=newcomer.kind,
        status=status,
        seq=seq,
        due_at=Micros(now + newcomer.delay),
        executor=newcomer.executor,
        payload_version=newcomer.payload_version,
        kwargs=newcomer.kwargs,
        assistant_id=newcomer.assistant_id,
        user_id=newcomer.user_id,
        model_name=newcomer.model_name,
        metadata=newcomer.metadata,
        strategy=newcomer.strategy,
        on_disconnect=newcomer.on_disconnect,
        on_orphan=newcomer.on_orphan,
        home_worker_id=newcomer.worker_id if newcomer.pinned else None,
        required_capabilities=newcomer.required_capabilities,
        idempotency_key=newcomer.idempotency_key,
        payload_digest=newcomer.payload_digest,
        owner_worker_id=newcomer.worker_id if owned else None,
        epoch=1 if owned else 0,
        attempt=1 if owned else 0,
        max_attempts=newcomer.max_attempts,
        granted_at=now if owned else None,
        not_before=Micros(now + newcomer.delay),
        run_timeout=newcomer.run_timeout,
        temporary=newcomer.temporary,
        deliveries=newcomer.deliveries,
        created_at=now,
        updated_at=now,
    )
