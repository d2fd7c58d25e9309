"""Measures the time from `git clone` to the first confirmed message, with only the commands that README shows.

    python -m checks.first_message

The limit is 90 seconds of wall-clock time. If the machine is busy at the start, the limit is 90 seconds of CPU time,
and 450 seconds of wall-clock time.

RabbitMQ is a private node on its own port, and starts before the measurement. The commands get the URL of the node from
`QFLOW_URL`. In the program, the URL of the node replaces the URL of README.
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
#: Maximum seconds of all steps together.
LIMIT: Final = 90.0

_URL: Final = "amqp://guest:guest@localhost:5672/%2F"
_ERRORS: Final = re.compile(r"error|warning|traceback", re.IGNORECASE)


def commands_and_program(readme: str) -> tuple[str, str]:
    """Return the commands that README shows for a first message, and the program after these commands.

    Raises:
        ValueError: README does not show the commands and the program
    """
    section = readme.partition("\n## Send\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    if [language for language, _ in blocks[:2]] != ["sh", "python"]:
        raise ValueError("README's section 'Send' must begin with a block of commands and a program")
    return blocks[0][1], blocks[1][1]


def run(script: str, cwd: Path, url: str) -> str:
    """Run commands like a user's shell, and return their output.

    Raises:
        RuntimeError: a command fails, or its output contains an error or a warning
    """
    # The environment has neither the settings nor the virtual environment of the caller.
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
    """Run the measurement, and return the exit code."""
    if shutil.which("git") is None:
        raise SystemExit("there is no git")
    commands, program = commands_and_program((ROOT / "README.md").read_text(encoding="utf-8"))
    # On a busy machine the wall-clock time is meaningless.
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
        # Read the CPU time before the node ends. After its end, the CPU time of the node would be included.
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
