"""Which parameters each decoding method takes, what they are where nothing was said, and which contradict.

A parameter that has no effect on the chosen method is refused rather than ignored: whoever sets it expects it to
do something. Does not know prompts, sampling, or how the methods work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from .bundle.manifest import Manifest, Method, MethodDefaults, WindowDefaults
from .checks import choice, number, short, whole
from .errors import BundleError, RequestError, TreeError
from .planning.candidates import parse_budget
from .runtime.drafter import Children
from .runtime.jacobi import Redraft, Start
from .runtime.tree import StaticTree, TreeShape
from .runtime.tree_names import named_tree

Residual = Literal["borrowed", "neighborhood"]

METHODS: tuple[Method, ...] = get_args(Method)
RELAXED = ("lantern", "lantern++")  # methods that always are; sjd is if asked to
WINDOW_LIMIT = 128  # codes drafted ahead
# Used where a bundle says nothing about a method: small trees, since a CPU pays for every node.
_FALLBACK = {
    "eagle": MethodDefaults(tree="chain-3"),
    "lantern": MethodDefaults(tree="dynamic-8-4-2", neighbors=100, delta=0.2),
    "lantern++": MethodDefaults(tree="chain-4", neighbors=10, lambda_=2.0),
}
_BOUNDS = ("delta", "lambda")
_LENDING = (*_BOUNDS, "neighbors", "residual")
_RELAXING = (*_LENDING, "omega", "anneal")
_TREE = ("tree", "children", "stop", "drafter_cfg_scale")
_WINDOW = ("window", "redraft", "start")


def check_method(manifest: Manifest, asked: str | None) -> Method:
    """The method: the one asked for, or the bundle's default; RequestError if the bundle cannot run it."""
    method = manifest.decoding.method if asked is None else asked
    if method not in METHODS:
        raise RequestError(f"method: found {short(method)}, expected {', '.join(METHODS[:-1])} or {METHODS[-1]}")
    if method not in ("auto", "ar", "sjd") and manifest.drafter is None:
        raise RequestError(f"method {method}: bundle {manifest.name} has no drafter; use method ar or sjd")
    return method


def leaves_choice(options: Mapping[str, Any]) -> bool:
    """Whether a request names neither a method nor anything that only some methods take."""
    given = {name.rstrip("_") for name, value in options.items() if value is not None}
    return not given & {"method", *_TREE, *_WINDOW, *_RELAXING}


