"""From `git clone` to a confirmed message of one's own, by the commands that README shows and no others, with a clock.

    python -m checks.first_message

It has to take less than 90 seconds by the clock. If the machine is busy before it begins, these are seconds of
processor time, and it may take five times as long.

RabbitMQ is there before the clock starts. It is a node of its own, on a port of its own: `QFLOW_URL` says which to the
commands, and the program's URL is replaced.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from qflow_client.testing.rabbitmq import RabbitMQNode

ROOT: Final = Path(__file__).parents[1]
#: Seconds that all of it may take.
LIMIT: Final = 90.0

_URL: Final = "amqp://guest:guest@localhost:5672/%2F"
_ERRORS: Final = re.compile(r"error|warning|traceback", re.IGNORECASE)


def commands_and_program(readme: str) -> tuple[str, str]:
    """Return the commands that README shows for a first message, and the program that it shows behind them.

    Raises:
        ValueError: README does not show them
    """
    section = readme.partition("\n## Send\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    if [language for language, _ in blocks[:2]] != ["sh", "python"]:
        raise ValueError("README's section 'Send' must begin with a block of commands and a program")
    return blocks[0][1], blocks[1][1]


def run(script: str, cwd: Path, url: str) -> str:
    """Run commands as a user's shell does, and return what they print.

    Raises:
        RuntimeError: a command fails, or says something of an error
    """
    # No settings and no virtual environment of the caller.
    names = [name for name in os.environ if name.startswith(("QFLOW_", "PYTHON", "VIRTUAL_ENV"))]
    environment = {name: value for name, value in os.environ.items() if name not in names}
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env=environment | {"QFLOW_URL": url},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=10 * LIMIT,
        check=False,
    )
    print(ran.stdout, end="", flush=True)
    if ran.returncode or _ERRORS.search(ran.stdout):
        raise RuntimeError(f"exit code {ran.returncode}: {script}")
    return ran.stdout


def main() -> int:
    """Do it, and return the exit code."""
    if shutil.which("git") is None:
        raise SystemExit("there is no git")
    commands, program = commands_and_program((ROOT / "README.md").read_text(encoding="utf-8"))
    # What else runs makes the clock meaningless.
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    with RabbitMQNode() as node, tempfile.TemporaryDirectory() as name:
        clone = Path(name) / "clone"
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        run(f"git clone -q {ROOT} {clone}", ROOT, node.url)
        said = run(commands, clone, node.url)
        first = time.monotonic() - begun
        (clone / "first.py").write_text(program.replace(_URL, node.url), encoding="utf-8")
        confirmed = run(". .venv/bin/activate && python first.py", clone, node.url)
        took = time.monotonic() - begun
        # Before the node ends, whose time would count.
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    print(f"A first message was confirmed {first:.1f} s after git clone began, one of a program after {took:.1f} s.")
    print(f"The commands took {processor:.1f} s of processor time.")
    if "1 record confirmed" not in said or "confirmed" not in confirmed.splitlines():
        print("Not each of them says that its message is confirmed.")
        return 1
    is_in_time = processor < LIMIT and took < 5 * LIMIT if is_busy else took < LIMIT
    if not is_in_time:
        print(f"It may take {LIMIT:.0f} s.")
    return 0 if is_in_time else 1


if __name__ == "__main__":
    sys.exit(main())
