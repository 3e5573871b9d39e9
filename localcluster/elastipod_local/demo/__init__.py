"""`make demo`: an elastic job on a local cluster, shown while it runs, then checked."""
