"""Facts of the real benchmark files and of GPT-2's tokenizer (spec benchmarks.md 6); skipped where they are absent."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dptune.core.errors import ConfigError
from dptune.generation.text_metrics import score
from dptune.records.benchmarks import e2e, glue
from dptune.records.published_files import read_published
from dptune.records.reading.record import PromptTarget, Record
from dptune.records.wikitext import articles
from dptune.training.data import Tokens, plain_ids
from dptune.training.models.classifier import word_tokens
from dptune.training.tokens.encoding import tokens_of

PROMPT = (
    "name : Ada | Type : pub | price : £20-25 | customer rating : 3 out of 5 | area : riverside | family friendly : no"
    " | near : The Bay"
)
END = 50256


@pytest.fixture(scope="session")
def gpt2(benchmarks: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """GPT-2's tokenizer."""
    files, folder = benchmarks / "gpt2_bpe", tmp_path_factory.mktemp("gpt2")
    if not files.is_dir():
        pytest.skip("the folder has no gpt2_bpe")
    shutil.copy(files / "encoder.json", folder / "vocab.json")
    shutil.copy(files / "vocab.bpe", folder / "merges.txt")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return AutoTokenizer.from_pretrained(str(folder))


def encoded(rows: Any, tokenizer: Any) -> Tokens:
    pairs = [PromptTarget(row["prompt"], row["completion"]) for row in rows]
    return tokens_of([Record(pair, 0, "file", row) for row, pair in enumerate(pairs)], tokenizer, 1024)


def lengths(tokens: Tokens) -> tuple[int, int, int]:
    """Tokens of all rows, those that count, and the longest row's."""
    return (
        sum(len(row) for row in tokens.rows),
        sum(int((row >= 0).sum()) for row in tokens.rows),
        max(len(row) for row in tokens.rows),
    )


def test_gpt2_tokens_of_a_prompt_and_its_target(gpt2: Any) -> None:
    """Facts 4 and 5: the plain template's ids, and which have a loss."""
    assert (len(gpt2), gpt2.encode("<|endoftext|>")) == (50257, [END])
    prompt = gpt2.encode(PROMPT)
    assert (len(prompt), prompt[:3], prompt[-2:]) == (37, [3672, 1058, 47395], [383, 4696])
    (plain,) = encoded([{"prompt": f"{PROMPT}<|endoftext|>", "completion": " Ada is a pub."}], gpt2).rows
    ids = plain_ids(plain).tolist()
    assert (len(ids), ids[:37], ids[37]) == (44, prompt, END)
    assert plain_ids(plain[plain >= 0]).tolist() == [47395, 318, 257, 2240, 13, END]
    published = {"prompt": f" {PROMPT} <|endoftext|>", "completion": " Ada is a pub. "}
    (spaced,) = encoded([published], gpt2).rows
    assert plain_ids(spaced[spaced >= 0]).tolist() == [47395, 318, 257, 2240, 13, 220, END]


def test_label_words_of_gpt2(gpt2: Any) -> None:
    """Fact 11: a word is one token with its space, and without it refused."""
    words = {" great": 1049, " terrible": 7818, " yes": 3763, " no": 645, " maybe": 3863}
    assert word_tokens(list(words), gpt2) == list(words.values())
    with pytest.raises(ConfigError, match="terrible"):
        word_tokens(["terrible", " great"], gpt2)


@pytest.mark.slow
def test_e2e_in_gpt2_tokens(benchmarks: Path, gpt2: Any) -> None:
    """Fact 6."""
    archive = str(benchmarks / "e2e" / "e2e-dataset.zip")
    assert lengths(encoded(e2e(archive), gpt2)) == (2240961, 1042610, 113)
    assert lengths(encoded(e2e(archive, template="published"), gpt2)) == (2325083, 1084671, 115)
    assert lengths(encoded(e2e(archive, "test"), gpt2))[:2] == (313984, 143479)


