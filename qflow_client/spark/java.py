"""Finds the Java runtime that Spark needs. If Java is missing, the error says so more clearly than Spark's error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from qflow_client.errors import QflowError

__all__ = ["JavaMissing", "check_java"]

#: The oldest Java version that Spark 4 supports.
OLDEST = 17

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


class JavaMissing(QflowError):
    """There is no Java runtime that Spark can use."""


def check_java() -> Path:
    """Find the Java that a Spark session of this process will use, in ``JAVA_HOME`` or else in ``PATH``.

    Call this function before you create the session. Without Java, Spark reports only that a process has ended. The
    result is the path of the java program.

    Raises:
        JavaMissing: there is no Java, it is too old, or its version is unknown.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(Path(home, "bin", "java")) if home else shutil.which("java")
    if found is None:
        where = f"JAVA_HOME={home} has no bin/java" if home else "neither JAVA_HOME nor PATH leads to Java"
        raise JavaMissing(
            f"Spark needs Java {OLDEST} or later, and {where}; install it (Debian: apt-get install "
            "default-jre-headless) and set JAVA_HOME, or unset it to use PATH"
        )
    answer = subprocess.run([found, "-version"], capture_output=True, text=True, timeout=60)
    match = _VERSION.search(answer.stderr)
    if match is None:
        raise JavaMissing(f"{found} -version printed no version: {(answer.stderr or answer.stdout).strip()!r}")
    if int(match[1]) < OLDEST:
        raise JavaMissing(f"{found} is Java {match[1]}, and Spark needs {OLDEST} or later; set JAVA_HOME")
    return Path(found)
