"""Benchmarks are read as the papers read them; on the real files where they are at hand, on invented rows elsewhere."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dptune.core.errors import ConfigError, DataError
from dptune.records import catalogue, published_files
from dptune.records.benchmarks import billion_words, dart, e2e, glue, meaning_prompt
from dptune.records.catalogue import SOURCES, SourceSettings, find_source, label_of
from dptune.records.parquet_file import form_at, read_records
from dptune.records.reading.read import read
from dptune.records.wikitext import articles, cleaned_articles, wikitext
from tasks.settings.data import Data

MR = (
    "name[Ada], eatType[pub], priceRange[£20-25], customer rating[3 out of 5], area[riverside], familyFriendly[no], "
    "near[The Bay]"
)
PROMPT = (
    "name : Ada | Type : pub | price : £20-25 | customer rating : 3 out of 5 | area : riverside | family friendly : no"
    " | near : The Bay"
)


@pytest.fixture
def invented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of each benchmark's layout, with rows made up here."""
    monkeypatch.setattr(published_files, "KNOWN", {})
    rows = f'mr,ref\r\n"{MR}","Ada  is a\npub."\r\n"{MR}",A pub is Ada.\r\n"name[Bo]",Bo.\r\n'
    with zipfile.ZipFile(tmp_path / "e2e.zip", "w") as archive:
        archive.writestr("e2e-dataset/trainset.csv", rows)
    (tmp_path / "train.tsv").write_bytes(b'label\tsentence\r\n1\ta "fine" cat\r\n0\tno cat\r\n')
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nold cat \t0\n")
    (tmp_path / "stsa.binary.train").write_text("1 a cat -lrb- red -rrb- and\\/or blue\n0 no cat\n")
    texts = [{"source": "a", "text": "Bo  is red."}, {"source": "b", "text": "Red is Bo."}]
    (tmp_path / "dart-v1.1.1-full-train.json").write_text(
        json.dumps([{"tripleset": [["Bo", "IS", "red"], ["Bo", "HAS AGE", "7"]], "annotations": texts}])
    )
    (tmp_path / "wiki.train.tokens").write_text(
        " \n = Cats = \n \n Cats are red . \n = = Old cats = = \n \n They sit . \n = Not a heading = \n Dogs . \n \n"
        " = Dogs = \n \n Dogs are blue . \n"
    )
    return tmp_path


def test_prompts_and_targets_of_e2e(invented: Path) -> None:
    assert meaning_prompt(MR) == PROMPT
    first, second, third = e2e(str(invented / "e2e.zip"))
    assert first == {"prompt": f"{PROMPT}<|endoftext|>", "completion": " Ada is a pub.", "mr": MR}
    assert (second["mr"], third["mr"]) == (MR, "name[Bo]")
    published = next(iter(e2e(str(invented / "e2e.zip"), template="published")))
    assert published["prompt"].startswith(" name : Ada | Type : pub | price : £ 20 - 25 |")
    assert published["prompt"].endswith(" near : The Bay <|endoftext|>")
    assert published["completion"] == " Ada is a pub. "


def test_triples_of_dart(invented: Path) -> None:
    entry = '[["Bo", "HAS AGE", "7"], ["Bo", "IS", "red"]]'
    assert list(dart(str(invented), separator=" =>")) == [
        {"prompt": "Bo : is : red | Bo : has age : 7 =>", "completion": text, "entry": entry}
        for text in (" Bo is red.", " Red is Bo.")
    ]


def test_phrases_and_sentences_of_sst2(invented: Path) -> None:
    """By the header, whatever the order; quotes are letters."""
    assert list(glue(str(invented))) == [{"text": 'a "fine" cat', "label": "1"}, {"text": "no cat", "label": "0"}]
    assert list(glue(str(invented), part="dev")) == [{"text": "old cat", "label": "0"}]
    assert next(iter(glue(str(invented), "sst2-sentences"))) == {"text": "a cat ( red ) and/or blue", "label": "1"}


