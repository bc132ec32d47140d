"""The entry point that vLLM runs in each of its processes: makes our connector known by name.

Every vLLM start on a machine where kvoffload is installed pays for this file, whether it is used or not. So it touches
vLLM's factory and log only; the connector's own module is imported when an engine asks for it, and what checks its
settings when a configuration names it.
"""

from __future__ import annotations

import functools
import logging
import sys
from types import TracebackType
from typing import Any

from kvoffload.connector.engine_log import join_engine_log

CONNECTOR_NAME = "KVOffloadConnector"
CONNECTOR_MODULE = "kvoffload.connector.facade"
VLLM_FLOOR = (0, 31)

logger = logging.getLogger(__name__)

# The factory that holds our name, by which a second call tells its own work from a stranger's.
_registered_with: object = None


def register() -> None:
    """Registers the connector once, however often it is called; waits for nothing.

    vLLM calls this unguarded, so whatever the world does here is one warning and an unknown name, never an exception.
    """
    global _registered_with  # noqa: PLW0603  (a fact about the process)
    join_engine_log()
    try:
        from vllm.version import __version__ as version
        from vllm.version import __version_tuple__ as version_parts

        if _is_below_floor(version_parts):
            floor = ".".join(map(str, VLLM_FLOOR))
            _warn_once("%s needs vLLM %s or newer and is not registered: this is %s", CONNECTOR_NAME, floor, version)
            return
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        _warn_once("%s is not registered, vLLM has no connector factory where expected: %s", CONNECTOR_NAME, str(error))
        return

    if _registered_with is KVConnectorFactory:
        return
    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    except ValueError:  # how the factory says that the name is taken
        _warn_once("%s is not registered, another package holds the name and keeps it", CONNECTOR_NAME)
        return
    _registered_with = KVConnectorFactory
    _check_settings_early(KVConnectorFactory)
    logger.debug("%s registered with vLLM %s", CONNECTOR_NAME, version)


def _check_settings_early(factory: Any) -> None:
    """Where vLLM looks for the class that a configuration names, which it does first while it makes that configuration
    and long before there are weights, our settings in it are checked."""
    look_up = getattr(factory, "get_connector_class", None)
    if look_up is None:
        # They are checked by the connector itself, later.
        return

    @functools.wraps(look_up)
    def look_up_checked(kv_transfer_config: Any) -> Any:
        if kv_transfer_config.kv_connector == CONNECTOR_NAME:
            _refuse_wrong_settings(kv_transfer_config.kv_connector_extra_config)
        return look_up(kv_transfer_config)

    factory.get_connector_class = staticmethod(look_up_checked)


def _refuse_wrong_settings(settings: dict[str, object]) -> None:
    """ConfigError: one has a name or a value that is not allowed. CacheMemoryError: a private server's memory is more
    than there is. Where it ends the process, that is one line."""
    from kvoffload.config.sources import load_settings
    from kvoffload.errors import KVOffloadError

    try:
        loaded = load_settings(engine=settings).settings
        if not loaded.server and isinstance(loaded.memory, int) and not loaded.sparse_memory:
            from kvoffload.cache import refuse_memory
            from kvoffload.native import memory_total_bytes

            refuse_memory(loaded.memory, memory_total_bytes())
    except KVOffloadError:
        _tell_refusals_in_one_line(KVOffloadError)
        raise


@functools.cache
def _tell_refusals_in_one_line(kind: type[Exception]) -> None:
    tell_others = sys.excepthook

    def tell(found: type[BaseException], fault: BaseException, trace: TracebackType | None) -> None:
        if issubclass(found, kind):
            print(f"kvoffload: {' '.join(str(fault).split())}", file=sys.stderr)
        else:
            tell_others(found, fault, trace)

    sys.excepthook = tell


def _is_below_floor(version_parts: tuple[int | str, ...]) -> bool:
    release = version_parts[:2]
    is_unknown = release == (0, 0)  # a source tree without version data; taken for new
    return not is_unknown and release < VLLM_FLOOR


@functools.cache
def _warn_once(message: str, *args: str) -> None:
    logger.warning(message, *args)
