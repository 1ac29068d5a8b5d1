"""Torture: kills, I/O faults, corruption, hostile files, fuzzing, many processes, memory.

    make torture                                   # ten minutes on two cores; rerun to resume
    make torture-full                              # the counts of docs/security.md
    PYTHONPATH=src:tests python -m torture --case kills/eval/3      # one case again

Each category has cases with a name. A case draws its random numbers from the seed and its name, so
that a failing case can be repeated.
"""
