"""Mutations of trust, judge, recovery, drain and the configuration."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation

TRUST = "src/deerflow_runs/protocol/trust.py"
JUDGE = "src/deerflow_runs/protocol/judge.py"
RECOVERY = "src/deerflow_runs/protocol/recovery.py"
DRAIN = "src/deerflow_runs/protocol/drain.py"
CONFIG = "src/deerflow_runs/config.py"


def trust(name: str, rule: str, old: str, new: str) -> Mutation:
    return Mutation(name, rule, TRUST, old, new, ("tests/protocol/test_trust.py",))


def judge(name: str, rule: str, old: str, new: str) -> Mutation:
    return Mutation(name, rule, JUDGE, old, new, ("tests/protocol/test_judge.py",))


def recovery(name: str, rule: str, old: str, new: str) -> Mutation:
    return Mutation(name, rule, RECOVERY, old, new, ("tests/protocol/test_recovery.py",))


def drain(name: str, rule: str, old: str, new: str) -> Mutation:
    return Mutation(name, rule, DRAIN, old, new, ("tests/protocol/test_drain.py",))


def config(name: str, rule: str, old: str, new: str) -> Mutation:
    return Mutation(name, rule, CONFIG, old, new, ("tests/protocol/test_config.py",))


MUTATIONS: Final = [
    trust(
        "the margin is not taken off the lease",
        "O9",
        "sent_at + terms.lease - terms.margin",
        "sent_at + terms.lease",
    ),
    trust(
        "trust counts from the answer",
        "O9",
        "confirmed = _deadline(self.terms, sent_at)",
        "confirmed = _deadline(self.terms, now)",
    ),
    trust(
        "trust is still there at its very end",
        "O9",
        "return now < self.ends\n",
        "return now <= self.ends\n",
    ),
    trust(
        "an answer that is too late moves the end of trust",
        "O12",
        "confirmed <= max(now, self.ends)",
        "confirmed <= self.ends",
    ),
    trust(
        "an older renewal shortens trust",
        "O9",
        "confirmed <= max(now, self.ends)",
        "confirmed <= now",
    ),
    trust(
        "an accepted renewal revives a refused session",
        "I12",
        "if self.refused or confirmed",
        "if confirmed",
    ),
    trust(
        "not live leaves trust until its deadline",
        "O13",
        "ends=min(self.ends, now), refused=True",
        "refused=True",
    ),
    trust(
        "a refusal after the deadline starts the suspension again",
        "O13",
        "ends=min(self.ends, now)",
        "ends=now",
    ),
    trust(
        "runs are held for ever",
        "O12",
        "if now < self.ends + self.terms.max_suspend else Standing.ABORT",
        "if now >= self.ends else Standing.ABORT",
    ),
    trust(
        "beats carry no jitter",
        "O10",
        "(1 - BEAT_JITTER + 2 * BEAT_JITTER * unit)",
        "1",
    ),
    trust(
        "failed beats are not repeated sooner",
        "O10",
        "if failures > 0:",
        "if failures > 1:",
    ),
    trust(
        "repeats of failed beats do not slow down",
        "O10",
        "FIRST_RETRY * 2.0 ** min(failures - 1, 10)",
        "FIRST_RETRY",
    ),
    trust(
        "repeats of failed beats slow down for ever",
        "O10",
        "min(terms.beat, LAST_RETRY, FIRST_RETRY",
        "min(terms.beat, FIRST_RETRY",
    ),
    trust(
        "a beat is waited for until trust has ended",
        "O10",
        "return min(limit, trust.remaining(now) / 2) if trust.trusted(now) else limit",
        "return limit",
    ),
    trust(
        "two pings are in flight",
        "O11",
        "if self.asked_at is None:",
        "if True:",
    ),
    trust(
        "a reading of a late heartbeat counts",
        "O11",
        "if now - due > self.terms.beat:",
        "if False:",
    ),
    trust(
        "a late heartbeat absolves a wedged loop",
        "O11",
        "return Watched(replace(self, asked_at=now))",
        "return Watched(replace(self, asked_at=now, stalled=False))",
    ),
    trust(
        "a wedged loop is renewed for",
        "O11",
        "return not self.watch.stalled",
        "return True",
    ),
    trust(
        "a loop that answers again stays condemned",
        "O11",
        "replace(self, asked_at=None, stalled=False)",
        "replace(self, asked_at=None)",
    ),
    trust(
        "stacks are dumped with every reading",
        "O11",
        "dump=stalled and not self.stalled",
        "dump=stalled",
    ),
    judge(
        "expiry is not asked for",
        "O24",
        "if _expired(session, look, self.limits) and silent",
        "if silent",
    ),
    judge(
        "the grace is not waited for",
        "O24",
        "look.store_now - micros(limits.grace)",
        "look.store_now",
    ),
    judge(
        "one look suffices",
        "O24",
        " and silent >= self.limits.look * self._longest_lease(session):",
        ":",
    ),
    judge(
        "a look lasts as long as the judge's own lease",
        "O24",
        "return max(self.terms.lease, judged.lease * MICROSECOND)",
        "return self.terms.lease",
    ),
    judge(
        "a judge that beats rarely looks no longer for it",
        "O24",
        "return max(self.terms.lease, judged.lease * MICROSECOND)",
        "return judged.lease * MICROSECOND",
    ),
    judge(
        "a look counts from its question",
        "O24",
        "Seen(session.beat, look.answered_at)",
        "Seen(session.beat, look.asked_at)",
    ),
    judge(
        "a look counts to its answer",
        "O24",
        "return look.asked_at - seen.since",
        "return look.answered_at - seen.since",
    ),
    judge(
        "a new beat does not start the look again",
        "O24",
        "known if known is not None and known.beat == session.beat else",
        "replace(known, beat=session.beat) if known is not None else",
    ),
    judge(
        "an ailing judge judges",
        "O24",
        "if not self.healthy(look.asked_at, session):",
        "if False:",
    ),
    judge(
        "a judge is well again with its first beat",
        "I13",
        "return self.unbroken or now - self.steady_since >= enough",
        "return True",
    ),
    judge(
        "a young judge must wait like an old one",
        "O25",
        "return self.unbroken or now - self.steady_since >= enough",
        "return now - self.steady_since >= enough",
    ),
    judge(
        "a failed beat does not end youth",
        "O25",
        "steady_since=answered_at, asked_at=sent_at, unbroken=False)",
        "steady_since=answered_at, asked_at=sent_at)",
    ),
    judge(
        "a judge that slept judges before its next beat",
        "I13",
        "if self.steady_since is None or self._gap(now):",
        "if self.steady_since is None:",
    ),
    judge(
        "a judge that slept is well with its next beat",
        "I13",
        "if self.steady_since is None or self._gap(answered_at):",
        "if self.steady_since is None:",
    ),
    judge(
        "a judge judges itself",
        "O24",
        "if s.worker_id != self.me and s.state",
        "if s.state",
    ),
    judge(
        "draining sessions are not judged",
        "O24",
        "s.state is not SessionState.DEAD)",
        "s.state is SessionState.LIVE)",
    ),
    judge(
        "a hint needs no silence",
        "O27",
        "return How.HINT if sign is Sign.HINT and silent >= self._patience(session) else None",
        "return How.HINT if sign is Sign.HINT else None",
    ),
    judge(
        "the short look needs no hint",
        "O27",
        "return How.HINT if sign is Sign.HINT and silent >= self._patience(session) else None",
        "return How.HINT if silent >= self._patience(session) else None",
    ),
    judge(
        "the short look is a single beat",
        "O25",
        "short_look: float = 2.0",
        "short_look: float = 1.0",
    ),
    judge(
        "a free lock is a hint whether it was held or not",
        "O27",
        "return Sign.HINT if free and session.hinted else Sign.NONE",
        "return Sign.HINT if free else Sign.NONE",
    ),
    judge(
        "a free file lock is a proof whether it was held or not",
        "O27",
        "Sign.PROOF if rebooted or (free and session.hinted)",
        "Sign.PROOF if rebooted or free",
    ),
    judge(
        "a reboot proves nothing",
        "O27",
        "Sign.PROOF if rebooted or (free and session.hinted)",
        "Sign.PROOF if (free and session.hinted)",
    ),
    judge(
        "a proof waits for a healthy judge",
        "O27",
        "        if sign is Sign.PROOF:\n",
        "        if sign is Sign.PROOF and self.healthy(look.asked_at, session):\n",
    ),
    recovery(
        "progress does not forgive",
        "O30",
        "return 1 if made_progress(run) else run.attempt + 1",
        "return run.attempt + 1",
    ),
    recovery(
        "progress of any epoch forgives",
        "I9",
        "return run.progress_epoch == run.epoch\n",
        "return run.progress_epoch is not None\n",
    ),
    recovery(
        "the last attempt is followed by another",
        "I9",
        "return next_attempt(run) > run.max_attempts",
        "return run.attempt > run.max_attempts",
    ),
    recovery(
        "the attempts of a run are counted against its restore",
        "I16",
        "    if not being_restored(run):\n        return 1\n",
        "",
    ),
    recovery(
        "restores are never counted",
        "O30",
        "return run.attempt if lost_reply else run.attempt + 1",
        "return run.attempt",
    ),
    recovery(
        "a claimed run counts as being restored",
        "I16",
        "return (run.granted_at or 0) >= (run.cancel_requested_at or 0)",
        "return True",
    ),
    recovery(
        "backoff carries no jitter",
        "O30",
        "minimum + round(unit * (ceiling - minimum))",
        "ceiling",
    ),
    recovery(
        "backoff does not grow",
        "O30",
        "minimum * 2 ** min(max(attempt, 1), 40)",
        "minimum * 2",
    ),
    recovery(
        "backoff grows for ever",
        "O30",
        "ceiling = min(maximum, minimum",
        "ceiling = max(maximum, minimum",
    ),
    recovery(
        "a dead worker's policy goes before a recorded cancel",
        "O4",
        "    if run.cancel_action is not None:\n        return Recovery.SEIZE",
        "    if run.cancel_action is not None and run.on_orphan is OnOrphan.RESUME:\n        return Recovery.SEIZE",
    ),
    recovery(
        "an owed rollback is forced away",
        "O4",
        "Recovery.SEIZE if run.rollback_owed else Recovery.FORCE",
        "Recovery.FORCE",
    ),
    recovery(
        "a run that kills its workers is resumed for ever",
        "O29",
        "return Recovery.POISON if used_up(run) else Recovery.RESUME",
        "return Recovery.RESUME",
    ),
    recovery(
        "a waiting run is poisoned by its attempts",
        "O31",
        "    if run.owner_worker_id is None:\n        return Recovery.FREE_OF_HOME\n",
        "",
    ),
    recovery(
        "poison does not wait for the verdict to ripen",
        "O26",
        "return self in (Recovery.FAIL, Recovery.POISON)",
        "return self is Recovery.FAIL",
    ),
    recovery(
        "a run is claimed by a worker that lacks what it needs",
        "O31",
        " and run.required_capabilities <= capabilities",
        "",
    ),
    recovery(
        "a run is claimed away from its home",
        "O31",
        "run.home_worker_id in (None, me) and ",
        "",
    ),
    recovery(
        "a run waits for a worker that drains",
        "O31",
        "if session.state is SessionState.LIVE]",
        "if session.state is not SessionState.DEAD]",
    ),
    recovery(
        "looking again makes a run wait since now",
        "O31",
        "since if since is not None else now, now, me",
        "now, now, me",
    ),
    recovery(
        "what peace saved up is spent on a reconnect",
        "O32",
        "return replace(self, tokens=0.0, at=max(now, self.at))",
        "return self",
    ),
    recovery(
        "resuming costs no tokens",
        "O32",
        "self._filled(now) - count",
        "self._filled(now)",
    ),
    recovery(
        "peace saves up without end",
        "O32",
        "return min(float(self.burst), self.tokens",
        "return max(0.0, self.tokens",
    ),
    recovery(
        "all workers sweep at once",
        "O32",
        "interval * zlib.crc32(worker_id.encode()) / 2**32",
        'interval * zlib.crc32(b"") / 2**32',
    ),
    recovery(
        "sweeps carry no jitter",
        "O32",
        "(1 - SWEEP_JITTER + 2 * SWEEP_JITTER * unit)",
        "1",
    ),
    recovery(
        "a run that comes due waits for the next sweep",
        "I7",
        "return jittered if until_due is None else min(jittered, max(0.0, until_due))",
        "return jittered",
    ),
    drain(
        "connections close before the runs have stopped",
        "O35",
        '    RUNS = "runs"\n',
        '    POOLS_FIRST = "pools first"\n    RUNS = "runs"\n',
    ),
    drain(
        "the runs may take all the time",
        "O35",
        "budget * (1 - sum(SHARES[later] for later in ORDER[place + 1 :]))",
        "budget",
    ),
    drain(
        "a late step is skipped",
        "O35",
        "return max(LEAST, self.deadlines[step] - now)",
        "return self.deadlines[step] - now",
    ),
    drain(
        "another signal changes nothing",
        "O35",
        "return replace(self, grace_ends=min(self.grace_ends, now), deadlines=MappingProxyType(sooner))",
        "return replace(self, deadlines=self.deadlines)",
    ),
    drain(
        "another signal gives a step more time",
        "O35",
        "min(self.deadlines[step], anew[step])",
        "anew[step]",
    ),
    drain(
        "another signal leaves the grace",
        "O35",
        "grace_ends=min(self.grace_ends, now), ",
        "",
    ),
    drain(
        "a travelling run is ended by a drain",
        "I18",
        "            return travels\n",
        "            return otherwise\n",
    ),
    drain(
        "a local run is handed over to nobody",
        "O35",
        "            return otherwise\n",
        "            return travels\n",
    ),
    drain(
        "a cancelled run is handed over",
        "O23",
        "    if run.cancel_action is not None:\n        return Parting.SETTLE_CANCELLED\n",
        "",
    ),
    drain(
        "a drain forgets an owed rollback",
        "O35",
        "        return Parting.RELEASE\n    if run.rollback_owed:\n        return Parting.RESTORE\n",
        "        return Parting.RELEASE\n",
    ),
    drain(
        "a drain ends what waits at home elsewhere",
        "O35",
        "run.owner_worker_id is None and run.home_worker_id == me",
        "run.owner_worker_id is None",
    ),
    drain(
        "a drain touches what has ended",
        "O35",
        "    if run.terminal:\n        return Parting.KEEP\n",
        "",
    ),
    config("a lease below the floor is accepted", "O9", "lambda c: c.lease >= c.lease_floor", "lambda _: True"),
    config(
        "a margin too small for slow clocks is accepted",
        "O9",
        "lambda c: c.margin * 10 + ROUNDING >= c.lease",
        "lambda _: True",
    ),
    config(
        "trust need not outlast two beats",
        "O10",
        "lambda c: c.lease - c.margin + ROUNDING >= _trust_needed(c)",
        "lambda c: c.lease - c.margin >= c.beat",
    ),
    config("a stall may be shorter than a beat", "O11", "lambda c: c.max_stall >= 2 * c.beat", "lambda _: True"),
    config(
        "a cancel may be forced before it was heard", "O4", "lambda c: c.cancel_grace >= 2 * c.beat", "lambda _: True"
    ),
    config(
        "a run may be given back before it was handed over",
        "O12",
        "lambda c: c.attach_deadline >= 2 * c.sweep",
        "lambda _: True",
    ),
    config("the backoff may end before it begins", "O30", "lambda c: c.backoff_min <= c.backoff_max", "lambda _: True"),
    config("the beat does not follow the lease", "O10", 'min(given["lease"] / 6, seconds(2.5))', "seconds(2.5)"),
]
