"""Start the server, load its models and follow their new versions; requests are answered in Rust."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import copy_context

from elasticrec import _core
from elasticrec.config import Job, Serve
from elasticrec.config.publish import Cube
from elasticrec.errors import ConfigError, ElasticRecError, UnavailableError
from elasticrec.machine import num_cores, on_stop_signal
from elasticrec.net.logs import RepeatFilter
from elasticrec.net.security import check_addresses, store_security
from elasticrec.repository.fetch import default_cache
from elasticrec.serving.follow import Follower, ReaderSettings
from elasticrec.serving.onnxruntime import library_path
from elasticrec.serving.plan import Variant

# Interval at which the main thread returns to Python, which handles signals.
_TICK_S = 0.2
# Time limit for accepted requests after a stop.
_DRAIN_S = 10.0
# Threads per core when rows come from the online store, because they mostly wait for it.
_WAITING_THREADS = 4

Models = Sequence[tuple[str, Sequence[tuple[str, float]]]]

logger = logging.getLogger(__name__)


def start_server(settings: Serve, models: Models) -> _core.Server:
    """Bind the address; the server answers 503 until its models are loaded."""
    each = _WAITING_THREADS if settings.rows == "store" else 1
    return _core.Server(
        str(library_path()),
        _address(settings.host, settings.port),
        [(name, list(variants)) for name, variants in models],
        workers=settings.threads or each * num_cores(),
        queue=settings.queue,
        max_connections=settings.max_connections,
        max_body_bytes=settings.max_body_bytes,
        max_pending_bytes=settings.max_pending_bytes,
        max_instances=settings.max_instances,
        batch_size=settings.batch_size,
        batch_wait_us=settings.batch_wait_us,
        timeout_ms=settings.timeout_ms,
        token=settings.token.reveal_token() if settings.token else None,
        tls=(settings.tls.cert, settings.tls.key) if settings.tls.cert and settings.tls.key else None,
    )


def serve(variants: Sequence[Variant], job: Job, *, wait: bool = False) -> None:
    """Serve until SIGINT or SIGTERM, then answer the accepted requests and return.

    With `wait`, wait for a first version or a shard of the store that is missing.
    """
    stopping = threading.Event()
    on_stop_signal(stopping.set)
    with run_server(variants, job, stopping, wait=wait) as server:
        while not stopping.is_set() and not server.wait(_TICK_S):
            pass


@contextlib.contextmanager
def run_server(
    variants: Sequence[Variant], job: Job, stopping: threading.Event, *, wait: bool = False
) -> Iterator[_core.Server]:
    """Serve models and follow their new versions while the block runs; then answer the accepted requests.

    `stopping` ends a wait for a first version; the end of the block sets it.
    """
    server = start_server(job.serve, _variant_weights(variants))
    with contextlib.ExitStack() as stack:
        # Stops at once if a model cannot be loaded; otherwise the server has stopped before this callback runs.
        stack.callback(server.stop, 0.0)
        followers = []
        for variant in variants:
            followers.append(_load_first_version(server, variant, job, stopping if wait else None))
            stack.callback(followers[-1].close)
        if not stopping.is_set():
            _announce(server, followers, job.serve)
        for follower in followers:
            if not follower.is_fixed:
                # A thread each: a repository that hangs must not delay the versions of other models.
                arguments = (_poll_versions, follower, job.serve.poll_s, stopping)
                threading.Thread(target=copy_context().run, args=arguments, daemon=True).start()
        try:
            yield server
        finally:
            stopping.set()
            logger.info("stopping: answering accepted requests")
            if not server.stop(_DRAIN_S):
                logger.warning("stopped; some accepted requests took longer than %.0f s", _DRAIN_S)


def _variant_weights(variants: Sequence[Variant]) -> list[tuple[str, list[tuple[str, float]]]]:
    models: dict[str, list[tuple[str, float]]] = {}
    for variant in variants:
        models.setdefault(variant.model, []).append((variant.name, variant.weight))
    return list(models.items())


def _load_first_version(server: _core.Server, variant: Variant, job: Job, waiting: threading.Event | None) -> Follower:
    """Load the first version of a variant."""
    settings, problems = job.serve, RepeatFilter(logger.warning)
    while True:
        try:
            store = _connect_store(variant, settings, job.cube)
            zeros = settings.on_lost_shard == "zeros"
            readers = ReaderSettings(settings.readers, settings.reader_timeout_ms)
            follower = Follower(server, variant, default_cache(), store, lost_as_zero=zeros, readers=readers)
            logger.info("loading %s", variant.location)
            follower.begin()
            return follower
        except (ElasticRecError, OSError) as error:
            if waiting is None or isinstance(error, ConfigError):
                raise
            problems.write(f"{variant}: waiting: {error}")
            if waiting.wait(settings.poll_s):
                raise UnavailableError(f"{variant}: stopped before its first version was loaded") from None


def _connect_store(variant: Variant, settings: Serve, cube: Cube) -> _core.CubeClient | None:
    if not variant.addresses:
        return None
    security = store_security(cube, ca=None)
    check_addresses(security, variant.addresses)
    name = variant.repository.name if variant.repository is not None else variant.model
    return _core.CubeClient(
        name,
        [list(replicas) for replicas in variant.addresses],
        token=security.token or "",
        deadline_s=settings.store_timeout_ms / 1e3,
        tls=security.wire_tls(),
    )


def url_of(server: _core.Server, settings: Serve) -> str:
    """Return the URL of a server, without a path."""
    return f"{'https' if settings.tls.cert else 'http'}://{server.address}"


def _announce(server: _core.Server, followers: Sequence[Follower], settings: Serve) -> None:
    url = url_of(server, settings)
    for follower in followers:
        name = follower.variant.model
        variant = f", variant {follower.variant.name}" if follower.variant.name else ""
        rows = f"{follower.rows:,} rows" + (" at the store" if follower.variant.addresses else "")
        logger.info(f"serving {name} version {follower.version} ({rows}{variant}) on {url}/v1/models/{name}:predict")


def _poll_versions(follower: Follower, poll_s: float, stopping: threading.Event) -> None:
    while not stopping.wait(poll_s):
        try:
            follower.poll()
        except Exception as error:
            # A bug in following versions must not end the server.
            follower.report_unexpected(error)
            time.sleep(poll_s)


def _address(host: str, port: int) -> str:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"serve.host: expected an address, got `{host}`: {error.strerror}") from None
    ip = str(address[0])
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"
