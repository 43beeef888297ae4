"""Why an op is served by the row that serves it: the same choice as ``dispatch``, told in full, for any known device."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rapid_llm.envs import environment
from rapid_llm.kernels.device import DeviceInfo, is_this_machine
from rapid_llm.kernels.dispatcher import catalog as catalogs
from rapid_llm.kernels.dispatcher.dispatch import Choice, answer, choose_by_size
from rapid_llm.kernels.dispatcher.ranking import Question, Verdict, why_after, why_first
from rapid_llm.kernels.dispatcher.served_kernel import OtherRow, ServedKernel
from rapid_llm.kernels.ops.interfaces import ITEMSIZE, Contract, Phase, Sizes
from rapid_llm.kernels.ops.tile_policy import TileChoice, choose_tiles, tiled_ops


@dataclass(frozen=True)
class Explanation:
    """The answer, as plain data.

    Attributes:
        op, device, dtype, shape: what was asked, defaults filled in.
        chosen: name of the row that serves, None when none may.
        rejected: every other row: {"name", "reasons"}.
        eligible: rows that may serve, best first: {"name", "why"}.
        evidence: of the chosen row: {"state", "record", "source_hash"}; None without one.
        tiles: launch knobs of the chosen row and their "source"; None when it takes none from the tile policy.
        contract: of the op, its cost as bytes and operations of this call.
    """

    op: str
    device: str
    dtype: str
    shape: Mapping[str, int]
    chosen: str | None
    rejected: tuple[Mapping[str, Any], ...]
    eligible: tuple[Mapping[str, Any], ...]
    evidence: Mapping[str, Any] | None
    tiles: Mapping[str, Any] | None
    contract: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the attributes as keys."""
        return asdict(self)

    @property
    def because(self) -> str:
        """Why the chosen row serves; empty where none may."""
        return next((entry["why"] for entry in self.eligible if entry["name"] == self.chosen), "")

    @property
    def evidence_text(self) -> str:
        """The evidence of the chosen row in a line; empty without one."""
        return _evidence_text(self.evidence) if self.evidence else ""

    def to_text(self) -> str:
        """The same for a reader."""
        shape = " ".join(f"{name}={value}" for name, value in self.shape.items())
        lines = [f"{self.op}  ({self.device}, {self.dtype}, {shape})", f"  {self.contract['summary']}"]
        lines += _entry("chosen", [self.chosen or "none: no row may serve"])
        lines += _entry("because", [self.because] if self.because else [])
        lines += _entry("evidence", [self.evidence_text] if self.evidence else [])
        lines += _entry("tiles", [_tiles_text(self.tiles)] if self.tiles else [])
        width = max((len(entry["name"]) for entry in self.rejected), default=0)
        told = [(entry["name"] if not i else "", why) for entry in self.rejected for i, why in enumerate(entry["reasons"])]
        return "\n".join([*lines, *_entry("rejected", [f"{name:<{width}}  {why}" for name, why in told])])


def _entry(label: str, values: list[str]) -> list[str]:
    return [f"  {label if not i else '':<9}{value}" for i, value in enumerate(values)]


def _evidence_text(evidence: Mapping[str, Any]) -> str:
    record = evidence["record"]
    if record is None:
        return "fallback row: tested in CI, needs none" if evidence["state"] == "fallback" else str(evidence["state"])
    state, commit = evidence["state"].replace("_", " "), record["commit"][:12] or "unknown"
    outcome = record["failure"] or f"{record['cases'].get('count', 0)} cases passed"
    return f"{state}: {outcome} on {record['device']}, {record['date']}, commit {commit}"


def _tiles_text(tiles: Mapping[str, Any]) -> str:
    knobs = " ".join(f"{name}={value}" for name, value in tiles.items() if name != "source")
    return f"{knobs}  from {tiles['source']}"


def explain(
    op: str,
    *,
    device: DeviceInfo,
    dtype: str | None = None,
    sizes: Sizes | None = None,
    phase: Phase | None = None,
    here: bool | None = None,
) -> Explanation:
    """Explain one choice. Needs neither the device nor torch nor Triton.

    Args:
        op: an op of the catalog.
        device: any entry of the device table, or this machine's.
        dtype: compute dtype; None is float32 on a CPU and bfloat16 on a GPU where the op has it.
        sizes: sizes of the call; the contract's defaults fill in the rest.
        phase: rows to serve; None is all that the op's contract has.
        here: whether the device is this machine's, so that missing packages count; None looks.
    Raises: ConfigError on an unknown op, dtype or size, naming the nearest known one, and on a bad RAPID_KERNELS.
    """
    contract = catalogs.catalog().contract(op)
    here = is_this_machine(device) if here is None else here
    dtype = dtype or default_dtype(contract, device)
    return explain_question(Question(op, device, dtype, {**contract.defaults, **(sizes or {})}, phase, here))