def resolve_method(manifest: Manifest, method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the method needs besides sampling, as fields of `Settings`; RequestError names the parameter at fault."""
    given = {name.rstrip("_"): value for name, value in options.items() if value is not None}
    called = method if options.get("method") else f"{method} (the bundle's default)"
    _refuse_idle(given, method, called)
    if method == "auto":
        return {"quality": parse_budget(given.get("quality") or "balanced").name}
    if method == "ar":
        return {}
    own = _window(manifest, given) if method == "sjd" else _tree(manifest, method, given)
    return own | _relaxation(manifest, method, given)


def _refuse_idle(given: Mapping[str, Any], method: Method, called: str) -> None:
    """Refuse parameters that the method does not look at, and those that contradict each other."""
    if {"delta", "lambda"} <= given.keys():
        raise RequestError("delta and lambda: two bounds on the same thing, expected one; delta bounds method lantern,"
                           " lambda bounds lantern++")  # fmt: skip
    if method == "auto" and (own := _first(given, _TREE + _WINDOW + _RELAXING)):
        raise RequestError(f"{own}: method {called} chooses it; leave {own} out, or name another method")
    if method != "auto" and "quality" in given:
        raise RequestError(f"quality: method {called} does not choose by it; leave quality out, or use method auto")
    if method == "ar" and (idle := _first(given, _TREE + _WINDOW)):
        raise RequestError(f"{idle}: method {called} drafts nothing; leave {idle} out, or use another method")
    if method == "sjd" and (idle := _first(given, _TREE)):
        raise RequestError(f"{idle}: method {called} drafts no tree; leave {idle} out, or use method eagle")
    if method != "sjd" and (idle := _first(given, _WINDOW)):
        raise RequestError(f"{idle}: method {called} has no window; leave {idle} out, or use method sjd")
    if method in ("ar", "eagle") and (idle := _first(given, _RELAXING)):
        raise RequestError(
            f"{idle}: method {called} accepts exactly; leave {idle} out, or use method lantern or lantern++"
        )
    if method == "lantern" and "lambda" in given:
        raise RequestError(f"lambda: found method {called}, which is bounded by delta; use delta, or method lantern++")
    if method == "lantern++" and "delta" in given:
        raise RequestError(f"delta: found method {called}, which is bounded by lambda; use lambda, or method lantern")
    if "anneal" in given and "omega" not in given:
        raise RequestError("anneal: says how omega falls with depth, but omega is not given; give omega too")


def _first(given: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return min(given.keys() & set(names), default=None)


# ---------------------------------------------------------------- drafting


def _window(manifest: Manifest, given: Mapping[str, Any]) -> dict[str, Any]:
    defaults = manifest.decoding.sjd or WindowDefaults()
    return {
        "window": whole("window", given.get("window"), defaults.window, 1, WINDOW_LIMIT),
        "redraft": choice("redraft", given.get("redraft"), defaults.redraft, get_args(Redraft)),
        "start": choice("start", given.get("start"), defaults.start, get_args(Start)),
    }


def _tree(manifest: Manifest, method: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    shape = _resolve_shape(manifest, given.get("tree"), _defaults(manifest, method).tree)
    if not isinstance(shape, StaticTree):
        if idle := _first(given, ("children", "stop")):
            raise RequestError(
                f"{idle}: tree {shape.name} is dynamic, with children and size of its own choice; "
                f"leave {idle} out, or use a static tree such as chain-4"
            )
        return {"tree": shape.name, "shape": shape} | _guidance(manifest, given)
    children = choice("children", given.get("children"), "sampled", get_args(Children))
    stop = number("stop", given.get("stop"), 0.0, 0, 1)
    own = {"tree": shape.name, "shape": shape, "children": children, "stop": stop or None}
    return own | _guidance(manifest, given)


def _guidance(manifest: Manifest, given: Mapping[str, Any]) -> dict[str, Any]:
    """The drafter's own guidance, if it is to have one."""
    if "drafter_cfg_scale" not in given:
        return {}
    if given.get("cfg_scale", manifest.sampling.cfg_scale) == 1:
        raise RequestError("drafter_cfg_scale: found cfg_scale 1, so nothing is guided; leave drafter_cfg_scale out")
    return {"drafter_cfg_scale": number("drafter_cfg_scale", given["drafter_cfg_scale"], 1.0, 0, 1000)}


def _defaults(manifest: Manifest, method: str) -> MethodDefaults:
    known = cast(Mapping[str, MethodDefaults], manifest.decoding.methods)
    return known.get(method, _FALLBACK[method])


def _resolve_shape(manifest: Manifest, asked: Any, default: str) -> TreeShape:
    if asked is None:
        try:
            if default.endswith(".json"):
                raise TreeError("a bundle names a tree, it cannot point to a file")
            shape = named_tree(default)
        except TreeError as error:
            raise BundleError(f"bundle {manifest.name}: default tree {short(default)}: {error}") from error
    else:
        if not isinstance(asked, str):
            raise TreeError(f"tree: found {short(asked)}, expected a name or a .json file")
        shape = named_tree(asked)
    if isinstance(shape, StaticTree):
        widest = max(len(children) for children in shape.children)
        if widest > manifest.codebook_size:
            raise TreeError(
                f"tree: found a node with {widest} children, expected at most codebook_size {manifest.codebook_size}"
            )
    return shape


# ---------------------------------------------------------------- relaxation


def _relaxation(manifest: Manifest, method: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    return _lending(manifest, method, given) | _annealing(given)


def _annealing(given: Mapping[str, Any]) -> dict[str, Any]:
    if "omega" not in given:
        return {}
    omega = number("omega", given["omega"], 1.0)
    if not 1 < omega <= 1e6:
        raise RequestError(f"omega: found {omega:g}, expected a number above 1, up to 1e6")
    return {"omega": omega, "anneal": number("anneal", given.get("anneal"), 1.0, 0, 1)}


def _lending(manifest: Manifest, method: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """How neighbours lend probability; nothing if they do not."""
    bound = _first(given, _BOUNDS) or {"lantern": "delta", "lantern++": "lambda"}.get(method)
    if bound is None:
        if idle := _first(given, ("neighbors", "residual")):
            raise RequestError(f"{idle}: method sjd lends nothing unless bounded; give delta or lambda too")
        return {}
    like, table, annealed = "lantern" if bound == "delta" else "lantern++", manifest.neighbors, "omega" in given
    if not table and not annealed:
        raise RequestError(
            f"method {method}: bundle {manifest.name} has no neighbour table; use method ar, eagle or sjd, "
            "or give omega, which needs none"
        )
    defaults = _defaults(manifest, like)
    usual = min(defaults.neighbors or _FALLBACK[like].neighbors, table)
    neighbors = whole("neighbors", given.get("neighbors"), usual, 0 if annealed else 1, table)
    if not neighbors:
        if idle := _first(given, (*_BOUNDS, "residual")):
            raise RequestError(f"{idle}: found neighbors 0, so nobody lends; leave {idle} out, or let neighbours lend")
        return {}
    residual = choice("residual", given.get("residual"), "borrowed", get_args(Residual))
    own: dict[str, Any] = {"neighbors": neighbors, "residual": residual}
    if bound == "delta":
        own["delta"] = number("delta", given.get("delta"), defaults.delta or 0.2)
        if not 0 < own["delta"] < 1:
            raise RequestError(f"delta: found {own['delta']:g}, expected a number between 0 and 1, both excluded")
    else:
        own["lambda_"] = number("lambda", given.get("lambda"), defaults.lambda_ or 2.0)
        if not 1 < own["lambda_"] <= 1e6:
            raise RequestError(f"lambda: found {own['lambda_']:g}, expected a number above 1, up to 1e6")
    return own
