"""Mutations of a worker's session and of the heartbeat that keeps it alive."""

from __future__ import annotations

from typing import Final

from tests.mutations import Mutation

BEATS = "tests/manager/test_pulse.py"
HEARING = "tests/manager/test_pulse_hearing.py"
SESSIONS = "tests/manager/test_pulse_sessions.py"
THREAD = "tests/manager/test_heartbeat.py::"


def _in(module: str, name: str, rule: str, old: str, new: str, *tests: str) -> Mutation:
    quick = not any(test.startswith(THREAD) for test in tests)
    return Mutation(name, rule, f"src/deerflow_runs/manager/{module}.py", old, new, tests, quick)


def session(name: str, rule: str, old: str, new: str) -> Mutation:
    return _in("session", name, rule, old, new, "tests/manager/test_session.py")


def pulse(name: str, rule: str, old: str, new: str, *tests: str) -> Mutation:
    return _in("pulse", name, rule, old, new, *tests)


def lifeline(name: str, rule: str, old: str, new: str, *tests: str) -> Mutation:
    return _in("lifeline", name, rule, old, new, *tests)


def thread(name: str, rule: str, old: str, new: str, test: str) -> Mutation:
    return _in("heartbeat", name, rule, old, new, THREAD + test)


PRESENT: Final = [
    session(
        "trust in a new session covers the runs of the old",
        "O13",
        "return mine and present.trust.trusted(self.now())",
        "return present.trust.trusted(self.now())",
    ),
    session(
        "a new session trusts from the answer on",
        "O9",
        "trust = Trust.opened(self._terms, sent_at=sent_at)",
        "trust = Trust.opened(self._terms, sent_at=answered_at)",
    ),
    session(
        "a renewal trusts from the answer on",
        "O9",
        "trust=now.trust.renewed(sent_at=sent_at, now=answered_at)",
        "trust=now.trust.renewed(sent_at=answered_at, now=answered_at)",
    ),
    session(
        "a failed beat ends trust",
        "O10",
        "self._change(lambda now: replace(now, judge=now.judge.beat_failed()))",
        "self._change(lambda now: replace(now, trust=now.trust.not_live(self.now()), judge=now.judge.beat_failed()))",
    ),
    session(
        "a failed beat leaves the judge well",
        "O24",
        "self._change(lambda now: replace(now, judge=now.judge.beat_failed()))",
        "self._change(lambda now: replace(now))",
    ),
    session(
        "a refused session stays trusted",
        "O13",
        "replace(now, trust=now.trust.not_live(at), judge",
        "replace(now, judge",
    ),
    session(
        "a new session reuses the id of the old",
        "I12",
        "return replace(self._template, worker_id=new_worker_id(self._template.host))",
        "return replace(self._template, worker_id=self.worker_id) if hasattr(self, '_present') else self._template",
    ),
    session(
        "a look from before the opening counts",
        "O25",
        "return present.judge.verdicts(look) if look.asked_at >= present.opened_at else ()",
        "return present.judge.verdicts(look)",
    ),
    session(
        "a new session forgets that it drains",
        "O35",
        "trust=trust, judge=judge, opened_at=answered_at)",
        "trust=trust, judge=judge, opened_at=answered_at, draining=False)",
    ),
]

