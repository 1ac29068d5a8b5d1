"""Hostile files: what a stranger could send, each given to a command under an audit hook.

The command ends with an exit code and a sentence, or does its work. It opens nothing outside its
folder, Python and caches, runs nothing, connects to nothing, and shows no control characters.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
from pathlib import Path

from torture.children import Ended, farspan_main, run_function
from torture.harness import ROOT, Category, Workspace
from torture.hostile_files import FIXTURES, SECRET, Setting
from torture.tally import Tally

SECONDS, MEMORY = 60.0, 10 << 30
RUNS_CODE = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "subprocess.Popen",
    "pty.spawn",
    "pickle.find_class",
    "socket.connect",
)
SYSTEM = ("/proc", "/sys", "/dev/null", "/dev/urandom", "/dev/shm", "/etc", "/usr", "/lib", "/opt")
SHORT = ("pickle-index", "auto-map-config", "html-record", "template-link", "jsonl-deep")


def allowed_prefixes(folder: Path, inputs: Path) -> tuple[str, ...]:
    home = Path.home()
    paths = [folder, inputs, ROOT / "src", sys.prefix, sys.base_prefix, home / ".cache"]
    paths += [home / ".config", *map(Path, sys.path[1:]), Path(sys.executable).resolve().parents[1]]
    return (*SYSTEM, *(os.path.realpath(path) for path in paths if str(path) not in ("", ".")))


def audit(folder: Path, inputs: Path, report: Path) -> None:
    """Record what a command must not do."""
    allowed = allowed_prefixes(folder, inputs)

    def record(text: str) -> None:
        handle = os.open(report, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, text.encode("utf-8", "backslashreplace") + b"\n")
        os.close(handle)

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith(allowed) and path != str(report):
                record(f"opened {path}")
        elif event in RUNS_CODE:
            record(f"{event} {str(arguments)[:200]}")
        elif event == "exec" and getattr(arguments[0], "co_filename", "").startswith(str(folder)):
            record(f"ran {arguments[0].co_filename}")

    sys.addaudithook(hook)


def run(case: str, rng: random.Random, workspace: Workspace) -> Tally:
    tally = Tally()
    with workspace.case(f"hostile-{case}") as folder, tempfile.TemporaryDirectory() as elsewhere:
        outside = Path(elsewhere).resolve()
        (outside / "secret.txt").write_text(SECRET)
        (outside / "secret.json").write_text(json.dumps({"text": SECRET, "note": SECRET}))
        arguments = FIXTURES[case](Setting(folder, workspace.inputs, outside))
        report = workspace.log(folder).with_suffix(".log.report")

        def prepare() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            audit(folder, workspace.inputs, report)

        main = farspan_main(arguments, prepare)
        ended = run_function(main, folder, workspace.log(folder), SECONDS)
        seen = report.read_text().splitlines() if report.exists() else []
        if problem := _problem(ended, seen, folder):
            tally.fail(f"{' '.join(arguments)}: {problem}")
        elif ended.code == 0:
            tally.survived += 1
        else:
            tally.refused += 1
    return tally


def _problem(ended: Ended, seen: list[str], folder: Path) -> str:
    if seen:
        return "; ".join(seen[:3])
    if ended.traceback or ended.timed_out or ended.code not in (0, 2, 3, 4):
        return ended.describe()
    if (folder / "ran").exists():
        return "code of the file ran"
    if set("\x1b\x07\x9b") & set(ended.output + ended.errors):
        return "control characters reached the terminal"
    written = [path for path in folder.glob("written*/**/*") if path.is_file()]
    texts = [path.read_text(errors="replace") for path in written]
    if any(SECRET in text for text in (ended.output, ended.errors, *texts)):
        return "the content of a file outside was shown or copied"
    if any("<script>alert" in text for text in texts):
        return "HTML of a name or value is on the page"
    return ""


def cases(level: str) -> list[str]:
    return list(SHORT if level == "short" else FIXTURES)


HOSTILE = Category("hostile", cases, run, ("export-gguf",))
