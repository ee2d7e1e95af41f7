"""Prefect flows: which tasks run, in which order, on which machine, and how often they are tried again."""

import os
from pathlib import Path

import tasks  # noqa: F401 (it says where dptune is not installed)

# Prefect reads this when it is first imported. Its default of 20 s for a temporary server is too short if it is busy.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
# Progress of work inside a flow's own process belongs to the run's logs too.
os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "dptune")
os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
# SQLAlchemy takes % and ? of a path for signs of an address. Under make the database lies below this directory, and the
# path from here has neither.
if set("%?") & set(os.environ.get("PREFECT_HOME", "")):
    database = Path(os.path.relpath(os.environ["PREFECT_HOME"])) / "prefect.db"
    os.environ.setdefault("PREFECT_API_DATABASE_CONNECTION_URL", f"sqlite+aiosqlite:///{database}")
# Threads that wait sleep, as make sets too: where two cells share two cores, spinning ones take five times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No telemetry leaves this machine, because it would tell of a private pipeline. make sets the same.
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# MLflow logs every table that it creates, at the level INFO.
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
