"""The roll-out at work: it looks at the repository and at the store, decides, tells the replicas, and offers.

It keeps nothing: a controller that is started anew, or a second one, goes on from what it sees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from elasticrec.config.publish import Gate
from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.publish.gate import Judge, rows_of
from elasticrec.publish.rollout.decide import Decision, Replica, Seen, decide
from elasticrec.publish.rollout.patience import Patience
from elasticrec.repository.repository import Repository

Say = Callable[[str], None]

# The next look while a version is on its way: at first at once, then less and less often.
_HURRY_S = 0.02


class Replicas(Protocol):
    """The store as the controller sees it."""

    def look(self) -> Sequence[Sequence[Replica]]:
        """All replicas, by shard."""

    def notice(self, replicas: Sequence[Replica]) -> None:
        """Have them look at the repository now."""


@dataclass
class Delivery:
    """The roll-out of one model."""

    repository: Repository
    replicas: Replicas
    gate: Gate
    say: Say
    min_ready: int | None = None
    poll_s: float | None = 0.5
    """Seconds between two looks; none if there is one."""
    patience: Patience = field(default_factory=Patience)
    refused: dict[int, list[str]] = field(default_factory=dict)
    """Versions that the gate did not let through, and why."""
    _judged: dict[int, bool] = field(default_factory=dict)
    _told: tuple[str, tuple[str, ...]] = ("", ())
    _noticed: int | None = None

    def run(self, wait: Callable[[float], bool]) -> None:
        """Look again and again, until `wait` says that it is over."""
        assert self.poll_s is not None, "who looks once calls `step`"
        poll_s, hurry_s, target = self.poll_s, _HURRY_S, None
        while True:
            pause_s = poll_s
            try:
                decision = self.step()
                if decision.target != target:
                    hurry_s, target = _HURRY_S, decision.target
                if decision.late:
                    pause_s, hurry_s = min(hurry_s, poll_s), 2 * hurry_s
            except (ElasticRecError, OSError) as error:
                self._tell(f"cannot go on: {error}", ())
            except Exception as error:
                # our own bug must not end the roll-out
                self._tell(f"cannot go on: {type(error).__name__}: {error}", ())
            if wait(pause_s):
                return

    def step(self) -> Decision:
        """One look and what follows from it."""
        seen = self._look()
        decision = self.patience.decide(seen, self.min_ready)
        if decision.offer is not None and not self._offer(seen, decision.offer):
            # a rollback, or another one, came in between: the next look sees it
            return decision
        late = [one for shard in seen.shards for one in shard if one.is_there and decision.target not in one.versions]
        if decision.target is not None and decision.target != self._noticed and late:
            self._noticed = decision.target
            self.replicas.notice(late)
        self._tell(decision.text, decision.late)
        return decision

    def describe(self) -> dict[str, Any]:
        """What it said last, for the status."""
        text, late = self._told
        newest = max(self.refused, default=None)
        refused = None if newest is None else {"version": newest, "why": self.refused[newest]}
        return {"doing": text or "looking at the store", "late": list(late), "refused": refused}

    def preview(self) -> tuple[Decision, tuple[tuple[Replica, ...], ...]]:
        """What a first step would do, and what it is decided from."""
        seen = self._look()
        decision = decide(seen, self.min_ready, is_patient=True)
        if decision.offer is not None:
            text = f"version {decision.offer} can be offered: start `elasticrec deliver`"
            decision = decision._replace(text=text)
        return decision, seen.shards

    def _look(self) -> Seen:
        state = self.repository.state()
        current = None if state is None else state.version
        shards = tuple(tuple(replicas) for replicas in self.replicas.look())
        wanted = None if state is None else state.wanted
        is_held = state is not None and state.is_held
        return Seen(shards, current, self._offerable(current), is_held, wanted)

    def _offer(self, seen: Seen, version: int) -> bool:
        """Whether it is offered now."""
        if seen.is_held:
            return self.repository.complete_rollback(version)
        return self.repository.offer(version)

    def _offerable(self, current: int | None) -> tuple[int, ...]:
        """The versions that the gate lets through, judged once each; older ones than the current are not looked at.

        One that cannot be read is named, and is looked at again: it must not stop those behind it.
        """
        found = []
        for number in self.repository.versions():
            if current is not None and number <= current:
                found.append(number)
                continue
            if number not in self._judged:
                try:
                    reasons = self._judge(number, current)
                    self._judged[number] = not reasons
                except (ModelError, FileNotFoundError) as error:
                    reasons = [str(error)]
                if reasons and self.refused.get(number) != reasons:
                    self.refused[number] = reasons
                    self.say(f"version {number} is not offered: {'; '.join(reasons)}")
            if self._judged.get(number):
                found.append(number)
        return tuple(found)

    def _judge(self, number: int, current: int | None) -> list[str]:
        judge = Judge(self.gate, self.repository, rows_of(self.repository, current))
        return judge.refusals(self.repository.version(number))

    def _tell(self, text: str, late: tuple[str, ...]) -> None:
        """Say what is new."""
        if (text, late) == self._told:
            return
        before, self._told = self._told, (text, late)
        if text != before[0]:
            self.say(text if self.poll_s is None else f"{text}; next look in {self.poll_s:g} s")
        for one in late:
            if one not in before[1]:
                self.say(f"late: {one}")
