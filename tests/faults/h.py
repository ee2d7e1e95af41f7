"""Small tools of run.sh: they look, they damage, they wait; the product does the rest."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil

sys.path.insert(0, os.getcwd())  # the checkout that is worked in


def run_folder(where: str = ".", label: str = "") -> Path:
    found = sorted(path for path in Path(where, "data/runs").glob("small*") if label in path.name)
    return found[0]


def releases(folder: Path) -> int:
    ledger = folder / "ledger.jsonl"
    return ledger.read_bytes().count(b'"kind":"release"') if ledger.exists() else 0


def wait_releases(count: str, label: str = "", seconds: str = "300") -> None:
    """Wait until a run's ledger holds so many releases."""
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        with contextlib.suppress(IndexError, OSError):
            if releases(run_folder(label=label)) >= int(count):
                return
        time.sleep(0.005)
    sys.exit(f"no run had {count} releases within {seconds} s")


def lost(label: str = "") -> None:
    """Print releases, steps in the weights, planned releases, and whether the ledger is complete."""
    folder = run_folder(label=label)
    points = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    last = points[-1]
    complete = '"kind":"end"' in (folder / "ledger.jsonl").read_text().splitlines()[-1]
    paid, made = releases(folder), last["step"]
    print(f"charged={paid} steps={made} planned={result['planned_releases']} lost={paid - made} complete={complete}")


def charged(label: str = "") -> None:
    print(releases(run_folder(label=label)))


def lock_when(count: str, pid: str) -> None:
    """Hold an exclusive lock on MLflow's database from release ``count`` until process ``pid`` ends."""
    wait_releases(count)
    base = sqlite3.connect("data/mlflow.db", timeout=60, isolation_level=None)
    base.execute("BEGIN EXCLUSIVE")
    print(f"locked at release {releases(run_folder())}", flush=True)
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)
    base.execute("ROLLBACK")
    print("unlocked")


def mlflow(what: str, metric: str = "noise_multiplier") -> None:
    """Look into MLflow's database with MLflow's own client, as the pipeline addresses it."""
    from tasks import tracking

    client = tracking.client()
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            child = "mlflow.parentRunId" in run.data.tags
            if what == "status":
                print("child" if child else "parent", run.info.run_name, run.info.status)
            elif what == "steps" and child:
                print(len({one.step for one in client.get_metric_history(run.info.run_id, metric)}))


def fill_when(count: str, mount: str, left: str) -> None:
    """Fill a small file system from release ``count`` on, all but ``left`` bytes."""
    wait_releases(count)
    free = shutil.disk_usage(mount).free
    with open(Path(mount) / "filler", "wb") as file, contextlib.suppress(OSError):
        file.write(b"\0" * max(0, free - int(left)))
        file.flush()
    print(f"full at release {releases(run_folder())}: {shutil.disk_usage(mount).free} bytes free", flush=True)


def watch(pids: str, pattern: str) -> None:
    """Print the largest number of processes of ``pattern`` at any time, until all ``pids`` (comma) have ended."""
    ids, most, seen = [int(pid) for pid in pids.split(",")], 0, 0
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in ids):
        now = 0
        for pid in ids:
            with contextlib.suppress(psutil.Error):
                now += sum(
                    1
                    for child in psutil.Process(pid).children()  # a cell's own forks bear its name for a moment
                    if pattern in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE
                )
        most, seen = max(most, now), seen + 1
        time.sleep(0.02)
    print(f"most={most} looks={seen}")


def servers() -> None:
    """Number of Prefect servers and cells that work in this directory and whose flow has gone."""
    here, count = os.getcwd(), 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if process.cwd() == here and ("prefect.server" in line or "uvicorn" in line or "finetune" in line):
                count += 1
    print(count)


def wait_no_server(seconds: str) -> None:
    """Seconds until no server and no cell is left in this directory."""
    from io import StringIO

    start = time.monotonic()
    while time.monotonic() - start < float(seconds):
        out = StringIO()
        with contextlib.redirect_stdout(out):
            servers()
        if out.getvalue().strip() == "0":
            print(f"none left after {time.monotonic() - start:.1f} s")
            return
        time.sleep(0.5)
    sys.exit("still there")


def measured(*command: str) -> None:
    """Run a command, and print its largest resident memory in MB as the last line."""
    import resource

    status = subprocess.run(command, check=False).returncode
    print(f"peak_MB={resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024}")
    sys.exit(status)


