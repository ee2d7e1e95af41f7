"""Where cells run: the parameter, what it needs, and what a worker's machine does by itself. No cluster is started."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tiny_pipeline import ROOT, write_params

from dptune.core.errors import ConfigError, DptuneError
from dptune.core.files import locked, private_directory
from flows.common import runners
from flows.common.command import CellError
from flows.common.runners import SharedFolder, free_place, open_runner, shared_folder
from flows.experiment import experiment, fine_tune
from tasks.paths import SEARCH
from tasks.search import run as run_module
from tasks.search.request import digest_of
from tasks.search.run import main as run_main
from tasks.settings.experiment import Experiment
from tasks.settings.params import load_settings


def settings(**changes: object) -> Experiment:
    write_params({"experiment": changes})
    return load_settings().experiment


# ---- the parameter


def test_the_repository_runs_on_threads() -> None:
    assert load_settings(ROOT / "params.yaml").experiment.runner == "threads"


@pytest.mark.parametrize(
    "runner",
    ["threads", "dask", "ray", "tcp://node-1:8786", "tls://10.0.0.1:8786", "tcp://[::1]:1", "ray://head:10001"],
)
def test_a_runner_is_a_word_or_an_address(runner: str, pipeline: Path) -> None:
    assert settings(runner=runner).runner == runner


@pytest.mark.parametrize("runner", ["thread", "dask://h:1", "tcp://host", "ray://", "host:8786", "http://h:1", ""])
def test_any_other_runner_is_an_error_that_says_what_there_is(runner: str, pipeline: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"experiment\.runner: .* is not a runner: use threads, dask, ray, .*tcp://host:8786"
    ):
        settings(runner=runner)


def test_it_is_a_parameter_of_the_flow(server: str, pipeline: Path) -> None:
    write_params()
    with pytest.raises(ConfigError, match=r"experiment\.runner"):
        experiment(runner="mesos")
    with pytest.raises(ConfigError, match=r"experiment\.runner"):
        experiment(overrides={"experiment": {"runner": "mesos"}})


def test_threads_are_prefects_own_runner(pipeline: Path) -> None:
    from prefect.task_runners import ThreadPoolTaskRunner

    with open_runner(settings(), 1) as runner:
        assert type(runner) is ThreadPoolTaskRunner


@pytest.mark.parametrize(("runner", "module"), [("dask", "prefect_dask"), ("ray", "prefect_ray")])
def test_a_missing_extra_says_how_to_install_it(
    runner: str, module: str, server: str, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    fix = rf"needs the extra {runner} .*\. Fix: pip install 'dptune\[{runner}\]'\."
    with pytest.raises(ConfigError, match=fix), open_runner(settings(runner=runner), 1):
        pass


@pytest.mark.parametrize("runner", ["tcp://node-1:8786", "ray://head:10001"])
def test_a_running_cluster_needs_a_server_that_its_workers_reach(
    runner: str, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with (
        temporary_settings({PREFECT_API_URL: None}),
        pytest.raises(ConfigError, match=r"prefect server start.*PREFECT_API_URL"),
        open_runner(settings(runner=runner), 1),
    ):
        pass


def test_workers_are_told_the_flows_server(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.task_runners import ThreadPoolTaskRunner

    monkeypatch.setattr(runners, "_dask", lambda *_: ThreadPoolTaskRunner())
    url = "http://127.0.0.1:4200/api"
    with temporary_settings({PREFECT_API_URL: url}), open_runner(settings(runner="tcp://node-1:8786"), 1):
        assert PREFECT_API_URL.value() == url


@pytest.mark.parametrize("runner", ["tcp://node-1:8786", "ray://head:10001"])
def test_a_cluster_that_does_not_answer_is_named(
    runner: str, server: str, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> None:
        raise OSError("timed out")

    monkeypatch.setattr(runners, "_dask", silent)
    monkeypatch.setattr(runners, "_ray", silent)
    with (
        pytest.raises(ConfigError, match=rf"no answer from {runner} \(timed out\)"),
        open_runner(settings(runner=runner), 1),
    ):
        pass


@pytest.mark.parametrize(
    ("resources", "devices", "share"),
    [({"CPU": 4.0, "GPU": 2.0}, "auto", {"num_gpus": 0.3333}), ({"CPU": 4.0}, "auto", {}), ({"GPU": 1.0}, ["cpu"], {})],
)
def test_on_ray_a_cell_asks_for_its_share_of_a_gpu(
    resources: dict[str, float],
    devices: object,
    share: dict[str, float],
    server: str,
    pipeline: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from prefect.task_runners import ThreadPoolTaskRunner

    context = pytest.importorskip("prefect_ray.context")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cluster_resources=lambda: resources))
    monkeypatch.setattr(runners, "_ray", lambda *_: ThreadPoolTaskRunner())
    with open_runner(settings(runner="ray", devices=devices, cells_per_device=3), 1):
        assert context.RemoteOptionsContext.get().current_remote_options == share


def test_a_temporary_ray_cluster_joins_no_other(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prefect_ray")
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")
    runner: Any = runners._ray("ray", 3)
    assert runner.init_kwargs["address"] == "local"
    assert runner.init_kwargs["num_cpus"] == 3


# ---- on a worker


def test_an_error_of_a_cell_reaches_the_flow_whole() -> None:
    error = pickle.loads(pickle.dumps(CellError("small.static", 2, "last lines")))
    assert str(error) == "cell small.static ended with status 2:\nlast lines"
    assert error.hopeless
    assert not CellError("x", 1, "").hopeless


def test_a_worker_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    from flows.experiment import DispatchContext
    from tasks.experiment.cell_list import CellGroup
    from tasks.experiment.cells import Cell

    context = DispatchContext(
        Experiment.model_construct(), "run", SharedFolder(tmp_path / "nowhere"), {}, groups=1, terminal=False
    )
    with pytest.raises(DptuneError, match=r"experiment\.runner: .* sees no .*nowhere.*same path"):
        fine_tune.fn(CellGroup((Cell.model_construct(),)), context)


def test_a_worker_that_sees_a_copy_of_the_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would charge another register, and draw another plan of a search."""
    flows, copy = tmp_path / "flow", tmp_path / "copy"
    for one in (flows, copy):
        (one / "data").mkdir(parents=True)
    monkeypatch.chdir(flows)
    with shared_folder("tcp://node-1:8786") as place:
        place.check()
        assert (flows / "data" / place.mark).stat().st_mode & 0o077 == 0
        with pytest.raises(DptuneError, match="or another one than the flow's"):
            SharedFolder(copy, place.mark).check()
    assert list((flows / "data").iterdir()) == []
    for runner in ("threads", "dask", "ray"):  # of this machine
        with shared_folder(runner) as place:
            assert place == SharedFolder(flows)


