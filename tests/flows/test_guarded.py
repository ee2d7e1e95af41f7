"""Prefect's and MLflow's servers answer their owner alone: no other user, and no page of another server."""

from __future__ import annotations

import importlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from other_user import Asker, as_nobody, attack_mlflow, attack_prefect, read_secrets
from prefect import Flow
from running_ui import RunningUi, without_data
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect
from tiny_pipeline import ROOT, mode

from flows.server import Guarded, OwnFlow, listens, new_password, prefect_app, prefect_settings

OTHERS = ("http://evil.example", "http://127.0.0.1:1", "http://localhost", "https://127.0.0.1:4200", "null", "")
HOSTS = (
    "evil.example",
    "evil.example:4200",
    "127.0.0.1.evil.example",
    "localhost.evil.example:4200",
    "0.0.0.0:4200",
    "",
)


async def _hello(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")


APP = Starlette(
    routes=[
        Route("/", lambda _: PlainTextResponse("hello"), methods=["GET", "POST", "DELETE"]),
        WebSocketRoute("/socket", _hello),
    ]
)


def client(password: str | None = None) -> TestClient:
    return TestClient(Guarded(APP, password), base_url="http://127.0.0.1:4200")


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_other_hosts_and_origins_are_refused(method: str) -> None:
    for name, values in {"Host": HOSTS, "Origin": OTHERS}.items():
        for value in values:
            assert client().request(method, "/", headers={name: value}).status_code == 403, (name, value)


def test_own_hosts_and_origins_are_answered() -> None:
    for host in ("127.0.0.1:4200", "localhost:4200", "localhost:14200", "localhost"):  # by a tunnel too
        assert client().get("/", headers={"Host": host}).text == "hello"
        assert client().post("/", headers={"Host": host, "Origin": f"http://{host}"}).text == "hello"


def test_web_sockets_are_guarded_too() -> None:
    with client().websocket_connect("ws://127.0.0.1:4200/socket") as socket:
        assert socket.receive_text() == "hello"
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example:4200"}):
        with (
            pytest.raises(WebSocketDisconnect),
            client().websocket_connect("ws://127.0.0.1:4200/socket", headers=headers),
        ):
            pass


def test_a_password_is_asked_for() -> None:
    password = new_password()
    user, secret = password.split(":")
    assert len(secret) >= 40
    assert secret not in new_password()
    one = client(password)
    assert one.get("/", auth=(user, secret)).text == "hello"
    for wrong in ((user, ""), (user, secret[:-1]), ("", secret), (user, f"{secret}é")):
        refused = one.get("/", auth=wrong)
        assert refused.status_code == 401, wrong
        assert refused.headers["www-authenticate"].startswith("Basic "), "a browser asks for it"
    assert one.get("/").status_code == 401
    assert one.get("/", auth=(user, secret), headers={"Origin": "http://evil.example"}).status_code == 403


def test_prefects_server_is_not_made_without_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "")
    with pytest.raises(ValueError, match="PREFECT_SERVER_API_AUTH_STRING is not set"):
        prefect_app()


def test_prefect_knows_its_settings() -> None:
    """A name that Prefect does not know would be ignored, and with it the password."""
    code = (
        "from prefect.settings import get_current_settings; print(get_current_settings().server.api.model_dump_json())"
    )
    given = {**os.environ, **prefect_settings("dptune:x")}
    told = json.loads(subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, check=True).stdout)
    assert told["auth_string"]
    assert told["csrf_protection_enabled"] is True
    assert told["cors_allowed_origins"] == "http://127.0.0.1"


