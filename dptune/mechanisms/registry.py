"""Names for mechanisms, and how an entry of params.yaml (or ``--set`` options) becomes one.

An entry names its three parts and their options, all in one flat table::

    static: {clipper: flat, noise: gaussian, controller: constant, max_grad_norm: 1.0}

Parts that are left out come from the registered mechanism of the same name, or of the name under ``like``::

    rldp_random: {like: rldp, policy: random}

Any combination is one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dptune.errors import ConfigError
from dptune.mechanisms.adaclip import AdaClip
from dptune.mechanisms.autoclip import RawQuantile
from dptune.mechanisms.automatic import AutoS
from dptune.mechanisms.clipping import L1, Flat, Unclipped
from dptune.mechanisms.control import Constant
from dptune.mechanisms.dc_sgd import DcSgd
from dptune.mechanisms.geoclip import GeoClip
from dptune.mechanisms.laplace_noise import Laplace, LmoDp, Plrvo
from dptune.mechanisms.local_updates import LocalUpdates
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.noise import Gaussian, NoNoise
from dptune.mechanisms.per_pair import PerPair
from dptune.mechanisms.psac import Psac
from dptune.mechanisms.quantile import Quantile
from dptune.mechanisms.rldp import Rldp
from dptune.mechanisms.rldp_published import RldpPublished
from dptune.mechanisms.transformed import Transformed

CLIPPERS: dict[str, type] = {
    "flat": Flat,
    "l1": L1,
    "per_pair": PerPair,
    "local_updates": LocalUpdates,
    "auto_s": AutoS,
    "psac": Psac,
    "transformed": Transformed,
    "none": Unclipped,
}
NOISES: dict[str, type] = {
    "gaussian": Gaussian,
    "laplace": Laplace,
    "plrvo": Plrvo,
    "lmo_dp": LmoDp,
    "none": NoNoise,
}
CONTROLLERS: dict[str, type] = {
    "constant": Constant,
    "quantile": Quantile,
    "raw_quantile": RawQuantile,
    "dc_sgd": DcSgd,
    "adaclip": AdaClip,
    "geoclip": GeoClip,
    "rldp": Rldp,
    "rldp_published": RldpPublished,
}
#: Whose paper counts, by the noise; the others take the central limit theorem.
_PUBLISHED: dict[type, str] = {Laplace: "pure", Plrvo: "plrvo", LmoDp: "lmo_dp"}
_PARTS = {"clipper": CLIPPERS, "noise": NOISES, "controller": CONTROLLERS}
_PAIRS_HELP = "number of LoRA pairs (A, B); a run takes it from its model"


@dataclass(frozen=True)
class Registered:
    """A mechanism that has a name of its own.

    Attributes:
        parts: names of its clipper, noise and controller.
        clips: what it clips, in a few words; the other texts likewise.
        adds: what it adds.
        adapts: by what it adapts.
        costs: what adapting costs of the privacy budget.
        verdict: sound or not, and why.
        options: defaults that differ from the parts' own.
    """

    parts: Mapping[str, str]
    clips: str
    adds: str
    adapts: str
    costs: str
    verdict: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """One line."""
        adapts = "adapts nothing" if self.adapts == "nothing" else f"adapts by {self.adapts}"
        return f"Clips {self.clips}; adds {self.adds}; {adapts}; costs {self.costs}. {self.verdict}."


def _gaussian(clipper: str, controller: str = "constant") -> dict[str, str]:
    return {"clipper": clipper, "noise": "gaussian", "controller": controller}


_ONE_NOISE = "Gaussian noise, radius times multiplier"
MECHANISMS: dict[str, Registered] = {
    "static": Registered(
        parts=_gaussian("flat"),
        clips="the whole gradient to one radius (DP-SGD, Abadi et al. 2016)",
        adds=_ONE_NOISE,
        adapts="nothing",
        costs="nothing",
        verdict="Sound",
    ),
    "nonprivate": Registered(
        parts={"clipper": "none", "noise": "none", "controller": "constant"},
        clips="nothing",
        adds="nothing",
        adapts="nothing",
        costs="all privacy",
        verdict="Not private: plain fine-tuning, the ceiling to compare with",
    ),
    "per_pair": Registered(
        parts=_gaussian("per_pair"),
        clips="each LoRA pair to its own radius (McMahan et al. 2018, He et al. 2023)",
        adds="Gaussian noise on each pair, radius over weight times multiplier",
        adapts="nothing",
        costs="nothing",
        verdict="Sound",
    ),
    "dp_lora": Registered(
        parts=_gaussian("per_pair"),
        options={"allocation": "global"},
        clips="each LoRA pair to the same radius C / sqrt(pairs)",
        adds="the same Gaussian noise everywhere, C times multiplier; freeze_down=true trains B alone (FFA-LoRA)",
        adapts="nothing",
        costs="nothing",
        verdict="Sound",
    ),
    "dp_lora_fed": Registered(
        parts=_gaussian("local_updates"),
        clips="each client's update after local steps (DP-LoRA, Liu et al. 2025; its unit of privacy is the client)",
        adds="Gaussian noise on the sum of updates, radius times multiplier",
        adapts="nothing",
        costs="nothing",
        verdict="Sound",
    ),
    "adaclip": Registered(
        parts=_gaussian("transformed", "adaclip"),
        clips="the gradient in coordinates scaled one by one (AdaCliP, Pichapati et al. 2019)",
        adds="less Gaussian noise to coordinates of small deviation",
        adapts="mean and variance of released gradients",
        costs="nothing",
        verdict="Sound",
    ),
    "quantile": Registered(
        parts=_gaussian("flat", "quantile"),
        clips="the whole gradient to a moving radius (Andrew et al. 2021)",
        adds=_ONE_NOISE,
        adapts="a noisy count of the unclipped",
        costs="a share (z / 2 z_b)^2 of the budget",
        verdict="Sound",
    ),
    "auto_s": Registered(
        parts=_gaussian("auto_s"),
        clips="by normalising: g R / (|g| + gamma) (AUTO-S, Bu et al. 2023)",
        adds=_ONE_NOISE,
        adapts="nothing",
        costs="nothing",
        verdict="Sound",
    ),
    "autoclip_published": Registered(
        parts=_gaussian("flat", "raw_quantile"),
        clips="the whole gradient to a quantile of this batch's raw norms (as RLDP's paper describes AutoClip)",
        adds="Gaussian noise, that raw radius times multiplier",
        adapts="raw gradient norms",
        costs="all privacy",
        verdict="NOT sound: a raw quantile leaks and nothing bounds its sensitivity",
    ),
    "dc_sgd_p": Registered(
        parts=_gaussian("flat", "dc_sgd"),
        options={"rule": "percentile"},
        clips="the whole gradient to a percentile (DC-SGD-P, Wei et al. 2025)",
        adds=_ONE_NOISE,
        adapts="a noisy histogram of norms",
        costs="a share (z / z_H)^2 of the budget",
        verdict="Sound",
    ),
    "dc_sgd_e": Registered(
        parts=_gaussian("flat", "dc_sgd"),
        options={"rule": "expected_error"},
        clips="the whole gradient to the radius of least expected error (DC-SGD-E, Wei et al. 2025)",
        adds=_ONE_NOISE,
        adapts="a noisy histogram of norms",
        costs="a share (z / z_H)^2 of the budget",
        verdict="Sound",
    ),
    "psac": Registered(
        parts=_gaussian("psac"),
        clips="by a non-monotonic weight of the norm (PSAC, Xia et al. 2023)",
        adds=_ONE_NOISE,
        adapts="nothing",
        costs="nothing",
        verdict="Sound",
    ),
    "geoclip": Registered(
        parts=_gaussian("transformed", "geoclip"),
        clips="the gradient in the basis of least noise (GeoClip, Gilani et al. 2025)",
        adds="Gaussian noise in k directions",
        adapts="covariance of released gradients",
        costs="the share 'explore' of the budget, which lets the subspace move (0: as printed, it cannot)",
        verdict="Sound",
    ),
    "rldp_published": Registered(
        parts=_gaussian("per_pair", "rldp_published"),
        options={"pair_radius": 0.1, "noise_unit": "pair", "stabiliser": 1e-6},
        clips="each LoRA pair to its own moving radius (RLDP as published, arXiv 2507.22565)",
        adds="Gaussian noise on each pair, its radius times a moving sigma",
        adapts="a SAC agent that reads raw norms and losses",
        costs="all privacy",
        verdict="NOT sound: raw statistics steer it, and sigma is really sigma / sqrt(pairs)",
    ),
    "rldp": Registered(
        parts=_gaussian("per_pair", "rldp"),
        options={"pair_radius": 0.1, "noise_unit": "pair", "stabiliser": 1e-6},
        clips="each LoRA pair to its own moving radius (RLDP as provable)",
        adds="Gaussian noise with moving weights under a constant joint multiplier sigma / sqrt(pairs)",
        adapts="a SAC agent that reads releases and public data",
        costs="nothing (design A), or the share 'statistics_share' of the budget (design AB)",
        verdict="Sound",
    ),
    "laplace": Registered(
        parts={"clipper": "l1", "noise": "laplace", "controller": "constant"},
        clips="the whole gradient to one radius in l1",
        adds="Laplace noise, radius times multiplier: for few parameters, and then also at delta 0",
        adapts="nothing",
        costs="nothing",
        verdict="Sound",
    ),
    "plrvo": Registered(
        parts={"clipper": "flat", "noise": "plrvo", "controller": "constant"},
        clips="the whole gradient to one radius",
        adds="Laplace noise with a random inverse scale, Gamma (PLRV-O, CCS 2025, whose own epsilon is no bound)",
        adapts="nothing",
        costs="nothing",
        verdict="Sound",
    ),
    "lmo_dp": Registered(
        parts={"clipper": "flat", "noise": "lmo_dp", "controller": "constant"},
        clips="the whole gradient to one radius",
        adds="Laplace noise with a random inverse scale, Gamma + exponential + uniform (LMO-DP, "
        "arXiv 2405.18776, whose own epsilon is no bound)",
        adapts="nothing",
        costs="nothing",
        verdict="Sound",
    ),
}


def build(name: str, entry: Mapping[str, Any]) -> Mechanism:
    """The mechanism that an entry describes.

    Raises: ConfigError naming the part or option that is unknown, missing or out of range.
    """
    parts, options = _resolve(name, entry)
    pairs = _convert("pairs", options.pop("pairs", 1), int)
    if pairs < 1:
        raise ConfigError("pairs", f"{pairs} is not a positive whole number", fix="count the LoRA pairs")
    known = {item.name for cls in parts.values() for item in _tunable(cls)}
    for option in options:
        if option not in known:
            choices = ", ".join(sorted(known | {"pairs"}))
            raise ConfigError(option, f"mechanism {name!r} has no such option", fix=f"use one of {choices}")
    built = {part: make_part(cls, options) for part, cls in parts.items()}
    return Mechanism(
        name=name,
        published_accountant=_PUBLISHED.get(parts["noise"], "gdp_clt"),
        pairs=pairs,
        **built,
    )


def of_model(name: str, entry: Mapping[str, Any], pairs: int, dimension: int) -> dict[str, Any]:
    """The entry with what a run's model tells: its LoRA pairs, and their parameters if an accountant counts them."""
    known = {item.name for item in _tunable(_resolve(name, entry)[0]["noise"])}
    return {**entry, "pairs": pairs, **({"dimension": dimension} if "dimension" in known else {})}


