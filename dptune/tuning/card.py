"""The model card of a deliverable.

Its section "Privacy" follows from the ledger and the weights alone, so that ``verify`` writes it again and compares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Context
from importlib.metadata import version
from typing import Any

from dptune.corpus.reading.template import template_columns
from dptune.digits import at_most
from dptune.privacy.certificate import SearchCertificate
from dptune.privacy.ledger_file import LedgerContents

START, END = "<!-- dptune: checked by `dptune verify` -->", "<!-- dptune: end -->"
#: Names of the rows with figures that earlier versions rounded to the nearest.
DELTA, NOISE, SCORE = "delta", "noise", "score"
#: What each epsilon of a run is, in a few words.
GLOSSES = {
    "epsilon_certified": "what is proved",
    "epsilon_noise_only": "leaks of the controller ignored",
    "epsilon_published": "as the mechanism's paper counts",
}
NOT_MEASURED = "not measured"
_DIGITS, _DIGITS_OF_DELTA, _DIGITS_OF_NOISE = 4, 6, 6
_SCORES = {"accuracy": "accuracy", "f1": "F1", "calibration_error": "calibration error", "loss": "loss"}


def card_text(section: str, result: Mapping[str, Any]) -> str:
    """The card below its metadata.

    Args:
        section: the result of ``privacy_section``.
        result: the content of result.json.
    """
    classifies = "scores" in result
    by_words = classifies and "words" in result
    head, means = ("and classification head " if classifies and not by_words else ""), ", a classifier by label words"
    lines = [
        f"# LoRA adapter {head}for {result['base']}{means if by_words else ''}",
        "",
        "Fine-tuned with differential privacy by dptune.",
        "",
        section,
        "",
        "## Accuracy" if classifies else "## Perplexity",
        "",
        *_measured(result),
        "",
        "## Training",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| {name} | {_plain(value)} |" for name, value in result["settings"].items()),
        "",
        "## Use",
        "",
        *([_rule_of_words(result), ""] if by_words else []),
        "```python",
        *(_use_of_words(result) if by_words else _use_of_classifier(result) if classifies else _use(result)),
        "```",
        "",
        "`dptune verify` with this folder computes each epsilon again from the ledger, and compares this card with it.",
        "",
        "### Framework versions",
        "",
        *(f"- {name} {version(name)}" for name in ("dptune", "peft", "torch", "transformers")),
        "",
    ]
    return "\n".join(lines)


def _measured(result: Mapping[str, Any]) -> list[str]:
    figures = result["scores"] if "scores" in result else result["perplexity"]
    if "search" in result and not figures:
        return ["Not told: held-out records scored the candidates, and of them only a noisy score left."]
    return _scores(figures) if "scores" in result else _perplexities(figures)


def _use(result: Mapping[str, Any]) -> list[str]:
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{result["base"]}"{_revision(result)})',
        'model = PeftModel.from_pretrained(base, "this folder")',
    ]


def _use_of_classifier(result: Mapping[str, Any]) -> list[str]:
    return [
        "import json",
        "from peft import PeftModel",
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
        "",
        'labels, tokenizer = json.load(open("this folder/labels.json")), AutoTokenizer.from_pretrained("this folder")',
        "base = AutoModelForSequenceClassification.from_pretrained(",
        f'    "{result["base"]}"{_revision(result)}, num_labels=len(labels), pad_token_id=tokenizer.pad_token_id',
        ")",
        'model = PeftModel.from_pretrained(base, "this folder").eval()',
        'labels[int(model(**tokenizer("a text", return_tensors="pt")).logits.argmax())]',
    ]


def said_words(words: Mapping[str, str]) -> str:
    """Each label with its word, in quotes that show the space at its beginning."""
    return ", ".join(f'{label}: "{word}"' for label, word in words.items())


def _rule_of_words(result: Mapping[str, Any]) -> str:
    """How a text becomes a label, as a sentence."""
    template = result["template"]
    put = "" if template is None else f'It is put into the template "{_cell(template)}". '
    quoted = " or ".join(f'"{word}" ({_cell(label)})' for label, word in result["words"].items())
    return f"How a text becomes a label: {put}Of {quoted}, the word that the model finds likeliest next decides."


def _use_of_words(result: Mapping[str, Any]) -> list[str]:
    template, text = result["template"], '"a text"'
    if template is not None:
        values = dict.fromkeys(template_columns(template), "a text")
        text = f'said["template"].format_map({json.dumps(values, ensure_ascii=False)})'
    return [
        "import json",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'said, labels = json.load(open("this folder/words.json")), json.load(open("this folder/labels.json"))',
        'tokenizer = AutoTokenizer.from_pretrained("this folder", truncation_side="left")',
        f'base = AutoModelForCausalLM.from_pretrained("{result["base"]}"{_revision(result)})',
        'model = PeftModel.from_pretrained(base, "this folder").eval()',
        'words = [tokenizer(said["words"][label], add_special_tokens=False)["input_ids"][0] for label in labels]',
        f"text = {text}",
        'labels[int(model(**tokenizer(text, return_tensors="pt")).logits[0, -1, words].argmax())]',
    ]


def privacy_section(
    contents: LedgerContents,
    digests: Mapping[str, str],
    *,
    classifies: bool = False,
    certificate: SearchCertificate | None = None,
) -> str:
    """The card's section "Privacy", between the marks ``START`` and ``END``. Epsilons, delta and noise are rounded up.

    Args:
        digests: SHA-256 by file name, of the ledger and of the adapter's and tokenizer's files.
        classifies: whether the weights are a classifier's.
        certificate: of the search whose winner this is; the guarantee is then the whole search's.
    """
    header = contents.header
    rates = sorted({release.sample_rate for release in contents.composition})
    bands = _bands(contents)
    rows = {
        **guarantee_rows(contents, certificate),
        NOISE: noise_text(contents),
        "sampling": f"Poisson: at each of {contents.releases} steps each unit"
        + (f" of one of {bands} groups in turn" if bands else "")
        + f" by a secret coin of {_range([f'{rate:.6g}' for rate in rates])}",
        "data": header.data,
        "telemetry": header.telemetry,
        "run": "finished" if contents.complete else "not finished",
        **{name: f"SHA-256 {digest}" for name, digest in digests.items()},
    }
    measure = "Accuracy" if classifies else "Perplexity"
    told = f"{measure} on held-out private records, which" if header.telemetry == "research" else "What"
    not_covered = [
        "The weights of the base model, and what it was trained on.",
        f"{told} is told beside the weights: the guarantee is about the weights alone."
        if header.telemetry == "research"
        else "The number of training units, and how long the run took.",
        "Other adapters from the same records: their epsilons add up.",
        "Choosing settings by looking at the private records.",
    ]
    if certificate is not None:
        held_out = ", and that of the held-out units that score" if certificate.score.on == "held_out" else ""
        not_covered[1:2] = [
            f"The number of training units{held_out}: public by assumption.",
            "How many candidates there were and what became of them, which is secret; how long the search took.",
        ]
        not_covered[-1] = "Choosing outside this search, or its space by looking at the records."
        not_covered.append("A record that crashes a run: the guarantee assumes that none can.")
    if classifies:
        not_covered.insert(2, "The names of the labels, whether they were given or read from the records.")
    if header.leaks:
        not_covered.insert(0, f"Everything, for: {'; '.join(header.leaks)}.")
    plugins = header.plugins if certificate is None else certificate.plugins
    not_covered += [f"Mistakes in {plugin}, which dptune cannot check." for plugin in plugins]
    return "\n".join(
        [
            START,
            "## Privacy",
            "",
            *table(rows),
            "",
            "Not covered:",
            "",
            *(f"- {_cell(one)}" for one in not_covered),
            END,
        ]
    )


def certified_epsilon(contents: LedgerContents, certificate: SearchCertificate | None) -> float:
    """The guarantee of a deliverable: its own ledger's, or that of the search whose winner it is."""
    return contents.epsilons.certified if certificate is None else certificate.certified


