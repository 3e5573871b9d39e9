"""The model of the API server: versions, watches that lag, lose and repeat, calls that fail before or after their effect."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from tests.sim.api_objects import ApiFailure, ApiObjects
from tests.sim.invariant_state import Violation
from tests.sim.objects import Body, SimPod

from elastipod_operator.core.names import LABEL_UID, pod_id_of

if TYPE_CHECKING:
    pass

CALL_LIMIT_S = 10.0
# From a cordon to a decision that knows of it.
CORDON_SEEN_S = 3.0


class ApiServer(ApiObjects):
    """The objects, and the operator's way to them. What becomes of pods is up to the rest of the cluster."""

    # -- calls of the operator; each is a script that takes time and may fail before or after its effect

    def call(self, effect: Callable[[], Any], *, writes: bool = True) -> Generator[float, None, Any]:
        """Carry out a call."""
        yield self.rng.uniform(0.002, 0.02)
        if self.goes_on("api_down"):
            raise self._failed("API: not there", 0, "connection refused")
        if self.goes_on("api_throttles") and self.rng.random() < 0.5:
            raise self._failed("API: 429", 429, "too many requests")
        if self.goes_on("api_fails") and self.rng.random() < 0.3:
            raise self._failed("API: 5xx", self.rng.choice((500, 503)), "the server cannot handle the request")
        if self.goes_on("busy_job") and writes and self.rng.random() < 0.5:
            self.edit_job(lambda spec: None)  # somebody else was quicker
        self.writes += writes
        answer = effect()
        lost = "API: answer lost" if self.goes_on("api_loses_answers") else "API: 5xx after the effect"
        if (self.goes_on("api_loses_answers") or self.goes_on("api_fails")) and self.rng.random() < 0.3:
            yield CALL_LIMIT_S / 10
            raise self._failed(f"{lost} of a {'write' if writes else 'read'}", 504, "the answer was lost")
        yield self.rng.uniform(0.002, 0.02)
        return answer

    def _failed(self, what: str, status: int, message: str) -> ApiFailure:
        self.met[what] += 1
        return ApiFailure(status, message)

    def patch_metadata(self, version: str, metadata: Mapping[str, Any]) -> Body:
        job = self._the_job()
        if str(job.version) != version:
            raise self._failed("API: 409 of the record", 409, "the object has been modified")
        if not metadata:
            return self.job_body()  # nothing changes, not even the version
        self.last_write = f"metadata {dict(metadata)}"
        annotations = {**job.annotations, **metadata.get("annotations", {})}
        # What was placed just now need not be known to the operator, and is as good as new.
        bound = {
            pod.uid for pod in self.pods.values() if pod.node is not None and self.kernel.now - pod.placed_at > 15.0
        }
        cordoned = {
            pod_id_of(pod.labels)
            for pod in self.pods.values()
            if self.is_seen and pod.node is not None and pod.node.cordoned
            and self.kernel.now - pod.node.cordoned_at > CORDON_SEEN_S
        }  # fmt: skip
        now = self.kernel.utc()
        self.checker.record_written(
            job.annotations, annotations, self.spec_in_force(), self.training, now, bound, cordoned
        )
        job.annotations = annotations
        if "finalizers" in metadata:
            job.finalizers = list(metadata["finalizers"])
        return self._job_changed()

    def apply_status(self, status: Body) -> Body:
        job = self._the_job()
        self.checker.status_written(status)
        self.last_write = f"status {[c for c in status['conditions'] if c not in job.status.get('conditions', [])]}"
        if job.status == status:
            return self.job_body()
        job.status = status
        return self._job_changed()

    def create_pod(self, manifest: Mapping[str, Any]) -> Body:
        name = manifest["metadata"]["name"]
        if self.goes_on("creates_refused"):
            raise self._failed("API: 403 of a pod", 403, "exceeded quota: team")
        if any(pod.name == name for pod in self.pods.values()):
            raise self._failed("API: 409 of a pod", 409, f"pods {name} already exists")
        self._uids += 1
        pod = self.new_pod(manifest, f"{self.prefix}pod-{self._uids}")
        if self.job is not None:
            images = {pod_id_of(p.labels): p.image for p in self.pods.values()}
            known_at = self.kernel.now - CORDON_SEEN_S
            announcing = [n for n in self.nodes.values() if n.health or n.is_gpu_sick]
            closed = {n.name: self.is_seen and bool(n.health) and n.closed_at < known_at for n in announcing}
            self.checker.pod_made(name, pod.avoids, pod.image, images, self.spec_in_force(), closed)
        self.pods[pod.uid] = pod
        if self.tenant is not None:
            self.tenant.server.watch.pod_made(self.tenant, pod)
        self.pod_changed(pod, "ADDED")
        self.wake_scheduler()
        if self.job is None:
            if self.is_fenced:
                raise Violation(f"pod {name} is made though its job is gone")
            self.kernel.after(2.0, lambda: self.drop(pod))
        return pod.body()

    def create_secret(self, manifest: Mapping[str, Any]) -> Body:
        """Take a Secret; it goes with the job."""
        name = manifest["metadata"]["name"]
        if name in self.secrets:
            raise self._failed("API: 409 of a Secret", 409, f'secrets "{name}" already exists')
        self.secrets[name] = dict(manifest["stringData"])
        return {}

    def admission(self) -> Generator[float, None, None]:
        """What a pod waits for before it is there: webhooks, which may be slow."""
        if self.goes_on("slow_admission"):
            self.met["API: slow admission"] += 1
            yield self.rng.uniform(0.5, 0.8 * CALL_LIMIT_S)

    def listed(self, path: str, query: Mapping[str, str]) -> Body:
        """List nodes, or the pods of a node that have not ended."""
        if path.endswith("nodes"):
            return {"items": [node.body() for node in self.nodes.values()]}
        name = query["fieldSelector"].partition(",")[0].removeprefix("spec.nodeName=")
        there = (p for p in self.pods.values() if p.node is not None and p.node.name == name and not p.ended)
        return {"items": [pod.body() for pod in there]}

    def list_pods(self) -> tuple[list[Body], int]:
        return [pod.body() for pod in self.pods.values() if pod.labels[LABEL_UID] == self.job_uid], self._versions

    @abstractmethod
    def is_gone(self, pod: SimPod) -> bool:
        """Whether nothing of a pod can run any more, or nobody can know (docs/design/operator.md)."""

    def delete_pod(self, name: str, uid: str, *, force: bool, grace_s: int | None = None) -> Body:
        pod = self.pods.get(uid)
        if pod is None or pod.name != name:
            raise ApiFailure(404, f"pods {name} not found")
        pod.is_unwanted = True
        if self.goes_on("deletes_refused"):
            raise self._failed("API: 403 of a deletion", 403, "pods is forbidden")
        if force and self.is_seen and not self.is_gone(pod):
            raise Violation(f"pod {name} is removed by force though its kubelet would end it")
        self.met["a kubelet is hurried"] += grace_s is not None
        self.delete(pod, force=force, grace_s=grace_s)
        return pod.body() if uid in self.pods else {"kind": "Status"}
