"""Runs the Python blocks of one page in order, in one namespace, as a reader would type them one after the other.

Started as a program of its own: ``python run_page.py PAGE``. A block may await at its top level; all of them share one
event loop. Line numbers in a traceback are those of the page.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from pathlib import Path

from tests.docs.pages import blocks


def main(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for block in blocks(page):
            if block.language == "python":
                source = "\n" * (block.line - 1) + block.code
                code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                answer = eval(code, namespace)  # noqa: S307 - our own pages
                if inspect.iscoroutine(answer):
                    runner.run(answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
