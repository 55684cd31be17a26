"""The store as the roll-out sees it: every replica is greeted, and says what it holds, loads and could not load."""

import contextlib
import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from elasticrec import _core
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.security import Security
from elasticrec.net.tls import client_context
from elasticrec.publish.rollout.decide import Replica

# A replica that hangs must not hold up the others.
_PATIENCE_S = 2.0
_AT_ONCE = 16


@dataclass(frozen=True)
class StoreReplicas:
    """All replicas of all shards, by address."""

    model: str
    addresses: Sequence[Sequence[str]]
    security: Security

    def look(self) -> list[list[Replica]]:
        """Ask all of them at once."""
        tls = self.security.wire()
        places = [(shard, address) for shard, replicas in enumerate(self.addresses) for address in replicas]
        with ThreadPoolExecutor(min(len(places), _AT_ONCE) or 1) as pool:
            found = list(pool.map(lambda place: self._ask(place[0], place[1], tls), places))
        return [[one for one in found if one.shard == shard] for shard in range(len(self.addresses))]

    def _ask(self, shard: int, address: str, tls: _core.PsTls) -> Replica:
        token = self.security.token or ""
        try:
            versions, partitions, about = _core.probe_cube_server(
                address, self.model, token=token, timeout_s=_PATIENCE_S, tls=tls
            )
        except UnavailableError as error:
            return Replica(shard, address, why=str(error), is_there=False)
        if wrong := self._wrong_partitions(shard, partitions):
            return Replica(shard, address, why=wrong, is_there=False)
        said = _parse(about)
        failed = said.get("failed") or {}
        return Replica(
            shard,
            address,
            tuple(version for version in versions if version in said.get("versions", versions)),
            loading=said.get("loading"),
            failed=failed.get("version"),
            why=failed.get("why") or said.get("problem"),
            url=said.get("http"),
            bytes_per_s=said.get("bytes_per_s"),
        )

    def _wrong_partitions(self, shard: int, partitions: Sequence[int]) -> str | None:
        """A server of another shard at this address would leave partitions to nobody."""
        start, end, num_partitions = partitions
        num_shards = len(self.addresses)
        wanted = [at * num_partitions // num_shards for at in (shard, shard + 1)]
        if [start, end] == wanted:
            return None
        expected = f"expected partitions {wanted[0]} to {wanted[1] - 1}, shard {shard} of {num_shards}"
        return f"{expected}, got {start} to {end - 1}"

    def notice(self, replicas: Sequence[Replica]) -> None:
        """Have them look at the repository now; one that does not hear looks a little later by itself."""
        with ThreadPoolExecutor(min(len(replicas), _AT_ONCE) or 1) as pool:
            list(pool.map(self._notice, replicas))

    def _may_send(self, host: str, scheme: str) -> bool:
        """Whether no token goes to another machine in clear, whatever a replica says of itself."""
        try:
            self.security.check_send("cube", host, encrypted=scheme == "https")
        except ConfigError:
            return False
        return True

    def _notice(self, replica: Replica) -> None:
        if replica.url is None:
            return
        parts = urlsplit(replica.url)
        # what it calls itself may be `0.0.0.0`: its port, and the host that it was found at
        host = replica.address.rpartition(":")[0].strip("[]")
        if not self._may_send(host, parts.scheme):
            return
        headers = {"Authorization": f"Bearer {self.security.token}"} if self.security.token else {}
        connection = (
            http.client.HTTPSConnection(host, parts.port, timeout=_PATIENCE_S, context=client_context(self.security.ca))
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, parts.port, timeout=_PATIENCE_S)
        )
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", "/v1/load", headers=headers)
            connection.getresponse().read()


def _parse(about: str) -> dict[str, Any]:
    """What a server says of itself: it may be of another release."""
    try:
        found = json.loads(about or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
