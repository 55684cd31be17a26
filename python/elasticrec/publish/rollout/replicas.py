"""The replicas of the online store: which versions each one holds, loads, or failed to load."""

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from elasticrec import _core
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.http_client import HttpClient
from elasticrec.net.placement import partitions_of
from elasticrec.net.security import Security
from elasticrec.publish.rollout.decide import Replica

# A replica that hangs must not delay the others.
_TIMEOUT_S = 2.0
_MAX_THREADS = 16


@dataclass(frozen=True)
class StoreReplicas:
    """The replicas of all shards, by address."""

    model: str
    addresses: Sequence[Sequence[str]]
    security: Security

    def poll(self) -> list[list[Replica]]:
        """Query all replicas concurrently; return them by shard."""
        tls = self.security.wire_tls()
        queries = [(shard, address) for shard, replicas in enumerate(self.addresses) for address in replicas]
        with ThreadPoolExecutor(min(len(queries), _MAX_THREADS) or 1) as threads:
            found = list(threads.map(lambda query: self._query(query[0], query[1], tls), queries))
        return [[one for one in found if one.shard == shard] for shard in range(len(self.addresses))]

    def _query(self, shard: int, address: str, tls: _core.PsTls) -> Replica:
        token = self.security.token or ""
        try:
            versions, partitions, about = _core.probe_cube_server(
                address, self.model, token=token, timeout_s=_TIMEOUT_S, tls=tls
            )
        except UnavailableError as error:
            return Replica(shard, address, why=str(error), is_there=False)
        if wrong := self._partition_problem(shard, partitions):
            return Replica(shard, address, why=wrong, is_there=False)
        status = _parse(about)
        failed = status.get("failed") or {}
        return Replica(
            shard,
            address,
            tuple(version for version in versions if version in status.get("versions", versions)),
            loading=status.get("loading"),
            failed=failed.get("version"),
            why=failed.get("why") or status.get("problem"),
            url=status.get("http"),
            bytes_per_s=status.get("bytes_per_s"),
        )

    def _partition_problem(self, shard: int, partitions: Sequence[int]) -> str | None:
        """Return the problem if the server at this address belongs to another shard: some partitions would be lost."""
        start, end, num_partitions = partitions
        num_shards = len(self.addresses)
        expected = partitions_of(shard, num_shards, num_partitions)
        if (start, end) == (expected.start, expected.stop):
            return None
        return (
            f"expected partitions {expected.start} to {expected.stop - 1}, shard {shard} of {num_shards}, "
            f"got {start} to {end - 1}"
        )

    def notify(self, replicas: Sequence[Replica]) -> None:
        """Have the replicas check the repository now; a replica that misses the notification checks a little later."""
        with ThreadPoolExecutor(min(len(replicas), _MAX_THREADS) or 1) as threads:
            list(threads.map(self._notify_one, replicas))

    def _notify_one(self, replica: Replica) -> None:
        if replica.url is None:
            return
        parts = urlsplit(replica.url)
        # A replica may announce `0.0.0.0`: take its port, and the host where it was found.
        host = replica.address.rpartition(":")[0]
        url = f"{parts.scheme}://{host}:{parts.port}"
        # The replica's URL is not trusted: the client refuses to send the token to another machine in clear text.
        with contextlib.suppress(UnavailableError, ConfigError):
            with HttpClient(url, name="cube", security=self.security, timeout_s=_TIMEOUT_S) as client:
                client.request("POST", "/v1/load")


def _parse(about: str) -> dict[str, Any]:
    """Parse the status in a server's hello; a server of another release may send anything."""
    try:
        found = json.loads(about or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
