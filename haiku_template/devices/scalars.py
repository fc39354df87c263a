"""Packed scalars of a call's steps: each array that a program returns takes time."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Scalars(Mapping[str, Any]):
    """Scalars by name: columns [steps] of one table [steps, names] for each dtype.

    A table may have further rows and columns.
    """

    tables: tuple[Any, ...]
    names: tuple[tuple[str, ...], ...] = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: str) -> Any:
        for table, names in zip(self.tables, self.names, strict=True):
            if name in names:
                return table[:, names.index(name)]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:  # Without an index on the devices.
        return any(name in names for names in self.names)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(*self.names)

    def __len__(self) -> int:
        return sum(map(len, self.names))


def pack(scalars: Mapping[str, Any]) -> Scalars:
    """Packs the scalars of a step into tables of one row."""
    groups: dict[str, list[str]] = {}
    for name, x in sorted(scalars.items()):
        groups.setdefault(str(jnp.result_type(x)), []).append(name)
    tables = (
        jnp.stack([jnp.asarray(scalars[name]) for name in names])[None]
        for _, names in sorted(groups.items())
    )
    return Scalars(tuple(tables), tuple(tuple(x) for _, x in sorted(groups.items())))


@jax.jit
def first_row(scalars: Scalars) -> dict[str, jax.Array]:
    """Scalars of the first step of a call, as arrays []."""
    return {name: scalars[name][0] for name in scalars}
