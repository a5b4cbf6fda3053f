"""Twelve questions of a new user: each is answered one hop from docs/README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS = re.findall(r"^\| (.*\?) \| (.*) \|$", (DOCS / "README.md").read_text(), re.M)

ANSWERS = {
    "install": ("pipx install", "asyncspec run --check"),
    "own model": ("--target", "safetensors"),
    "GGUF": (".gguf", "--target"),
    "several machines": ("[[node]]", "rank"),
    "protected": ("asyncspec keys", "--api-key-file"),
    "memory": ("asyncspec memory",),
    "slow": ("tokens per second", "asyncspec trace"),
    "policy": ("flow", "--policy"),
    "dies": ("a link or node is lost", "rejoin_seconds"),
    "watch": ("/metrics", "asyncspec_generated_tokens_total", "deploy/grafana"),
    "Kubernetes": ("leaderworkerset.yaml", "LWS_WORKER_INDEX"),
    "OpenAI client": ("openai.OpenAI", "base_url"),
}
"""What the place that answers a question must tell, by a word of the question."""


def section(link: str) -> str:
    """The text under a link's heading; of a link without one the whole page."""
    page, _, anchor = link.partition("#")
    text = (DOCS / page).read_text()
    if not anchor:
        return text
    parts = re.split(r"^(?=##? )", text, flags=re.M)[1:]
    slugs = [re.sub(r"[^\w\- ]", "", part.splitlines()[0].lstrip("# ").lower()) for part in parts]
    return parts[[slug.replace(" ", "-") for slug in slugs].index(anchor)]


@pytest.mark.parametrize("word", ANSWERS)
def test_the_answer_is_one_hop_away(word: str) -> None:
    (answer,) = (answer for question, answer in ROWS if word in question)
    text = "".join(map(section, re.findall(r"\]\(([^)]+)\)", answer)))
    for reported in ANSWERS[word]:
        assert reported in text


def test_there_are_no_other_questions_and_the_readme_leads_there() -> None:
    assert len(ROWS) == len(ANSWERS) == 12
    assert "](docs/README.md" in (DOCS.parent / "README.md").read_text()
