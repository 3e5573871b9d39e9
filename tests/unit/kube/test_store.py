"""What the watches have shown: newer wins, whatever the order of arrival."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.counted_calls import Word, calls_in
from tests.unit.kube.bodies import JOB_UID, container, job_body, node_body, pod_body

from elastipod_operator.kube.store import Store, version_of


@pytest.fixture
def store() -> Store:
    """A store that knows one job."""
    store = Store()
    assert store.put_job(job_body(version=10))
    return store


def pods(store: Store) -> dict[str, str]:
    return {pod.name: pod.phase for pod in store.jobs[JOB_UID].pods.values()}


def test_a_newer_job_replaces_an_older_one_and_never_the_other_way(store: Store) -> None:
    assert store.put_job(job_body({"replicas": 2}, version=12))
    assert not store.put_job(job_body(version=11))
    assert not store.put_job(job_body(version=12))
    policy = store.jobs[JOB_UID].fact.policy
    assert policy is not None
    assert policy.sizes.maximum == 2


def test_a_new_version_of_a_job_keeps_its_pods(store: Store) -> None:
    store.put_pod(pod_body())
    store.put_job(job_body(version=12))
    assert pods(store) == {"job-workers-0": "Running"}


def test_a_pod_that_comes_before_its_job_is_left_to_the_first_list() -> None:
    store = Store()
    assert store.put_pod(pod_body(version=20)) is None
    store.put_job(job_body())
    assert pods(store) == {}
    store.replace_pods(JOB_UID, [pod_body(version=20)], version=30)
    assert pods(store) == {"job-workers-0": "Running"}


def test_trouble_is_known_since_it_was_first_seen_and_anew_when_it_is_another() -> None:
    began = now = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    store = Store(lambda: now)
    store.put_job(job_body(version=10))

    def since(version: int, reason: str) -> timedelta | None:
        nonlocal now
        now += timedelta(seconds=10)
        state: dict[str, Any] = {"waiting": {"reason": reason}} if reason else {"running": {}}
        store.put_pod(pod_body(version=version, status={"containerStatuses": [container(**state)]}))
        (pod,) = store.jobs[JOB_UID].pods.values()
        return pod.problem_since - began if pod.problem_since is not None else None

    told = [since(20, "ErrImagePull"), since(21, "ImagePullBackOff"), since(22, "CreateContainerError"), since(23, "")]
    assert told == [timedelta(seconds=10), timedelta(seconds=10), timedelta(seconds=30), None]
    assert since(24, "ErrImagePull") == timedelta(seconds=50)


@pytest.mark.parametrize(
    "meta",
    [
        pytest.param({"ownerReferences": []}, id="nobody's"),
        pytest.param({"ownerReferences": [{"uid": JOB_UID}]}, id="not controlled by the job"),
        pytest.param({"ownerReferences": [{"uid": "other", "controller": True}]}, id="another job's"),
        pytest.param({"namespace": "elsewhere"}, id="in another namespace"),
    ],
)
def test_labels_alone_make_no_pod_of_the_job(store: Store, meta: dict[str, Any]) -> None:
    assert store.put_pod(pod_body(**meta)) is None
    assert store.drop_pod(pod_body(**meta)) is None
    assert pods(store) == {}


def test_a_late_event_does_not_bring_back_a_pod_that_is_gone(store: Store) -> None:
    store.put_pod(pod_body(version=20))
    store.drop_pod(pod_body(version=25))
    assert store.put_pod(pod_body(version=24)) is None
    store.put_pod(pod_body(1, version=26))
    store.replace_pods(JOB_UID, [], version=30)
    assert store.put_pod(pod_body(1, version=29)) is None
    assert pods(store) == {}


def test_only_changes_that_matter_wake_the_job(store: Store) -> None:
    assert store.put_pod(pod_body(version=20)) == JOB_UID
    assert store.put_pod(pod_body(version=21)) is None
    assert store.put_pod(pod_body(version=22, status={"phase": "Failed"})) == JOB_UID


def test_an_old_event_does_not_undo_what_a_write_has_shown(store: Store) -> None:
    store.put_pod(pod_body(version=25, status={"phase": "Failed"}))
    assert store.put_pod(pod_body(version=24)) is None
    assert pods(store) == {"job-workers-0": "Failed"}


def test_pods_of_others_are_not_kept(store: Store) -> None:
    assert store.put_pod(pod_body(labels={})) is None
    assert store.drop_pod(pod_body(labels={})) is None
    assert pods(store) == {}


def test_nothing_is_kept_of_a_job_that_is_gone(store: Store) -> None:
    store.put_pod(pod_body())
    store.drop_job(JOB_UID)
    store.put_pod(pod_body(version=99))
    store.drop_pod(pod_body(version=100))
    assert store.jobs == {}
    store.put_job(job_body(version=10))
    assert store.jobs[JOB_UID].pod_versions == {}


def test_a_full_list_drops_what_is_gone_but_not_what_is_newer(store: Store) -> None:
    store.put_pod(pod_body(0, version=20))
    store.put_pod(pod_body(1, version=21))
    store.put_pod(pod_body(2, version=40))
    store.replace_pods(JOB_UID, [pod_body(1, version=21)], version=30)
    assert sorted(pods(store)) == ["job-workers-1", "job-workers-2"]
    assert store.jobs[JOB_UID].listed
    assert store.jobs[JOB_UID].pods_listed_at is not None


def test_a_list_for_a_job_that_went_meanwhile_changes_nothing(store: Store) -> None:
    store.drop_job(JOB_UID)
    store.replace_pods(JOB_UID, [pod_body()], version=30)
    assert store.jobs == {}


def test_a_change_of_a_node_names_the_jobs_with_pods_there(store: Store) -> None:
    assert store.put_node(node_body()) == []
    store.put_pod(pod_body())
    assert store.put_node(node_body()) == []
    assert store.put_node(node_body(ready="Unknown")) == [JOB_UID]
    assert store.drop_node("node-1") == [JOB_UID]
    assert store.nodes == {}


def test_nodes_that_new_pods_keep_away_from(store: Store) -> None:
    """A pod that avoids a node waits for news of it, wherever the pod is."""
    store.put_pod(pod_body(node="", annotations={"elastipod.io/avoids": "node-3,node-9"}))
    sick = {"sagemaker.amazonaws.com/node-health-status": "Unschedulable"}
    assert store.put_node(node_body("node-9", labels=sick)) == [JOB_UID]
    assert store.put_node(node_body("node-8", labels=sick)) == []
    assert store.closed_nodes() == dict.fromkeys(
        ("node-9", "node-8"), "label sagemaker.amazonaws.com/node-health-status=Unschedulable"
    )
    assert store.put_node(node_body("node-9")) == [JOB_UID]
    store.drop_node("node-8")
    assert store.closed_nodes() == {}


def test_a_job_of_the_same_name_made_anew_starts_from_nothing(store: Store) -> None:
    store.put_pod(pod_body())
    store.drop_job(JOB_UID)
    store.put_job(job_body(version=30))
    assert pods(store) == {}


def test_of_disruptions_only_taints_can_be_tolerated(store: Store) -> None:
    expelling = node_body(taints=[{"key": "maintenance", "value": "x", "effect": "NoExecute"}])
    announced = node_body("node-2", taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}])
    bodies = pod_body(0), pod_body(1, node="node-2")
    for body, node in zip(bodies, (expelling, announced), strict=True):
        store.put_pod(body)
        store.put_node(node)
    assert disruptions(store) == {
        "node-1": "taint maintenance:NoExecute",
        "node-2": "taint karpenter.sh/disrupted:NoSchedule",
    }
    for body in bodies:
        body["metadata"]["resourceVersion"] = "40"
        body["spec"]["tolerations"] = [{"operator": "Exists"}]
        store.put_pod(body)
    assert disruptions(store) == {"node-1": "", "node-2": "taint karpenter.sh/disrupted:NoSchedule"}


def disruptions(store: Store) -> dict[str, str]:
    """Give what is announced of the nodes of the job's pods, by name."""
    return {name: fact.disruption for name, fact in store.nodes_of(store.jobs[JOB_UID]).items()}


