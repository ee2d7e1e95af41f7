"""The registries of clippers, noises, controllers and mechanisms; building a mechanism from an entry of params.yaml.

A part is registered where it is written, by a decorator, and a mechanism beside the part that it is named after::

    @clipper("flat")
    @dataclass(frozen=True)
    class Flat(ByNorm): ...

    mechanism("static", clipper="flat", clips="the whole gradient to one radius", ...)

The first look at a registry imports every module of this package, then installed plug-ins (``dptune.core.plugins``).

An entry names its three parts and their options, all in one flat table::

    static: {clipper: flat, noise: gaussian, controller: constant, max_grad_norm: 1.0}

Parts that are left out come from the registered mechanism of the same name, or of the name under ``like``::

    rldp_random: {like: rldp, policy: random}

Any combination is one entry.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from threading import RLock
from typing import Any, TypeVar

from dptune.core.errors import ConfigError
from dptune.core.plugins import check_part, is_outside, load_installed, note_registered
from dptune.mechanisms.interfaces import Clipper, Controller, Noise
from dptune.mechanisms.mechanism import Mechanism
from dptune.mechanisms.noises.additive_noise import AdditiveNoise
from dptune.mechanisms.options import convert, make_part, option_defaults, option_names, own_options
from dptune.privacy.release import UNBOUNDED

Value = TypeVar("Value")
#: The rooms of this package whose files hold parts.
_ROOMS = ("clippers", "noises", "controllers")
#: More than any model has.
_MOST_PAIRS = 1_000_000
_PAIRS_HELP = "number of LoRA pairs (A, B); a run takes it from its model"


class Registry(Mapping[str, Value]):
    """Registered values by name, in alphabetical order."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._values: dict[str, Value] = {}
        self._modules: dict[str, str] = {}

    def add(self, name: str, value: Value, module: str) -> None:
        """Register ``value``, which ``module`` defines. Raises ConfigError if another module has the name."""
        if self._modules.get(name, module) != module:
            problem = f"{self.kind} {name!r} is registered by {self._modules[name]} and by {module}"
            raise ConfigError("plugins", problem, fix="give one of them another name")
        self._values[name], self._modules[name] = value, module
        note_registered(module)

    def module_of(self, name: str) -> str:
        """The module that registered ``name``."""
        _load()
        return self._modules[name]

    def __getitem__(self, name: str) -> Value:
        _load()
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        _load()
        return iter(sorted(self._values))

    def __len__(self) -> int:
        _load()
        return len(self._values)


