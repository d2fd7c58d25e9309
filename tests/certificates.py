"""Certificates for the tests of TLS."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

OF_LOCALHOST = "IP:127.0.0.1,DNS:localhost"


def certify(folder: Path, name: str = "localhost", subject: str = OF_LOCALHOST, *extensions: str) -> tuple[Path, Path]:
    """Create a self-signed certificate and its key. Return the paths of both files."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName={subject}"]
    for extension in extensions:
        command += ["-addext", extension]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a TLS context of a server with this certificate and key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
