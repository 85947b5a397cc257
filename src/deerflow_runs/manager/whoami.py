"""What a worker's session says of its process: for people who look for it, and for judges on the same host."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from deerflow_runs.model import Session, WorkerId
from deerflow_runs.store.hints import boot_id


def this_process(capabilities: frozenset[str], labels: Mapping[str, str]) -> Session:
    """A session's row but for its id and its times."""
    return Session(
        WorkerId(""),
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        version=_version(),
        labels=dict(labels),
        capabilities=capabilities,
    )


def _version() -> str:
    try:
        return version("deerflow-runs")
    except PackageNotFoundError:  # a source tree on the path, not an installation
        return "unknown"