def test_articles_of_wikitext(invented: Path) -> None:
    found = articles((invented / "wiki.train.tokens").read_text())
    assert [article[0].strip() for article in found] == ["= Cats =", "= Dogs ="]
    rows = list(wikitext(str(invented)))
    assert [row["text"] for row in rows][:2] == ["= Cats =", "Cats are red ."]
    assert len({row["article"] for row in rows}) == 2
    halves = [list(wikitext(str(invented), half=half)) for half in ("public", "private")]
    assert sorted(map(str, [*halves[0], *halves[1]])) == sorted(map(str, rows))


def test_blocks_of_an_article_hold_its_words_in_order_and_no_other_articles(invented: Path) -> None:
    whole, blocks = list(wikitext(str(invented))), list(wikitext(str(invented), block=4))
    for article in {row["article"] for row in whole}:
        words = [" ".join(row["text"] for row in rows if row["article"] == article) for rows in (whole, blocks)]
        assert words[0] == words[1]
    assert max(len(row["text"].split()) for row in blocks) == 4
    with pytest.raises(ConfigError, match="block True is not a number"):
        next(iter(wikitext(str(invented), block=True)))


def test_articles_are_cleaned_of_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_files, "KNOWN", {})
    lines = (
        " \n = Cats = \n \n The <unk> cat ( red ) is 10 @-@ years old , and costs £ 3 @.@ 5 . \n = = It 's = = \n \n"
    )
    (tmp_path / "wiki.train.tokens").write_text(lines)
    assert cleaned_articles(str(tmp_path)) == ["Cats\nThe cat (red) is 10-years old, and costs £3.5.\nIt's"]


def test_sentences_of_one_billion_words(tmp_path: Path) -> None:
    """Files in the published order and names, a sentence a line; blocks are whole sentences, one at least."""
    train, held_out = (tmp_path / f"{name}-monolingual.tokenized.shuffled" for name in ("training", "heldout"))
    train.mkdir()
    held_out.mkdir()
    (train / "news.en-00001-of-00100").write_text("A b c .\nD e .\n\nF g h i j k .\n")
    (train / "news.en-00002-of-00100").write_text("L .\n")
    (held_out / "news.en.heldout-00000-of-00050").write_text("T .\n")
    (held_out / "news.en.heldout-00001-of-00050").write_text("V .\n")

    def texts(**options: Any) -> list[str]:
        return [row["text"] for row in billion_words(str(tmp_path), **options)]

    assert texts() == ["A b c .", "D e .", "F g h i j k ."]
    assert texts(files=2)[-1] == "L ."
    assert texts(files=2, block=7) == ["A b c . D e .", "F g h i j k .", "L ."]
    assert texts(block=2) == texts()
    assert (texts(part="test"), texts(part="dev")) == (["T ."], ["V ."])
    assert label_of("billion_words", {"files": 2}) == "benchmark billion_words (part train, files 2)"
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"part": "valid"}, "use train, dev, test"),
        ({"files": 100}, "at most 99"),
        ({"part": "test", "files": 2}, "at most 1"),
        ({"files": 0}, "use 1"),
        ({"block": True}, "use 0"),
    )
    for options, words in wrong:
        with pytest.raises(ConfigError, match=words):
            texts(**options)
    with pytest.raises(DataError, match="00003"):
        texts(files=3)


