"""The driver of Ray, a process of its own: Ray's client library handles signals and prints.

Ray starts an actor again wherever it has room when its process or its machine is lost
(``max_restarts``), and runs its task again (``max_task_retries``): it joins as a new machine.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import msgspec

from asyncspec.core.errors import AsyncSpecError, UserError
from asyncspec_nodes.plugins.join.ray.messages import Fault, Notice, Order, Placed, Report

POLL_SECONDS = 1.0


class Machine:
    """An actor: what ``asyncspec join`` is elsewhere. In its process's main thread, which handles
    signals."""

    def run(self, token: str, name: str) -> tuple[str, bool]:
        """Until the cluster ends. Why it cannot take part, and whether a user can change it."""
        import ray

        from asyncspec_nodes.console.arguments import print_notice
        from asyncspec_nodes.plugins.join.agent import AgentOptions
        from asyncspec_nodes.plugins.join.own_machine import join_until_signal
        from asyncspec_nodes.plugins.join.token import read

        options = AgentOptions(name, advertise=(ray.util.get_node_ip_address(), 0))
        try:
            join_until_signal(read(token), options, ("0.0.0.0", 0), print_notice)
        except AsyncSpecError as error:
            return str(error), isinstance(error, UserError)
        return "it was told to stop", False


def main() -> int:
    """Until stdin ends. Exit code: 0 then, 1 after a fault, which is reported."""
    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    # Ray's own output must not be among the reports, which are for a program.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(message: Report) -> None:
        reports.write(msgspec.json.encode(message).decode() + "\n")
        reports.flush()

    parent_gone = threading.Event()

    def watch_parent() -> None:
        sys.stdin.read()
        parent_gone.set()

    threading.Thread(target=watch_parent, daemon=True).start()
    try:
        _serve(order, report, parent_gone)
    except UserError as error:
        report(Fault(str(error), user=True))
        return 1
    except AsyncSpecError as error:
        report(Fault(str(error), user=False))
        return 1
    return 0


def _serve(order: Order, report: Any, parent_gone: threading.Event) -> None:
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=order.address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RayError, ValueError) as error:
        line = " ".join(str(error).split())[:300]
        raise UserError(
            f"there is no Ray cluster at {order.address} ({line}); start one with "
            "ray start --head, or give --ray-address"
        ) from None
    try:
        _run(ray, order, report, parent_gone)
    except RayError as error:
        raise AsyncSpecError(f"Ray failed: {' '.join(str(error).split())[:300]}") from None
    finally:
        ray.shutdown()


def _run(ray: Any, order: Order, report: Any, parent_gone: threading.Event) -> None:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundles = [{"CPU": order.cpus} for _ in range(order.machines)]
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        _wait_for_room(group, order, parent_gone)
        actor = ray.remote(
            num_cpus=order.cpus, max_restarts=-1, max_task_retries=-1, max_concurrency=1
        )(Machine)
        tasks = {}
        for number in range(order.machines):
            where = PlacementGroupSchedulingStrategy(group, number)
            machine = actor.options(scheduling_strategy=where).remote()
            tasks[machine.run.remote(order.token, f"ray-{number}")] = machine
        report(Placed(order.machines))
        while tasks and not parent_gone.is_set():
            done, _ = ray.wait(list(tasks), timeout=POLL_SECONDS)
            for task in done:
                text, user = ray.get(task)
                if user:
                    raise UserError(text)
                report(Notice(f"a machine of Ray has ended: {text}; it joins again"))
                machine = tasks.pop(task)
                tasks[machine.run.remote(order.token, f"ray-{len(tasks)}")] = machine
    finally:
        remove_placement_group(group)


def _wait_for_room(group: Any, order: Order, parent_gone: threading.Event) -> None:
    waited = 0.0
    while not group.wait(POLL_SECONDS):
        waited += POLL_SECONDS
        if parent_gone.is_set() or waited >= order.seconds:
            raise UserError(
                f"the Ray cluster has not had {order.machines} nodes with {order.cpus:g} free CPUs "
                f"each within {order.seconds:g} s; give --ray fewer, or --ray-cpus fewer"
            )


if __name__ == "__main__":
    sys.exit(main())
