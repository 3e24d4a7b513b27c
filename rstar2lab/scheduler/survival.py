"""Admission by the survival curve of lengths, and moves at turn boundaries: our own policies.

The paper reserves the maximum for each trajectory, though few reach it, and not at the same time.
Here a trajectory starts if the expected KV of all residents, plus a margin, stays below the
capacity at every moment ahead. Needed: how far each resident has come, from stale reports.
"""

from itertools import takewhile

import numpy as np

from .events import Hold
from .lengths import KaplanMeier, bin_width
from .policies import Desk, Policy

_SLOTS = 64  # residents for which a desk has room at first; it grows


class Ages:
    """Where the residents of one engine are: arrays with a slot each, and the engine's progress.

    progress: tokens that a row has sampled since the start, were it always running; between
    reports it grows at the last known rate. An engine's counter goes on while no row of ours runs
    (an earlier step, another policy): the first report after such a pause only says where it is.
    """

    def __init__(self):
        self.slots: dict[str, int] = {}
        self._free: list[int] = []
        self.prompt_R, self.base_R, self.mark_R, self.running_R = (np.zeros(_SLOTS) for _ in "1234")
        self.progress, self.rate = 0.0, 0.0
        self.tokens: int | None = None  # the counter at the last report
        self.reported = 0.0

    def now_at(self, now: float) -> float:
        """Progress at `now`."""
        return self.progress + self.rate * (now - self.reported)

    def report(self, then: float, gen_tokens: int, running: int) -> None:
        """Tokens sampled from the last report to `then`, shared by the rows that run."""
        passed = then - self.reported
        if passed <= 0:
            return
        gained = 0.0
        if self.tokens is not None and running:
            gained = (gen_tokens - self.tokens) / running
        self.progress, self.rate = self.progress + gained, gained / passed
        self.reported, self.tokens = then, gen_tokens

    def join(self, traj: str, prompt: int) -> None:
        if not self._free:
            used = len(self.slots)
            if used == len(self.prompt_R):
                for name in ("prompt_R", "base_R", "mark_R", "running_R"):
                    setattr(self, name, np.concatenate([getattr(self, name), np.zeros(used)]))
            self._free.append(used)
        slot = self._free.pop()
        self.slots[traj] = slot
        self.prompt_R[slot] = prompt  # the rest is zero since the last one left

    def leave(self, traj: str) -> None:
        slot = self.slots.pop(traj)
        self.prompt_R[slot] = self.base_R[slot] = self.running_R[slot] = 0
        self._free.append(slot)

    def known(self, traj: str, age: int, is_running: bool, now: float) -> None:
        """The response has `age` tokens at `now`."""
        if is_running and not self.running_R.any():
            self.rate, self.reported, self.tokens = 0.0, now, None
        slot = self.slots[traj]
        self.base_R[slot], self.running_R[slot] = age, is_running
        self.mark_R[slot] = self.now_at(now)

    def at(self, now: float) -> tuple[np.ndarray, np.ndarray]:
        """Prompts and estimated response tokens of all residents."""
        taken = np.fromiter(self.slots.values(), np.int64, len(self.slots))
        gained = self.running_R[taken] * (self.now_at(now) - self.mark_R[taken])
        return self.prompt_R[taken], self.base_R[taken] + np.maximum(gained, 0)


class Outlook:
    """Expected KV of a set of residents at every horizon, from one survival curve.

    p(age, h) = S(age + h) / S(age). mean(h) = Σ (context + h)·p and
    variance(h) = Σ (context + h)²·p·(1 - p), with ages in bins, so a test costs two small products.
    """

    def __init__(self, curve: KaplanMeier, longest: int):
        self.bin = curve.bin_tokens
        bins = longest // self.bin + 1
        self.horizons_H = np.arange(bins) * float(self.bin)
        if longest % self.bin:  # bins that end short of the budget would hide the worst case
            self.horizons_H = np.append(self.horizons_H, longest)
        ages_B = np.arange(bins)[:, None] * self.bin
        self.alive_BH = curve.survival(ages_B, self.horizons_H[None].astype(int))
        self.alive_BH[ages_B + self.horizons_H[None] > longest] = 0.0
        self.doubt_BH = self.alive_BH * (1 - self.alive_BH)
        self.bins = bins

    def moments(self, prompts_R: np.ndarray, ages_R: np.ndarray) -> np.ndarray:
        """[3, bins]: count, Σ context and Σ context² of the residents by age bin."""
        places = np.minimum((ages_R / self.bin).astype(np.int64), self.bins - 1)
        contexts_R = prompts_R + ages_R
        sums = [
            np.bincount(places, weights, self.bins)
            for weights in (np.ones_like(contexts_R), contexts_R, contexts_R**2)
        ]
        return np.stack(sums)

    def peak(self, moments: np.ndarray, z: float) -> float:
        """max over h of mean(h) + z·√variance(h), tokens."""
        h = self.horizons_H
        count_H, sum_H = moments[:2] @ self.alive_BH
        mean_H = sum_H + h * count_H
        count_H, sum_H, square_H = moments @ self.doubt_BH
        variance_H = square_H + 2 * h * sum_H + h * h * count_H
        return float((mean_H + z * np.sqrt(np.maximum(variance_H, 0))).max())


