"""Stores: reserve slots, let the engine copy, make the blocks visible at once on commit."""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.core.cascade import Cascade
from kvtierd.core.custody import Custody
from kvtierd.core.effects import Committed, Done, ErrorCode, Prepared, Refused, Skipped
from kvtierd.core.model import Block, BlockId, BlockKey, BlockMeta, SkipReason, State, group_of
from kvtierd.core.residency import Link, PoolNode, links_of
from kvtierd.core.scope import select
from kvtierd.core.sessions import Job, Session, Sessions
from kvtierd.core.stack import Stack
from kvtierd.core.stimuli import Abort, Commit, Fail, PrepareStore
from kvtierd.core.tier import PoolSpace


class Stores:
    """Store jobs from reservation to commit, abort or expiry."""

    def __init__(
        self, stack: Stack, sessions: Sessions, custody: Custody, cascade: Cascade, job_ttl: float
    ) -> None:
        self._stack = stack
        self._sessions = sessions
        self._custody = custody
        self._cascade = cascade
        self._ttl = job_ttl
        self._wishes: dict[PoolNode, set[tuple[str, ...] | None]] = {}
        """Where else blocks shall go that a store found reserved by another one (pending is not never)."""

    def retune(self, job_ttl: float) -> None:
        """Give jobs from now on so many seconds."""
        self._ttl = job_ttl

    def prepare(self, session: Session, request: PrepareStore) -> None:
        """Reserve what can be reserved; what cannot is named with the reason."""
        space = self._stack.primary.spaces[session.namespace]
        index, namespace, sizes = space.index, session.namespace, space.geometry.payload_bytes
        only = sizes[0] if len(sizes) == 1 else 0
        metas: Sequence[BlockMeta | None] = request.meta or (None,) * len(request.keys)
        reserved: dict[BlockKey, PoolNode] = {}
        skipped: list[Skipped] = []
        refused: set[Link] = set()
        generation = self._stack.next_generation()
        block: Block | None = None
        for key, meta in zip(request.keys, metas, strict=True):
            there = index.get(key)
            if there is not None:
                skipped.append(Skipped(key, self._present(space, there)))
                block = there.block
                continue
            size = only or sizes[group_of(key)]
            block = Block.of(BlockId(namespace, key), size, meta, session.dp_rank, block)
            node = PoolNode(block, State.RESERVED, 1, generation=generation)
            reason = self._reserve(space, node, refused)
            if reason is None:
                reserved[key] = node
            else:
                skipped.append(Skipped(key, reason))
        for skip in skipped:
            self._stack.primary.counters[f"store_skipped_{skip.reason.value}"] += 1
        number = self._open_job(session, request, reserved, generation) if reserved else 0
        if skipped:
            self._copy_down(session, request, skipped)
        self._stack.answer(
            session.number,
            Prepared(
                id=request.id,
                job=number,
                generation=generation,
                pool_id=self._stack.pool_id,
                keys=tuple(reserved),
                slots=tuple([node.slot for node in reserved.values()]),
                skipped=tuple(skipped),
            ),
        )

    @staticmethod
    def _present(space: PoolSpace, node: PoolNode) -> SkipReason:
        if node.state is not State.RESIDENT:
            return SkipReason.PENDING
        space.blocks.touch(node)
        return SkipReason.RESIDENT

    def _reserve(self, space: PoolSpace, node: PoolNode, refused: set[Link]) -> SkipReason | None:
        """Put a block into the set and give it a slot, or say why not; then it is among the refused."""
        if refused and (links := links_of(node.block))[1] in refused:
            refused.add(links[0])
            return SkipReason.PARENT_REFUSED
        space.blocks.add(node)  # from here on its parent is no candidate for eviction
        slot = self._stack.take_slot(space)
        if slot is None:
            space.blocks.remove(node)
            refused.add(node.link)
            return SkipReason.NO_ROOM
        node.slot = slot
        return None

    def _copy_down(self, session: Session, request: PrepareStore, skipped: Sequence[Skipped]) -> None:
        """Let blocks that are in the pool, now or soon, reach the secondaries that this store asks for."""
        targets = self._targets(request)
        index = self._stack.primary.spaces[session.namespace].index
        keys = []
        for skip in skipped:
            node = index.get(skip.key)
            if node is not None and node.state in (State.RESIDENT, State.LOADING):
                keys.append(skip.key)
            elif node is not None:
                self._wishes.setdefault(node, set()).add(targets)
        self._cascade.want(session.namespace, keys, targets)

    def _targets(self, request: PrepareStore) -> tuple[str, ...] | None:
        patterns = request.scope.store_to if request.scope is not None else None
        return select(patterns, self._stack.secondaries)

    def _open_job(
        self, session: Session, request: PrepareStore, nodes: dict[BlockKey, PoolNode], generation: int
    ) -> int:
        number = self._sessions.next_number()
        self._sessions.jobs[number] = Job(
            number=number,
            session=session.number,
            engine=session.engine,
            generation=generation,
            deadline=self._stack.now + self._ttl,
            nodes=nodes,
            store_to=self._targets(request),
        )
        self._sessions.hold(number, session.engine, list(nodes.values()))
        return number

    def commit(self, session: Session, request: Commit) -> None:
        """Make the job's blocks visible and start their way down; answered when they are visible."""
        job = self._sessions.jobs.get(request.job)
        if job is None or job.session != session.number:
            self._custody.resolve(request.job, session.engine)
            self._refuse(
                session, request.id, ErrorCode.UNKNOWN_JOB, f"job {request.job} is not open: not stored"
            )
            return
        if (request.pool_id, request.generation) != (self._stack.pool_id, job.generation):
            self._end(job)
            self._refuse(session, request.id, ErrorCode.STALE_POOL, "another pool or generation: not stored")
            return
        void = job.failed.union(request.failed)
        stored = {
            key: node for key, node in job.nodes.items() if node.state is State.RESERVED and key not in void
        }
        self._stack.primary.publish(stored.values())
        wishes = [(node, self._wishes[node]) for node in stored.values() if node in self._wishes]
        self._end(job)
        self._stack.answer(session.number, Committed(id=request.id, stored=tuple(stored)))
        self._cascade.want(session.namespace, stored, job.store_to)
        for node, wished in wishes:
            for targets in wished:
                self._cascade.want(session.namespace, [node.block.key], targets)

    def abort(self, session: Session, request: Abort) -> None:
        """End a job without storing; the slots are free, on the scheduler's word."""
        job = self._sessions.jobs.get(request.job)
        if job is not None and job.session == session.number:
            self._end(job)
        else:
            self._custody.resolve(request.job, session.engine)
        self._stack.answer(session.number, Done(id=request.id))

    def fail(self, session: Session, request: Fail) -> None:
        """Void keys of a job on a worker's word."""
        job = self._sessions.jobs.get(request.job)
        if job is None or job.engine != session.engine:
            self._refuse(session, request.id, ErrorCode.UNKNOWN_JOB, f"job {request.job} is not open")
            return
        keys = [key for key in request.keys if key in job.nodes]
        job.failed.update(keys)
        self._sessions.failed_copies[session.rank] += len(keys)
        self._stack.answer(session.number, Done(id=request.id, count=len(keys)))

    def _end(self, job: Job) -> None:
        """Close a job whose copies are known to be over; what is not visible by now never was."""
        del self._sessions.jobs[job.number]
        self._sessions.let_go(job.number)
        for node in job.nodes.values():
            if self._wishes:
                self._wishes.pop(node, None)
            if node.state is State.RESERVED:
                self._stack.primary.abandon(node)
        self._stack.primary.unpin(job.nodes.values())

    def revoke(self, job: Job) -> None:
        """End a job without its scheduler's word: nothing is stored, the slots go into quarantine."""
        del self._sessions.jobs[job.number]
        self._stack.primary.counters["jobs_revoked"] += 1
        for node in job.nodes.values():
            self._wishes.pop(node, None)
            if node.state is not State.GONE:
                self._stack.primary.abandon(node)
        self._custody.quarantine(job.number, job.session, job.engine, list(job.nodes.values()))

    def _refuse(self, session: Session, request: int, code: ErrorCode, message: str) -> None:
        self._stack.answer(session.number, Refused(id=request, code=code, message=message))
