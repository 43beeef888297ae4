"""The families, listed by name, and the rows and contracts gathered from them."""

import importlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from rapid_llm.envs import nearest
from rapid_llm.errors import ConfigError
from rapid_llm.kernels.ops.interfaces import Contract, Family, KernelSpec

# A new family is one name here and its ops/<family>/rows.py.
FAMILY_MODULES = tuple(
    f"rapid_llm.kernels.ops.{family}.rows"
    for family in (
        "activation",
        "attention",
        "embeddings",
        "fused",
        "gemm",
        "kvcache",
        "moe",
        "norm",
        "quantization",
        "rotary",
        "sampling",
    )
)

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Catalog:
    """Everything the families declare.

    Attributes:
        contracts: by op.
        rows: of each op, in the order of declaration.
        families: the family's name by op.
    """

    contracts: Mapping[str, Contract]
    rows: Mapping[str, tuple[KernelSpec, ...]]
    families: Mapping[str, str]

    def contract(self, op: str) -> Contract:
        """The contract of ``op``. Raises: ConfigError naming the nearest op."""
        if op not in self.contracts:
            raise ConfigError("unknown op", got=repr(op), wanted=nearest(op, self.contracts), change="name an op of the catalog")
        return self.contracts[op]

    def row(self, op: str, name: str) -> KernelSpec:
        """The row ``name`` of ``op``. Raises: ConfigError naming the nearest row."""
        self.contract(op)
        for row in self.rows[op]:
            if row.name == name:
                return row
        known = [row.name for row in self.rows[op]]
        raise ConfigError(f"unknown row of {op}", got=repr(name), wanted=nearest(name, known), change="name a row of the op")

    def all_rows(self) -> tuple[KernelSpec, ...]:
        """Every row, by op."""
        return tuple(row for rows in self.rows.values() for row in rows)


@cache
def catalog() -> Catalog:
    """The catalog of this package, checked. Raises: ConfigError on the first thing that is wrong in it."""
    return build_catalog(importlib.import_module(module).FAMILY for module in FAMILY_MODULES)


def build_catalog(families: Iterable[Family]) -> Catalog:
    """Gather families into one catalog.

    Raises: ConfigError when an op or a row stands twice, a row's op has no contract, a target does not read
        "module:function", or a limit names a size that the contract does not know.
    """
    families = tuple(families)
    contracts = [(contract, family.name) for family in families for contract in family.contracts]
    rows = [row for family in families for row in family.rows]
    _refuse_twice("op", (contract.op for contract, _ in contracts))
    _refuse_twice("row", (row.name for row in rows))
    by_op = {contract.op: contract for contract, _ in contracts}
    for row in rows:
        _check_row(row, by_op)
    return Catalog(
        contracts=by_op,
        rows={op: tuple(row for row in rows if row.op == op) for op in by_op},
        families={contract.op: family for contract, family in contracts},
    )


def _refuse_twice(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"the {what} {name!r} stands {count} times in the catalog", wanted="once", change="rename one")


def _check_row(row: KernelSpec, contracts: Mapping[str, Contract]) -> None:
    where = f"row {row.name!r}"
    if row.op not in contracts:
        raise ConfigError(
            f"{where} has no contract", got=f"op {row.op!r}", wanted=nearest(row.op, contracts), change="declare one"
        )
    if not _TARGET.fullmatch(row.target):
        raise ConfigError(
            f"{where} has a bad target", got=repr(row.target), wanted="'package.module:function'", change="correct it"
        )
    contract = contracts[row.op]
    unknown = sorted(set(row.limits) - size_names(contract))
    if unknown:
        wanted = nearest(unknown[0], size_names(contract))
        raise ConfigError(f"{where} limits an unknown size", got=unknown[0], wanted=wanted, change="correct its name")


def size_names(contract: Contract) -> set[str]:
    """Every size that a call of the op may be described by."""
    return {*contract.defaults, *contract.maxima}
