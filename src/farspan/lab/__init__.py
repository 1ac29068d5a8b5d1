"""The lab: synthetic tasks that measure how position encodings generalize to longer inputs."""
