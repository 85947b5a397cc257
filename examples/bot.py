"""A chat bot without HTTP streaming, the way Slack or WhatsApp want it: messages come in, answers are sent later.

The platform may deliver a message twice: its id is the idempotency key. The answer is sent from ``on_settled``, which
is called at least once for every run that ended, also when the process that computed the answer was killed before it
could send it. Run it with ``python examples/bot.py``: the first bot is killed exactly there, the second one answers.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from deerflow_runs import Executor, Outcome, Run, RunLease, RunManager, RunsConfig, Usage, store_at

SPAWN = multiprocessing.get_context("spawn")


class Echo(Executor):
    """Where a model would be asked. The answer's text is kept with the run."""

    async def run(self, lease: RunLease, payload: Any) -> Outcome:
        await lease.check()
        await asyncio.sleep(0.1)
        return Outcome(usage=Usage(first_human_message=payload["text"], last_ai_message=f"You said: {payload['text']}"))


class Platform:
    """The far side: a file of sent answers. A real one takes the message's id too, so that it can drop a repeat."""

    def __init__(self, folder: Path) -> None:
        self._sent = folder / "sent.jsonl"

    def send(self, channel: str, message_id: str, text: str) -> None:
        with self._sent.open("a") as file:
            file.write(json.dumps({"channel": channel, "answers": message_id, "text": text}) + "\n")

    def sent(self) -> list[str]:
        return self._sent.read_text().splitlines() if self._sent.exists() else []


async def bot(folder: Path, messages: list[tuple[str, str, str]], *, killed: bool) -> None:
    """Take the messages in, then go on until everything is answered."""
    platform = Platform(folder)

    async def answer(run: Run) -> None:
        if killed:
            print(f"  bot {os.getpid()} has the answer and is killed before it can send it", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"  bot {os.getpid()} answers {run.metadata['message']}: {run.usage.last_ai_message}", flush=True)
        platform.send(run.thread_id, run.metadata["message"], run.usage.last_ai_message or run.error or "")

    config = RunsConfig.for_tests()  # short leases, so that the demo does not take minutes
    async with (
        store_at(folder / "bot.db", migrate=True) as store,
        RunManager(store, executors={"echo": Echo()}, config=config, on_settled=answer) as manager,
    ):
        for message_id, channel, text in messages:
            handle = await manager.submit(
                channel,
                "echo",
                input={"text": text},
                multitask_strategy="enqueue",
                idempotency_key=message_id,
                metadata={"message": message_id},
            )
            print(
                f"  bot {os.getpid()} got {message_id}{' again' if handle.reused else ''}: {handle.run_id}", flush=True
            )
        while not platform.sent() or await store.outbox.pending():  # noqa: ASYNC110 - another bot may answer
            await asyncio.sleep(0.1)


def run_bot(folder: Path, messages: list[tuple[str, str, str]], killed: bool) -> None:  # noqa: FBT001 - a process's arguments
    asyncio.run(bot(folder, messages, killed=killed))


def main(folder: Path) -> None:
    hello = ("message-1", "general", "hello")
    for title, messages, killed in (
        ("A message comes twice; its bot dies between the end of the run and the answer:", [hello, hello], True),
        ("Another bot starts. Nobody sends the message again:", [], False),
    ):
        print(title)
        process = SPAWN.Process(target=run_bot, args=(folder, messages, killed))
        process.start()
        process.join()
    print("Sent:", *Platform(folder).sent(), sep="\n  ")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
