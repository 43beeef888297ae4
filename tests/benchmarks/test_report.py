"""The report of the kernel benchmarks: the newest run, losses and gaps included, and a page that is well formed."""

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from benchmarks.kernels import peers, report
from benchmarks.kernels.cells import Cell
from benchmarks.record import RESULTS

DECODE, PREFILL = {"num_tokens": 1, "d": 4096}, {"num_tokens": 4096, "d": 4096}
VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}


def line(arm, us, cell=DECODE, **fields):
    values = {
        "run": "2026-11-30T10:00:00+00:00",
        "bench": "norm",
        "op": "rms_norm",
        "cell": cell,
        "variant": "",
        "dtype": "bfloat16",
        "arm": arm,
        "us": us,
        "least_us": us and us * 0.9,
        "most_us": us and us * 1.1,
        "runs": 20,
        "method": "graph",
        "first_call_s": 0.25,
        "floor_us": 4.0,
        "node_us": 1.1,
        "above_ceiling": False,
        "cold": "rotating 64 sets, 300 MB",
        "problem": "",
        "skipped": "",
        "date": "2026-11-30T10:00:00+00:00",
        "command": "python -m benchmarks.kernels.bench_norm",
        "commit": "abc1234",
        "machine": "Xeon, 16 cores, NVIDIA H200",
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "numpy": None},
    }
    return {**values, **fields}


WON = [line("triton.rms_norm", 5.0), line("torch.rms_norm", 9.0), line("peer:quack", 6.0), line("peer:liger", 7.5)]
LOST = [line("triton.rms_norm", 50.0, PREFILL, floor_us=40.0), line("peer:quack", 42.0, PREFILL, floor_us=40.0)]


@pytest.fixture(autouse=True)
def _no_peers_of_record(monkeypatch):
    """Only the peers of the run, whatever is recorded of others."""
    monkeypatch.setattr(peers, "recorded_cell", lambda cell: None)