TAINT = {"key": "pool", "value": "gpu", "effect": "NoExecute"}


@pytest.mark.parametrize(
    ("toleration", "may_stay"),
    [
        pytest.param({"key": "pool", "value": "gpu", "effect": "NoExecute"}, True, id="the same"),
        pytest.param({"key": "pool", "operator": "Exists"}, True, id="any value"),
        pytest.param({"operator": "Exists"}, True, id="everything"),
        pytest.param({"key": "pool", "value": "cpu"}, False, id="another value"),
        pytest.param({"key": "pool", "operator": "Exists", "effect": "NoSchedule"}, False, id="another effect"),
        pytest.param({"key": "pool", "operator": "Exists", "tolerationSeconds": 300}, False, id="for a while only"),
    ],
)
def test_a_pod_that_tolerates_a_taint_stays(store: Store, toleration: dict[str, Any], may_stay: bool) -> None:
    """The pod's own tolerations count: its template need not have those that come from a Kueue flavor."""
    body = pod_body()
    body["spec"]["tolerations"] = [{"key": "other", "operator": "Exists"}, toleration]
    store.put_pod(body)
    store.put_node(node_body(taints=[TAINT]))
    assert disruptions(store) == {"node-1": "" if may_stay else "taint pool:NoExecute"}


def test_twice_the_tainted_nodes_cost_twice_the_work() -> None:
    def cost(size: int) -> int:
        store = Store()
        store.put_job(job_body())
        for n in range(size):
            store.put_node(node_body(f"node-{n}", taints=[TAINT]))
            body = pod_body(n, node=f"node-{n}")
            body["spec"]["tolerations"] = [{"operator": "Exists"}]
            store.put_pod(body)
        known = store.jobs[JOB_UID]
        for pod in list(known.pods.values()):
            known.pods[pod.uid] = replace(pod, node=Word(pod.node))
        assert set(disruptions(store).values()) == {""}
        return calls_in(lambda: store.nodes_of(known))

    assert cost(200) < 2.2 * cost(100)