@dataclass(frozen=True)
class Registered:
    """A mechanism that is registered under a name.

    Attributes:
        parts: names of its clipper, noise and controller.
        clips: the vectors that it clips, in a few words; the other texts likewise.
        adds: the noise that it adds.
        adapts: the information that it adapts by.
        costs: the share of the privacy budget that adapting costs.
        verdict: sound or not, and why.
        options: defaults that differ from the parts' own.

    Example:
        >>> from dptune.mechanisms.registry import MECHANISMS
        >>> MECHANISMS["static"].adds, MECHANISMS["static"].verdict
        ('Gaussian noise, radius times multiplier', 'Sound')
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
        """The texts as one line, for lists of mechanisms."""
        adapts = "adapts nothing" if self.adapts == "nothing" else f"adapts by {self.adapts}"
        return f"Clips {self.clips}; adds {self.adds}; {adapts}; costs {self.costs}. {self.verdict}."


CLIPPERS: Registry[type] = Registry("clipper")
NOISES: Registry[type] = Registry("noise")
CONTROLLERS: Registry[type] = Registry("controller")
MECHANISMS: Registry[Registered] = Registry("mechanism")
PARTS = {"clipper": CLIPPERS, "noise": NOISES, "controller": CONTROLLERS}
_Class = TypeVar("_Class", bound=type)


def clipper(name: str) -> Callable[[_Class], _Class]:
    """Register a clipper, whose options are the fields of its dataclass. Raises ConfigError if it is incomplete.

    Example:
        >>> from dataclasses import dataclass
        >>> from dptune.mechanisms.clippers.clipping import Flat
        >>> from dptune.mechanisms.registry import build, clipper
        >>> @clipper("flat_half")
        ... @dataclass(frozen=True)
        ... class FlatHalf(Flat):
        ...     # Clips the whole gradient to 0.5, unless another radius is given.
        ...     max_grad_norm: float = 0.5
        >>> build("static", {"clipper": "flat_half", "noise_multiplier": 1.0}).knobs().radii
        (0.5,)
    """
    return _registering(CLIPPERS, name, Clipper)


def noise(name: str) -> Callable[[_Class], _Class]:
    """Register a noise, as ``clipper`` does a clipper.

    Example:
        >>> from dataclasses import dataclass
        >>> from dptune.mechanisms.noises.gaussian import Gaussian
        >>> from dptune.mechanisms.registry import build, noise
        >>> @noise("gaussian_2")
        ... @dataclass(frozen=True)
        ... class Gaussian2(Gaussian):
        ...     # Gaussian noise with a multiplier of 2, unless another is given.
        ...     noise_multiplier: float = 2.0
        >>> build("static", {"noise": "gaussian_2"}).noise.noise_multiplier
        2.0
    """
    return _registering(NOISES, name, Noise)


def controller(name: str) -> Callable[[_Class], _Class]:
    """Register a controller, as ``clipper`` does a clipper.

    Example:
        >>> from dataclasses import dataclass
        >>> from dptune.mechanisms.controllers.control import Constant
        >>> from dptune.mechanisms.registry import build, controller
        >>> @controller("still")
        ... @dataclass
        ... class Still(Constant):
        ...     pass  # keeps the settings of the first step, as "constant" does
        >>> type(build("static", {"controller": "still", "noise_multiplier": 1.0}).controller).__name__
        'Still'
    """
    return _registering(CONTROLLERS, name, Controller)


def mechanism(
    name: str,
    *,
    clipper: str = "flat",
    noise: str = "gaussian",
    controller: str = "constant",
    options: Mapping[str, Any] | None = None,
    clips: str,
    adds: str = "Gaussian noise, radius times multiplier",
    adapts: str = "nothing",
    costs: str = "nothing",
    verdict: str | None = None,
) -> None:
    """Register a mechanism; ``Registered`` describes the arguments. Of a plug-in's, "Sound" is the plug-in's claim.

    Example:
        >>> from dptune.mechanisms.registry import MECHANISMS, mechanism
        >>> mechanism("gentle", options={"max_grad_norm": 0.1}, clips="the whole gradient to 0.1")
        >>> MECHANISMS["gentle"].clips, MECHANISMS["gentle"].parts["clipper"]
        ('the whole gradient to 0.1', 'flat')
    """
    parts = {"clipper": clipper, "noise": noise, "controller": controller}
    caller = str(sys._getframe(1).f_globals["__name__"])  # a plug-in's mechanism belongs to the plug-in
    verdict = verdict or (f"Sound if {caller}, a plug-in, keeps its word" if is_outside(caller) else "Sound")
    MECHANISMS.add(name, Registered(parts, clips, adds, adapts, costs, verdict, options or {}), caller)


def _registering(registry: Registry[type], name: str, interface: type) -> Callable[[_Class], _Class]:
    def register(cls: _Class) -> _Class:
        check_part(registry.kind, name, cls, interface)
        registry.add(name, cls, cls.__module__)
        return cls

    return register


_loading, _loaded = RLock(), False


def _load() -> None:
    """Import every module that registers something, the first time that it is called."""
    global _loaded
    with _loading:
        if _loaded:
            return
        _loaded = True  # else a plug-in that looks at a registry while it is imported would load it again, for ever
        try:
            for room in _ROOMS:
                package = import_module(f"{__package__}.{room}")
                for found in iter_modules(package.__path__):
                    import_module(f"{package.__name__}.{found.name}")
            load_installed("dptune.mechanisms")
        except BaseException:
            _loaded = False
            raise


def build(name: str, entry: Mapping[str, Any]) -> Mechanism:
    """The mechanism that an entry describes.

    Raises: ConfigError naming the part or option that is unknown, missing or out of range.

    Example:
        >>> from dptune.mechanisms.registry import build
        >>> build("static", {"noise_multiplier": 1.0}).knobs()
        Knobs(radii=(1.0,), noise_multiplier=1.0, weights=(), geometry=None)
    """
    parts, options = _resolve(name, entry)
    pairs = convert("pairs", options.pop("pairs", 1), int)
    if not 1 <= pairs <= _MOST_PAIRS:  # per-pair radii take memory for each
        problem = f"{pairs} is not a whole number from 1 to {_MOST_PAIRS}"
        raise ConfigError("pairs", problem, fix="count the LoRA pairs")
    known = {option for cls in parts.values() for option in option_names(cls)}
    for option in options:
        if option not in known:
            choices = ", ".join(sorted(known | {"pairs"}))
            raise ConfigError(option, f"mechanism {name!r} has no such option", fix=f"use one of {choices}")
    built = {part: make_part(cls, options) for part, cls in parts.items()}
    return Mechanism(name=name, published_accountant=built["noise"].published_accountant, pairs=pairs, **built)


def of_model(name: str, entry: Mapping[str, Any], pairs: int, dimension: int) -> dict[str, Any]:
    """The entry with the model's number of LoRA pairs, and with its number of parameters if its noise asks for it.

    Example:
        >>> from dptune.mechanisms.registry import of_model
        >>> of_model("static", {"noise_multiplier": 1.0}, pairs=24, dimension=460_800)
        {'noise_multiplier': 1.0, 'pairs': 24}
        >>> of_model("plrvo", {}, pairs=24, dimension=460_800)
        {'pairs': 24, 'dimension': 460800}
    """
    known = option_names(_resolve(name, entry)[0]["noise"])
    return {**entry, "pairs": pairs, **({"dimension": dimension} if "dimension" in known else {})}


def takes_noise(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether the entry's noise has a multiplier to calibrate: not if another option fixes it, or nothing is proven.

    Example:
        >>> from dptune.mechanisms.registry import takes_noise
        >>> takes_noise("static", {}), takes_noise("nonprivate", {})
        (True, False)
    """
    noise = _resolve(name, entry)[0]["noise"]
    fixed = any(option in entry for option in noise.fixed_by)
    proven = noise.family is not AdditiveNoise.family and noise.family not in UNBOUNDED
    return "noise_multiplier" in option_names(noise) and not fixed and proven


