"""The optional admission webhook: warnings about a job at the moment it is applied. It never refuses one.

Each replica of the operator serves it, whether it leads or not. The API server ignores it when it does not answer, so the
same job must be accepted with and without it: what a spec may not contain is up to the rules of the CRD.

kopf's own admission server is not used: it runs in kopf's loop, which only the leader has; it makes a certificate once, with
packages that are no longer kept; and its configuration needs rights on all webhooks. aiohttp is there anyway.
"""
