"""``tune`` with canaries of an auditor: planted, kept, committed to, and priced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_tuning as tiny

from dptune import tune


def tuned(out: Path, **settings: Any) -> Any:
    return tune(tiny.checkpoint(), tiny.rows(), epsilon=8, out=out, **tiny.QUICK | {"audit_canaries": 16} | settings)


def test_smoke(tmp_path: Path) -> None:
    found = tuned(tmp_path / "run")
    print((tmp_path / "run" / "adapter" / "README.md").read_text())
    print(sorted(p.name for p in (tmp_path / "run").iterdir()))
    print((tmp_path / "run" / "ledger.jsonl").read_text()[:700])
    print((tmp_path / "run" / "ledger.jsonl").read_text()[-400:])
