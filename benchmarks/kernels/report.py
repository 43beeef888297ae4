"""Tables and plots of what the kernel benchmarks measured: every cell, losses included.

``python -m benchmarks.kernels.report [--device h200]`` prints a table an op; ``--markdown`` writes them into docs/PERFORMANCE.md
between its markers, ``--html FILE`` a page with plots. Reads benchmarks/results/kernels_<device>.jsonl and needs no GPU.
"""

import argparse
import html
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "PERFORMANCE.md"
BEGIN, END = "<!-- kernels: begin -->", "<!-- kernels: end -->"
NOTHING = "No results yet: `python -m benchmarks.kernels.report` finds no times."
_PEER = "peer:"
_ALL = {"*": "any arm"}  # the line of a cell whose tensors could not be made
Line = Mapping[str, Any]


# What was measured.


@dataclass(frozen=True)
class Arm:
    """One implementation's time of one cell, in microseconds; ``us`` is None where there is none, and ``why`` says why.

    Attributes:
        name: our row's, or "peer:<name>".
        us, least_us, most_us: median, smallest and largest run.
        first_call_s: the first call, compilation included.
        above_ceiling: faster than the machine can be: a measuring error.
        skipped: whether it was not tried, rather than tried in vain.
        cold: where its inputs came from, as the bench tells it.
    """

    name: str
    us: float | None
    least_us: float | None
    most_us: float | None
    first_call_s: float | None
    why: str
    above_ceiling: bool
    skipped: bool
    cold: str

    @property
    def peer(self) -> str | None:
        """The peer's name, None for a row of ours."""
        return self.name.removeprefix(_PEER) if self.name.startswith(_PEER) else None


@dataclass(frozen=True)
class Outcome:
    """All arms of one cell, of the newest run that measured it.

    Attributes:
        op, variant, dtype, sizes: what was called; ``sizes`` as the results hold them.
        run: the run's id.
        floor_us: what the machine's ceilings allow; None where no line tells.
        node_us: what an empty node of a graph costs.
        arms: ours first, then peers, by name.
        peer, peer_us: the best one of this run and of record, and its time; None without any.
        lines: the lines of the results.
    """

    op: str
    variant: str
    dtype: str
    sizes: Any
    run: str
    floor_us: float | None
    node_us: float | None
    arms: tuple[Arm, ...]
    peer: str | None
    peer_us: float | None
    lines: tuple[Line, ...]

    @property
    def label(self) -> str:
        """The sizes, as text."""
        sizes = self.sizes
        return " ".join(f"{name}={value}" for name, value in sizes.items()) if isinstance(sizes, Mapping) else str(sizes)

    @property
    def ours(self) -> Arm | None:
        """Our fastest row, None where none has a time that can be."""
        timed = (arm for arm in self.arms if arm.peer is None and arm.us and not arm.above_ceiling)
        return min(timed, key=lambda arm: arm.us or math.inf, default=None)

    @property
    def gain(self) -> float | None:
        """The best peer's time over ours: below 1 is a loss."""
        return self.peer_us / self.ours.us if self.peer_us and self.ours and self.ours.us else None

    @property
    def is_loss(self) -> bool:
        """Whether the best peer is faster, or has a time where we have none."""
        return self.peer is not None and (self.gain is None or self.gain < 1)

    @property
    def tokens(self) -> int | None:
        """How many tokens, sequences or updates the call takes."""
        sizes = self.sizes if isinstance(self.sizes, Mapping) else {}
        if "num_tokens" in sizes:
            return int(sizes["num_tokens"])
        count = sizes.get("num_seqs", sizes.get("num_updates"))
        return None if count is None else int(count) * int(sizes.get("q_len", 1))

    def notes(self) -> list[str]:
        """What a reader must know of the figures of this cell."""
        found = [f"{_ALL.get(arm.name, arm.name)}: no time" for arm in self.arms if not arm.us and arm.peer is None]
        found += [f"{arm.name}: above the ceiling, a measuring error" for arm in self.arms if arm.above_ceiling]
        found += [f"{arm.name}: {arm.why}" for arm in self.arms if arm.us and arm.why]
        if self.ours and ("in cache" in self.ours.cold or "flushed" in self.ours.cold):
            found.append(self.ours.cold)
        return found


