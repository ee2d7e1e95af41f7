"""Eighteen parameter files that once passed the schema and then gave tracebacks."""

import re
import sys
from pathlib import Path

base, out = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
out.mkdir(parents=True, exist_ok=True)


def change(name: str, *pairs: tuple[str, str]) -> None:
    """Write the file with the first match of each regular expression replaced."""
    text = base
    for old, new in pairs:
        text, count = re.subn(old, lambda _, new=new: new, text, count=1)
        if not count:
            sys.exit(f"{name}: {old!r} is not in the file")
    (out / f"{name}.yaml").write_text(text)


change("01-seed-minus-1", (r"seeds: \[0\]", "seeds: [-1]"))
change("02-seed-1e30", (r"seeds: \[0\]", "seeds: [1000000000000000000000000000000]"))
change("03-split_seed-minus-1", ("split_seed: 42", "split_seed: -1"))
change("04-data_seed-1e30", ("data_seed: 101", "data_seed: 1.0e+30"))
change("05-heads-7-of-width-64", ("width: 16", "width: 64"), ("heads: 1", "heads: 7"))
change("06-epochs-1e308", ("epochs: 4\n", "epochs: 1.0e+308\n"))
change("07-max_length-1e9", ("max_length: 64", "max_length: 1000000000"))
change("08-rank-1e6", ("rank: 2", "rank: 1000000"))
change("09-target_modules-nosuch", (r"lora: \{rank: 2", "lora: {target_modules: [nosuch], rank: 2"))
change("10-source-etc", ("source: data/models/public", "source: /etc"))
change("11-source-empty", ("source: data/models/public", "source: ''"))
change("12-NUL-in-path", ("  path:", '  path: "a\\0b"'))
(out / "13-yaml-nested-5000.yaml").write_text("a: " + "[" * 5000 + "]" * 5000 + "\n")
change("14-learning_rate-nan", (r"learning_rate: .*\n  warmup_steps", "learning_rate: .nan\n  warmup_steps"))
change("15-batch-1e308", ("expected_batch_size: 16", "expected_batch_size: 1.0e+308"))
change("16-delta-0", (r"delta: 1.0e-5", "delta: 0"))
change("17-epsilons-inf", (r"epsilons: \[2\]", "epsilons: [.inf]"))
change("18-device-cuda-99", (r'devices: \["cpu"\]', 'devices: ["cuda:99"]'))
