"""DVC stage: check models and devices before anything is trained, without records or weights.

python -m tasks.experiment.checks
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from dptune.core.errors import ConfigError, DataError
from dptune.core.files import write_json
from dptune.mechanisms.agents.rl import idle_agent
from dptune.mechanisms.registry import build, lacks_noise
from dptune.records.canaries import POOL
from dptune.records.catalogue import find_source
from tasks.paths import CHECKED, EVAL, NEEDED, PUBLIC_MODEL, PUBLIC_VALIDATION, TRAIN
from tasks.settings.data import NARRATED, Data
from tasks.settings.experiment import Model, Task
from tasks.settings.mechanisms import epsilons_of, learning_rate_of, options_on, rule_of, trained_of
from tasks.settings.params import Settings, load_settings
from tasks.stage import run_stage

_log = logging.getLogger(__name__)
#: Number of canaries whose lengths are looked at.
_CANARIES = 64
_MADE_BY = {TRAIN: "canaries", EVAL: "split", PUBLIC_VALIDATION: "validation"}


def check_inputs() -> None:
    """Raise DataError for a file of records that no stage made yet; the message names the stage."""
    for file, stage in _MADE_BY.items():
        if not file.is_file():
            problem, fix = f"is missing: the stage {stage} makes it", "run `make repro`, or `dvc repro experiment`"
            raise DataError(problem, fix=fix, file=file)


def check_source(data: Data) -> None:
    """Look at the first record where it comes from, not at a copy that an earlier run made of it.

    Raises: DataError if it cannot be had.
    """
    find_source(data.source).look(data.settings_of_source())


def check_models(settings: Settings) -> None:
    """Check every base model's configuration, tokenizer, target modules and context length, and every device.

    No weights are read. The model that the pipeline trains itself is judged by its settings: it may not exist yet.

    Raises: ConfigError naming the field of params.yaml.
    """
    _check_devices(settings)
    _check_metrics(settings.task)
    _check_public_texts(settings)
    _check_samples(settings)
    for name, model in settings.experiment.models.items():
        try:
            own = _is_own(model)
            positions = _positions_of_own(settings) if own else _positions(model, settings)
        except ConfigError as error:
            raise ConfigError(_field_of_model(error.field, name), error.problem, fix=error.fix) from None
        longest = settings.training.max_length
        if positions is not None and positions < longest:
            problem = f"{longest} exceeds the {positions} positions of experiment.models.{name}"
            raise ConfigError("training.max_length", problem, fix="lower it" + (", or raise pretrain's" if own else ""))


def _check_metrics(task: Task) -> None:
    """Raise ConfigError for a metric that is unknown, whose library or Java is not installed, or that needs a model."""
    from dptune.generation.text_metrics import MAUVE, check_names

    if not task.inputs:
        return
    if MAUVE in task.metrics:
        problem = "mauve needs a model that reads the texts, and cells have none for it"
        raise ConfigError("task.metrics", problem, fix="leave it out here; `dptune score` computes it")
    try:
        check_names(task.metrics)
    except ConfigError as error:
        raise ConfigError("task.metrics", error.problem, fix=error.fix.removesuffix(f", {MAUVE}")) from None


def _check_public_texts(settings: Settings) -> None:
    """Raise ConfigError if the pipeline's own model would be trained on records that the runs protect."""
    data, pretrain = settings.data, settings.pretrain
    if pretrain.source == "narratives" or not _needs_own(settings):
        return
    protects = data.source == "wikitext" and data.options.get("part", "train") == "train"
    if protects and (pretrain.half, data.options.get("half", "all")) != ("public", "private"):
        problem = "does not keep the public model, which pretrain.source trains on WikiText-2, from protected articles"
        raise ConfigError("data.options.half", problem, fix="use private here, and public in pretrain.half")


def _is_own(model: Model) -> bool:
    """Whether it is the model that the pipeline trains itself."""
    return Path(model.source).resolve() == PUBLIC_MODEL.resolve()


def _needs_own(settings: Settings) -> bool:
    """Whether a model of the experiment is the pipeline's own, or audit canaries say what that model writes."""
    return settings.canaries.says_samples or any(map(_is_own, settings.experiment.models.values()))


def _check_samples(settings: Settings) -> None:
    """Raise ConfigError if audit canaries are to say samples of a model that writes none, or more than are kept."""
    if not settings.canaries.says_samples:
        return
    if settings.pretrain.shape != "gpt2":
        problem = f"samples are texts of the public model, which pretrain.shape {settings.pretrain.shape} cannot write"
        raise ConfigError("canaries.audit_kind", problem, fix="use words")
    if settings.canaries.audit > POOL:
        problem = f"{settings.canaries.audit} exceeds the {POOL} samples of the public model that are kept"
        raise ConfigError("canaries.audit", problem, fix=f"use {POOL} or fewer, or canaries.audit_kind: words")


def _field_of_model(field: str, model: str) -> str:
    """The field of params.yaml that sets ``field`` of the model, for messages."""
    if field.startswith(("lora.", "training.")):
        return f"{field} (on experiment.models.{model})"
    return f"experiment.models.{model}.{field.removeprefix('model.')}"


def _check_devices(settings: Settings) -> None:
    from dptune.training.models.model import check_device

    devices = settings.experiment.devices
    if devices == "auto" or "://" in settings.experiment.runner:  # a cluster's devices are not this machine's
        return
    for device in devices:
        try:
            check_device(device)
        except ConfigError as error:
            raise ConfigError("experiment.devices", error.problem, fix=f"{error.fix}, or auto") from None