def read_lines(file: Path) -> list[Line]:
    """The JSON objects of a results file, none where there is no file. Raises: SystemExit that names a line that is none."""
    if not file.exists():
        return []
    lines: list[Line] = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            lines.append({"run": line["run"], "op": line["op"], "cell": line["cell"], "arm": line["arm"], **line})
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{file}:{number} is no result of a kernel ({error!r}); remove or repair it") from error
    return lines


def cells_of(lines: Iterable[Line]) -> list[Outcome]:
    """The newest run of every (op, cell, variant, dtype), by op, variant and dtype in the order they first appear.

    Of an arm that one run measured twice, the later line counts.
    """
    newest: dict[tuple[str, str, str, str], list[Line]] = {}
    for line in lines:
        key = (line["op"], line.get("variant") or "", line.get("dtype") or "", json.dumps(line["cell"], sort_keys=True))
        kept = newest.setdefault(key, [])
        if kept and line["run"] > kept[0]["run"]:
            kept.clear()
        if not kept or line["run"] == kept[0]["run"]:
            kept.append(line)
    groups = {group: position for position, group in enumerate(dict.fromkeys(key[:3] for key in newest))}
    return sorted((_cell(kept) for kept in newest.values()), key=lambda cell: groups[cell.op, cell.variant, cell.dtype])


def _cell(lines: Sequence[Line]) -> Outcome:
    first = lines[0]
    arms = {line["arm"]: _arm(line) for line in lines}
    ordered = sorted(arms.values(), key=lambda arm: (arm.peer is not None, arm.name))
    floor = next((line["floor_us"] for line in lines if line.get("floor_us")), None)
    node = next((line["node_us"] for line in lines if line.get("node_us")), None)
    variant, dtype = first.get("variant") or "", first.get("dtype") or ""
    times = {arm.name: arm.us for arm in ordered if arm.us and not arm.above_ceiling}
    peer, peer_us = _best_peer(first["op"], first["cell"], variant, dtype, times, floor)
    return Outcome(
        first["op"], variant, dtype, first["cell"], first["run"], floor, node, tuple(ordered), peer, peer_us, tuple(lines)
    )


def _arm(line: Line) -> Arm:
    us = line.get("us")
    why = str(line.get("problem") or line.get("skipped") or "")
    return Arm(
        name=line["arm"],
        us=us,
        least_us=line.get("least_us"),
        most_us=line.get("most_us"),
        first_call_s=line.get("first_call_s"),
        why=why or ("" if us else "no reason was recorded"),
        above_ceiling=bool(line.get("above_ceiling")),
        skipped=bool(line.get("skipped")),
        cold=line.get("cold") or "",
    )


def _best_peer(
    op: str, sizes: Any, variant: str, dtype: str, times: Mapping[str, float], floor_us: float | None
) -> tuple[str, float] | tuple[None, None]:
    """The fastest peer of the run or of record: what it is called, and its time. Without a floor, of the run alone."""
    if floor_us and isinstance(sizes, Mapping):
        from benchmarks.kernels.cells import Cell  # here, since it brings torch along
        from benchmarks.kernels.peers import best_peer

        best = best_peer(Cell(op, sizes, dtype, variant), times, floor_us)
        return (best.text, best.us) if best else (None, None)
    peers = [name for name in times if name.startswith(_PEER)]
    if not peers:
        return None, None
    name = min(peers, key=lambda name: times[name])
    return f"{name.removeprefix(_PEER)} in this run", times[name]


