"""METEOR 1.5, and ROUGE-L and CIDEr on the words that coco-caption takes: of pycocoevalcap, which needs Java.

Its jars hold METEOR (Denkowski and Lavie 2014) and Stanford's PTB tokenizer. They are started here and not by the
package's own wrappers: those write the texts to a file beside the jar, and read them by the machine's own encoding.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from dptune.errors import ConfigError

_JAVA = ("java", "-Dfile.encoding=UTF-8")
_FIX = "pip install 'dptune[meteor]' and install a Java runtime, or leave this metric out"
#: Texts by item, as coco-caption's classes take them.
_Items = dict[int, list[str]]


def check() -> None:
    """Raises: ConfigError if the package or Java is not there."""
    _package("meteor")
    if shutil.which("java") is None:
        raise ConfigError("metrics", "meteor, rouge_l_ptb and cider_ptb need Java, which is not on the path", fix=_FIX)


def _package(part: str) -> Any:
    try:
        from pycocoevalcap.cider import cider
        from pycocoevalcap.meteor import meteor
        from pycocoevalcap.rouge import rouge
        from pycocoevalcap.tokenizer import ptbtokenizer
    except ImportError:
        problem = "meteor, rouge_l_ptb and cider_ptb need pycocoevalcap"
        raise ConfigError("metrics", problem, fix=_FIX) from None
    return {"cider": cider, "meteor": meteor, "rouge": rouge, "tokenizer": ptbtokenizer}[part]


def signature() -> str:
    """What a signature says about these words and programs."""
    return f"pycocoevalcap {version('pycocoevalcap')}|tok:ptb|case:lc"


def rouge_l(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """coco-caption's ROUGE-L, the mean over outputs."""
    answers, found = _spoken(outputs, references)
    return float(_package("rouge").Rouge().compute_score(answers, found)[0])


def cider(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """coco-caption's CIDEr-D of all outputs together."""
    answers, found = _spoken(outputs, references)
    return float(_package("cider").Cider().compute_score(answers, found)[0])


def meteor(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """METEOR 1.5 of all outputs together, English, as coco-caption calls it."""
    answers, found = _spoken(outputs, references)
    package = _package("meteor")
    jar = Path(package.__file__).parent / package.METEOR_JAR
    command = [*_JAVA, "-Xmx2G", "-jar", str(jar), "-", "-", "-stdio", "-l", "en", "-norm"]
    # A line for each item, answered by its statistics; then all of these in one line, answered by each item's score
    # and that of all. The tokenizer leaves no "|||" in a text.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8"
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            counts = [
                _ask(process.stdin, process.stdout, " ||| ".join(("SCORE", *answers[item], *found[item])))
                for item in found
            ]
            _ask(process.stdin, process.stdout, " ||| ".join(("EVAL", *counts)))
            for _ in counts[1:]:
                process.stdout.readline()
            return float(process.stdout.readline())
        except (BrokenPipeError, ValueError):
            raise ConfigError("metrics", "METEOR's Java program gave no score", fix=_FIX) from None
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # of what it never read
                process.stdin.close()


def _ask(writing: IO[str], reading: IO[str], line: str) -> str:
    writing.write(f"{line}\n")
    writing.flush()
    return reading.readline().strip()


def _spoken(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[_Items, _Items]:
    """References and outputs by item, as PTB tokens in lower case without punctuation."""
    words = iter(_tokenized([*outputs, *(one for own in references for one in own)]))
    found = {item: [next(words)] for item in range(len(outputs))}
    return {item: [next(words) for _ in own] for item, own in enumerate(references)}, found


def _tokenized(texts: Sequence[str]) -> list[str]:
    check()
    package = _package("tokenizer")
    jar = Path(package.__file__).parent / package.STANFORD_CORENLP_3_4_1_JAR
    command = [*_JAVA, "-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"]
    lines = "".join(" ".join(text.split()) + "\n" for text in texts)
    run = subprocess.run(command, input=lines, capture_output=True, text=True, encoding="utf-8", check=False)
    found = run.stdout.removesuffix("\n").split("\n")
    if run.returncode or len(found) != len(texts):
        problem = f"Stanford's tokenizer gave {len(found)} lines for {len(texts)} texts"
        raise ConfigError("metrics", problem, fix=_FIX)
    return [" ".join(word for word in line.split() if word not in package.PUNCTUATIONS) for line in found]
