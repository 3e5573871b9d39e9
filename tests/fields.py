"""Each field of the resource and the tests that prove what it does; `python -m tests.fields` writes docs/design/fields.md.

tests/unit/core/test_spec_fields.py holds this against the models, so that a new field without a proof fails, and against the
tests themselves, so that a test that was renamed is missed.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from elastipod_operator.api.base import Model
from elastipod_operator.api.models import HyperPodPyTorchJob

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs/design/fields.md"
CORE, KUBE, AGENT = "tests/unit/core/", "tests/unit/kube/", "tests/unit/agent/"

# A name is a test: file, function. Where several are named, each proves one side of the field.
SPEC: dict[str, tuple[str, ...]] = {
    "nprocPerNode": (KUBE + "test_pods.py::test_environment_comes_before_the_users_own",
                     KUBE + "test_applied.py::test_two_templates_start_as_many_workers"),
    "replicas": (CORE + "test_plan_planned_changes.py::test_a_lower_ceiling_drains_to_it",
                 "tests/api/test_kubectl.py::test_scale_sets_the_ceiling"),
    "replicaSpecs[].name": (KUBE + "test_pods.py::test_identity", KUBE + "test_applied.py::test_other_groups_of_pods_are_refused"),
    "replicaSpecs[].replicas": (CORE + "test_plan_start_and_growth.py::test_the_start",),
    "replicaSpecs[].maxReplicas": (KUBE + "test_observed_job.py::test_how_many_pods_each_spec_may_hold",
                                   CORE + "test_pod_supply.py::test_of_each_spec_no_more_train_than_it_may"),
    "replicaSpecs[].spares": (CORE + "test_growth.py::test_a_spare_takes_a_lost_rank_without_waiting",
                              CORE + "test_growth.py::test_spares_are_made_beside_the_others"),
    "replicaSpecs[].template": (KUBE + "test_pods.py::test_the_rest_of_the_template_is_taken_as_it_is",
                                CORE + "test_plan_edits_and_records.py::test_it_acts_when_the_job_is_resumed"),
    "elasticPolicy.minReplicas": (CORE + "test_sizes.py::test_allowed_sizes", CORE + "test_plan_start_and_growth.py::test_the_start"),
    "elasticPolicy.maxReplicas": (CORE + "test_sizes.py::test_allowed_sizes", CORE + "test_plan_start_and_growth.py::test_growth"),
    "elasticPolicy.replicaIncrementStep": (CORE + "test_sizes.py::test_allowed_sizes",
        CORE + "test_partial_gangs.py::test_an_incomplete_increment_is_given_back_while_training_goes_on"),
    "elasticPolicy.replicaDiscreteValues": (CORE + "test_sizes.py::test_allowed_sizes",
                                            CORE + "test_plan_start_and_growth.py::test_sizes_between_the_allowed_ones_are_not_taken"),
    "elasticPolicy.scalingTimeoutInSeconds": (CORE + "test_plan_start_and_growth.py::test_the_start",
                                              CORE + "test_plan_start_and_growth.py::test_growth"),
    "elasticPolicy.gracefulShutdownTimeoutInSeconds": (CORE + "test_plan_drains.py::test_the_stop_of_a_member",
                                                       KUBE + "test_pods.py::test_the_time_to_end"),
    "elasticPolicy.faultyScaleDownTimeoutInSeconds": (CORE + "test_transition.py::test_who_is_gathered",),
    "runPolicy.activeDeadlineSeconds": (CORE + "test_plan_ends_and_deadlines.py::test_deadlines",),
    "runPolicy.startupDeadlineSeconds": (CORE + "test_plan_ends_and_deadlines.py::test_deadlines",),
    "runPolicy.faultDeadlineSeconds": (CORE + "test_plan_ends_and_deadlines.py::test_deadlines",),
    "runPolicy.cleanPodPolicy": (CORE + "test_plan_ends_and_deadlines.py::test_what_becomes_of_a_pod_at_the_end",),
    "runPolicy.jobMaxRetryCount": (CORE + "test_escalation_budgets.py::test_what_ends_a_job",),
    "runPolicy.suspend": (CORE + "test_plan_planned_changes.py::test_suspend_drains_then_removes_all_pods_then_does_nothing",
                          CORE + "test_plan_planned_changes.py::test_a_resumed_job_wants_its_size_back_and_no_deadline_ran_meanwhile"),
    "runPolicy.ttlSecondsAfterFinished": (CORE + "test_plan_ends_and_deadlines.py::test_the_time_to_live_after_the_end",
                                          KUBE + "test_observed_job.py::test_no_time_to_live_means_never"),
    "runPolicy.workloadMode": (CORE + "test_spec_fields.py::test_what_is_accepted_and_changes_nothing",),
    "runPolicy.logMonitoringConfiguration[].name": (AGENT + "test_log_rules.py::test_a_rule_with_every_field",
                                                    "tests/e2e/test_log_rules.py::test_a_rule_that_is_broken_is_a_fault_in_every_pod"),
    "runPolicy.logMonitoringConfiguration[].logPattern": (AGENT + "test_log_lines.py::test_no_line_that_matches_is_left_out",),
    "runPolicy.logMonitoringConfiguration[].expectedStartCutOffInSeconds": (
        AGENT + "test_log_rule_tracker.py::test_no_first_match_in_time_is_a_hang_from_the_deadline_on",),
    "runPolicy.logMonitoringConfiguration[].expectedRecurringFrequencyInSeconds": (
        AGENT + "test_log_rule_tracker.py::test_no_further_match_in_time_is_a_hang_that_shows_the_last_line",),
    "runPolicy.logMonitoringConfiguration[].stopPattern": (
        AGENT + "test_log_rule_tracker.py::test_a_stop_pattern_ends_the_watching_after_what_came_before",),
    "runPolicy.logMonitoringConfiguration[].metricThreshold": (AGENT + "test_log_rule_tracker.py::test_operators_say_what_is_bad",),
    "runPolicy.logMonitoringConfiguration[].operator": (AGENT + "test_log_rule_tracker.py::test_operators_say_what_is_bad",),
    "runPolicy.logMonitoringConfiguration[].metricEvaluationDataPoints": (
        AGENT + "test_log_rule_tracker.py::test_slow_takes_so_many_bad_numbers_in_a_row_over_batches",),
    "runPolicy.logMonitoringConfiguration[].faultOnMatch": (AGENT + "test_log_rule_tracker.py::test_a_match_can_be_the_fault",),
    "runPolicy.restartPolicy.evalPeriodSeconds": (CORE + "test_escalation.py::test_a_window_ends",),
    "runPolicy.restartPolicy.numRestartBeforeFullJobRestart": (CORE + "test_escalation_budgets.py::test_a_full_restart",),
    "runPolicy.restartPolicy.maxFullJobRestarts": (CORE + "test_escalation_budgets.py::test_what_ends_a_job",),
    "runPolicy.restartPolicy.maxNumRepeatOffendersToAvoid": (
        CORE + "test_avoided_nodes_limits.py::test_the_latest_offenders_are_avoided_and_named_in_order",
                                          KUBE + "test_pods.py::test_nodes_are_avoided"),
    "runPolicy.restartPolicy.scaleUpSnoozeTimeInSeconds": (CORE + "test_plan_start_and_growth.py::test_growth",),
    "elastipod.minStableSeconds": (CORE + "test_plan_start_and_growth.py::test_growth",),
    "elastipod.backoff.baseSeconds": (CORE + "test_growth.py::test_growth_after_failures",
                                      CORE + "test_pod_supply.py::test_a_pod_that_ended_by_itself_is_made_anew_later"),
    "elastipod.backoff.maxSeconds": (CORE + "test_growth.py::test_growth_after_failures",),
    "elastipod.growth": (CORE + "test_requested_pods.py::test_one_increment_is_requested_at_a_time",
                         "tests/api/test_growth_and_autoscaler.py::test_spare_capacity_only_never_makes_an_autoscaler_add_a_node"),
    "elastipod.payback": (CORE + "test_growth.py::test_how_long_growth_is_put_off",
                          CORE + "test_growth.py::test_growth_that_does_not_pay_is_not_asked_for"),
    "elastipod.recovery": (CORE + "test_plan_strange_agents.py::test_how_workers_come_back",
                           CORE + "test_spec_fields.py::test_what_does_not_do_what_it_seems_to_is_said"),
    "elastipod.authentication": (KUBE + "test_job_keys.py::test_who_gets_none",),
    "elastipod.gracefulShutdownTimeoutInSeconds": (KUBE + "test_observed_job.py::test_the_time_of_a_drain",),
    "elastipod.agentPort": (KUBE + "test_observed_job.py::test_the_port_of_the_agent",),
    "elastipod.container": (KUBE + "test_pods.py::test_the_agent_may_be_in_another_container_than_the_first",),
    "elastipod.parallelism": (CORE + "test_model_groups.py::test_only_sizes_of_whole_model_groups_are_left",
                              CORE + "test_model_groups.py::test_the_sizes_are_those_whose_groups_are_whole_and_whose_batch_exists"),
}  # fmt: skip

STATUS: dict[str, tuple[str, ...]] = {
    "startTime": (CORE + "test_status_fields.py::test_the_whole_status",),
    "completionTime": (CORE + "test_status_fields.py::test_the_whole_status",),
    "conditions": (
        CORE + "conditions/test_report.py::test_conditions_come_in_their_order",
        CORE + "conditions/test_state.py::test_the_state_is_the_last_condition",
    ),
    "restartCount": (CORE + "test_status_fields.py::test_the_whole_status",),
    "restartStatus": (CORE + "test_escalation.py::test_the_status_tells_of_window_and_culprits",),
    "masterAddr": (CORE + "test_status_fields.py::test_the_whole_status",),
    "masterPort": (CORE + "test_record_codec.py::test_the_port_of_a_generation",),
    "latestFaultyPodInstanceList": (CORE + "test_escalation.py::test_the_status_tells_of_window_and_culprits",),
    "elasticScalingStatus": (
        CORE + "test_status_fields.py::test_target_replicas",
        CORE + "test_status_fields.py::test_pods_are_scaled_when_those_of_the_target_exist",
        CORE + "test_status_fields.py::test_a_shrink_after_a_fault_is_told_from_others",
    ),
    "elasticWorkloadRef": (
        CORE + "test_status_fields.py::test_target_replicas",
        "tests/api/test_kubectl.py::test_the_scale_subresource_tells_how_many_train",
    ),
}

UNWRITTEN = ("jobPods", "managerPods", "podManagerStatuses", "podSets", "podSetInfos")
"""Fields of the status that are known to clients, and that this operator does not write: it has no such objects."""


def leaves(model: type[Model], prefix: str = "") -> Iterator[str]:
    """Give the paths of all fields of a model that are no models themselves, as they stand in the object."""
    for name, info in model.model_fields.items():
        path = prefix + str(info.alias or name)
        inner, is_list = _inner(info.annotation)
        if inner is None:
            yield path
        else:
            yield from leaves(inner, f"{path}[]." if is_list else f"{path}.")


def _inner(annotation: Any) -> tuple[type[Model] | None, bool]:
    """Give the model within an annotation, and whether there is a list of it."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return (annotation, False) if issubclass(annotation, Model) else (None, False)
    for part in get_args(annotation):
        found, is_list = _inner(part)
        if found is not None:
            return found, is_list or getattr(annotation, "__origin__", None) is tuple
    return None, False


