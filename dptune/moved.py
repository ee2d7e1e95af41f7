"""Moved modules: names that modules had in version 0.1 go on working for plug-ins and scripts, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

#: Packages, with everything in them.
_PACKAGES = {"dptune.corpus": "dptune.records", "dptune.tuning": "dptune.job"}
#: Modules that went into another package, by the package that they were in and the one that they are in.
_MODULES = {
    ("dptune", "dptune.core"): "bounds digits errors files plugins progress streams units",
    ("dptune", "dptune.mechanisms"): "noise_search",
    ("dptune.job", "dptune.job.delivery"): "card deliverable synthetic_card weights",
    ("dptune.training", "dptune.training.models"): "causal classifier head model target_modules verbalizer "
    "weight_files pretrain public_model",
    ("dptune.training", "dptune.training.tokens"): "chat_template encoding token_file",
    ("dptune.training", "dptune.training.gradients"): "per_sample",
    (
        "dptune.mechanisms",
        "dptune.mechanisms.clippers",
    ): "automatic clipping groupwise_clipping local_updates psac transformed",
    ("dptune.mechanisms", "dptune.mechanisms.noises"): "additive_noise laplace_noise banded",
    ("dptune.mechanisms", "dptune.mechanisms.controllers"): "adaclip autoclip control dc_sgd geoclip quantile rldp "
    "rldp_published",
    ("dptune.mechanisms", "dptune.mechanisms.agents"): "rl sac linear_agent policy_file idle_agent",
    ("dptune.privacy", "dptune.privacy.accounting"): "composed_losses sampled_gaussian loss_profile laplace_mixtures "
    "mixture_bounds mixture_figures strategy parts",
    ("dptune.audit", "dptune.audit.text"): "likelihood membership extraction prompts",
    ("dptune.records", "dptune.records.diabetes"): "narratives schema sources table",
}
#: Modules with another name.
_RENAMED = {
    **dict.fromkeys(("dptune.step_settings", "dptune.update_rule", "dptune.training.lora"), "dptune.core.settings"),
    "dptune.invalid": "dptune.core.errors",
    "dptune.options": "dptune.core.declarations",
    "dptune.stopping": "dptune.core.interrupts",
    "dptune.privacy.filters": "dptune.privacy.accounting.renyi_filter",
    "dptune.privacy.published": "dptune.privacy.accounting.published_accountants",
    "dptune.privacy.spent": "dptune.privacy.spent_budgets.register",
    "dptune.records.records": "dptune.records.parquet_file",
    "dptune.records.package": "dptune.records.diabetes.sources",
    "dptune.generation.metrics": "dptune.generation.text_metrics",
    "dptune.mechanisms.noise": "dptune.mechanisms.noises.gaussian",
    "dptune.training.groups": "dptune.training.unit_groups",
    "dptune.training.quantized": "dptune.training.models.quantization",
    "dptune.training.pinned": "dptune.training.models.model_names",
    "dptune.training.plain": "dptune.training.models.plain_training",
    "dptune.training.stacked": "dptune.training.gradients.stacked_adapters",
    "dptune.training.together": "dptune.training.gradients.shared_pass",
    "dptune.training.rehearsal": "dptune.training.gradients.gradient_check",
    "dptune.training.labelled": "dptune.training.tokens.labelled_texts",
    "dptune.job.finished": "dptune.job.delivery.finished_adapter",
    "dptune.job.places": "dptune.job.path_checks",
    "dptune.job.verifying": "dptune.job.delivery.verification",
    "dptune.job.loading": "dptune.job.delivery.adapter_loading",
    "dptune.job.labels": "dptune.job.settings",
    "dptune.job.prepare": "dptune.job.preparation",
    "dptune.job.base": "dptune.job.base_model",
    "dptune.audit.crafted": "dptune.training.crafted_canaries",
    "dptune.audit.draw": "dptune.audit.draws.draw_test",
    "dptune.audit.rows": "dptune.audit.games.correlated_noise",
    "dptune.audit.sampling": "dptune.audit.draws.sample_rate",
    "dptune.audit.scores": "dptune.audit.step_scores",
    "dptune.audit.bounds": "dptune.audit.epsilon_bounds",
    "dptune.prediction.scoring": "dptune.prediction.perplexity",
    "dptune.prediction.published": "dptune.prediction.published_radius",
    "dptune.records.synthetic": "dptune.records.diabetes.synthetic_cohort",
}
_NEW = _RENAMED | {f"{old}.{name}": f"{new}.{name}" for (old, new), names in _MODULES.items() for name in names.split()}

#: Modules that became a part of another one, or went into a room of their own: by the present module.
_JOINED = {
    "dptune.audit.draws.draw_test": "dptune.audit.draw_test",
    "dptune.audit.draws.loader_claim": "dptune.audit.loader_claim",
    "dptune.audit.draws.loader_test": "dptune.audit.loader_test",
    "dptune.audit.games.bets": "dptune.audit.bets",
    "dptune.audit.games.contract": "dptune.audit.contract",
    "dptune.audit.games.correlated_noise": "dptune.audit.correlated_noise",
    "dptune.audit.games.outside_step": "dptune.audit.outside_step",
    "dptune.audit.games.run_twin": "dptune.audit.run_twin",
    "dptune.audit.games.scene": "dptune.audit.scene dptune.audit.step_scores",
    "dptune.audit.games.step": "dptune.audit.step",
    "dptune.audit.games.twin_games": "dptune.audit.twin_games",
    "dptune.audit.games.updates": "dptune.audit.updates",
    "dptune.audit.one_run": "dptune.audit.draws.sample_rate dptune.audit.sample_rate",
    "dptune.audit.text.likelihood": "dptune.audit.text.samples dptune.audit.text.token_scores",
    "dptune.audit.text.membership": "dptune.audit.text.alignment dptune.audit.text.rmia",
    "dptune.audit.whole_run": "dptune.audit.noise_test",
    "dptune.cli.answer_commands": "dptune.cli.ensembles dptune.cli.scoring",
    "dptune.cli.tune": "dptune.job.plugin_source",
    "dptune.core.declarations": "dptune.core.bounds",
    "dptune.core.digits": "dptune.audit.contrast",
    "dptune.core.plugins": "dptune.audit.user_code",
    "dptune.core.settings": "dptune.core.units dptune.prediction.shard_tuning dptune.training.models.public_model",
    "dptune.job.delivery.deliverable": "dptune.job.delivery.audit_section",
    "dptune.job.delivery.settings_rows": "dptune.job.settings_rows",
    "dptune.job.delivery.weights": "dptune.job.delivery.named_base",
    "dptune.job.run_spec": "dptune.job.defaults",
    "dptune.job.search.plan": "dptune.job.search.journal",
    "dptune.mechanisms.agents.rl": "dptune.mechanisms.agents.idle_agent",
    "dptune.mechanisms.versions": "dptune.job.versions",
    "dptune.policy.environments.baselines": "dptune.policy.environments.ucb_vi",
    "dptune.policy.environments.environment": "dptune.policy.environments.rollout",
    "dptune.policy.language.learner": "dptune.policy.language.policy",
    "dptune.policy.schedules": "dptune.policy.environments.schedule "
    "dptune.policy.language.schedule "
    "dptune.policy.tenants.schedule "
    "dptune.policy.trust_region",
    "dptune.policy.tenants.runs": "dptune.policy.tenants.ablation",
    "dptune.policy.tenants.training": "dptune.policy.tenants.experience",
    "dptune.policy.user_updates": "dptune.policy.aggregate dptune.policy.learner dptune.policy.local",
    "dptune.prediction.mixture": "dptune.prediction.mollify",
    "dptune.prediction.predictor": "dptune.prediction.perplexity",
    "dptune.prediction.protocols": "dptune.prediction.published_radius",
    "dptune.privacy.accounting.renyi_filter": "dptune.privacy.answers",
    "dptune.privacy.accounting.sampled_gaussian": "dptune.privacy.accounting.array_sums "
    "dptune.privacy.accounting.gaussian_dp",
    "dptune.privacy.ledger_file": "dptune.privacy.accounting.cyclic_rows",
    "dptune.privacy.run_folder": "dptune.privacy.set_aside",
    "dptune.privacy.samplers.random_allocation": "dptune.privacy.accounting.random_allocation",
    "dptune.privacy.samplers.sampler": "dptune.privacy.accounting.samplers",
    "dptune.privacy.samplers.sampler_bounds": "dptune.privacy.accounting.fixed_batches "
    "dptune.privacy.accounting.sampler_bounds",
    "dptune.privacy.samplers.shuffled_batches": "dptune.privacy.accounting.shuffled_batches",
    "dptune.privacy.spent_budgets.booking": "dptune.privacy.spent_budgets.unregistered",
    "dptune.privacy.spent_budgets.totals": "dptune.privacy.spent_budgets.entry_prices",
    "dptune.records.benchmarks": "dptune.records.billion_words",
    "dptune.records.diabetes.narratives": "dptune.records.public_texts",
    "dptune.records.diabetes.table": "dptune.records.diabetes.schema",
    "dptune.records.own_files": "dptune.records.text",
    "dptune.records.published_files": "dptune.records.dvc_cache",
    "dptune.records.reading.formats": "dptune.records.reading.file_kinds",
    "dptune.records.reading.read": "dptune.records.reading.library",
    "dptune.records.reading.spelling": "dptune.records.reading.characters",
    "dptune.records.reading.text_files": "dptune.records.reading.jsonl_file dptune.records.reading.text_file",
    "dptune.training.data": "dptune.training.draws",
    "dptune.training.evaluation": "dptune.training.scores",
    "dptune.training.gradients.layer_kinds": "dptune.training.gradients.double_precision "
    "dptune.training.gradients.outer_products",
    "dptune.training.gradients.step_memory": "dptune.training.gradients.gradient_checkpointing "
    "dptune.training.gradients.micro_batches",
    "dptune.training.models.classifier": "dptune.training.models.verbalizer",
    "dptune.training.models.model_source": "dptune.training.models.gguf_file",
    "dptune.training.models.pretrain": "dptune.training.models.plain_training",
    "dptune.training.models.trained_layers": "dptune.training.models.head dptune.training.models.target_modules",
    "dptune.training.privacy_units": "dptune.training.unit_groups",
    "dptune.training.tokens.encoding": "dptune.training.tokens.labelled_texts",
}
_PRESENT = {old: new for new, names in _JOINED.items() for old in names.split()}


def place_of(name: str) -> str | None:
    """The present name of a module that was moved; None for a name that no module had.

    Example:
        >>> place_of("dptune.errors")
        'dptune.core.errors'
        >>> place_of("dptune.tuning.card")
        'dptune.job.delivery.card'
    """
    new = name
    for old, package in _PACKAGES.items():
        if name == old or name.startswith(f"{old}."):
            new = package + name.removeprefix(old)
    new = _NEW.get(new, new)
    new = _PRESENT.get(new, new)
    return None if new == name else new


class _Moved(Loader):
    """Loads a module by its present name, and leaves it as that one."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self.module = import_module(self.new)
        self.own = self.module.__spec__
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own  # the import system gave it the former name


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A former name's present module. Every other name is for the usual finders."""
        new = place_of(name) if name.startswith("dptune.") else None
        if new is None:
            return None
        warnings.warn(f"{name} is now {new}", DeprecationWarning, stacklevel=2)
        return spec_from_loader(name, _Moved(new))


def keep_former_names() -> None:
    """Make imports by former names work in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
