"""Everything that talks to agents: the cache of their statuses, and the commands that are sent to them."""
