"""The fork server: a process that has imported torch already and forks workers when the agent asks for them.

`fork_server_manager`, `client` and `forked_worker` run in the agent; everything else runs in the server and in the workers forked from it.
The server may run under a different interpreter than the agent ($PYTHON_EXEC), so it uses only the standard library and this package. See
docs/design/warm-workers.md.
"""
