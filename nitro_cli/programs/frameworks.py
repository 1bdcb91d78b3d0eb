"""What jax and flax make: arrays' places, structures of trees, jitted functions, modules, and their registries.

Nothing here imports them: an object of theirs can only be there when they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from nitro_cli.programs import atoms
from nitro_cli.programs.atoms import Parts, atom, digest


def describe(value: Any) -> Parts | None:
    """What jax and flax make and Python cannot look into, or can but should not; None for all else."""
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return None
    if isinstance(value, jax.Device):
        return Parts(f"device {atoms.device_text(value)}", [])
    if isinstance(value, jax.sharding.Mesh):
        return Parts(atoms.mesh_text(value), [])
    if isinstance(value, jax.sharding.PartitionSpec):
        return Parts(atoms.spec_text(value), [])
    if isinstance(value, jax.sharding.Sharding):
        text = atoms.sharding_text(jax, value)
        return None if text is None else Parts(text, [])
    if isinstance(value, jax.tree_util.PyTreeDef):
        return _structure(value)
    if isinstance(value, (jax.core.Tracer, jax.Array)):
        return None
    return _jitted(value) or _graph_definition(value)


def _structure(value: Any) -> Parts:
    """A tree's structure node by node: its text would show addresses."""
    data = value.node_data()
    children = [(f"/{index}", child) for index, child in enumerate(value.children())]
    if data is None:
        return Parts("tree leaf" if value.num_leaves else "tree None", children)
    return Parts(f"tree node of {atoms.name_of(data[0])}", [(" is a", data[0]), (" holds", data[1]), *children])


def _jitted(value: Any) -> Parts | None:
    """A function under ``jax.jit``: the function, and the options that decide what is compiled."""
    if type(value).__name__ != "PjitFunction" or type(value).__module__ != "jaxlib._jax":
        return None
    info = value._jit_info
    said = "fun_sourceinfo", "fun_signature"  # file and line; the function itself is looked at
    options = {name: getattr(info, name) for name in info._fields if name not in said}
    plain = {name: atom(option) for name, option in options.items()}
    text = digest(repr(sorted((name, text) for name, text in plain.items() if text is not None)))
    others = [(f".{name}", option) for name, option in options.items() if plain[name] is None]
    return Parts(f"jit {text}", [(".__wrapped__", value.__wrapped__), *others])


# Attributes that flax keeps for itself: serial numbers, the trace that an object was made under, what it is doing.
_FLAX_NOISE = {
    "flax.linen.module": ("parent", "_parent_ref", "_id", "_state", "scope"),
    "flax.nnx.pytreelib": ("_pytree__state",),
    "flax.nnx.object": ("_object__state",),
    "flax.nnx.variablelib": ("_trace_state",),
}


def noise(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in _FLAX_NOISE.get(base.__module__, ())}


def _graph_definition(value: Any) -> Parts | None:
    """An NNX module without its arrays: attributes by the path that leads to them in the module."""
    if type(value).__name__ != "GraphDef" or type(value).__module__ != "flax.nnx.graphlib":
        return None
    nodes, attributes = iter(value.nodes), iter(value.attributes)
    try:
        children = list(_graph_node("", nodes, attributes))
    except (StopIteration, RuntimeError, AttributeError):
        return None
    listed_otherwise = next(nodes, None) is not None or next(attributes, None) is not None
    return None if listed_otherwise else Parts("graph definition", children)


def _graph_node(path: str, nodes: Iterator[Any], attributes: Iterator[Any]) -> Iterator[tuple[str, Any]]:
    """The next node of a definition, which lists nodes and attributes in the order of a walk through the module."""
    node = next(nodes)
    yield from ((f"{path} {name}", fact) for name, fact in _node_facts(node))
    for _ in range(getattr(node, "num_attributes", 0)):
        name, attribute = next(attributes)
        if type(attribute).__name__ == "NodeAttr":
            inner = list(_graph_node(f"{path}.{name}", nodes, attributes))
            yield from () if name in _GRAPH_NOISE else inner
        elif name not in _GRAPH_NOISE:
            yield f"{path}.{name}", attribute.value


# What an NNX module knows of itself: the trace it was made under, and which of its attributes are nodes.
_GRAPH_NOISE = ("_pytree__state", "_pytree__nodes")


def _node_facts(node: Any) -> Iterator[tuple[str, Any]]:
    """What kind of node it is. Nodes are numbered in order, so numbers count only where a node refers to another."""
    names = type(node).__dataclass_fields__
    for name in names:
        fact = getattr(node, name)
        if name == "metadata" and isinstance(fact, Mapping):
            fact = tuple(sorted(fact.items()))
        implied = name == "num_attributes" or (name == "index" and len(names) > 1) or fact is None
        if not implied and not (name == "metadata" and fact is node.type):
            yield name, fact


def registered(cls: type) -> Iterator[tuple[str, Any]]:
    """Functions that jax knows for a class, which no code names."""
    trees: Any = sys.modules.get("jax._src.tree_util")
    for registry in ("_registry", "_registry_with_keypaths"):
        entry = getattr(trees, registry, {}).get(cls)
        for name in getattr(entry, "_fields", ()) or getattr(entry, "__dict__", ()):
            yield f" pytree {name}", getattr(entry, name)


def primitive_rules(value: Any) -> Iterator[tuple[str, Any]]:
    """Rules that are registered for a primitive of the user's."""
    for module, names in _RULES.items():
        for name in names:
            table = getattr(sys.modules.get(module), name, None)
            if isinstance(table, dict):
                rule = table.get(value)
                if rule is not None:
                    yield f" {name}", rule
    lowerings = getattr(sys.modules.get("jax._src.interpreters.mlir"), "_platform_specific_lowerings", {})
    for platform, table in sorted(lowerings.items()):
        if value in table:
            yield f" lowering {platform}", table[value]


_RULES = {
    "jax._src.interpreters.ad": ("primitive_jvps", "primitive_transposes", "primitive_linearizations"),
    "jax._src.interpreters.batching": ("primitive_batchers", "fancy_primitive_batchers"),
    "jax._src.interpreters.mlir": ("_lowerings",),
    "jax._src.interpreters.partial_eval": ("custom_partial_eval_rules", "call_partial_eval_rules"),
}


def is_primitive(value: Any) -> bool:
    core: Any = sys.modules.get("jax._src.core")
    return core is not None and isinstance(value, core.Primitive)
