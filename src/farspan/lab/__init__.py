"""The lab: synthetic tasks that measure how position encodings generalize to longer inputs."""

from farspan.callable_packages import make_callable

make_callable(__name__)
