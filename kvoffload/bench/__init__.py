"""The benchmarks that users run on their own machines: each answers one question, next to the limit it should approach.

Measured code must not import them. Benchmarks for developers are in `benchmarks/`, outside of the wheel.
"""

from __future__ import annotations

from kvoffload.bench.base import Benchmark
from kvoffload.bench.copy import CopyBenchmark
from kvoffload.bench.digest import DigestBenchmark
from kvoffload.bench.disk import DiskBenchmark
from kvoffload.bench.mooncake import MooncakeBenchmark
from kvoffload.bench.peer import PeerBenchmark
from kvoffload.bench.rpc import RpcBenchmark
from kvoffload.bench.s3 import S3Benchmark
from kvoffload.bench.shm import ShmBenchmark
from kvoffload.bench.valkey import ValkeyBenchmark

BENCHMARKS: tuple[Benchmark, ...] = (
    CopyBenchmark(),
    DigestBenchmark(),
    DiskBenchmark(),
    MooncakeBenchmark(),
    PeerBenchmark(),
    RpcBenchmark(),
    S3Benchmark(),
    ShmBenchmark(),
    ValkeyBenchmark(),
)
