"""The model of a cluster: what becomes of pods and nodes; scheduler, kubelets, machines that fail in many ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

from tests.sim.agents import SimAgent
from tests.sim.api_server import ApiServer
from tests.sim.authentication import agent_credentials, secret_of
from tests.sim.events import Make, Preparing
from tests.sim.fault_targets import AFTERMATH_S
from tests.sim.invariant_state import policy_in
from tests.sim.invariants import InvariantChecker
from tests.sim.kernel import Kernel, Script
from tests.sim.objects import Body, SimNode, SimPod
from tests.sim.training import Training

from elastipod_agent.authentication import admission_of

NOT_READY_AFTER_S = 45.0
EVICTION_AFTER_S = 300.0
# From a change of a node to a call for its pods that rests on it.
RETURN_SEEN_S = 3.0


class Cluster(ApiServer):
    """Everything outside of the operator."""

    def __init__(
        self,
        kernel: Kernel,
        rng: Random,
        checker: InvariantChecker,
        training: Training,
        spec: Body,
        number: int = 0,
    ) -> None:
        super().__init__(kernel, rng, checker, training, spec, number)
        self.make = Make.OURS
        self.agents_tell_of_others = True
        self.preparing: Preparing | None = None
        self.may_be_late = not training.heeds_events
        """Whether a pod may be killed at the end of its grace: scripts that ignore events, an operator that is away."""
        self.followers: list[Callable[[SimPod], None]] = []
        """Who hears of changes of agents: the operators that live."""
        self._agents: list[SimAgent] = []
        kernel.spawn(self._node_controller())

    def new_pod(self, manifest: Mapping[str, Any], uid: str) -> SimPod:
        """Make a pod of this cluster."""
        return SimPod(self, manifest, uid)

    # -- pods

    def pod_at(self, ip: str) -> SimPod | None:
        """Give the pod that has an address."""
        return next((pod for pod in self.pods.values() if pod.ip == ip), None)

    def delete(self, pod: SimPod, *, force: bool = False, disrupted: str = "", grace_s: float | None = None) -> None:
        """Delete a pod as kubectl, the eviction API or a controller does. A second time may shorten its grace."""
        if disrupted:
            pod.disrupted = disrupted
        if force or (pod.deleted_at is None and (pod.node is None or pod.ended)):
            self.drop(pod)
            return
        now = self.kernel.now
        if grace_s is not None and pod.deleted_at is not None and now + grace_s < pod.deleted_at + pod.grace_s:
            pod.deleted_at, pod.grace_s = now, grace_s
            self.pod_changed(pod)
        elif (
            pod.deleted_at is None
        ):  # a deletion that is under way is its kubelet's, also when its containers have ended
            pod.deleted_at, pod.grace_s = now, pod.grace_s if grace_s is None else grace_s
            self.pod_changed(pod)
            self.kernel.spawn(self._terminate(pod))

    def is_gone(self, pod: SimPod) -> bool:
        """As the base says."""
        node = pod.node
        if pod.ended or node is None or node.name not in self.nodes or node.out_of_service:
            return True
        if self.job is None:
            return True
        for_s = self.kernel.now - node.changed_at
        if node.ready:
            return for_s < RETURN_SEEN_S
        grace = policy_in(self.spec_in_force()).graceful_timeout.total_seconds()
        return for_s > grace - RETURN_SEEN_S

    def drop(self, pod: SimPod) -> None:
        """The object is gone; its kubelet, if it lives, ends the container."""
        if self.pods.pop(pod.uid, None) is None:
            return
        pod.version = self.bump()
        self.tell("pod", "DELETED", pod.body())
        self.kernel.spawn(self._reap(pod))
        self.wake_scheduler()

    def _reap(self, pod: SimPod) -> Script:
        yield self.rng.uniform(0.2, 1.5)
        yield from self._until_kubelet_acts(pod)
        if pod.agent is not None and pod.node is not None and pod.node.powered:
            pod.agent.die()

    def _terminate(self, pod: SimPod) -> Script:
        yield self.rng.uniform(0.05, 0.8)
        yield from self._until_kubelet_acts(pod)
        if pod.agent is not None and pod.agent.alive:
            pod.agent.sigterm()
        while pod.agent is not None and pod.agent.alive and self.kernel.now < (pod.deleted_at or 0.0) + pod.grace_s:
            yield 0.5
            yield from self._until_kubelet_acts(pod)
        if self.may_be_late and not pod.is_unwanted:
            self.checker.touched(pod.name, math.inf)
            if pod.agent is not None:
                self.training.touched(pod.agent, "killed at the end of its grace")
        if pod.agent is not None and pod.agent.alive:
            pod.agent.die()
            pod.exit_code = 137
        if pod.has_sidecar:
            yield self.rng.uniform(0.2, 5.0)  # it ends with its pod, and only then
            pod.has_sidecar = False
        yield from self._write_end(pod)
        yield self.rng.uniform(0.05, 1.0)
        yield from self._until_kubelet_acts(pod)
        self.drop(pod)

    def report_end(self, pod: SimPod) -> Script:
        """A container ended: its kubelet notices that after a while."""
        yield self.rng.uniform(0.1, 1.0)
        yield from self._until_kubelet_acts(pod)
        yield from self._write_end(pod)
        self.wake_scheduler()

    def _write_end(self, pod: SimPod) -> Script:
        """The kubelet reports an end in two writes: first that the container has ended, later the phase of the pod."""
        if pod.ended or pod.uid not in self.pods:
            return
        if not pod.is_end_reported and pod.phase == "Running":
            pod.is_end_reported = True
            self.pod_changed(pod)
            yield self.rng.uniform(0.1, 2.0)
            yield from self._until_kubelet_acts(pod)
        if pod.has_sidecar:
            self.met["a sidecar outlives the agent's container"] += 1
        elif pod.is_restarted and pod.exit_code and pod.deleted_at is None:
            yield from self._restart(pod)
        elif pod.uid in self.pods and not pod.ended:
            pod.phase = "Succeeded" if pod.exit_code == 0 else "Failed"
            self.pod_changed(pod)

    def _restart(self, pod: SimPod) -> Script:
        """The kubelet starts the agent's container again, the later the more often it did."""
        yield self.rng.uniform(0.1, 2.0) + 10.0 * min(pod.restarts, 3)
        yield from self._until_kubelet_acts(pod)
        if pod.uid not in self.pods or pod.deleted_at is not None or pod.ended:
            return
        pod.restarts += 1
        yield from self._await_secret(pod)
        if pod.uid not in self.pods or pod.deleted_at is not None:
            return
        pod.exit_code, pod.is_end_reported = None, False
        self.met["a container is started again"] += 1
        yield from self._begin_agent(pod)

    def _until_kubelet_acts(self, pod: SimPod) -> Script:
        node = pod.node
        while node is not None and not self._responsive(node) and node.name in self.nodes:
            yield 1.0

    # -- scheduler and kubelets

    def wake_scheduler(self) -> None:
        """Something changed that may let a pod run."""
        self.kernel.after(self.rng.uniform(0.1, 0.4), self._schedule)

    def _schedule(self) -> None:
        taken = {pod.node.name for pod in self.pods.values() if pod.node is not None and not pod.ended}
        closed = {n.name for n in self.nodes.values() if n.cordoned or n.tainted or n.notice}
        free = [n for n in self.nodes.values() if n.ready and n.name not in closed | taken]
        waiting = [pod for pod in self.pods.values() if pod.node is None and pod.deleted_at is None]
        for pod in waiting:
            fitting = (n for n in free if n.name not in pod.avoids and n.name in (pod.only_on or {n.name}))
            node = next(fitting, None)
            if node is None:
                continue
            free.remove(node)
            pod.node, pod.placed_at = node, self.kernel.now
            unseen_until = max(node.hidden_until, node.deaf_until, node.mute_until)
            if unseen_until > self.kernel.now:
                self.checker.hidden(pod.name, unseen_until + AFTERMATH_S)
            self.pod_changed(pod)
            self.kernel.spawn(self._start_container(pod))

    def _start_container(self, pod: SimPod) -> Script:
        yield self.rng.uniform(0.5, 4.0)
        yield from self._until_kubelet_acts(pod)
        node = pod.node
        if node is None or pod.uid not in self.pods or pod.deleted_at is not None or node.name not in self.nodes:
            return
        yield from self._await_secret(pod)
        if pod.ended or pod.uid not in self.pods or pod.deleted_at is not None:
            return
        pod.phase, pod.ip = "Running", f"10.0.{self.number}.{pod.uid.rpartition('-')[2]}"
        yield from self._begin_agent(pod)

    def _await_secret(self, pod: SimPod) -> Script:
        """The kubelet tries again and again while the Secret of a container is not there, and says so."""
        secret = secret_of(pod.containers[0])
        while secret and secret not in self.secrets and pod.uid in self.pods and pod.deleted_at is None:
            self.met["a container waits for its Secret"] += 1
            if not pod.lacks_secret:
                pod.lacks_secret = True
                self.pod_changed(pod)
            yield 10.0
        pod.lacks_secret = False

    def _begin_agent(self, pod: SimPod) -> Script:
        """A container with an agent begins."""
        secret = secret_of(pod.containers[0])
        assert pod.node is not None
        pod.agent = SimAgent(self.kernel, self.rng, self.training, pod, self.make)
        pod.agent.tells_of_others = self.agents_tell_of_others
        pod.agent.preparing = self.preparing
        if secret in self.secrets and self.make is not Make.FOREIGN:
            pod.agent.admit = admission_of(agent_credentials(pod, self.secrets[secret]))
        self._agents.append(pod.agent)
        self.pod_changed(pod)
        yield self.rng.uniform(0.05, 0.5)
        if self.kernel.now < pod.node.sick_until:
            self.checker.touched(pod.name, self.kernel.now + 120.0)
            pod.container_exits(1)
        else:
            pod.agent.begin()

    # -- nodes

    def add_node(self) -> SimNode:
        node = SimNode(f"{self.prefix}node-{self.bump()}")
        self.nodes[node.name] = node
        self.node_changed(node, "ADDED")
        return node

    def node_changed(self, node: SimNode, change: str = "MODIFIED") -> None:
        """Tell of a node, and let the scheduler look."""
        node.version = self.bump()
        self.tell("node", change, node.body())
        self.wake_scheduler()

    def delete_node(self, node: SimNode) -> None:
        """The machine and its object are gone; the garbage collector removes its pods after a while."""
        self.kill_node(node)
        del self.nodes[node.name]
        self.node_changed(node, "DELETED")
        for pod in self.on_node(node):
            self.kernel.after(self.rng.uniform(20.0, 60.0), partial(self.drop, pod))

    def kill_node(self, node: SimNode) -> None:
        """Power loss: everything there stops at once and says nothing."""
        node.powered = False
        for agent in self._agents:
            if agent.pod.node is node:
                agent.vanish()

    def return_node(self, node: SimNode) -> None:
        """The machine boots again: its containers are gone."""
        if node.powered:
            return
        node.powered = True
        for pod in list(self.pods.values()):
            if pod.node is node:
                self._lose_container(pod)

    def _lose_container(self, pod: SimPod) -> None:
        if pod.agent is not None:
            pod.agent.die()
        if pod.exit_code is None:
            pod.exit_code = 137
        self.kernel.spawn(self.report_end(pod))

    def agents(self) -> list[SimAgent]:
        """Give the agents that run."""
        return [agent for agent in self._agents if agent.alive]

    def on_node(self, node: SimNode) -> list[SimPod]:
        """Give the pods of a node."""
        return [pod for pod in self.pods.values() if pod.node is node]

    def _responsive(self, node: SimNode) -> bool:
        now = self.kernel.now
        return node.powered and node.frozen_until <= now and node.cut_until <= now

    def usable(self, node: SimNode) -> bool:
        """Whether a pod could run there now and for good."""
        return self._responsive(node) and node.ready and not (node.cordoned or node.tainted or node.health)

    def _node_controller(self) -> Script:
        while True:
            yield 5.0
            for node in list(self.nodes.values()):
                self._judge(node)

    def _judge(self, node: SimNode) -> None:
        if self._responsive(node):
            node.silent_since = None
            if not node.ready:
                node.ready, node.changed_at = True, self.kernel.now
                self.node_changed(node)
            return
        node.silent_since = self.kernel.now if node.silent_since is None else node.silent_since
        silent_s = self.kernel.now - node.silent_since
        if node.ready and silent_s >= NOT_READY_AFTER_S:
            node.ready, node.changed_at = False, self.kernel.now
            self.node_changed(node)
        if silent_s >= EVICTION_AFTER_S:
            for pod in self.on_node(node):
                if pod.deleted_at is None and not pod.ended:
                    self.delete(pod, disrupted="DeletionByTaintManager")