BEATING: Final = [
    pulse(
        "the clock is read after the answer",
        "O9",
        "        now, before = self._session.now(), self._session.trust\n",
        "        now = sent_at = self._session.now()\n        before = self._session.trust\n",
        BEATS,
    ),
    pulse(
        "a beat's own time delays the next",
        "F46",
        "await self._listen(BootSeconds(self._last_turn + pause))",
        "await self._listen(BootSeconds(self._session.now() + pause))",
        BEATS,
    ),
    pulse(
        "every worker beats at the same pace",
        "F46",
        "failures=self.failures, unit=self._unit())",
        "failures=self.failures, unit=0.5)",
        BEATS,
    ),
    pulse(
        "failed beats are not counted",
        "O10",
        "        self.failures += 1\n",
        "",
        BEATS,
    ),
    pulse(
        "an unexpected error ends the beats",
        "O10",
        "            except Exception as error:  # noqa: BLE001 - whatever",
        "            except DeerflowRunsError as error:  # noqa: BLE001 - whatever",
        BEATS,
    ),
    pulse(
        "a broken line is used again",
        "O10",
        "        self._lifeline.broken(error)\n        self.failures",
        "        self.failures",
        BEATS,
    ),
    pulse(
        "the judge never hears of failed beats",
        "O24",
        "        self._session.failed()\n",
        "",
        BEATS,
    ),
    pulse(
        "a reconnection is not told",
        "O19",
        "        self._post(messages.Reconnected())\n",
        "",
        BEATS,
    ),
    pulse(
        "a draining session beats as a live one",
        "O35",
        "self._session.worker_id, self._session.state\n",
        "self._session.worker_id, self._session.session.state\n",
        BEATS,
    ),
    pulse(
        "a stalled loop is renewed for",
        "O11",
        "        if self._watch.renew:\n",
        "        if True:\n",
        HEARING,
    ),
    pulse(
        "beats wait for their time after a stall",
        "O11",
        "recovered=self.beat_now, observe",
        "recovered=lambda: None, observe",
        HEARING,
    ),
    pulse(
        "cancels of a beat are dropped",
        "O19",
        "        self._heard(answer.requests)\n",
        "",
        HEARING,
    ),
    pulse(
        "a signalled cancel waits for the next beat",
        "O19",
        "self._heard(await self._lifeline.ask(self._lifeline.line.requests(self._session.worker_id)))",
        "pass",
        HEARING,
    ),
    pulse(
        "a signal brings the next beat forward",
        "O33",
        "                await self._heed(signal)\n",
        "                await self._heed(signal)\n                self._nudged.set()\n",
        HEARING,
    ),
    pulse(
        "signals are tried once and never again",
        "O33",
        "self._until_probe = (self._until_probe or PROBE_EVERY) - 1",
        "self._until_probe = -1",
        HEARING,
    ),
    pulse(
        "signals are not tried after a reconnection",
        "O33",
        "        self._until_probe = 0\n        previous",
        "        previous",
        HEARING,
    ),
    pulse(
        "silent signals are never tried again",
        "O33",
        "line.mode in (SignalMode.NOTIFY, SignalMode.POLLING)",
        "line.mode is SignalMode.NOTIFY",
        HEARING,
    ),
    pulse(
        "a replacement is not told",
        "O13",
        "        self._post(messages.SessionReplaced(previous))\n",
        "",
        SESSIONS,
    ),
    pulse(
        "the end closes nothing",
        "O35",
        "        await self._lifeline.close(self._last_patience())\n",
        "",
        SESSIONS,
    ),
    pulse(
        "the end waits for a silent store",
        "O35",
        "            await first_of(self._clock, self._budget / 2, working)\n",
        "            await asyncio.wait({working})\n",
        SESSIONS,
    ),
]

CONNECTION: Final = [
    lifeline(
        "a beat is waited for beyond the end of trust",
        "O10",
        "limit = beat_timeout(self._session.trust, self._session.now())\n        return await within(self._clock, max",
        "limit = 60.0\n        return await within(self._clock, max",
        BEATS,
    ),
    lifeline(
        "a line that does not obey is asked again",
        "O10",
        "            self._line = None  # somebody is still inside\n",
        "            pass\n",
        BEATS,
    ),
    lifeline(
        "a repeated opening trusts from the repetition on",
        "O9",
        "asked_at = opening.asked_at if opening.asked_at is not None else self._session.now()",
        "asked_at = self._session.now()",
        SESSIONS,
    ),
    lifeline(
        "each try to replace a session leaves another behind",
        "O13",
        "        self._opening = replace(opening, asked_at=asked_at)\n",
        "        self._opening = _Opening(self._session.fresh(), asked_at)\n",
        SESSIONS,
    ),
    lifeline(
        "a stillborn replacement is asked for until the end of days",
        "I12",
        "            self._opening = _Opening(self._session.fresh())\n            raise",
        "            raise",
        SESSIONS,
    ),
    lifeline(
        "a new session keeps the channel of the old",
        "O33",
        "        await within(self._clock, seconds, self.line.connect(opening.session.worker_id))\n",
        "        await within(self._clock, seconds, self.line.connect(self._session.worker_id))\n",
        HEARING,
    ),
    lifeline(
        "a session that is being closed is still trusted",
        "I11",
        "        self._session.closing()\n",
        "",
        SESSIONS,
    ),
    lifeline(
        "the session of a failed start lives on",
        "O8",
        "        if self._opening is not None and self._opening.asked_at is not None:\n",
        "        if False:\n",
        SESSIONS,
    ),
]