def test_parts_of_e2e_share_no_meaning(benchmarks: Path) -> None:
    """Fact 2."""
    archive = str(benchmarks / "e2e" / "e2e-dataset.zip")
    parts = {part: {row["mr"] for row in e2e(archive, part)} for part in ("train", "dev", "test")}
    assert not any(parts[one] & parts[other] for one, other in combinations(parts, 2))
    references = defaultdict(list)
    for row in e2e(archive, "test"):
        references[row["mr"]].append(row["completion"])
    assert sum(len(own) > 1 for own in references.values()) == 616


def test_words_of_wikitext(benchmarks: Path) -> None:
    """Fact 7."""
    text = read_published(str(benchmarks / "wikitext2" / "wikitext-2-v1.zip"), "wiki.train.tokens")
    words = text.split()
    assert (text.count("\n"), len(words), len(set(words))) == (36718, 2051910, 33277)
    assert (words.count("<unk>"), words.count("@-@")) == (54625, 16906)
    headings = re.findall(r"^ = [^=].*[^=] = \n", text, re.MULTILINE)
    assert (len(articles(text)), len(headings)) == (600, 629)


def test_the_dev_sentences_of_sst2_are_glues_and_trained_on_nowhere(benchmarks: Path) -> None:
    """Fact 8."""
    sentences = list(glue(str(benchmarks / "sst2" / "sentences"), "sst2-sentences", "dev"))
    dev = list(glue(str(benchmarks / "sst2" / "glue"), part="dev"))
    assert [row["label"] for row in sentences] == [row["label"] for row in dev]
    assert not {row["text"] for row in glue(str(benchmarks / "sst2" / "glue"))} & {row["text"] for row in dev}


def test_scores_of_e2e_without_any_training(benchmarks: Path) -> None:
    """Fact 10: one sentence for all, a template of slots, and each first reference against the others."""
    pytest.importorskip("sacrebleu")
    constant, filled, human = _untrained(benchmarks, ["bleu_e2e", "nist_e2e", "rouge_l_13a", "cider_13a"])
    assert constant == pytest.approx([8.806418, 0.031374, 0.304691, 0.025626], abs=1e-5)
    assert filled == pytest.approx([43.337213, 1.755189, 0.631159, 1.015766], abs=1e-5)
    assert human == pytest.approx([60.456191, 8.898831, 0.637495, 1.847436], abs=1e-5)


@pytest.mark.long
def test_scores_of_e2e_by_the_programs_of_its_challenge(benchmarks: Path) -> None:
    """Fact 10 on the PTB tokenizer's words: METEOR, ROUGE-L, CIDEr."""
    pytest.importorskip("pycocoevalcap")
    if shutil.which("java") is None:
        pytest.skip("METEOR and the PTB tokenizer need Java")
    constant, filled, human = _untrained(benchmarks, ["meteor", "rouge_l_ptb", "cider_ptb"])
    assert constant == pytest.approx([0.082881, 0.303623, 0.025203], abs=1e-5)
    assert filled == pytest.approx([0.316247, 0.629309, 1.000873], abs=1e-5)
    assert human == pytest.approx([0.456309, 0.638113, 1.857224], abs=1e-5)


def _untrained(benchmarks: Path, names: list[str]) -> list[list[float]]:
    """Scores of one sentence for all, of a template of slots, and of each first reference against the others."""
    references: dict[str, list[str]] = defaultdict(list)
    for row in e2e(str(benchmarks / "e2e" / "e2e-dataset.zip"), "test"):
        references[row["mr"]].append(" ".join(row["completion"].split()))
    several = [own for own in references.values() if len(own) > 1]
    pairs = [
        (["There is a restaurant in the riverside area."] * 630, list(references.values())),
        ([_template(mr) for mr in references], list(references.values())),
        ([own[0] for own in several], [own[1:] for own in several]),
    ]
    return [[found.value for found in score(*pair, names).values()] for pair in pairs]


def _template(mr: str) -> str:
    """``NAME is a FOOD TYPE in the AREA area near NEAR.``, without what a meaning representation does not say."""
    slots = dict(re.findall(r"(\w[\w ]*)\[([^]]*)\]", mr))
    place = f" in the {slots['area']} area" if "area" in slots else ""
    near = f" near {slots['near']}" if "near" in slots else ""
    text = f"{slots['name']} is a {slots.get('food', '')} {slots.get('eatType', 'restaurant')}{place}{near}."
    return text.replace("  ", " ")