def test_pairs_of_glue_have_labels_templates_and_units(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(
        "index\tquestion\tsentence\tlabel\n0\tWho {second}?\tBo did.\tentailment\n1\tWhy?\tBo did.\tnot_entailment\n"
    )
    rows = list(glue(str(tmp_path), "qnli"))
    assert rows[0] == {"text": "Who {second}? Bo did.", "label": "entailment", "passage": "Bo did."}
    assert next(iter(glue(str(tmp_path), "qnli", template="{first}</s></s>{second}")))["text"] == (
        "Who {second}?</s></s>Bo did."
    )
    (tmp_path / "dev_matched.tsv").write_text(
        "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA.\tB.\tneutral\tentailment\n"
    )
    assert list(glue(str(tmp_path), "mnli", "dev")) == [{"text": "A. B.", "label": "entailment", "premise": "A."}]
    (tmp_path / "dev.tsv").write_text(
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tA?\tB?\t1\n1\t1\ttorn\n"
    )
    assert list(glue(str(tmp_path), "qqp", "dev")) == [{"text": "A? B?", "label": "1"}]
    (tmp_path / "dev_mismatched.tsv").write_text("a\tsentence1\tsentence2\tb\tc\tgold_label\n0\t1\t2\n")
    with pytest.raises(DataError, match="3 fields instead of 6"):
        list(glue(str(tmp_path), "mnli", "dev_mismatched"))
    with pytest.raises(ConfigError, match="names no sentence"):
        next(iter(glue(str(tmp_path), "qnli", template="so")))


def test_a_relative_path_may_lie_in_the_folder_of_benchmarks(invented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="DPTUNE_BENCHMARKS"):
        next(iter(e2e("e2e.zip")))
    monkeypatch.setenv("DPTUNE_BENCHMARKS", str(invented))
    assert next(iter(e2e("e2e.zip")))["mr"] == MR


def test_a_source_reads_units_and_records(invented: Path) -> None:
    source = find_source("e2e")
    assert source.rows is not None
    for settings in (
        SourceSettings(invented / "e2e.zip", "mr"),
        SourceSettings(None, "mr", {"path": str(invented / "e2e.zip")}),
    ):
        records = read(source.rows(settings))
        assert [record.content.prompt for record in records][2] == "name : Bo<|endoftext|>"  # type: ignore[union-attr]
        assert len({record.unit for record in records}) == 2
    assert label_of("e2e", {}) == "benchmark e2e (part train)"
    assert label_of("glue", {"task": "sst2-sentences"}) == "benchmark glue (task sst2-sentences, part train)"
    assert label_of("wikitext", {"part": "dev"}) == "benchmark wikitext (part dev, half all)"


def test_a_source_of_dptunes_own_takes_its_line_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of docs/howto/extending.md works as it is printed there."""

    def mine(count: int) -> Iterator[dict[str, str]]:
        yield from ({"patient": f"p{number % 3}", "text": f"visit {number}"} for number in range(count))

    mine.__module__ = "dptune.records.mine"
    monkeypatch.setitem(SOURCES, "mine", catalogue._of_function("mine", mine, rows=True))
    settings = SourceSettings(None, "patient", {"count": 12})
    assert label_of("mine", {"count": 12}) == "source mine"
    records = read_records(find_source("mine").acquire(tmp_path, settings))
    assert records.about["label"] == "source mine"
    assert len(set(records.unit.tolist())) == 3


def test_the_pipelines_settings_and_files_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_files, "KNOWN", {})
    rows = "".join(f'"name[Bo], near[{number // 2}]",Bo is {number}.\n' for number in range(20))
    with zipfile.ZipFile(tmp_path / "e2e.zip", "w") as archive:
        archive.writestr("trainset.csv", f"mr,ref\n{rows}")
    synthetic = {"encounters": 100, "seed": 1}
    data = Data(source="e2e", path=tmp_path / "e2e.zip", unit="mr", split_seed=1, synthetic=synthetic)
    assert (data.form, data.units) == ("pair", ("record", "mr"))
    records = read_records(find_source("e2e").acquire(tmp_path / "raw", data.settings_of_source(None)))
    assert (len(records.record), len(set(records.unit.tolist()))) == (20, 10)
    assert form_at(records.about) == "pair"
    assert records.about["label"] == "benchmark e2e (part train)"
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "".join(f"cat {one}\t1\n" for one in range(12)))
    settings = SourceSettings(tmp_path, options={"task": "sst2"}, label="label")
    labelled = read_records(find_source("glue").acquire(tmp_path / "glue", settings)).about
    assert (labelled["label"], labelled["form"]) == ("benchmark glue (task sst2, part train)", "label")


def test_wrong_files_and_options_are_named(invented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has no part 'valid' here"):
        next(iter(wikitext(str(invented), "valid")))
    with pytest.raises(ConfigError, match="template 'own' is unknown"):
        next(iter(e2e(str(invented / "e2e.zip"), template="own")))
    with pytest.raises(ConfigError, match="task 'cola' is unknown"):
        next(iter(glue(str(invented), "cola")))
    with pytest.raises(DataError, match=r"holds no testset_w_refs\.csv"):
        next(iter(e2e(str(invented / "e2e.zip"), "test")))
    with pytest.raises(DataError, match="cannot be read"):
        next(iter(e2e(str(invented / "train.tsv"))))
    monkeypatch.setattr(published_files, "KNOWN", {"trainset.csv": "0" * 64})
    with pytest.raises(DataError, match=r"has SHA-256 [0-9a-f]{64}, and the published file 0{64}"):
        next(iter(e2e(str(invented / "e2e.zip"))))
    with pytest.raises(ConfigError, match=r"its parameters are path, \w+[^:=]*\.$"):
        find_source("e2e").check(SourceSettings(invented, options={"nosuch": "1"}))


def test_the_real_e2e(benchmarks: Path) -> None:
    archive, distinct = str(benchmarks / "e2e" / "e2e-dataset.zip"), {}
    for part, rows, meanings in (("train", 42061, 4862), ("dev", 4672, 547), ("test", 4693, 630)):
        found = [row["mr"] for row in e2e(archive, part)]
        distinct[part] = dict.fromkeys(found)
        assert (len(found), len(distinct[part])) == (rows, meanings)
    assert not (distinct["train"].keys() & distinct["test"].keys())
    prompts = "".join(f"{meaning_prompt(mr)}\n" for mr in distinct["test"]).encode()
    assert hashlib.sha256(prompts).hexdigest() == "ed1f41797e4799b6181173a4835a9957a32067cd41d50b63fae0fa3c31e6ec1b"
    spaced = prompts.decode().replace("£", "£ ").replace("-", " - ").encode()
    assert hashlib.sha256(spaced).hexdigest() == "f2ff271068802f0d39d0b05ed682683e052b53ff659ffb14925242a52eb7aad4"


def test_the_real_sst2(benchmarks: Path) -> None:
    phrases = list(glue(str(benchmarks / "sst2" / "glue")))
    assert Counter(row["label"] for row in phrases) == {"1": 37569, "0": 29780}
    assert len({row["text"] for row in phrases}) == 66978
    for part, positive, negative in (("train", 3610, 3310), ("dev", 444, 428), ("test", 909, 912)):
        labels = Counter(row["label"] for row in glue(str(benchmarks / "sst2" / "sentences"), "sst2-sentences", part))
        assert labels == {"1": positive, "0": negative}


def test_the_real_wikitext(benchmarks: Path) -> None:
    archive = str(benchmarks / "wikitext2" / "wikitext-2-v1.zip")
    for half, count in (("all", 600), ("public", 284), ("private", 316)):
        assert len({row["article"] for row in wikitext(archive, half=half)}) == count
    assert len({row["article"] for row in wikitext(archive, "test")}) == 60


def test_a_unit_of_dart_is_a_set_of_triples_in_any_order(tmp_path: Path) -> None:
    triples = [["Bo", "IS", "red"], ["Bo", "HAS AGE", "7"]]
    entries = [{"tripleset": one, "annotations": [{"source": "a", "text": "Bo."}]} for one in (triples, triples[::-1])]
    (tmp_path / "dart-v1.1.1-full-train.json").write_text(json.dumps(entries))
    assert len({row["entry"] for row in dart(str(tmp_path))}) == 1


def test_two_articles_of_one_heading_are_halved_each_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_files, "KNOWN", {})
    texts = [f" \n = Cats = \n \n Cat number {number} . \n \n" for number in range(40)]
    (tmp_path / "wiki.train.tokens").write_text("".join(texts))
    sides = [{row["article"] for row in wikitext(str(tmp_path), half=half)} for half in ("public", "private")]
    assert all(len(side) > 5 for side in sides)
    assert len(sides[0] | sides[1]) == 40


def test_a_folder_of_several_tasks_is_refused(tmp_path: Path) -> None:
    for task in ("SST-2", "QNLI"):
        (tmp_path / task).mkdir()
        (tmp_path / task / "train.tsv").write_text("sentence\tlabel\nold cat\t0\n")
    with pytest.raises(DataError, match=r"holds 2 files train\.tsv.*Fix: give the folder of one of them"):
        list(glue(str(tmp_path)))
    assert len(list(glue(str(tmp_path / "SST-2")))) == 1
