"""Golden frames: the wire of version 1, byte for byte. They are added to, never edited.

A new message or field needs a vector: add it to ``EXAMPLES``, then write its file once with
``python tests/protocol/test_vectors.py``; existing files are left alone. A frame from before a
field was appended must be read for ever, with the field's default; it is no longer written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from asyncspec_protocol import messages as m
from asyncspec_protocol.base import TensorSpec
from asyncspec_protocol.framing import FrameReader, write_frame
from asyncspec_protocol.messages import Message
from asyncspec_protocol.sampling import Constraint
from tools.bench.limits.codec import feed
from tools.fuzz_wire.mutations import unchecked

FOLDER = Path(__file__).resolve().parents[2] / "protocol" / "vectors"

FACTS: tuple[Any, ...] = (1, "home", 2, "verify", 3, (4, 8), "bfloat16", "0123abcd", "exact")
QUANTISED: tuple[Any, ...] = (*FACTS, "int8")
TEMPLATE: tuple[Any, ...] = (*QUANTISED, True)
HIDDEN = (TensorSpec("float32", (2, 1)), memoryview(bytes(range(8))))
AUX_STATES = (TensorSpec("bfloat16", (2, 2, 1)), memoryview(bytes(range(8))))
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "segment-aux-states": (m.Segment(7, 3, 2, (40, 41), (12, 40), (), 1), *AUX_STATES),
    "verdict-features": (m.Verdict(7, 3, 2, (40,), (600,), (39, 40)), *HIDDEN),
    "open-features": (m.Open(7, 20, 148, 2**63, 0.7, 50, 0.9, 0.05, features=(2, 4, 5)),),
    "segment-waited": (m.Segment(7, 3, 2, (40, 41), (12, 40), (5, 600), 0, True),),
    "segment-more": (m.Segment(7, 3, 2, (40, 41), (12, 40), (5, 600), 0, False, 3),),
    "segment-turn": (m.Segment(7, 3, 2, (40, 41), (12, 40), pass_number=9), *HIDDEN),
    "segment-checksum": (m.Segment(7, 3, 2, (40, 41), (12, 40)), *HIDDEN),
    "prune-checksum": (m.PruneIndices(7, 4, 52, (40, 51), (41, 44)),),
    "segment": (m.Segment(7, 3, 2, (40, 41), (12, 40), (5, 600)),),
    "segment-hidden": (m.Segment(7, 3, 2, (40, 41), (12, 40)), *HIDDEN),
    "segment-both": (m.Segment(7, 3, 2, (40, 41), (12, 40), (5, 600)), *HIDDEN),
    "verdict-likely": (
        m.Verdict(7, 3, 2, (40, 41), (600, 9), (), (600, 5, 9, 8), (-0.25, -1.5, -0.5, -2.0)),
    ),
    "verdict-drawn": (
        m.Verdict(7, 3, 2, (40, 41), (600, 9), (), (600, 5), (-0.25, -0.5), (-0.25, -1.5)),
    ),
    "verdict-more": (m.Verdict(7, 3, 2, (40, 41), (600, 9), batch_remaining=3),),
    "verdict-turn": (m.Verdict(7, 3, 2, (40, 41), (600, 9), pass_number=9),),
    "verdict": (m.Verdict(7, 3, 2, (40, 41), (600, 9)),),
    "prune": (m.PruneIndices(7, 4, 52, (40, 51), (41, 44)),),
    "expand": (m.Expand(7, 4, 30, (5, 600), 5, 10, 64),),
    "expand-frontier": (
        m.Expand(
            7, 4, 30, (600,), 1, 8, 64, 64, True, (8,), (-1, 0), (8, 9), (-0.25, -1.5), (1, 0)
        ),
    ),
    "restore": (m.Restore(7, (bytes(range(16)), bytes(range(16, 32)))),),
    "open-stored": (m.Open(7, 20, 148, 3, 0.7, 50, 0.9, 0.05, stored_as=(bytes(range(16)),)),),
    "close-stored": (m.Close(7, True, 90, (bytes(range(16)),)),),
    "closed-restored": (m.Closed(7, 2, 0, 0, 0, 0.0, 0, True, 32),),
    "ready-stores": (m.Ready(2, True, 4096, 7, 5, stores_prefixes=True),),
    "ready-crash": (m.Ready(2, True, 4096, 7, 5, crash=1_700_000_000_000),),
    "hello-crash": (replace(m.Hello(*TEMPLATE), crash=1_700_000_000_000),),
    "welcome-crash": (replace(m.Welcome(*TEMPLATE), crash=1_700_000_000_000),),
    "ready-memory": (m.Ready(2, True, 4096, 7, 5, memory_kill=1_700_000_000_000),),
    "open-constraint": (
        m.Open(
            *(7, 20, 148, 2**63, 0.7, 50, 0.9, 0.05),
            constraint=Constraint('start: "a"', ((5, -1.5), (600, 100.0)), 8, (2,)),
        ),
    ),
    "expand-grammar": (
        m.Expand(7, 4, 0, (5, 600), 0, 0, 0, prompt_length=31, grammar='start: "a"'),
    ),
    "expand-calibrated": (m.Expand(7, 4, 29, (5, 600), 2, 8, 16, calibrated=True),),
    "status-tools": (
        m.Status(
            *(7, 0, "draft", (0, 0), 1.5, 0.5, 99, 1, 0, 8),
            tool_syntax="hermes",
            takes_tools=True,
            reasoning="tags",
            template_options=("enable_thinking",),
        ),
    ),
    "status-device": (
        m.Status(
            *(7, 1, "verify", (0, 4), 1.5, 0.5, 99, 1, 0, 8),
            device="cuda:0 (H100)",
            device_free_bytes=70_000_000_000,
            device_held_bytes=5_000_000_000,
        ),
    ),
    "open-prompt-logprobs": (m.Open(7, 20, 148, 3, 0.7, 50, 0.9, 0.05, prompt_logprobs=2),),
    "segment-scored": (m.Segment(7, 3, 0, (0, 1), (-1, 0), (5, 600), scored_tokens=(600, 9)),),
    "verdict-prompt": (
        m.Verdict(
            *(7, 3, 0, (), ()),
            prompt_logprobs=m.PromptLogprobs((-0.25, -1.5), (1, 30), (600, 4), (-0.25, -0.5)),
        ),
    ),
    "submit-echo": (m.Submit(7, "Hello", 0, 0, 0.0, 0, 1.0, echo=True, prompt_logprobs=2),),
    "output-prompt": (
        m.Output(
            *(1, (), ""),
            prompt_start=1024,
            prompt_ids=(600,),
            prompt_logprobs=m.PromptLogprobs((-1.5,), (3,), (4,), (-0.25,)),
            prompt_bytes=(b" a", b"\xc3"),
        ),
    ),
    "submit-text-lengths": (m.Submit(7, "Hello", 8, 0, 0.0, 0, 1.0, text_lengths=True),),
    "output-counts": (
        m.Output(*(1, (5, 600), " a"), text_lengths=(0, 2), prompt_tokens=30, shared_tokens=20),
    ),
    "submit-progress": (m.Submit(7, "Hello", 8, 0, 0.0, 0, 1.0, progress=True),),
    "output-progress": (
        m.Output(*(1, (), ""), prompt_tokens=300, shared_tokens=20, prompt_read=84),
    ),
    "submit-features": (m.Submit(7, "Hello", 8, 0, 0.0, 0, 1.0, features=(2, 4, -1)),),
    "output-features": (m.Output(*(1, (), ""), features_start=64), *HIDDEN),
    "submit-suffix": (m.Submit(7, "Hello", 8, 0, 0.0, 0, 1.0, suffix="!"),),
    "submit-bare": (m.Submit(7, "Hello", 1, 0, 0.0, 0, 1.0, prompt_only=True, bare=True),),
    "submit-prompt": (m.Submit(7, "Hello", 1, 0, 0.0, 0, 1.0, prompt_only=True),),
    "submit-given": (m.Submit(7, "Hello", 9, 0, 0.0, 0, 1.0, given=(5, 600), given_text=4),),
    "submit-constraint": (
        m.Submit(7, "", 8, 5, 0.7, 0, 0.9, constraint=Constraint('start: "a"', ((5, -1.5),), 8)),
    ),
    "expand-tenant": (m.Expand(7, 4, 0, (5, 600), 0, 0, 0, tenant="5fe0", prompt_length=31),),
    "features": (m.Features(7, 29, 2), *HIDDEN),
    "ready-features": (m.Ready(3, True, 512, features=(2, 4, 5)),),
    "expanded": (m.Expanded(7, 4, 32, (-1, 0), (8, 9), (-0.25, -1.5)),),
    "expanded-seconds": (m.Expanded(7, 4, 32, (-1, 0), (8, 9), (-0.25, -1.5), 0.5),),
    "withdraw": (m.Withdraw(7),),
    "hello": (m.Hello(*FACTS),),
    "hello-quantize": (m.Hello(*QUANTISED),),
    "hello-chat": (m.Hello(*TEMPLATE),),
    "welcome": (m.Welcome(*FACTS),),
    "welcome-chat": (m.Welcome(*TEMPLATE),),
    "welcome-quantize": (m.Welcome(*QUANTISED),),
    "ready": (m.Ready(2, True),),
    "open": (m.Open(7, 20, 148, 2**63, 0.7, 50, 0.9, 0.05),),
    "open-penalties": (m.Open(7, 20, 148, 3, 0.7, 50, 0.9, 0.05, 1.25, 0.5, -0.5, 4),),
    "open-tops": (m.Open(7, 20, 148, 3, 0.7, 50, 0.9, 0.05, features=(2, 4, 5), top_logprobs=64),),
    "open-log-probs": (m.Open(7, 20, 148, 3, 0.7, 50, 0.9, 0.05, top_logprobs=2, log_probs=True),),
    "credit-row": (m.Credit(12, 2, 0.25),),
    "open-coalesce": (m.Open(7, 20, 148, 3, 0.7, 50, 0.9, 0.05, coalesce=True),),
    "open-tree": (m.Open(7, 20, 148, 3, 0.7, 50, 0.9, 0.05, max_tree_nodes=480),),
    "open-like": (m.Open(7, 20, 148, 3, 0.7, 50, 0.9, 0.05, parent_session=5, common_prefix=12),),
    "close-keep": (m.Close(7, True),),
    "close-answer": (m.Close(7, True, 53),),
    "ready-slots": (m.Ready(2, True, 4096),),
    "ready-opened": (m.Ready(2, True, 4096, 7),),
    "ready-silent": (m.Ready(2, False, 4096, 7, 8, (), 2.5),),
    "ready-processor": (
        m.Ready(2, True, 4096, 7, 8, processor="Intel AVX-512 AMX", layers=(4, 8)),
    ),
    "ready-floor": (m.Ready(2, True, 4096, 7, 8),),
    "floor": (m.Floor(8),),
    "close": (m.Close(7),),
    "closed": (m.Closed(7, 2, 11, 130, 12, 0.5, 65536),),
    "closed-kept": (m.Closed(7, 2, 11, 130, 12, 0.5, 65536, True),),
    "credit-room": (m.Credit(12, 8),),
    "credit": (m.Credit(12),),
    "times": (m.PassTimes(2, (1.0, 14.5), (0.5, 0.625)),),
    "times-line": (m.PassTimes(2, (1.0, 14.5), (0.5, 0.625), 0.03125),),
    "times-jitter": (m.PassTimes(2, (1.0, 14.5), (0.5, 0.625), 0.03125, 0.25),),
    "times-contention": (m.PassTimes(2, (1.0, 14.5), (0.5, 0.625), 0.03125, 0.25, 1.5),),
    "times-chunk": (m.PassTimes(2, (1.0, 14.5), (0.5, 0.625), chunk_rows=256),),
    "segment-spent": (m.Segment(7, 3, 2, (40, 41), (12, 40), (5, 600), 0, False, 3, 0.25),),
    "verdict-spent": (m.Verdict(7, 3, 2, (40, 41), (600, 9), stage_seconds=0.25),),
    "rates": (m.Rates(7, 20, 0.75, 0.03125, 0.0, 0.005, 0.125),),
    "rates-interval": (m.Rates(7, 20, 0.75, 0.03125, 0.0, 0.005, 0.125, 0.8125, 0.875, 0.25),),
    "plan-status-request": (m.PlanStatusRequest(3),),
    "plan-status-missing": (m.PlanStatus(3, "verify stage 1 is gone"),),
    "plan-status": (
        m.PlanStatus(
            *(3, "", (7, 9), (20, 12), (0.75, 0.5), (0.8125, 0.625), (0.875, 0.75)),
            *((0.03125, 0.125), (0.0, 0.25), (0.005, 0.5), (0.125, 0.0), (0.25, 0.5)),
            *((0.0625, 0.03125), (0.001, 0.002), (0.0625, 0.125), 1, 2, "plan", 4, (1, 2), (5, 3)),
            *(0.25, 76.5, 57.25, 74.0, 12.5, 1.25, 300.0, 0.875, 40.0),
        ),
    ),
    "plan-status-rows": (
        m.PlanStatus(
            *(3, "", (7,), (20,), (0.75,), (0.8125,), (0.875,), (0.03125,), (0.0,), (0.005,)),
            *((0.125,), (0.25,), (0.0625,), (0.001,), (0.0625,), 0, 0, "greedy", 1, (0,), (5,)),
            *(0.0, 0.0, 57.25, 74.0, 12.5, 0.0, 0.0, 0.875, 40.0, 256),
        ),
    ),
    "schedule": (m.Schedule(7, 3, 1, 2, 5),),
    "heartbeat": (m.Heartbeat(1.5, 0.5),),
    "heartbeat-line": (m.Heartbeat(1.5, 0.5, 0.0625),),
    "fault": (m.Fault("protocol", "a parent is older than its child"),),
    "submit": (m.Submit(1, "Once upon a time", 128, 3, 0.8, 0, 0.9, 0.0, "flowspec", False),),
    "submit-stop": (
        m.Submit(1, "Once", 9, 3, 0.8, 0, 0.9, 0.0, "", True, 1.25, 0.5, -0.5, ("é\n", "."), True),
    ),
    "submit-must-fit": (m.Submit(1, "Once", 128, 3, 0.8, 0, 0.9, must_fit=True),),
    "submit-unset": (m.Submit(1, "Once", 9, 3, 1.0, 0, 1.0, unset=("temperature", "top_k")),),
    "submit-tenant": (m.Submit(1, "Once", 9, 3, 1.0, 0, 1.0, tenant="5fe0"),),
    "submit-id": (m.Submit(1, "Once", 9, 3, 1.0, 0, 1.0, id="5fe0"),),
    "submit-log-probs": (
        m.Submit(
            *(1, "", 9, 3, 0.8, 0, 0.9, 0.0, "", False, 1.0, 0.0, 0.0, (), False),
            *((5, 600), '[{"role":"user","content":"é"}]', True, 2),
        ),
    ),
    "output-log-probs": (
        m.Output(1, (5,), " é", (-1.5,), (600, 5), (-0.25, -1.5), (b" \xc3", b" a", b" \xc3")),
    ),
    "finished-code": (
        m.Finished(1, "error", "8 requests are waiting already; try again later", {}, "busy"),
    ),
    "inspect": (m.Inspect(3),),
    "status": (
        m.Status(
            *(3, 1, "verify", (0, 4), 60.5, 20.25, 500_000_000, 2, 1, 96),
            *((0, 2), (0.0005, -1.0), (4096, 70_000), True, "demo", 2048, "x"),
        ),
    ),
    "status-room": (
        m.Status(
            *(3, 1, "verify", (0, 4), 60.5, 20.25, 500_000_000, 2, 1, 96),
            *((0, 2), (0.0005, -1.0), (4096, 70_000), True, "demo", 2048, "x", 8192),
        ),
    ),
    "status-defaults": (
        m.Status(
            *(3, 0, "draft", (0, 0), 60.5, 20.25, 500_000_000, 2, 1, 96),
            *((1, 2), (0.0005, -1.0), (4096, 70_000), True, "demo", 2048, "", 8192),
            {"temperature": 0.6, "top_k": 20},
        ),
    ),
    "status-totals": (
        m.Status(
            *(3, 0, "draft", (0, 0), 60.5, 20.25, 500_000_000, 2, 1, 96),
            *((1, 2), (0.0005, -1.0), (4096, 70_000), True, "demo", 2048, "", 8192, {}),
            {"new_tokens": 30.0, "requests_stop": 2.0},
            {"queue": (0.5, 1.0, 0.0, 1.0)},
        ),
    ),
    "status-passes": (
        m.Status(
            *(3, 1, "verify", (0, 4), 60.5, 20.25, 500_000_000, 2, 1, 96),
            *((0, 2), (0.0005, -1.0), (4096, 70_000), True, "demo", 2048, "", 8192),
            *({}, {}, {}, "box", 7_000_000_000, (1.0, 16.0), (0.125, 0.25)),
        ),
    ),
    "status-cut": (
        m.Status(*(3, 1, "verify", (0, 2), 60.5, 20.25, 500_000_000, 2, 1, 96), is_cut=True),
    ),
    "status-draft": (
        m.Status(
            *(3, 0, "draft", (0, 0), 60.5, 20.25, 500_000_000, 2, 1, 96),
            *((1, 2), (0.0005, -1.0), (4096, 70_000), True, "demo", 2048, "", 8192),
            draft="mtp",
        ),
    ),
    "output": (m.Output(1, (5, 600), " there was"),),
    "finished": (m.Finished(1, "stop", "", {"rounds": 3.0}),),
    "finished-stop": (m.Finished(1, "stop", "", {"rounds": 3.0}, "", "\n\n"),),
    "cancel": (m.Cancel(1),),
    "clock": (m.Clock(1.5, 2.5),),
    "drain": (m.Drain(3),),
    "drained": (m.Drained(3, "it takes requests again"),),
    "collect-mask": (m.Collect(3, 10.0, True, False, False, "0123abcd"),),
    "collect": (m.Collect(3, 10.0, True, False),),
    "events": (m.Events(3, 2, False), TensorSpec("uint8", (3,)), memoryview(b"{}\n")),
}


def frame_of(example: tuple[Any, ...]) -> bytes:
    return b"".join(bytes(piece) for piece in write_frame(*example))


def golden_of(name: str) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return golden


def write_missing() -> None:
    for name, example in EXAMPLES.items():
        file = FOLDER / f"{name}.json"
        if not file.exists():
            fields = msgspec.to_builtins(example[0])
            text = json.dumps({"frame": frame_of(example).hex(" ", 8), "message": fields}, indent=1)
            file.write_text(text + "\n")


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden(name: str) -> None:
    golden = golden_of(name)
    frame = bytes.fromhex(golden["frame"])
    example = EXAMPLES[name]
    message = json.loads(msgspec.json.encode(example[0]))
    assert golden["message"] == message[: len(golden["message"])]
    if golden["message"] == message:
        written = frame_of(example)
        assert frame in (
            (written,) if name.endswith("-checksum") else (unchecked(written), written)
        )
    (found,) = feed(FrameReader(), frame)
    assert found.message == example[0]
    if len(example) > 1:
        assert found.tensor == example[1]
        assert found.data == example[2]


def test_every_message_has_a_vector() -> None:
    assert {type(example[0]) for example in EXAMPLES.values()} == set(Message.__args__)
    for kind in Message.__args__:
        # The tag comes first.
        fields = 1 + len(kind.__struct_fields__)
        same = [name for name, example in EXAMPLES.items() if type(example[0]) is kind]
        assert any(len(golden_of(name)["message"]) == fields for name in same), kind
    assert {f"{name}.json" for name in EXAMPLES} == {file.name for file in FOLDER.iterdir()}


if __name__ == "__main__":
    write_missing()
