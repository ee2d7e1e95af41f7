"""Report on the records that were read: counts, lengths, units, samples and warnings. For the data's owner only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dptune.core.errors import ConfigError
from dptune.core.files import write_json
from dptune.records.reading.findings import Finding
from dptune.records.reading.read import Sides
from dptune.records.reading.record import Chat, Labelled, PromptTarget, Record, Text, as_text
from dptune.records.reading.source import RecordSource

if TYPE_CHECKING:
    from rich.table import Table


_QUANTILES = {"least": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "most": 1.0}
_SAMPLES, _SHOWN = 3, 200
_KINDS: dict[type, str] = {
    Text: "text",
    PromptTarget: "prompt and target",
    Chat: "messages",
    Labelled: "text and label",
}
#: A unit with more than this many times the records that it may bring to a batch leaves most of them unused.
_FAR_MORE = 10
#: Shares of records from which the report warns of records that are cut, or that have no token in the loss.
_MANY_CUT, _MANY_SILENT = 0.1, 0.01


@dataclass(frozen=True)
class ReadReport:
    """A description of records. Private: every figure is exact, and samples are records.

    Attributes:
        file: name of the file or data set.
        kind: one of ``_KINDS``' values, such as "text".
        sides: number of records of each side.
        units: number of units of the train side; without a column of units every record is one.
        records_per_unit, lengths: quantiles by name.
        measure: unit of ``lengths``: "tokens" after cutting, or "characters" where nothing was encoded.
        cut, without_loss: shares of the train records; None where nothing was encoded.
        samples: the beginnings of the first, the middle and the last record.

    Example:
        >>> from dptune.records.reading.read import read_sides
        >>> from dptune.records.reading.report import describe
        >>> from dptune.records.reading.source import RecordSource
        >>> rows = [{"customer": n % 50, "text": f"Order {n} is late."} for n in range(200)]
        >>> source = RecordSource(rows, unit="customer")
        >>> report = describe(source, read_sides(source))
        >>> report.kind, report.units, report.lengths["most"]
        ('text', 41, 18.0)
    """

    file: str
    kind: str
    sides: dict[str, int]
    units: int
    records_per_unit: dict[str, float]
    measure: str
    lengths: dict[str, float]
    cut: float | None
    without_loss: float | None
    samples: tuple[str, ...] = field(repr=False)
    findings: tuple[Finding, ...]


def describe(
    source: RecordSource,
    sides: Sides,
    *,
    encoded: TokenCounts | None = None,
    most: int | None = None,
    delta: float | None = None,
) -> ReadReport:
    """The report on ``sides``; all figures but the counts of sides are about the train side.

    Args:
        encoded: lengths of the train records in tokens; None reports them in characters.
        most: the most records that one unit brings to a batch; None leaves the warning about it out.
        delta: delta of the run's guarantee; None leaves the warning about it out.

    Raises: ConfigError if there is no train record, or ``delta`` is no probability.

    Example:
        >>> from dptune.records.reading.read import read_sides
        >>> from dptune.records.reading.report import describe
        >>> from dptune.records.reading.source import RecordSource
        >>> rows = [{"customer": n % 50, "text": f"Order {n} is late."} for n in range(200)]
        >>> source = RecordSource(rows, unit="customer")
        >>> [finding.name for finding in describe(source, read_sides(source), delta=0.1).findings]
        ['large_delta']
    """
    train = sides.train
    if not train:
        raise ConfigError("data", "the split puts no record on side train", fix="give more records")
    counts = np.array(list(Counter(record.unit for record in train).values())) if source.unit else np.ones(len(train))
    lengths = encoded.lengths if encoded else [len(as_text(record)) for record in train]
    names = ("train", "eval", "test", "public")
    return ReadReport(
        file=train[0].file,
        kind=_KINDS[type(train[0].content)],
        sides={name: len(getattr(sides, name)) for name in names},
        units=len(counts),
        records_per_unit=_quantiles(counts),
        measure="tokens" if encoded else "characters",
        lengths=_quantiles(np.asarray(lengths)),
        cut=encoded.cut / len(train) if encoded else None,
        without_loss=encoded.without_loss / len(train) if encoded else None,
        samples=tuple(_sample(train[place]) for place in _places(len(train))),
        findings=(
            *sides.findings,
            *_unit_findings(sides, counts, most, delta),
            *(_token_findings(encoded, len(train)) if encoded else ()),
        ),
    )


def write_report(path: Path, report: ReadReport) -> None:
    """Write a report as JSON; whole or not at all, mode 0600.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> from dptune.records.reading.read import read_sides
        >>> from dptune.records.reading.report import describe, write_report
        >>> from dptune.records.reading.source import RecordSource
        >>> source = RecordSource([{"text": f"Order {n} is late."} for n in range(200)])
        >>> path = Path(mkdtemp()) / "report.json"
        >>> write_report(path, describe(source, read_sides(source)))
        >>> json.loads(path.read_text())["sides"]
        {'eval': 18, 'public': 0, 'test': 8, 'train': 174}
    """
    write_json(path, asdict(report))


def as_table(report: ReadReport) -> Table:
    """The report as a rich table, for the owner's terminal.

    Example:
        >>> from dptune.records.reading.read import read_sides
        >>> from dptune.records.reading.report import as_table, describe
        >>> from dptune.records.reading.source import RecordSource
        >>> source = RecordSource([{"text": f"Order {n} is late."} for n in range(200)])
        >>> as_table(describe(source, read_sides(source))).row_count
        8
    """
    from rich.table import Table
    from rich.text import Text as Plain

    table = Table(title=f"Records of {report.file} (private)", show_header=False)
    for name, value in _lines(report):
        table.add_row(name, Plain(value))  # plain, so that brackets in records are no markup
    return table


def _lines(report: ReadReport) -> list[tuple[str, str]]:
    def format_quantiles(figures: dict[str, float]) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in figures.items())

    lines = [
        ("kind", report.kind),
        ("records", ", ".join(f"{name} {count:,}" for name, count in report.sides.items() if count)),
        ("units in train", f"{report.units:,}"),
        ("records per unit", format_quantiles(report.records_per_unit)),
        (report.measure, format_quantiles(report.lengths)),
    ]
    if report.cut is not None and report.without_loss is not None:
        lines += [("cut", f"{report.cut:.2%}"), ("without loss", f"{report.without_loss:.2%}")]
    lines += [(f"sample {number}", sample) for number, sample in enumerate(report.samples, start=1)]
    return lines + [(f"warning: {finding.name}", finding.text) for finding in report.findings]


def _sample(record: Record) -> str:
    text = as_text(record)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _places(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})[:_SAMPLES]


def _quantiles(values: np.ndarray) -> dict[str, float]:
    return {name: float(np.quantile(values, share)) for name, share in _QUANTILES.items()}


def _unit_findings(sides: Sides, counts: np.ndarray, most: int | None, delta: float | None) -> list[Finding]:
    found = []
    if most is not None and (large := int((counts > _FAR_MORE * most).sum())):
        text = (
            f"{large} of {len(counts)} units have more than {_FAR_MORE} times the {most} records that a unit brings to "
            f"a batch, at most {int(counts.max())}; most of these are rarely used"
        )
        found.append(Finding("large_units", text))
    if delta is not None:
        if not 0 <= delta < 1:
            raise ConfigError("delta", f"{delta} is not a probability below 1", fix="use less than 1 over the units")
        if delta * len(counts) >= 1:
            text = (
                f"delta {delta:g} is 1 over the {len(counts)} units or more: publishing one unit in full would "
                f"satisfy such a guarantee. Use less than {1 / len(counts):.2g}"
            )
            found.append(Finding("large_delta", text))
    if shared := sides.shared_units:
        text = f"{shared} units have records in train and in another side, so that side is not held out"
        found.append(Finding("shared_units", text))
    return found


def _token_findings(encoded: TokenCounts, records: int) -> list[Finding]:
    found = []
    if encoded.cut > _MANY_CUT * records:
        text = f"{encoded.cut} of {records} records have more than {encoded.limit} tokens and are cut there"
        found.append(Finding("many_cut", text))
    if encoded.without_loss > _MANY_SILENT * records:
        text = (
            f"{encoded.without_loss} of {records} records have no token that counts in the loss, so nothing is learned "
            "from them. Raise training.max_length, or shorten their prompts"
        )
        found.append(Finding("without_loss", text))
    return found


# Lengths of records in tokens, for the report on what was read.


@dataclass(frozen=True)
class TokenCounts:
    """How the train records fit into the model's rows. Private.

    Attributes:
        lengths: number of tokens of each record, after cutting.
        limit: the most tokens that a record may have.
        cut: number of records that were longer, and lost their end.
        without_loss: number of records none of whose tokens counts in the loss.
    """

    lengths: Sequence[int] = field(repr=False)
    limit: int
    cut: int
    without_loss: int
