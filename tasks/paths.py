"""Where everything lies, relative to the directory that holds params.yaml."""

from __future__ import annotations

from pathlib import Path

DATA = Path("data")
CHECKED = DATA / "checked.json"
#: Whether the pipeline's own public model is trained: whether any model of the experiment is that one.
NEEDED = DATA / "needed.json"
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
#: Public narratives that the public model was not trained on; what policies are trained and judged on.
PUBLIC_NARRATIVES = DATA / "models" / "public_validation.parquet"
#: Written in place of the model where no model of the experiment is that one.
SKIPPED = DATA / "models" / "skipped.json"
#: The public records of the experiment: the user's own (``data.public``), else synthetic narratives.
PUBLIC_VALIDATION = DATA / "validation" / "public.parquet"
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
#: Number of the experiment whose page MLflow shows.
MLFLOW_PAGE = DATA / "mlflow_page.txt"
#: The tracebacks of failures that nobody foresaw.
FAILURES = DATA / "failures.log"
