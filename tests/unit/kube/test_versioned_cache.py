"""What is kept of a job's Workloads while watches, lists and answers come in any order."""

from __future__ import annotations

from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.kube.queue_bodies import workload_body

from elastipod_operator.kube.store import Store
from elastipod_operator.kube.versioned_cache import VersionedCache


def kept(**versions: int) -> VersionedCache[str]:
    found: VersionedCache[str] = VersionedCache()
    for uid, version in versions.items():
        assert found.put(uid, version, f"{uid}{version}")
    return found


def test_older_versions_never_replace_newer_ones() -> None:
    found = kept(a=5)
    assert not found.put("a", 5, "again")
    assert not found.put("a", 4, "old")
    assert found.items == ("a5",)
    assert found.put("a", 6, "a6")
    assert not found.put("a", 7, "a6"), "a newer version that says the same is nothing new"
    assert not found.put("a", 6, "old")


def test_what_is_gone_does_not_come_back_by_a_late_event() -> None:
    found = kept(a=5)
    assert found.drop("a", 7)
    assert not found.put("a", 6, "late")
    assert not found.drop("a", 7)
    assert found.items == ()
    found = kept(a=5)
    assert found.drop("a")
    assert not found.put("a", 5, "late")


def test_a_list_is_all_there_is_but_for_what_is_newer() -> None:
    found = kept(a=5, b=12, c=6)
    assert found.replace({"c": (8, "c8"), "d": (9, "d9")}, 10)
    assert sorted(found.items) == ["b12", "c8", "d9"]
    assert found.is_listed
    assert not found.put("a", 9, "late"), "it was not in the list, so it is gone"
    assert not found.put("e", 10, "late"), "nor was that"
    assert found.put("e", 11, "e11")
    assert not found.replace({"c": (8, "c8"), "d": (9, "d9")}, 10)
    assert sorted(found.items) == ["b12", "c8", "d9", "e11"], "they are newer than the list"


def test_clearing_forgets_all() -> None:
    found = kept(a=5)
    assert found.clear()
    assert not found.clear()
    assert found.items == ()


def test_what_comes_back_unchanged_after_its_kind_was_gone_is_there_again() -> None:
    found: VersionedCache[str] = VersionedCache()
    found.replace({"a": (5, "a5")}, 10)
    found.clear()
    assert found.replace({"a": (5, "a5")}, 20)
    assert found.items == ("a5",)
    found.clear()
    assert found.put("a", 5, "a5"), "a watch may tell of it before a list"


def test_what_is_gone_is_not_remembered_for_ever() -> None:
    found = kept(a=5, b=6)
    found.drop("a", 30)
    found.replace({}, 20)
    assert set(found._versions) == {"a"}, "it is newer than the list"
    assert not found.put("a", 25, "late")
    assert not found.put("b", 19, "late")
    found.replace({}, 40)
    assert found._versions == {}
    assert not found.put("a", 25, "late")


def known(*, listed: bool = True) -> Store:
    store = Store()
    store.put_job(job_body())
    if listed:
        store.replace_workloads(JOB_UID, (), 1)
    return store


def names(store: Store) -> list[str]:
    return [one.fact.name for one in store.jobs[JOB_UID].workloads.items]


def test_only_workloads_that_the_job_owns_are_its_own() -> None:
    store = known()
    assert store.put_workload(workload_body(ownerReferences=[])) is None
    assert store.put_workload(workload_body(namespace="elsewhere")) is None
    assert store.put_workload(workload_body(labels={"kueue.x-k8s.io/job-uid": "another"})) is None
    assert store.put_workload(workload_body(labels=None)) is None
    store.replace_workloads(JOB_UID, [workload_body(ownerReferences=[])], 50)
    assert names(store) == []
    assert store.put_workload(workload_body(version=60)) == JOB_UID
    assert store.put_workload(workload_body(version=60)) is None
    assert store.drop_workload(workload_body(version=61, ownerReferences=[])) is None
    assert store.drop_workload(workload_body(version=61)) == JOB_UID
    assert store.drop_workload(workload_body(version=61)) is None


def test_a_list_of_all_tells_whom_it_concerns() -> None:
    store = known()
    store.put_job(job_body(uid="other", name="other", namespace="next"))
    store.replace_workloads("other", (), 1)
    bodies = [workload_body(0), workload_body(1)]
    assert store.replace_all_workloads("", bodies, 50) == [JOB_UID]
    assert store.replace_all_workloads("", bodies, 51) == []
    assert store.replace_all_workloads("next", (), 52) == [], "other namespaces are not in that list"
    assert len(names(store)) == 2
    assert store.replace_all_workloads("team", bodies[:1], 53) == [JOB_UID]
    assert store.clear_workloads("next") == []
    assert store.clear_workloads("") == [JOB_UID]


def test_a_list_of_all_is_not_the_first_look_at_a_job() -> None:
    """The watch may have listed before the job had asked: only its own list says that it has no quota."""
    store = known(listed=False)
    assert store.replace_all_workloads("", (), 50) == []
    assert not store.jobs[JOB_UID].workloads.is_listed
    assert store.replace_workloads("unknown", (), 50) is False