BESIDE: Final = [
    _in(
        "telling",
        "the end of trust is told with the next beat only",
        "O12",
        "await self._clock.sleep(self._session.trust.remaining(self._session.now()))",
        "await self._clock.sleep(3600)",
        BEATS,
    ),
    _in(
        "telling",
        "the end of trust is told again and again",
        "O12",
        "        if self._ended_at is None and not past.trusted(now):",
        "        if not past.trusted(now):",
        BEATS,
    ),
    _in(
        "telling",
        "regained trust is not told",
        "O12",
        "self._post(messages.TrustRegained(suspended_for))",
        "pass",
        BEATS,
    ),
    _in(
        "loop_watch",
        "a late heartbeat takes its own lateness for a stall",
        "O11",
        "            due = BootSeconds(self._session.now() + self._watch.terms.beat)\n"
        "            await self._clock.sleep(self._watch.terms.beat)\n",
        "            await self._clock.sleep(self._watch.terms.beat)\n            due = self._session.now()\n",
        HEARING,
    ),
    _in("loop_watch", "an answer is not heard", "O11", "self._watch = self._watch.answered()", "pass", HEARING),
    _in(
        "loop_watch",
        "a stall is not logged",
        "O11",
        'logger.error("the main loop',
        'logger.debug("the main loop',
        HEARING,
    ),
    _in(
        "loop_watch",
        "stacks show the values of locals",
        "O11",
        "{''.join(traceback.format_stack(frame))}",
        "{traceback.StackSummary.extract(traceback.walk_stack(frame), capture_locals=True).format()}",
        HEARING,
    ),
    _in(
        "waiting",
        "what is given up goes on",
        "O10",
        "        task.cancel()\n",
        "",
        BEATS,
    ),
    _in(
        "waiting",
        "what does not obey is waited for",
        "O10",
        "    while left and not limit.done():\n",
        "    while left:\n",
        BEATS,
    ),
]

THREADS: Final = [
    thread(
        "the heartbeat's thread outlives the program",
        "O10",
        'name="deerflow-runs-heartbeat", daemon=True',
        'name="deerflow-runs-heartbeat"',
        "test_a_started_heartbeat_is_trusted_and_has_a_daemon_thread_of_its_own",
    ),
    thread(
        "messages are delivered in the thread",
        "O10",
        "        self._to_main(lambda: self._arrive(message))",
        "        self._arrive(message)",
        "test_messages_arrive_in_the_main_loop",
    ),
    thread(
        "a blocked loop is told the same again and again",
        "O10",
        "            self._waiting.add(message)\n",
        "            pass\n",
        "test_what_a_blocked_main_loop_was_told_again_and_again_it_hears_once",
    ),
    thread(
        "what was said once is never said again",
        "O19",
        "        self._waiting.discard(message)\n",
        "",
        "test_a_cancel_that_is_not_heeded_is_heard_again",
    ),
    thread(
        "a cancelled start leaves its thread",
        "O10",
        "            await self._gone(thread)\n            raise\n        if",
        "            raise\n        if",
        "test_a_cancelled_start_leaves_no_thread_and_no_live_session",
    ),
    thread(
        "the thread outlives its main loop",
        "O10",
        "            self.pulse.stop(AT_EXIT)\n",
        "            pass\n",
        "test_a_main_loop_that_is_gone_takes_the_heartbeat_and_its_session_along",
    ),
    thread(
        "a child uses its parent's heartbeat",
        "O27",
        "        if os.getpid() != self._pid:\n            raise",
        "        if False:\n            raise",
        "test_a_child_can_neither_use_nor_end_the_heartbeat_of_its_parent",
    ),
    thread(
        "the end of the interpreter closes nothing",
        "O35",
        "        atexit.register(self._at_exit)\n",
        "",
        "test_a_program_that_forgets_to_stop_ends_in_silence_and_closes_its_session",
    ),
]

MUTATIONS: Final = [*PRESENT, *BEATING, *CONNECTION, *BESIDE, *THREADS]