def lacks_noise(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether the entry cannot be built before its noise is calibrated."""
    own_scale = _resolve(name, entry)[0]["noise"].own_scale
    return takes_noise(name, entry) and "noise_multiplier" not in entry and not own_scale


def plugin_modules(name: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules outside dptune that the entry's parts, their bases and its registered mechanism come from."""
    found = {base.__module__ for cls in _resolve(name, entry)[0].values() for base in cls.__mro__}
    if _registered(name, entry):
        found.add(MECHANISMS.module_of(entry.get("like") or name))
    return tuple(sorted(filter(is_outside, found)))


def part_names(name: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """The names of the clipper, noise and controller that an entry means. Raises: ConfigError as ``build``.

    >>> part_names("quantile", {})
    {'clipper': 'flat', 'noise': 'gaussian', 'controller': 'quantile'}
    """
    registered, found = _registered(name, entry), {}
    for part, available in PARTS.items():
        chosen = entry.get(part, registered.parts.get(part) if registered else None)
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
        found[part] = chosen
    return found


def leaves_radius_open(name: str, entry: Mapping[str, Any]) -> bool:
    """Whether the whole gradient is clipped to one radius, at the start at least, that nobody gave: neither the entry
    nor its registered mechanism.

    >>> leaves_radius_open("plrvo", {}), leaves_radius_open("plrvo", {"max_grad_norm": 1.0})
    (True, False)
    >>> leaves_radius_open("auto_s", {}), leaves_radius_open("laplace", {})  # a scale, and an l1 radius
    (False, False)
    """
    return part_names(name, entry)["clipper"] == "flat" and "max_grad_norm" not in _resolve(name, entry)[1]


def differing_options(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an entry, those of its registered mechanism included, that differ from the defaults of its parts.

    Each has its option's type, so that 3 and 3.0 are one value. An option that decides whether the noise is calibrated
    is always among them: to give its default is not to leave it out.

    >>> differing_options("static", {"max_grad_norm": 1})
    {}
    >>> differing_options("dc_sgd_e", {"max_grad_norm": 2})
    {'max_grad_norm': 2.0, 'rule': 'expected_error'}
    """
    parts, options = _resolve(name, entry)
    kept = {"noise_multiplier", *parts["noise"].fixed_by}
    found: dict[str, Any] = {}
    for cls in parts.values():
        defaults = option_defaults(cls)
        own = own_options(cls, options)
        found |= {key: value for key, value in own.items() if key in kept or value != defaults[key]}
    return found | {key: value for key, value in options.items() if key == "pairs" and value != 1}


def part_version(kind: str, name: str) -> int:
    """The ``VERSION`` that a part's class states, or inherits; 1 where it states none, as plug-ins may.

    A change that moves a number that the part releases raises it by hand, and tests/golden says when. What was made
    with another version counts as another result.
    """
    return int(getattr(PARTS[kind][name], "VERSION", 1))


def _resolve(name: str, entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    registered = _registered(name, entry)
    parts: dict[str, Any] = {part: PARTS[part][chosen] for part, chosen in part_names(name, entry).items()}
    given = {**(registered.options if registered else {}), **entry}
    options = {key: value for key, value in given.items() if key not in ("like", *PARTS)}
    if registered:
        # A part that was replaced takes the registered defaults of its options along.
        known = {option for cls in parts.values() for option in option_names(cls)}
        options = {key: value for key, value in options.items() if key in entry or key in known}
    return parts, options


def _registered(name: str, entry: Mapping[str, Any]) -> Registered | None:
    like = entry.get("like")
    if like is not None and (not isinstance(like, str) or like not in MECHANISMS):
        raise ConfigError(f"mechanisms.{name}.like", f"unknown mechanism {like!r}", fix=f"use {', '.join(MECHANISMS)}")
    return MECHANISMS.get(like or name)
