"""The Unix socket between the agent and the workers of its pod: what workers wait for, and what they report."""
