"""Metrics: their names, what they count, where they are served; and logs of requests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from asyncspec_nodes.console.log import make_logger
from asyncspec_nodes.console.log_table import LogTable
from asyncspec_nodes.http.access import ServiceOptions
from asyncspec_nodes.http.keys import ApiKeys
from asyncspec_nodes.http.metrics import FAMILIES, Metrics
from asyncspec_nodes.http.probes import Probes
from asyncspec_nodes.http.server import HttpServer
from asyncspec_nodes.node import listen
from asyncspec_nodes.serving.totals import DISTRIBUTIONS, REASONS, Totals
from asyncspec_protocol.ids import Rank
from asyncspec_protocol.messages import Status
from toy_service import Toy

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "asyncspec.json"
UNITS = ("seconds", "bytes")

STAGE = Status(0, Rank(2), "verify", (4, 8), 9.0, 3.0, 2_000_000, 1, 2, 30, model="toy")


def sample_names() -> set[str]:
    """Every sample that a service may expose."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {m.full_name + end for m in FAMILIES for end in suffixes.get(m.kind, ("",))}


def test_names_follow_prometheus_conventions() -> None:
    for metric in FAMILIES:
        assert re.fullmatch(r"asyncspec(_[a-z]+)+", metric.full_name)
        assert (metric.kind == "counter") == metric.full_name.endswith("_total")
        assert metric.kind != "histogram" or metric.full_name.endswith(UNITS)
        assert not re.search(r"_(ms|mib|kb|milliseconds|count|sum|bucket)$", metric.full_name)
        assert metric.text[:1].isupper() or metric.text[0] in "1("
    assert len({metric.full_name for metric in FAMILIES}) == len(FAMILIES)


def test_every_query_of_the_dashboard_names_a_metric_and_its_labels() -> None:
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [one["definition"] for one in board["templating"]["list"] if "definition" in one]
    labels = {m.full_name: m.labels for m in FAMILIES}
    for query in queries:
        used = set(re.findall(r"\basyncspec_\w+", query))
        assert used
        assert used <= sample_names(), query
        known = {label for name in used for label in labels.get(re.sub(r"_bucket$", "", name), ())}
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert set(re.split(r",\s*", group)) <= known | {"le"}, query
        for name in re.findall(r"(\w+)[!=]~?\"", query):
            assert name in known, query


