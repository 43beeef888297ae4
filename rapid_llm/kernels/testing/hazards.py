"""Finds, in Triton's IR, a store that a later load of the same program may or may not see.

A kernel that stores to global memory and then loads through the same argument needs ``tl.debug_barrier()`` in between: the
compiler may give the two different thread layouts, and its own barriers know shared memory only. The text of the TTGIR is read,
since the IR objects of Triton 3.6 to 3.9 differ. It cannot tell whether the two touch the same elements; the sanitizer can.
"""

import re
from dataclasses import dataclass, field

_FOLLOWS_FIRST_OPERAND = frozenset(
    {"tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.bitcast", "ttg.convert_layout"}
)
_LOADS = re.compile(r"(?:= )?\b(?:tt\.load|ttg\.async_copy_global_to_local|amdg?\.buffer_load) (%[\w#]+)")
_STORES = re.compile(r"^tt\.store (%[\w#]+)")
_BARRIER = re.compile(r"^(?:gpu|ttg)\.barrier\b")
_WAIT = re.compile(r"\bgriddepcontrol\.wait\b|\btt\.grid_dependency_wait\b")  # an instruction's text in Triton 3.6
_RESULT = re.compile(r"^(%\w+)(?::\d+)? = ([\w.]+)")


@dataclass(frozen=True)
class Hazard:
    """A load of what may have been stored before it: the kernel argument and the two source lines (0 where unknown)."""

    argument: str
    store_line: int
    load_line: int


def store_load_hazards(ttgir: str) -> list[Hazard]:
    """Every pair of a store and a later load through one argument with no barrier in between, loops included."""
    reader = _Reader(ttgir)
    found: set[Hazard] = set()
    _walk(reader, reader.body, set(), found)
    return sorted(found, key=lambda hazard: (hazard.argument, hazard.store_line, hazard.load_line))


def loaded_before_wait(ttgir: str) -> set[str]:
    """Arguments that are loaded through before the first wait for the kernels launched before, in the order of the text.

    They are all that are loaded through where nothing waits.
    """
    loaded: set[str] = set()
    _note_loads(_Reader(ttgir).body, loaded)
    return loaded


def _note_loads(operations: list["_Operation"], loaded: set[str]) -> bool:
    """Note arguments up to a wait; whether one was met."""
    for operation in operations:
        if _WAIT.search(operation.text):
            return True
        if _LOADS.search(operation.text):
            loaded.add(operation.root)
        if any(_note_loads(region, loaded) for region in operation.regions):
            return True
    return False


@dataclass
class _Operation:
    """One line of IR, the argument that it stores or loads through, and the regions it opens."""

    text: str
    root: str = ""
    regions: list[list["_Operation"]] = field(default_factory=list)


_Stores = set[tuple[str, int]]


def _walk(reader: "_Reader", operations: list[_Operation], pending: _Stores, found: set[Hazard]) -> _Stores:
    """Follow the operations in order; returns the stores that no barrier has ordered yet."""
    for operation in operations:
        if operation.regions:
            pending = _walk_regions(reader, operation, pending, found)
        elif _BARRIER.search(operation.text):
            pending = set()
        elif _STORES.search(operation.text):
            pending = pending | {(operation.root, reader.line(operation.text))}
        elif _LOADS.search(operation.text):
            line = reader.line(operation.text)
            found |= {Hazard(argument, stored, line) for argument, stored in pending if argument == operation.root}
    return pending


def _walk_regions(reader: "_Reader", operation: _Operation, pending: _Stores, found: set[Hazard]) -> _Stores:
    if "scf.if" in operation.text:  # a barrier on one side orders nothing on the other
        sides = [_walk(reader, region, set(pending), found) for region in operation.regions]
        untouched = [pending] if len(sides) < 2 else []
        return set().union(*sides, *untouched)
    for _ in range(2 if "scf." in operation.text else 1):  # the second round meets the stores of the first
        for region in operation.regions:
            pending = _walk(reader, region, pending, found)
    return pending


class _Reader:
    """The text of a module as a tree of operations, with what defines each value."""

    def __init__(self, text: str) -> None:
        self._locations = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
        self._operands: dict[str, tuple[str, str]] = {}  # value -> operation and first operand
        self._carried: dict[str, list[str]] = {}  # results of a loop -> what they start as
        self.body = self._read([line.strip() for line in text.splitlines() if not line.startswith("#")])

    def _read(self, lines: list[str]) -> list[_Operation]:
        top: list[_Operation] = []
        stack = [top]
        for line in lines:
            if line.startswith("}"):
                stack.pop()
                if re.match(r"\}[^{]*\{", line):  # "} else {": the operation goes on with another region
                    stack[-1][-1].regions.append([])
                    stack.append(stack[-1][-1].regions[-1])
                continue
            # At once: regions side by side use the same names, so a name means what was last defined before its use.
            access = _STORES.search(line) or _LOADS.search(line)
            stack[-1].append(_Operation(line, self._root(access[1]) if access else ""))
            self._define(line)
            if re.search(r"\{(?: loc\(.*\))?$", line):
                stack[-1][-1].regions.append([])
                stack.append(stack[-1][-1].regions[-1])
        return top

    def _define(self, line: str) -> None:
        result = _RESULT.match(line)
        if result is None:
            return
        carried = re.search(r"iter_args\((.*?)\)", line)
        if result[2] == "scf.for" and carried:
            pairs = re.findall(r"(%\w+) = (%[\w#]+)", carried[1])
            self._carried[result[1]] = [start for _, start in pairs]
            self._operands.update({inner: ("iter_arg", start) for inner, start in pairs})
            return
        operand = re.search(r"%[\w#]+", line[result.end() :])
        if operand:
            self._operands[result[1]] = (result[2], operand[0])

    def _root(self, value: str) -> str:
        """The kernel argument that a pointer was made from, or the value at which the trail ends."""
        for _ in range(1000):
            name, _, index = value.partition("#")
            if name in self._carried:
                value = self._carried[name][int(index or 0)]
                continue
            operation, operand = self._operands.get(name, ("", ""))
            if operation != "iter_arg" and operation not in _FOLLOWS_FIRST_OPERAND:
                return name.removeprefix("%")
            value = operand
        return value

    def line(self, text: str) -> int:
        """The line of the Python source that an operation was compiled from."""
        location = text.rpartition("loc(")[2]
        for _ in range(10):
            found = re.search(r'"[^"]+\.py":(\d+):', location)
            if found:
                return int(found[1])
            reference = re.search(r"#loc\d*", location)
            if reference is None:
                return 0
            location = self._locations.get(reference[0], "")
        return 0