def _positions(model: Model, settings: Settings) -> int | None:
    from tasks.experiment.preparation import job_settings, open_model

    asked = job_settings(model, settings.task, settings.lora, settings.training, "cpu")
    base = open_model(model, asked)
    _check_template(settings, base.tokenizer)
    _check_canaries(settings, base.tokenizer)
    return base.positions


def _check_template(settings: Settings, tokenizer: Any) -> None:
    """Raise ConfigError for chats that the tokenizer cannot render."""
    if settings.data.form == "messages" and not tokenizer.chat_template:
        problem = "the tokenizer has no chat template, and the records are chats"
        raise ConfigError(
            "model.source", problem, fix="use an instruction-tuned model, or give prompts and completions"
        )


def _check_canaries(settings: Settings, tokenizer: Any) -> None:
    """Raise ConfigError if every canary would be cut before its secret: all attacks on canaries would be in vain."""
    from dptune.audit.text.likelihood import canary_passage, passage_ids
    from dptune.records.canaries import ALPHABET, SECRET_LENGTH
    from dptune.records.diabetes.narratives import public_texts

    canaries, form, longest = settings.canaries, settings.data.form, settings.training.max_length
    coded = canaries.audit if canaries.audit_kind == "code" else 0  # others are short, and begin with the text
    count = min(_CANARIES, canaries.extraction * canaries.repeats + coded)
    if not count or form is None:
        return
    source, secret = settings.data.source, ALPHABET[:SECRET_LENGTH]
    own = source not in NARRATED
    texts = public_texts(count, canaries.carrier_seed, "canaries", "text" if own else source, settings.data.template)
    lengths = list(map(len, passage_ids(tokenizer, [canary_passage(text, secret, form, tokenizer) for text in texts])))
    if min(lengths) >= longest:
        problem = f"{longest} cuts every canary before its secret, so that attacks on them would show nothing"
        fix = f"use {max(lengths) + SECRET_LENGTH} or more, or set canaries.extraction and canaries.audit to 0"
        raise ConfigError("training.max_length", problem, fix=fix)


def _positions_of_own(settings: Settings) -> int:
    from dptune.training.models.own_weights import start_training
    from dptune.training.models.pretrain import without_weights
    from dptune.training.models.trained_layers import lora_targets

    shape, task = settings.pretrain.shape, settings.task
    if shape == "roberta" and (task.words or not task.classifies):
        problem = "is an encoder, which sees the tokens that it is to predict"
        raise ConfigError("pretrain.shape", problem, fix="use gpt2, or task.kind: classify without words")
    if shape != "roberta":
        start_training(without_weights(settings.pretrain), settings.training.trained, settings.lora, 0)
    elif settings.training.train == "lora":
        lora_targets(without_weights(settings.pretrain), settings.lora)
    return settings.pretrain.max_length + (2 if shape == "roberta" else 0)


def warn_of_idle_agents(settings: Settings) -> None:
    """Log a warning for each mechanism of the experiment whose agent learns nothing even if every record trains.

    Only generated records are counted before they are there. Each cell warns before its first release, whatever its
    records are.
    """
    if settings.data.source != "synthetic":
        return
    canaries, training, found = settings.canaries, settings.training, dict[str, None]()
    planted = canaries.extraction * canaries.repeats + canaries.audit + canaries.crafted
    batches = math.ceil((settings.data.synthetic.encounters + planted) / training.expected_batch_size)
    for label in settings.experiment.mechanisms:
        for model in settings.experiment.models:
            options = options_on(settings.mechanisms[label], model)
            options.pop("accounting", None)
            learning_rate_of(options), rule_of(options), trained_of(options), epsilons_of(options)
            noise = {"noise_multiplier": 1.0} if lacks_noise(label, options) else {}
            if warning := idle_agent(build(label, noise | options), math.ceil(training.epochs * batches)):
                found[warning] = None
    for warning in found:
        _log.warning("%s", warning)


def warn_of_few_canaries(settings: Settings) -> None:
    """Log a warning for each budget of the experiment that the coins of its canaries cannot refute in the stage audit.

    Noise is not calibrated yet, so the runs' curves are taken as Gaussian. Runs of sampled steps need fewer coins: of
    an epsilon of 8, 40 to 75 % (docs/findings/audits.md).
    """
    from dptune.audit.refutation import coins_too_few, gaussian_certificate
    from tasks.audit.registry import comparisons

    experiment, canaries = settings.experiment, settings.canaries
    lists = experiment.models, experiment.mechanisms, experiment.epsilons, experiment.seeds
    cells = math.prod(map(len, lists))  # at most: one without noise has no budget
    sure = 1 - settings.audit.false_alarms / (max(1, cells) * comparisons())
    for setting, count in (("canaries.audit", canaries.audit), ("canaries.crafted", canaries.crafted)):
        for epsilon in experiment.epsilons if count else ():
            if weak := coins_too_few(count, gaussian_certificate(epsilon, experiment.delta), sure):
                _log.warning("%s: %s. If steps are sampled, half of that may be enough", setting, weak)


def check() -> None:
    """Check the settings, then write two files: one whose content never changes, so that later stages do not run again,
    and one that changes only when the pipeline's own model becomes needed or needless.
    """
    settings = load_settings()
    check_models(settings)
    warn_of_idle_agents(settings)
    warn_of_few_canaries(settings)
    write_json(CHECKED, {"models": "checked", "devices": "checked"})
    write_json(NEEDED, {str(PUBLIC_MODEL): _needs_own(settings)})


if __name__ == "__main__":
    run_stage(check)
