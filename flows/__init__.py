"""Prefect flows: what runs when, where and how often."""

import os

# Prefect waits 20 s for its temporary server, which a busy machine exceeds; read when prefect is first imported.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
