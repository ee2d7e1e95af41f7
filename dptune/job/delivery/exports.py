"""Exports of a run's guarantee for readers outside: an evaluation after NIST SP 800-226, and an entry for the registry.

Both follow from the ledger, its header and the search's certificate alone, so they hold no figure of private records.
What only the owner of the records knows is marked ``TO_FILL_IN``, and nothing is invented.

Sources: NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees (March 2025,
doi.org/10.6028/NIST.SP.800-226), whose figure 1 names the components of a guarantee; the public registry of deployments
by OpenDP, Oblivious and others (github.com/opendp/deployments-registry-data, template.yaml of commit 057e5d8), whose
fields are used by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from dptune.core.digits import at_most
from dptune.core.errors import ConfigError
from dptune.job.delivery.card_code import cell
from dptune.job.delivery.privacy_section import (
    NO_GUARANTEE,
    NOISE,
    certified_epsilon,
    covered,
    guarantee_rows,
    has_guarantee,
    not_covered,
    release_rows,
    table,
    why_not,
)
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.ledger_file import LedgerContents
from dptune.privacy.samplers.sampler import TRAINED

TO_FILL_IN = "TO FILL IN"
_DIGITS = 4
_TRUST = (
    "Central. The owner of the records trains on them in the clear and is trusted with them, with the machine and with "
    "this software. Nobody who receives the result needs to be trusted: they may know everything else."
)
_SIDE_CHANNELS = (
    "Noise is drawn in float64 and rounded to a public grid, against attacks that read floating-point remainders. "
    "Batches have one public shape. The time that a run takes, and whether it crashes, are covered by nothing."
)
_FEATURES = "Texts or labelled records, tokenised; gradients of a language model's trained parameters."


@dataclass(frozen=True)
class Exported:
    """What an export is made of.

    Attributes:
        contents: content of a finished run's ledger.
        certificate: certificate of the search whose winner it is; None for a run of its own.
        ledger: SHA-256 of the ledger.
        classifies: whether the weights are a classifier's.

    Example:
        >>> from collections import Counter
        >>> from dptune.job.delivery.exports import Exported
        >>> from dptune.privacy.ledger_file import LedgerContents
        >>> from dptune.privacy.release import Release
        >>> from dptune.privacy.run_header import RunHeader
        >>> header = RunHeader("static", "gdp_clt", "certified", epsilon=2.0, delta=1e-5, unit="patient_id", units=800)
        >>> contents = LedgerContents(header, Counter({Release(0.01, 1.0): 1000}), 1000, "0" * 64, complete=True)
        >>> run = Exported(contents, None, "0" * 64, classifies=False)
        >>> run.registry()["deployment"]["privacy_loss"]["privacy_parameters"]
        {'epsilon': 1.83, 'delta': 1e-05}
        >>> run.nist().splitlines()[0]
        '# Evaluation of a differential privacy guarantee, by the components of NIST SP 800-226'
    """

    contents: LedgerContents
    certificate: SearchCertificate | None
    ledger: str
    classifies: bool

    def __post_init__(self) -> None:
        if not self.contents.complete:
            fix = "finish it by the command that began it"
            raise ConfigError("run", "is not finished, and more may be released", fix=fix)
        if any(release.noise.endswith("token") for release in self.contents.composition):
            fix = "give a run that trained weights"
            raise ConfigError("run", "is an ensemble that answers prompts, which no export describes", fix=fix)
        # Other samplers have other neighbours than add or remove, so each sentence about the unit would be wrong.
        names = {one.sampler.name for one in self.contents.composition if not one.sampler.like_poisson}
        if others := names.difference(TRAINED):
            problem = f"drew its batches by {', '.join(sorted(others))}, which no export describes"
            raise ConfigError("run", problem, fix="`dptune account` prices it; export a run that dptune trained")

    @property
    def epsilon(self) -> float:
        """The certified epsilon: the run's own, or that of the whole search."""
        return certified_epsilon(self.contents, self.certificate)

    @property
    def _leaks(self) -> tuple[str, ...]:
        return self.contents.epsilons.leaks if self.certificate is None else self.certificate.all_leaks

    def nist(self) -> str:
        """The evaluation as Markdown: a heading for each component of a guarantee, its strength first."""
        header, private = self.contents.header, has_guarantee(self.epsilon)
        rows = guarantee_rows(self.contents, self.certificate) | release_rows(self.contents)
        rows = {name: _inert(value) for name, value in rows.items()}
        strength = ("epsilon_certified", "epsilon_noise_only", "epsilon_published", "delta")
        subject = ("unit", "neighbours", "units", *(["canaries"] if header.canaries else []))
        elsewhere = (*strength, *subject, "epsilon_audited")
        algorithms = {name: value for name, value in rows.items() if name not in elsewhere}
        parts: dict[str, list[str]] = {
            "Privacy parameters": [
                "Approximate differential privacy." if private else _inert(f"{NO_GUARANTEE}: {why_not(self._leaks)}."),
                "",
                *table({name: rows[name] for name in strength}),
                "",
                *([covered(header.telemetry, "the trained weights")] if private else []),
            ],
            "Unit of privacy": table({name: rows[name] for name in subject}),
            "Algorithms and correctness": [
                *table(algorithms),
                "",
                "The ledger was written before each release, and `dptune verify` computes every epsilon from it again. "
                "What attacks show is in no ledger: see `dptune audit-run`.",
            ],
            "Utility": [f"Not stated: figures of private records are covered by no epsilon. {TO_FILL_IN}"],
            "Bias": [
                "Not measured. Clipping and noise cost groups of few units, or of unusual ones, the most accuracy. "
                f"{TO_FILL_IN}"
            ],
            "Trust model": [_TRUST],
            "Side channels": [_SIDE_CHANNELS],
            "Access control": [f"Files with secrets are readable by their owner alone (mode 0600). {TO_FILL_IN}"],
            "Data collection exposure": [TO_FILL_IN],
            "What the guarantee does not cover": [
                f"- {_inert(one)}" for one in not_covered(self.contents, self.certificate, classifies=self.classifies)
            ],
        }
        head = "# Evaluation of a differential privacy guarantee, by the components of NIST SP 800-226"
        about = f"Made by dptune {version('dptune')} from the ledger with SHA-256 {self.ledger}; data: {header.data}."
        lines = [head, "", _inert(about), ""]
        for title, said in parts.items():
            lines += [f"## {title}", "", *said, ""]
        return "\n".join(lines)

    def registry(self) -> dict[str, Any]:
        """The entry for the registry, whose files are YAML; JSON is read as such.

        Raises: ConfigError for a run without a certified epsilon.
        """
        if not has_guarantee(self.epsilon):
            problem = (
                f"has no certified epsilon ({why_not(self._leaks)}), so it is no deployment of differential privacy"
            )
            raise ConfigError("run", problem, fix="export it as nist, which says so, or train with a sound mechanism")
        header, rows = self.contents.header, guarantee_rows(self.contents, self.certificate)
        releases = release_rows(self.contents)
        search = "" if self.certificate is None else f" Hyperparameters: {rows['search']}; its choice is paid for."
        planted = f" Of the units, {header.canaries} are an auditor's planted gradients." if header.canaries else ""
        whole = "" if self.certificate is None else " Epsilon is of all candidates of the search, this one among them."
        uncovered = not_covered(self.contents, self.certificate, classifies=self.classifies)
        return {
            "url_slug": TO_FILL_IN,
            "deployment": {
                "basic": {
                    "name": TO_FILL_IN,
                    "data_curators": [{"data_curator_name": TO_FILL_IN, "data_curator_type": TO_FILL_IN}],
                    "description": f"Weights tuned on a language model. Data: {header.data}. {TO_FILL_IN}",
                    "intended_use": TO_FILL_IN,
                    "data_product_type": "Machine learning model",
                    "data_product_region": TO_FILL_IN,
                    "data_product_sector": TO_FILL_IN,
                    "publication_date": TO_FILL_IN,
                },
                "dp_variant": {
                    "variant_name": "Approximate DP",
                    "data_domain": _FEATURES,
                    "unprotected_quantities": " ".join(uncovered),
                },
                "privacy_loss": {
                    "privacy_unit": rows["unit"],
                    "privacy_unit_details": f"Neighbours: {rows['neighbours']}.{planted}",
                    "number_of_privacy_units": header.units,
                    "privacy_parameters": {
                        "epsilon": float(at_most(self.epsilon, _DIGITS)),
                        "delta": float(at_most(header.delta, _DIGITS)),
                    },
                    "privacy_parameters_details": covered(header.telemetry, "the trained weights"),
                },
                "deployment_model": {
                    "model_name": "Central",
                    "trust_assumptions": _TRUST,
                    "actors": TO_FILL_IN,
                    "release_type": "One release",
                    "release_type_details": "Other releases from the same records add up; this entry has one.",
                    "data_source_type": "Static",
                    "access_type": "Non-interactive",
                },
                "implementation": {
                    "preprocessing_and_hyperparameter_tuning": f"{TO_FILL_IN}.{search}",
                    "mechanisms": f"{header.mechanism}: gradients of each unit clipped and summed, noise "
                    f"{releases[NOISE]}. Sampling: {releases['sampling']}.",
                    "composition": f"All {self.contents.releases} releases of the ledger together, each charged before "
                    f"it was made; SHA-256 of the ledger {self.ledger}.{whole}",
                    "post_processing": "Optimiser and weights follow from the noisy sums alone.",
                    "justification": TO_FILL_IN,
                    "utility": TO_FILL_IN,
                    "additional_information": f"Made by dptune {version('dptune')}. {_SIDE_CHANNELS}",
                },
                "administrative": {"status": "Draft", "registry_authors": [TO_FILL_IN], "tier": 3},
            },
        }


def _inert(text: str) -> str:
    """Text of a ledger, which anyone may have written: nothing of it becomes a heading, a link, an image or HTML."""
    return cell(text).replace("[", "(").replace("]", ")")
