"""Trees at program boundaries: as flat lists, with the structure, and path, shape and dtype of every leaf, beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


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


def spec_text(spec: Any) -> str:
    """``float32[64,10]``, as error messages and keys write a shape and dtype."""
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]"
