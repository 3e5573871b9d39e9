"""What the watches have shown: newer wins, whatever the order of arrival."""

from __future__ import annotations

import pytest
from tests.unit.kube.bodies import JOB_UID, job_body, node_body, pod_body

from elastipod_operator.kube.store import Store


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
    assert pods(store) == {"job-workers-0-0": "Running"}


def test_a_pod_that_comes_before_its_job_is_kept_for_it() -> None:
    store = Store()
    assert store.put_pod(pod_body()) is None
    store.put_job(job_body())
    assert pods(store) == {"job-workers-0-0": "Running"}


def test_an_early_pod_that_goes_again_is_forgotten() -> None:
    store = Store()
    store.put_pod(pod_body())
    store.drop_pod(pod_body())
    store.put_job(job_body())
    assert pods(store) == {}


def test_only_changes_that_matter_wake_the_job(store: Store) -> None:
    assert store.put_pod(pod_body(version=20)) == JOB_UID
    assert store.put_pod(pod_body(version=21)) is None
    assert store.put_pod(pod_body(version=22, status={"phase": "Failed"})) == JOB_UID


def test_an_old_event_does_not_undo_what_a_write_has_shown(store: Store) -> None:
    store.put_pod(pod_body(version=25, status={"phase": "Failed"}))
    assert store.put_pod(pod_body(version=24)) is None
    assert pods(store) == {"job-workers-0-0": "Failed"}


def test_pods_of_others_are_not_kept(store: Store) -> None:
    assert store.put_pod(pod_body(labels={})) is None
    assert store.drop_pod(pod_body(labels={})) is None
    assert pods(store) == {}


def test_a_full_list_drops_what_is_gone_but_not_what_is_newer(store: Store) -> None:
    store.put_pod(pod_body(0, version=20))
    store.put_pod(pod_body(1, version=21))
    store.put_pod(pod_body(2, version=40))
    store.replace_pods(JOB_UID, [pod_body(1, version=21)], listed_at=30)
    assert sorted(pods(store)) == ["job-workers-1-0", "job-workers-2-0"]
    assert store.jobs[JOB_UID].listed


def test_a_list_for_a_job_that_went_meanwhile_changes_nothing(store: Store) -> None:
    store.drop_job(JOB_UID)
    store.replace_pods(JOB_UID, [pod_body()], listed_at=30)
    assert store.jobs == {}


def test_a_change_of_a_node_names_the_jobs_with_pods_there(store: Store) -> None:
    assert store.put_node(node_body()) == []
    store.put_pod(pod_body())
    assert store.put_node(node_body()) == []
    assert store.put_node(node_body(ready="Unknown")) == [JOB_UID]
    assert store.drop_node("node-1") == [JOB_UID]
    assert store.nodes == {}


def test_a_job_of_the_same_name_made_anew_starts_from_nothing(store: Store) -> None:
    store.put_pod(pod_body())
    store.drop_job(JOB_UID)
    store.put_job(job_body(version=30))
    assert pods(store) == {}
