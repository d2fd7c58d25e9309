"""`qflow broker` with client certificates, hashed passwords and few file descriptors."""

from __future__ import annotations

import io
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pika
import pytest

from qflow_client.cli import main
from tests.certificates import certify
from tests.integration.producer.tools import eventually

# From Python 3.13 on, a server verifies certificates strictly, so the authority and the client need the extensions that
# RFC 5280 requires.
_AUTHORITY = "keyUsage=critical,keyCertSign"
_CLIENT = """\
basicConstraints=critical,CA:false
keyUsage=critical,digitalSignature
extendedKeyUsage=clientAuth
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
"""


def _certificates(folder: Path) -> None:
    """Create a server's certificate, an authority for clients, and a client's certificate with its key in one file."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    certify(folder, "server")
    certify(folder, "ca", "DNS:ca", _AUTHORITY)
    (folder / "client.ext").write_text(_CLIENT)
    openssl("req", *new, "-keyout", "client.key", "-out", "client.csr", "-subj", "/CN=client")
    authority = ["-CA", "ca.pem", "-CAkey", "ca.key", "-extfile", "client.ext"]
    openssl("x509", "-req", "-in", "client.csr", *authority, "-out", "client.crt")
    (folder / "client.pem").write_text((folder / "client.crt").read_text() + (folder / "client.key").read_text())


@pytest.mark.program
def test_only_clients_with_a_certificate_of_the_configured_authority_can_connect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _certificates(tmp_path)
    options = ["--tls-certificate", "server.pem", "--tls-key", "server.key", "--tls-client-ca", "ca.pem"]
    with running_broker(tmp_path, *options, "--http-port", "0") as (url, http_url):
        trusting = ssl.create_default_context(cafile=tmp_path / "server.pem")
        port = int(url.rpartition(":")[2].partition("/")[0])

        def first_byte(context: ssl.SSLContext) -> bytes:
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as client,
            ):
                client.sendall(b"AMQP\0\0\x09\x01")
                return client.recv(1)
            return b""

        assert first_byte(trusting) == b""
        assert main(["admin", "--url", http_url, "queues"]) == 1
        assert "; check --cacert and --cert" in capsys.readouterr().err
        admin = ["admin", "--url", http_url, "--cacert", str(tmp_path / "server.pem")]
        assert main([*admin, "queues"]) == 1
        assert "check --" in (told := capsys.readouterr().err)
        assert "--cert" in told
        assert main([*admin, "--cert", str(tmp_path / "client.pem"), "queues"]) == 0
        trusting.load_cert_chain(tmp_path / "client.pem")
        assert first_byte(trusting) == b"\1"


@pytest.mark.program
def test_E8_a_user_with_a_password_hash_from_the_command_hash_password_can_log_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("sesame\n"))
    assert main(["hash-password"]) == 0
    hashed = capsys.readouterr().out.strip()
    assert hashed.startswith("$scrypt$")
    (tmp_path / "users").write_text(f"bob:s3cr3t\nann:{hashed}\n")
    with running_broker(tmp_path, "--users-file", "users") as (url, _):
        assert url.startswith("amqp://bob:***@127")
        parameters = pika.URLParameters(url.replace("bob:***@", "ann:sesame@"))
        pika.BlockingConnection(parameters).close()


@pytest.mark.parametrize("line", ["", "\n"])
def test_the_command_hash_password_refuses_a_blank_password(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(line))
    assert main(["hash-password"]) == 2
    assert capsys.readouterr().err == "qflow: the password is blank; enter at least one character\n"


@pytest.mark.program
def test_E9_the_broker_warns_of_a_low_file_descriptor_limit_and_survives_reaching_the_limit(tmp_path: Path) -> None:
    limit = ("sh", "-c", 'ulimit -n 150; exec "$@"', "sh")
    with running_broker(tmp_path, prefix=limit) as (url, _):
        port = int(url.rpartition(":")[2].partition("/")[0])
        crowd = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(300)]
        eventually(lambda: "no connection can be accepted" in (tmp_path / "log").read_text(), timeout=60)
        for each in crowd:
            each.close()
        pika.BlockingConnection(pika.URLParameters(url)).close()
    log = (tmp_path / "log").read_text()
    assert "this process may open 150 files, too few for max_connections=10000; raise the limit (ulimit -Hn" in log
    assert log.count("no connection can be accepted: Too many open files") == 1
    assert len(log) < 20_000


@contextmanager
def running_broker(folder: Path, *options: str, prefix: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Run `qflow broker` in a folder, and yield its URLs. Its log is the file `log` in this folder."""
    command = [*prefix, sys.executable, "-m", "qflow_client.cli", "broker", "--port", "0", *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        yield url, process.stdout.readline().strip() if "--http-port" in options else ""
    finally:
        process.terminate()
        process.communicate(timeout=60)
