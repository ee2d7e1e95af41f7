"""Metrics equal the field's reference implementations on fixed strings."""

from __future__ import annotations

import sys

import pytest

from dptune.core.errors import ConfigError
from dptune.generation.text_metrics import METRICS, USUAL, score

OUTPUTS = [
    "The Eagle is a cheap coffee shop near Burger King.",
    "Zizzi is a family-friendly pub.",
    "There is a place called Cotto in the city centre that costs £20-25.",
]
REFERENCES = [
    [
        "The Eagle is a low-priced coffee shop near Burger King.",
        "Near Burger King there is a cheap coffee shop, The Eagle.",
    ],
    ["Zizzi is a pub that is family friendly.", "The pub Zizzi is family-friendly.", "A kid friendly pub is Zizzi."],
    ["Cotto is located in the city centre; its price range is £20-25."],
]


def value(name: str, outputs: list[str] = OUTPUTS, references: list[list[str]] = REFERENCES) -> float:
    pytest.importorskip("sacrebleu")
    return score(outputs, references, [name])[name].value


#: Values that other implementations give for the strings above. bleu and chrf: sacrebleu 2.6.0's own functions. The
#: rest: the E2E challenge's scripts (e2e-metrics: mteval-v13a, coco-caption), the last two on 13a tokens.
REFERENCE_VALUES = {
    "bleu": 53.971069,
    "chrf": 63.276310,
    "bleu_e2e": 53.971069,
    "nist_e2e": 4.385453,
    "rouge_l_13a": 0.696833,
    "cider_13a": 3.817775,
}


@pytest.mark.parametrize("name", REFERENCE_VALUES)
def test_equal_to_the_reference_implementations(name: str) -> None:
    assert value(name) == pytest.approx(REFERENCE_VALUES[name], abs=1e-6)


def test_each_item() -> None:
    pytest.importorskip("sacrebleu")
    from dptune.generation.text_metrics import cider, rouge_l

    assert rouge_l(OUTPUTS, REFERENCES) == pytest.approx([0.9, 0.668493, 0.522005], abs=1e-6)
    assert cider(OUTPUTS, REFERENCES) == pytest.approx([6.277021, 2.293005, 2.883298], abs=1e-6)


@pytest.mark.parametrize(("name", "expected"), [("bleu_e2e", 93.060486), ("nist_e2e", 4.499377), ("cider_13a", 0.0)])
def test_one_item_alone(name: str, expected: float) -> None:
    assert value(name, OUTPUTS[:1], REFERENCES[:1]) == pytest.approx(expected, abs=1e-6)


def test_other_implementations_give_other_numbers() -> None:
    """The names say which is which."""
    pytest.importorskip("rouge_score")
    assert value("rouge_l_google") == pytest.approx(0.696649, abs=1e-6)
    loud = [output.upper() for output in OUTPUTS]
    assert value("bleu_e2e", loud) == pytest.approx(value("bleu_e2e"))
    assert value("bleu", loud) < 20


def test_perfect_and_empty_outputs() -> None:
    perfect = [own[0] for own in REFERENCES]
    for name, best in (("bleu_e2e", 100), ("chrf", 100), ("rouge_l_13a", 1)):
        assert value(name, perfect) == pytest.approx(best)
        assert value(name, ["", "", ""]) == 0
    assert value("nist_e2e", ["", "", ""]) == 0
    assert value("cider_13a", ["", "", ""]) == 0
    assert value("cider_13a", perfect) > value("cider_13a")


def test_order_of_items_and_references_does_not_matter() -> None:
    for name in ("bleu_e2e", "nist_e2e", "rouge_l_13a", "cider_13a", "chrf"):
        turned = value(name, OUTPUTS[::-1], [own[::-1] for own in REFERENCES[::-1]])
        assert turned == pytest.approx(value(name))


def test_signatures_say_which_implementation_it_is() -> None:
    pytest.importorskip("rouge_score")
    found = score(OUTPUTS, REFERENCES)
    assert tuple(found) == USUAL
    assert set(METRICS) - set(USUAL) == {"meteor", "rouge_l_ptb", "cider_ptb"}, "Java is asked for by name alone"
    assert "nrefs:var|case:lc|eff:no|tok:13a|smooth:exp|version:" in found["bleu_e2e"].signature
    assert "case:mixed" in found["bleu"].signature
    for name in ("nist_e2e", "rouge_l_13a", "cider_13a"):
        assert "tok:13a|case:lc|sacrebleu:" in found[name].signature
    assert len({one.signature for one in found.values()}) == len(found)


def test_wrong_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="3 outputs and references for 2"):
        score(OUTPUTS, REFERENCES[:2])
    with pytest.raises(ConfigError, match="output 2 has none"):
        score(OUTPUTS[:2], [REFERENCES[0], []])
    with pytest.raises(ConfigError, match=r"'bertscore' is unknown\. Fix: use some of bleu_e2e.*mauve"):
        score(OUTPUTS, REFERENCES, ["bertscore"])
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ConfigError, match=r"pip install 'dptune\[metrics\]'"):
        score(OUTPUTS, REFERENCES, ["bleu_e2e"])
