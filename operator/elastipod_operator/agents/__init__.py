"""Everything that talks to agents: the board of what they answered, and the commands they are given."""