def test_the_text_has_help_and_type_and_no_foreign_family() -> None:
    totals = Totals(lambda: 1.0)
    draft = Status(
        *(0, Rank(0), "draft", (0, 0), 9.0, 3.0, 2_000_000, 1, 2, 30, (Rank(1),), (0.5,), (9,)),
        model="toy",
        totals={**totals.sums, "of_a_later_version": 3.0},
        distributions={**totals.distributions, "queue": (1.0,)},
    )
    text = Metrics().text((draft, STAGE), "served").decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in FAMILIES:
        family = found[metric.full_name.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.documentation == metric.text
        assert all("served" in sample.labels.values() for sample in family.samples) or (
            "model" not in metric.labels
        )
    assert not found["asyncspec_queue_seconds"].samples  # of another version's buckets
    ours = {metric.full_name.removesuffix("_total") for metric in FAMILIES}
    assert ours == {name for name in found if not name.startswith("process_")}


@given(st.data())
def test_totals_count_every_request_and_token_once(data: st.DataObject) -> None:
    """Whatever requests do: every distribution has as many as there were."""
    now = 0.0
    totals = Totals(lambda: now)
    running: dict[int, int] = {}
    ends = dict.fromkeys(REASONS, 0)
    tokens = first = restarts = 0
    for number in range(data.draw(st.integers(0, 30))):
        now += data.draw(st.floats(0, 400))
        what = data.draw(st.sampled_from(["arrive", "emit", "finish", "refuse"]))
        if what == "arrive" or not running:
            totals.arrived(number)
            running[number] = 0
            continue
        one = data.draw(st.sampled_from(sorted(running)))
        if what == "emit":
            count = data.draw(st.integers(0, 4))
            totals.emitted(one, count)
            first += not running[one] and count > 0
            running[one] += count
            tokens += count
            continue
        del running[one]
        reason = "refused" if what == "refuse" else data.draw(st.sampled_from(REASONS[:-1]))
        ends[reason] += 1
        if what == "refuse":
            totals.refused(one)
        else:
            # None: it was cancelled before it had one.
            sessions = data.draw(st.integers(0, 4))
            restarts += max(0, sessions - 1)
            totals.finished(one, reason, {"queue_seconds": 0.5, "rows": 2, "sessions": sessions})
    finished = sum(ends.values()) - ends["refused"]
    counts = {name: sum(values[1:]) for name, values in totals.distributions.items()}
    assert totals.sums["new_tokens"] == tokens
    assert counts["time_to_first_token"] == first
    assert counts["time_between_tokens"] <= tokens
    assert counts["request"] == counts["queue"] == finished
    assert totals.sums["rows"] == 2 * finished
    assert totals.sums["restarts"] == restarts
    assert {reason: totals.sums[f"requests_{reason}"] for reason in REASONS} == ends
    for name, values in totals.distributions.items():
        assert len(values) == len(DISTRIBUTIONS[name]) + 2


@pytest.mark.asyncio
async def test_requests_over_links_count_as_well_and_metrics_may_be_open() -> None:
    ask = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
    async with Toy("link", keys=("k",)) as toy, aiohttp.ClientSession(toy.url) as web:
        key = {"Authorization": "Bearer k"}
        async with web.post("/v1/completions", json=ask, headers=key) as reply:
            assert reply.status == 200
        async with web.get("/metrics") as reply:
            assert reply.status == 401
        async with web.get("/metrics", headers=key) as reply:
            assert 'asyncspec_generated_tokens_total{model="toy"} 5.0' in await reply.text()


@pytest.mark.asyncio
async def test_a_stage_has_probes_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    missing = ""

    async def statuses() -> tuple[Status, ...]:
        return (Status(*(0, Rank(2), "verify", (4, 8), 9.0, 3.0, 1, 1, 2, 30), missing=missing),)

    log = make_logger(LogTable("json"), rank=2)
    options = ServiceOptions(ApiKeys(["k"]), public_metrics=True)
    service = Probes(options, lambda: "stage 2 (loading)", log)
    sock = listen.bind("127.0.0.1", 0, whose="--http")
    async with HttpServer(service, sock) as server, aiohttp.ClientSession(server.url) as web:

        async def status(path: str) -> tuple[int, str]:
            async with web.get(path) as reply:
                return reply.status, await reply.text()

        assert (await status("/health"))[0] == 200
        assert (await status("/metrics"))[0] == 200
        code, text = await status("/ready")
        assert code == 503
        assert "stage 2 (loading)" in text
        service.report(statuses)
        assert (await status("/ready"))[0] == 200
        missing = "stage 3: another model"
        code, text = await status("/ready")
        assert code == 503
        assert missing in text
        assert (
            'asyncspec_node_ready{model="",rank="2",role="verify"} 0.0'
            in (await status("/metrics"))[1]
        )
        assert (await status("/v1/models"))[0] == 401
        service.metrics.key_requested("alice", 200)
        assert "alice" not in (await status("/metrics"))[1]
        async with web.get("/metrics", headers={"Authorization": "Bearer k"}) as reply:
            assert 'asyncspec_key_requests_total{key="alice",status="200"}' in await reply.text()
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert line["level"] == "info"
    assert (line["rank"], line["route"], line["status"]) == (2, "unknown", 401)
    assert line["request"]


def test_a_logged_error_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    log = make_logger(LogTable("json", "warning"), rank=1)
    log.info("left out")
    try:
        raise ValueError("a\nb")
    except ValueError:
        log.exception("crashed", path=Path("x"))
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert line["level"] == "error"
    assert "ValueError: a\nb" in line["exception"]
