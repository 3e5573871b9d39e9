"""What an event of a watch wakes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from elastipod_operator.core.names import ANNOTATION_CONTROLLER
from elastipod_operator.kube.scope import Scope
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
    store, reconciler = mock.Mock(jobs={}), mock.Mock()
    body: dict[str, Any] = {"metadata": {"uid": "u", "annotations": {ANNOTATION_CONTROLLER: "theirs"}}}
    WatchEvents(store, reconciler, Scope("mine").holds).job(body, is_gone=False)
    assert (store.put_job.mock_calls, reconciler.wake.mock_calls) == ([], [])
    assert reconciler.forget.mock_calls == [mock.call("u")]


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_event_of_a_node_wakes_every_job_on_it(is_gone: bool) -> None:
    store, reconciler = mock.Mock(), mock.Mock()
    store.put_node.return_value = store.drop_node.return_value = ["one", "two"]
    WatchEvents(store, reconciler).node({"metadata": {"name": "n"}}, is_gone=is_gone)
    assert reconciler.wake.mock_calls == [mock.call("one"), mock.call("two")]
    assert store.drop_node.mock_calls == ([mock.call("n")] if is_gone else [])
