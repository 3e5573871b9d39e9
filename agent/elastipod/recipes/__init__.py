"""Recipes in a cluster: the job and the ConfigMap of a recipe, and the configuration that a script reads at its present size."""
