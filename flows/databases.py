"""Makes the tables of Prefect's and MLflow's new databases, which takes half a minute on a fresh machine.

python -m flows.databases        # `make repro` runs it beside the first stages of the pipeline, which use one core
"""

from __future__ import annotations

import os

from dptune.core.files import locked, private_directory
from flows.server import own_server
from tasks.mlflow.tracking import MLFLOW_LOCK, client
from tasks.paths import DATA


def main() -> None:
    """Make both, but MLflow's not where another one is named.

    A flow that begins meanwhile waits for each: its lock is held until it is whole.
    """
    os.umask(0o077)  # both hold figures of private runs
    with own_server():
        pass
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        with locked(private_directory(DATA) / MLFLOW_LOCK, wait=True):
            client().search_experiments(max_results=1)


if __name__ == "__main__":
    main()
