"""vLLM's worker for the CPU whose passes take a given time, the model untouched.

It is imported by vLLM's interpreter, in which asyncspec need not be: ``--worker-cls
paced_worker.PacedWorker``, this folder in ``PYTHONPATH``, and in ``PACED_WORKER`` seconds, plateau
and seconds a row as in the tables of paces (``asyncspec_nodes.cluster.config.PaceTable``).
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class PacedWorker(CPUWorker):  # type: ignore[misc]  # vLLM is not here
    """A pass ends, and what it made is sent on, no earlier than its pace says."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Load, and wrap the runner's passes: what is received from the stage before is not part
        of them, what is sent to the next one waits for their end."""
        super().load_model(*arguments, **options)
        run = self.model_runner.execute_model
        seconds, plateau, row_seconds = json.loads(os.environ["PACED_WORKER"])

        def paced(scheduled: Any, *others: Any, **named: Any) -> Any:
            start = time.monotonic()
            result = run(scheduled, *others, **named)
            rows = scheduled.total_num_scheduled_tokens
            if rows:
                end = start + seconds + row_seconds * max(0, rows - plateau)
                time.sleep(max(0.0, end - time.monotonic()))
            return result

        self.model_runner.execute_model = paced
