"""Trees at program boundaries: as flat lists, with the structure, and path, shape and dtype of every leaf, beside."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax

from nitro_cli.experiment.content import content_digest


@dataclass(frozen=True)
class Leaves:
    """A tree that crosses program boundaries as a flat list: its structure, and path, shape and dtype per leaf."""

    structure: Any
    paths: tuple[str, ...]
    specs: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, tree: Any) -> Leaves:
        """Describe ``tree``, whose leaves are arrays or shape structs."""
        with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        paths = [jax.tree_util.keystr(path, simple=True, separator=".") or "value" for path, _ in with_paths]
        if len(set(paths)) != len(paths):
            paths = [f"{path}#{index}" if paths.count(path) > 1 else path for index, path in enumerate(paths)]
        specs = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in with_paths)
        return cls(structure, tuple(paths), specs)

    def tree(self, leaves: Any) -> Any:
        return jax.tree.unflatten(self.structure, leaves)

    def described(self, name: str) -> dict[str, str]:
        """``{"ps.dense.kernel": "float32[64,10]"}``, for keys and reasons."""
        return {f"{name}.{path}": spec_text(spec) for path, spec in zip(self.paths, self.specs, strict=True)}


_KEPT: list[Any] = []


def structure_text(structure: Any) -> str:
    """A tree's structure as a text that decides it by content, for keys.

    jax's own text of it shows the static data of a node by ``repr``, which may hold an address. Static data may have a
    method ``content()`` that says it in plain values; what has no content gets a text that holds in this process only.
    """
    if structure.node_data() is None:
        return "*"
    kind, static = structure.node_data()
    static = static.content() if hasattr(static, "content") else static
    try:
        decided = "" if static is None else content_digest(static)[:16]
    except TypeError:
        _KEPT.append(static)  # so that no other object comes to have its id
        decided = f"process {os.getpid()} object {id(static)}"
    inner = ", ".join(map(structure_text, structure.children()))
    return f"{kind.__module__}.{kind.__qualname__}[{decided}]({inner})"


def spec_text(spec: Any) -> str:
    """``float32[64,10]``, as error messages and keys write a shape and dtype."""
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]"
