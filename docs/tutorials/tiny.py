"""Makes what the tutorials use, in the current folder, in seconds: a tiny public model and SYNTHETIC records.

python docs/tutorials/tiny.py      # writes tiny-model/, complaints.csv, letters.txt and public.csv

A bank's customers complain (private); so do those of a shop, in public. The model is trained on the shop's alone.
"""

from __future__ import annotations

import csv
from pathlib import Path
from random import Random

from dptune.training.models.pretrain import Pretraining, pretrain

_BANK = ["the card payment", "my loan", "the transfer", "my statement", "the mortgage", "my account"]
_SHOP = ["the parcel", "my order", "the refund", "my invoice", "the delivery", "my voucher"]
_PROBLEMS = ["was charged twice", "never arrived", "was refused without a reason", "took three weeks", "was wrong"]
_WISHES = ["I want a refund.", "Please call me back.", "Please close the case.", "Nobody answers my letters."]
_PLAN = Pretraining(
    vocabulary=384, layers=2, width=32, heads=2, max_length=24, epochs=3, batch_size=32, learning_rate=0.01
)


def complaints(about: list[str], count: int, seed: int) -> list[str]:
    """Texts of two sentences each."""
    draw = Random(seed)
    return [f"{draw.choice(about).capitalize()} {draw.choice(_PROBLEMS)}. {draw.choice(_WISHES)}" for _ in range(count)]


def write_csv(path: Path, texts: list[str], customers: int) -> None:
    """Write a table with the columns customer_id and text; customers have different numbers of complaints."""
    draw = Random(len(texts))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["customer_id", "text"])
        writer.writerows([f"c{draw.randrange(customers)}", text] for text in texts)


def main() -> None:
    """Write all files, and leave a model alone that is there already."""
    public = complaints(_SHOP, 1000, seed=1)
    write_csv(Path("complaints.csv"), complaints(_BANK, 800, seed=2), customers=400)
    write_csv(Path("public.csv"), public[:300], customers=100)
    Path("letters.txt").write_text("\n\n".join(complaints(_BANK, 500, seed=3)) + "\n", encoding="utf-8")
    if not Path("tiny-model").exists():
        pretrain(public, complaints(_SHOP, 100, seed=4), _PLAN, Path("tiny-model"))
    print("wrote tiny-model/, complaints.csv, letters.txt and public.csv (SYNTHETIC)")


if __name__ == "__main__":
    main()
