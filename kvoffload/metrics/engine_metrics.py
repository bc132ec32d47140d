"""The metrics of an engine's connector, in the order of names."""

from __future__ import annotations

from kvoffload.metrics.metric import Kind, Metric, Source, Unit

_TRANSFER_BUCKETS = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

_SPEED_BUCKETS = (1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)

ENGINE_METRICS: tuple[Metric, ...] = (
    Metric(
        name="kvoffload_arrival_seconds",
        kind=Kind.HISTOGRAM,
        unit=Unit.SECONDS,
        help="Time that a request waited for blocks that another engine computed for it.",
        labels={},
        buckets=_TRANSFER_BUCKETS,
    ),
    Metric(
        name="kvoffload_arrivals_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Requests that expected blocks of another engine, by whether these came in time.",
        labels={"outcome": "arrived or late"},
    ),
    Metric(
        name="kvoffload_dropped_saves_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Blocks that should have been saved and were not, by the missing resource.",
        labels={
            "reason": "no_slot (room in the cache), no_pin (leave to hold more of the engine's blocks), no_server "
            "(it ended while they were copied to its memory)"
        },
    ),
    Metric(
        name="kvoffload_errors_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Faults that were turned into a miss or a refusal.",
        labels={"code": "an error code of docs/reference.md"},
    ),
    Metric(
        name="kvoffload_failed_loads_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Loads that failed after they were promised; the engine computes or ends those requests, as it is set.",
        labels={},
    ),
    Metric(
        name="kvoffload_failed_saves_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Saves that failed; their blocks are misses later.",
        labels={},
    ),
    Metric(
        name="kvoffload_faults_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Faults in hooks of the connector, each answered as if nothing had been cached.",
        labels={"hook": "a method that the engine calls"},
    ),
    Metric(
        name="kvoffload_hint_actions_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Actions of requests' hints, and wishes that count as actions, by what the server did or why it was not "
        "asked.",
        labels={
            "action": "prefetch, retain, release, priority, hand_over, or one that is not known: by its name at first, "
            "later `other`",
            "outcome": "done, partly, nothing, over_limit or no_room (answers), no_answer; unknown_action, "
            "unknown_version, wrong, too_many (of an envelope, or waiting for saves), skipped (nothing to do it with)",
        },
    ),
    Metric(
        name="kvoffload_hits_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Prompt tokens that were promised to the engine, by the tier that held them.",
        labels={"tier": "memory or lower"},
    ),
    Metric(
        name="kvoffload_leased_blocks",
        kind=Kind.GAUGE,
        unit=Unit.NONE,
        help="Cached blocks that are kept from eviction until they are loaded.",
        labels={},
    ),
    Metric(
        name="kvoffload_load_bytes_per_second",
        kind=Kind.HISTOGRAM,
        unit=Unit.BYTES_PER_SECOND,
        help="Speed of a load, from its planning until every byte is in the engine's KV cache.",
        labels={},
        buckets=_SPEED_BUCKETS,
    ),
    Metric(
        name="kvoffload_load_seconds",
        kind=Kind.HISTOGRAM,
        unit=Unit.SECONDS,
        help="Time of a load, until every byte is in the engine's KV cache.",
        labels={},
        buckets=_TRANSFER_BUCKETS,
    ),
    Metric(
        name="kvoffload_loaded_bytes_total",
        kind=Kind.COUNTER,
        unit=Unit.BYTES,
        help="Bytes that were copied into the engine's KV cache.",
        labels={},
    ),
    Metric(
        name="kvoffload_misses_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Prompt tokens that were asked about and not promised, by reason. With the hits they add up to the "
        "queries.",
        labels={
            "reason": "never_seen, too_short, not_served, refused, slow_to_answer, no_room, slower_than_computing, "
            "tier_too_slow or skipped"
        },
    ),
    Metric(
        name="kvoffload_pinned_blocks",
        kind=Kind.GAUGE,
        unit=Unit.NONE,
        help="Blocks of the engine that are held until they are saved.",
        labels={},
    ),
    Metric(
        name="kvoffload_queries_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Prompt tokens that the engine did not have itself and asked about.",
        labels={},
    ),
    Metric(
        name="kvoffload_registered_bytes",
        kind=Kind.GAUGE,
        unit=Unit.BYTES,
        help="Bytes of the engine's KV allocations, by the kind that the completeness proof found.",
        labels={"claim": "page, padding or exclusion"},
    ),
    Metric(
        name="kvoffload_registration_seconds",
        kind=Kind.HISTOGRAM,
        unit=Unit.SECONDS,
        help="Time to check, prove and self-test a registration, and to join the cache server.",
        labels={},
        buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    ),
    Metric(
        name="kvoffload_routed_expected_tokens_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Prompt tokens that a router took to be there, by the requests' expected_hit_tokens.",
        labels={},
    ),
    Metric(
        name="kvoffload_routed_hit_tokens_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Those of them that the engine had itself or was given: the others it computed.",
        labels={},
    ),
    Metric(
        name="kvoffload_routed_requests_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Requests of which a router expected hits, by whether all of these came.",
        labels={"outcome": "as_expected or less"},
    ),
    Metric(
        name="kvoffload_save_seconds",
        kind=Kind.HISTOGRAM,
        unit=Unit.SECONDS,
        help="Time of a save, until the engine's blocks may be used again.",
        labels={},
        buckets=_TRANSFER_BUCKETS,
    ),
    Metric(
        name="kvoffload_saved_bytes_total",
        kind=Kind.COUNTER,
        unit=Unit.BYTES,
        help="Bytes that were copied out of the engine's KV cache.",
        labels={},
    ),
    Metric(
        name="kvoffload_saved_seconds_total",
        kind=Kind.COUNTER,
        unit=Unit.SECONDS,
        help="Time in which this engine would have computed the promised tokens, at the speed of its prompts so far.",
        labels={},
    ),
    Metric(
        name="kvoffload_server_up",
        kind=Kind.GAUGE,
        unit=Unit.NONE,
        help="1 while the cache server answers, else 0.",
        labels={},
        source=Source.BOTH,
    ),
    Metric(
        name="kvoffload_server_warnings_total",
        kind=Kind.COUNTER,
        unit=Unit.NONE,
        help="Warnings of the cache server's log, each of which is in this engine's log too.",
        labels={},
    ),
)