def explain_question(question: Question) -> Explanation:
    """Explain one choice as it was asked for: of a size that is left out, tiles and cost are those of the contract's default."""
    contract = catalogs.catalog().contract(question.op)
    choice = answer(question, environment().kernels)
    chosen, sizes = choice.chosen, {**contract.defaults, **question.sizes}
    return Explanation(
        op=question.op,
        device=question.device.name,
        dtype=question.dtype,
        shape=sizes,
        chosen=chosen.row.name if chosen else None,
        rejected=_rejected(choice),
        eligible=tuple({"name": verdict.row.name, "why": _why(verdict, choice)} for verdict in choice.ranking.eligible),
        evidence=_evidence(chosen) if chosen else None,
        tiles=_tiles(chosen, question, sizes) if chosen else None,
        contract=asdict(contract) | {"cost": asdict(contract.cost(sizes, ITEMSIZE[question.dtype]))},
    )


def served_kernels(questions: Iterable[Question]) -> list[ServedKernel]:
    """What serves each question of a model's layers, and why."""
    return [_served_kernel(question) for question in questions]


def _served_kernel(question: Question) -> ServedKernel:
    told = explain_question(question)
    return ServedKernel(
        op=told.op,
        summary=told.contract["summary"],
        dtype=told.dtype,
        sizes=dict(question.sizes),
        row=told.chosen or "",
        because=told.because,
        evidence=told.evidence_text,
        tiles=_tiles_of_question(told, question),
        by_size=_rows_by_size(question),
        others=[OtherRow(entry["name"], list(entry["reasons"])) for entry in told.rejected],
    )


def _tiles_of_question(told: Explanation, question: Question) -> str:
    if told.tiles is None:
        return ""
    if question.batch_invariant:
        return "those of one fixed batch, whatever a step holds"
    assumed = ", ".join(f"{name}={value}" for name, value in told.shape.items() if name not in question.sizes)
    return f"{_tiles_text(told.tiles)}{assumed and f', at {assumed}'}"


def _rows_by_size(question: Question) -> list[tuple[int, str]]:
    if question.batch_invariant:
        return []
    pieces = choose_by_size(question.op, device=question.device, dtype=question.dtype, **question.sizes)
    return [(most, row.name) for most, row in pieces] if len(pieces) > 1 else []


def default_dtype(contract: Contract, device: DeviceInfo) -> str:
    """The dtype that a model runs in on ``device``, where the op has it."""
    usual = "float32" if device.type == "cpu" else "bfloat16"
    return usual if usual in contract.dtypes else contract.dtypes[0]


def _rejected(choice: Choice) -> tuple[Mapping[str, Any], ...]:
    lost = [verdict for verdict in choice.ranking.eligible if verdict is not choice.chosen]
    ranked = [{"name": verdict.row.name, "reasons": [_why(verdict, choice)]} for verdict in lost]
    return (*ranked, *({"name": verdict.row.name, "reasons": list(verdict.reasons)} for verdict in choice.ranking.rejected))


def _why(verdict: Verdict, choice: Choice) -> str:
    if choice.chosen is None or verdict is choice.chosen:
        return "RAPID_KERNELS asks for it" if choice.override else why_first(verdict, choice.ranking.eligible[1:])
    if choice.override:
        return f"ranked after {choice.chosen.row.name}: RAPID_KERNELS asks for that"
    return why_after(verdict, choice.chosen)


def _evidence(chosen: Verdict) -> dict[str, Any]:
    evidence = chosen.evidence
    record = asdict(evidence.record) if evidence.record else None
    return {"state": evidence.state, "record": record, "source_hash": evidence.found_hash}


def _tiles(chosen: Verdict, question: Question, sizes: Sizes) -> dict[str, Any] | None:
    if not chosen.row.name.startswith("triton.") or question.op not in tiled_ops():
        return None
    choice: TileChoice = choose_tiles(question.op, question.device, question.dtype, sizes, any_triton=not question.here)
    return {**choice.tile.launch(), "source": choice.source}