def status_names() -> list[str]:
    """Give the fields of the status."""
    model = HyperPodPyTorchJob.model_fields["status"].annotation
    assert isinstance(model, type)
    assert issubclass(model, Model)
    return [str(info.alias or name) for name, info in model.model_fields.items()]


def document() -> str:
    """Give the table as a document."""
    lines = [
        "<!-- Generated from tests/fields.py by `python -m tests.fields`; edits are lost. -->",
        "# What each field does, and the tests that prove it",
        "",
        "The meaning of a field is in [the API reference](../api-reference.md). Beside these tests the simulator plays random jobs with",
        "nearly all of the fields; `tests/sim/required_coverage.py` names what shows that a field decided something there. That each is",
        "read as what it says: test_each_wish_is_taken_for_what_it_is_and_for_nothing_else (tests/unit/core/test_spec_fields.py).",
        "",
        "| spec | proven by |",
        "|---|---|",
        *(f"| `{field}` | {_shown(tests)} |" for field, tests in SPEC.items()),
        "",
        "| status | proven by |",
        "|---|---|",
        *(f"| `{field}` | {_shown(tests)} |" for field, tests in STATUS.items()),
        "",
        f"Never written, since this operator has no such objects: {', '.join(f'`{name}`' for name in UNWRITTEN)}.",
    ]
    return "\n".join(lines) + "\n"


def _shown(tests: tuple[str, ...]) -> str:
    return "<br>".join(f"{function} ({path})" for path, _, function in (test.partition("::") for test in tests))


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