def cut_at_line(path: str, lines: str) -> None:
    file = Path(path)
    file.chmod(0o600)
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[: -int(lines)]))


def make_zips(raw: str, out: str) -> None:
    """The synthetic table as a zip, cut off; and a bomb: zips within a zip, each of 1 GB of zeros or more."""
    table, ids = Path(raw, "diabetic_data.csv"), Path(raw, "IDs_mapping.csv")
    good = Path(out, "good.zip")
    with zipfile.ZipFile(good, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(table, "dataset_diabetes/diabetic_data.csv")
        archive.write(ids, "dataset_diabetes/IDs_mapping.csv")
    content = good.read_bytes()
    Path(out, "cut.zip").write_bytes(content[: len(content) * 2 // 3])
    inner = Path(out, "inner.zip")
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("diabetic_data.csv", "w") as file:
        for _ in range(1000):
            file.write(b"\0" * 1_000_000)
    with zipfile.ZipFile(Path(out, "bomb.zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(20):
            archive.write(inner, f"part{number}.zip")


def damage(kind: str, path: str) -> None:  # noqa: C901 (one branch a kind of damage)
    """Damage a checkpoint in one way."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    file = Path(path)
    whole = file.read_bytes()
    with safe_open(file, framework="pt") as opened:
        progress = json.loads(opened.metadata()["progress"])
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no dictionary)
    weight = next(key for key in sorted(tensors) if key.startswith("weight."))
    moment = next(key for key in sorted(tensors) if key.startswith("optimizer.exp_avg."))
    if kind == "step99":
        progress["step"] = 99
    elif kind == "nan":
        tensors[weight] = torch.full_like(tensors[weight], float("nan"))
    elif kind == "nomoment":
        del tensors[moment]
    elif kind == "shape":
        tensors[weight] = torch.zeros(3)
    elif kind == "otherrun":
        progress["run_id"] = "0" * 32
    elif kind == "future":
        progress["releases"] = progress["step"] = progress["releases"] + 500
    elif kind == "cut":
        file.write_bytes(whole[: len(whole) // 2])
        return
    elif kind == "empty":
        file.write_bytes(b"")
        return
    elif kind == "header":
        file.write_bytes(struct.pack("<Q", 2**60) + whole[8:])
        return
    elif kind == "pickle":
        torch.save(tensors, file)
        return
    save_file(tensors, file, metadata={"progress": json.dumps(progress)})


def distinct_ledger(path: str, count: str, noise: str = "") -> None:
    """A whole ledger of so many releases, each with another noise multiplier (or all with ``noise``)."""
    from dptune.privacy.ledger_file import GENESIS, encode, seal
    from dptune.privacy.release import Release
    from dptune.privacy.run_header import RunHeader

    header = RunHeader(
        mechanism="static", published_accountant="gdp_clt", accounting="certified", epsilon=None, delta=1e-5,
        unit="record", units=1000, data="faults",
    )  # fmt: skip
    line, chain = seal(encode({"kind": "run", **header.to_dict()}), GENESIS)
    lines = [line]
    for step in range(int(count)):
        z = float(noise) if noise else 1 + 0.1 * step / int(count)
        line, chain = seal(encode({"kind": "release", "step": step, **Release(0.01, z).to_dict()}), chain)
        lines.append(line)
    lines.append(seal(encode({"kind": "end", "releases": int(count)}), chain)[0])
    Path(path).write_bytes(b"".join(lines))


def interrupted(count: str, *command: str) -> None:
    """Run a command as a terminal does, send Ctrl-C to its whole group at release ``count``; print how it ended."""
    process = subprocess.Popen(
        command, start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    wait_releases(count)
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    status = process.wait()
    print(f"ended with {status} after {time.monotonic() - start:.1f} s", flush=True)


def prefect_states() -> None:
    """States of runs in the database of Prefect's temporary server."""
    base = sqlite3.connect(Path(os.environ["PREFECT_HOME"], "prefect.db"))
    for table in ("flow_run", "task_run"):
        for name, state in base.execute(f"select name, state_type from {table}"):
            print(table, state, name)


def cut_ledger(path: str, lines: str) -> None:
    file = Path(path)
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[: -int(lines)]))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        globals()[sys.argv[1]](*sys.argv[2:])