# Text.


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _range(arm: Arm) -> str:
    spread = f" ({_us(arm.least_us)} to {_us(arm.most_us)})" if arm.least_us and arm.most_us else ""
    return _us(arm.us) + spread


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _over_floor(us: float | None, cell: Outcome) -> float | None:
    """The time over what it cannot go below: the floor, or the empty node where that is more."""
    least = max(cell.floor_us or 0.0, cell.node_us or 0.0)
    return us / least if us and cell.floor_us else None


COLUMNS = ("cell", "floor", "our fastest row", "us", "of floor", "best peer", "us", "peer/ours", "first call, s", "notes")
_NUMBERS = frozenset((1, 3, 4, 6, 7, 8))


def row_of(cell: Outcome) -> tuple[str, ...]:
    """The columns of one cell."""
    ours = cell.ours
    loss = " loss" if cell.is_loss else ""
    return (
        cell.label,
        _us(cell.floor_us),
        ours.name if ours else "none",
        _range(ours) if ours else "-",
        _times(_over_floor(ours.us, cell)) if ours else "-",
        cell.peer or "none",
        _us(cell.peer_us),
        f"{_times(cell.gain)}{loss}",
        "-" if ours is None or ours.first_call_s is None else f"{ours.first_call_s:.2f}",
        "; ".join(cell.notes()),
    )


def groups_of(cells: Iterable[Outcome]) -> dict[tuple[str, str, str], list[Outcome]]:
    """Cells by op, variant and dtype: one table, one plot each."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for cell in cells:
        groups.setdefault((cell.op, cell.variant, cell.dtype), []).append(cell)
    return groups


def _name(group: tuple[str, str, str]) -> str:
    return ", ".join(part for part in group if part)


def missing(cells: Sequence[Outcome]) -> list[str]:
    """Why arms have no time: a sentence for each arm and reason. What was skipped is told once a run, at the first of its cells;
    it stands for the cells after it that have no line of that arm."""
    where: dict[tuple[str, str], list[str]] = {}
    skipped: dict[str, str] = {}
    for cell in cells:
        found = {arm.name: arm for arm in cell.arms}
        for arm in cell.arms:
            if not arm.us:
                where.setdefault((arm.name, arm.why), []).append(cell.label)
                if arm.skipped:
                    skipped[arm.name] = arm.why
        for name, why in skipped.items():
            if name not in found:
                where[name, why].append(cell.label)
    told = []
    for (name, why), labels in where.items():
        which = "every cell" if len(labels) == len(cells) else ", ".join(labels)
        told.append(f"No time of {_ALL.get(name, name)} in {which}: {why}")
    return told


def summary(cells: Sequence[Outcome]) -> str:
    """How many cells have a peer, how many of those are lost, and the geometric mean of peer/ours."""
    gains = [cell.gain for cell in cells if cell.gain]
    losses, compared = sum(cell.is_loss for cell in cells), sum(cell.peer is not None for cell in cells)
    mean = f", geometric mean of peer/ours {math.exp(sum(map(math.log, gains)) / len(gains)):.2f}" if gains else ""
    return f"{len(cells)} cells, {compared} with a peer, {losses} of them lost{mean}"


def origin(cells: Sequence[Outcome]) -> str:
    """The machine, versions, commits and commands that the figures come from, and what an empty node of a graph costs."""
    lines = [line for cell in cells for line in cell.lines]

    def each(name: str, show: Callable[[Any], str] = str) -> str:
        return " and ".join(dict.fromkeys(show(line[name]) for line in lines if line.get(name)))

    def versions(value: Any) -> str:
        found = value.items() if isinstance(value, dict) else ()
        return ", ".join(f"{name} {version}" for name, version in found if version)

    nodes = sorted(cell.node_us for cell in cells if cell.node_us)
    node = f"; an empty node of a graph takes {_us(nodes[len(nodes) // 2])} us" if nodes else ""
    dates = sorted({str(line.get("date") or line["run"])[:10] for line in lines})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    commands = each("command", lambda command: f"`{command}`")
    return f"{each('machine')}; {each('versions', versions)}; commit {each('commit')}; {when}; {commands}{node}"


LEGEND = (
    "Microseconds, medians (smallest to largest run). The floor is what the bytes and operations of the call cost at the ceilings"
    ' measured in the same run; "of floor" is the time over it, or over an empty node of a graph where that is more. peer/ours is'
    " the best peer's time over ours: below 1 is a loss."
)


def to_text(cells: Sequence[Outcome]) -> str:
    """The tables for a terminal."""
    if not cells:
        return NOTHING.replace("`", "")
    parts = [origin(cells).replace("`", ""), LEGEND, summary(cells)]
    for group, members in groups_of(cells).items():
        rows = [COLUMNS, *map(row_of, members)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        lines = [f"\n{_name(group)}: {summary(members)}"]
        for row in rows:
            padded = (
                text.rjust(width) if column in _NUMBERS else text.ljust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join(padded).rstrip())
        parts.append("\n".join([*lines, *missing(members)]))
    return "\n".join(parts)


def to_markdown(cells: Sequence[Outcome]) -> str:
    """The generated part of docs/PERFORMANCE.md, without its markers."""
    if not cells:
        return NOTHING
    parts = ["## Kernels", f"{origin(cells)}.", f"{LEGEND} {summary(cells)}."]
    for group, members in groups_of(cells).items():
        table = [
            _markdown_row(COLUMNS),
            "|" + "".join("--:|" if column in _NUMBERS else "---|" for column in range(len(COLUMNS))),
        ]
        table += [_markdown_row(row_of(cell)) for cell in members]
        parts += [f"### {_name(group)}", f"{summary(members)}.", "\n".join(table)]
        parts += ["\n".join(f"- {_markdown(sentence)}" for sentence in missing(members))] if missing(members) else []
    return "\n\n".join(parts)


def _markdown_row(columns: Iterable[str]) -> str:
    return f"| {' | '.join(_markdown(text).replace(' loss', ' **loss**') for text in columns)} |"


def _markdown(text: str) -> str:
    """Text on one line that ends no table cell and opens no tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def put_between_markers(page: str, generated: str) -> str:
    """The page with its generated part replaced. Raises: SystemExit when it does not have both markers, once, in order."""
    if (page.count(BEGIN), page.count(END)) != (1, 1) or page.index(BEGIN) > page.index(END):
        raise SystemExit(f"the page does not have {BEGIN} and {END} once each, in this order; put them where the tables belong")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{rest.partition(END)[2]}"


