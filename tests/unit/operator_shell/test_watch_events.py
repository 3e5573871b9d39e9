"""What an event of a watch wakes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from tests.unit.kube.bodies import JOB_UID, job_body

from elastipod_operator.core.names import ANNOTATION_CONTROLLER
from elastipod_operator.job_intake import JobIntake
from elastipod_operator.kube.scope import Scope
from elastipod_operator.kube.store import Store
from elastipod_operator.watch_events import WatchEvents

POD: dict[str, Any] = {"metadata": {"name": "job-0", "namespace": "ns", "uid": "pod-uid"}}


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("job", ["the job", None])
def test_an_event_of_a_pod_wakes_its_job_alone(job: str | None, is_gone: bool) -> None:
    store, reconciler = mock.Mock(), mock.Mock()
    store.put_pod.return_value = store.drop_pod.return_value = job
    WatchEvents(store, reconciler).pod(POD, is_gone=is_gone)
    assert reconciler.wake.mock_calls == ([mock.call(job)] if job else [])
    assert reconciler.forget_pod.mock_calls == ([mock.call("pod-uid")] if is_gone else [])
    assert (store.drop_pod if is_gone else store.put_pod).mock_calls == [mock.call(POD)]


def test_a_job_of_another_controller_is_left_alone() -> None:
    """Also one that was named for it just now."""
    store, reconciler = Store(), mock.Mock()
    reconciler.jobs = JobIntake(store, reconciler.forget, Scope("mine").holds, reconciler.hand_over)
    body = job_body(version=10, annotations={ANNOTATION_CONTROLLER: "theirs"})
    WatchEvents(store, reconciler).job(body, is_gone=False)
    assert (store.jobs, reconciler.mock_calls) == ({}, [])
    store.put_job(job_body(version=9))
    known = store.jobs[JOB_UID].fact
    WatchEvents(store, reconciler).job(body, is_gone=False)
    assert reconciler.mock_calls == [mock.call.forget(JOB_UID), mock.call.hand_over(known, body)]


def test_a_late_watch_does_not_bring_back_a_job_that_was_let_go() -> None:
    store, reconciler = Store(), mock.Mock()
    jobs = JobIntake(store, store.drop_job, Scope("mine").holds, reconciler.hand_over)
    jobs.take(job_body(version=10))
    jobs.take(job_body(version=12, annotations={ANNOTATION_CONTROLLER: "theirs"}))
    assert not jobs.take(job_body(version=11))
    assert store.jobs == {}
    assert jobs.take(job_body(version=13)), "it has come back"
    assert [*store.jobs] == [JOB_UID]
    assert reconciler.hand_over.call_count == 1


def test_what_an_answer_shows_of_before_a_job_came_back_is_no_news() -> None:
    store, reconciler = Store(), mock.Mock()
    jobs = JobIntake(store, reconciler.forget, Scope("mine").holds, reconciler.hand_over)
    assert jobs.take(job_body(version=11))
    assert not jobs.take(job_body(version=10, annotations={ANNOTATION_CONTROLLER: "theirs"}))
    assert reconciler.mock_calls == []


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_event_of_a_node_wakes_every_job_on_it(is_gone: bool) -> None:
    store, reconciler = mock.Mock(), mock.Mock()
    store.put_node.return_value = store.drop_node.return_value = ["one", "two"]
    WatchEvents(store, reconciler).node({"metadata": {"name": "n"}}, is_gone=is_gone)
    assert reconciler.wake.mock_calls == [mock.call("one"), mock.call("two")]
    assert store.drop_node.mock_calls == ([mock.call("n")] if is_gone else [])
