"""Code that decodes bytes from outside, and the fuzz targets of each. tests/house checks that none is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PYTHON: Final[Mapping[str, tuple[str, ...]]] = {
    "protocol_frames": (
        "kvoffload/protocol/codec.py",
        "kvoffload/wire_codec.py",
        "native/src/bindings/frame_reader.hpp",
    ),
    "server_core": ("kvoffload/server/operators/ledger.py", "kvoffload/server/sessions/adoption.py"),
    "zmtp_frames": ("kvoffload/zmtp.py",),
    "peer_link": (
        "kvoffload/peers/link_hello.py",
        "kvoffload/peers/requests.py",
        "kvoffload/peers/coded_records.py",
        "kvoffload/peers/peer_server.py",
        "kvoffload/peers/peer_store.py",
    ),
    "fleet_announcements": ("kvoffload/peers/announcement.py", "kvoffload/config/tcp_address.py"),
    "valkey_answers": (
        "kvoffload/tiers/resp_connection.py",
        "kvoffload/tiers/valkey_nodes.py",
        "kvoffload/tiers/valkey_slots.py",
        "kvoffload/tiers/valkey.py",
        "kvoffload/peers/fleet_registry.py",
    ),
    "stored_values": (
        "kvoffload/tiers/envelope.py",
        "kvoffload/tiers/s3_index.py",
        "kvoffload/tiers/s3_packs.py",
        "kvoffload/tiers/s3.py",
        "kvoffload/tiers/s3_bucket.py",
    ),
    "http_requests": (
        "kvoffload/web/http_message.py",
        "kvoffload/web/hint_envelope.py",
        "kvoffload/web/prefix_question.py",
    ),
    "local_files": (
        "kvoffload/cache/trace.py",
        "kvoffload/plan/model_shape.py",
        "kvoffload/transfer/calibration.py",
        "kvoffload/key_files.py",
        "kvoffload/warm/prompt_file.py",
        "kvoffload/warm/json_client.py",
        "kvoffload/audit/answers.py",
        "kvoffload/audit/audited_engine.py",
    ),
}
"""Modules of this folder, and what of kvoffload they fuzz."""

NATIVE: Final[Mapping[str, tuple[str, ...]]] = {
    "disk_folder": (
        "native/src/disk/disk_folder.cpp",
        "native/src/disk/recovery.cpp",
        "native/src/disk/device_reader.cpp",
        "native/src/disk/record_index.cpp",
    ),
    "express": (
        "native/src/frames/plain_frame.hpp",
        "native/src/service/express_stream.hpp",
        "native/src/service/express_messages.hpp",
        "native/src/service/block_service.cpp",
    ),
    "index_file": (
        "native/src/index/index_file.cpp",
        "native/src/cache/adoption.cpp",
        "native/src/cache/entry_store_adoption.cpp",
        "native/src/cache/index_reader.cpp",
    ),
    "record_codec": ("native/src/codec/record_codec.cpp", "native/src/codec/symbol_table.cpp"),
    "record_link": ("native/src/link/record_link.cpp", "native/src/link/sealing.cpp"),
    "resp_values": ("native/src/link/resp_values.cpp",),
    "segment": (
        "native/src/disk/recovery.cpp",
        "native/src/disk/record_format.cpp",
        "native/src/codec/record_seal.cpp",
    ),
}
"""Targets of native/fuzz, and what they fuzz."""

NOT_FROM_OUTSIDE: Final[Mapping[str, str]] = {
    "kvoffload/server/channels/curve_handshake.py": "what our own ROUTER says to a client",
    "kvoffload/tcp_peers.py": "the kernel's description of a socket",
    "kvoffload/packets.py": "credentials, from the kernel",
    "kvoffload/doctor/machine.py": "the clock's state, from the kernel",
    "kvoffload/cache/local_cache.py": "what the native core returns",
    "kvoffload/server/tiering/bad_records.py": "keys that it has made",
    "kvoffload/cache/index_reader.py": "what the native core returns",
    "kvoffload/config/sources.py": "the owner's own configuration, by tomllib",
    "kvoffload/cli/config.py": "the owner's own settings",
    "kvoffload/cli/inspect.py": "what its user types",
    "kvoffload/doctor/launch_checks.py": "what its user types",
    "kvoffload/cli/prompt_recorder.py": "fields of messages, whose sizes the codec has checked",
    "kvoffload/server/sessions/memory_record.py": "a file of the server's own user, which nobody else can write",
    "kvoffload/server/operators/prompt_ledger.py": "fields of messages, whose sizes the codec has checked",
    "kvoffload/server/hints/hint_calls.py": "fields of messages, whose sizes the codec has checked",
    "kvoffload/client/block_calls.py": "fields of the own server's answers, whose sizes the codec has checked",
    "kvoffload/client/insight.py": "fields of the own server's answers, whose sizes the codec has checked",
    "kvoffload/client/inspector.py": "fields of the own server's answers, whose sizes the codec has checked",
    "kvoffload/client/inventory.py": "fields of the own server's answers, whose sizes the codec has checked",
    "kvoffload/client/joining.py": "fields of the own server's answers, whose sizes the codec has checked",
    "kvoffload/client/link.py": "fields of the own server's answers, whose sizes the codec has checked",
    "kvoffload/connector/engine/pipeline.py": "ranks of one engine among themselves",
    "kvoffload/connector/engine/vllm_compat.py": "ranks of one engine among themselves",
    "kvoffload/connector/engine/events.py": "the engine's own hashes",
    "kvoffload/connector/engine/saved_tokens.py": "the engine's own hashes",
    "kvoffload/connector/common/block_chain.py": "the engine's own hashes",
    "kvoffload/connector/nodes/all_nodes.py": "names of the engine's own blocks",
    "kvoffload/connector/saves/leaving.py": "names of the engine's own blocks",
    "kvoffload/connector/saves/rank_part.py": "digests of the ranks of one engine",
    "kvoffload/connector/saves/rank_digests.py": "digests of the ranks of one engine",
    "kvoffload/connector/saves/saves.py": "digests of this process",
    "kvoffload/engines/record_mover.py": "digests of this process",
    "kvoffload/sglang/page_linker.py": "digests of this process",
    "kvoffload/keys/prompt_hashes.py": "tables and digests of this process",
    "kvoffload/web/prefixes.py": "fields of the own server's answers, whose sizes the codec has checked",
    "kvoffload/hash_rows.py": "a view, of bytes that others have checked",
    "kvoffload/tiers/record_store.py": "a copy, of bytes that others have checked",
    "kvoffload/tiers/homes.py": "hashes of this process",
    "kvoffload/tiers/disk.py": "what the native core returns",
    "kvoffload/cli/serve.py": "settings of the engine that starts a private server, checked like all settings",
    "kvoffload/tiers/store_process.py": "lines of a child of this process, in every form by its tests",
    "kvoffload/tiers/store_child.py": "lines of its parent",
    "kvoffload/tiers/s3_client.py": "shared memory, as numbers; values go through the envelope",
    "kvoffload/tiers/mooncake.py": "values of the store's own, which go through the envelope",
    "kvoffload/plan/exact.py": "the last line of a child of this process",
    "kvoffload/transfer/copy_engine.py": "what the native core returns",
}
"""Files that decode something else, and what."""