def test_only_the_process_itself_listens() -> None:
    code = "import socket, time; one = socket.create_server(('127.0.0.1', 0)); print(one.getsockname()[1], flush=True)"
    command = [sys.executable, "-c", f"{code}; time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert listens(process.pid, port)
        assert not listens(process.pid, port + 1)
        assert not listens(os.getpid(), port)
        process.kill()
    assert not listens(process.pid, port)


@pytest.fixture(scope="module")
def interface(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUi]:
    """A running ``make ui`` without any data."""
    with without_data(tmp_path_factory.mktemp("guarded")) as running:
        yield running


def state(running: RunningUi) -> Any:
    """What others may not change: deployments, flows, runs, and MLflow's experiments."""
    fields = ("name", "flow_id", "pull_steps", "entrypoint", "path", "parameters")
    deployments = [[one[name] for name in fields] for one in running.ask("/deployments/filter", {})]
    others = [[one["id"] for one in running.ask(f"/{kind}/filter", {})] for kind in ("flows", "flow_runs")]
    return sorted(deployments, key=str), sorted(others, key=str), experiments(running)


def experiments(running: RunningUi) -> list[str]:
    owner = Asker({"Authorization": running.basic})
    found = owner.ask("GET", f"{running.mlflow}/api/2.0/mlflow/experiments/search?max_results=50")
    return [one["name"] for one in found["experiments"]]


@pytest.mark.system
@pytest.mark.timeout(600)
def test_another_user_reads_and_writes_nothing(interface: RunningUi) -> None:
    before, study = state(interface), interface.deployment("study")
    assert study["pull_steps"] in (None, [])
    found = as_nobody(attack_prefect, interface.prefect, study["id"], study["flow_id"], {})
    assert found.answered == {}
    assert len(found.refused) == 12, "each address that was asked"
    assert set(found.refused.values()) == {401, 403}
    with_token = {"Prefect-Csrf-Client": "guessed", "Prefect-Csrf-Token": "guessed", "Authorization": "Basic Og=="}
    found = as_nobody(attack_prefect, interface.prefect, study["id"], study["flow_id"], with_token)
    assert (found.answered, set(found.refused.values())) == ({}, {401, 403})
    found = as_nobody(attack_mlflow, interface.mlflow, {})
    assert found.answered == {}
    assert set(found.refused.values()) == {401}
    assert state(interface) == before


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_page_of_another_server_writes_nothing_even_with_the_password(interface: RunningUi) -> None:
    """A browser adds the password that it was told to whatever a page asks."""
    before, study = state(interface), interface.deployment("study")
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": interface.mlflow.replace("127.0.0.1", "localhost")},
        {"Host": "evil.example:4200"},
    ):
        told = {"Authorization": interface.basic, **headers}
        found = attack_prefect(interface.prefect, study["id"], study["flow_id"], told)
        assert (found.answered, set(found.refused.values())) == ({}, {403}), headers
        if "localhost" not in headers.get("Origin", ""):
            found = attack_mlflow(interface.mlflow, told)
            assert (found.answered, set(found.refused.values())) == ({}, {403}), headers
    without_token = Asker({"Authorization": interface.basic})
    without_token.ask("POST", f"{interface.prefect}/api/flows/", {"name": "of nobody"})
    assert without_token.refused == {"POST /api/flows/": 403}
    assert state(interface) == before


@pytest.mark.system
@pytest.mark.timeout(600)
def test_the_password_is_where_its_owner_alone_reads_it(interface: RunningUi) -> None:
    interface.note()
    secret = interface.password.partition(":")[2]
    running = [*interface.seen.values(), psutil.Process(interface.process.pid)]
    assert len(running) >= 4
    assert not [one for one in running if secret in " ".join(one.cmdline())]
    assert mode(interface.password_file) == 0o600
    assert as_nobody(read_secrets, [one.pid for one in running], str(interface.password_file)) == []
    assert secret not in interface.log.read_text(), "output that is no terminal may be kept"
    assert "data/ui.env" in interface.log.read_text()
    assert [path for path in interface.password_file.parent.rglob("*") if path.is_file() and holds(path, secret)] == [
        interface.password_file
    ], "neither in Prefect's database nor in MLflow's"


def holds(path: Path, secret: str) -> bool:
    return secret.encode() in path.read_bytes()


@pytest.mark.system
@pytest.mark.timeout(600)
def test_prefects_commands_ask_with_what_the_file_sets(interface: RunningUi) -> None:
    command = '. data/ui.env && "$0" -m prefect deployment schedule ls study/study'
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    told = {"env": {**plain, "PREFECT_HOME": str(Path("data/prefect").resolve())}, "capture_output": True, "text": True}
    ended = subprocess.run(["sh", "-c", command, sys.executable], check=False, **told)  # type: ignore[call-overload]
    assert ended.returncode == 0, ended.stdout + ended.stderr
    refused = subprocess.run(
        ["sh", "-c", command.replace("&&", "&& unset PREFECT_API_AUTH_STRING &&"), sys.executable],
        check=False,
        **told,  # type: ignore[call-overload]
    )
    assert refused.returncode != 0
    assert "401" in refused.stdout + refused.stderr


