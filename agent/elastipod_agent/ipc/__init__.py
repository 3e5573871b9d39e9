"""The Unix socket between the agent and the workers of its pod: levels that workers wait for, and what they report."""
