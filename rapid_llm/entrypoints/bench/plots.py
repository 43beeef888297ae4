"""A run as plots: SVG written here, in a page or by itself, without a script and without a request to anywhere."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rapid_llm.entrypoints.bench.report import NAMES, to_text
from rapid_llm.entrypoints.bench.running import Run
from rapid_llm.entrypoints.bench.summary import PERCENTILES, latencies, percentile

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1d1d1f; --soft: #5c5f66; --line: #d5d7db; --curve: #0b62c4; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --text: #e8e9eb; --soft: #a3a8b0; --line: #3a3e45; --curve: #6db3ff; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 60rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
pre { overflow: auto; font-size: .85rem; } svg { display: block; width: 100%; height: auto; margin: 1rem 0;
  font-family: system-ui, sans-serif; }
.page { fill: var(--page); } .axis { stroke: var(--line); } .tick { fill: var(--soft); font-size: 12px; }
.name { fill: var(--text); font-size: 13px; } .title { fill: var(--text); font-size: 15px; font-weight: 600; }
.curve { fill: none; stroke: var(--curve); stroke-width: 2; } .mark { fill: var(--curve); }
"""
_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 50
_TICKS, _POINTS = 5, 200


@dataclass(frozen=True)
class Curve:
    """One plot.

    Attributes:
        title: what it shows.
        axes: names of x and y.
        points: (x, y), by x.
        marks: text by (x, y), for whoever points at it.
    """

    title: str
    axes: tuple[str, str]
    points: Sequence[tuple[float, float]]
    marks: Mapping[tuple[float, float], str]


def curves(run: Run, result: Mapping[str, Any]) -> list[Curve]:
    """The plots of a run: percentiles of the time to a first token and of the gaps, and throughput over time."""
    found = latencies(run)
    plots = [_percentiles(NAMES[name], sorted(found[name])) for name in ("ttft", "gap") if found[name]]
    series = [(float(at), float(rate)) for at, rate in result["tokens_per_second_over_time"]]
    if series:
        plots.append(Curve("new tokens a second over time", ("seconds from the beginning", "tokens/s"), series, {}))
    return plots


def to_html(run: Run, result: Mapping[str, Any]) -> str:
    """A page with the table and the plots."""
    title, table = html.escape(f"{run.model} at {run.load.url}"), html.escape(to_text(run, result))
    plots = "\n".join(f'<svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}">{_drawn(each)}</svg>' for each in curves(run, result))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    head += f"<style>{_STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><pre>{table}</pre>\n{plots}\n</body></html>\n'


def to_svg(run: Run, result: Mapping[str, Any]) -> str:
    """One picture with the plots below each other."""
    plots = curves(run, result)
    size = f"{_WIDTH} {_HEIGHT * max(len(plots), 1)}"
    drawn = "\n".join(f'<g transform="translate(0 {number * _HEIGHT})">{_drawn(each)}</g>' for number, each in enumerate(plots))
    background = '<rect class="page" width="100%" height="100%"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}"><style>{_STYLE}</style>{background}\n{drawn}\n</svg>\n'


def _percentiles(name: str, ordered: Sequence[float]) -> Curve:
    steps = min(len(ordered) - 1, _POINTS) or 1
    points = [(100 * step / steps, percentile(ordered, step / steps)) for step in range(steps + 1)]
    marks = {(float(p), percentile(ordered, p / 100)): f"p{p}" for p in PERCENTILES}
    return Curve(f"{name}: percentiles", ("% of all", "milliseconds"), points, marks)


def _drawn(curve: Curve) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    most_x, most_y = _round_up(max(x for x, _ in curve.points)), _round_up(max(y for _, y in curve.points))

    def place(x: float, y: float) -> tuple[float, float]:
        return round(_LEFT + x / most_x * (right - _LEFT), 1), round(bottom - y / most_y * (bottom - _TOP), 1)

    line = " ".join(f"{x},{y}" for x, y in (place(*point) for point in curve.points))
    parts = [f'<text class="title" x="{_LEFT}" y="22">{html.escape(curve.title)}</text>', *_frame(curve, most_x, most_y)]
    parts.append(f'<polyline class="curve" points="{line}"/>')
    for (x, y), text in curve.marks.items():
        at_x, at_y = place(x, y)
        said = html.escape(f"{text}: {y:,.2f} {curve.axes[1]}")
        parts.append(f'<circle class="mark" cx="{at_x}" cy="{at_y}" r="4"><title>{said}</title></circle>')
    return "".join(parts)


def _frame(curve: Curve, most_x: float, most_y: float) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for step in range(_TICKS + 1):
        x, y = _LEFT + step / _TICKS * (right - _LEFT), bottom - step / _TICKS * (bottom - _TOP)
        yield f'<line class="axis" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{most_x * step / _TICKS:,.4g}</text>'
        yield f'<line class="axis" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{most_y * step / _TICKS:,.4g}</text>'
    yield f'<text class="name" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{curve.axes[0]}</text>'
    middle = (_TOP + bottom) / 2
    yield f'<text class="name" transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{curve.axes[1]}</text>'


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 and 10 times a power of ten, so that five ticks are round."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-9))
