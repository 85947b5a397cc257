"""A check: one sentence about stores that is either true or false, the rules it stands for, and how to find out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import final

from deerflow_runs.testing.contract.stage import Stage
from deerflow_runs.testing.contract.subject import Subject

Body = Callable[[Subject], Awaitable[None]]
Scene = Callable[[Stage], Awaitable[None]]


@final
@dataclass(frozen=True, slots=True)
class Check:
    """One sentence that a store must make true. ``rules`` are the numbers of ownership.md and behaviours it proves."""

    sentence: str
    body: Body
    rules: tuple[str, ...] = ()

    async def __call__(self, subject: Subject) -> None:
        """Run it on a store that holds nothing yet; raises ``AssertionError`` when the sentence is false."""
        await self.body(subject)

    def __str__(self) -> str:
        return self.sentence


class Checks(list[Check]):
    """The checks of one part of the contract, in the order in which they are told."""

    def __call__(self, *rules: str) -> Callable[[Scene], Scene]:
        """Add the decorated function; its name is the sentence."""

        def adding(scene: Scene) -> Scene:
            name = getattr(scene, "__name__", "")
            self.tell(name.replace("_s_", "'s ").replace("_", " "), scene, *rules)
            return scene

        return adding

    def tell(self, sentence: str, scene: Scene, *rules: str) -> None:
        """Add a scene under a sentence of its own."""

        async def body(subject: Subject) -> None:
            await scene(Stage(subject.store))

        self.append(Check(sentence, body, rules))
