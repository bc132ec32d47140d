"""The error tree. A fault of the world has a class here, a code, one line of text, and usually a remedy.

    KVOffloadError                    internal
    ├── ConfigError                   config
    │   └── TakenFolderError          config.taken_folder
    ├── UnsupportedError              unsupported
    ├── NativeError                   native
    ├── IdentityError                 identity
    ├── GeometryError                 geometry
    │   ├── BlockCountError           geometry.block_count
    │   ├── BlockAlignmentError       geometry.block_alignment
    │   ├── AmbiguousLayoutError      geometry.ambiguous_layout
    │   ├── StrideError               geometry.stride
    │   ├── StorageError              geometry.storage
    │   ├── DtypeError                geometry.dtype
    │   ├── UnknownLayerError         geometry.unknown_layer
    │   ├── OverlapError              geometry.overlap
    │   └── HoleError                 geometry.hole
    ├── RegistrationError             registration
    ├── SelfTestError                 self_test
    ├── CacheMemoryError              cache.memory
    ├── PrivateServerError            private_server
    ├── ProtocolError                 protocol
    ├── PacketError                   packet
    ├── ServerError                   server
    ├── TierError                     tier
    └── BenchmarkError                benchmark

Misses, pending answers and refusals that are part of normal work are values, not exceptions. The texts of codes are
the table in docs/reference.md, which is made from this file.
"""

from __future__ import annotations

from collections.abc import Iterator


class KVOffloadError(Exception):
    """Root of everything kvoffload raises on purpose."""

    code = "internal"
    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "", **context: object) -> None:
        """`message` is one line: what and where. `remedy` says what to do. `context` is for logs and tests."""
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.context = context

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (an engine's worker to its front-end), keyword arguments included.
        return (_rebuild, (type(self), self.message, self.remedy, self.context))


def _rebuild(kind: type[KVOffloadError], message: str, remedy: str, context: dict[str, object]) -> KVOffloadError:
    return kind(message, remedy=remedy, **context)


class ConfigError(KVOffloadError):
    """A setting has an unknown name or a value that is not allowed; nothing was started."""

    code = "config"
    exit_code = 2


class TakenFolderError(ConfigError):
    """A private server's folder cannot be made, because another user has taken its name."""

    code = "config.taken_folder"


class UnsupportedError(KVOffloadError):
    """The requested feature does not exist in this version, on this machine, or with this engine."""

    code = "unsupported"


class NativeError(KVOffloadError):
    """The compiled extension is missing, or what it was asked to do failed."""

    code = "native"


class IdentityError(KVOffloadError):
    """A model, an adapter or an engine cannot be identified, so its cache cannot be kept apart from others."""

    code = "identity"
    exit_code = 2


class GeometryError(KVOffloadError):
    """The description of an engine's KV cache contradicts itself or the memory it describes."""

    code = "geometry"


class BlockCountError(GeometryError):
    """The number of blocks is missing, not positive, or not what the tensors were made for."""

    code = "geometry.block_count"


class BlockAlignmentError(GeometryError):
    """A group's block size is not a multiple of the hash block size."""

    code = "geometry.block_alignment"


class AmbiguousLayoutError(GeometryError):
    """A tensor's block dimension was not declared and its shape can be read in more than one way."""

    code = "geometry.ambiguous_layout"


class StrideError(GeometryError):
    """A tensor's strides or address are not what its declaration says."""

    code = "geometry.stride"


class StorageError(GeometryError):
    """A tensor's storage is smaller than the blocks it has to hold."""

    code = "geometry.storage"


class DtypeError(GeometryError):
    """A dtype is unknown or not allowed for a KV cache."""

    code = "geometry.dtype"


class UnknownLayerError(GeometryError):
    """A group, a placement or a tensor names a layer that nothing describes, or a described layer has no memory."""

    code = "geometry.unknown_layer"


class OverlapError(GeometryError):
    """Two layers claim the same bytes and no declaration says that they share them."""

    code = "geometry.overlap"


class HoleError(GeometryError):
    """Bytes of a KV allocation belong to no layer, no declared padding and no named exclusion."""

    code = "geometry.hole"


class RegistrationError(KVOffloadError):
    """KV caches were registered twice, used before they were registered, or a tensor that was declared is absent."""

    code = "registration"


class SelfTestError(KVOffloadError):
    """A pattern written to a free block did not come back as it was saved; serving would restore wrong bytes."""

    code = "self_test"


class CacheMemoryError(KVOffloadError):
    """The memory for cached blocks cannot be had, or the memory of an earlier process cannot be taken over."""

    code = "cache.memory"


class PrivateServerError(KVOffloadError):
    """A private server could not be started, or did not answer in time."""

    code = "private_server"


class ProtocolError(KVOffloadError):
    """A message cannot be sent: one of its fields, or all of them together, are beyond what its reader accepts."""

    code = "protocol"


class PacketError(KVOffloadError):
    """The process at the other end of a lifeline is gone or broke its rules; the connection is of no use any more."""

    code = "packet"


class ServerError(KVOffloadError):
    """The cache server cannot be asked, did not answer in time, or refused."""

    code = "server"


class TierError(KVOffloadError):
    """A tier slower than memory cannot be made with these settings, is closed, or does not answer."""

    code = "tier"


class BenchmarkError(KVOffloadError):
    """A benchmark could not run, or the machine's limit that it measured is below what any machine gives."""

    code = "benchmark"


def walk_errors(root: type[KVOffloadError] = KVOffloadError) -> Iterator[type[KVOffloadError]]:
    """The tree in the order it is written above."""
    yield root
    for child in root.__subclasses__():
        yield from walk_errors(child)


def find_code(fault: BaseException) -> str:
    """Returns the code of any exception: those that are not ours are faults of our code."""
    return fault.code if isinstance(fault, KVOffloadError) else KVOffloadError.code