def guarantee_rows(contents: LedgerContents, certificate: SearchCertificate | None) -> dict[str, str]:
    """What is guaranteed, to whom, and by which mechanism, by name. Epsilons and delta are rounded up."""
    header, prices = contents.header, contents.epsilons
    # The price of a search also covers the candidates that lost, so their noise counts here as well.
    of_search = certificate.kinds if certificate is not None else ()
    charged = [*contents.composition, *(release for _, kind in of_search for release, _ in kind)]
    bands = any(release.coefficients for release in charged)
    noise_only = prices.noise_only if certificate is None else certificate.epsilon_by(certificate.bound)
    proved = GLOSSES["epsilon_certified"] + ("" if certificate is None else ", of the whole search")
    published = f"{_up(prices.published)} ({GLOSSES['epsilon_published']})"
    if certificate is not None:
        published = "infinity (the mechanism's paper counts no search)"
    whose = (
        "one record"
        if header.unit == "record"
        else f"one unit `{header.unit}`: all records that share a value of that column"
    )
    return {
        "epsilon_certified": f"{_up(certified_epsilon(contents, certificate))} ({proved})",
        "epsilon_noise_only": f"{_up(noise_only)} ({GLOSSES['epsilon_noise_only']})",
        "epsilon_published": published,
        "epsilon_audited": NOT_MEASURED,
        DELTA: at_most(header.delta, _DIGITS_OF_DELTA),
        **({} if certificate is None else _searched(certificate, prices.published)),
        "unit": whose,
        "neighbours": "data sets of which one lacks a unit of the other (add or remove)"
        + (", whose number stays empty, so that all others keep their groups" if bands else ""),
        "units": f"{header.units} in training: public, and covered by no epsilon",
        "mechanism": header.mechanism,
    }


