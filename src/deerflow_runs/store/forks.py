"""Descriptors that no forked child may keep, because the kernel frees a hint only with its last copy (O27).

A child closes its copies itself, below the drivers: their own closing would speak on the parent's connection. Programs
that are started anew have none of them, as Python opens every descriptor close-on-exec.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, final


@final
@dataclass(frozen=True, slots=True)
class Moment:
    """How many forks had begun and ended."""

    begun: int
    ended: int


@final
@dataclass(frozen=True, slots=True)
class _Kept:
    """``device`` and ``inode`` say what the number stood for: a driver that has closed it need not tell us."""

    owner: object
    device: int
    inode: int

    def is_at(self, descriptor: int) -> bool:
        try:
            found = os.fstat(descriptor)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (self.device, self.inode)


@final
class Descriptors:
    """What children close. No lock: a fork may happen while another thread is at any point of this."""

    def __init__(self) -> None:
        self._begun = 0
        self._ended = 0
        self._kept: dict[int, _Kept] = {}
        self._left_behind: list[object] = []

    def now(self) -> Moment:
        """To be asked before a descriptor is made, for ``keep``."""
        return Moment(self._begun, self._ended)

    def keep(self, descriptor: int, owner: object, *, since: Moment) -> bool:
        """From now on children close it. False: one that was forked since may have it for ever, so make another.

        A child never clears up the ``owner``, which would end the connection that it shares with its parent.
        """
        stands_for = os.fstat(descriptor)
        self._kept[descriptor] = _Kept(owner, stands_for.st_dev, stands_for.st_ino)
        return since.begun == since.ended and self.now() == since

    def forget(self, descriptor: int) -> None:
        """It is about to be closed. Repeating it is harmless."""
        self._kept.pop(descriptor, None)

    def forking(self) -> None:
        """In the parent, before."""
        self._begun += 1

    def forked(self) -> None:
        """In the parent, after."""
        self._ended += 1

    def in_child(self) -> None:
        """Close every copy. Its number stays taken, or the driver would close somebody else's file by that number."""
        self._ended = self._begun
        kept, self._kept = self._kept, {}
        self._left_behind.extend(one.owner for one in kept.values())
        for descriptor, one in kept.items():
            if one.is_at(descriptor):
                _close_but_keep_the_number(descriptor)


def _close_but_keep_the_number(descriptor: int) -> None:
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
    except OSError:
        os.close(descriptor)
        return
    os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


DESCRIPTORS: Final = Descriptors()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=DESCRIPTORS.forking, after_in_parent=DESCRIPTORS.forked, after_in_child=DESCRIPTORS.in_child
    )
