"""Prefect flows: what runs when, where and how often."""

import os

import tasks  # noqa: F401 (it says where dptune is not installed)

# Prefect reads this when it is first imported. Its default of 20 s for a temporary server is too short if it is busy.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
# Progress of work inside a flow's own process belongs to the run's logs too.
os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "dptune")
os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
# As make does: nothing about a private pipeline is sent to anybody, however a flow is started.
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
