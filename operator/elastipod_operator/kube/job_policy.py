"""The policy for `core`: the settings of a job's spec with the defaults filled in."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from ..api import JobSpec
from ..api.models import Recovery, Switch
from ..core.model_groups import ModelGroups
from ..core.names import DEFAULT_AGENT_PORT
from ..core.sizes import SizeRequest, resolve
from ..core.snapshot import Policy, SpecLimits
from .containers import wanted_container
from .templates import check_worker_counts, named_agent_port, snooze_warnings, template_warnings, worker_count


def policy_of(spec: JobSpec) -> Policy:
    """Fill in the defaults and resolve the sizes. Raises SizeError."""
    elastic, run, ours = spec.elastic_policy, spec.run_policy, spec.elastipod
    container = wanted_container(ours.container or "", spec.replica_specs[0].template)
    sizes = resolve(
        SizeRequest(
            spec_replicas=tuple(s.replicas for s in spec.replica_specs),
            spec_max_replicas=tuple(s.max_replicas for s in spec.replica_specs),
            elastic=elastic is not None,
            min_replicas=elastic.min_replicas if elastic else None,
            max_replicas=elastic.max_replicas if elastic else None,
            step=elastic.replica_increment_step if elastic else None,
            values=elastic.replica_discrete_values if elastic else (),
            ceiling=spec.replicas,
            spares=sum(s.spares for s in spec.replica_specs),
            groups=ModelGroups(ours.parallelism, worker_count(spec, container)),
        )
    )
    ttl = run.ttl_seconds_after_finished or 0
    check_worker_counts(spec, container)
    port = named_agent_port(spec.replica_specs[0].template, container) or ours.agent_port or DEFAULT_AGENT_PORT
    restarts = run.restart_policy
    policy = Policy(
        sizes=sizes,
        specs=_shapes(spec, sizes.maximum),
        snooze=timedelta(seconds=restarts.scale_up_snooze_time_in_seconds),
        min_stable=timedelta(seconds=ours.min_stable_seconds),
        backoff_base=timedelta(seconds=ours.backoff.base_seconds),
        backoff_max=timedelta(seconds=ours.backoff.max_seconds),
        max_retries=run.job_max_retry_count,
        eval_period=timedelta(seconds=restarts.eval_period_seconds),
        restarts_before_full=restarts.num_restart_before_full_job_restart,
        max_full_restarts=restarts.max_full_job_restarts,
        max_offenders=restarts.max_num_repeat_offenders_to_avoid,
        payback=ours.payback is Switch.AUTO,
        growth=ours.growth,
        new_processes=ours.recovery is Recovery.PROCESS,
        expects_memory=ours.recovery is Recovery.IN_MEMORY,
        clean_pods=run.clean_pod_policy,
        ttl=_seconds(ttl) if ttl > 0 else None,
        ceiling=spec.replicas,
        is_ttl_zero=run.ttl_seconds_after_finished == 0,
        suspend=run.suspend,
        active_deadline=_seconds(run.active_deadline_seconds),
        startup_deadline=_seconds(run.startup_deadline_seconds),
        fault_deadline=_seconds(run.fault_deadline_seconds),
        agent_port=port,
        container=container,
        warnings=(*template_warnings(spec, container, port), *snooze_warnings(spec)),
        has_key=ours.authentication is Switch.AUTO,
    )
    if ours.graceful_shutdown_timeout_in_seconds is not None:
        policy = replace(policy, graceful_timeout=timedelta(seconds=ours.graceful_shutdown_timeout_in_seconds))
    if elastic is None:
        return policy
    grace_s = ours.graceful_shutdown_timeout_in_seconds
    if grace_s is None:
        grace_s = elastic.graceful_shutdown_timeout_in_seconds
    return replace(
        policy,
        scaling_timeout=timedelta(seconds=elastic.scaling_timeout_in_seconds),
        graceful_timeout=timedelta(seconds=grace_s),
        faulty_timeout=timedelta(seconds=elastic.faulty_scale_down_timeout_in_seconds),
    )


def _shapes(spec: JobSpec, maximum: int) -> tuple[SpecLimits, ...]:
    """Give the limit of each spec. If no spec names a maximum, the last spec takes what the policy allows."""
    limits = [max(s.replicas, s.max_replicas if s.max_replicas is not None else s.replicas) for s in spec.replica_specs]
    if all(s.max_replicas is None for s in spec.replica_specs):
        limits[-1] = max(limits[-1], maximum - sum(limits[:-1]))
    limits[0] = max(limits[0], 1)
    return tuple(SpecLimits(s.name, limit, s.spares) for s, limit in zip(spec.replica_specs, limits, strict=True))


def _seconds(value: int | None) -> timedelta | None:
    return timedelta(seconds=value) if value is not None else None
