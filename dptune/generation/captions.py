"""METEOR 1.5, and ROUGE-L and CIDEr on the words that coco-caption takes: of pycocoevalcap, which needs Java.

Its jars hold METEOR (Denkowski and Lavie 2014) and Stanford's PTB tokenizer. They are started here and not by the
package's own wrappers: those write the texts to a file beside the jar, and read them by the machine's own encoding.
All of it is for sentences: METEOR's time, and ROUGE-L's memory, grow with the square of a text's length.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError
from dptune.core.progress import Meter

#: The command that starts Java, with UTF-8 for texts and a decimal point in numbers on every machine.
_JAVA = ("java", "-Dfile.encoding=UTF-8", "-Duser.language=en", "-Duser.country=US")
_FIX = "pip install 'dptune[meteor]' and install a Java runtime, or leave this metric out"
#: What separates METEOR's texts; the tokenizer leaves it within markup.
_BETWEEN = "|||"
#: Texts by item, as coco-caption's classes take them.
_Items = dict[int, list[str]]


def check() -> None:
    """Raises: ConfigError if the package is not there, or no Java that runs."""
    _package("meteor")
    java = shutil.which(_JAVA[0])
    if java is None:
        raise ConfigError("metrics", "meteor, rouge_l_ptb and cider_ptb need Java, which is not on the path", fix=_FIX)
    if not _runs(java):
        raise ConfigError("metrics", "the java on the path does not run (`java -version` fails)", fix=_FIX)


@lru_cache(maxsize=4)
def _runs(java: str) -> bool:
    return subprocess.run([java, "-version"], capture_output=True, check=False).returncode == 0


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
    with _meteor() as process, Meter("METEOR", total=len(outputs), unit="texts") as meter:
        try:
            # A line for each item, answered by its statistics; then all of these in one line, answered by each item's
            # score and that of all.
            counts = []
            for item in found:
                texts = (text.replace(_BETWEEN, "| | |") for text in (*answers[item], *found[item]))
                counts.append(_ask(process, "SCORE", *texts))
                meter.update(len(counts))
            _ask(process, "EVAL", *counts)
            for _ in counts[1:]:
                process.stdout.readline()
            return float(process.stdout.readline())
        except (BrokenPipeError, ValueError):
            said = f" ({why})" if (why := _complaint(process)) else ""
            raise ConfigError("metrics", f"METEOR's Java program returned no score{said}", fix=_FIX) from None


@contextmanager
def _meteor() -> Iterator[Any]:
    """The running program."""
    package = _package("meteor")
    folder = Path(package.__file__).parent
    # Its table is named, for the program does not find it by itself below a folder whose name has a space.
    table = str(folder / "data" / "paraphrase-en.gz")
    options = ["-", "-", "-stdio", "-l", "en", "-norm", "-a", table]
    command = [*_JAVA, "-Xmx2G", "-jar", str(folder / package.METEOR_JAR), *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8") as process:
        try:
            yield process
        finally:
            process.kill()
            with suppress(BrokenPipeError):  # of what it never read
                process.stdin.close()  # type: ignore[union-attr]


def _ask(process: Any, *parts: str) -> str:
    process.stdin.write(f" {_BETWEEN} ".join(parts) + "\n")
    process.stdin.flush()
    return str(process.stdout.readline().strip())


def _complaint(process: Any) -> str:
    """The kind of error that the program ended with; not its message, which may quote a text."""
    process.kill()
    found = re.search(r"[\w.]+(?:Exception|Error)\b", process.stderr.read())
    return found[0] if found else ""


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
        problem = f"Stanford's tokenizer ended with status {run.returncode}, {len(found)} lines of {len(texts)} texts"
        raise ConfigError("metrics", problem, fix=_FIX)
    # A token may hold a no-break space, so that only a space parts two.
    return [" ".join(word for word in line.rstrip().split(" ") if word not in package.PUNCTUATIONS) for line in found]
