"""Figures that papers printed, with the epsilon that they state and what it certifies where somebody computed that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A line of a paper, quoted and not measured here.

    Attributes:
        stated: epsilon that the source states; None without privacy.
        certifies: what dptune's accountants certify for the noise that the source describes; empty where unknown.
        score: the part's first metric.
    """

    part: str
    who: str
    stated: float | None
    certifies: str
    score: float
    source: str


_LMO_CERTIFIES = {
    0.16: "0.656 (6.64 for the noise that its code drew)",
    0.3: "2.26 (12.2 for the noise that its code drew)",
    3.0: "808",
}
_LMO = "LMO-DP (arXiv 2405.18776), table 3"
_LOGS = "logs released with PLRV-O (CCS 2025)"
_LMO_E2E = "LMO-DP, table 2"
#: Mind the models: these have 124 and 355 million parameters, and mostly train all of them.
PUBLISHED = (
    *(Published("sst2", "LMO-DP, RoBERTa-large, dev", eps, _LMO_CERTIFIES.get(eps, ""), score, _LMO)
      for eps, score in ((0.16, 90.83), (0.3, 92.20), (3.0, 93.92))),
    Published("sst2", "DP-SGD (Li et al. 2022), RoBERTa-large, dev", 3.0, "", 91.06, f"{_LMO}, which quotes it"),
    Published("sst2", "no privacy, RoBERTa-large, dev", None, "", 96.20, _LMO),
    Published("sst2", "Gaussian noise, RoBERTa-base, dev", 1.003, "0.771", 88.99, _LOGS),
    Published("sst2", "PLRV-O, RoBERTa-base, dev", 0.923, "2.302", 92.78, _LOGS),
    *(Published("e2e", "Gaussian noise, GPT-2", eps, "", bleu, "PLRV-O, tables 3 to 6")
      for eps, bleu in ((0.5, 42.72), (1.0, 52.11), (2.5, 59.02))),
    *(Published("e2e", "PLRV-O, GPT-2", eps, "", bleu, "PLRV-O, tables 3 to 6")
      for eps, bleu in ((0.5, 62.98), (1.0, 62.73), (2.5, 65.27))),
    Published("e2e", "LMO-DP, GPT-2", 0.176, "", 53.51, _LMO_E2E),
    Published("e2e", "no privacy, GPT-2", None, "", 54.25, _LMO_E2E),
    Published("e2e", "TGen, the challenge's baseline, no privacy", None, "", 65.93, "the E2E challenge"),
)  # fmt: skip
