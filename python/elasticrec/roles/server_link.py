"""The connections of a trainer to the current parameter servers, and the staleness measured on them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from elasticrec import _core
from elasticrec.config.train import ParameterServers
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.messages import ShardAddress
from elasticrec.net.security import Security, check_addresses
from elasticrec.roles.start import Start


@dataclass(frozen=True)
class StalenessFigures:
    """Pushes that servers applied between the pull of a batch and its push."""

    pushes: int = 0
    """Pushes that were measured."""
    sum: int = 0
    most: int = 0

    def plus(self, measured: _core.Staleness | None) -> "StalenessFigures":
        """Return the sum with the figures of a client."""
        if measured is None:
            return self
        return StalenessFigures(self.pushes + measured.pushes, self.sum + measured.sum, max(self.most, measured.most))


class ServerLink:
    """Connects to the servers of the current map, and disconnects from servers that were replaced."""

    def __init__(self, start: Start, security: Security, settings: ParameterServers) -> None:
        self._start, self._security, self._settings = start, security, settings
        self._tls = security.wire_tls()
        self._client: _core.PsClient | None = None
        # The incarnations that the client is connected to, and a handle with which another thread disconnects it.
        self._connected: tuple[list[int], _core.PsCloser] | None = None
        # Figures of earlier and of current connections, in one tuple so that other threads read both consistently.
        self._staleness: tuple[StalenessFigures, _core.Staleness | None] = (StalenessFigures(), None)
        self._misconfigured_since: float | None = None

    @property
    def staleness(self) -> StalenessFigures:
        """The staleness of all pushes so far."""
        before, present = self._staleness
        return before.plus(present)

    def connect(self, shards: Sequence[ShardAddress]) -> _core.PsClient:
        """Return the connections to these shards; connect again if one of them was replaced."""
        incarnations = [shard["incarnation"] for shard in shards]
        if self._client is None or self._client.incarnations != incarnations:
            before, present = self._staleness
            self._staleness = (before.plus(present), None)
            self._connected = None
            self._client = self._open([shard["address"] or "" for shard in shards])
            self._connected = (self._client.incarnations, self._client.closer())
            self._staleness = (self._staleness[0], self._client.staleness)
        return self._client

    def drop(self) -> None:
        """Drop the connections; `connect` opens new ones."""
        self._client = None

    def check(self, shards: Sequence[ShardAddress]) -> None:
        """Disconnect if a server was replaced, since a hung server no longer answers. Called by another thread."""
        connected = self._connected
        if connected is not None and connected[0] != [shard["incarnation"] for shard in shards]:
            connected[1].close()

    def _open(self, addresses: list[str]) -> _core.PsClient:
        check_addresses(self._security, [[address] for address in addresses], "ps")
        try:
            client = _core.PsClient(
                addresses,
                run=self._start.run_id,
                token=self._security.token or "",
                partitions=self._start.num_partitions,
                timeout_s=self._settings.deadline_s,
                tls=self._tls,
            )
        except ConfigError as error:
            # Until the lease of a dead server ends, another program may listen on its port.
            now = time.monotonic()
            self._misconfigured_since = self._misconfigured_since or now
            if now - self._misconfigured_since > 2 * self._settings.lease_s:
                raise
            raise UnavailableError(str(error)) from None
        self._misconfigured_since = None
        return client
