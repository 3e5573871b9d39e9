"""Proof that every sample was trained exactly once: the sample log, and the audit that reads it. Importing it loads no torch."""

from elastipod.audit.log_reader import read_logs as read_logs
from elastipod.audit.moments import optimizer_norm as optimizer_norm
from elastipod.audit.report import AuditReport as AuditReport
from elastipod.audit.report import audit as audit
from elastipod.audit.sample_log import SampleLog as SampleLog

__all__ = ["AuditReport", "SampleLog", "audit", "optimizer_norm", "read_logs"]
