"""A verify node without layers, as a process: what a segment costs beside any forward pass.

Run by ``hop``; says on its standard output which port it listens on. Everything but the device is
what ``asyncspec-node`` runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# The package is to be found under its full name.
sys.path[0] = str(Path(__file__).resolve().parents[3])

from asyncspec.backend.threads import set_thread_defaults  # noqa: E402

set_thread_defaults()

import torch  # noqa: E402

from asyncspec.actor.link import LinkOptions  # noqa: E402
from asyncspec.actor.loop import run  # noqa: E402
from asyncspec.actor.routing import Host  # noqa: E402
from asyncspec.actor.runtime import Runtime  # noqa: E402
from asyncspec.core.jobs import (  # noqa: E402
    Forward,
    StageJob,
    TensorRows,
)
from asyncspec.core.tensors import WireTensor  # noqa: E402
from asyncspec.plugins.hf.model.wire import from_wire, select, to_wire  # noqa: E402
from asyncspec_nodes.node import listen  # noqa: E402
from asyncspec_nodes.roles.verify.config import VerifyConfig  # noqa: E402
from asyncspec_nodes.roles.verify.machine import VerifyMachine  # noqa: E402
from asyncspec_protocol.ids import Rank  # noqa: E402
from asyncspec_protocol.messages import (  # noqa: E402
    PROTOCOL_VERSION,
    Hello,
)

STAGES, RANK = 3, Rank(2)
"""In the middle: hidden states in, hidden states out."""

SILENCE_SECONDS = 600.0
"""The other side answers no heartbeats."""


class NoLayers:
    """A device that gives back what it is given."""

    def __init__(self, width: int) -> None:
        self._width = width

    def run(self, job: StageJob) -> object | None:
        """See ``StageBackend``."""
        if isinstance(job, Forward):
            assert job.hidden is not None
            return select(job.hidden)
        return None

    def abandon(self, job: StageJob) -> None:
        """See ``StageBackend``."""

    def pack(self, rows: TensorRows) -> WireTensor:
        """See ``StageBackend``."""
        return to_wire(rows)

    def unpack(self, tensor: WireTensor) -> object:
        """See ``StageBackend``."""
        return from_wire(tensor, torch.bfloat16, self._width)


def hello(rank: int) -> Hello:
    """What a node of this pipeline says of itself."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        cluster="hop",
        rank=Rank(rank),
        role="verify" if rank else "draft",
        stages=STAGES,
        layers=(rank - 1, rank) if rank else (0, 0),
        dtype="bfloat16",
        fingerprint="hop",
        mode="exact",
    )


def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--next-port", type=int, required=True)
    options = parser.parse_args()
    sock = listen.loopback()
    machine = VerifyMachine(VerifyConfig(RANK, STAGES, first_layer=1, end_layer=2, layers=3))
    device = NoLayers(options.width)

    async def serve() -> None:
        runtime = Runtime(
            machine,
            machine.initial(),
            me=hello(RANK),
            peers={Rank(RANK + 1): ("127.0.0.1", options.next_port)},
            sock=sock,
            run_job=device.run,
            abandon_job=device.abandon,
            tensors=device,
            host=Host(),
            tasks={},
            on_processor=True,
            options=LinkOptions(timeout_seconds=SILENCE_SECONDS),
        )
        print(sock.getsockname()[1], flush=True)
        await runtime.run()

    run(serve())


if __name__ == "__main__":
    main()
