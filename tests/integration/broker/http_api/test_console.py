from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import pytest

import qflow_client.broker.http
from qflow_client.broker import Broker

from .tools import Client

FOLDER = Path(qflow_client.broker.http.__file__).parent / "console"
VENDOR = FOLDER / "vendor"


def test_the_vendored_libraries_match_the_checksums_in_their_list_and_have_licences() -> None:
    row = r"^\| `(.*?)` \| .*? (\d+\.\d+\.\d+).*? \| MIT, `(.*?)`.* \| `(\w{64})` \|$"
    listed = re.findall(row, (VENDOR / "README.md").read_text(), re.MULTILINE)
    files = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*.*") if path.suffix in (".js", ".css")}
    assert {name for name, *_ in listed} == files
    for name, version, licence, checksum in listed:
        assert version in name
        assert "Permission is hereby granted, free of charge" in (VENDOR / licence).read_text()
        assert sha256((VENDOR / name).read_bytes()).hexdigest() == checksum


def test_the_console_page_loads_all_its_resources_from_the_broker(broker: Broker, ask: Client) -> None:
    page = ask("GET", "/")
    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'self'" in page.headers["Content-Security-Policy"]
    named = set(re.findall(r'(?:href|src)="(console/.*?)"', page.text))
    script = ask("GET", "/console/console.js").text
    model = ask("GET", "/console/model.js").text
    named |= {f"console/{name}" for name in re.findall(r'new URL\("(.*?)", import\.meta', script)}
    named |= {f"console/{name}" for name in re.findall(r'from "\./(.*?)"', script + model)}
    assert len(named) == 9
    for name in named:
        answer = ask("GET", f"/{name}")
        assert answer.status == 200, name
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    ours = page.text + script + model + ask("GET", "/console/console.css").text
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", ours) == []


def test_the_console_page_contains_no_secret_and_is_served_without_a_token() -> None:
    with Broker(http_port=0, http_token="correct-horse") as broker:
        broker.declare_queue("orders")
        for path in ("/", "/console/console.js", "/console/model.js"):
            answer = Client(broker)("GET", path)
            assert answer.status == 200
            assert not re.search("correct-horse|orders", answer.text)


@pytest.mark.parametrize("path", ["/console/", "/console/../server.py", "/console/%2e%2e/server.py", "/console/vendor"])
def test_paths_outside_the_files_of_the_console_are_answered_with_404(ask: Client, path: str) -> None:
    assert ask("GET", path).status == 404


def test_a_request_for_the_console_page_with_a_foreign_host_header_is_answered_with_403(ask: Client) -> None:
    assert ask("GET", "/", headers={"Host": "evil.example"}).status == 403