class Survival(Policy):
    """Start the head if the peak of expected KV plus z standard deviations fits (ours).

    Tries the two engines with the fewest residents. The curve is that of earlier steps; without
    one it plans for the worst case. z = 1 is fastest where recomputing is cheap, z = 3 all but
    rules out preemption. A set whose worst case fits is admitted without looking at the curve.
    """

    tick_seconds = 1.0

    def __init__(self, z: float = 2.0):
        self._z = z

    def bind(self, engines, prior=None, seed=0) -> None:
        super().bind(engines, prior, seed)
        self._ages: dict[str, Ages] = {}
        self._outlook: Outlook | None = None
        self._longest = 0

    def _arrange(self, fresh):
        """The curve is renewed between steps only: during one, the short ones end first."""
        longest = max((seat.spec.max_tokens for seat in fresh), default=0)
        is_new_step = len(self.seats) == len(fresh)
        if self.prior is None and fresh:
            self.prior = KaplanMeier(bin_tokens=bin_width(longest))
        if fresh and (is_new_step or longest > self._longest):
            self._longest = longest if is_new_step else max(longest, self._longest)
            self._outlook = Outlook(self.prior, self._longest)

    def engine_stats(self, now, stats):
        super().engine_stats(now, stats)
        if stats.id in self._ages:
            self._ages[stats.id].report(stats.t, stats.gen_tokens, stats.running)
        return []

    def _lost(self, desk):
        self._ages.pop(desk.spec.id, None)

    def _enter(self, seat, engine):
        super()._enter(seat, engine)
        if engine not in self._ages:
            self._ages[engine] = Ages()
        self._ages[engine].join(seat.spec.id, seat.spec.prompt_tokens)

    def _leave(self, seat):
        if seat.engine in self._ages:
            self._ages[seat.engine].leave(seat.spec.id)
        super()._leave(seat)

    def _start(self, now, seat, expect_hit):
        self._note(now, seat, True)
        return super()._start(now, seat, expect_hit)

    def _after_turn(self, now, seat):
        self._note(now, seat, False)
        return []

    def _note(self, now, seat, is_running: bool) -> None:
        age = seat.context - seat.spec.prompt_tokens
        self._ages[seat.engine].known(seat.spec.id, age, is_running, now)

    def _choose(self, now, seat):
        for desk in self._fewest(self._with_seats(seat), 2):
            if not desk.residents or self._has_room(now, desk, seat):
                return desk.spec.id
        return None

    def _with_seats(self, seat) -> list[Desk]:
        """Desks that could hold it and run one more. A full one must not hide the others."""
        return [desk for desk in self._able(seat) if len(desk.residents) < desk.spec.max_seqs]

    def _has_room(self, now: float, desk: Desk, seat) -> bool:
        """Whether the KV of the engine's residents and the new one fits at every moment ahead."""
        capacity = desk.capacity - desk.spec.block * (len(desk.residents) + 1) / 2  # half a block
        worst = seat.spec.blocks(desk.spec.block) * desk.spec.block
        if desk.reserved + worst <= capacity:
            return True
        prompts_R, ages_R = self._ages[desk.spec.id].at(now)
        prompt = seat.spec.prompt_tokens
        prompts_R = np.append(prompts_R, prompt)
        ages_R = np.append(ages_R, seat.context - prompt)
        return self._outlook.peak(self._outlook.moments(prompts_R, ages_R), self._z) <= capacity


class SurvivalMove(Survival):
    """`Survival`, and once the queue is empty a turn moves to an engine that is emptier by `gap`.

    A move pays for the whole context again, so the gap must be real and the queue empty.
    """

    def __init__(self, z: float = 2.0, gap: int = 6):
        super().__init__(z)
        self._gap = gap

    def _next_engine(self, now, seat):
        own = self.desks[seat.engine]
        if self.queue or len(own.residents) < self._gap:
            return seat.engine
        for other in self._fewest(self._with_seats(seat)):
            others = len(other.residents) * own.capacity / other.capacity
            if len(own.residents) - others >= self._gap:
                return other.spec.id
        return seat.engine


class SurvivalYield(SurvivalMove):
    """`SurvivalMove`, and who has come far makes way for who has not started (ours).

    A step ends with the last long trajectory, and that is one that started late. One past `share`
    of its budget has little left to sample: at the end of a tool it waits behind the unstarted, if
    the head of the queue fits in its place, and pays for its context again. So all start early, and
    the long ones end together, in full batches. Among those that made way the youngest goes first.
    """

    def __init__(self, z: float = 2.0, gap: int = 6, share: float = 0.4):
        super().__init__(z, gap)
        self._share = share

    def tool_done(self, now, traj, tool_tokens):
        seat, engine = self.seats[traj], self.seats[traj].engine
        if not self._is_far(seat, tool_tokens) or not self._queue_starts(engine):
            return super().tool_done(now, traj, tool_tokens)
        head = self._head()
        self._leave(seat)
        if not self._has_room(now, self.desks[engine], head):
            self._enter(seat, engine)
            return super().tool_done(now, traj, tool_tokens)
        seat.context += tool_tokens
        seat.stage = "queued"
        del self.queue[head.spec.id]
        self._enter(head, engine)
        self._line_up(seat)
        hold = Hold(traj, "makes way for one that has not started")
        return [hold, self._start(now, head, False), *self._admit(now)]

    def _is_far(self, seat, tool_tokens: int) -> bool:
        age = seat.context + tool_tokens - seat.spec.prompt_tokens
        return age >= self._share * seat.spec.max_tokens

    def _queue_starts(self, engine: str | None) -> bool:
        """Whether the head of the queue is unstarted and could go to the engine."""
        if engine is None or not self.queue:
            return False
        head = self._head()
        is_fresh = head.context == head.spec.prompt_tokens
        return is_fresh and self.desks[engine].could_hold(head.spec)

    def _line_up(self, seat) -> None:
        """Behind all who are younger; those that are submitted later line up behind it."""
        queued = reversed(self.queue.values())
        older = list(takewhile(lambda other: other.context > seat.context, queued))
        self.queue[seat.spec.id] = seat
        for other in reversed(older):
            self.queue.move_to_end(other.spec.id)
