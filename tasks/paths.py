"""Where everything lies, relative to the directory that holds params.yaml."""

from __future__ import annotations

from pathlib import Path

from dptune.core.files import read_json

DATA = Path("data")
CHECKED = DATA / "checked.json"
#: Whether the pipeline's own public model is trained: whether any model of the experiment is that one.
NEEDED = DATA / "needed.json"
#: Fingerprints of the experiment's base models; of a package or a GGUF file, nothing else lies in the checkout.
MODELS = DATA / "models.json"
RAW = DATA / "raw"
RAW_MANIFEST = RAW / "source.json"
NARRATIVES = DATA / "narratives" / "narratives.parquet"
#: Of benchmarks with parts: the records that train, and the part that is held out.
RAW_EVAL = RAW / "eval"
NARRATIVES_EVAL = DATA / "narratives" / "eval.parquet"
SPLITS = DATA / "splits"
CANARIES = DATA / "canaries"
TRAIN = CANARIES / "train.parquet"
EVAL = SPLITS / "eval.parquet"
#: Not DVC's: every file of planted secrets stays, under a name that ``planted_secrets`` finds.
SECRETS = DATA / "secrets"
MANIFEST = CANARIES / "manifest.json"
#: Texts of the public model that were chosen by their gradients, which audit canaries of that kind say. Public.
MAXIMISERS = CANARIES / "maximisers.json"
PUBLIC_MODEL = DATA / "models" / "public"
#: Public narratives that the public model was not trained on; what policies are trained and judged on.
PUBLIC_NARRATIVES = DATA / "models" / "public_validation.parquet"
#: Texts that the public model wrote at a high temperature, which audit canaries say; empty if it is not trained.
PUBLIC_SAMPLES = DATA / "models" / "samples.json"
#: Settings and texts that the public model was made of, and digests of what was made: a rerun with the same keeps it.
PUBLIC_MADE_OF = DATA / "models" / "made_of.json"
#: Written in place of the model where no model of the experiment is that one.
SKIPPED = DATA / "models" / "skipped.json"
#: The public records of the experiment: the user's own (``data.public``), else synthetic narratives.
PUBLIC_VALIDATION = DATA / "validation" / "public.parquet"
#: Not DVC's: ledgers lie here, and a restored one would lack what was spent since.
RUNS = DATA / "runs"
#: The cells of the experiment that ran last, with digests of their results; DVC's stages compare this.
EXPERIMENT = DATA / "experiment.json"
#: Not DVC's: audits of all cells so far.
AUDITS = DATA / "audits"
#: The cells that were audited last, with digests of their audits; DVC's stages compare this.
AUDITED = DATA / "audited.json"
REPORT = DATA / "report"
#: The pages of experiments that ran in a copy of the checkout, a folder each.
REPORTS = DATA / "reports"
PREDICTION = DATA / "prediction"
ANSWERS = PREDICTION / "results.json"
#: Not DVC's: an ensemble holds a budget, and a restored ledger would be a fresh one.
ENSEMBLES = DATA / "ensembles"
#: Not DVC's: token ids of the records, made again whenever they are missed; safe to remove between runs.
TOKENS = DATA / "tokens"
POLICY = DATA / "policy"
#: Not DVC's: texts that finished cells wrote when they were asked to, with cards and pages.
SYNTHETIC = DATA / "synthetic"
#: Not DVC's: adapters of finished cells with card and ledger, a folder each, that the report says how to write.
DELIVERED = DATA / "delivered"
#: Not DVC's: its lock would tell how many candidates a search had. Working folders lie here too, mode 0700.
SEARCH = DATA / "search"
#: The register of what searches, and cells of studies, of these records have cost, the owner's.
SPENT = DATA / "spent.jsonl"
#: Number of the experiment whose page MLflow shows.
MLFLOW_PAGE = DATA / "mlflow_page.txt"
#: The tracebacks of failures that nobody foresaw.
FAILURES = DATA / "failures.log"


def planted_secrets() -> Path:
    """The file of the secrets that data/canaries holds.

    Its name is a digest of its content, so that earlier secrets stay beside it: DVC may restore their data/canaries.
    """
    return SECRETS / f"{read_json(MANIFEST)['secrets_sha256'][:16]}.json"
