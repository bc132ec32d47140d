"""Jobs for remote tiers."""

from __future__ import annotations

from kvoffload.tiers.remote_job import RemoteJob, Verb
from tests.kit.tiers.tier_contract import Records


def make_job(verb: Verb, records: Records) -> RemoteJob:
    moves = verb in (Verb.PUT, Verb.GET)
    return RemoteJob(
        1,
        verb,
        records.names,
        0.0,
        records.slots if moves else records.slots[:0],
        records.record_bytes,
        records.digests,
        records.parents,
    )
