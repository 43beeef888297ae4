"""Finds, in PTX, what a kernel reads or writes before it waits for the end of those that were launched before it."""

import re

READ_EARLY = {"weight_ptr", "words_ptr"}  # weights, and words of them, which no kernel writes
_WAIT = "griddepcontrol.wait"
_PARAM = re.compile(r"ld\.param\S*\s+(%\w+), \[\w+_param_(\d+)\]")
_INSTRUCTION = re.compile(r"(?:@!?%\w+\s+)?([a-z]\S*)\s+(.*);")
_REGISTER = re.compile(r"%\w+")


def early_accesses(launch):
    """What comes before the wait in the text of a kernel and must not: accesses but reads of weights, and ways around the wait.

    The compiler keeps the order of accesses to global memory and of the wait, for all have effects. An address is followed back
    to the pointers among the kernel's arguments; where it leads to none, the access is one that must not be.
    """
    before, waits, _ = launch.ptx[launch.ptx.index(".entry") :].partition(_WAIT)
    if not waits:
        return [f"{launch.kernel} never waits"]
    kinds = [(name, kind) for name, (kind, _) in launch.specialization.items() if kind != "constexpr"]
    roots, found = {}, []
    for line in map(str.strip, before.splitlines()):
        if parameter := _PARAM.search(line):
            name, kind = kinds[int(parameter[2])] if int(parameter[2]) < len(kinds) else ("", "")
            roots[parameter[1]] = {name} if kind.startswith("*") else set()
        elif instruction := _INSTRUCTION.match(line):
            opcode, operands = instruction.groups()
            if ".global" in opcode:
                bases = _roots_of(roots, re.findall(r"\[([^]]*)\]", operands)[-1])
                if not bases or bases - READ_EARLY or opcode.startswith(("st.", "red.", "atom.")):
                    found.append(f"{opcode} of {', '.join(sorted(bases)) or 'what is not known'}")
            elif opcode.startswith("bra"):
                if f"\n{operands}:" not in before:
                    found.append("a branch around the wait")
            else:
                result, _, sources = operands.partition("}" if operands.startswith("{") else ",")
                for register in _REGISTER.findall(result):
                    roots[register] = _roots_of(roots, sources)
        elif "ret;" in line:
            found.append("a return")
    return found


def _roots_of(roots, text):
    return set().union(*(roots.get(register, set()) for register in _REGISTER.findall(text)))
