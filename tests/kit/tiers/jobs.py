"""Jobs for remote tiers."""

from __future__ import annotations

from kvoffload.tiers.base import RecordBatch
from kvoffload.tiers.remote_job import RemoteJob, Verb
from tests.kit.tiers.tier_contract import Records


def make_job(verb: Verb, records: Records) -> RemoteJob:
    moves = verb in (Verb.PUT, Verb.GET)
    return RemoteJob(
        1,
        verb,
        RecordBatch(
            records.names,
            records.slots if moves else records.slots[:0],
            record_bytes=records.record_bytes,
            digests=records.digests,
            parents=records.parents,
        ),
        0.0,
    )
