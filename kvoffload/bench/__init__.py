"""Benchmarks: each answers one question, next to the limit it should approach. Measured code must not import them."""

from __future__ import annotations

from kvoffload.bench.arena import ArenaBenchmark
from kvoffload.bench.base import Benchmark
from kvoffload.bench.block_hash import BlockHashBenchmark
from kvoffload.bench.copy import CopyBenchmark
from kvoffload.bench.digest import DigestBenchmark
from kvoffload.bench.disk import DiskBenchmark
from kvoffload.bench.index import IndexBenchmark
from kvoffload.bench.mooncake import MooncakeBenchmark
from kvoffload.bench.page_map import PageMapBenchmark
from kvoffload.bench.peer import PeerBenchmark
from kvoffload.bench.rpc import RpcBenchmark
from kvoffload.bench.s3 import S3Benchmark
from kvoffload.bench.shm import ShmBenchmark
from kvoffload.bench.valkey import ValkeyBenchmark
from kvoffload.bench.web import WebBenchmark

BENCHMARKS: tuple[Benchmark, ...] = (
    ArenaBenchmark(),
    BlockHashBenchmark(),
    CopyBenchmark(),
    DigestBenchmark(),
    DiskBenchmark(),
    IndexBenchmark(),
    MooncakeBenchmark(),
    PageMapBenchmark(),
    PeerBenchmark(),
    RpcBenchmark(),
    S3Benchmark(),
    ShmBenchmark(),
    ValkeyBenchmark(),
    WebBenchmark(),
)