def test_a_worker_that_begins_late_does_not_begin_another_search(pipeline: Path) -> None:
    """The file may have been edited since, or its worker been lost in between."""
    write_params()
    expected = digest_of(load_settings())
    write_params({"search": {"name": "other"}})
    with pytest.raises(ConfigError, match=r"params\.yaml: has changed since this search was asked for"):
        run_main(device="cpu", params=Path("params.yaml"), overrides="{}", expect=expected, wait=True)
    assert not SEARCH.exists()


def test_a_worker_waits_for_one_that_ends_and_says_so(
    pipeline: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_params()
    began: list[float] = []
    monkeypatch.setattr(run_module, "search_records", lambda *_: began.append(time.monotonic()))
    given = {"device": "cpu", "params": Path("params.yaml"), "overrides": "{}", "expect": digest_of(load_settings())}
    lock = private_directory(SEARCH) / f".{load_settings().search.name}.worker.lock"
    waiting = threading.Thread(target=lambda: run_main(**given, wait=True))
    with locked(lock):
        waiting.start()
        while "another process works on this search: waiting until it ends" not in caplog.text:
            assert waiting.is_alive()
        ended = time.monotonic()
    waiting.join()
    assert began[0] >= ended


def test_places_fill_device_by_device_and_are_free_again(tmp_path: Path) -> None:
    with free_place(["cpu", "cuda:0"], 2, tmp_path) as first, free_place(["cpu", "cuda:0"], 2, tmp_path) as second:
        with free_place(["cpu", "cuda:0"], 2, tmp_path) as third, free_place(["cpu", "cuda:0"], 2, tmp_path) as fourth:
            assert [first, second, third, fourth] == ["cpu", "cuda:0", "cpu", "cuda:0"]
            waiting = threading.Thread(target=lambda: taken.append(place_once(tmp_path)))
            taken: list[str] = []
            waiting.start()
            time.sleep(0.2)
            assert taken == []
        waiting.join()
        assert taken == ["cpu"]


def test_a_flow_that_waits_for_others_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = [f"{gethostname()}-cpu-0-{place}" for place in range(2)]
    waiting = threading.Thread(target=lambda: taken.append(place_once(tmp_path, ["cpu"])))
    taken: list[str] = []
    with ExitStack() as others:
        for name in names:
            others.enter_context(locked(tmp_path / name))
        waiting.start()
        while "other flows on this machine hold all 2 places" not in caplog.text:
            assert waiting.is_alive()
    waiting.join()
    assert taken == ["cpu"]


def place_once(folder: Path, devices: Sequence[str] = ("cpu", "cuda:0")) -> str:
    with free_place(devices, 2, folder) as device:
        return device


def test_workers_that_see_one_gpu_each_do_not_share_its_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    with free_place(["cuda:1"], 1, tmp_path):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
        with free_place(["cuda:0"], 1, tmp_path), free_place(["cpu"], 1, tmp_path):
            names = sorted(path.name.removeprefix(f"{gethostname()}-") for path in tmp_path.iterdir())
    assert names == ["cpu-0-0", "cuda-3-0", "cuda-4-0"]


PARENT = """
import subprocess, sys, time
from flows.common.child import child
process = subprocess.Popen(child("{module}", "7"))
print(process.pid, flush=True)
sys.exit(process.wait())
"""


def parent(tmp_path: Path, body: str, before: str = "") -> subprocess.Popen[str]:
    (tmp_path / "work_of_a_test.py").write_text(body)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", before + PARENT.format(module="work_of_a_test")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


def test_a_child_is_the_module_with_its_arguments_and_status(tmp_path: Path) -> None:
    process = parent(tmp_path, "import sys\nprint(__name__, sys.argv[1:], flush=True)\nsys.exit(int(sys.argv[1]))\n")
    output = process.communicate()[0]
    assert "__main__ ['7']" in output
    assert process.returncode == 7


BEGUN = "import subprocess, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_and_what_it_started_end_with_a_parent_that_was_killed(tmp_path: Path, number: signal.Signals) -> None:
    process = parent(tmp_path, BEGUN)
    assert process.stdout is not None
    started = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]  # the child, and its own
    process.send_signal(number)
    process.wait()
    assert psutil.wait_procs(started, timeout=240)[1] == []


