"""The attention seam: scales and observers for the attention of any model family."""