def takes_noise(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether the entry's noise has a multiplier to calibrate: not if another option fixes it."""
    noise = _resolve(name, entry)[0]["noise"]
    fixed = any(option in entry for option in getattr(noise, "fixed_by", ()))
    return "noise_multiplier" in {item.name for item in _tunable(noise)} and not fixed


def lacks_noise(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether the entry cannot be built before its noise is calibrated."""
    own_scale = getattr(_resolve(name, entry)[0]["noise"], "own_scale", False)
    return takes_noise(name, entry) and "noise_multiplier" not in entry and not own_scale


def describe_options(name: str) -> list[tuple[str, str, str]]:
    """(option, default or "required", help) of a registered mechanism."""
    parts, options = _resolve(name, {})
    rows: dict[str, tuple[str, str, str]] = {}
    for cls in parts.values():
        for row in option_rows(cls, options):
            rows.setdefault(row[0], row)
    return [*rows.values(), ("pairs", "1", _PAIRS_HELP)]


def option_rows(cls: type, options: Mapping[str, Any] | None = None) -> list[tuple[str, str, str]]:
    """(option, default or "required", help) of one part, with ``options`` in place of its defaults."""
    texts, over = _help(cls), options or {}
    defaults = {item.name: "required" if item.default is MISSING else str(item.default) for item in _tunable(cls)}
    return [(name, str(over.get(name, default)), texts.get(name, "")) for name, default in defaults.items()]


def _resolve(name: str, entry: Mapping[str, Any]) -> tuple[dict[str, type], dict[str, Any]]:
    registered = _registered(name, entry)
    options = {**(registered.options if registered else {}), **entry}
    options.pop("like", None)
    defaults = registered.parts if registered else {}
    parts = {}
    for part, available in _PARTS.items():
        chosen = options.pop(part, defaults.get(part))
        if chosen is None:
            raise ConfigError(
                f"mechanisms.{name}",
                f"is not registered and names no {part}",
                fix=f"use {', '.join(MECHANISMS)}, or add '{part}:' with one of {', '.join(available)}",
            )
        if not isinstance(chosen, str) or chosen not in available:
            raise ConfigError(
                f"mechanisms.{name}.{part}",
                f"unknown {part} {chosen!r}",
                fix=f"use one of {', '.join(available)}",
            )
        parts[part] = available[chosen]
    if registered:
        # A part that was replaced takes the registered defaults of its options along.
        known = {item.name for cls in parts.values() for item in _tunable(cls)}
        options = {key: value for key, value in options.items() if key in entry or key in known}
    return parts, options


def _registered(name: str, entry: Mapping[str, Any]) -> Registered | None:
    like = entry.get("like")
    if like is not None and (not isinstance(like, str) or like not in MECHANISMS):
        raise ConfigError(f"mechanisms.{name}.like", f"unknown mechanism {like!r}", fix=f"use {', '.join(MECHANISMS)}")
    return MECHANISMS.get(like or name)


def make_part(cls: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Build a part from the options that are its own; two parts may share one, such as ``max_grad_norm``."""
    kinds = get_type_hints(cls)
    mine = {
        item.name: _convert(item.name, options[item.name], kinds[item.name])
        for item in _tunable(cls)
        if item.name in options
    }
    missing = _required(cls) - set(mine)
    if missing:
        name = sorted(missing)[0]
        raise ConfigError(name, "is required", fix=f"give {name}=VALUE, or let it be calibrated")
    return cls(**mine)


def _tunable(cls: Any) -> list[Any]:
    return [item for item in fields(cls) if item.init] if hasattr(cls, "__dataclass_fields__") else []


def _required(cls: Any) -> set[str]:
    return {item.name for item in _tunable(cls) if item.default is MISSING}


def _help(cls: type) -> dict[str, str]:
    """The texts of every option, from the docstrings of the class and its bases."""
    import docstring_parser

    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for item in docstring_parser.parse(base.__doc__ or "").params:
            texts[item.arg_name] = " ".join((item.description or "").split())
    return texts


#: Beyond it, what is counted overflows somewhere, or never ends.
_LARGEST_WHOLE = 10**12


def _convert(name: str, value: Any, kind: Any) -> Any:
    """A value from YAML or from the command line, as the option's type."""
    if get_origin(kind) is Literal:
        return _choice(name, value, get_args(kind))
    if kind is bool:
        return _choice(name, str(value).lower(), ("true", "false")) == "true"
    if kind is int:
        return _whole(name, value)
    if get_origin(kind) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        return tuple(_number(name, item) for item in (items if isinstance(items, list | tuple) else [items]))
    return str(value) if kind is str else _number(name, value)


def _choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ConfigError(name, f"{value!r} is none of its values", fix=f"use {' or '.join(map(str, choices))}")
    return value


def _whole(name: str, value: Any) -> int:
    number = _number(name, value)
    if not number.is_integer():
        raise ConfigError(name, f"{value!r} is not a whole number", fix="write a whole number")
    if abs(number) > _LARGEST_WHOLE:
        raise ConfigError(name, f"{number:g} is beyond {_LARGEST_WHOLE:g}", fix="write a smaller number")
    return int(number)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool):
        raise ConfigError(name, f"{value!r} is not a number", fix="write a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(name, f"{value!r} is not a number", fix="write a number") from None
