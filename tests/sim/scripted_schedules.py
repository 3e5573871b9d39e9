"""Stories that were worth writing down: one trouble each, told exactly."""

from __future__ import annotations

from dataclasses import replace

from tests.sim.copied_annotations import Copied
from tests.sim.ending_schedules import ENDING_SCHEDULES
from tests.sim.events import Event, Make
from tests.sim.key_schedules import KEY_SCHEDULES
from tests.sim.memory_schedules import MEMORY_SCHEDULES
from tests.sim.neighbour_schedules import NEIGHBOUR_SCHEDULES
from tests.sim.random_schedules import Containers, Schedule
from tests.sim.scripted_jobs import TWO, scripted_job
from tests.sim.worker_schedules import WORKER_SCHEDULES

SCHEDULES: dict[str, Schedule] = {
    "nothing happens": scripted_job(),
    "nodes come one after the other": scripted_job(Event(60, "add_node"), Event(90, "add_node"), nodes=2),
    "a node loses power": scripted_job(Event(100, "kill_node", 1)),
    "a worker crashes while a node loses power": scripted_job(Event(100, "kill_node", 1), Event(100.1, "crash_worker", 2)),
    "a worker crashes in a drain": scripted_job(Event(100, "drain_node", 0), Event(100.4, "crash_worker", 2)),
    "a node loses power in a drain": scripted_job(Event(100, "drain_node", 0), Event(101, "kill_node", 2)),
    "a second node is drained during the first drain": scripted_job(
        Event(100, "drain_node", 0), Event(100.9, "drain_node", 2)
    ),
    "no agent can be reached for minutes": scripted_job(Event(100, "hide_all", 0, 200)),
    "the user scales down while no agent can be reached": scripted_job(
        Event(100, "hide_all", 0, 200), Event(101, "scale", 1)
    ),
    "the operator is away for minutes": scripted_job(Event(100, "operator_dies", 1, 250)),
    "a worker that keeps its state crashes while the operator is away": scripted_job(
        Event(100, "operator_dies", 1, 8), Event(103, "crash_worker", 0), make=Make.KEEPING
    ),
    "the operator dies in a recovery": scripted_job(Event(99, "operator_dies_soon", 3, 5), Event(100, "crash_worker", 0)),
    "the operator dies between the record and the first stop": scripted_job(
        Event(99, "operator_dies_soon", 1, 5), Event(100, "drain_node", 0)
    ),
    "the user scales down and up again in a resize": scripted_job(
        Event(100, "scale", 1), Event(101, "scale", 3), Event(130, "scale", 2)
    ),
    "the job is suspended in a recovery and in a drain": scripted_job(
        Event(100, "crash_worker", 0), Event(100.2, "suspend", 0, 60), Event(200, "drain_node", 0),
        Event(200.7, "suspend", 0, 30),
    ),
    "containers end at once on every node": scripted_job(*(Event(1, "sicken_node", at, 100) for at in range(4))),
    "the job is deleted before anything runs": scripted_job(Event(0.05, "delete_job")),
    "the job is deleted in a drain": scripted_job(Event(100, "drain_node", 0), Event(100.5, "delete_job")),
    "the job is deleted while no agent can be reached": scripted_job(
        Event(100, "hide_all", 0, 200), Event(130, "delete_job")
    ),
    "a lost pod comes back before it is deleted": scripted_job(
        Event(100, "freeze_node", 0, 30), Event(110, "operator_dies_soon", 1, 25)
    ),
    "workers fail over a dead node before it is known, and no retry is left": scripted_job(
        Event(100, "kill_node", 1), timeout_s=5.0, retries=0
    ),
    "crashes in a row bring a full job restart": scripted_job(
        *(Event(100 + 30 * n, "crash_worker", n) for n in range(4)),
        numRestartBeforeFullJobRestart=1, maxFullJobRestarts=3, evalPeriodSeconds=3600,
    ),
    "the operator dies between the decision for a full restart and the deletion of the pods": scripted_job(
        Event(99.9, "operator_dies_soon", 6, 8), Event(100, "crash_worker", 0), Event(160, "operator_dies_soon", 4, 8),
        Event(160.1, "crash_worker", 1), numRestartBeforeFullJobRestart=0, evalPeriodSeconds=3600,
    ),
    "restarts of one window do not count in the next": scripted_job(
        Event(60, "crash_worker", 0), Event(180, "crash_worker", 1), Event(300, "crash_worker", 0),
        numRestartBeforeFullJobRestart=1, maxFullJobRestarts=0, evalPeriodSeconds=100,
    ),
    "a node that faults again and again is avoided": scripted_job(
        Event(60, "crash_again_and_again", 1, 60), Event(400, "add_node"), nodes=5,
        numRestartBeforeFullJobRestart=0, maxNumRepeatOffendersToAvoid=1, evalPeriodSeconds=300,
    ),
    "a node fails now and then, and the job makes progress between": scripted_job(
        *(Event(100 + 60 * n, "crash_worker", 0) for n in range(3)), nodes=5,
        maxNumRepeatOffendersToAvoid=1, evalPeriodSeconds=300,
    ),
    "a node fails again, and without it there are too few: other nodes come": scripted_job(
        *(Event(100 + 60 * n, "crash_worker", 0) for n in range(2)), low=2, high=2, nodes=2,
        maxNumRepeatOffendersToAvoid=1, evalPeriodSeconds=3600,
    ),
    "a node fails again, and without it there are too few: it is used again": scripted_job(
        *(Event(20 + 30 * n, "crash_worker", 0) for n in range(2)), low=2, high=2, nodes=2,
        maxNumRepeatOffendersToAvoid=1, evalPeriodSeconds=3600,
    ),
    "a node says by a label alone that its machine is to be replaced, and later that it is well": scripted_job(
        Event(80, "sicken_gpu", 2), Event(100, "label_node", 1), Event(250, "crash_worker", 0), Event(330, "label_node", 1),
    ),
    "two nodes fault again and again and one may be avoided": scripted_job(
        Event(60, "crash_again_and_again", 1, 60), Event(70, "crash_again_and_again", 3, 60), nodes=6,
        numRestartBeforeFullJobRestart=0, maxNumRepeatOffendersToAvoid=1, evalPeriodSeconds=600,
    ),
    "a spare takes the place of a lost one": scripted_job(
        Event(100, "kill_node", 1), nodes=4, specs=[{"name": "workers", "replicas": 2, "maxReplicas": 2, "spares": 1}],
        high=2,
    ),
    "a spare beside two groups of pods": scripted_job(
        Event(100, "crash_worker", 0), Event(200, "kill_node", 2), nodes=9,
        specs=[{"name": "base", "replicas": 2, "spares": 1}, {"name": "extra", "replicas": 0, "maxReplicas": 2}],
    ),
    "a node of the base is lost for good: another pod makes room": scripted_job(Event(100, "kill_node", 1), nodes=3, specs=TWO),
    "elastic pods alone do not start": scripted_job(
        Event(1, "kill_node", 0), Event(1, "kill_node", 0), Event(300, "add_node"), nodes=4, specs=TWO
    ),
    "all of the base is lost while others train": scripted_job(
        Event(100, "delete_node", 0), Event(100, "delete_node", 0), nodes=4, specs=TWO
    ),
    "only the state is lost, and no agent lives": scripted_job(
        Event(100, "operator_dies", 1, 30), Event(101, "force_delete_pod", 0), Event(101, "force_delete_pod", 0),
        Event(101, "force_delete_pod", 0), Event(101, "force_delete_pod", 0), Event(102, "wipe_state"),
    ),
    **{  # which of the agents is heard first is drawn
        f"the record is lost while the operator is away, and one of many trains: {seed}": scripted_job(
            Event(60, "operator_dies", 1, 60), Event(80, "wipe_record"), low=1, high=5, step=4, nodes=4, seed=seed,
        )
        for seed in range(8)
    },
    "the template is edited while the job runs": scripted_job(
        Event(60, "edit_template", 7), Event(100, "kill_node", 1), Event(150, "add_node"), Event(200, "suspend", 0, 20),
    ),
    "the template is edited before anything trains": scripted_job(Event(1, "edit_template", 7)),
    "somebody else has the master port, and no retry is left": scripted_job(Event(100, "take_master_port"), retries=0),
    "two operators act at once all the time": scripted_job(
        Event(1, "second_operator", 0, 400), Event(60, "drain_node", 0), Event(120, "crash_worker", 1), Event(200, "scale", 1),
        Event(250, "scale", 0),
    ),
    "an operator stands still between the record and its calls, while another one goes on": scripted_job(
        Event(100, "drain_node", 0), Event(100.04, "operator_stands_still", 0, 60), Event(130, "scale", 1),
    ),
    "the clock is set forward in a drain": scripted_job(Event(100, "drain_node", 0), Event(100.5, "clock_jumps", 10, 0)),
    "the clock is set back and the operator begins anew": scripted_job(
        Event(60, "add_node"), Event(61, "clock_jumps", 1, 0), nodes=3
    ),
    "a container ends while the operator's clock is an hour behind": scripted_job(
        Event(61, "clock_jumps", 1, 0), Event(150, "kill_container", 1)
    ),
    "room for a part of an increment": scripted_job(
        low=2, high=6, nodes=5, specs=[{"name": "workers", "replicas": 2, "maxReplicas": 6}], step=4
    ),
    "a growth that does not pay is put off": scripted_job(Event(100, "scale", 1), Event(160, "scale", 0)),
    "growth after a recovery waits": scripted_job(
        Event(60, "crash_worker", 0), Event(65, "add_node"), nodes=3, scaleUpSnoozeTimeInSeconds=90
    ),
    "growth after a resize waits": scripted_job(Event(60, "scale", 1), Event(75, "scale", 0), ours={"minStableSeconds": 60}),
    **{  # one of them breaks the first growth, however quick it is
        f"growth after one that failed at {at:g} waits": scripted_job(
            Event(at, "crash_worker", 0), Event(40, "add_node"), nodes=3,
            ours={"minStableSeconds": 0, "backoff": {"baseSeconds": 60, "maxSeconds": 60}},
        )
        for at in (9.5, 11.0, 12.5)
    },
    "a member hears no call": scripted_job(Event(99, "deafen_node", 1, 300), Event(100, "crash_worker", 0), nodes=5),
    "a member stops for a start that it never hears": scripted_job(
        Event(100, "crash_worker", 0), Event(100.4, "deafen_node", 1, 300), nodes=5
    ),
    "an agent claims an enormous generation": scripted_job(Event(100, "agent_lies", 7 * 3, 12)),
    **{
        f"a tenant lets an agent tell data without end: {make.value}": scripted_job(Event(100, "agent_lies", 7 * 8, 60), make=make)
        for make in (Make.OURS, Make.IN_PROCESS)
    },
    "a tenant lets an agent tell data without end while a worker fails": scripted_job(
        Event(100, "agent_lies", 7 * 8, 60), Event(120, "crash_worker", 1), make=Make.IN_PROCESS
    ),
    "a tenant edits a template and log rules without end, and a node goes meanwhile": scripted_job(
        Event(60, "break_spec", 1, 60), Event(80, "drain_node", 0), Event(150, "break_spec", 2, 60), Event(170, "crash_worker", 0),
    ),
    "a template is edited to nonsense, and a worker and a node are lost meanwhile": scripted_job(
        Event(60, "break_spec", 3, 120), Event(80, "crash_worker", 0), Event(120, "drain_node", 0)
    ),
    "a worker count is edited to nonsense, and a worker crashes meanwhile": scripted_job(
        Event(60, "break_spec", 4, 120), Event(80, "crash_worker", 0), Event(130, "scale", 1)
    ),
    **{
        f"a manifest brings the annotations of a job that was {copied.value}": scripted_job(
            Event(100, "crash_worker", 0), copied=copied
        )
        for copied in Copied
    },
    **MEMORY_SCHEDULES,
    **ENDING_SCHEDULES,
    **NEIGHBOUR_SCHEDULES,
    **KEY_SCHEDULES,
    **WORKER_SCHEDULES,
    "a worker asks for new processes of all": scripted_job(Event(100, "crash_worker", 7 * 2), make=Make.IN_PROCESS),
    "workers that could outlive a fault are to be new ones": scripted_job(
        Event(100, "crash_worker", 0), make=Make.IN_PROCESS, ours={"recovery": "Process"}
    ),
    "all members are lost with their rack": scripted_job(
        Event(100, "lose_rack"), Event(101, "add_node"), Event(101, "add_node"), Event(101, "add_node"), low=2, high=3, nodes=3
    ),
    "the node of the only replica loses power": scripted_job(
        Event(100, "kill_node", 0), Event(101, "add_node"), low=1, high=1, nodes=1
    ),
    **{
        f"an evaluation while one agent cannot be reached: {whether}": scripted_job(
            Event(100, "evaluate", 0, 60), Event(100.5, "hide_node", 1, 70), tells=tells
        )
        for whether, tells in (("the others reach it", True), ("nobody tells", False))
    },
    "two members cannot reach each other": scripted_job(Event(100, "part_nodes", 0, 60), timeout_s=20.0),
    "two members cannot reach each other, and neither can the pods made in their place": scripted_job(
        Event(100, "part_nodes", 0, 60), low=2, high=2, nodes=2, timeout_s=20.0, numRestartBeforeFullJobRestart=0
    ),
    "two members cannot reach each other, and the operator one of them": scripted_job(
        Event(100, "part_nodes", 0, 60), Event(100, "hide_node", 0, 60), timeout_s=20.0
    ),
    **{
        f"the agent's container ends beside a sidecar: {of} replicas": scripted_job(
            Event(100, "kill_container", 0), low=of, high=of, nodes=of, containers=Containers.SIDECAR
        )
        for of in (1, 3)
    },
    **{
        f"an agent ends in a shell that stays: {of} replicas": scripted_job(
            Event(100, "end_agent", 0), low=of, high=of, nodes=of
        )
        for of in (1, 3)
    },
    **{
        f"the agent's container is started again: {of} replicas": scripted_job(
            Event(100, "kill_container", 0), low=of, high=of, nodes=of, containers=Containers.RESTARTED
        )
        for of in (1, 3)
    },
    "the agent's container is started again and again": scripted_job(
        *(Event(100 + 35 * n, "kill_container", n) for n in range(5)), containers=Containers.RESTARTED
    ),
    "the agent's container is started again and no watch tells of it": scripted_job(
        Event(99, "broken_watch", 0, 25), Event(100, "kill_container", 0), low=1, high=1, nodes=1, containers=Containers.RESTARTED
    ),
    "containers end beside sidecars after the job completed": scripted_job(containers=Containers.SIDECAR),
    "a worker asks for new pods": scripted_job(Event(100, "crash_worker", 7 * 3), make=Make.IN_PROCESS),
    "the quota refuses pods for a while": scripted_job(Event(0, "creates_refused", 0, 60), Event(150, "delete_pod", 1)),
    **{  # how many pods wait for their turn meanwhile is drawn
        f"a job is deleted while its pods wait for admission: {at:g}": scripted_job(
            Event(0, "slow_admission", 0, 60), Event(at, "delete_job")
        )
        for at in (1.0, 2.5, 6.0)
    },
    "a job is suspended and edited while its pods wait for admission": scripted_job(
        Event(0, "slow_admission", 0, 60), Event(2, "suspend", 0, 3), Event(9, "edit_template", 7),
    ),
    "operators begin again while answers to their reads get lost": scripted_job(
        Event(90, "api_loses_answers", 0, 90), *(Event(at, "operator_dies", 1, 2) for at in (95, 110, 125, 140)),
        Event(100, "delete_pod", 1),
    ),
    "answers get lost from the beginning": scripted_job(Event(0, "api_loses_answers", 0, 60), Event(20, "delete_pod", 1)),
    "pods may not be deleted for a while": scripted_job(Event(99, "deletes_refused", 0, 60), Event(100, "drain_node", 0)),
    **{
        f"an agent stands still while its job is deleted, the API server's clock {clock_s:+g} s": scripted_job(
            Event(100, "agent_hangs", 0, 100), Event(101, wish), api_clock_s=clock_s
        )
        for wish, clock_s in (("delete_job", 0.0), ("drain_and_delete_job", -3600.0), ("drain_and_delete_job", 3600.0))
    },
    **{
        f"a node is drained, the API server's clock {clock_s:+g} s": scripted_job(
            Event(100, "drain_node", 0), Event(200, "drain_node", 1), api_clock_s=clock_s
        )
        for clock_s in (-3600.0, -240.0, 240.0)
    },
    **{
        f"a deadline of a job, the API server's clock {clock_s:+g} s": scripted_job(
            Event(100, "crash_worker", 0), api_clock_s=clock_s, deadlines={"activeDeadlineSeconds": 900, "startupDeadlineSeconds": 60},
        )
        for clock_s in (-3600.0, 3600.0)
    },
    "a node is cordoned before its pod joins the training": scripted_job(
        Event(60, "add_node"), Event(64, "cordon_node", 2), Event(120, "add_node"), nodes=2
    ),
    "a pod is deleted in a drain that takes long": replace(
        scripted_job(Event(100, "scale", 1), Event(105, "delete_pod_soon", 0)), heeds_events=False
    ),
    "nor those of a deleted job": scripted_job(Event(99, "deletes_refused", 0, 60), Event(100, "delete_job")),
}  # fmt: skip