def table(rows: Mapping[str, str]) -> list[str]:
    """Lines of a table of two columns, in which nothing can leave its cell."""
    return ["| | |", "| --- | --- |", *(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())]


def _searched(certificate: SearchCertificate, published: float) -> dict[str, str]:
    """The rows of the card about a search; ``published`` is the winner's own, as if it had been trained alone."""
    law, winner = certificate.law, certificate.winner
    return {
        "search": f"{certificate.id}: the best of a random number of candidates, {law.uncapped_mean:.4g} on average",
        "law of the number": f"shape {law.to_dict()['shape']}, rate {law.rate:.6g}, at most {law.most}",
        "bound": certificate.bound,
        SCORE: score_text(certificate),
        "epsilon_of_one_candidate": f"{_up(certificate.one_candidate)} (no guarantee: this one was chosen)",
        "epsilon_published_of_one_candidate": f"{_up(published)} (no guarantee: this one was chosen)",
        **({} if winner is None else {"winner's score": f"{winner.score:.6g}"}),
    }


def _perplexities(figures: Mapping[str, Any]) -> list[str]:
    if not figures:
        return ["Not told: telemetry is private, and no public records were given."]
    said = [f"- {name}: {pair[0]:.4g} before, {pair[1]:.4g} after" for name, pair in figures.items()]
    if "held-out private records" in figures:
        said.append("\nThe first is a statistic of private held-out records, which the guarantee does not cover.")
    return said


def _scores(figures: Mapping[str, Any]) -> list[str]:
    if not figures:
        return ["Not told: telemetry is private, and no public records were given."]
    said = []
    for name, scores in figures.items():
        parts = [
            f"{shown} {scores[score][0]:.4g} before, {scores[score][1]:.4g} after" for score, shown in _SCORES.items()
        ]
        said.append(f"- {name}: {'; '.join(parts)}; a constant answer has accuracy {scores['largest_class'][1]:.4g}")
    said.append("\nF1 is the mean over labels; the calibration error is the expected one over 15 bins.")
    if "held-out private records" in figures:
        said.append("The first line is of private held-out records, which the guarantee does not cover.")
    return said


def _revision(result: Mapping[str, Any]) -> str:
    return f', revision="{result["revision"]}"' if result["revision"] else ""


def _up(epsilon: float) -> str:
    """Four digits, rounded up: a card never promises more than the ledger."""
    if not math.isfinite(epsilon):
        return "infinity"
    return f"{float(Context(prec=_DIGITS, rounding=ROUND_CEILING).create_decimal(repr(epsilon))):g}"


def noise_text(contents: LedgerContents, *, nearest: bool = False) -> str:
    """The noise of a ledger's releases: rounded up, for whoever types it; ``nearest`` as in earlier versions."""
    bands = _bands(contents)
    noises = sorted({release.effective_noise_multiplier for release in contents.composition})
    shown = [f"{noise:.6g}" if nearest else at_most(noise, _DIGITS_OF_NOISE) for noise in noises]
    return f"{_range(shown)} times the sensitivity" + (f", correlated over {bands} steps" if bands else "")


def score_text(certificate: SearchCertificate, *, nearest: bool = False) -> str:
    """What scored the candidates, with its noise: rounded up; ``nearest`` as in earlier versions."""
    score = certificate.score
    if score.on == "public":
        return f"public records ({score.units})"
    noise = f"{score.noise_multiplier:.4g}" if nearest else at_most(score.noise_multiplier, _DIGITS)
    clipped = f"each clipped to {score.clip:g} nats, noise {noise} times that over their number"
    return f"{score.units} units ({score.on}), {clipped}"


def _bands(contents: LedgerContents) -> int:
    """Steps over which noise is correlated; 0 for independent noise."""
    return max((len(release.coefficients) for release in contents.composition), default=0)


def _range(shown: list[str]) -> str:
    return (shown[0] if len(shown) == 1 else f"{shown[0]} to {shown[-1]}") if shown else "none"


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else _cell(str(value))


def _cell(text: str) -> str:
    """Text that stays within its table cell: labels and names of columns may hold any characters."""
    return " ".join(text.replace("|", "/").replace("<", "(").replace(">", ")").split())