def test_a_node_is_left_when_one_of_its_pods_must_leave(store: Store) -> None:
    every_way = [{"operator": "Exists"}], [{"key": "pool", "operator": "Exists"}]
    for ordinal, tolerations in enumerate(every_way):
        body = pod_body(ordinal)
        body["spec"]["tolerations"] = tolerations
        store.put_pod(body)
    store.put_node(node_body(taints=[TAINT]))
    assert disruptions(store) == {"node-1": ""}
    store.put_pod(pod_body(2))
    assert disruptions(store) == {"node-1": "taint pool:NoExecute"}
    store.put_pod(pod_body(2, version=30, status={"phase": "Failed"}))
    assert disruptions(store) == {"node-1": ""}, "one that has ended stays nowhere"


def test_a_further_taint_wakes_the_jobs_on_the_node() -> None:
    """They may tolerate the first one only."""
    store = Store()
    store.put_job(job_body())
    store.put_pod(pod_body())
    store.put_node(node_body(taints=[TAINT]))
    more = {"key": "maintenance", "effect": "NoExecute"}
    assert store.put_node(node_body(taints=[TAINT, more])) == [JOB_UID]
    assert store.put_node(node_body(taints=[TAINT, more])) == []
    assert store.put_node(node_body(taints=[TAINT])) == [JOB_UID]


def test_of_pods_that_are_long_gone_nothing_is_remembered(store: Store) -> None:
    for number in range(50):
        body = pod_body(version=20 + number, name=f"job-workers-0-{number}", uid=f"uid-{number}")
        store.put_pod(body)
        store.drop_pod(body)
    store.replace_pods(JOB_UID, [pod_body(version=100)], version=110)
    late = pod_body(version=105, name="late", uid="uid-late")
    assert set(store.jobs[JOB_UID].pod_versions) == {"uid-job-workers-0"}
    assert store.put_pod(late) is None, "the list keeps out what is older"
    newer = pod_body(version=120, name="newer", uid="uid-newer")
    store.put_pod(newer)
    store.drop_pod(newer)
    store.replace_pods(JOB_UID, [pod_body(version=100)], version=115)
    assert store.put_pod(newer) is None, "a list from before does not bring it back"


@pytest.mark.parametrize("nonsense", ["x", {}, {"metadata": None}, {"metadata": {"uid": 7, "name": [], "labels": "x"}}])
def test_an_object_without_an_identity_is_left_out(nonsense: Any) -> None:
    store = Store()
    store.put_job(job_body())
    assert store.put_job(nonsense) is False
    assert store.put_pod(nonsense) is None
    assert store.drop_pod(nonsense) is None
    assert store.put_node(nonsense) == []
    assert store.put_workload(nonsense) is None
    store.replace_pods(JOB_UID, [nonsense, pod_body()], 30)
    assert len(store.jobs[JOB_UID].pods) == 1


def test_a_pod_whose_creation_time_cannot_be_read_was_made_when_it_was_first_seen() -> None:
    now = datetime(2026, 3, 1, 12, 5, tzinfo=UTC)
    store = Store(lambda: now)
    store.put_job(job_body())
    store.put_pod(pod_body(creationTimestamp="yesterday"))
    assert [pod.created_at for pod in store.jobs[JOB_UID].pods.values()] == [now]


@pytest.mark.parametrize(
    ("version", "number"),
    [("7", 7), ("9" * 19, int("9" * 19)), ("9" * 20, 0), ("", 0), ("v7", 0), ("-7", 0), (None, 0)],
)
def test_versions_are_numbers_and_what_is_none_is_older_than_all(version: object, number: int) -> None:
    assert version_of({"metadata": {"resourceVersion": version}}) == number