@pytest.fixture
def results(monkeypatch, tmp_path):
    """Writes the results file of the h200."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)

    def write(lines):
        (tmp_path / "kernels_h200.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")

    return write


def _markdown_of(lines):
    return report.to_markdown(report.cells_of(lines))


def _rows_of(markdown):
    """The cells of every table row, by the sizes of the cell."""
    rows = [[text.strip() for text in re.split(r"(?<!\\)\|", row)[1:-1]] for row in markdown.splitlines() if row.startswith("| ")]
    return {row[0]: row for row in rows if row[0] != "cell"}


# ---- what counts


def test_of_each_cell_the_newest_run_counts_wherever_it_stands_in_the_file():
    older = [line("triton.rms_norm", 99.0, run="2026-11-01"), line("peer:gone", 1.0, run="2026-11-01")]
    other = [line("triton.rms_norm", 33.0, PREFILL, run="2026-11-01")]

    for lines in (older + other + WON, WON + other + older):
        cells = {cell.label: cell for cell in report.cells_of(lines)}

        assert (cells["num_tokens=1 d=4096"].ours.us, cells["num_tokens=1 d=4096"].peer) == (5.0, "quack in this run")
        assert cells["num_tokens=4096 d=4096"].ours.us == 33.0
        assert "gone" not in report.to_markdown(list(cells.values()))


@pytest.mark.parametrize("field", ["op", "variant", "dtype"])
def test_runs_of_another_op_variant_or_dtype_replace_nothing(field):
    cells = report.cells_of([*WON, line("triton.rms_norm", 3.0, run="2026-12-01", **{field: "another"})])

    assert [cell.ours.us for cell in cells] == [5.0, 3.0]
    assert len(report.groups_of(cells)) == 2


def test_an_arm_measured_twice_in_a_run_counts_once_and_later():
    (cell,) = report.cells_of([line("triton.rms_norm", 8.0), line("triton.rms_norm", 5.0)])

    assert [arm.us for arm in cell.arms] == [5.0]


def test_a_row_tells_floor_our_fastest_row_and_the_best_peer():
    row = _rows_of(_markdown_of(WON))["num_tokens=1 d=4096"]

    assert row[1:] == ["4.00", "triton.rms_norm", "5.00 (4.50 to 5.50)", "1.25", "quack in this run", "6.00", "1.20", "0.25", ""]


def test_losses_are_shown_marked_and_counted():
    markdown = _markdown_of(WON + LOST)

    assert _rows_of(markdown)["num_tokens=4096 d=4096"][5:8] == ["quack in this run", "42.0", "0.84 **loss**"]
    assert "2 cells, 2 with a peer, 1 of them lost, geometric mean of peer/ours 1.00" in markdown
    assert "0.84 loss" in report.to_text(report.cells_of(WON + LOST))
    assert '<td class="loss">0.84 loss</td>' in report.to_html(report.cells_of(WON + LOST))


def test_a_peer_with_a_time_where_we_have_none_is_a_loss():
    (cell,) = report.cells_of([line("triton.rms_norm", None, problem="out: relative error 3e-1"), line("peer:quack", 6.0)])

    assert (cell.ours, cell.is_loss) == (None, True)
    row = _rows_of(report.to_markdown([cell]))[cell.label]
    assert row[2:8] == ["none", "-", "-", "quack in this run", "6.00", "- **loss**"]
    assert row[9] == "triton.rms_norm: no time"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        pytest.param({"problem": "out: relative error 3e-1"}, "out: relative error 3e-1", id="wrong-result"),
        pytest.param({"skipped": "package quack is not installed"}, "package quack is not installed", id="skipped"),
        pytest.param({}, "no reason was recorded", id="nothing-told"),
    ],
)
def test_a_missing_time_is_shown_with_its_reason(fields, why):
    cells = report.cells_of([*WON, *LOST, line("peer:slow", None, **fields), line("peer:slow", 60.0, PREFILL)])

    for told in (report.to_text(cells), report.to_markdown(cells), report.to_html(cells)):
        assert f"No time of peer:slow in num_tokens=1 d=4096: {why}" in told
    cells = report.cells_of([*WON, line("peer:slow", None, **fields)])
    assert f"No time of peer:slow in every cell: {why}" in report.to_text(cells)


def test_a_time_above_the_ceiling_is_flagged_and_a_peer_with_one_is_not_the_best():
    fast = {"above_ceiling": True}
    cells = report.cells_of([*WON, line("peer:quack", 0.5, **fast)])
    assert cells[0].peer == "liger in this run"
    assert "peer:quack: above the ceiling, a measuring error" in report.to_markdown(cells)

    cells = report.cells_of([line("triton.rms_norm", 0.5, **fast), line("torch.rms_norm", 9.0)])
    assert "triton.rms_norm: above the ceiling, a measuring error" in report.to_markdown(cells)
    assert cells[0].ours.name == "torch.rms_norm"


def test_a_reason_told_once_a_run_stands_for_the_cells_after_it():
    skipped = line("peer:slow", None, skipped="package slow is not installed")

    assert "No time of peer:slow in every cell: package slow" in _markdown_of([*WON, skipped, *LOST])
    assert "No time of peer:slow in num_tokens=4096 d=4096: package slow" in _markdown_of(
        [*WON, *LOST, {**skipped, "cell": PREFILL}]
    )


def test_a_cell_whose_tensors_could_not_be_made_is_shown():
    markdown = _markdown_of([*WON, line("*", None, PREFILL, problem="no workload: out of memory")])

    assert "No time of any arm in num_tokens=4096 d=4096: no workload: out of memory" in markdown
    assert _rows_of(markdown)["num_tokens=4096 d=4096"][2] == "none"


def test_a_time_is_compared_with_the_empty_node_where_that_is_more_than_the_floor():
    row = _rows_of(_markdown_of([line("triton.rms_norm", 2.0, floor_us=0.1, node_us=1.25)]))["num_tokens=1 d=4096"]

    assert (row[1], row[4]) == ("0.10", "1.60")


@pytest.mark.parametrize("cold", ["in cache, 64 sets of 16 kB", "1 set of 3 GB, cache flushed before each call"])
def test_inputs_that_lie_elsewhere_than_in_rotating_sets_are_told(cold):
    assert cold in _markdown_of([line("triton.rms_norm", 3.0, cold=cold)])
    assert "rotating" not in _markdown_of(WON)


def test_a_recorded_peer_counts_at_this_runs_ceilings(monkeypatch):
    asked = Cell("rms_norm", DECODE)
    record = {"arm": "quack", "us": 9.0, "floor_us": 8.0}
    monkeypatch.setattr(peers, "recorded_cell", lambda cell: record if cell == asked else None)

    row = _rows_of(_markdown_of(WON))["num_tokens=1 d=4096"]

    assert row[5].startswith("quack recorded at 9.00 us over a floor of 8.00")
    assert row[6:8] == ["4.50", "0.90 **loss**"]


def test_a_row_of_ours_that_peers_use_too_counts_on_both_sides():
    gemm = {"op": "dense_gemm", "cell": {"num_tokens": 1, "n": 64, "k": 64}}
    (cell,) = report.cells_of([line("cublas.dense_gemm", 5.0, **gemm), line("triton.dense_gemm", 6.0, **gemm)])

    assert (cell.ours.name, cell.peer, cell.gain) == ("cublas.dense_gemm", "torch_cublas in this run", 1.0)


def test_the_header_says_machine_versions_commits_and_commands():
    markdown = _markdown_of([*WON, *(each | {"commit": "def5678"} for each in LOST)])

    assert (
        "Xeon, 16 cores, NVIDIA H200; torch 2.11.0, triton 3.6.0; commit abc1234 and def5678; 2026-11-30;"
        " `python -m benchmarks.kernels.bench_norm`; an empty node of a graph takes 1.10 us."
    ) in markdown


@pytest.mark.parametrize("text", ["{", "[]", '{"op": "rms_norm"}'])
def test_a_line_that_is_no_result_stops_the_report_and_is_named(text, results, tmp_path):
    results(WON)
    file = tmp_path / "kernels_h200.jsonl"
    file.write_text(file.read_text() + text + "\n")

    with pytest.raises(SystemExit, match=r"kernels_h200\.jsonl:5 is no result"):
        report.main([])


def test_text_that_would_end_a_table_cell_or_open_a_tag_is_escaped():
    told = _markdown_of([line("triton.rms_norm", 5.0, problem="a | b\n<b>")])

    assert r"a \| b &lt;b>" in told
    assert "<b>" not in report.to_html(report.cells_of([line("triton.rms_norm", 5.0, problem="a | b\n<b>")]))


# ---- the pages


class _Nesting(HTMLParser):
    """Follows tags as they open and close; ``wrong`` holds what does not match."""

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.ids, self.links = [], [], [], []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("href", "src") if name in values]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append((tag, self.getpos()))


HOSTILE = [line('triton.rms_norm<"&', 7.0, {"num_tokens": 3, "d": 8}, variant="a<b", problem="<svg>")]
UNTIMED = [line("triton.rms_norm", None, op="sample", cell={"num_seqs": 1}, skipped="no")]
SPARSE = [{"run": "1", "op": "rope", "cell": "all", "arm": "triton.rope", "us": 1.0, "floor_us": 1.0}]
PAGES = pytest.mark.parametrize(
    "lines",
    [
        pytest.param([], id="no-results"),
        pytest.param(WON + LOST, id="two-cells"),
        pytest.param(WON + HOSTILE, id="hostile-text"),
        pytest.param(UNTIMED, id="no-time-at-all"),
        pytest.param(SPARSE, id="fields-that-are-missing"),
        pytest.param([line(f"peer:{number}", 1.0 + number) for number in range(20)], id="more-arms-than-colours"),
    ],
)


@PAGES
def test_the_page_is_well_formed_and_fetches_nothing(lines):
    page = report.to_html(report.cells_of(lines))

    parser = _Nesting()
    parser.feed(page)
    parser.close()
    assert (parser.wrong, parser.open) == ([], [])
    assert len(parser.ids) == len(set(parser.ids))
    assert {link.removeprefix("#") for link in parser.links} <= set(parser.ids)
    assert not re.search(r"https?:|url\(|@import|<script", page)
    for svg in re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL):
        ET.fromstring(svg)


def test_a_plot_holds_a_mark_of_every_time_the_floor_and_the_empty_node():
    page = report.to_html(report.cells_of([*WON, *LOST, line("peer:slow", None, skipped="no")]))
    roofline, by_tokens = (ET.fromstring(svg) for svg in re.findall(r'<svg class="plot".*?</svg>', page, flags=re.DOTALL))

    for svg in (roofline, by_tokens):
        assert svg.find("title").text
        assert svg.find("desc").text
        texts = [mark.find("title").text for mark in svg.findall("path")]
        assert len(texts) == len(WON + LOST)
        assert "peer:quack, num_tokens=4096 d=4096: 42.0 us, floor 40.0 us" in texts
    assert {mark.get("class") for mark in roofline.findall("line")} == {"axis", "floor", "node"}
    assert {mark.get("class") for mark in by_tokens.findall("line")} == {"axis", "floor"}
    (floor,) = (mark for mark in roofline.findall("line") if mark.get("class") == "floor")
    assert float(floor.get("x1")) < float(floor.get("x2"))
    assert float(floor.get("y1")) > float(floor.get("y2"))
    assert page.count("<table>") == 1


def test_slower_is_higher_and_a_larger_floor_lies_to_the_right():
    page = report.to_html(report.cells_of(WON + LOST))
    svg = ET.fromstring(re.search(r'<svg class="plot".*?</svg>', page, flags=re.DOTALL)[0])
    places = {}
    for mark in svg.findall("path"):
        x, y = map(float, re.findall(r"[\d.]+", mark.get("transform")))
        places[mark.find("title").text.split(":  ")[0]] = (x, y)
        assert report._LEFT <= x <= report._WIDTH - report._RIGHT
        assert report._TOP <= y <= report._HEIGHT - report._BOTTOM
    (fast,) = (place for text, place in places.items() if " 5.00 us" in text)
    (slow,) = (place for text, place in places.items() if " 9.00 us" in text)
    (large,) = (place for text, place in places.items() if " 50.0 us" in text)
    assert fast[0] == slow[0] < large[0]
    assert fast[1] > slow[1] > large[1]


def test_the_command_writes_between_the_markers_and_nothing_else(results, tmp_path):
    results(WON + LOST)
    page = tmp_path / "page.md"
    page.write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")

    report.main(["--markdown", str(page), "--html", str(tmp_path / "page.html")])
    once = page.read_text()
    report.main(["--markdown", str(page)])

    assert page.read_text() == once
    assert once.startswith(f"above\n{report.BEGIN}\n")
    assert once.endswith(f"{report.END}\nbelow\n")
    assert "old" not in once
    assert len(_rows_of(once)) == 2
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_the_command_prints_tables_of_the_device_asked_for(results, capsys):
    results(WON)

    report.main([])
    assert "rms_norm, bfloat16: 1 cells, 1 with a peer, 0 of them lost" in capsys.readouterr().out
    report.main(["--device", "b200"])
    assert capsys.readouterr().out.startswith("No results yet")


@pytest.mark.parametrize("page", ["", report.BEGIN, f"{report.END} {report.BEGIN}", 2 * f"{report.BEGIN}{report.END}"])
def test_a_page_without_its_markers_is_refused(page):
    with pytest.raises(SystemExit, match="once each"):
        report.put_between_markers(page, "new")


def test_the_performance_page_is_what_the_results_say(monkeypatch):
    monkeypatch.undo()  # the recorded peers count here
    page = report.PAGE.read_text(encoding="utf-8")
    cells = report.cells_of(report.read_lines(RESULTS / "kernels_h200.jsonl"))

    now = report.put_between_markers(page, report.to_markdown(cells))
    assert now == page, "run python -m benchmarks.kernels.report --markdown"
