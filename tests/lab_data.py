"""A hash of the examples that models of the lab are trained and tested on."""

from __future__ import annotations

import hashlib

from farspan.lab.task_data import TaskData


def hash_of_data(data: TaskData) -> str:
    """The first digits of the SHA-256 of all splits: tokens, answers, lengths, and their types."""
    arrays = [
        part.numpy()
        for rows in (data.train, data.held_out, data.beyond)
        for part in (rows.ids, rows.start, rows.stop)
    ]
    arrays += [data.held_out_lengths, data.beyond_lengths]
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]
