"""The seam: where every model's attention is scaled and seen. Nothing here knows an architecture."""
