"""Where everything lies, relative to the directory that holds params.yaml."""

from __future__ import annotations

from pathlib import Path

DATA = Path("data")
CHECKED = DATA / "checked.json"
RAW = DATA / "raw"
RAW_MANIFEST = RAW / "source.json"
NARRATIVES = DATA / "narratives" / "narratives.parquet"
SPLITS = DATA / "splits"
CANARIES = DATA / "canaries"
TRAIN = CANARIES / "train.parquet"
EVAL = SPLITS / "eval.parquet"
SECRETS = DATA / "secrets" / "canaries.json"
CRAFTED = DATA / "secrets" / "crafted"
MANIFEST = CANARIES / "manifest.json"
PUBLIC_MODEL = DATA / "models" / "public"
PUBLIC_VALIDATION = DATA / "models" / "public_validation.parquet"
RUNS = DATA / "runs"
EXPERIMENT = RUNS / "experiment.json"
AUDITS = DATA / "audits"
REPORT = DATA / "report"
PREDICTION = DATA / "prediction"
ANSWERS = PREDICTION / "results.json"
#: Not DVC's: an ensemble holds a budget, and a restored ledger would be a fresh one.
ENSEMBLES = DATA / "ensembles"
#: Not DVC's: token ids of the records, made again whenever they are missed; safe to remove between runs.
TOKENS = DATA / "tokens"
POLICY = DATA / "policy"
#: The last line of the last command that failed; and the tracebacks of failures that nobody foresaw.
ERROR = DATA / "error.txt"
FAILURES = DATA / "failures.log"
