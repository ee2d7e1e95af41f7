"""Fifty clients on loopback, a budget that ends in the middle of their requests, and a server that is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_ensemble import build
from tiny_models import CPU

from dptune.prediction.deployment import deploy
from dptune.privacy.budget_gate import BudgetError
from dptune.privacy.ledger_file import read_ledger

pytestmark = pytest.mark.system

CLIENTS, REFUSALS = 50, 3


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """``dptune serve`` in a process of its own."""

    def __init__(self, ensemble: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := _free_port())}"
        command = [sys.executable, "-m", "dptune.cli", "serve", "--ensemble", str(ensemble), "--port", str(port)]
        self.process = subprocess.Popen(command)
        while True:  # only the test's own limit ends a wait for what never comes
            try:
                httpx.get(f"{self.url}/budget", timeout=None)
                return
            except httpx.HTTPError:
                assert self.process.poll() is None, "the server ended at once"
                time.sleep(0.2)

    def end(self, how: signal.Signals) -> None:
        os.kill(self.process.pid, how)
        self.process.wait()


def _clients(
    url: str, tokens: int, permits: threading.Semaphore | None = None
) -> tuple[list[dict[str, Any]], list[str], int]:
    """What fifty clients got until each was refused a few times or lost the server: replies, refusals, losses.

    Args:
        permits: each request takes one, and waits for it.
    """
    replies: list[dict[str, Any]] = []
    refusals: list[str] = []
    lost = [0] * CLIENTS

    def client(number: int) -> None:
        refused = 0
        with httpx.Client(timeout=None) as session:
            while refused < REFUSALS:
                if permits is not None:
                    permits.acquire()
                try:
                    found = session.post(f"{url}/generate", json={"prompt": f"the {number}", "tokens": tokens})
                except httpx.HTTPError:
                    lost[number] += 1
                    return
                if found.status_code == 200:
                    replies.append(found.json())
                else:
                    assert found.status_code == 403
                    refusals.append(found.json()["detail"])
                    refused += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies, refusals, sum(lost)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("budget", [60, pytest.param(2500, marks=pytest.mark.slow)])
def test_exactly_the_budget_is_answered(tmp_path: Path, budget: int) -> None:
    ensemble = build(tmp_path / "ensemble", tokens=budget)
    server = Server(ensemble)
    replies, refusals, lost = _clients(server.url, 3)
    assert httpx.get(f"{server.url}/budget", timeout=None).json()["tokens_left"] == 0
    server.end(signal.SIGTERM)
    assert lost == 0
    assert sum(len(reply["answered"]) for reply in replies) == budget
    assert len(refusals) == CLIENTS * REFUSALS
    assert all(f"all {budget} tokens are spent" in refusal for refusal in refusals)
    contents = read_ledger(ensemble / "ledger.jsonl")
    assert (contents.releases, contents.complete) == (budget, True)
    assert contents.epsilons.certified <= 8


@pytest.mark.timeout(1800)
@pytest.mark.slow  # two servers' starts; test_predictor.py kills a process without one
def test_a_killed_server_gives_no_token_twice(tmp_path: Path) -> None:
    """kill -9 under load, then the same ensemble opened again, as a new server opens it."""
    budget = 80
    ensemble = build(tmp_path / "ensemble", tokens=budget)
    server = Server(ensemble)
    permits = threading.Semaphore(budget - 1)  # however late the kill comes, the budget is not spent

    def kill_in_the_middle() -> None:
        while (ensemble / "ledger.jsonl").read_bytes().count(b"\n") < budget // 3:
            time.sleep(0.01)
        server.end(signal.SIGKILL)
        permits.release(CLIENTS)

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    before, _, lost = _clients(server.url, 1, permits)
    killer.join()
    assert lost == CLIENTS
    charged = (ensemble / "ledger.jsonl").read_bytes().count(b"\n") - 1  # less the first; the kill tore the last
    again = deploy(ensemble, CPU)
    received, spent = sum(len(reply["answered"]) for reply in before), again.predictor.tokens_spent
    assert spent == charged
    assert 0 < received <= spent < budget  # what was charged and not received is lost, never given again
    after = [again.predictor.answer([5]).tokens_left for _ in range(budget - spent)]
    with pytest.raises(BudgetError, match=f"all {budget} tokens are spent"):
        again.predictor.answer([5])
    left = [reply["tokens_left"] for reply in before] + after
    assert len(set(left)) == len(left)
    assert read_ledger(ensemble / "ledger.jsonl").releases == budget
