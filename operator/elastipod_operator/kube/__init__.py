"""Everything that talks to the API server, and the translation of its objects into observed facts."""
