"""Reads kernels' source for offsets that can overflow: an id is made int64 before it is multiplied by a stride.

``tl.program_id`` is int32, and so are row, page and slot ids that a kernel loads. A product of such a value with a runtime number
that ends up in an address must have an int64 factor. Products with compile-time numbers alone are let pass: a tile's first row
is bounded by the tensor's rows. Names are followed through assignments, loops and calls within a module.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_MEMORY = ("load", "store", "atomic_add", "atomic_max", "atomic_min", "atomic_cas", "atomic_xchg", "prefetch")


@dataclass(frozen=True)
class NarrowProduct:
    """A product in an address that may overflow 32 bits: where it stands and how it reads."""

    file: str
    line: int
    function: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.source} has no int64 factor"


def narrow_products(path: Path) -> list[NarrowProduct]:
    """Every product in an address of the file's kernels that has an id as a factor and no int64 one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kernels = {node.name: _Kernel(node) for node in tree.body if isinstance(node, ast.FunctionDef) and _is_jit(node)}
    for _ in kernels:  # a chain of calls is at most as long as there are kernels
        for kernel in kernels.values():
            kernel.pass_on(kernels)
    found = {
        NarrowProduct(str(path), product.lineno, kernel.node.name, ast.unparse(product))
        for kernel in kernels.values()
        for product in kernel.narrow_products()
    }
    return sorted(found, key=lambda product: (product.line, product.source))


def _is_jit(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


@dataclass
class _Kernel:
    """One kernel: what its names are assigned, and what is known of its parameters from its callers."""

    node: ast.FunctionDef
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    narrow_parameters: set[str] = field(default_factory=set)  # given a narrow id by some caller
    returns_address: bool = False  # some caller makes an address of what it returns

    def __post_init__(self) -> None:
        for argument in (*self.node.args.args, *self.node.args.kwonlyargs):
            if argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation):
                self.constants.add(argument.arg)
        for node in ast.walk(self.node):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, node.value)
            elif isinstance(node, ast.AugAssign):
                self._assign(node.target, ast.copy_location(ast.BinOp(_read(node.target), node.op, node.value), node))
            elif isinstance(node, ast.For):
                for bound in node.iter.args if isinstance(node.iter, ast.Call) else [node.iter]:
                    self._assign(node.target, bound)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for part, part_value in zip(target.elts, values, strict=False):
                self._assign(part, part_value)
        elif isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append(value)

    # ---- what an expression is

    def is_id(self, expression: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """Whether a program id or a loaded number is part of the value."""
        if isinstance(expression, ast.Name):
            values = [] if expression.id in seen else self.assigned.get(expression.id, [])
            return expression.id in self.narrow_parameters or any(self.is_id(value, seen | {expression.id}) for value in values)
        if isinstance(expression, ast.Call) and _called(expression) in ("program_id", "load"):
            return True
        return any(self.is_id(part, seen) for part in _operands(expression))

    def is_wide(self, expression: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """Whether the value is int64 wherever it comes from."""
        if isinstance(expression, ast.Name):
            if expression.id in seen:
                return True  # a loop over itself says nothing new
            values = self.assigned.get(expression.id, [])
            return bool(values) and all(self.is_wide(value, seen | {expression.id}) for value in values)
        if isinstance(expression, ast.Call):
            if "int64" in " ".join(ast.unparse(argument) for argument in expression.args):
                return _called(expression) in ("to", "cast", "full", "zeros")
            return _called(expression) not in ("load", "program_id") and any(
                self.is_wide(part, seen) for part in _operands(expression)
            )
        if isinstance(expression, ast.BinOp):
            return self.is_wide(expression.left, seen) or self.is_wide(expression.right, seen)
        if isinstance(expression, ast.IfExp):
            return self.is_wide(expression.body, seen) and self.is_wide(expression.orelse, seen)
        if isinstance(expression, ast.Subscript):
            return self.is_wide(expression.value, seen)
        return False

    def is_constant(self, expression: ast.expr) -> bool:
        """Whether the value is known when the kernel is compiled."""
        return all(
            name.id in self.constants or name.id.isupper() or name.id == "tl"
            for name in ast.walk(expression)
            if isinstance(name, ast.Name)
        ) and not any(isinstance(node, ast.Call) and _called(node) in ("load", "program_id") for node in ast.walk(expression))

    # ---- addresses

    def addresses(self) -> list[ast.expr]:
        """Every expression that is an address or is part of one, by way of names too."""
        waiting = [
            call.args[0]
            for call in ast.walk(self.node)
            if isinstance(call, ast.Call) and call.args and _called(call) in _MEMORY and ast.unparse(call.func).startswith("tl.")
        ]
        # A pointer that is moved here may be read elsewhere, in a function it is passed to.
        waiting += [value for name, values in self.assigned.items() if name.endswith(("_ptr", "_ptrs")) for value in values]
        if self.returns_address:
            waiting += [node.value for node in ast.walk(self.node) if isinstance(node, ast.Return) and node.value is not None]
        found: list[ast.expr] = []
        followed: set[str] = set()
        while waiting:
            expression = waiting.pop()
            if isinstance(expression, ast.Call) and _called(expression) == "load":
                continue  # its value is an id; its own address is in the list already
            found.append(expression)
            if isinstance(expression, ast.Name) and expression.id not in followed:
                followed.add(expression.id)
                waiting += self.assigned.get(expression.id, [])
            waiting += _operands(expression)
        return found

    def narrow_products(self) -> Iterable[ast.BinOp]:
        """Products in addresses that have an id as a factor and no int64 one."""
        for expression in self.addresses():
            if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Mult):
                sides = (expression.left, expression.right)
                if any(self.is_constant(side) for side in sides) or any(self.is_wide(side) for side in sides):
                    continue
                if any(self.is_id(side) for side in sides):
                    yield expression

    def pass_on(self, kernels: dict[str, "_Kernel"]) -> None:
        """Tell the kernels called from here which of their parameters are narrow ids, and whether they return addresses."""
        for expression in self.addresses():
            if isinstance(expression, ast.Call) and _called(expression) in kernels:
                kernels[_called(expression)].returns_address = True
        for call in ast.walk(self.node):
            callee = kernels.get(_called(call)) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
            if callee is None or not isinstance(call, ast.Call):
                continue
            names = [argument.arg for argument in callee.node.args.args]
            given = [*zip(names, call.args, strict=False), *((word.arg or "", word.value) for word in call.keywords)]
            for name, value in given:
                if self.is_id(value) and not self.is_wide(value):
                    callee.narrow_parameters.add(name)


def _read(target: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Name(target.id, ast.Load()), target) if isinstance(target, ast.Name) else target


def _called(call: ast.Call) -> str:
    """The last name of what is called: "program_id" of ``tl.program_id(0)``."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _operands(expression: ast.expr) -> list[ast.expr]:
    """The parts of an expression whose values make up its value."""
    if isinstance(expression, ast.BinOp):
        return [expression.left, expression.right]
    if isinstance(expression, ast.UnaryOp):
        return [expression.operand]
    if isinstance(expression, ast.IfExp):
        return [expression.body, expression.orelse]
    if isinstance(expression, ast.Subscript):
        return [expression.value]
    if isinstance(expression, ast.Call):
        receiver = [expression.func.value] if isinstance(expression.func, ast.Attribute) else []
        own = [part for part in receiver if not (isinstance(part, ast.Name) and part.id == "tl")]
        arguments = expression.args[1:] if _called(expression) == "where" else expression.args
        return [*own, *arguments]
    return []