# A start and a growth take a while; in the others the last step is made while the workers are asked to stop.
ENDS_AFTER_S = {"a start": 8.0, "a growth": 8.0}

TURNS: dict[str, tuple[float, float, Schedule]] = {
    "a start": (0.0, 30.0, scripted_job()),
    "a growth": (59.9, 90.0, scripted_job(Event(60, "add_node"), Event(60, "add_node"), nodes=2)),
    "a drain": (99.9, 130.0, scripted_job(Event(100, "drain_node", 0))),
    "a crash": (99.9, 130.0, scripted_job(Event(100, "crash_worker", 0))),
    "a lost node": (99.9, 130.0, scripted_job(Event(100, "kill_node", 1))),
    "a full restart": (
        129.9, 160.0, scripted_job(Event(100, "crash_worker", 0), Event(130, "crash_worker", 1), numRestartBeforeFullJobRestart=1),
    ),
    "a suspension and the return": (99.9, 150.0, scripted_job(Event(100, "suspend", 0, 20))),
    "a deletion": (99.9, 110.0, scripted_job(Event(100, "delete_job"))),
    "a crash in a drain of shards": (
        99.9, 130.0, scripted_job(Event(100, "scale", 1), Event(100.4, "crash_worker", 0), make=Make.SHARDING, step=2),
    ),
}  # fmt: skip
"""Turns of a job's life, each with its beginning and end: between any two calls of that time the operator dies."""
ENDING_TURNS: dict[str, tuple[float, float, Schedule]] = {
    "the end": (99.9, 150.0, scripted_job(completes_at=100.0)),
    **{
        f"{turn}, and the training ends": (begin, end, replace(schedule, completes_at=begin + ENDS_AFTER_S.get(turn, 1.0)))
        for turn, (begin, end, schedule) in TURNS.items() if turn != "a deletion"
    },
}  # fmt: skip
"""The same, with the training's last step in the middle of each."""