# The page with plots. No script, no request: SVG written here, colours by prefers-color-scheme.

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1d1d1f; --soft: #5c5f66; --line: #d5d7db; --panel: #f6f7f8;
  --loss: #b3261e; --s0: #0b62c4; --s1: #c2410c; --s2: #15803d; --s3: #8b1fa9; --s4: #a16207; --s5: #0e7490;
  --s6: #be185d; --s7: #4b5563; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --text: #e8e9eb; --soft: #a3a8b0; --line: #3a3e45; --panel: #1e2126; --loss: #ff8a80;
    --s0: #6db3ff; --s1: #ff9d66; --s2: #5fd38a; --s3: #d99bf0; --s4: #e6c15a; --s5: #5cd0e6; --s6: #ff8fc0; --s7: #b6bcc6; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 110rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { margin: 2.5rem 0 .25rem; font-size: 1.25rem; } p { max-width: 80ch; margin: .5rem 0; }
.soft { color: var(--soft); } a { color: inherit; } nav ul { columns: 16rem; padding-left: 1.2rem; }
.side { display: grid; gap: 1rem 1.5rem; grid-template-columns: minmax(0, 1fr); }
@media (min-width: 75rem) { .side { grid-template-columns: minmax(0, 34rem) minmax(0, 1fr); } }
figure { margin: 0; } figcaption { color: var(--soft); font-size: .9rem; } svg.plot { display: block; width: 100%; height: auto; }
.scroll { overflow: auto; max-height: 52rem; border: 1px solid var(--line); border-radius: 4px; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .4rem .6rem; color: var(--soft); }
th, td { padding: .25rem .6rem; border-top: 1px solid var(--line); text-align: right; vertical-align: top; white-space: nowrap; }
th:first-child { text-align: left; } thead th { position: sticky; top: 0; background: var(--panel); }
td.why { white-space: normal; min-width: 14rem; text-align: left; } .loss { color: var(--loss); font-weight: 600; }
ul.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: .4rem 0; list-style: none; font-size: .9rem; }
ul.key svg { width: 14px; height: 14px; vertical-align: -2px; }
.axis { stroke: var(--line); } .tick { fill: var(--soft); font-size: 12px; } .name { fill: var(--text); font-size: 13px; }
.floor { stroke: var(--text); stroke-width: 1.5; } .node { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 5 4; }
.ours { stroke: none; fill: currentColor; } .peer { stroke: currentColor; stroke-width: 1.8; fill: none; }
"""
_STYLE += "".join(f".s{number} {{ color: var(--s{number}); }}\n" for number in range(8))

_WIDTH, _HEIGHT = 560, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 48


@dataclass(frozen=True)
class Point:
    """One mark of a plot: where, which arm, and what a pointer on it reads."""

    x: float
    y: float
    arm: str
    text: str


class _Axis:
    """Logarithms of values to places on the page."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = math.log10(min(values)), math.log10(max(values))
        margin = max((high - low) * 0.05, 0.08)
        self.low, self.high, self.start, self.end = low - margin, high + margin, start, end

    def place(self, value: float) -> float:
        return round(self.start + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Powers of ten, with 2 and 5 between them where there are few."""
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        steps = (1,) if self.high - self.low > 3 else (1, 2, 5)
        found = [step * 10.0**decade for decade in decades for step in steps]
        return [value for value in found if self.low <= math.log10(value) <= self.high]


def plot(title: str, axes: tuple[str, str], points: Sequence[Point], arms: Sequence[str], lines: Mapping[str, float]) -> str:
    """An SVG of points on logarithmic axes.

    Args:
        title: what it shows, for those who do not see it.
        axes: names of the x and the y axis.
        points: what to draw. All values are above 0.
        arms: every arm, in the order of the colours.
        lines: "diagonal" draws y = x (its value is not used); any other name is a class, drawn level at its value.
    """
    levels = [value for name, value in lines.items() if name != "diagonal"]
    x = _Axis([point.x for point in points], _LEFT, _WIDTH - _RIGHT)
    heights = [point.y for point in points] + levels + ([point.x for point in points] if "diagonal" in lines else [])
    y = _Axis(heights, _HEIGHT - _BOTTOM, _TOP)
    body = [f"<title>{_escape(title)}</title>"]
    body.append(f"<desc>{_escape(f'{len(points)} points on logarithmic axes; the table beside holds the same figures.')}</desc>")
    body += _frame(x, y, axes)
    if "diagonal" in lines:
        low, high = max(x.low, y.low), min(x.high, y.high)
        ends = [(x.place(10**at), y.place(10**at)) for at in (low, high)]
        body.append(_line(*ends[0], *ends[1], "floor", "the floor: time = floor"))
    for name, value in lines.items():
        if name != "diagonal":
            said = {"floor": "the floor", "node": "an empty node of a graph"}[name]
            body.append(_line(_LEFT, y.place(value), _WIDTH - _RIGHT, y.place(value), name, f"{said}: {_us(value)}"))
    for point in points:
        number = list(arms).index(point.arm)
        body.append(_mark(number, point.arm, x.place(point.x), y.place(point.y), point.text))
    return f'<svg class="plot" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(body)}</svg>'


def alone(svg: str) -> str:
    """A plot as a file of its own, with a ground to stand on."""
    ground = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="var(--page)"/>'
    start, end = svg.split(">", 1)
    return f'{start} xmlns="http://www.w3.org/2000/svg"><style>{_STYLE}</style>{ground}{end}\n'


def _frame(x: _Axis, y: _Axis, axes: tuple[str, str]) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in x.ticks():
        at = x.place(value)
        yield f'<line class="axis" x1="{at}" y1="{_TOP}" x2="{at}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{at}" y="{bottom + 16}" text-anchor="middle">{_tick(value)}</text>'
    for value in y.ticks():
        at = y.place(value)
        yield f'<line class="axis" x1="{_LEFT}" y1="{at}" x2="{right}" y2="{at}"/>'
        yield f'<text class="tick" x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{_tick(value)}</text>'
    yield f'<text class="name" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{_escape(axes[0])}</text>'
    middle = (_TOP + bottom) / 2
    yield f'<text class="name" transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{_escape(axes[1])}</text>'


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str, said: str) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"><title>{_escape(said)}</title></line>'


_SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-4 -4h8v8h-8z",
    "M0 -5l5 9h-10z",
    "M0 -5.5l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
    "M0 5l5 -9h-10z",
    "M-2 -5h4v3h3v4h-3v3h-4v-3h-3v-4h3z",
    "M-5 -3h10v6h-10z",
    "M-3 -5h6v10h-6z",
)


def _mark(number: int, arm: str, x: float, y: float, text: str) -> str:
    """A mark in the arm's colour and shape, so that it is told apart without colours; hollow for a peer."""
    kind = "peer" if arm.startswith(_PEER) else "ours"
    place = f'transform="translate({x} {y})"'
    drawn = f'class="s{number % 8} {kind}" {place} d="{_SHAPES[number % 8]}"'
    return f"<path {drawn}><title>{_escape(text)}</title></path>"


def _escape(text: str) -> str:
    return html.escape(text, quote=True)


def to_html(cells: Sequence[Outcome]) -> str:
    """The whole page."""
    parts = ["<h1>Kernels against their floor and their peers</h1>"]
    if cells:
        parts += [f"<p>{_escape(origin(cells).replace('`', ''))}.</p>", f'<p class="soft">{_escape(LEGEND)}</p>']
        parts.append(f"<p>{_escape(summary(cells))}.</p>")
        groups = groups_of(cells)
        links = "".join(f'<li><a href="#{_anchor(group)}">{_escape(_name(group))}</a></li>' for group in groups)
        parts.append(f'<nav aria-label="tables"><ul>{links}</ul></nav>')
        parts += [_section(group, members) for group, members in groups.items()]
    else:
        parts.append(f"<p>{_escape(NOTHING.replace('`', ''))}</p>")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>Kernels</title>'
    body = "\n".join(parts)
    inside = f"<head>{head}<style>{_STYLE}</style></head>\n<body><main>\n{body}\n</main></body>"
    return f'<!DOCTYPE html>\n<html lang="en">\n{inside}\n</html>\n'


def _anchor(group: tuple[str, str, str]) -> str:
    return _escape("-".join(part.replace(" ", "_") for part in group if part))


def _section(group: tuple[str, str, str], cells: Sequence[Outcome]) -> str:
    name = _name(group)
    arms = sorted({arm.name for cell in cells for arm in cell.arms}, key=lambda arm: (arm.startswith(_PEER), arm))
    key = "".join(
        f'<li><svg viewBox="-7 -7 14 14" aria-hidden="true">{_mark(number, arm, 0, 0, arm)}</svg> {_escape(arm)}</li>'
        for number, arm in enumerate(arms)
    )
    told = "".join(f"<p>{_escape(sentence)}.</p>" for sentence in missing(cells))
    figures = f'<div><ul class="key" aria-label="marks">{key}</ul>{_figures(name, cells, arms)}</div>'
    anchor = _anchor(group)
    return (
        f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{_escape(name)}</h2><p>{_escape(summary(cells))}.</p>'
        f'<div class="side">{figures}{_table(name, cells, arms)}</div>{told}</section>'
    )


def _figures(name: str, cells: Sequence[Outcome], arms: Sequence[str]) -> str:
    """Time against floor, and time over floor against the count of tokens."""
    timed = [(cell, arm) for cell in cells if cell.floor_us for arm in cell.arms if arm.us]
    if not timed:
        return '<p class="soft">Nothing to draw: no arm has both a time and a floor.</p>'
    against_floor, against_tokens = [], []
    for cell, arm in timed:
        us, floor_us = arm.us or 0.0, cell.floor_us or 0.0
        text = f"{arm.name}, {cell.label}: {_us(us)} us, floor {_us(floor_us)} us"
        against_floor.append(Point(floor_us, us, arm.name, text))
        if cell.tokens:
            against_tokens.append(Point(cell.tokens, _over_floor(us, cell) or 1.0, arm.name, text))
    nodes = sorted(cell.node_us for cell in cells if cell.node_us)
    lines = {"diagonal": 0.0} | ({"node": nodes[len(nodes) // 2]} if nodes else {})
    roofline = plot(f"{name}: time against floor", ("floor, us", "time, us"), against_floor, arms, lines)
    said = "Time against floor. Solid: the floor. Dashed: what an empty node of a graph takes. Peers are hollow."
    figures = f"<figure>{roofline}<figcaption>{said}</figcaption></figure>"
    if against_tokens:
        title = f"{name}: time over floor by tokens"
        by_tokens = plot(title, ("tokens or sequences of the call", "time / floor"), against_tokens, arms, {"floor": 1.0})
        said = "Time over the floor, or over the empty node where that is more, by the count of tokens."
        figures += f"<figure>{by_tokens}<figcaption>{said}</figcaption></figure>"
    return figures


def _table(name: str, cells: Sequence[Outcome], arms: Sequence[str]) -> str:
    """Every time that the plots show, and what they cannot: reasons, flags, first calls."""
    names = ("cell", "floor, us", *arms, "of floor", "best peer", "its us", "peer/ours", "first call, s")
    head = "".join(f'<th scope="col">{_escape(column)}</th>' for column in (*names, "notes"))
    rows = []
    for cell in cells:
        found, columns = {arm.name: arm for arm in cell.arms}, row_of(cell)
        times = (_range(found[arm]) if arm in found and found[arm].us else "no time" if arm in found else "-" for arm in arms)
        texts = "".join(f"<td>{_escape(text)}</td>" for text in (columns[1], *times, columns[4], columns[5], columns[6]))
        loss = ' class="loss"' if cell.is_loss else ""
        rows.append(
            f'<tr><th scope="row">{_escape(cell.label)}</th>{texts}<td{loss}>{_escape(columns[7])}</td><td>{columns[8]}</td>'
            f'<td class="why">{_escape(columns[9])}</td></tr>'
        )
    caption = f"<caption>{_escape(name)}, microseconds</caption>"
    inside = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{_escape(name)}: all figures">{inside}</div>'


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.report", description=__doc__)
    parser.add_argument("--device", default="h200", help="whose results, by the name of the device table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    parser.add_argument(
        "--markdown", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the tables between the markers of a page"
    )
    asked = parser.parse_args(arguments)
    cells = cells_of(read_lines(RESULTS / f"kernels_{asked.device}.jsonl"))
    if asked.html:
        asked.html.parent.mkdir(parents=True, exist_ok=True)
        asked.html.write_text(to_html(cells), encoding="utf-8")
    if asked.markdown:
        page = asked.markdown.read_text(encoding="utf-8")
        asked.markdown.write_text(put_between_markers(page, to_markdown(cells)), encoding="utf-8")
    if not (asked.html or asked.markdown):
        sys.stdout.write(to_text(cells) + "\n")


if __name__ == "__main__":
    main()
