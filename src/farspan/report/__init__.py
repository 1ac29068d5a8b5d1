"""Figures, tables and pages of results."""

from farspan.callable_packages import make_callable

make_callable(__name__)
