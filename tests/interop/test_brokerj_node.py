"""Broker-J nodes that belong to one test run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pika
import pytest

from qflow_client.testing.brokerj import VERSIONS, BrokerJ, BrokerJError, BrokerJNode, BrokerJNotInstalled


def tool(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a PATH that contains only a program named java."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("QFLOW_BROKERJ_CACHE", str(folder))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    tool(tmp_path / "java", "echo this is no broker; exit 3")
    return folder


@pytest.mark.brokerj
def test_a_queue_of_Broker_J_can_be_created_changed_and_queried(brokerj: BrokerJ) -> None:
    brokerj.make_queue("a queue: its name", maximumQueueDepthMessages=5)
    assert brokerj.queue("a queue: its name")["maximumQueueDepthMessages"] == 5
    brokerj.change_queue("a queue: its name", maximumQueueDepthMessages=6)
    assert brokerj.queue("a queue: its name")["maximumQueueDepthMessages"] == 6


@pytest.mark.brokerj
def test_a_management_request_that_Broker_J_refuses_raises_BrokerJError(brokerj: BrokerJ) -> None:
    with pytest.raises(BrokerJError, match=r"answered PUT .*refused with 422"):
        brokerj.make_queue("refused", overflowPolicy="NO_SUCH_POLICY")
    with pytest.raises(BrokerJError, match=r"answered GET .* with 404"):
        brokerj.queue("missing")


@pytest.mark.brokerj
def test_a_Broker_J_node_can_be_stopped_and_started_again_and_close_deletes_its_folder(
    own_brokerj: BrokerJNode,
) -> None:
    node = own_brokerj
    directory = node._directory
    pid = node.pid
    node.start()
    assert node.pid == pid, "it was started a second time"
    node.stop()
    assert not node.running
    node.start()
    pika.BlockingConnection(pika.URLParameters(node.url)).close()
    node.kill()
    assert node.pid is None
    assert repr(node).startswith(f"<BrokerJNode: Broker-J {VERSIONS[-1]} on port {node.port}, not running, ")
    node.close()
    assert not directory.exists()


def test_without_java_the_error_says_what_to_install(cache: Path) -> None:
    (cache.parent / "java").unlink()
    with pytest.raises(BrokerJNotInstalled, match="apt-get install default-jre-headless"):
        BrokerJNode()


def test_without_maven_the_error_says_what_to_install(cache: Path) -> None:
    with pytest.raises(BrokerJNotInstalled, match="apt-get install maven"):
        BrokerJNode("1.2.3")


def test_if_maven_fails_the_error_contains_its_output_and_no_file_is_kept(cache: Path) -> None:
    tool(cache.parent / "mvn", "echo no such release; exit 1")
    with pytest.raises(BrokerJNotInstalled, match=r"1\.2\.3:\n  no such release"):
        BrokerJNode("1.2.3")
    assert list(cache.iterdir()) == []


def test_the_jars_of_a_release_are_downloaded_only_once(cache: Path) -> None:
    mkdir = shutil.which("mkdir", path=os.defpath)
    tool(cache.parent / "mvn", f'for each; do case $each in *outputDirectory=*) {mkdir} "${{each#*=}}";; esac; done')
    BrokerJNode("1.2.3").close()
    assert [each.name for each in cache.iterdir()] == ["1.2.3"]
    (cache.parent / "mvn").unlink()
    BrokerJNode("1.2.3").close()


def test_if_Broker_J_ends_while_it_starts_the_error_contains_its_last_output(cache: Path) -> None:
    (cache / "1.2.3").mkdir(parents=True)
    node = BrokerJNode("1.2.3")
    with pytest.raises(BrokerJError, match="exit code 3 as it started:\n  this is no broker"), node:
        pytest.fail("it started")


def test_if_Broker_J_is_not_ready_at_the_timeout_it_is_stopped(cache: Path) -> None:
    (cache / "1.2.3").mkdir(parents=True)
    tool(cache.parent / "java", f"exec {shutil.which('sleep', path=os.defpath)} 60")
    node = BrokerJNode("1.2.3", start_timeout=0.2)
    with pytest.raises(BrokerJError, match=r"did not answer within 0\.2 s"):
        node.start()
    assert not node.running
    node.close()