RUN = f"""
import os
import re
from flows.common.command import end_when_cancelled
end_when_cancelled()
assert "DPTUNE_SERVING" not in os.environ, "a flow that this one starts has another parent"
print(os.getpid(), flush=True)
{BEGUN}
"""
SERVING = """
import os, subprocess, sys
environment = {**os.environ, "DPTUNE_SERVING": str(os.getpid())}
sys.exit(subprocess.call([sys.executable, "run.py"], env=environment))
"""


def test_a_flow_run_ends_with_the_killed_process_that_served_its_deployment(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(RUN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", SERVING]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    assert serving.stdout is not None
    started = [psutil.Process(int(serving.stdout.readline())) for _ in range(2)]  # the run's process, and its own
    serving.kill()
    serving.wait()
    assert psutil.wait_procs(started, timeout=240)[1] == []


HOLDING = """
from pathlib import Path
from flows.common.runners import free_place
held = free_place(["cpu"], 1, Path({places!r}))
held.__enter__()
"""
STEPPING = """
import os, time
from dptune.core.interrupts import stop_request
with stop_request() as asked:
    print("begun", flush=True)
    while not (asked() and os.path.exists(os.environ["GO"])):
        time.sleep(0.1)
    open(os.environ["DONE"], "w").write("the step and its checkpoint")
"""


def test_of_a_killed_flow_the_place_is_free_at_once_and_the_cell_ends_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, done = tmp_path / "places", tmp_path / "done"
    monkeypatch.setenv("DONE", str(done))
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    process = parent(tmp_path, STEPPING, HOLDING.format(places=str(places)))
    assert process.stdout is not None
    lines = sorted([process.stdout.readline().strip(), process.stdout.readline().strip()])
    child = psutil.Process(int(lines[0]))
    process.send_signal(signal.SIGKILL)
    process.wait()
    with free_place(["cpu"], 1, places):
        assert child.is_running(), "it is under way still, and holds no place"
        (tmp_path / "go").touch()
    assert psutil.wait_procs([child], timeout=240)[1] == []
    assert done.read_text() == "the step and its checkpoint"


SERVED = """
import os, sys, time
from pathlib import Path
from prefect.server.api import server as module
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_AUTH_STRING
from dptune.core.errors import DptuneError
from dptune.core.files import locked, private_directory
from flows.server import listens
from flows.server import SERVER_LOCK, end_server_with_me, own_server
FAKE = '''
import http.server, os, sys
assert os.environ["PREFECT_SERVER_API_AUTH_STRING"] == os.environ["EXPECTED"], "the flow's own"
assert "flows.server:prefect_app" in sys.argv
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.BaseHTTPRequestHandler).serve_forever()
'''
def start(self):
    try:
        with locked(Path(os.environ["PREFECT_HOME"], SERVER_LOCK)):
            print("another flow may start a server now", flush=True)
    except DptuneError:
        pass
    self.port = self.find_available_port()
    words = [str(self.port), "--app-dir", "/", "prefect.server.api.server:create_app"]  # as Prefect's own method
    environment = {**os.environ, "EXPECTED": PREFECT_API_AUTH_STRING.value()}
    self.server_process = module.subprocess.Popen([sys.executable, "-c", FAKE, *words], env=environment)
    while not listens(self.server_process.pid, self.port):
        assert self.server_process.poll() is None
        time.sleep(0.05)
    self.port += int(os.environ.get("TAKEN", 0))
SubprocessASGIServer.start = start
with own_server():
    end_server_with_me()
    print(SubprocessASGIServer().server_process.pid, flush=True)
    time.sleep(0 if "TAKEN" in os.environ else 120)
"""


def test_a_temporary_server_hears_no_signal_to_the_group_and_ends_with_a_flow_that_was_killed(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PREFECT_HOME": str(tmp_path)}
    environment.pop("PREFECT_API_URL", None)
    flow = subprocess.Popen([sys.executable, "-c", SERVED], stdout=subprocess.PIPE, text=True, env=environment)
    assert flow.stdout is not None
    server = psutil.Process(int(flow.stdout.readline()))
    assert os.getpgid(server.pid) != os.getpgid(flow.pid), "Ctrl-C and SIGTERM would end it before it is told"
    watcher = [process for process in psutil.Process(flow.pid).children() if process.pid != server.pid]
    assert len(watcher) == 1, "one, however often it is asked for"
    flow.kill()
    flow.wait()
    assert psutil.wait_procs([server, *watcher], timeout=240)[1] == []


def test_a_flow_asks_no_server_that_took_its_own_ones_port(tmp_path: Path) -> None:
    """Its answers would be believed, and its port was on a command line that everybody reads."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PREFECT_HOME": str(tmp_path), "TAKEN": "1"}
    environment.pop("PREFECT_API_URL", None)
    flow = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, env=environment, check=False)
    assert flow.returncode == 1
    assert re.search(r"DptuneError: another process took port \d+ of Prefect's temporary server", flow.stderr)
