"""The events of the log by name. Names and fields are stable: people search and alert by them.

A log call names its event: ``log.warning("tier %s: ...", tier, extra=event("tier_stalled", tier=tier))``. The
text is for people and may change. Fields never hold token ids, keys' content or credentials. ``session``,
``request``, ``job``, ``lease``, ``generation`` and ``op`` join the lines of engine, daemon and tiers.
"""

from __future__ import annotations

from typing import Any

EVENTS = {
    "admin_failed": "a page of the admin port cannot be made",
    "admin_request_dropped": "a request to the admin port broke off (debug)",
    "config_reload_refused": "a changed tier file was not taken over; with every reason",
    "config_reloaded": "a changed tier file is in force; with the keys that differ",
    "config_warning": "the tier file is valid but doubtful",
    "connection_closed": "a connection was closed for what it did or did not do",
    "connection_refused": "a connection was not let in",
    "events_bound": "the first audience's endpoints",
    "events_not_sent": "a batch did not get out; readers repair the gap by a replay",
    "failed": "the daemon ends because of this; with its exit code",
    "folder_changed": "a tier's folder is another one than before",
    "handed_over": "another daemon serves in this one's place, with its engines",
    "handing_over": "another daemon takes over",
    "hash_seeds_differ": "two engines' blocks would be shared, were it not for their hash seed or algorithm",
    "layouts_differ": "engines of one model and tenant share nothing, and what they differ in",
    "journal_cut": "the end of the announced journal was torn and is cut off",
    "journal_degraded": "what is announced cannot be recorded",
    "journal_lost": "the announced journal cannot be read",
    "journal_restored": "what is announced is recorded again",
    "lines_left_out": "so many lines like the ones before were left out",
    "log_level": "the level of the log was changed",
    "loop_goes_on": "the event loop goes on after a stall",
    "loop_stalled": "the event loop has not gone round for a second; with the place where it stands",
    "namespace_not_described": "the readable record beside a namespace's blocks could not be written",
    "operation_ended": "a tier's operation ended, with outcomes (debug)",
    "operation_failed": "a tier's operation ended, and some blocks of it failed; each costs a recompute",
    "operation_started": "a tier's operation began (debug)",
    "operator_order": "an operator changed something on the control socket",
    "pool_not_handed_over": "an engine could not be given the pool",
    "pool_goes_on": "the blocks of the pool survived the daemon before",
    "pool_not_kept": "what an earlier daemon left of a pool cannot be gone on with",
    "pool_written_down": "the last engine left, and what only the pool holds is written to the tiers",
    "ready": "engines can attach",
    "relay_degraded": "what an engine announces cannot be recorded",
    "relay_left": "an engine whose events are passed on is gone",
    "relay_restored": "what an engine announces is recorded again",
    "request_answered": "a request of an engine was answered (debug)",
    "scan_broke_off": "a tier's index could not be made",
    "scan_in_process": "a tier is indexed without a process of its own",
    "sequence_degraded": "batch numbers cannot be kept across a restart",
    "slot_table_cut": "the end of the pool's slot table was torn and is cut off",
    "slot_table_degraded": "the pool's slot table cannot be written: the pool would not survive a crash",
    "started": "what runs, and on which tier file",
    "state_not_written": "a small file of the state could not be written or read",
    "stopped": "the daemon ended in order",
    "stopping": "somebody asked the daemon to stop",
    "storage_not_closed": "a tier's storage does not close; it is left as it is",
    "storage_unusable": "a tier's storage cannot be used; it is tried again",
    "storage_usable": "a tier's storage can be used now",
    "takeover_failed": "the daemon that wanted to take over did not get ready; this one goes on",
    "takeover_refused": "a daemon may not take over; this one goes on",
    "tier_answers": "a stalled tier answers again",
    "tier_exception": "a tier's backend raised what it should not",
    "tier_fault": "a tier's storage failed an operation",
    "tier_indexed": "a tier's content is known",
    "tier_stalled": "a tier's operation takes longer than its deadline",
    "tier_unfinished": "operations of a tier did not end in time at the stop",
    "traces_unavailable": "traces are wanted and their packages are not there",
    "turn_failed": "a bug: the daemon ends so that nothing wrong is served or told",
}
RESERVED = frozenset({"ts", "level", "event", "logger", "message", "exception", "stack", "left_out"})


def event(name: str, **fields: Any) -> dict[str, Any]:
    """Return a log call's ``extra`` for an event of :data:`EVENTS`; ``stack`` gets lines of its own."""
    return {"event": name, "fields": fields}