#: Prefect's own server, which some of these start first, has 20 s otherwise: too few on a busy machine.
PATIENT = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300"}
FLOW = """
import sys
from prefect import get_client
from prefect.server.api.server import SubprocessASGIServer
from flows.common.command import begin_flow, run_flow
from flows.server import flow

@flow(log_prints=True)
def small():
    begin_flow()
    server = SubprocessASGIServer()
    sys.stderr.write(f"{server.address} {server.server_process.pid}\\n")
    sys.stdin.readline()
    print("a line of the run's log")

"""
#: How it is started, and how often it runs: as a command; and in Python, where another server may run already.
DOORS = {
    "command": ("run_flow(small)", 1),
    "in Python, and again with other options": ("small(); small.with_options(name='small')()", 2),
    "after other work": ("with get_client(sync_client=True) as client: client.hello()\nsmall()", 1),
    "within its context": ("from flows.server import own_server\nwith own_server(): small()", 1),
}


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize("door", DOORS)
def test_a_flows_temporary_server_answers_the_flow_alone(door: str, tmp_path: Path) -> None:
    start, times = DOORS[door]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = {**plain, "PYTHONPATH": path, "PREFECT_HOME": str(tmp_path / "home"), **PATIENT}
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    flow: subprocess.Popen[str] = subprocess.Popen([sys.executable, "-c", FLOW + start], env=environment, **options)  # type: ignore[call-overload]
    assert flow.stderr is not None
    said = []
    while not (found := re.match(r"(http://127.0.0.1:\d+) (\d+)$", line := flow.stderr.readline())):
        assert flow.poll() is None, "".join(said)
        said.append(line)
    server, process = found[1], psutil.Process(int(found[2]))
    secret = process.environ()["PREFECT_SERVER_API_AUTH_STRING"].partition(":")[2]
    assert secret not in " ".join(process.cmdline())
    any_id = "00000000-0000-0000-0000-000000000000"
    seen = as_nobody(attack_prefect, server, any_id, any_id, {})
    assert seen.answered == {}
    assert set(seen.refused.values()) == {401, 403}
    seen = attack_prefect(server, any_id, any_id, {"Host": "evil.example"})
    assert (seen.answered, set(seen.refused.values())) == ({}, {403})
    output, errors = flow.communicate("go on\n" * times)
    assert flow.returncode == 0, output + errors
    assert secret not in output + errors
    with closing(sqlite3.connect(tmp_path / "home" / "prefect.db")) as database:
        runs = database.execute("SELECT name, state_type FROM flow_run").fetchall()
        logs = [text for (text,) in database.execute("SELECT message FROM log")]
        flows = [name for (name,) in database.execute("SELECT name FROM flow")]
    assert [kind for _, kind in runs] == ["COMPLETED"] * times
    assert "a line of the run's log" in logs, "what a flow says reaches its own server"
    assert flows == ["small"]


WITHIN = """
from prefect import flow as plain
from flows.server import flow

@flow(name="inner")
def inner():
    return 1

@plain
def outer():
    return inner()

outer()
"""


@pytest.mark.system
@pytest.mark.timeout(600)
def test_within_a_flow_on_an_open_server_nothing_runs(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = {**plain, "PYTHONPATH": path, "PREFECT_HOME": str(tmp_path / "home"), **PATIENT}
    done = subprocess.run([sys.executable, "-c", WITHIN], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert (
        "obeys every user of this machine. Fix: put `with flows.server.own_server():` around that flow" in done.stderr
    )


def test_every_flow_of_the_pipeline_runs_on_its_own_server() -> None:
    found = []
    for file in (ROOT / "flows").glob("*.py"):
        module = importlib.import_module(f"flows.{file.stem}")
        found += [one for one in vars(module).values() if isinstance(one, Flow)]
    assert len({one.fn for one in found}) >= 12
    assert not [one.fn for one in found if not isinstance(one, OwnFlow)]


CLUSTER = """
import sys
from flows.common import runners
if __name__ == "__main__":
    with runners._connect("dask", 1) as runner:
        runner.client
        print("ready", flush=True)
        sys.stdin.readline()
"""
PAGES = ("/", "/status", "/health", "/metrics", "/json/counts.json", "/info/main/workers.html", "/proxy/1/localhost/")


@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_dask_cluster_tells_other_users_nothing(tmp_path: Path) -> None:
    """Its figures would tell how many candidates a search has, which is secret."""
    pytest.importorskip("prefect_dask")
    (tmp_path / "cluster.py").write_text(CLUSTER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(tmp_path / "cluster.py")]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flow:
        assert flow.stdin is not None
        assert flow.stdout is not None
        assert flow.stdout.readline() == "ready\n"
        listed = [psutil.Process(flow.pid), *psutil.Process(flow.pid).children(recursive=True)]
        ports = [
            one.laddr for part in listed for one in part.net_connections("tcp") if one.status == psutil.CONN_LISTEN
        ]
        asked = {page: {answer(address.port, page) for address in ports} for page in PAGES}
        flow.stdin.write("end\n")
        flow.stdin.close()
        assert flow.wait() == 0
    assert len(ports) >= 4, "scheduler and worker, each with its own port and that of its pages"
    assert {address.ip for address in ports} == {"127.0.0.1"}
    assert all(answers <= {404, None} and 404 in answers for answers in asked.values()), asked


def answer(port: int, page: str) -> int | None:
    """The status with which a page is answered; None where nobody speaks HTTP."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{page}", timeout=5) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
